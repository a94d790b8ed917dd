"""Attention whose heads are shifts: each looks at one offset, whatever the image is.

Such a head needs no queries, keys or softmax: it moves its values by the offset. What tells a shift from other heads is
in `certificates.py`.
"""
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from .rel_pos import Grid, Mask, reject_attn_mask

torch.fx.wrap('reject_attn_mask')  # keep as a leaf for FX

BORDERS = ('zeros', 'circular', 'replicate')  # what a shift sees outside the image, as a convolution's padding_mode


class Shift(NamedTuple):
    """Where a head looks from every query."""
    offset: Tuple[int, int]  # key patch minus query patch, (row, column)
    border: str  # one of BORDERS

    def keys(self, grid_size: Grid) -> torch.Tensor:
        """Return the key of every query, the number of patches (that of the zero key) for none: shape (N,)."""
        height, width = grid_size
        rows = torch.arange(height, device='cpu').unsqueeze(1) + self.offset[0]
        cols = torch.arange(width, device='cpu') + self.offset[1]
        if self.border == 'circular':
            rows, cols = rows % height, cols % width
        if self.border == 'replicate':
            rows, cols = rows.clamp(0, height - 1), cols.clamp(0, width - 1)
        outside = (rows < 0) | (rows >= height) | (cols < 0) | (cols >= width)
        return (rows * width + cols).masked_fill(outside, height * width).flatten()


class TokenShift(nn.Module):
    """Give every token what is at an offset from it: (B, N, C) to the same shape."""
    __constants__ = ('offset', 'border', 'grid_size')

    def __init__(self, shift: Shift, grid_size: Grid) -> None:
        super().__init__()
        self.offset, self.border = shift
        self.grid_size = grid_size

    def extra_repr(self) -> str:
        return f'offset={self.offset}, border={self.border}'

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row, col = self.offset
        height, width = self.grid_size
        if row == 0 and col == 0:
            return x
        x = x.reshape(x.shape[0], height, width, x.shape[2])
        if self.border == 'circular':
            x = torch.roll(x, [-row, -col], [1, 2])
        elif self.border == 'replicate':
            rows = torch.arange(row, row + height, device=x.device).clamp(0, height - 1)
            cols = torch.arange(col, col + width, device=x.device).clamp(0, width - 1)
            x = x.index_select(1, rows).index_select(2, cols)
        elif abs(row) < height and abs(col) < width:
            x = x[:, max(row, 0):height + min(row, 0), max(col, 0):width + min(col, 0)]
            x = F.pad(x, [0, 0, max(-col, 0), max(col, 0), max(-row, 0), max(row, 0)])
        else:
            x = torch.zeros_like(x)
        return x.flatten(1, 2)


def group_heads(shifts: Sequence[Optional[Shift]]) -> Dict[Shift, List[int]]:
    """Return the heads with each shift, given that of every head or None."""
    groups: Dict[Shift, List[int]] = {}
    for head, shift in enumerate(shifts):
        if shift is not None:
            groups.setdefault(shift, []).append(head)
    return groups


class Factors(NamedTuple):
    """What heads with the same shift do: tokens x become shift(x @ value.T + bias) @ output.T."""
    value: torch.Tensor  # (width, dim)
    bias: Optional[torch.Tensor]  # (width,)
    output: torch.Tensor  # (dim_out, width)

    def to(self, device: torch.device, dtype: torch.dtype) -> 'Factors':
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return Factors(self.value.to(device, dtype), bias, self.output.to(device, dtype))

    def without_idle(self) -> 'Factors':
        """Return the same without dimensions that the output does not use."""
        used = self.output.any(dim=0)
        return Factors(self.value[used], None if self.bias is None else self.bias[used], self.output[:, used])


def head_factors(qkv: nn.Linear, proj: nn.Linear, num_heads: int, heads: List[int]) -> Factors:
    """Return the factors of some heads of an attention layer, as one."""
    value = qkv.weight.view(3, num_heads, -1, qkv.in_features)[2, heads].flatten(0, 1)
    bias = None if qkv.bias is None else qkv.bias.view(3, num_heads, -1)[2, heads].flatten()
    return Factors(value, bias, proj.weight.view(proj.out_features, num_heads, -1)[:, heads].flatten(1))


