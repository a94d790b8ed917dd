"""The way back: attention whose heads are shifts, computed as shifts, and as a convolution again."""
import itertools
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from timm.layers import to_2tuple
from torch import nn

from .analysis import attention_layers, attention_maps, eval_mode
from .attention import RelPosAttention
from .certificates import TOLERANCE, BiasWinners, bias_winners, max_output_error, proved_leaks, proved_shifts
from .cmhsa import CmhsaBlock
from .patches import Size2d


class ShiftReport(NamedTuple):
    """What became of one attention layer.

    Attributes:
        name: Of the layer in the model.
        num_heads: All heads.
        num_proved: Heads that are shifts for any image.
        num_measured: Heads that are shifts for the given images.
        leak: Largest share of its attention that a shift gave to other patches; proved where there is a proof, else
            measured.
        bound: Of the error of an output token, as a vector; inf if any head was measured only, or there is no norm.
        error: Largest of an output token, as a vector, for the given images.
        rel_error: The same relative to the largest output token.
    """
    name: str
    num_heads: int
    num_proved: int
    num_measured: int
    leak: float
    bound: float
    error: Optional[float]
    rel_error: Optional[float]


class ShiftReports(List[ShiftReport]):
    """What became of the attention layers of a model; prints as a table."""

    def __str__(self) -> str:
        head = ('layer', 'heads', 'shifts: proved', 'measured', 'leak', 'bound', 'error', 'relative')
        rows: List[Sequence[str]] = [head]
        for layer in self:
            numbers = [layer.leak, layer.bound, layer.error, layer.rel_error]
            rows.append([
                layer.name, *map(str, layer[1:4]), *('-' if number is None else f'{number:.1e}' for number in numbers)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in rows)


@torch.no_grad()
def fuse_shifts(
        model: nn.Module,
        images: Optional[torch.Tensor] = None,
        tolerance: float = TOLERANCE,
) -> ShiftReports:
    """Compute heads that are shifts as such, in place, for inference.

    `timm.utils.reparameterize_model` does the same for shifts that are proved at the default tolerance, and reports
    nothing. A proof takes the biases, the query and key projections, and the LayerNorm before the attention; without
    one (as in CNNs after `attend_convs`), only heads without queries or keys are proved.

    Args:
        model: A model of this package, or one with convolutions replaced by `attend_convs`.
        images: Shape (B, C, H, W). Heads without a proof are shifts if they are for these images. Also measures errors.
        tolerance: Largest share of its attention that a shift may give to other patches.

    Returns:
        A report for every layer. Bounds hold in exact arithmetic, rounding comes on top.

    Raises:
        ValueError: If the model has no attention layer of this package or is one itself, or the tolerance is not
            between 0 and 1.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f'{tolerance=} must be between 0 and 1.')
    layers = attention_layers(model)
    if '' in layers:
        raise ValueError(f'{type(model).__name__} is an attention layer itself: call its fuse(), or give its model.')
    norms: Dict[int, Any] = {}
    for block in model.modules():
        if isinstance(block, CmhsaBlock):  # a layer that several blocks share has no norm of its own
            norms[id(block.attn)] = None if id(block.attn) in norms else block.norm1
    winners = {name: bias_winners(layer) for name, layer in layers.items()}
    if images is not None and not len(images):
        raise ValueError('There are no images to measure with.')
    measured = {} if images is None else _measured_leaks(model, images, winners)
    outputs = {} if images is None else _outputs(model, images, layers)
    reports = ShiftReports()
    for name, layer in layers.items():
        norm, chosen = norms.get(id(layer)), winners[name]
        proved = proved_leaks(layer, chosen, norm)
        is_proved = proved <= tolerance
        leaks = torch.where(is_proved, proved, measured.get(name, torch.ones_like(proved)))
        shifts = [shift if leak <= tolerance else None for shift, leak in zip(chosen.shifts, leaks)]
        found = torch.tensor([shift is not None for shift in shifts], dtype=torch.bool, device='cpu')
        error = rel_error = None
        bound = 0.
        if found.any():
            if not (is_proved | ~found).all():
                bound = math.inf
            for head in found.nonzero().flatten().tolist():
                alone = [shift if i == head else None for i, shift in enumerate(shifts)]
                factors, = layer.shift_factors(alone).values()
                bound += max_output_error(factors, leaks[head].item(), norm)
            fused = layer.fuse_shifts(shifts)
            if name in outputs:
                inputs, expected = outputs[name]
                with eval_mode(fused):
                    error = (fused(inputs) - expected).norm(dim=-1).max().item()
                rel_error = error / max(expected.norm(dim=-1).max().item(), torch.finfo(expected.dtype).tiny)
            model.set_submodule(name, fused)
        reports.append(ShiftReport(
            name=name,
            num_heads=layer.num_heads,
            num_proved=int((found & is_proved).sum()),
            num_measured=int((found & ~is_proved).sum()),
            leak=leaks[found].max().item() if found.any() else 0.,
            bound=bound,
            error=error,
            rel_error=rel_error,
        ))
    return reports


def _measured_leaks(
        model: nn.Module, images: torch.Tensor, winners: Dict[str, BiasWinners]) -> Dict[str, torch.Tensor]:
    """Return the largest share of its attention that every head gives to other keys than its shift's, (num_heads,)."""
    leaks = {}
    for name, maps in attention_maps(model, images).items():
        weights = maps.weights if maps.zero_key is None else torch.cat([maps.weights, maps.zero_key.unsqueeze(-1)], -1)
        leak = torch.ones(weights.shape[1], dtype=torch.double, device='cpu')
        for head, shift in enumerate(winners[name].shifts):
            if shift is not None:
                others = weights[:, head].scatter(
                    -1, shift.keys(maps.grid_size).to(weights.device).expand(len(images), -1).unsqueeze(-1), 0.)
                leak[head] = others.sum(dim=-1).max().item()
        leaks[name] = leak
    return leaks


def _outputs(
        model: nn.Module, images: torch.Tensor, layers: Dict[str, Any]) -> Dict[str, Tuple[torch.Tensor, torch.Tensor]]:
    """Return input and output of every layer."""
    seen: Dict[str, Tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda layer, inputs, output: seen.update({name: (inputs[0], output)})

    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    try:
        with eval_mode(model):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return seen


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
        tolerance: float = TOLERANCE,
) -> Conv2dResult:
    """Rewrite self-attention on patches as a convolution: the inverse of `conv2d_to_attention` (Theorem 1).

    Every pair of an input and an output pixel has a weight, by the heads at the offset between their patches. In a
    convolution it depends on the displacement between the pixels alone. The kernel takes the mean over all pairs with
    the same displacement, which is the closest convolution.

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
        TypeError: If it is not a `RelPosAttention`.
        ValueError: If a head is no shift by proof, heads see different things outside the image, or the widths are not
            those of such patches.
    """
    if not isinstance(attn, RelPosAttention):
        raise TypeError(f'Expected a RelPosAttention to rewrite as a convolution, got {type(attn).__name__}.')
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
    used = attn.proj.weight.unflatten(1, (attn.num_heads, -1)).any(dim=2).any(dim=0)
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
