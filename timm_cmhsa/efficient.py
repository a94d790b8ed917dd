"""`RelPosAttention` at a lower cost: weight absorption for wide heads, chunks of queries for many tokens.

Weight absorption: a head's scores are x W_q W_k^T x^T and its output is A x W_v W_o. Where heads are about as wide as
tokens, it is cheaper to multiply W_q by W_k^T and W_v by W_o first. The tokens themselves are then the keys and values,
and all heads share them, as in multi-query attention.
"""
import copy
from typing import Final, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.models import register_notrace_function
from torch import nn
from torch.utils.checkpoint import checkpoint

from .rel_pos import Mask, OffsetRelPos, OnGrid, RelPos, add_attn_mask

MAX_BIAS_ENTRIES = 2 ** 26  # of a layer and step: 256 MB in float32; beyond, queries attend in chunks
NUM_IMAGES = 32  # of a training step, as far as a layer can guess: weights are multiplied once for all of them
KEY_PADDING = 8  # dimensions that `absorb_weights` adds to a key: it needs one, and GPUs prefer multiples of 8

torch.fx.wrap('add_attn_mask')  # keep as a leaf for FX


def multiplications(dim: int, dim_out: int, head_dim: int, num_patches: int) -> Tuple[int, int]:
    """Return the multiplications per token and head, of plain attention and with absorbed weights."""
    plain = head_dim * (3 * dim + dim_out + 2 * num_patches)
    return plain, (dim + KEY_PADDING) * (dim + dim_out + 2 * num_patches)


def is_cheaper_absorbed(dim: int, dim_out: int, head_dim: int, num_patches: int) -> bool:
    """Return whether training takes fewer multiplications with absorbed weights, those of weights included."""
    plain, absorbed = multiplications(dim, dim_out, head_dim, num_patches)
    return head_dim * dim * (dim + dim_out) < NUM_IMAGES * num_patches * (plain - absorbed)


def default_chunk_size(num_heads: int, num_patches: int, num_keys: int) -> Optional[int]:
    """Return how many queries may attend at a time, None if the bias of all queries is small enough.

    Keys are the patches and those of the padding, whose biases take as much memory.
    """
    if num_heads * num_patches * num_keys <= MAX_BIAS_ENTRIES:
        return None
    return max(MAX_BIAS_ENTRIES // (num_heads * (num_keys + 1)), 1)


def is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks, or its forward is wrapped."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return 'forward' in module.__dict__ or any(hooks)


def is_plain_linear(linear: nn.Module) -> bool:
    """Return whether a layer is its weight and nothing else: no hooks, no adapter, no quantized or sharded weight."""
    return (
        type(linear) is nn.Linear and type(linear.weight) in (nn.Parameter, torch.Tensor) and not is_watched(linear))


@torch.fx.wrap  # keep as a leaf for FX: it branches on traced values
@register_notrace_function
def fused_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_bias: torch.Tensor,
        dropout_p: float,
        scale: float,
) -> torch.Tensor:
    """Call PyTorch's fused attention, but not on a CPU where the bias learns: what it does then is slower."""
    if attn_bias.requires_grad and attn_bias.device.type == 'cpu' and not torch.jit.is_tracing():
        attn = ((q * scale) @ k.transpose(-2, -1) + attn_bias).softmax(dim=-1)
        return (F.dropout(attn, dropout_p) if dropout_p > 0. else attn) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_bias, dropout_p=dropout_p, scale=scale)


def chunked_attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rel_pos: RelPos,
        chunk_size: Optional[int],
        scale: float,
        dropout_p: float = 0.,
) -> torch.Tensor:
    """Attend from some queries at a time, so that memory grows with the tokens and not with their square.

    The backward pass computes every chunk again. Queries and result have shape (B, num_heads, N, head_dim), keys and
    values one token more, the zero key.
    """
    assert isinstance(rel_pos, OffsetRelPos)
    assert chunk_size is not None
    def attend_from(q: torch.Tensor, start: int) -> torch.Tensor:
        attn_bias = rel_pos.gather_bias(start, start + q.shape[2])
        return fused_attention(q, k, v, attn_bias, dropout_p, scale)

    chunks = [(q[:, :, start:start + chunk_size], start) for start in range(0, q.shape[2], chunk_size)]
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(attend_from, *chunk, use_reentrant=False) for chunk in chunks], dim=2)
    return torch.cat([attend_from(*chunk) for chunk in chunks], dim=2)


