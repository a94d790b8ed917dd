"""Hard heads computed as shifts: a head that looks at one offset moves its values, and needs no softmax."""
import math
from itertools import groupby
from typing import Any, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from .rel_pos import Grid, PaddedRelPosTable

MAX_LEAK = 1e-4  # largest share of its attention that a hard head may give to other patches

Offset = Tuple[int, int]  # key patch minus query patch, (row, column)


@torch.no_grad()
def hard_offsets(attn: Any) -> List[Optional[Offset]]:
    """Return the offset of every hard head of a `RelPosAttention`, None for the other heads.

    A head is hard if its queries are zero, so that scores are biases alone, and its biases give all but `MAX_LEAK` of
    the attention to one offset, or to the zero key where that offset lies outside the image.
    """
    rel_pos = attn.rel_pos
    queries = [parameter[:attn.widths[0]].cpu().reshape(attn.num_heads, -1) for parameter in attn.qkv.parameters()]
    is_hard = ~torch.cat(queries, dim=1).any(dim=1)
    bias, zero_key = rel_pos.offset_bias().cpu().double(), rel_pos.zero_key_bias.cpu().double()
    (best, second), (index, _) = F.pad(bias, [0, 0, 0, 1], value=-math.inf).topk(2, dim=0)  # there may be one offset
    offsets = rel_pos.offsets.cpu()[index]
    if isinstance(rel_pos, PaddedRelPosTable):
        num_keys = rel_pos.num_keys(rel_pos.grid_size)
        is_hard &= (offsets.abs() <= offsets.new_tensor(rel_pos.padding)).all(dim=1)
        others = num_keys * (second - best).exp()
        leak = torch.maximum(others * (1 + zero_key.exp()), others * (1 + (-zero_key).exp()))
    else:
        num_tokens = math.prod(rel_pos.grid_size)
        leak = torch.maximum(
            num_tokens * (second - best).exp() + (zero_key - best).exp(), num_tokens * (second - zero_key).exp())
    is_hard &= leak <= MAX_LEAK
    return [(row, col) if hard else None for (row, col), hard in zip(offsets.tolist(), is_hard.tolist())]


def shift_tokens(x: torch.Tensor, offset: Offset, grid_size: Grid) -> torch.Tensor:
    """Give every patch the token at an offset from it, and zeros outside the image: (B, N, C) to the same shape."""
    row, col = offset
    height, width = grid_size
    if row == 0 and col == 0:
        return x
    if abs(row) >= height or abs(col) >= width:
        return torch.zeros_like(x)
    x = x.reshape(x.shape[0], height, width, x.shape[2])
    x = x[:, max(row, 0):height + min(row, 0), max(col, 0):width + min(col, 0)]
    return F.pad(x, [0, 0, max(-col, 0), max(col, 0), max(-row, 0), max(row, 0)]).flatten(1, 2)


class HeadShifts(nn.Module):
    """Move the values of every head by its offset, None for zeros: (B, N, num_heads * head_dim) to the same shape."""

    def __init__(self, offsets: List[Optional[Offset]], head_dim: int, grid_size: Grid) -> None:
        super().__init__()
        self.grid_size = grid_size
        groups = [(offset, len(list(heads))) for offset, heads in groupby(offsets)]
        self.offsets: List[Offset] = [grid_size if offset is None else offset for offset, _ in groups]
        self.widths: List[int] = [num_heads * head_dim for _, num_heads in groups]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.split(self.widths, dim=-1)  # indexed below, as FX cannot iterate over it
        shifted = [shift_tokens(values[i], offset, self.grid_size) for i, offset in enumerate(self.offsets)]
        return torch.cat(shifted, dim=-1)
