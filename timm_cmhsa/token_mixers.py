"""What mixes tokens: tokens in, tokens out.

A token is a flattened image patch, so a mixer can see the tokens as the image they were cut from. `PatchConv2d`
convolves that image (phase 1), `RelPosAttention` attends over the tokens (phase 2).
"""
import copy
import math
from typing import Final, List, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, to_2tuple
from timm.models import register_notrace_function
from torch import nn
from torch.utils.checkpoint import checkpoint

from .patches import Size2d, patchify, unpatchify
from .rel_pos import QuadraticRelPos, create_rel_pos

# New in torch 2.7; before, a strict export for any number of images has to fold first.
is_exporting = getattr(torch.compiler, 'is_exporting', lambda: False)
MAX_BIAS_ENTRIES = 2 ** 26  # of a layer and step: 256 MB in float32; beyond, queries attend in chunks
KEY_PADDING = 8  # see `RelPosAttention.fold`: one dimension is needed, and 8 keep a multiple of 8 one

# Functions that branch on what fx tracing sees as a proxy stay leaves of its graph, in every module that calls them.
torch.fx.wrap('patchify')
torch.fx.wrap('unpatchify')


@torch.fx.wrap
@register_notrace_function
def reject_attn_mask(
        x: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
) -> torch.Tensor:
    """Return x, the tokens of a mixer that has no use for a mask, if there is none."""
    if attn_mask is not None or is_causal:
        raise ValueError('A convolution has no attention to mask: call the model without attn_mask and is_causal.')
    return x


@torch.fx.wrap
@register_notrace_function
def add_attn_mask(
        attn_bias: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
) -> torch.Tensor:
    """Add a mask over N keys to a bias over N or N + 1 keys: the zero key, which comes last, is never masked."""
    if is_causal:
        num_tokens = attn_bias.shape[-2]
        attn_mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=attn_bias.device).tril()
    if attn_mask is None:
        return attn_bias
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=attn_bias.dtype).masked_fill(~attn_mask, float('-inf'))
    return attn_bias + F.pad(attn_mask, [0, attn_bias.shape[-1] - attn_mask.shape[-1]])