def absorb_weights(qkv: nn.Linear, proj: nn.Linear, num_heads: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multiply every head's query by its key projection, and its value by its output projection.

    Biases need one more dimension of the tokens, a constant one. With x1 = (x, 1), the score of query i and key j is
    x1_i [W_q b_q]^T [W_k b_k] x1_j^T, and a head adds A x1 [W_v b_v]^T W_o^T to the output. The zero key is x1 = 0.

    Returns:
        Weight (num_heads * (dim + KEY_PADDING), dim) and bias (num_heads * (dim + KEY_PADDING)) that project tokens to
        queries, and weight (dim_out, num_heads * (dim + KEY_PADDING)) that projects what heads attend to to the output.
        Dimensions beyond dim + 1 are zero.
    """
    weight = qkv.weight.view(3, num_heads, -1, qkv.in_features)
    bias = weight.new_zeros(weight.shape[:3]) if qkv.bias is None else qkv.bias.view(weight.shape[:3])
    key_value = F.pad(torch.cat([weight[1:], bias[1:].unsqueeze(-1)], dim=-1), [0, KEY_PADDING - 1])
    key, value = key_value.unbind(0)
    query_weight = key.transpose(-2, -1) @ weight[0]
    query_bias = key.transpose(-2, -1) @ bias[0].unsqueeze(-1)
    out_weight = proj.weight.view(proj.out_features, num_heads, -1).transpose(0, 1) @ value
    return query_weight.flatten(0, 1), query_bias.flatten(), out_weight.transpose(0, 1).flatten(1)


def multi_query_attention(
        q: torch.Tensor,
        x: torch.Tensor,
        attn_bias: torch.Tensor,
        scale: float,
        dropout_p: float = 0.,
        fused: bool = True,
) -> torch.Tensor:
    """Attend with the tokens themselves as keys and values: all heads share one key and value head.

    Tokens x have shape (B, N, dim), the bias (1 or B, num_heads, N, N + 1), the zero key last. Queries (see
    `absorb_weights`) and result have shape (B, N, num_heads * (dim + KEY_PADDING)).
    """
    B, N, dim = x.shape
    num_heads = attn_bias.shape[1]
    key_dim = q.shape[-1] // num_heads
    # The first added dimension is the constant one. The others may be one as well: they meet zeros.
    keys = F.pad(F.pad(x, [0, key_dim - dim], value=1.), [0, 0, 0, 1]).unsqueeze(1)
    q = q.reshape(B, 1, N * num_heads, key_dim)
    attn_bias = attn_bias.transpose(1, 2).flatten(1, 2).unsqueeze(1)
    if fused:
        x = fused_attention(q, keys, keys, attn_bias, dropout_p, scale)
    else:
        attn = (q * scale) @ keys.transpose(-2, -1) + attn_bias
        x = attn.softmax(dim=-1) @ keys
    return x.reshape(B, N, num_heads * key_dim)


class AbsorbedRelPosAttention(OnGrid, nn.Module):
    """`RelPosAttention` for inference, its weights absorbed once and for all. Nothing of it can be trained."""
    fused_attn: Final[bool]

    @torch.no_grad()
    def __init__(self, qkv: nn.Linear, proj: nn.Linear, rel_pos: RelPos, scale: float, fused_attn: bool) -> None:
        super().__init__()
        dtype = qkv.weight.dtype
        precise = torch.promote_types(dtype, torch.float32)  # so that products are rounded once
        qkv, proj, rel_pos = (copy.deepcopy(qkv).to(precise), copy.deepcopy(proj).to(precise), copy.deepcopy(rel_pos))
        query_weight, query_bias, out_weight = absorb_weights(qkv, proj, rel_pos.num_heads)
        self.num_heads, self.fused_attn = rel_pos.num_heads, fused_attn
        self.query = _linear(query_weight * scale, query_bias * scale)
        self.rel_pos = rel_pos
        self.proj = _linear(out_weight, proj.bias)
        self.to(dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        attn_bias = add_attn_mask(self.rel_pos.get_bias(), attn_mask, is_causal)
        fused = self.fused_attn and not is_onnx_export()
        return self.proj(multi_query_attention(self.query(x), x, attn_bias, scale=1., fused=fused))


def is_onnx_export() -> bool:
    """Return whether PyTorch's ONNX exporter is tracing: it fails on a fused attention with a bias."""
    if torch.jit.is_scripting():
        return False
    return torch.onnx.is_in_onnx_export()


def _linear(weight: torch.Tensor, bias: Optional[torch.Tensor]) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device='meta')
    linear.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear
