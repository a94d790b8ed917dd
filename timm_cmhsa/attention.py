"""Phase 2's token mixer: multi-head self-attention with relative position bias and a zero key."""
import contextlib
import logging
from typing import Any, Dict, Final, List, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple, use_fused_attn
from torch import nn

from . import layers
from .layers import Mask, Size2d
from .rel_pos import Grid, PaddedRelPosTable, create_rel_pos
from .shifts import HeadShifts, hard_offsets

_logger = logging.getLogger(__name__)

WIDE_QK_DIM, THIN_QK_DIM = 64, 32  # width of queries and keys of heads as wide as a token, and of thinner ones


class RelPosAttention(nn.Module):
    """Multi-head self-attention with relative position bias (Equations 2 to 4 of arXiv 2111.01353).

    The zero key is one more key than there are tokens, with a zero key, a zero value and a bias per head (what
    `nn.MultiheadAttention` calls `add_zero_attn`). A head uses it to attend to nothing, as it must where its offset
    points outside the image. Maps tokens of shape (B, N, dim) to (B, N, dim_out).
    """
    fused_attn: Final[bool]

    def __init__(
            self,
            dim: int,
            grid_size: Size2d,
            num_heads: int = 9,
            head_dim: Optional[int] = None,
            qk_dim: Optional[int] = None,
            dim_out: Optional[int] = None,
            qkv_bias: bool = True,
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            rel_pos: str = 'table',
            padding: Optional[Size2d] = None,
            hard_attn: bool = False,
            **dd: Any,
    ) -> None:
        """
        Args:
            dim, dim_out: Widths of tokens, before and after; by default the same.
            grid_size: Patches per image side.
            num_heads: Number of heads, N_H.
            head_dim: Width of a head's values, d_H; by default that of a token, as in the paper.
            qk_dim: Width of a head's queries and keys; by default 64, or 32 for heads thinner than a token, and at most
                `head_dim`. The paper has `head_dim`. Positions need no queries: these carry content alone.
            qkv_bias: Give queries, keys and values a bias.
            attn_drop, proj_drop: Dropout rates of the attention weights and of the output.
            rel_pos: Relative position bias, 'table' or 'padded_table'.
            padding: Patches of padding around the grid of a 'padded_table'; by default one on every side.
            hard_attn: Compute heads as shifts as soon as weights of hard heads are loaded, see `set_hard_attn`.

        Raises:
            ValueError: If a number or width is not positive, or the relative position bias is unknown.
        """
        super().__init__()
        head_dim = dim if head_dim is None else head_dim
        qk_dim = default_qk_dim(dim, head_dim) if qk_dim is None else qk_dim
        if min(num_heads, head_dim, qk_dim) < 1:
            raise ValueError(f'{num_heads=}, {head_dim=} and {qk_dim=} must be positive.')
        self.num_heads, self.head_dim, self.qk_dim = num_heads, head_dim, qk_dim
        self.scale = qk_dim ** -0.5
        self.fused_attn = use_fused_attn()
        self.widths: List[int] = [num_heads * width for width in (qk_dim, qk_dim, head_dim)]
        self.qkv = nn.Linear(dim, sum(self.widths), bias=qkv_bias, **dd)
        self.rel_pos = create_rel_pos(rel_pos, to_2tuple(grid_size), num_heads, padding, **dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj: Any = nn.Linear(num_heads * head_dim, dim if dim_out is None else dim_out, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.shifts: Optional[HeadShifts] = None
        self.frozen: List[str] = []  # biases, by `set_hard_attn`
        self.hard_attn = hard_attn
        self.reset_parameters()
        self.register_load_state_dict_post_hook(_update_hard_attn)

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        for linear in (self.qkv, self.proj):
            nn.init.trunc_normal_(linear.weight, std=.02, generator=generator)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.rel_pos.reset_parameters(generator)
        if self.shifts is not None:
            self.set_hard_attn(False)

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        if self.shifts is not None and self.fused_attn:
            start = self.widths[0] + self.widths[1]  # of the values
            bias = None if self.qkv.bias is None else self.qkv.bias[start:]
            x = F.linear(layers.reject_attn_mask(x, attn_mask, is_causal), self.qkv.weight[start:], bias)
            return self.proj_drop(self.proj(self.shifts(x)))
        B, N, _ = x.shape
        q, k, v = self.qkv(x).split(self.widths, dim=-1)
        q = q.reshape(B, N, self.num_heads, self.qk_dim).transpose(1, 2)
        k = k.reshape(B, N, self.num_heads, self.qk_dim).transpose(1, 2)
        v = v.reshape(B, N, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = F.pad(k, [0, 0, 0, 1]), F.pad(v, [0, 0, 0, 1])  # the zero key
        attn_bias = layers.add_attn_mask(self.rel_pos.get_bias(), attn_mask, is_causal)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_bias, dropout_p=self.attn_drop.p if self.training else 0., scale=self.scale)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1) + attn_bias
            x = self.attn_drop(attn.softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))

    @property
    def grid_size(self) -> Grid:
        return self.rel_pos.grid_size

    def set_grid_size(self, grid_size: Grid) -> None:
        """Change the grid; the bias of every offset is kept. Heads that are not hard on this grid are attention."""
        self.rel_pos.set_grid_size(grid_size)
        with contextlib.suppress(ValueError):
            self.set_hard_attn(self.hard_attn)

    def set_hard_attn(self, enable: bool = True) -> None:
        """Compute hard heads as shifts or as attention again, see `CmhsaAttn.set_hard_attn`.

        A head that is not hard must have a zero output projection, and is skipped.

        Raises:
            ValueError: If another head is not hard, or attention weights are to be dropped. All are attention then.
        """
        for name in self.frozen:
            self.rel_pos.get_parameter(name).requires_grad_(True)
        self.shifts, self.frozen = None, []
        if enable and not self.qkv.weight.is_meta:  # otherwise when weights are loaded
            if self.attn_drop.p:
                raise ValueError('hard_attn computes no attention weights to drop: use attn_drop_rate=0.')
            self.rel_pos.init_non_persistent_buffers()  # a model from the meta device has none yet
            self.shifts = HeadShifts(self.all_hard_offsets(), self.head_dim, self.grid_size)
            self.frozen = [name for name, parameter in self.rel_pos.named_parameters() if parameter.requires_grad]
            self.rel_pos.requires_grad_(False)
        self.hard_attn = enable

    def all_hard_offsets(self) -> List[Optional[Tuple[int, int]]]:
        """Return the offset of every head, None if its output projection is zero. ValueError: another is not hard."""
        used = self.used_heads().tolist()
        offsets = [offset if is_used else None for offset, is_used in zip(hard_offsets(self), used)]
        num_soft = sum(is_used and offset is None for offset, is_used in zip(offsets, used))
        if num_soft:
            raise ValueError(
                f'hard_attn needs heads with zero queries that look at one offset: {num_soft} of {self.num_heads} '
                'heads do not. Train them as attention.')
        return offsets

    def used_heads(self) -> torch.Tensor:
        """Return whether the output projection of a head is not zero: shape (num_heads,)."""
        return self.proj.weight.unflatten(1, (self.num_heads, -1)).any(dim=2).any(dim=0)

    def fuse(self) -> 'RelPosAttention':
        """Compute heads as shifts if all are hard (timm's `reparameterize_model`). Return this layer."""
        with contextlib.suppress(ValueError):
            self.set_hard_attn()
            self.fused_attn = True  # type: ignore[misc]
        return self

    def args(self) -> Dict[str, Any]:
        """Return the arguments of a model with such layers."""
        padding = self.rel_pos.padding if isinstance(self.rel_pos, PaddedRelPosTable) else None
        return dict(
            num_heads=self.num_heads, head_dim=self.head_dim, qk_dim=self.qk_dim, qkv_bias=self.qkv.bias is not None,
            rel_pos=self.rel_pos.name, padding=padding)

    def extra_repr(self) -> str:
        return f'num_heads={self.num_heads}, head_dim={self.head_dim}, qk_dim={self.qk_dim}'


def default_qk_dim(dim: int, head_dim: int) -> int:
    return min(WIDE_QK_DIM if head_dim >= dim else THIN_QK_DIM, head_dim)


def _update_hard_attn(attn: Any, incompatible_keys: Any) -> None:
    """Find out where the hard heads of a layer look, whose weights were loaded."""
    try:
        attn.set_hard_attn(attn.hard_attn)
    except ValueError as e:
        _logger.warning('%s', e)
