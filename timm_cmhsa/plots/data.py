"""What pictures of attention are made of: models of checkpoints, images, and what the heads do with these."""
import math
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import timm
import torch
from torch import nn

from ..analysis import AttentionMaps, HeadStatistics, attention_layers, attention_maps, head_statistics
from ..files import CheckpointError, read_checkpoint
from ..images import data_config, image_dataset, read_images
from ..rel_pos import QuadraticRelPos

CENTER = (0.5, 0.5)
MAX_WEIGHTS = 2 ** 26  # of all layers and some images at once: 256 MB in float32
NUM_NOISE_IMAGES = 8

PathLike = Union[str, Path]


class PlotError(ValueError):
    """What was asked for cannot be drawn; the message says why and what to do, in one line."""


class Images(NamedTuple):
    """Input of a model, and what it is called."""
    pixels: torch.Tensor  # (B, C, H, W), normalized
    names: List[str]  # of each
    title: str  # of all, such as '100 images'


class QueryAttention(NamedTuple):
    """Where the heads of a layer look from one patch."""
    weights: torch.Tensor  # (num_heads, h, w): to every patch
    zero_key: Optional[torch.Tensor]  # (num_heads,): to the zero key, where the layer has one
    query: Tuple[int, int]  # row and column of the patch


class Gaussians(NamedTuple):
    """The heads of a layer with a quadratic encoding. Offsets are key minus query, in patches, (row, column)."""
    center: torch.Tensor  # (num_heads, 2)
    inv_covariance: torch.Tensor  # (num_heads, 2, 2)
    grid_size: Tuple[int, int]  # (h, w)


class Snapshot(NamedTuple):
    """What is drawn of one checkpoint: everything by name of the layer."""
    title: str
    attention: Dict[str, QueryAttention]
    statistics: Dict[str, List[HeadStatistics]]
    gaussians: Dict[str, Gaussians]


def load_model(
        path: PathLike,
        model: Optional[str] = None,
        model_kwargs: Optional[Mapping[str, Any]] = None,
) -> nn.Module:
    """Build the model of a checkpoint and load its weights.

    Args:
        path: A checkpoint of timm's `train.py`, a state dict (pickled or safetensors), or a `local-dir:` folder.
        model: timm's name of the model, where the checkpoint does not tell.
        model_kwargs: Further arguments of `timm.create_model`, likewise.

    Raises:
        CheckpointError: If the checkpoint cannot be read or is not of this model, or holds NaN or Inf.
    """
    checkpoint = read_checkpoint(Path(str(path).removeprefix('local-dir:')))
    name = model or checkpoint.architecture
    if name is None:
        raise CheckpointError(f'{path} does not tell which model it is of: give its name (model, --model NAME).')
    if not timm.is_model(name):
        raise CheckpointError(f'{path}: {name!r} is no model that timm knows: give its name (model, --model NAME).')
    if not timm.model_entrypoint(name).__module__.startswith('timm_cmhsa.'):
        raise CheckpointError(
            f'{path} is of {name}, whose convolutions only Python can replace: make the model, attend_convs, '
            'load_state_dict, and plot_attention(model, ...).')
    if not all(tensor.isfinite().all() for tensor in checkpoint.state_dict.values()):
        raise CheckpointError(f'{path} holds NaN or Inf: the training diverged, take an earlier checkpoint.')
    args = {**checkpoint.model_args, **(model_kwargs or {})}
    classifier = checkpoint.state_dict.get(f"{timm.get_pretrained_cfg_value(name, 'classifier')}.weight")
    args['num_classes'] = 0 if classifier is None else len(classifier)
    try:
        loaded = timm.create_model(name, **args, pretrained_cfg_overlay=checkpoint.pretrained_cfg)
        loaded.load_state_dict(checkpoint.state_dict)
    except (RuntimeError, TypeError, ValueError, AssertionError, KeyError, AttributeError) as e:
        reason = ' '.join(str(e).split())
        reason = reason if len(reason) < 300 else f'{reason[:300]}...'
        raise CheckpointError(f'{path} cannot be loaded as {name} with {args}: {reason}') from e
    return loaded.eval()


def open_models(
        source: Union[nn.Module, PathLike, Sequence[PathLike]],
        model: Optional[str],
        model_kwargs: Optional[Mapping[str, Any]],
) -> Iterator[Tuple[str, nn.Module]]:
    """One model after the other, with a title each.

    Args:
        source: A model, a checkpoint, or several.
        model, model_kwargs: See `load_model`.

    Raises:
        CheckpointError: If a checkpoint cannot be read or is not of this model.
        PlotError: If there is none, or one is given twice.
    """
    if isinstance(source, nn.Module):
        yield getattr(source, 'pretrained_cfg', {}).get('architecture') or type(source).__name__, source
        return
    paths = [source] if isinstance(source, (str, Path)) else list(source)
    if not paths:
        raise PlotError('no checkpoint is given.')
    for path, title in zip(paths, checkpoint_titles(paths)):
        yield title, load_model(path, model, model_kwargs)


