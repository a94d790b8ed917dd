"""Theorem 1: one convolution in, one attention layer out, exactly (arXiv 2111.01353).

Every patch that a convolution reads from lies at one of a few offsets from the patch that it writes to. A head attends
to the patch at its offset, its values pick the pixels that matter there, and the output projection applies the kernel's
weights to them. An offset that points outside the image leads to the zero key.

Such a head is hard. A soft head attends to everything else as well, which further heads subtract (see docs/theory.md).
"""
import math
from numbers import Integral, Real
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import nn

from .attention import RelPosAttention
from .grouped import GroupedAttention
from .layers import Size2d
from .rel_pos import PaddedRelPosTable, RelPosTable, exact_sharpness

MAX_SHARPNESS = 10_000  # float16 holds it
MAX_ROUNDING = 0.01  # by soft heads, relative to the output
MAX_HEADS, MAX_HEAD_DIM = 10_000, 100_000
MAX_PARAMS = 2 ** 33  # of a layer


class HeadOptions(NamedTuple):
    """How to express a convolution by heads: the keyword arguments of every conversion.

    Attributes:
        num_heads: Number of heads, N_H; by default the number needed, or that of the architecture if it is larger.
        head_dim: Width of a head, d_H; by default that of a token, P_h * P_w * C_in, or the architecture's. Several
            thinner heads share an offset.
        qk_dim: Width of queries and keys, see `RelPosAttention`.
        rel_pos: 'table' or 'padded_table'; by default the latter if there is a peak, or the architecture's.
        peak: Weight that a head gives to its own offset, above that of a mean over all patches. Such heads are soft:
            they can learn where to look, and the rewrite is as exact (convert in float32). This takes one more wide
            head, or a few thin ones. Heads of offset (0, 0) stay hard where that saves heads. By default all are hard,
            or those of a soft architecture have 0.75.
    """
    num_heads: Optional[int] = None
    head_dim: Optional[int] = None
    qk_dim: Optional[int] = None
    sharpness: Optional[float] = None  # bias of a hard head at its offset; by default exact to rounding
    rel_pos: Optional[str] = None
    peak: Optional[float] = None

    def check(self) -> None:
        """Raise ValueError if a value is out of range, or options contradict each other."""
        for name, most in (('num_heads', MAX_HEADS), ('head_dim', MAX_HEAD_DIM), ('qk_dim', MAX_HEAD_DIM)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Integral) and 0 < int(value) <= most):
                raise ValueError(f'{name}={value} must be a whole number from 1 to {most}.')
        sharpness, rel_pos, peak = self.sharpness, self.rel_pos, self.peak
        if sharpness is not None and not (isinstance(sharpness, Real) and 0 < sharpness <= MAX_SHARPNESS):
            raise ValueError(f'{sharpness=} must be above 0, and at most {MAX_SHARPNESS}.')
        if peak is not None and not (isinstance(peak, Real) and 0 < peak < 1):
            raise ValueError(f'{peak=} must be a number between 0 and 1, such as 0.75, or None for hard.')
        if peak is not None and sharpness is not None:
            raise ValueError(f'{peak=} makes heads soft, and {sharpness=} is for hard ones.')
        if rel_pos not in (None, RelPosTable.name, PaddedRelPosTable.name):
            raise ValueError(f"{rel_pos=} cannot express a convolution: use 'table' or 'padded_table'.")
        if peak is not None and rel_pos == RelPosTable.name:
            raise ValueError(f"{peak=} needs rel_pos='padded_table': heads of a 'table' are hard.")


class Head(NamedTuple):
    """What one head carries to the query patch, from the patch at its offset or from the mean of all patches."""
    offset: Optional[Tuple[int, int]]  # key patch minus query patch, (row, column); None for the mean
    inputs: torch.Tensor  # indices into the flattened key patch, at most head_dim of them
    taps: Tuple[torch.Tensor, ...] = ()  # of rows and of columns, see `_axis_taps`; none for the mean
    is_soft: bool = False