class ShiftedHeads(nn.Module):
    """Heads that are shifts: (B, N, dim) to (B, N, dim_out). The weights are the caller's.

    Heads with the same shift move their values, or, where these are wide, the tokens: the value and output projections
    are then multiplied first, as in weight absorption. Outside the image values are zero, and so is their bias.
    """

    def __init__(self, shifts: Iterable[Shift], widths: Iterable[int], dim: int, dim_out: int, grid_size: Grid) -> None:
        """
        Args:
            shifts: All different.
            widths: Of the values of the heads with each shift.
            dim, dim_out: Width of a token, and of the output.
            grid_size: Patches per image side.
        """
        super().__init__()
        self.shifts = nn.ModuleList(TokenShift(shift, grid_size) for shift in shifts)
        self.widths = list(widths)
        self.moves_tokens = [width * (dim + dim_out) > dim * dim_out for width in self.widths]

    def weights(
            self,
            factors: Sequence[Factors],
    ) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """Return the weights that `forward` takes: of values, of the output, and what every shift adds to it."""
        values = [value for moves_tokens, (value, _, _) in zip(self.moves_tokens, factors) if not moves_tokens]
        outputs = [output @ value if moves_tokens else output
                   for moves_tokens, (value, _, output) in zip(self.moves_tokens, factors)]
        biases = [output @ bias for _, bias, output in factors if bias is not None]
        value = torch.cat(values) if values else factors[0].value[:0]
        return value, torch.cat(outputs, dim=1), torch.stack(biases) if biases else None

    def forward(
            self,
            x: torch.Tensor,
            value: torch.Tensor,
            output: torch.Tensor,
            shift_bias: Optional[torch.Tensor],
            bias: Optional[torch.Tensor],
    ) -> torch.Tensor:
        values = F.linear(x, value)
        ones = x.new_ones(1, x.shape[1], 1)
        moved: List[torch.Tensor] = []
        inside: List[torch.Tensor] = []
        start = 0
        for i, shift in enumerate(self.shifts):
            if self.moves_tokens[i]:
                moved.append(shift(x))
            else:
                moved.append(shift(values[..., start:start + self.widths[i]]))
                start += self.widths[i]
            inside.append(shift(ones))
        x = F.linear(torch.cat(moved, dim=-1), output, bias)
        if shift_bias is not None:
            x = x + (torch.cat(inside, dim=-1) @ shift_bias).to(x.dtype)
        return x


class ShiftedAttention(nn.Module):
    """An attention layer for inference, the heads that are shifts computed as such. Nothing of it can be trained.

    Maps tokens of shape (B, N, dim) to (B, N, dim_out).
    """

    @torch.no_grad()
    def __init__(
            self,
            shifts: Dict[Shift, Factors],
            bias: Optional[torch.Tensor],
            grid_size: Grid,
            rest: Optional[nn.Module] = None,
    ) -> None:
        """
        Args:
            shifts: What the heads with each shift do.
            bias: Of the output, (dim_out,).
            grid_size: Patches per image side.
            rest: A layer with the other heads, without this bias.
        """
        super().__init__()
        used = {shift: each.without_idle() for shift, each in shifts.items() if each.output.any()}
        used = used or dict([next(iter(shifts.items()))])  # one at least
        factors = list(used.values())
        output, value = factors[0].output, factors[0].value
        self.grid_size = grid_size
        self.heads = ShiftedHeads(used, [len(each.value) for each in factors], value.shape[1], len(output), grid_size)
        precise = torch.promote_types(value.dtype, torch.float32)  # so that products are rounded once
        weights = self.heads.weights([each.to(value.device, precise) for each in factors])
        if weights[2] is not None and not weights[2].any():
            weights = *weights[:2], None
        for name, weight in zip(('value', 'output', 'shift_bias', 'bias'), (*weights, bias)):
            frozen = None if weight is None else nn.Parameter(weight.detach().to(value.dtype, copy=True), False)
            self.register_parameter(name, frozen)
        self.rest = rest

    def set_grid_size(self, grid_size: Grid) -> None:
        """Refuse to change the grid: on another one, other heads can be shifts, and these can be others."""
        if grid_size != self.grid_size:
            raise ValueError(
                'The heads were found to be shifts on a grid of {} x {} patches: set the input size before '
                'the model is reparameterized.'.format(*self.grid_size))

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        x = reject_attn_mask(x, attn_mask, is_causal)
        out = self.heads(x, self.value, self.output, self.shift_bias, self.bias)
        if self.rest is not None:
            out = out + self.rest(x)
        return out
