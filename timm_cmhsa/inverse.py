"""The way back: attention whose heads are shifts as a convolution, the inverse of Theorem 1."""
import itertools
import math
from typing import NamedTuple, Optional, Tuple

import torch
from timm.layers import to_2tuple
from torch import nn

from .attention import RelPosAttention
from .certificates import MAX_LEAK, proved_shifts
from .patches import Size2d


class Conv2dResult(NamedTuple):
    """A convolution, and how far the attention is from it.

    Attributes:
        conv: The convolution.
        residual: Of all weights and biases, relative to them, as root mean squares; 0 if nothing is missed.
    """
    conv: nn.Conv2d
    residual: float


@torch.no_grad()
def attention_to_conv2d(
        attn: RelPosAttention,
        patch_size: Size2d,
        stride: Size2d = 1,
        norm: Optional[nn.Module] = None,
        tolerance: float = MAX_LEAK,
) -> Conv2dResult:
    """Rewrite self-attention on patches as a convolution: the inverse of `conv2d_to_attention` (Theorem 1).

    Every pair of an input and an output pixel has a weight, by the heads at the offset between their patches. In a
    convolution it depends on the displacement between the pixels alone. The kernel takes the mean over the output
    pixels of a patch, for each displacement: no convolution is closer to what the heads apply at every offset.

    Args:
        attn: Maps tokens of shape (B, N, P_h * P_w * C_in) to (B, N, P_h * P_w * C_out / stride^2).
        patch_size: Pixels per patch side, P or (P_h, P_w).
        stride: Of the convolution; divides the patch size.
        norm: What normalizes the tokens: it takes part in the proof that heads are shifts, see `fuse_shifts`.
        tolerance: Largest share of its attention that a shift may give to other patches.

    Returns:
        The smallest convolution with an odd kernel that has all these weights, and its residual. Groups and dilation
        are not found again: they are zeros of the kernel.

    Raises:
        TypeError: If it is not a `RelPosAttention`, or something was added to one: hooks, adapters, another forward.
        ValueError: If a head is no shift by proof, heads see different things outside the image, or the widths are not
            those of such patches.
    """
    if not isinstance(attn, RelPosAttention):
        raise TypeError(f'Expected a RelPosAttention to rewrite as a convolution, got {type(attn).__name__}.')
    if not attn.is_replaceable():
        raise TypeError('Expected a plain RelPosAttention: a convolution would drop its hooks, adapters or forward.')
    patch, steps = to_2tuple(patch_size), to_2tuple(stride)
    if min(*patch, *steps) < 1:
        raise ValueError(f'{patch_size=} and {stride=} must be positive.')
    out_patch = patch[0] // steps[0], patch[1] // steps[1]
    if any(p % s for p, s in zip(patch, steps)) or attn.qkv.in_features % math.prod(patch) \
            or attn.proj.out_features % math.prod(out_patch):
        raise ValueError(
            f'{patch_size=} and {stride=} do not fit tokens of width {attn.qkv.in_features} that become '
            f'{attn.proj.out_features} wide.')
    blocks, bias, border_bias, padding_mode = _offset_blocks(attn, norm, tolerance)

    (reach_h, reach_w), (patch_h, patch_w) = (side // 2 for side in blocks.shape[:2]), patch
    rows = blocks.unflatten(2, (*out_patch, -1)).unflatten(5, (*patch, -1))  # (row, col, t_h, t_w, out, s_h, s_w, in)
    pixels = rows.permute(2, 3, 4, 7, 0, 5, 1, 6).flatten(6, 7).flatten(4, 5)
    margins = [max(reach * p + s * (o - 1), reach * p + p - 1)
               for reach, p, s, o in zip((reach_h, reach_w), patch, steps, out_patch)]
    windows = pixels.new_zeros(*pixels.shape[:4], *(2 * margin + 1 for margin in margins))
    for t_h, t_w in itertools.product(*map(range, out_patch)):
        # Every output pixel sees its own window of displacements.
        top, left = margins[0] - reach_h * patch_h - steps[0] * t_h, margins[1] - reach_w * patch_w - steps[1] * t_w
        windows[t_h, t_w, :, :, top:top + pixels.shape[4], left:left + pixels.shape[5]] = pixels[t_h, t_w]
    if padding_mode == 'circular':
        for axis, size in ((-2, attn.grid_size[0] * patch_h), (-1, attn.grid_size[1] * patch_w)):
            windows = _wrap(windows, axis, size)
        margins = [side // 2 for side in windows.shape[-2:]]
    # Pairs of pixels that are in no image of this size count for nothing.
    axes = zip(windows.shape[-2:], patch, steps, out_patch, attn.grid_size)
    rows, cols = (_exists(*axis, padding_mode) for axis in axes)
    exists = (rows[:, None, :, None] & cols[None, :, None, :]).unsqueeze(2).unsqueeze(2)
    kernel = windows.sum(dim=[0, 1]) / exists.sum(dim=[0, 1]).clamp(min=1)
    biases = bias.unflatten(0, (*out_patch, -1))
    channel_bias = biases.mean(dim=[0, 1])
    missed = ((windows - kernel) * exists).square().sum() + (biases - channel_bias).square().sum()
    missed = missed + border_bias.square().sum()
    total = windows.square().sum() + bias.square().sum()

    used = [(kernel.transpose(-1, axis).flatten(0, -2).any(dim=0).nonzero().flatten() - margin).abs()
            for axis, margin in zip((-2, -1), margins)]
    reach = [int(distances.max()) if len(distances) else 0 for distances in used]
    kernel = kernel[
        ..., margins[0] - reach[0]:margins[0] + reach[0] + 1, margins[1] - reach[1]:margins[1] + reach[1] + 1]
    weight = attn.proj.weight
    conv = nn.Conv2d(
        kernel.shape[1], kernel.shape[0], (kernel.shape[2], kernel.shape[3]), stride=(steps[0], steps[1]),
        padding=(reach[0], reach[1]), padding_mode=padding_mode,  # type: ignore[arg-type]
        device=weight.device, dtype=weight.dtype)
    conv.weight.copy_(kernel)
    assert conv.bias is not None
    conv.bias.copy_(channel_bias)
    return Conv2dResult(conv, (missed / total.clamp(min=torch.finfo(total.dtype).tiny)).sqrt().item())


def _exists(size: int, patch: int, stride: int, out_patch: int, grid: int, padding_mode: str) -> torch.Tensor:
    """Return whether displacements lead from an output pixel to patches that an image has: (out_patch, size)."""
    displacements = torch.arange(size, device='cpu') - size // 2
    offsets = (displacements + stride * torch.arange(out_patch, device='cpu').unsqueeze(1)) // patch
    return (offsets.abs() < grid) | (padding_mode == 'circular')


def _wrap(windows: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Add up displacements that are the same in a circular image of this size, in pixels."""
    margin = windows.shape[axis] // 2
    displacements = torch.arange(-margin, margin + 1, device='cpu')
    wrapped = windows.new_zeros(*windows.shape[:axis], size // 2 * 2 + 1, *windows.shape[axis:][1:])
    return wrapped.index_add(axis, (displacements + size // 2) % size, windows)


def _offset_blocks(
        attn: RelPosAttention,
        norm: Optional[nn.Module],
        tolerance: float,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    """Return what the patch at every offset adds to the output, in float64.

    Returns:
        Blocks of shape (rows, columns, dim_out, dim), their offsets around (0, 0); the bias (dim_out,) where all
        offsets are inside the image; the part of it that is missing somewhere, (shifts, dim_out); the padding mode.
    """
    shifts, height, width = proved_shifts(attn, norm, tolerance), *attn.grid_size
    used = attn.used_heads()
    for head, shift in enumerate(shifts):
        if used[head] and shift is None:
            raise ValueError(f'Head {head + 1} is no shift by proof: attention with such heads is no convolution.')
    factors = attn.shift_factors([shift if is_used else None for is_used, shift in zip(used, shifts)])
    factors = {shift: each.to(torch.device('cpu'), torch.double) for shift, each in factors.items()}
    borders = {shift.border for shift in factors if shift.offset != (0, 0)} or {'zeros'}
    if len(borders) > 1 or 'replicate' in borders:
        raise ValueError(
            f'Heads see {" and ".join(sorted(borders))} patches outside the image: a convolution has zeros there, or '
            'is circular.')
    padding_mode, = borders
    offsets = [
        ((row + height // 2) % height - height // 2, (col + width // 2) % width - width // 2)
        if padding_mode == 'circular' else (row, col) for (row, col), _ in factors]
    reach_h, reach_w = (max((abs(offset[axis]) for offset in offsets), default=0) for axis in (0, 1))
    dim, dim_out = attn.qkv.in_features, attn.proj.out_features
    blocks = torch.zeros(2 * reach_h + 1, 2 * reach_w + 1, dim_out, dim, dtype=torch.double, device='cpu')
    bias = blocks.new_zeros(dim_out) if attn.proj.bias is None else attn.proj.bias.double().cpu()
    missing = [torch.zeros_like(bias)]
    for (row, col), each in zip(offsets, factors.values()):
        if padding_mode == 'zeros' and (abs(row) >= height or abs(col) >= width):
            continue  # outside for all queries
        blocks[reach_h + row, reach_w + col] += each.output @ each.value
        if each.bias is not None:
            bias = bias + each.output @ each.bias
            if padding_mode == 'zeros' and (row, col) != (0, 0):
                missing.append(each.output @ each.bias)
    return blocks, bias, torch.stack(missing), padding_mode