@torch.no_grad()
def conv2d_to_attention(
        conv: nn.Conv2d,
        patch_size: Size2d,
        grid_size: Size2d,
        num_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        **heads: Any,
) -> RelPosAttention:
    """Rewrite a convolution as self-attention on patches (Theorem 1), exact on the whole image and at its borders.

    For images of shape (B, C_in, h * P_h, w * P_w), `patchify(conv(images), P / stride)` equals
    `attention(patchify(images, P))`, which maps (B, N, P_h * P_w * C_in) to (B, N, P_h * P_w * C_out / stride^2).

    Queries start at zero and keys at random, so that both can learn. Heads and head dimensions beyond those needed
    start at random, with a zero output projection. The seed is fixed. A grid that is smaller than the kernel's reach
    must not grow afterwards, and with circular padding not change at all.

    Args:
        conv: Any kernel, dilation, groups and bias; zero or circular padding that keeps the image size (divided by
            the stride); strides that divide the patch size.
        patch_size: Pixels per patch side, P or (P_h, P_w).
        grid_size: Patches per image side, h or (h, w).
        num_heads, head_dim, **heads: See `HeadOptions`.

    Returns:
        The attention layer, with the type and on the device of the convolution's weight.

    Raises:
        TypeError: If `conv` is not an `nn.Conv2d`, or one that computes something else (weight standardization, ...).
        ValueError: If there is no exact rewrite; the message names numbers for which there is.
    """
    options = HeadOptions(num_heads, head_dim, **heads)
    options.check()
    plan = plan_heads(conv, patch_size, grid_size, options.head_dim, options.peak)
    if not keeps_size(conv, patch_size, grid_size):
        spans = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size)]
        remedy = 'an odd kernel' if any(span % 2 for span in spans) else f'padding=({spans[0] // 2}, {spans[1] // 2})'
        raise ValueError(f'padding={conv.padding!r} does not keep the size (divided by the stride): use {remedy}.')
    return rewrite(conv, patch_size, grid_size, options, torch.Generator().manual_seed(0), plan)


@torch.no_grad()
def rewrite(
        conv: nn.Conv2d, patch_size: Size2d, grid_size: Size2d, options: HeadOptions, generator: torch.Generator,
        heads: List[Head], groups: int = 1) -> RelPosAttention:
    """Rewrite a convolution by planned heads, see `conv2d_to_attention` and `plan_heads`, for any padding.

    The patches of the output may cover more or less of it. The generator is for keys and spare heads. Groups of
    channels that stay apart, those of the convolution, give a `GroupedAttention`.
    """
    num_heads = max(len(heads), 1) if options.num_heads is None else options.num_heads
    (patch_h, patch_w), (grid_h, grid_w) = to_2tuple(patch_size), to_2tuple(grid_size)
    dim = patch_h * patch_w * conv.in_channels
    head_dim = options.head_dim or dim
    if len(heads) > num_heads:
        raise ValueError(
            f'{num_heads=} with {head_dim=} cannot express this convolution exactly: use {len(heads)} heads of '
            f'{head_dim}.')
    out_pixels = patch_h // conv.stride[0] * (patch_w // conv.stride[1])
    dim_out = out_pixels * conv.out_channels
    sharpness = options.sharpness or exact_sharpness(grid_h * grid_w, conv.weight.dtype)
    num_params = num_heads * head_dim // groups * (dim + dim_out)
    if num_params > MAX_PARAMS:
        raise ValueError(f'{num_heads=} would make a layer of {num_params:.1e} parameters: take fewer or thinner ones.')

    with torch.device('meta'):  # PyTorch's default initialization would take as long as all the rest
        layer: Any = dict(dim_out=dim_out, dtype=conv.weight.dtype)
        if options.peak is not None or options.rel_pos == PaddedRelPosTable.name:
            layer.update(rel_pos=PaddedRelPosTable.name, padding=_reach(conv, heads))
        if groups == 1:
            attn = RelPosAttention(dim, grid_size, num_heads, head_dim, options.qk_dim, **layer)
        else:
            attn = GroupedAttention(
                dim, grid_size, num_heads, groups=groups, area=patch_h * patch_w, out_area=out_pixels, **layer)
    attn.to_empty(device='cpu').reset_parameters(generator)
    soft_sharpness, share_of_mean = 0., 0.
    if options.peak is not None and any(head.is_soft for head in heads):
        soft_sharpness, share_of_mean = _soft_sharpness(attn.rel_pos, options.peak)
    query, _, value = (weight.unflatten(0, (num_heads, -1)) for weight in attn.qkv.weight.split(attn.widths))
    output = attn.proj.weight.view(dim_out, num_heads, -1)

    output.zero_()
    kernel = _dense_kernel(conv) if groups == 1 else conv.weight.detach().cpu().double()
    block, block_offset = kernel, None
    mean_block: Any = 0.  # what all soft heads apply to what they look at
    for i, head in enumerate(heads):
        row, col = head.offset or (0, 0)
        turns = (-1, 0, 1) if conv.padding_mode == 'circular' else (0,)  # other offsets that lead to the same patch
        offsets = [(row + m * grid_h, col + n * grid_w) for m in turns for n in turns]
        attn.rel_pos.point_head(
            i, offsets, 0. if head.offset is None else soft_sharpness if head.is_soft else sharpness)
        if head.offset is None:
            block, block_offset = mean_block, None
        elif head.offset != block_offset:
            block, block_offset = _offset_block(kernel, *head.taps), head.offset
        inputs = F.one_hot(head.inputs, len(block))
        if head.is_soft:
            mean_block = mean_block + block * inputs.sum(dim=0).unsqueeze(1)
        share = -share_of_mean if head.offset is None else 1 + share_of_mean * head.is_soft
        query[i] = 0
        if groups == 1:
            value[i, :len(inputs)] = inputs.to(value.dtype)
        output[:, i, :len(inputs)] = (share * block[head.inputs]).T.to(output.dtype)
    if conv.bias is not None:
        attn.proj.bias.copy_(conv.bias.repeat(out_pixels))
    return attn.to(conv.weight.device)


