"""Heads that are shifts: certificates, the form for inference and for training, and back to convolutions."""
import copy
import math

import pytest
import timm
import torch
from hypothesis import assume, given, strategies as st
from timm.utils import reparameterize_model
from torch import nn

import timm_cmhsa
from timm_cmhsa import attention_to_conv2d, conv2d_to_attention, fuse_shifts, patchify, unpatchify
from timm_cmhsa.analysis import attention_maps
from timm_cmhsa.attention import RelPosAttention
from timm_cmhsa.certificates import bias_winners, proved_leaks, proved_shifts
from timm_cmhsa.shifts import BORDERS, Shift, ShiftedAttention, TokenShift

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def converted(**kwargs):
    """A phase-2 model, just rewritten."""
    return timm_cmhsa.convert_model(timm.create_model('test_cmhsa_conv_k3').eval(), **kwargs)


def train_a_little(model, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    model.train()
    for _ in range(steps):
        logits = model(torch.randn(4, 3, 32, 32))
        nn.functional.cross_entropy(logits, torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@given(st.sampled_from(BORDERS), st.integers(1, 5), st.integers(1, 5), st.integers(-5, 5), st.integers(-5, 5))
def test_a_shift_of_tokens_is_that_of_its_keys(border, height, width, row, col):
    shift = Shift((row, col), border)
    x = torch.randn(2, height * width, 3)
    padded = torch.cat([x, torch.zeros(2, 1, 3)], dim=1)
    assert torch.equal(TokenShift(shift, (height, width))(x), padded[:, shift.keys((height, width))])


@st.composite
def convolutions(draw):
    """A convolution that keeps the size (divided by its stride), patches and grid."""
    kernel = draw(st.sampled_from([1, 3, 5]))
    stride, dilation = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    groups = draw(st.sampled_from([1, 2]))
    circular = draw(st.booleans())
    patch, grid = (draw(st.sampled_from([2, 4])), 2 * draw(st.integers(1, 2))), draw(st.tuples(*[st.integers(2, 4)] * 2))
    padding = dilation * (kernel - 1) // 2
    assume(not circular or all(padding <= p * g for p, g in zip(patch, grid)))
    torch.manual_seed(draw(st.integers(0, 100)))
    conv = nn.Conv2d(
        2, 4, kernel, stride, padding, dilation, groups, draw(st.booleans()),
        padding_mode='circular' if circular else 'zeros').double()
    return conv, patch, grid, draw(st.sampled_from([None, 3]))


@given(convolutions())
def test_a_rewritten_convolution_is_shifts_and_the_same_convolution_again(case):
    conv, patch, grid, head_dim = case
    attn = conv2d_to_attention(conv, patch, grid, head_dim=head_dim).eval()
    images = torch.randn(2, 2, patch[0] * grid[0], patch[1] * grid[1]).double()
    tokens = patchify(images, patch)
    fused = attn.fuse()
    assert isinstance(fused, ShiftedAttention) and fused.rest is None
    torch.testing.assert_close(fused(tokens), attn(tokens), atol=1e-12, rtol=0)
    back, residual = attention_to_conv2d(attn, patch, conv.stride)
    assert residual < 1e-12
    assert back.kernel_size <= tuple(d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size))
    torch.testing.assert_close(back(images), conv(images), atol=1e-12, rtol=0)


def test_attention_that_is_no_convolution_becomes_the_closest_one():
    conv = nn.Conv2d(2, 3, 3, padding=1)
    attn = conv2d_to_attention(conv, 4, (3, 3))
    noise = 0.01 * torch.randn_like(attn.proj.weight)
    attn.proj.weight.data += noise
    back, residual = attention_to_conv2d(attn, 4)
    weights = torch.cat([conv.weight.flatten().repeat(16), conv.bias.repeat(16)]).norm()
    assert residual == pytest.approx((noise.norm() / weights).item(), rel=0.1)
    margin = back.kernel_size[0] // 2 - 1  # noise has a larger reach
    torch.testing.assert_close(
        back.weight[..., margin:-margin, margin:-margin], conv.weight, atol=0.01, rtol=0)


def test_a_bias_of_values_is_part_of_the_residual():
    attn = conv2d_to_attention(nn.Conv2d(2, 3, 3, padding=1), 4, (3, 3))
    assert attention_to_conv2d(attn, 4).residual == 0
    attn.qkv.bias.data[-attn.attn_dim:] = 0.1  # it ends at the border, a convolution's does not
    assert attention_to_conv2d(attn, 4).residual > 0.01


@pytest.mark.parametrize(('change', 'message'), [
    (lambda attn: attn.reset_parameters(), 'Head 1 is no shift by proof'),
    (lambda attn: attn.rel_pos.point_head(0, [(1, 0)], 5.), 'Head 1 is no shift by proof'),
])
def test_what_is_no_convolution_is_refused(change, message):
    attn = conv2d_to_attention(nn.Conv2d(2, 3, 3, padding=1), 4, (3, 3))
    change(attn)
    with pytest.raises(ValueError, match=message):
        attention_to_conv2d(attn, 4)


def test_widths_that_do_not_fit_are_refused():
    attn = conv2d_to_attention(nn.Conv2d(2, 3, 3, padding=1), 4, (3, 3))
    with pytest.raises(ValueError, match=r'patch_size=5 and stride=1 do not fit tokens of width 32'):
        attention_to_conv2d(attn, 5)
    with pytest.raises(ValueError, match='stride=3 do not fit'):
        attention_to_conv2d(attn, 4, 3)


@st.composite
def layers(draw):
    """A layer with heads from one-hot to soft, queries from zero to large, and the norm before it."""
    torch.manual_seed(draw(st.integers(0, 10 ** 6)))
    dim, grid = 8, draw(st.sampled_from([(2, 3), (4, 4)]))
    rel_pos = draw(st.sampled_from(['table', 'padded_table', 'quadratic', 'quadratic_gen', 'learned']))
    attn = RelPosAttention(dim, grid, num_heads=3, head_dim=draw(st.sampled_from([4, 8])), rel_pos=rel_pos).double()
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=draw(st.sampled_from([0., 0.1, 1.])))
    if hasattr(attn.rel_pos, 'center'):
        attn.rel_pos.center.data.round_()
        attn.rel_pos.inv_std.data *= 10
    elif hasattr(attn.rel_pos, 'relative_position_bias_table'):
        for head in range(3):
            attn.rel_pos.point_head(head, [(draw(st.integers(-1, 1)), draw(st.integers(-1, 1)))],
                                    draw(st.sampled_from([2., 8., 20., 60.])))
    attn.qkv.weight.data[:attn.attn_dim] *= draw(st.sampled_from([0., 1e-3, 0.1, 1.]))
    norm = nn.LayerNorm(dim).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return attn.eval(), norm


