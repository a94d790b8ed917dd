"""What attention does: its maps, how much like a convolution every head is, and whether a layer could be one."""
import contextlib
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from timm.layers import to_2tuple
from torch import nn

from .attention import RelPosAttention
from .patches import Size2d
from .pixel import PositionalAttention

ATTENTION_LAYERS = (RelPosAttention, PositionalAttention)


class AttentionMaps(NamedTuple):
    """Where one layer looks."""
    weights: torch.Tensor  # (B, num_heads, N, N): from every query patch to every key patch
    zero_key: Optional[torch.Tensor]  # (B, num_heads, N): the weight of the zero key, where the layer has one
    grid_size: Tuple[int, int]  # (h, w) with h * w = N


class HeadStatistics(NamedTuple):
    """How much like one tap of a convolution a head is. Offsets are key minus query, in patches, (row, column)."""
    best_offset: Tuple[int, int]  # the one that gets most weight
    best_weight: float  # that it gets, the mean over all queries for which it lies in the image: 1 is a convolution
    center: Tuple[float, float]  # mean offset of what it looks at, queries averaged
    distance: float  # of this centre from the query, patches
    entropy: float  # of the weights, nats, queries averaged: 0 is one patch, ln(N) is all alike


def attention_layers(model: nn.Module) -> Dict[str, Any]:
    """Every attention layer of this package in a model, or a single layer itself, by name.

    Raises:
        ValueError: If the model has no such layer.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ATTENTION_LAYERS)}
    if not layers:
        raise ValueError(
            f'{type(model).__name__} has no attention layer of timm_cmhsa to look at: use a phase-2 model, a pixel '
            f'model or one with convolutions replaced by attend_convs. (A reparameterized model has no maps.)')
    return layers


@torch.no_grad()
def attention_maps(model: nn.Module, images: torch.Tensor) -> Dict[str, AttentionMaps]:
    """Attention of every layer of this package in a model, or of a single layer.

    Args:
        model: A model of this package, one with convolutions replaced by `attend_convs`, or an attention layer.
        images: Input of the model: images of shape (B, C, H, W), or tokens of shape (B, N, dim) for a layer.

    Returns:
        Maps by name of the layer in the model, in the order of execution.

    Raises:
        ValueError: If the model has no such layer.
    """
    layers = attention_layers(model)
    maps: Dict[str, AttentionMaps] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        for name, layer in layers.items():
            stack.enter_context(_watched(name, layer, len(images), maps))
        model(images)
    return maps


@contextlib.contextmanager
def _watched(name: str, layer: Any, num_images: int, maps: Dict[str, AttentionMaps]) -> Iterator[None]:
    """Keep what passes the dropout of the attention weights, which a fused kernel never forms."""
    def keep(_: nn.Module, __: Tuple[torch.Tensor, ...], attn: torch.Tensor) -> None:
        num_tokens = attn.shape[-2]
        attn = attn.float().expand(num_images, -1, -1, -1)
        zero_key = attn[..., -1] if attn.shape[-1] > num_tokens else None
        maps[name] = AttentionMaps(attn[..., :num_tokens], zero_key, layer.grid_size)

    fused_attn = layer.fused_attn
    layer.fused_attn = False
    handle = layer.attn_drop.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
        layer.fused_attn = fused_attn


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and afterwards in the mode that it was in."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


def offset_profile(maps: AttentionMaps) -> torch.Tensor:
    """Mean weight that every head gives to every offset, over images and all queries for which it lies in the image.

    Returns:
        Shape (num_heads, 2h - 1, 2w - 1): offset (row, column) at [:, h - 1 + row, w - 1 + column].
    """
    totals, counts = _offset_sums(maps)
    return totals / counts


def _offset_sums(maps: AttentionMaps) -> Tuple[torch.Tensor, torch.Tensor]:
    """Weight of every head and offset, summed over queries, and the number of these: where the offset is in the image.

    Shapes (num_heads, 2h - 1, 2w - 1) and (2h - 1, 2w - 1).
    """
    height, width = maps.grid_size
    weights = maps.weights.mean(dim=0).unflatten(-1, (height, width)).unflatten(1, (height, width))
    totals = weights.new_zeros(len(weights), 2 * height - 1, 2 * width - 1)
    counts = weights.new_zeros(2 * height - 1, 2 * width - 1)
    for row in range(height):
        for col in range(width):  # keys seen from this query
            seen = (..., slice(height - 1 - row, 2 * height - 1 - row), slice(width - 1 - col, 2 * width - 1 - col))
            totals[seen] += weights[:, row, col]
            counts[seen] += 1
    return totals, counts


def head_statistics(maps: AttentionMaps) -> List[HeadStatistics]:
    """How convolution-like every head of a layer is.

    The zero key counts for the entropy as one more key; the centre is that of the weights on patches.
    """
    height, width = maps.grid_size
    totals, counts = _offset_sums(maps)
    rows = torch.arange(1 - height, height, dtype=totals.dtype, device=totals.device)
    cols = torch.arange(1 - width, width, dtype=totals.dtype, device=totals.device)
    weights = maps.weights if maps.zero_key is None else torch.cat([maps.weights, maps.zero_key.unsqueeze(-1)], dim=-1)
    entropies = torch.special.entr(weights).sum(dim=-1).mean(dim=[0, 2])
    statistics = []
    for total, entropy in zip(totals, entropies):
        best = divmod(int(total.argmax()), 2 * width - 1)
        mass = total.sum().clamp(min=1e-12)
        center = ((total.sum(dim=1) @ rows / mass).item(), (total.sum(dim=0) @ cols / mass).item())
        statistics.append(HeadStatistics(
            best_offset=(best[0] - height + 1, best[1] - width + 1),
            best_weight=(total[best] / counts[best]).item(),
            center=center,
            distance=(center[0] ** 2 + center[1] ** 2) ** 0.5,
            entropy=entropy.item(),
        ))
    return statistics


def spans_receptive_field(
        attn: nn.Module,
        kernel_size: Size2d,
        tokens: Optional[torch.Tensor] = None,
        tolerance: float = 1e-3,
) -> bool:
    """Whether the attention patterns of a layer span a K x K receptive field at every query: Lemma 3 of 1911.03584.

    It is a condition for the layer to express every convolution with this kernel. It is necessary, and not quite
    sufficient: the combination of heads that makes a tap may differ from query to query here, but a layer has only
    one. `expresses_convolutions` asks for that as well. Taps that are outside the image at all queries ask for nothing.

    Args:
        attn: An attention layer of this package.
        kernel_size: Kernel of the convolution, in tokens.
        tokens: Shape (B, N, dim), for which all must hold; by default zero: what position alone gives.
        tolerance: Largest distance of a unit vector (all weight on one patch) from the span.

    Raises:
        TypeError: If it is no such layer.
        ValueError: If the kernel is even, and so has no centre.
    """
    wanted, patterns = _wanted_and_patterns(attn, kernel_size, tokens)
    combined = wanted @ torch.linalg.pinv(patterns, rtol=1e-9) @ patterns
    return bool((combined - wanted).norm(dim=-1).max() <= tolerance)


def expresses_convolutions(
        attn: nn.Module,
        kernel_size: Size2d,
        tokens: Optional[torch.Tensor] = None,
        tolerance: float = 1e-3,
) -> bool:
    """Whether values and output projection can be chosen such that the layer is any convolution with this kernel.

    There has to be one combination of heads for every tap of the kernel, at all queries alike, which has all weight on
    the tap's patch, or none where that is outside the image (zero padding). The heads have to be wide enough besides.

    Arguments and errors are those of `spans_receptive_field`.
    """
    wanted, patterns = _wanted_and_patterns(attn, kernel_size, tokens)
    all_wanted, all_patterns = (x.transpose(0, 1).flatten(1) for x in (wanted, patterns))
    taps = all_wanted @ torch.linalg.pinv(all_patterns, rtol=1e-9)
    return bool((taps @ patterns - wanted).norm(dim=-1).max() <= tolerance)


def _wanted_and_patterns(
        attn: nn.Module,
        kernel_size: Size2d,
        tokens: Optional[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """At every query: the weights that the taps of a kernel want, (B * N, K_h * K_w, N), and those that heads give."""
    if not isinstance(attn, ATTENTION_LAYERS):
        raise TypeError(
            f'Expected an attention layer of timm_cmhsa (of an AttendedConv2d, its attn), got {type(attn).__name__}.')
    kernel_h, kernel_w = to_2tuple(kernel_size)
    if kernel_h % 2 == 0 or kernel_w % 2 == 0:
        raise ValueError(f'kernel_size={kernel_size} has no centre: use an odd size such as 3 or 5.')
    height, width = attn.grid_size
    if tokens is None:
        proj = attn.qkv if isinstance(attn, RelPosAttention) else attn.proj
        tokens = proj.weight.new_zeros(1, height * width, proj.in_features)
    weights = attention_maps(attn, tokens)[''].weights.double()

    row, col = (index.flatten() for index in torch.meshgrid(
        torch.arange(height, device=weights.device), torch.arange(width, device=weights.device), indexing='ij'))
    row_offset, col_offset = row - row.unsqueeze(1), col - col.unsqueeze(1)  # (N, N), key minus query
    taps = [(row_offset == i) & (col_offset == j) for i in range(-(kernel_h // 2), kernel_h // 2 + 1)
            for j in range(-(kernel_w // 2), kernel_w // 2 + 1)]
    wanted = torch.stack(taps, dim=1).double().repeat(len(weights), 1, 1)
    return wanted, weights.transpose(1, 2).flatten(0, 1)
