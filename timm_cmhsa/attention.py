"""Phase 2's token mixer: multi-head self-attention with relative position bias and a zero key."""
import copy
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, to_2tuple
from torch import nn

from .certificates import MAX_LEAK, max_content_score, proved_shifts
from .efficient import (
    AbsorbedRelPosAttention,
    absorb_weights,
    chunked_attention,
    default_chunk_size,
    fused_attention,
    is_cheaper_absorbed,
    is_onnx_export,
    is_plain_linear,
    multi_query_attention,
)
from .encodings import create_rel_pos
from .patches import Size2d
from .rel_pos import Mask, OffsetRelPos, add_attn_mask, reject_attn_mask
from .shiftable import ShiftableAttention
from .shifts import Factors, Shift, ShiftedAttention, ShiftedHeads, group_heads, head_factors

# keep as leaves for FX
torch.fx.wrap('add_attn_mask')
torch.fx.wrap('fused_attention')
torch.fx.wrap('reject_attn_mask')


class RelPosAttention(ShiftableAttention, Attention):
    """Multi-head self-attention with relative position bias (Equations 2 to 4 of arXiv 2111.01353).

    The zero key, one more key than there are tokens, has a zero key, a zero value and a learned bias per head (what
    `nn.MultiheadAttention` calls `add_zero_attn`). A head can attend to nothing by it, as it must where its offset
    points outside the image. Maps tokens of shape (B, N, dim) to (B, N, dim_out).

    Two attributes make it cheaper. They follow from the shapes, whenever these change, and can be set. Neither changes
    the function (see `efficient.py`), and an encoding that depends on the queries has no use for them:

    - `absorb`: Absorb the weights of wide heads, anew in every training step. `fuse` does it once for inference.
    - `chunk_size`: Number of queries that attend at a time, None for all.

    Heads that are shifts can be trained as such, see `CmhsaAttn.set_hard_attn`. Where timm's
    `fused_attn` is off, the layer does none of this: it forms the attention weights, for maps.
    """
    if TYPE_CHECKING:
        shifted: Optional[ShiftedHeads]  # TorchScript knows no such annotation

    def __init__(
            self,
            dim: int,
            grid_size: Size2d,
            num_heads: int = 9,
            head_dim: Optional[int] = None,
            dim_out: Optional[int] = None,
            qkv_bias: bool = True,
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            rel_pos: str = 'table',
            padding: Optional[Size2d] = None,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
    ) -> None:
        """
        Args:
            dim: Token width.
            grid_size: Patches per image side.
            num_heads: Number of heads.
            head_dim: Width of a head; by default that of a token, as in the paper (d_H = d).
            dim_out: Output width; by default that of a token.
            qkv_bias: Give queries, keys and values a bias.
            attn_drop: Dropout rate of the attention weights.
            proj_drop: Dropout rate of the output.
            rel_pos: Relative position encoding, see `create_rel_pos`.
            padding: Patches of padding that the zero key of a 'padded_table' stands for.

        Raises:
            ValueError: If there is no head, a head has no width, or there is no such encoding.
        """
        if num_heads < 1 or (head_dim is not None and head_dim < 1):
            raise ValueError(f'{num_heads=} and {head_dim=} must be positive.')
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        self.qkv: nn.Linear
        self.proj: nn.Linear
        self.num_heads: int
        super().__init__(
            dim,
            num_heads=num_heads,
            attn_head_dim=head_dim or dim,
            dim_out=dim_out,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            **dd,
        )
        self.rel_pos = create_rel_pos(
            rel_pos, to_2tuple(grid_size), num_heads, self.head_dim, padding=padding, **dd)
        self.absorb, self.chunk_size = self.default_form()
        self.shifted = None
        self.reset_parameters()

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        for linear in (self.qkv, self.proj):
            nn.init.trunc_normal_(linear.weight, std=.02, generator=generator)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.rel_pos.reset_parameters(generator)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        if grid_size != self.grid_size:
            super().set_grid_size(grid_size)
            self.absorb, self.chunk_size = self.default_form()
            self.set_hard_attn(None)  # until the shifts are found again

    def set_hard_attn(self, shifts: Optional[Sequence[Optional[Shift]]]) -> None:
        """Compute heads as these shifts, for training too, or as attention again if there are none.

        Meanwhile biases are frozen, queries and keys get zero gradients, and heads that are no shift are left out. Once
        a projection has hooks or an adapter, the layer computes attention.

        Args:
            shifts: Of every head, see `hard_shifts`.
        """
        if self.shifted is None:
            self.learned_biases = [name for name, bias in self.rel_pos.named_parameters() if bias.requires_grad]
        for name in self.learned_biases:
            self.rel_pos.get_parameter(name).requires_grad_(shifts is None)
        self.shifted = None
        if shifts is not None:
            groups = group_heads(shifts)
            self.shifted_heads = list(groups.values())
            widths = [len(heads) * self.head_dim for heads in self.shifted_heads]
            self.shifted = ShiftedHeads(groups, widths, self.qkv.in_features, self.proj.out_features, self.grid_size)

    def hard_shifts(self, norm: Optional[nn.Module] = None) -> List[Optional[Shift]]:
        """Return the shifts of all heads, None for a head that is none and has a zero output projection.

        Args:
            norm: What normalizes the input. A LayerNorm bounds what content adds to the scores.

        Raises:
            ValueError: If another head is no shift by proof, attention weights would be dropped, or a projection has
                hooks or an adapter.
        """
        if self.attn_drop.p:
            raise ValueError('hard_attn computes no attention weights to drop: use attn_drop_rate=0.')
        if not self.is_plain():
            raise ValueError('hard_attn would leave out hooks or adapters of qkv and proj: use attention.')
        shifts = proved_shifts(self, norm)
        strangers = sum(is_used and shift is None for is_used, shift in zip(self.used_heads().tolist(), shifts))
        if strangers or not any(shifts):
            raise ValueError(
                f'hard_attn is for heads that give all but {MAX_LEAK:g} of their attention to one offset, whatever '
                f'the image is. {strangers or self.num_heads} of {self.num_heads} heads do not: train them as '
                'attention.')
        return shifts

    def extra_repr(self) -> str:
        return f'num_heads={self.num_heads}, head_dim={self.head_dim}, absorb={self.absorb}, ' \
               f'chunk_size={self.chunk_size}'

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        if not torch.jit.is_scripting() and self.can_shift():
            return self.forward_shifted(x, attn_mask, is_causal)
        if not torch.jit.is_scripting() and self.can_absorb():
            return self.forward_absorbed(x, add_attn_mask(self.rel_pos.get_bias(), attn_mask, is_causal))
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = F.pad(k, [0, 0, 0, 1]), F.pad(v, [0, 0, 0, 1])  # the zero key
        dropout_p = self.attn_drop.p if self.training else 0.
        if not torch.jit.is_scripting() and self.can_chunk(attn_mask, is_causal):
            x = chunked_attention(q, k, v, self.rel_pos, self.chunk_size, self.scale, dropout_p)
        else:
            attn_bias = add_attn_mask(self.rel_pos.get_bias(q), attn_mask, is_causal)
            if self.fused_attn and not is_onnx_export():
                x = fused_attention(q, k, v, attn_bias, dropout_p, self.scale)
            else:
                attn = (q * self.scale) @ k.transpose(-2, -1) + attn_bias
                attn = attn.softmax(dim=-1)
                attn = self.attn_drop(attn)
                x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, self.attn_dim)
        x = self.proj(x)
        return self.proj_drop(x)

    @torch.jit.unused
    def forward_absorbed(self, x: torch.Tensor, attn_bias: torch.Tensor) -> torch.Tensor:
        query_weight, query_bias, out_weight = absorb_weights(self.qkv, self.proj, self.num_heads)
        dropout_p = self.attn_drop.p if self.training else 0.
        x = multi_query_attention(F.linear(x, query_weight, query_bias), x, attn_bias, self.scale, dropout_p)
        x = F.linear(x, out_weight, self.proj.bias)
        return self.proj_drop(x)

    @torch.jit.unused
    def forward_shifted(self, x: torch.Tensor, attn_mask: Mask, is_causal: bool) -> torch.Tensor:
        assert self.shifted is not None
        x = reject_attn_mask(x, attn_mask, is_causal)
        factors = [head_factors(self.qkv, self.proj, self.num_heads, heads) for heads in self.shifted_heads]
        return self.proj_drop(self.shifted(x, *self.shifted.weights(factors), self.proj.bias))

    @torch.jit.unused
    def can_shift(self) -> bool:
        """Return whether heads are computed as shifts: if asked for, unless attention is not to be fused, for maps."""
        return self.shifted is not None and self.fused_attn and self.is_plain()

    @torch.jit.unused
    def can_absorb(self) -> bool:
        """Return whether this step absorbs weights: in training, unless somebody looks at maps or projections."""
        return self.training and self.fused_attn and not is_onnx_export() and self._is_absorbable()

    def _is_absorbable(self) -> bool:
        return (
            self.absorb and self.chunk_size is None and not self.rel_pos.depends_on_queries and self.is_plain())

    @torch.jit.unused
    def can_chunk(self, attn_mask: Mask = None, is_causal: bool = False) -> bool:
        """Return whether queries attend in chunks: unless there is a mask, or somebody looks at maps."""
        can_wait = attn_mask is None and not is_causal and not self.rel_pos.depends_on_queries
        return self.chunk_size is not None and self.fused_attn and can_wait

    def default_form(self) -> Tuple[bool, Optional[int]]:
        """Return what is cheapest for the shapes of this layer: `absorb` and `chunk_size`."""
        if self.rel_pos.depends_on_queries:
            return False, None
        assert isinstance(self.rel_pos, OffsetRelPos)
        num_patches = len(self.rel_pos.position)
        num_keys = num_patches + len(self.rel_pos.padding_position)
        chunk_size = default_chunk_size(self.num_heads, num_patches, num_keys)
        shapes = self.qkv.in_features, self.proj.out_features, self.head_dim, num_patches
        return chunk_size is None and is_cheaper_absorbed(*shapes), chunk_size

    def keep_heads(self, heads: List[int]) -> None:
        """Remove all other heads."""
        self.rel_pos.keep_heads(heads)
        dim = self.qkv.in_features
        weight = self.qkv.weight.view(3, self.num_heads, self.head_dim, dim)[:, heads].flatten(0, 2)
        bias = None if self.qkv.bias is None else self.qkv.bias.view(3, self.num_heads, self.head_dim)[:, heads]
        out_weight = self.proj.weight.view(-1, self.num_heads, self.head_dim)[:, heads].flatten(1)
        replace_weight(self.qkv, weight, None if bias is None else bias.flatten())
        replace_weight(self.proj, out_weight, self.proj.bias)
        self.num_heads, self.attn_dim = len(heads), len(heads) * self.head_dim
        self.set_hard_attn(None)
        self.absorb, self.chunk_size = self.default_form()

    def without_shifts(self) -> nn.Module:
        """Return the form for inference with absorbed weights, this layer where that is no cheaper."""
        if self._is_absorbable():
            return AbsorbedRelPosAttention(self.qkv, self.proj, self.rel_pos, self.scale, self.fused_attn)
        return self

    def is_plain(self) -> bool:
        return is_plain_linear(self.qkv) and is_plain_linear(self.proj)

    def is_replaceable(self) -> bool:
        return type(self) is RelPosAttention and super().is_replaceable()

    def used_heads(self) -> torch.Tensor:
        """Return which heads have an output projection that is not zero: (num_heads,)."""
        if not is_plain_linear(self.proj):
            return torch.ones(self.num_heads, dtype=torch.bool)
        return self.proj.weight.view(-1, self.num_heads, self.head_dim).any(dim=2).any(dim=0)

    def max_content_score(self, norm: Optional[nn.Module] = None) -> torch.Tensor:
        return max_content_score(self.qkv, self.num_heads, self.scale, norm)

    def shift_factors(self, shifts: Sequence[Optional[Shift]]) -> Dict[Shift, Factors]:
        return {shift: head_factors(self.qkv, self.proj, self.num_heads, heads)
                for shift, heads in group_heads(shifts).items()}

    @torch.no_grad()
    def with_shifts(self, shifts: Sequence[Optional[Shift]]) -> ShiftedAttention:
        others = [i for i, shift in enumerate(shifts) if shift is None]
        if self.used_heads()[others].any():
            rest = copy.deepcopy(self).requires_grad_(False)
            rest.proj.register_parameter('bias', None)
            rest.keep_heads(others)
            return ShiftedAttention(
                self.shift_factors(shifts), self.proj.bias, self.grid_size, rest.without_shifts())
        return ShiftedAttention(self.shift_factors(shifts), self.proj.bias, self.grid_size)


def replace_weight(linear: nn.Linear, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> None:
    """Give a linear layer another weight, (out, in), and bias, and with them another size."""
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=linear.weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=linear.bias.requires_grad)
