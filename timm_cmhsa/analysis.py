"""Attention maps of a model, and how much like a convolution every head is."""
import contextlib
import math
from collections import defaultdict
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch
from timm.layers import Attention, gen_relative_position_index
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import nn

from .rel_pos import OffsetRelPos

BATCH_WEIGHTS = 2 ** 26  # attention weights of all layers at once: 256 MB in float32


class PlotError(ValueError):
    """Attention cannot be drawn. The message gives the reason and the remedy, in one line."""


class AttentionMaps(NamedTuple):
    """Attention weights of one layer."""
    weights: torch.Tensor  # from every query patch to every key patch: (B, num_heads, N, N)
    zero_key: Optional[torch.Tensor]  # weight of the zero key, or of class tokens, if there are any: (B, num_heads, N)
    grid_size: Tuple[int, int]  # (h, w) with h * w = N


class HeadStatistics(NamedTuple):
    """How much like one tap of a convolution a head is. Offsets are key minus query, in patches, (row, column)."""
    best_offset: Tuple[int, int]  # the one with the most weight
    best_weight: float  # its mean over the queries for which it lies in the image; 1 for a convolution
    center: Tuple[float, float]  # mean offset of the attention, over all queries
    distance: float  # of the centre from the query, patches
    entropy: float  # mean over the queries, nats: 0 for a single patch, ln(N) for uniform attention


def attention_layers(model: nn.Module) -> Dict[str, Any]:
    """Return the attention layers of this package, or of a ViT of timm, by name. Raise PlotError if there are none."""
    is_stock = isinstance(model, VisionTransformer)
    layers: Dict[str, Any] = {
        name: layer for name, layer in model.named_modules()
        if isinstance(getattr(layer, 'rel_pos', None), OffsetRelPos) or (is_stock and isinstance(layer, Attention))}
    if not layers:
        found = {type(each).__name__ for each in model.modules() if hasattr(each, 'attn_drop')}  # timm's attention
        raise PlotError(
            f'{type(model).__name__} has no attention that can be drawn (found: {", ".join(sorted(found)) or "none"}): '
            'use a phase-2 model (convert_model), a CNN after attend_convs, or a VisionTransformer of timm.')
    return layers


def layer_grid_size(model: Any, layer: Any) -> Tuple[int, int]:
    """Return the patches per image side, (h, w), of an attention layer of a model."""
    return (getattr(layer, 'rel_pos', None) or model.patch_embed).grid_size


def num_weights(model: nn.Module, layers: Mapping[str, Any]) -> int:
    """Return the number of attention weights of some layers for one image, without the zero key."""
    return sum(layer.num_heads * math.prod(layer_grid_size(model, layer)) ** 2 for layer in layers.values())


@torch.no_grad()
def attention_maps(model: nn.Module, images: torch.Tensor) -> Dict[str, AttentionMaps]:
    """Return the attention of all layers of this package, or of a ViT of timm, by name, in the order of execution.

    The model is switched to eval mode and unfused attention while it runs, so no other thread may use it. The maps of a
    layer take 4 * B * num_heads * N^2 bytes.

    Args:
        model: A model of this package, one with convolutions replaced by `attend_convs`, an attention layer, or a
            `VisionTransformer` of timm.
        images: Input of the model: images of shape (B, C, H, W), or tokens of shape (B, N, dim) for a layer.

    Raises:
        ValueError: If the model has no such layer, or the images another size than a ViT of timm was made for.
    """
    model = unwrap_model(model)
    layers = attention_layers(model)
    if isinstance(model, VisionTransformer) and tuple(images.shape[2:]) != model.patch_embed.img_size:
        raise ValueError(f'Images of {tuple(images.shape[2:])} pixels: first call set_input_size for this size.')
    maps: Dict[str, AttentionMaps] = {}

    def keep(name: str, attn: torch.Tensor) -> None:
        grid_size = layer_grid_size(model, layers[name])
        attn = attn.float().expand(len(images), -1, -1, -1)
        num_queries, prefix = attn.shape[2], attn.shape[2] - math.prod(grid_size)  # class tokens, before the patches
        first, patches, last = attn[:, :, prefix:].tensor_split((prefix, num_queries), dim=-1)
        others = torch.cat([first, last], dim=-1)
        maps[name] = AttentionMaps(patches, others.sum(dim=-1) if others.shape[-1] else None, grid_size)

    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        for name, layer in layers.items():
            stack.callback(setattr, layer, 'fused_attn', layer.fused_attn)
            layer.fused_attn = False  # fused attention never forms the weights
            stack.enter_context(layer.attn_drop.register_forward_hook(lambda *args, name=name: keep(name, args[-1])))
        model(images)
    return maps


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model to eval mode, without compiled code, which skips hooks, and every module back afterwards."""
    training = {module: module.training for module in model.modules()}
    for module in training:
        module.training = False  # `eval` makes some modules merge their weights
    try:
        with torch.compiler.set_stance('force_eager'):
            yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


def head_statistics(maps: AttentionMaps) -> List[HeadStatistics]:
    """Return how much like a convolution every head of a layer is.

    The entropy counts the zero key as one more key. The centre is that of the weights on patches.
    """
    height, width = maps.grid_size
    index = gen_relative_position_index(maps.grid_size).t().flatten().to(maps.weights.device)  # of key minus query
    counts = index.bincount()
    weights = maps.weights.mean(dim=0).flatten(1)
    totals = weights.new_zeros(len(weights), len(counts)).index_add(1, index, weights)
    offsets = torch.cartesian_prod(torch.arange(1 - height, height), torch.arange(1 - width, width)).to(totals)
    centers = totals @ offsets / totals.sum(dim=1, keepdim=True).clamp(min=1e-12)
    best_totals, best = totals.max(dim=1)
    all_weights = [maps.weights] if maps.zero_key is None else [maps.weights, maps.zero_key.unsqueeze(-1)]
    entropies = torch.special.entr(torch.cat(all_weights, dim=-1)).sum(dim=-1).mean(dim=[0, 2])
    return [
        HeadStatistics((int(row), int(col)), weight, (center[0], center[1]), math.hypot(*center), entropy)
        for (row, col), weight, center, entropy in zip(
            offsets[best].tolist(), (best_totals / counts[best]).tolist(), centers.tolist(), entropies.tolist())]


def finite_maps(model: nn.Module, images: torch.Tensor) -> Dict[str, AttentionMaps]:
    """Return `attention_maps` that can be averaged and drawn."""
    maps = attention_maps(model, images)
    for name, each in maps.items():
        if not each.weights.isfinite().all():
            raise PlotError(f'The attention of {name} is NaN: the training diverged, or half precision overflowed.')
    return maps


def mean_attention(
        model: nn.Module, images: torch.Tensor) -> Tuple[Dict[str, AttentionMaps], Dict[str, List[HeadStatistics]]]:
    """Return the attention of all layers, averaged over images (B, C, H, W), and its statistics."""
    model = unwrap_model(model)
    layers = attention_layers(model)
    batch_size = max(BATCH_WEIGHTS // num_weights(model, layers), 1)
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