@given(layers(), st.integers(0, 10 ** 6))
def test_no_certificate_is_violated(case, seed):
    """Also by tokens that are the worst for the scores: along the singular vectors of queries and keys."""
    attn, norm = case
    torch.manual_seed(seed)
    num_tokens = math.prod(attn.grid_size)
    tokens = torch.randn(4, num_tokens, 8).double()
    query, key, _ = (norm.weight * attn.qkv.weight.view(3, attn.num_heads, -1, 8)).detach()
    left, _, right = torch.linalg.svd(query.transpose(-2, -1) @ key)
    worst = torch.cat([left[..., 0], right[:, 0], -left[..., 0], -right[:, 0]])
    tokens = torch.cat([tokens, worst[torch.randint(len(worst), (8, num_tokens))]])
    winners = bias_winners(attn.rel_pos)
    leaks = proved_leaks(attn, winners, norm)
    maps = attention_maps(attn, norm(tokens))['']
    weights = torch.cat([maps.weights, maps.zero_key.unsqueeze(-1)], dim=-1)
    for head, shift in enumerate(winners.shifts):
        if shift is not None:
            at_shift = weights[:, head].gather(-1, shift.keys(attn.grid_size).expand(len(tokens), -1).unsqueeze(-1))
            assert (1 - at_shift).max() <= leaks[head] + 1e-6  # maps are in float32
    block = nn.Module()
    block.norm1, block.attn = norm, attn
    block.forward = lambda x: block.attn(block.norm1(x))
    expected = block(tokens)
    for tolerance in (1e-6, 0.3):
        fused = copy.deepcopy(block)
        fused.forward = lambda x, fused=fused: fused.attn(fused.norm1(x))
        report, = fuse_shifts(fused, tokens, tolerance)
        assert report.leak <= tolerance
        assert report.error is None or report.error <= report.bound + 1e-12
        assert (fused(tokens) - expected).norm(dim=-1).max() <= report.bound + 1e-12