def plan_heads(
        conv: nn.Conv2d, patch_size: Size2d, grid_size: Size2d, head_dim: Optional[int] = None,
        peak: Optional[float] = None, groups: int = 1) -> List[Head]:
    """Give every offset the heads that its inputs fill; a head of full width carries its patch whole.

    With full-width heads, an odd kernel without stride and dilation, and a grid that is larger than its reach, these
    are the (2 * ceil((K - 1) / 2P) + 1)^2 heads of Theorem 1. With a peak, the heads that subtract the mean come last.
    With groups, inputs are those of a group, as a head carries the same of all. Arguments and errors are those of
    `conv2d_to_attention`.
    """
    plain = isinstance(conv, nn.Conv2d) and type(conv).forward is nn.Conv2d.forward
    if not plain or type(conv)._conv_forward is not nn.Conv2d._conv_forward:
        raise TypeError(f'Expected a plain nn.Conv2d to rewrite as attention, got {type(conv).__name__}.')
    if conv.padding_mode not in ('zeros', 'circular'):
        raise ValueError(
            f"padding_mode='{conv.padding_mode}' reads other offsets at the border than inside, which a relative "
            f"position bias cannot: use 'zeros' or 'circular'.")
    (patch_h, patch_w), (grid_h, grid_w) = to_2tuple(patch_size), to_2tuple(grid_size)
    chans = conv.in_channels // groups
    head_dim = patch_h * patch_w * chans if head_dim is None else head_dim
    if min(patch_h, patch_w, grid_h, grid_w) < 1:
        raise ValueError(f'{patch_size=} and {grid_size=} must be positive.')
    row_taps, col_taps = _axis_taps(conv, 0, patch_h, grid_h), _axis_taps(conv, 1, patch_w, grid_w)
    heads = []
    for row, row_tap in row_taps.items():
        for col, col_tap in col_taps.items():
            reads = row_tap.any(dim=1).any(dim=0)[:, None] & col_tap.any(dim=1).any(dim=0)
            reads = reads.flatten().repeat_interleave(chans)
            inputs = reads.nonzero().flatten() if head_dim < len(reads) else torch.arange(len(reads), device='cpu')
            heads += [Head((row, col), chunk, (row_tap, col_tap)) for chunk in inputs.split(head_dim)]
    return heads if peak is None else _soften(heads, head_dim)


def _soften(heads: List[Head], head_dim: int) -> List[Head]:
    """Make heads soft, and add heads for the mean. Heads of offset (0, 0) become soft if that adds no further head."""
    sides = [head for head in heads if head.offset != (0, 0)]
    if not sides:
        return heads
    means, means_of_sides = (
        torch.cat([head.inputs for head in soft]).unique().split(head_dim) for soft in (heads, sides))
    center_is_soft = len(means) == len(means_of_sides)
    heads = [head._replace(is_soft=center_is_soft or head.offset != (0, 0)) for head in heads]
    return heads + [Head(None, inputs) for inputs in (means if center_is_soft else means_of_sides)]


