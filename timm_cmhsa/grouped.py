"""Attention for depthwise and grouped convolutions: heads move tokens, and a channel has a weight for every head."""
import math
from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from . import layers
from .attention import RelPosAttention
from .layers import Mask, Size2d

GROUPED_QK_DIM = 2  # width of queries and keys: wider ones would cost more than all the rest


class GroupedProj(nn.Module):
    """What every head adds to the output, group by group: maps (B, N, dim) to (B, N, num_heads * dim_out).

    The weight, (dim_out, num_heads * dim / groups), is that of a linear layer without its zeros between groups; `shape`
    is (output pixels of a patch, groups, a group's output channels, heads, pixels of a patch, a group's channels). The
    bias is for the sum of the heads.
    """

    def __init__(self, shape: Tuple[int, int, int, int, int, int], **dd: Any) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(math.prod(shape[:3]), math.prod(shape[3:]), **dd))
        self.bias = nn.Parameter(torch.empty(math.prod(shape[:3]), **dd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (self.shape[4], self.shape[1], -1))
        return torch.einsum('bnpgi,qgohpi->bnhqgo', x, self.weight.view(self.shape)).flatten(2)

    def add_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Add up what heads have moved: (B, N, num_heads * dim_out) to (B, N, dim_out)."""
        return x.unflatten(-1, (self.shape[3], -1)).sum(dim=2, dtype=x.dtype) + self.bias.to(x.dtype)


class GroupedAttention(RelPosAttention):
    """A `RelPosAttention` for depthwise and grouped convolutions: (B, N, dim) to (B, N, dim_out).

    It has no value projection: heads move the tokens themselves, and the output projection does not mix groups. It is
    applied before tokens are moved, which is the same, so that the sum over heads is one product of matrices.
    """

    def __init__(
            self, dim: int, grid_size: Size2d, num_heads: int, dim_out: int, groups: int, area: int, out_area: int,
            **kwargs: Any) -> None:
        """See `RelPosAttention`. Areas are the pixels of a patch, a flattened token, of the input and the output."""
        super().__init__(dim, grid_size, num_heads, 1, GROUPED_QK_DIM, dim_out, **kwargs)
        dd: Any = {'device': kwargs.get('device'), 'dtype': kwargs.get('dtype')}
        self.head_dim = dim_out
        self.widths[2] = 0  # the projections have no values
        self.qkv = nn.Linear(dim, sum(self.widths), bias=self.qkv.bias is not None, **dd)
        chans, chans_out = dim // (area * groups), dim_out // (out_area * groups)
        self.proj = GroupedProj((out_area, groups, chans_out, num_heads, area, chans), **dd)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        if self.shifts is not None and self.fused_attn:
            x = self.shifts(self.proj(layers.reject_attn_mask(x, attn_mask, is_causal)))
            return self.proj_drop(self.proj.add_heads(x))
        B, N, _ = x.shape
        q, k = self.qkv(x).reshape(B, N, 2, self.num_heads, self.qk_dim).permute(2, 0, 3, 1, 4).unbind(0)
        scores = F.pad((q * self.scale) @ k.transpose(-2, -1), [0, 1])  # the zero key
        attn = scores + layers.add_attn_mask(self.rel_pos.get_bias(), attn_mask, is_causal)
        attn = self.attn_drop(attn.softmax(dim=-1))[..., :-1].permute(0, 2, 3, 1).flatten(2)
        x = attn @ self.proj(x).reshape(B, N * self.num_heads, self.head_dim)
        return self.proj_drop(x + self.proj.bias.to(x.dtype))
