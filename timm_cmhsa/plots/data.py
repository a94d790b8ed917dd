"""What pictures of attention are made of: the models of checkpoints, and what their heads do."""
import functools
import math
import re
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import timm
import torch
from timm.utils import unwrap_model
from torch import nn

from ..analysis import AttentionMaps, HeadStatistics, attention_layers, attention_maps, head_statistics
from ..encodings import QuadraticRelPos
from ..files import CheckpointError, read_checkpoint
from ..hub.download import PREFIXES, download
from ..messages import printable, shorten
from ..untrusted import build_model, checked_args

BATCH_WEIGHTS = 2 ** 26  # of all layers and some images at once: 256 MB in float32
MAX_WEIGHTS = 2 ** 30  # of all layers and one image: 4 GB
PathLike = Union[str, Path]


class PlotError(ValueError):
    """Something cannot be drawn. The message says why and what to do, in one line."""


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


def load_model(
        path: PathLike,
        model: Optional[str] = None,
        model_kwargs: Optional[Mapping[str, Any]] = None,
) -> nn.Module:
    """Build the model of a checkpoint and load its weights.

    Args:
        path: A checkpoint of timm's `train.py`, a state dict (pickled or safetensors), a `local-dir:` folder, or a
            model on the Hugging Face Hub, `hf-hub:USER/NAME`.
        model: timm's name of the model, where the checkpoint does not tell.
        model_kwargs: Further arguments of `timm.create_model`, likewise.

    Raises:
        CheckpointError: If the checkpoint cannot be read, is not of this model, or holds NaN or Inf.
        HubError: If it cannot be downloaded.
    """
    source = str(path)
    checkpoint = read_checkpoint(
        download(source) if source.startswith(PREFIXES) else Path(source.removeprefix('local-dir:')))
    name = model or checkpoint.architecture
    if name is None:
        raise CheckpointError(f'{path} does not tell which model it is of: give its name, model=NAME.')
    if name not in timm.list_models():
        raise CheckpointError(f'{path}: {shorten(name)} is no model that timm knows: give its name, model=NAME.')
    if not timm.model_entrypoint(name).__module__.startswith('timm_cmhsa.'):
        raise CheckpointError(
            f'{path} is of {name}, whose convolutions only Python can replace: make the model, attend_convs, '
            'load_state_dict, and plot_attention(model, ...).')
    if not all(tensor.isfinite().all() for tensor in checkpoint.state_dict.values()):
        raise CheckpointError(f'{path} holds NaN or Inf: the training diverged, take an earlier checkpoint.')
    args = {**checkpoint.model_args, **(model_kwargs or {})}
    try:
        checked_args(args)
        classifier = checkpoint.state_dict.get(f"{timm.get_pretrained_cfg_value(name, 'classifier')}.weight")
        args['num_classes'] = 0 if classifier is None else len(classifier)
        built = build_model(name, args, checkpoint.pretrained_cfg, checkpoint.state_dict)
    except Exception as e:  # timm's layers raise many kinds
        reason = printable(textwrap.shorten(str(e), 300, placeholder='...'))
        raise CheckpointError(f'{path} cannot be loaded as {name} with {shorten(args)}: {reason}') from e
    # soft attention is in float32 at least, whatever the rest is
    return built.to(functools.reduce(torch.promote_types, {parameter.dtype for parameter in built.parameters()}))


def open_models(
        source: Union[nn.Module, PathLike, Sequence[PathLike]],
        model: Optional[str],
        model_kwargs: Optional[Mapping[str, Any]],
) -> Iterator[Tuple[str, nn.Module]]:
    """Yield the title and the model of every checkpoint, one after the other, or those of a model itself."""
    if isinstance(source, nn.Module):
        unwrapped = unwrap_model(source)
        yield model_name(unwrapped), unwrapped
        return
    paths = [source] if isinstance(source, (str, Path)) else list(source)
    if not paths:
        raise PlotError('no checkpoint is given.')
    titles = [printable(Path(path).name.split('.')[0]) for path in paths]
    if len(set(titles)) < len(paths):
        titles = [printable(str(path)) for path in paths]
    if len(set(titles)) < len(paths):
        raise PlotError('a checkpoint is given twice: give checkpoints of different times of the training.')
    for title, path in zip(titles, paths):
        yield title, load_model(path, model, model_kwargs)


def model_name(model: nn.Module) -> str:
    return getattr(model, 'pretrained_cfg', {}).get('architecture') or type(model).__name__


