"""The data of the pictures: models, their mean attention, and the attention from one patch."""
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from timm.utils import unwrap_model
from torch import nn

from ..analysis import (
    AttentionMaps,
    HeadStatistics,
    attention_layers,
    attention_maps,
    head_statistics,
    layer_grid_size,
)
from ..checkpoint import load_model
from ..files import PathLike
from ..images import data_config

BATCH_WEIGHTS = 2 ** 26  # attention weights of all layers at once: 256 MB in float32


class PlotError(ValueError):
    """Attention cannot be drawn. The message gives the reason and the remedy, in one line."""


class QueryAttention(NamedTuple):
    """Attention of the heads of a layer from one patch."""
    weights: torch.Tensor  # to every patch: (num_heads, h, w)
    zero_key: Optional[torch.Tensor]  # to the zero key, if the layer has one: (num_heads,)
    query: Tuple[int, int]  # row and column of the patch


def open_models(
        source: Union[nn.Module, PathLike, Sequence[PathLike]],
        architecture: Optional[str] = None,
        model_kwargs: Optional[Mapping[str, Any]] = None,
) -> Iterator[Tuple[str, nn.Module]]:
    """Yield the title and the model of every checkpoint, or those of a model itself."""
    if isinstance(source, nn.Module):
        model = unwrap_model(source)
        yield model_name(model), model
        return
    paths = [source] if isinstance(source, (str, Path)) else source
    titles = [Path(path).name.split('.')[0] for path in paths]
    if len(set(titles)) < len(paths):
        titles = [str(path) for path in paths]
    for title, path in zip(titles, paths):
        yield title, load_model(path, architecture, **(model_kwargs or {}))


def model_name(model: nn.Module) -> str:
    return getattr(model, 'pretrained_cfg', {}).get('architecture') or type(model).__name__


def in_order_of_training(paths: Sequence[PathLike]) -> List[PathLike]:
    """Sort the checkpoints of `train.py` in a folder by epoch, since a shell puts checkpoint-10 before checkpoint-9."""
    matches = {path: re.fullmatch(r'checkpoint-(\d+)\.pth\.tar', Path(path).name) for path in paths}
    folders = [Path(path).parent for path in paths]
    places = {path: (folders.index(Path(path).parent), int(match[1])) for path, match in matches.items() if match}
    in_order = iter(sorted((path for path in paths if path in places), key=places.__getitem__))
    return [next(in_order) if path in places else path for path in paths]


def layers_to_draw(model: nn.Module, layer: Optional[str] = None) -> Dict[str, Any]:
    """Return the attention layers with heads by name, or only the layer with this name."""
    try:
        layers = {name: module for name, module in attention_layers(model).items() if module.num_heads}
    except ValueError as e:
        raise PlotError(str(e)) from e
    if not layers:
        raise PlotError('The attention layers of the model have no heads left.')
    if layer is not None and layer not in layers:
        raise PlotError(f'There is no attention layer {layer!r}: choose one of {", ".join(layers)}.')
    return layers if layer is None else {layer: layers[layer]}


def check_alike(model: nn.Module, other: nn.Module) -> None:
    """Refuse two models whose heads cannot be compared for the same images."""
    shape, other_shape = (
        (data_config(each)['input_size'],
         {name: (layer.num_heads, tuple(layer_grid_size(each, layer))) for name, layer in layers_to_draw(each).items()})
        for each in (model, other))
    if shape != other_shape:
        raise PlotError(
            'The models have different image sizes, attention layers, heads or grids: use checkpoints of one training.')


def num_weights(model: nn.Module, layer: Any) -> int:
    """Return the number of attention weights for one image, without the zero key."""
    return layer.num_heads * math.prod(layer_grid_size(model, layer)) ** 2


def finite_maps(model: nn.Module, images: torch.Tensor) -> Dict[str, AttentionMaps]:
    """Return the attention of all layers that have heads."""
    layers = layers_to_draw(model)
    maps = {name: each for name, each in attention_maps(model, images).items() if name in layers}
    for name, each in maps.items():
        if not each.weights.isfinite().all():
            raise PlotError(f'The attention of {name} is NaN: the training diverged, or half precision overflowed.')
    return maps


def mean_attention(
        model: nn.Module,
        images: torch.Tensor,
) -> Tuple[Dict[str, AttentionMaps], Dict[str, List[HeadStatistics]]]:
    """Return the attention of all layers that have heads, averaged over images (B, C, H, W), and its statistics."""
    layers = layers_to_draw(model)
    batch_size = max(BATCH_WEIGHTS // sum(num_weights(model, layer) for layer in layers.values()), 1)
    weights: Dict[str, Any] = defaultdict(float)
    zero_keys: Dict[str, Any] = defaultdict(float)
    entropies: Dict[str, Any] = defaultdict(float)  # the entropy of the mean is not the mean of the entropies
    for batch in images.split(batch_size):
        share = len(batch) / len(images)
        for name, maps in finite_maps(model, batch).items():
            weights[name] += share * maps.weights.mean(dim=0, keepdim=True)
            if maps.zero_key is not None:
                zero_keys[name] += share * maps.zero_key.mean(dim=0, keepdim=True)
            entropies[name] += share * torch.tensor([head.entropy for head in head_statistics(maps)])
    means = {name: AttentionMaps(mean, zero_keys.get(name), layer_grid_size(model, layers[name]))
             for name, mean in weights.items()}
    statistics = {
        name: [head._replace(entropy=entropy) for head, entropy in zip(head_statistics(maps), entropies[name].tolist())]
        for name, maps in means.items()}
    return means, statistics


def attention_from(maps: AttentionMaps, query: Tuple[float, float] = (0.5, 0.5)) -> QueryAttention:
    """Return the attention from one patch, averaged over the images.

    Args:
        maps: Attention of a layer.
        query: Row and column, from 0 to 1, relative to the size of the image, since the grids of layers can differ.
    """
    if not all(0 <= place <= 1 for place in query):
        raise PlotError(f'The query {query[0]:g} {query[1]:g} is outside the image: row and column go from 0 to 1.')
    row, col = (min(int(place * size), size - 1) for place, size in zip(query, maps.grid_size))
    index = row * maps.grid_size[1] + col
    weights = maps.weights[:, :, index].mean(dim=0).unflatten(-1, maps.grid_size).cpu()
    zero_key = None if maps.zero_key is None else maps.zero_key[:, :, index].mean(dim=0).cpu()
    return QueryAttention(weights, zero_key, (row, col))
