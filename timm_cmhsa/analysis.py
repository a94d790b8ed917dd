"""What attention does: its maps, how much like a convolution every head is, and whether a layer could be one."""
import contextlib
import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from timm.layers import gen_relative_position_index, to_2tuple
from torch import nn

from .attention import RelPosAttention
from .patches import Size2d
from .pixel import PositionalAttention

ATTENTION_LAYERS = (RelPosAttention, PositionalAttention)


class AttentionMaps(NamedTuple):
    """Where one layer looks.

    Attributes:
        weights: From every query patch to every key patch: (B, num_heads, N, N).
        zero_key: The weight of the zero key, where the layer has one: (B, num_heads, N).
        grid_size: (h, w) with h * w = N.
    """
    weights: torch.Tensor
    zero_key: Optional[torch.Tensor]
    grid_size: Tuple[int, int]


class HeadStatistics(NamedTuple):
    """How much like one tap of a convolution a head is. Offsets are key minus query, in patches, (row, column).

    Attributes:
        best_offset: The one that gets most weight.
        best_weight: Its mean over the queries for which it lies in the image; 1 for a convolution.
        center: Mean offset of what the head looks at, over all queries.
        distance: Of this centre from the query, patches.
        entropy: Of the weights, nats, mean over queries: 0 for a single patch, ln(N) for all alike.
    """
    best_offset: Tuple[int, int]
    best_weight: float
    center: Tuple[float, float]
    distance: float
    entropy: float


def attention_layers(model: nn.Module) -> Dict[str, Any]:
    """Return every attention layer of this package in a model, by name; a layer itself has the name ''."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ATTENTION_LAYERS)}
    if not layers:
        raise ValueError(
            f'{type(model).__name__} has no attention layer of timm_cmhsa to look at: use a phase-2 model, a pixel '
            'model or one with convolutions replaced by attend_convs. (Convert a phase-1 model first. A '
            'reparameterized one has no maps.)')
    return layers


@torch.no_grad()
def attention_maps(model: nn.Module, images: torch.Tensor) -> Dict[str, AttentionMaps]:
    """Return the attention of every layer of this package in a model, or of a single layer.

    Meanwhile the model is in eval mode, its attention not fused: where another thread trains it, give a copy.

    Args:
        model: A model of this package, one with convolutions replaced by `attend_convs`, or an attention layer.
        images: Input of the model: images of shape (B, C, H, W), or tokens of shape (B, N, dim) for a layer.

    Returns:
        Maps by name of the layer in the model, in the order of execution.

    Raises:
        ValueError: If the model has no such layer.
    """
    layers = attention_layers(model)
    weights: Dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        for name, layer in layers.items():
            def keep(*args: Any, name: str = name) -> None:
                weights[name] = args[-1].float().expand(len(images), -1, -1, -1)

            stack.callback(setattr, layer, 'fused_attn', layer.fused_attn)
            layer.fused_attn = False  # fused attention never forms the weights
            stack.enter_context(layer.attn_drop.register_forward_hook(keep))
        model(images)
    maps = {}
    for name, attn in weights.items():
        num_tokens = attn.shape[-2]
        zero_key = attn[..., -1] if attn.shape[-1] > num_tokens else None
        maps[name] = AttentionMaps(attn[..., :num_tokens], zero_key, layers[name].grid_size)
    return maps


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and afterwards back in the mode that it was in.

    No `train` or `eval` of a module is called: some merge weights then, and would have to take them apart again. Code
    that torch.compile made is left aside meanwhile, as it calls no hooks that are newer.
    """
    training = {module: module.training for module in model.modules()}
    for module in training:
        module.training = False
    try:
        with torch.compiler.set_stance('force_eager'):
            yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


def offset_profile(maps: AttentionMaps) -> torch.Tensor:
    """Return the mean weight that every head gives to every offset, over images and queries.

    The shape is (num_heads, 2h - 1, 2w - 1), offset (row, column) at [:, h - 1 + row, w - 1 + column]. Only queries for
    which the offset lies in the image count.
    """
    totals, counts = _offset_sums(maps)
    return totals / counts


def _offset_sums(maps: AttentionMaps) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of every head and offset, summed over queries, and the number of queries that have it."""
    index = gen_relative_position_index(maps.grid_size).t().flatten().to(maps.weights.device)
    counts = index.bincount()
    weights = maps.weights.mean(dim=0).flatten(1)
    totals = weights.new_zeros(len(weights), len(counts)).index_add(1, index, weights)
    sizes = 2 * maps.grid_size[0] - 1, 2 * maps.grid_size[1] - 1
    return totals.unflatten(1, sizes), counts.unflatten(0, sizes)


def head_statistics(maps: AttentionMaps) -> List[HeadStatistics]:
    """Return how convolution-like every head of a layer is.

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
        row, col = divmod(int(total.argmax()), 2 * width - 1)
        mass = total.sum().clamp(min=1e-12)
        center = ((total.sum(dim=1) @ rows / mass).item(), (total.sum(dim=0) @ cols / mass).item())
        statistics.append(HeadStatistics(
            best_offset=(row - height + 1, col - width + 1),
            best_weight=(total[row, col] / counts[row, col]).item(),
            center=center,
            distance=math.hypot(*center),
            entropy=entropy.item(),
        ))
    return statistics


def spans_receptive_field(
        attn: nn.Module,
        kernel_size: Size2d,
        tokens: Optional[torch.Tensor] = None,
        tolerance: float = 1e-3,
) -> bool:
    """Return whether the attention patterns of a layer span a K x K receptive field: Lemma 3 of 1911.03584.

    This is necessary for the layer to express every convolution with this kernel, but not quite sufficient: here the
    combination of heads that makes a tap may differ from query to query (see `expresses_convolutions`). Taps that lie
    outside the image for all queries are ignored.

    Args:
        attn: An attention layer of this package.
        kernel_size: Kernel of the convolution, in tokens.
        tokens: Shape (B, N, dim), for which all must hold; by default zeros, which leave what position alone gives.
        tolerance: Largest distance of a unit vector (all weight on one patch) from the span.

    Raises:
        TypeError: If it is not such a layer.
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
    """Return whether a layer can be any convolution with this kernel, given the right values and output projection.

    For every tap of the kernel there has to be one combination of heads, the same for all queries, with all weight on
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
    """Return what the taps of a kernel want at every query, (B * N, K_h * K_w, N), and what the heads give."""
    if not isinstance(attn, ATTENTION_LAYERS):
        raise TypeError(
            f'Expected an attention layer of timm_cmhsa (of an AttendedConv2d, its attn), got {type(attn).__name__}.')
    reach_h, reach_w = (size // 2 for size in to_2tuple(kernel_size))
    if to_2tuple(kernel_size) != (2 * reach_h + 1, 2 * reach_w + 1):
        raise ValueError(f'kernel_size={kernel_size} has no centre: use an odd size such as 3 or 5.')
    height, width = attn.grid_size
    if tokens is None:
        proj = attn.qkv if isinstance(attn, RelPosAttention) else attn.proj
        tokens = proj.weight.new_zeros(1, height * width, proj.in_features)
    weights = attention_maps(attn, tokens)[''].weights.double()

    patches = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    offsets = patches - patches.unsqueeze(1)  # (N, N, 2), key minus query
    taps = torch.cartesian_prod(torch.arange(-reach_h, reach_h + 1), torch.arange(-reach_w, reach_w + 1))
    wanted = (offsets.unsqueeze(1) == taps.unsqueeze(1)).all(dim=-1).to(weights)
    return wanted.repeat(len(weights), 1, 1), weights.transpose(1, 2).flatten(0, 1)