def in_order_of_training(paths: List[Path]) -> List[Path]:
    """Sort checkpoints of `train.py` by their epochs: a shell puts checkpoint-10 before checkpoint-9."""
    matches = [re.fullmatch(r'checkpoint-(\d+)\.pth\.tar', path.name) for path in paths]
    by_epoch = {int(match[1]): path for match, path in zip(matches, paths) if match}
    if len(by_epoch) < len(paths):
        return paths
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def layers_to_draw(model: nn.Module, layer: Optional[str] = None) -> Dict[str, Any]:
    """Return the attention layers that have heads, by name, or only the one of this name."""
    try:
        layers = {name: module for name, module in attention_layers(model).items() if module.num_heads}
    except ValueError as e:
        raise PlotError(str(e)) from e
    if not layers:
        raise PlotError('no attention layer of the model has a head to look at.')
    if layer is not None and layer not in layers:
        raise PlotError(f'there is no attention layer {layer!r}: choose one of {", ".join(layers)}.')
    return layers if layer is None else {layer: layers[layer]}


def num_weights(layer: Any) -> int:
    return layer.num_heads * math.prod(layer.grid_size) ** 2  # for one image, without the zero key


def mean_attention(
        model: nn.Module,
        images: torch.Tensor,
) -> Tuple[Dict[str, AttentionMaps], Dict[str, List[HeadStatistics]]]:
    """Return the attention of every layer that has heads, averaged over images (B, C, H, W), and measures of it."""
    layers = layers_to_draw(model)
    total = sum(num_weights(layer) for layer in layers.values())
    if total > MAX_WEIGHTS:
        raise PlotError(
            f'the attention of one image takes {total / 2 ** 28:.0f} GB, more than {MAX_WEIGHTS >> 28} GB: '
            'take a smaller input.')
    batch_size = max(BATCH_WEIGHTS // total, 1)
    weights: Dict[str, Any] = defaultdict(float)
    zero_keys: Dict[str, Any] = defaultdict(float)
    entropies: Dict[str, Any] = defaultdict(float)
    for batch in images.split(batch_size):
        share = len(batch) / len(images)
        for name, maps in finite_maps(model, batch).items():
            if name not in layers:
                continue
            weights[name] += share * maps.weights.mean(dim=0, keepdim=True)
            if maps.zero_key is not None:
                zero_keys[name] += share * maps.zero_key.mean(dim=0, keepdim=True)
            # The entropy of the mean is not the mean of the entropies.
            entropies[name] += share * torch.tensor([head.entropy for head in head_statistics(maps)])
    means = {name: AttentionMaps(mean, zero_keys.get(name), layers[name].grid_size) for name, mean in weights.items()}
    statistics = {
        name: [head._replace(entropy=entropy) for head, entropy in zip(head_statistics(maps), entropies[name].tolist())]
        for name, maps in means.items()}
    return means, statistics


def finite_maps(model: nn.Module, images: torch.Tensor) -> Dict[str, AttentionMaps]:
    """Return the attention of every layer, and refuse what cannot be drawn."""
    maps = attention_maps(model, images)
    for name, layer in maps.items():
        if not layer.weights.isfinite().all():
            raise PlotError(f'the attention of {name} is NaN: the training diverged, or half precision overflowed.')
    return maps


def check_query(query: Tuple[float, float]) -> None:
    if not all(0 <= place <= 1 for place in query):
        raise PlotError(f'the query {query[0]:g} {query[1]:g} is outside the image: row and column go from 0 to 1.')


def attention_from(maps: AttentionMaps, query: Tuple[float, float] = (0.5, 0.5)) -> QueryAttention:
    """Return where the heads look from one patch, averaged over the images.

    The query is a row and column, from 0 to 1, relative to the size of the image: the grids of layers can differ.
    """
    check_query(query)
    row, col = (min(int(place * size), size - 1) for place, size in zip(query, maps.grid_size))
    index = row * maps.grid_size[1] + col
    weights = maps.weights[:, :, index].mean(dim=0).unflatten(-1, maps.grid_size).cpu()
    zero_key = None if maps.zero_key is None else maps.zero_key[:, :, index].mean(dim=0).cpu()
    return QueryAttention(weights, zero_key, (row, col))


@torch.no_grad()
def gaussians(model: nn.Module) -> Dict[str, Gaussians]:
    """Return the Gaussians of the layers that have a quadratic encoding, by name of the layer."""
    encodings = {name: layer.rel_pos for name, layer in layers_to_draw(model).items()}
    return {
        name: Gaussians(rel_pos.center.float().cpu().clone(), rel_pos.inv_covariance().float().cpu(), rel_pos.grid_size)
        for name, rel_pos in encodings.items() if isinstance(rel_pos, QuadraticRelPos)}