def _reach(conv: nn.Conv2d, heads: List[Head]) -> Tuple[int, ...]:
    """Return how many patches of padding heads reach on every side, at least one, the default; none if circular."""
    if conv.padding_mode == 'circular':
        return 0, 0
    offsets = [(1, 1), *(head.offset for head in heads if head.offset is not None)]
    return tuple(max(map(abs, axis)) for axis in zip(*offsets))


def _soft_sharpness(rel_pos: Any, peak: float) -> Tuple[float, float]:
    """Return the bias of soft heads, and the share of the mean in what they add, relative to that of their offset."""
    num_keys, dtype = rel_pos.num_keys(rel_pos.grid_size), rel_pos.relative_position_bias_table.dtype
    if not 1 / num_keys < peak < 1:
        raise ValueError(f'{peak=} must be below 1, and above 1 / {num_keys}, that of even attention.')
    sharpness = math.log(peak * (num_keys - 1) / (1 - peak))
    rel_pos.point_head(0, [(0, 0)], sharpness)
    excess = math.expm1(rel_pos.offset_bias()[:, 0].max().item())  # of the bias as its type has rounded it
    if excess * MAX_ROUNDING < num_keys * torch.finfo(dtype).eps:
        raise ValueError(f'{peak=} is too close to 1 / {num_keys}, even attention, for {dtype}: take a larger one.')
    return sharpness, num_keys / excess


def _axis_taps(conv: nn.Conv2d, axis: int, patch: int, grid: int) -> Dict[int, torch.Tensor]:
    """Return what the kernel reads along one axis, by the offset of the patch that it reads from.

    That is a one-hot tensor (P / stride, K, P): output pixel i reads input pixel p by kernel tap m. Offsets that never
    meet the grid are left out; with circular padding they are taken modulo the grid.
    """
    kernel, stride, dilation = conv.kernel_size[axis], conv.stride[axis], conv.dilation[axis]
    if patch % stride:
        raise ValueError(f'{stride=} does not divide a patch side of {patch}: use a patch size divisible by {stride}.')
    pad_left, _ = _axis_padding(conv, axis)
    rows, taps = torch.arange(patch // stride, device='cpu'), torch.arange(kernel, device='cpu')
    pixels = rows[:, None] * stride + taps * dilation - pad_left
    offsets = pixels.div(patch, rounding_mode='floor')
    if conv.padding_mode == 'circular':
        offsets = (offsets + grid // 2) % grid - grid // 2
    one_hot = F.one_hot(pixels % patch, patch).double()
    return {o: one_hot * (offsets == o).unsqueeze(-1) for o in offsets.unique().tolist() if abs(o) < grid}


def _axis_padding(conv: nn.Conv2d, axis: int) -> Tuple[int, int]:
    if not isinstance(conv.padding, str):
        return conv.padding[axis], conv.padding[axis]
    span = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
    return (span // 2, span - span // 2) if conv.padding == 'same' else (0, 0)


def keeps_size(conv: nn.Conv2d, patch_size: Size2d, grid_size: Size2d) -> bool:
    """Return whether the padding keeps the size of the image, divided by the stride."""
    for axis, (patch, grid) in enumerate(zip(to_2tuple(patch_size), to_2tuple(grid_size))):
        span, stride, size = conv.dilation[axis] * (conv.kernel_size[axis] - 1), conv.stride[axis], patch * grid
        if (size + sum(_axis_padding(conv, axis)) - span - 1) // stride + 1 != size // stride:
            return False
    return True


def _dense_kernel(conv: nn.Conv2d) -> torch.Tensor:
    """Return the kernel without groups, (C_out, C_in, K_h, K_w), in float64: sums of one-hot products are exact."""
    weight = conv.weight.detach().cpu().double().unflatten(0, (conv.groups, -1))
    same_group = torch.eye(conv.groups, dtype=torch.double, device='cpu')
    return torch.einsum('gdcmn,gh->gdhcmn', weight, same_group).flatten(2, 3).flatten(0, 1)


def _offset_block(kernel: torch.Tensor, row_tap: torch.Tensor, col_tap: torch.Tensor) -> torch.Tensor:
    """Return what the patch at one offset adds to the output: (P_h * P_w * C_in, P_h * P_w * C_out / stride^2).

    It is W^O_r of Appendix A.2: row (s, i) and column (t, j) hold the weight by which output pixel t, channel j,
    reads input pixel s, channel i.
    """
    return torch.einsum('imp,dcmn,jnq->pqcijd', row_tap, kernel, col_tap).flatten(0, 2).flatten(1)