def in_order_of_training(paths: List[Path]) -> List[Path]:
    """Sort checkpoints of `train.py` by their epochs: a shell puts checkpoint-10 before checkpoint-9."""
    matches = [re.fullmatch(r'checkpoint-(\d+)\.pth\.tar', path.name) for path in paths]
    by_epoch = {int(match[1]): path for match, path in zip(matches, paths) if match}
    if len(by_epoch) < len(paths):
        return paths
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def checkpoint_titles(paths: Sequence[PathLike]) -> List[str]:
    """Short names of checkpoints: that of the file or folder, or all of the path where these are the same."""
    short = [Path(path).name.split('.')[0] for path in paths]
    titles = short if len(set(short)) == len(short) else [str(path) for path in paths]
    if len(set(titles)) < len(titles):
        raise PlotError('a checkpoint is given twice: give checkpoints of different times of the training.')
    return titles


def choose_images(images: Optional[Union[torch.Tensor, PathLike]], model: nn.Module, num_images: int) -> Images:
    """Input of a model: that which is given, or from a folder, or else random noise."""
    if images is None:
        chosen = noise_images(model)
    elif isinstance(images, torch.Tensor):
        chosen = Images(images, [f'image {i + 1}' for i in range(len(images))], _count(len(images)))
    else:
        chosen = load_images(Path(images), model, num_images)
    if chosen.pixels.ndim != 4:
        raise PlotError(f'pictures are of images, (B, C, H, W), not of input of shape {tuple(chosen.pixels.shape)}.')
    return chosen._replace(pixels=chosen.pixels.to(next(model.parameters())))  # its device and type


def load_images(folder: Path, model: nn.Module, num_images: int) -> Images:
    """At most so many images of a folder, evenly spaced in the order of their names, so that classes are mixed.

    Raises:
        CheckpointError: If there are none, or the model takes other inputs.
    """
    dataset = image_dataset(folder, model)
    indices = evenly_spaced(len(dataset), num_images)
    pixels = read_images(dataset, folder, indices)
    return Images(pixels, [dataset.filename(i) for i in indices], _count(len(indices)))