class PatchConv2d(nn.Module):
    """Phase 1's token mixer: a convolution over the whole image that the tokens are patches of.

    Zero padding keeps the image size. Maps tokens of shape (B, N, P * P * C) to the same shape.
    """
    patch_size: Final[Tuple[int, int]]

    def __init__(
            self,
            dim: int,
            patch_size: Size2d,
            grid_size: Size2d,
            kernel_size: Size2d = 3,
            proj_drop: float = 0.,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
    ) -> None:
        """
        Args:
            dim: Token width, P * P * C.
            patch_size: Pixels per patch side.
            grid_size: Patches per image side.
            kernel_size: Kernel of the convolution, odd.
            proj_drop: Dropout rate of the output.

        Raises:
            ValueError: If a token is no patch, or the kernel is even: with the same padding on both sides it would
                change the image size.
        """
        super().__init__()
        kernel_h, kernel_w = to_2tuple(kernel_size)
        if dim % math.prod(to_2tuple(patch_size)):
            raise ValueError(f'dim={dim} is not the width of a patch of {patch_size} pixels a side.')
        if kernel_h % 2 == 0 or kernel_w % 2 == 0:
            raise ValueError(f'kernel_size={kernel_size} cannot be centred on a pixel: use an odd size such as 3 or 5.')
        self.patch_size = to_2tuple(patch_size)
        self.grid_size = to_2tuple(grid_size)
        chans = dim // (self.patch_size[0] * self.patch_size[1])
        padding = (kernel_h // 2, kernel_w // 2)
        self.conv = nn.Conv2d(chans, chans, (kernel_h, kernel_w), padding=padding, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        self.grid_size = grid_size

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        x = reject_attn_mask(x, attn_mask, is_causal)
        x = self.conv(unpatchify(x, self.patch_size, self.grid_size))
        return self.proj_drop(patchify(x, self.patch_size))


def is_onnx_export() -> bool:
    """PyTorch's ONNX exporter fails on a fused attention with a bias."""
    if torch.jit.is_scripting():
        return False
    return torch.onnx.is_in_onnx_export()


class RelPosAttention(Attention):
    """Phase 2's token mixer: multi-head self-attention with relative position bias (Equations 2 to 4).

    One more key than there are tokens, the zero key, has a zero key, a zero value and a learned bias per head (what
    `nn.MultiheadAttention` calls `add_zero_attn`): a head can attend to nothing, as it must where its offset points
    outside the image. Maps tokens of shape (B, N, dim) to (B, N, dim_out).

    Wide heads fold the products of their projections first where that is cheaper: the same function of the same
    parameters. `fuse` folds them once and for all, for inference.
    """

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
            rel_pos: Relative position encoding, see `rel_pos.py`.

        Raises:
            ValueError: If there is no head, or a head has no width.
        """
        if num_heads < 1 or (head_dim is not None and head_dim < 1):
            raise ValueError(f'{num_heads=} and {head_dim=} must be positive.')
        dd = {'device': device, 'dtype': dtype}
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
        self.rel_pos = create_rel_pos(rel_pos, to_2tuple(grid_size), num_heads, self.head_dim, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.qkv, self.proj):
            nn.init.trunc_normal_(linear.weight, std=.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.rel_pos.reset_parameters()

    @property
    def grid_size(self) -> Tuple[int, int]:
        return self.rel_pos.window_size

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        self.rel_pos.set_window_size(grid_size)

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        if not torch.jit.is_scripting() and self.folding_pays(x):
            attn_bias = add_attn_mask(self.rel_pos.get_bias(), attn_mask, is_causal)
            query_weight, query_bias, out_weight = self.fold()
            dropout_p = self.attn_drop.p if self.training else 0.
            x = attend_to_tokens(F.linear(x, query_weight, query_bias), x, attn_bias, self.scale, dropout_p)
            x = F.linear(x, out_weight, self.proj.bias)
        else:
            x = self.proj(self.attend(x, attn_mask, is_causal))
        return self.proj_drop(x)

    def attend(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        """Project tokens to queries, keys and values, and attend: (B, N, dim) to (B, N, num_heads * head_dim)."""
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = F.pad(k, [0, 0, 0, 1]), F.pad(v, [0, 0, 0, 1])
        if not torch.jit.is_scripting() and self.needs_chunks() and attn_mask is None and not is_causal:
            return self.attend_in_chunks(q, k, v).transpose(1, 2).reshape(B, N, self.attn_dim)
        attn_bias = add_attn_mask(self.rel_pos.get_bias(q), attn_mask, is_causal)
        if self.fused_attn and not is_onnx_export():
            x = F.scaled_dot_product_attention(
                q, k, v,
                attn_mask=attn_bias,
                dropout_p=self.attn_drop.p if self.training else 0.,
            )
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1) + attn_bias
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        return x.transpose(1, 2).reshape(B, N, self.attn_dim)

    @torch.jit.unused
    def needs_chunks(self) -> bool:
        """Whether the bias of all queries at once would take too much memory, as with thousands of tokens."""
        return (
            self.num_heads * math.prod(self.grid_size) ** 2 > MAX_BIAS_ENTRIES
            and self.fused_attn and not self.rel_pos.depends_on_queries)

    @torch.jit.unused
    def attend_in_chunks(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend from some queries after the other, so that memory grows with the tokens and not with their square.

        Queries have shape (B, num_heads, N, head_dim), as the result; keys and values one token more, the zero key.
        The backward pass computes every chunk again.
        """
        def attend_from(q: torch.Tensor, start: int) -> torch.Tensor:
            attn_bias = self.rel_pos.gather_bias(start, start + q.shape[2])
            dropout_p = self.attn_drop.p if self.training else 0.
            return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_bias, dropout_p=dropout_p)

        chunk = max(MAX_BIAS_ENTRIES // (self.num_heads * k.shape[2]), 1)
        starts = range(0, q.shape[2], chunk)
        if not torch.is_grad_enabled():
            return torch.cat([attend_from(q[:, :, start:start + chunk], start) for start in starts], dim=2)
        chunks = [
            checkpoint(attend_from, q[:, :, start:start + chunk], start, use_reentrant=False) for start in starts]
        return torch.cat(chunks, dim=2)

    def fold(self) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fold every head's query with its key projection, and its value with its output projection.

        Tokens themselves are then the keys and values of all heads. They carry the biases in one more dimension, a
        constant one: with x1 = (x, 1), the score of query i and key j is x1_i [W_q b_q]^T [W_k b_k] x1_j^T, and a head
        adds A x1 [W_v b_v]^T W_o^T to the output. The zero key is x1 = 0.

        Returns:
            Weight (num_heads * (dim + KEY_PADDING), dim) and bias (num_heads * (dim + KEY_PADDING)) that make queries
            of tokens, and weight (dim_out, num_heads * (dim + KEY_PADDING)) that makes the output of what heads attend
            to. Dimensions beyond dim + 1 are zero in all of them.
        """
        weight = self.qkv.weight.view(3, self.num_heads, self.head_dim, -1)
        if self.qkv.bias is None:
            bias = weight.new_zeros(3, self.num_heads, self.head_dim)
        else:
            bias = self.qkv.bias.view(3, self.num_heads, self.head_dim)
        key_value = F.pad(torch.cat([weight[1:], bias[1:].unsqueeze(-1)], dim=-1), [0, KEY_PADDING - 1])
        key, value = key_value.unbind(0)
        query_weight = key.transpose(-2, -1) @ weight[0]
        query_bias = key.transpose(-2, -1) @ bias[0].unsqueeze(-1)
        out_weight = self.proj.weight.view(-1, self.num_heads, self.head_dim).transpose(0, 1) @ value
        return query_weight.flatten(0, 1), query_bias.flatten(), out_weight.transpose(0, 1).flatten(1)

    @torch.jit.unused
    def folding_pays(self, x: torch.Tensor) -> bool:
        """Whether it takes fewer multiplications to fold first, for tokens x of this shape, (B, N, dim).

        False where the projections have to be called: attention that is not fused is for looking at its maps, hooks
        are for looking at what they are hooked to, and another layer in a projection's place does something else.
        False as well where the number of images can be left open (torch.export, fx, TorchScript), for ONNX, and where
        the bias needs the queries or is too large for all queries at once.
        """
        num_images, num_patches = x.shape[:2]
        if not self.fused_attn or is_onnx_export() or not (_is_plain(self.qkv) and _is_plain(self.proj)):
            return False
        if is_exporting() or not isinstance(num_images, int):
            return False
        if self.rel_pos.depends_on_queries or self.needs_chunks():
            return False
        num_tokens, dim, dim_out = num_images * num_patches, self.qkv.in_features, self.proj.out_features
        unfolded, folded = self.multiplications(num_patches)
        return self.head_dim * (dim + KEY_PADDING) * (dim + dim_out) + num_tokens * folded < num_tokens * unfolded

    def multiplications(self, num_patches: int) -> Tuple[int, int]:
        """Of a token and head, without and with folded products."""
        dim, dim_out = self.qkv.in_features, self.proj.out_features
        unfolded = self.head_dim * (3 * dim + dim_out + 2 * num_patches)
        return unfolded, (dim + KEY_PADDING) * (dim + dim_out + 2 * num_patches)

    def keep_heads(self, heads: List[int]) -> None:
        """Forget all other heads, where the encoding is a quadratic one."""
        assert isinstance(self.rel_pos, QuadraticRelPos)
        dim = self.qkv.in_features
        weight = self.qkv.weight.view(3, self.num_heads, self.head_dim, dim)[:, heads].flatten(0, 2)
        bias = None if self.qkv.bias is None else self.qkv.bias.view(3, self.num_heads, self.head_dim)[:, heads]
        out_weight = self.proj.weight.view(-1, self.num_heads, self.head_dim)[:, heads].flatten(1)
        replace_weight(self.qkv, weight, None if bias is None else bias.flatten())
        replace_weight(self.proj, out_weight, self.proj.bias)
        self.rel_pos.keep_heads(heads)
        self.num_heads, self.attn_dim = len(heads), len(heads) * self.head_dim

    def fuse(self) -> nn.Module:
        """Make the form for inference, as `timm.utils.reparameterize_model` asks for it.

        Returns:
            A new layer, or this one where it has fewer multiplications at its grid size, as with thin heads, or
            another layer in the place of a projection.
        """
        unfolded, folded = self.multiplications(math.prod(self.grid_size))
        pays = folded < unfolded and _is_plain(self.qkv) and _is_plain(self.proj)
        pays = pays and not self.rel_pos.depends_on_queries and not self.needs_chunks()
        return FoldedRelPosAttention(self) if pays else self


def _is_plain(linear: nn.Module) -> bool:
    """Whether calling it does nothing but multiply by its weight: no hooks, no wrapper, no quantized weight."""
    return (
        type(linear) is nn.Linear and type(linear.weight) in (nn.Parameter, torch.Tensor) and not is_watched(linear))


def is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks, or its forward is wrapped."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return 'forward' in module.__dict__ or any(hooks)


def attend_to_tokens(
        q: torch.Tensor,
        x: torch.Tensor,
        attn_bias: torch.Tensor,
        scale: float,
        dropout_p: float = 0.,
        fused: bool = True,
) -> torch.Tensor:
    """Attend with the tokens themselves as keys and values: heads are then but more queries of one head.

    Args:
        q: Queries of shape (B, N, num_heads * (dim + KEY_PADDING)), see `RelPosAttention.fold`.
        x: Tokens of shape (B, N, dim).
        attn_bias: Shape (1 or B, num_heads, N, N + 1), the zero key last.
        scale: Factor of the scores before the bias.
        dropout_p: Dropout rate of the attention weights.
        fused: Use PyTorch's fused attention.

    Returns:
        What the heads attend to, of the same shape as the queries.
    """
    B, N, dim = x.shape
    key_dim = q.shape[-1] // attn_bias.shape[1]
    # ones in all further dimensions, since all but the first meet zeros
    keys = F.pad(F.pad(x, [0, key_dim - dim], value=1.), [0, 0, 0, 1]).unsqueeze(1)
    q = q.reshape(B, 1, -1, key_dim)
    attn_bias = attn_bias.transpose(1, 2).flatten(1, 2).unsqueeze(1)
    if fused:
        x = F.scaled_dot_product_attention(q, keys, keys, attn_mask=attn_bias, dropout_p=dropout_p, scale=scale)
    else:
        attn = (q * scale) @ keys.transpose(-2, -1) + attn_bias
        x = attn.softmax(dim=-1) @ keys
    return x.reshape(B, N, -1)


class FoldedRelPosAttention(nn.Module):
    """`RelPosAttention` of wide heads for inference: the same function, its projections folded, nothing trainable."""
    fused_attn: Final[bool]

    @torch.no_grad()
    def __init__(self, attn: RelPosAttention) -> None:
        super().__init__()
        dtype = attn.qkv.weight.dtype
        attn = copy.deepcopy(attn).to(torch.promote_types(dtype, torch.float32))
        query_weight, query_bias, out_weight = attn.fold()
        self.num_heads, self.fused_attn = attn.num_heads, attn.fused_attn
        self.query = _linear(query_weight * attn.scale, query_bias * attn.scale)
        self.rel_pos = attn.rel_pos
        self.proj = _linear(out_weight, attn.proj.bias)
        self.to(dtype).requires_grad_(False)

    @property
    def grid_size(self) -> Tuple[int, int]:
        return self.rel_pos.window_size

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        self.rel_pos.set_window_size(grid_size)

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        attn_bias = add_attn_mask(self.rel_pos.get_bias(), attn_mask, is_causal)
        fused = self.fused_attn and not is_onnx_export()
        return self.proj(attend_to_tokens(self.query(x), x, attn_bias, scale=1., fused=fused))


def replace_weight(linear: nn.Linear, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> None:
    """Give a layer another weight, (out, in), and bias, with which it is larger or smaller."""
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=linear.weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=linear.bias.requires_grad)


def _linear(weight: torch.Tensor, bias: Optional[torch.Tensor]) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device='meta')
    tensors = {'weight': weight.contiguous()} if bias is None else {'weight': weight.contiguous(), 'bias': bias}
    linear.load_state_dict(tensors, assign=True)
    return linear
