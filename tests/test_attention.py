import pytest
import torch
from hypothesis import given, strategies as st
from timm.layers import set_fused_attn
from torch import nn

from timm_cmhsa import RelPosAttention

pairs = st.tuples(*[st.integers(1, 4)] * 2)
both = pytest.mark.parametrize('fused', [True, False], ids=['fused', 'unfused'])
both_tables = pytest.mark.parametrize('rel_pos', ['table', 'padded_table'])


def random_attention(dim=12, grid_size=(2, 3), fused=True, **kwargs):
    """A layer in eval mode whose every parameter is random."""
    set_fused_attn(fused)
    attn = RelPosAttention(dim, grid_size, **kwargs)
    for parameter in attn.parameters():
        nn.init.normal_(parameter)
    assert attn.fused_attn == fused
    return attn.eval()


def reference(attn, x, mask):
    """Equations 2 to 4 of arXiv 2111.01353, head by head, over the tokens and a zero key. `mask` is added to scores."""
    zero = x.new_zeros(len(x), 1, 1)
    q, k, v = (part.chunk(attn.num_heads, dim=-1) for part in attn.qkv(x).split(
        [attn.num_heads * attn.qk_dim, attn.num_heads * attn.qk_dim, attn.num_heads * attn.head_dim], dim=-1))
    outputs = []
    for head, bias in enumerate(attn.rel_pos.get_bias()[0]):
        keys, values = (torch.cat([each[head], zero.expand(-1, -1, each[head].shape[-1])], dim=1) for each in (k, v))
        scores = torch.einsum('bic,bjc->bij', q[head], keys) / attn.qk_dim ** 0.5 + bias
        scores = torch.cat([scores[..., :-1] + mask[:, head % mask.shape[1]], scores[..., -1:]], dim=-1)
        outputs.append(torch.einsum('bij,bjc->bic', scores.softmax(dim=-1), values))
    return torch.cat(outputs, dim=-1) @ attn.proj.weight.T + attn.proj.bias


@both
@both_tables
@given(
    dim=st.integers(1, 8), num_heads=st.integers(1, 4), head_dim=st.integers(1, 9), qk_dim=st.integers(1, 9),
    dim_out=st.integers(1, 8), grid_size=pairs, qkv_bias=st.booleans(), seed=st.integers(0, 2 ** 16),
    kind=st.sampled_from(['none', 'bool', 'float', 'per head', 'causal']))
def test_output_and_gradients_are_those_of_the_equations(
        fused, rel_pos, dim, num_heads, head_dim, qk_dim, dim_out, grid_size, qkv_bias, seed, kind):
    torch.manual_seed(seed)
    attn = random_attention(
        dim, grid_size, fused, num_heads=num_heads, head_dim=head_dim, qk_dim=qk_dim, dim_out=dim_out,
        qkv_bias=qkv_bias, rel_pos=rel_pos, dtype=torch.float64)
    num_tokens = grid_size[0] * grid_size[1]
    x, weights = (torch.randn(2, num_tokens, width, dtype=torch.float64) for width in (dim, dim_out))
    allowed = torch.ones(num_tokens, num_tokens).tril().bool() if kind == 'causal' else torch.rand(
        num_tokens, num_tokens) > 0.5
    added = torch.randn(2, num_heads if kind == 'per head' else 1, num_tokens, num_tokens, dtype=torch.float64)
    nothing = torch.zeros_like(added)
    masked = nothing.masked_fill(~allowed, float('-inf'))
    mask, kwargs = {
        'none': (nothing, {}), 'bool': (masked, dict(attn_mask=allowed)), 'causal': (masked, dict(is_causal=True)),
        'float': (added, dict(attn_mask=added)), 'per head': (added, dict(attn_mask=added))}[kind]
    results = []
    for y in (attn(x, **kwargs), reference(attn, x, mask)):
        results.append([y, *torch.autograd.grad((y * weights).sum(), list(attn.parameters()))])
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-10)


@both
def test_dropout(fused):
    tokens = torch.randn(16, 6, 8)
    attn = random_attention(8, fused=fused, num_heads=2, attn_drop=1.).train()
    torch.testing.assert_close(attn(tokens), attn.proj.bias.expand(16, 6, 8))
    attn = random_attention(8, fused=fused, num_heads=2, proj_drop=1.).train()
    assert not attn(tokens).any()
    assert attn.eval()(tokens).all()