def evenly_spaced(total: int, count: int) -> List[int]:
    """So many numbers below the total, or all."""
    count = min(count, total)
    return [i * total // count for i in range(count)]


def _count(num_images: int) -> str:
    return f'{num_images} image{"s" * (num_images > 1)}'


def noise_images(model: nn.Module) -> Images:
    """Random noise, where there is nothing better to look at."""
    size = (NUM_NOISE_IMAGES, *data_config(model)['input_size'])
    pixels = torch.randn(size, generator=torch.Generator().manual_seed(0))
    names = [f'noise {i + 1}' for i in range(NUM_NOISE_IMAGES)]
    return Images(pixels, names, f'{NUM_NOISE_IMAGES} images of random noise')


def num_weights(layer: Any) -> int:
    """Attention weights of a layer for one image, without the zero key."""
    return layer.num_heads * math.prod(layer.grid_size) ** 2


def take_snapshot(
        title: str,
        model: nn.Module,
        images: torch.Tensor,
        query: Tuple[float, float] = CENTER,
        layer: Optional[str] = None,
) -> Snapshot:
    """See what is drawn of a model.

    Args:
        title: Name of the checkpoint.
        model: A model with attention layers of this package.
        images: Shape (B, C, H, W).
        query: Row and column of the query, from 0 to 1, relative to the size of the image.
        layer: Name of a layer: of no other anything is drawn.

    Raises:
        PlotError: If the model has no attention, or not this layer, or the query is outside the image.
    """
    drawn = layers_to_draw(model)
    if layer is not None and layer not in drawn:
        raise PlotError(f'there is no attention layer {layer!r}: choose one of {", ".join(drawn)}.')
    maps, statistics = mean_attention(model, images)
    encodings = gaussians(model)
    names = [name for name in maps if name in drawn] if layer is None else [layer]
    return Snapshot(
        title,
        {name: attention_from(maps[name], query) for name in names},
        {name: statistics[name] for name in names},
        {name: encodings[name] for name in names if name in encodings},
    )


def layers_to_draw(model: nn.Module) -> Dict[str, Any]:
    """Attention layers that have heads, by name.

    Raises:
        PlotError: If the model has none.
    """
    try:
        layers = {name: layer for name, layer in attention_layers(model).items() if layer.num_heads}
    except ValueError as e:
        raise PlotError(str(e)) from e
    if not layers:
        raise PlotError('no attention layer of the model has a head to look at.')
    return layers


def mean_attention(
        model: nn.Module,
        images: torch.Tensor,
) -> Tuple[Dict[str, AttentionMaps], Dict[str, List[HeadStatistics]]]:
    """Attention of every layer, averaged over images, and the statistics of the heads.

    Few images at a time, so that memory does not grow with their number.

    Args:
        model: A model with attention layers of this package.
        images: Shape (B, C, H, W).

    Returns:
        Mean maps, as of one image, and statistics, both by name of the layer.
    """
    batch_size = max(MAX_WEIGHTS // sum(num_weights(layer) for layer in layers_to_draw(model).values()), 1)
    sums: Dict[str, AttentionMaps] = {}
    entropies: Dict[str, torch.Tensor] = {}
    for batch in images.split(batch_size):
        share = len(batch) / len(images)
        for name, maps in attention_maps(model, batch).items():
            mean = _mean_over_images(maps, share)
            sums[name] = _add(sums[name], mean) if name in sums else mean
            # entropy is not linear: that of the mean would be another
            entropy = share * torch.tensor([head.entropy for head in head_statistics(maps)])
            entropies[name] = entropies.get(name, 0) + entropy
    statistics = {
        name: [head._replace(entropy=entropy) for head, entropy in zip(head_statistics(maps), entropies[name].tolist())]
        for name, maps in sums.items()}
    return sums, statistics


def _mean_over_images(maps: AttentionMaps, factor: float) -> AttentionMaps:
    zero_key = maps.zero_key
    return maps._replace(
        weights=factor * maps.weights.mean(dim=0, keepdim=True),
        zero_key=None if zero_key is None else factor * zero_key.mean(dim=0, keepdim=True))


def _add(one: AttentionMaps, other: AttentionMaps) -> AttentionMaps:
    zero_key = None if one.zero_key is None or other.zero_key is None else one.zero_key + other.zero_key
    return one._replace(weights=one.weights + other.weights, zero_key=zero_key)


def patch_at(query: Tuple[float, float], grid_size: Tuple[int, int]) -> Tuple[int, int]:
    """Row and column of the patch at a place of the image, given from 0 to 1."""
    if not all(0 <= place <= 1 for place in query):
        raise PlotError(f'the query {query[0]:g} {query[1]:g} is outside the image: row and column go from 0 to 1.')
    row, col = (min(int(place * size), size - 1) for place, size in zip(query, grid_size))
    return row, col


def attention_from(maps: AttentionMaps, query: Tuple[float, float] = CENTER) -> QueryAttention:
    """Where the heads look from one patch, averaged over the images.

    Args:
        maps: Of one layer.
        query: Row and column, from 0 to 1, relative to the size of the image: the grids of layers can differ.

    Raises:
        PlotError: If the query is outside the image.
    """
    row, col = patch_at(query, maps.grid_size)
    index = row * maps.grid_size[1] + col
    weights = maps.weights[:, :, index].mean(dim=0).unflatten(-1, maps.grid_size).cpu()
    zero_key = None if maps.zero_key is None else maps.zero_key[:, :, index].mean(dim=0).cpu()
    return QueryAttention(weights, zero_key, (row, col))


@torch.no_grad()
def gaussians(model: nn.Module) -> Dict[str, Gaussians]:
    """The Gaussians of the layers that have a quadratic encoding, by name of the layer."""
    return {
        name: _gaussians_of(layer.rel_pos) for name, layer in layers_to_draw(model).items()
        if isinstance(layer.rel_pos, QuadraticRelPos)}


def _gaussians_of(rel_pos: QuadraticRelPos) -> Gaussians:
    center, inv_covariance = rel_pos.center.float().cpu().clone(), rel_pos.inv_covariance().float().cpu()
    return Gaussians(center, inv_covariance, rel_pos.grid_size)


def check_same_model(one: Snapshot, other: Snapshot) -> None:
    """Refuse movement between what are no checkpoints of one model.

    Raises:
        PlotError: If the layers, their heads or their grids differ.
    """
    shapes = [{name: tuple(layer.weights.shape) for name, layer in snapshot.attention.items()}
              for snapshot in (one, other)]
    if shapes[0] != shapes[1] or one.gaussians.keys() != other.gaussians.keys():
        raise PlotError(
            f'{one.title} and {other.title} are not of one model: their layers, heads or grids differ; draw them one '
            'by one.')
