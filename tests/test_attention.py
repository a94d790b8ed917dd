import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from timm.layers import set_fused_attn
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from timm_cmhsa import PatchConv2d, RelPosAttention, patchify, unpatchify
from timm_cmhsa.efficient import NUM_IMAGES, AbsorbedRelPosAttention

sizes = st.integers(1, 4)
pairs = st.tuples(sizes, sizes)


@given(patch=pairs, grid=pairs, chans=sizes)
def test_patchify_flattens_row_column_channel(patch, grid, chans):
    height, width = patch[0] * grid[0], patch[1] * grid[1]
    images = torch.arange(chans * height * width).reshape(1, chans, height, width)
    tokens = patchify(images, patch)
    assert tokens.shape == (1, grid[0] * grid[1], patch[0] * patch[1] * chans)
    for row, col, channel in itertools.product(range(height), range(width), range(chans)):
        token = row // patch[0] * grid[1] + col // patch[1]
        value = (row % patch[0] * patch[1] + col % patch[1]) * chans + channel
        assert tokens[0, token, value] == images[0, channel, row, col]


@given(patch=pairs, grid=pairs, chans=sizes)
def test_unpatchify_inverts_patchify(patch, grid, chans):
    images = torch.randn(2, chans, patch[0] * grid[0], patch[1] * grid[1])
    assert torch.equal(unpatchify(patchify(images, patch), patch, grid), images)


def test_patchify_takes_single_sizes():
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(patchify(images, 4), patchify(images, (4, 4)))
    assert torch.equal(unpatchify(patchify(images, 4), 4, 2), images)


def test_sizes_that_do_not_fit_are_told():
    with pytest.raises(ValueError, match='9 x 8 pixels cannot be cut into patches of'):
        patchify(torch.randn(1, 3, 9, 8), 4)
    with pytest.raises(ValueError, match='5 tokens of width 48 are not a grid of'):
        unpatchify(torch.randn(1, 5, 48), 4, 2)
    with pytest.raises(ValueError, match='4 tokens of width 47 are not a grid of'):
        unpatchify(torch.randn(1, 4, 47), 4, 2)


@pytest.mark.parametrize('kernel_size', [1, 3, 5, (3, 7)])
def test_patch_conv2d_convolves_the_whole_image(kernel_size):
    mixer = PatchConv2d(2 * 3 * 4, patch_size=(2, 3), grid_size=(4, 5), kernel_size=kernel_size)
    images = torch.randn(2, 4, 8, 15)
    padding = tuple(k // 2 for k in mixer.conv.kernel_size)
    expected = F.conv2d(images, mixer.conv.weight, mixer.conv.bias, padding=padding)
    torch.testing.assert_close(unpatchify(mixer(patchify(images, (2, 3))), (2, 3), (4, 5)), expected)


@pytest.mark.parametrize('kernel_size', [2, 0, (3, 4)])
def test_patch_conv2d_refuses_even_kernels(kernel_size):
    with pytest.raises(ValueError, match='use an odd size such as 3 or 5'):
        PatchConv2d(12, patch_size=2, grid_size=2, kernel_size=kernel_size)


def test_sizes_of_nothing_are_refused():
    with pytest.raises(ValueError, match='is not the width of a patch'):
        PatchConv2d(10, patch_size=4, grid_size=2)
    for kwargs in (dict(num_heads=0), dict(head_dim=0), dict(head_dim=-1)):
        with pytest.raises(ValueError, match='must be positive'):
            RelPosAttention(12, 2, **kwargs)


def test_patch_conv2d_refuses_masks():
    mixer, tokens = PatchConv2d(12, patch_size=2, grid_size=2), torch.randn(1, 4, 12)
    with pytest.raises(ValueError, match='no attention to mask'):
        mixer(tokens, attn_mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match='no attention to mask'):
        mixer(tokens, is_causal=True)


def random_attention(dim=12, grid_size=(2, 3), **kwargs):
    attn = RelPosAttention(dim, grid_size, **kwargs)
    for parameter in attn.parameters():
        nn.init.normal_(parameter)
    return attn.eval()


def test_attention_is_torchs_with_add_zero_attn_and_relative_bias():
    attn, tokens = random_attention(num_heads=3, head_dim=4), torch.randn(2, 6, 12)
    positions = torch.tensor([(row, col) for row in range(2) for col in range(3)])
    table = attn.rel_pos.relative_position_bias_table.detach().reshape(3, 5, 3)
    bias = torch.empty(3, 6, 6)
    for query, key in itertools.product(range(6), range(6)):
        row, col = (positions[query] - positions[key]).tolist()
        bias[:, query, key] = table[row + 1, col + 2]
    nn.init.zeros_(attn.rel_pos.zero_key_bias)  # torch's zero key has no bias

    expected, _ = F.multi_head_attention_forward(
        *[tokens.transpose(0, 1)] * 3, 12, 3, attn.qkv.weight, attn.qkv.bias, None, None, add_zero_attn=True,
        dropout_p=0., out_proj_weight=attn.proj.weight, out_proj_bias=attn.proj.bias,
        attn_mask=bias.repeat(2, 1, 1), need_weights=False)
    torch.testing.assert_close(attn(tokens), expected.transpose(0, 1))


def test_zero_key_takes_all_weight_where_its_bias_is_large():
    attn, tokens = random_attention(), torch.randn(2, 6, 12)
    nn.init.constant_(attn.rel_pos.zero_key_bias, 1e4)
    torch.testing.assert_close(attn(tokens), attn.proj.bias.expand(2, 6, 12))


@pytest.mark.parametrize('mask', ['none', 'bool', 'float', 'causal'])
def test_fused_and_unfused_attention_agree(mask):
    outputs = []
    kwargs = {
        'none': {},
        'bool': {'attn_mask': torch.rand(6, 6) > 0.5},
        'float': {'attn_mask': torch.randn(2, 1, 6, 6)},
        'causal': {'is_causal': True},
    }[mask]
    tokens = torch.randn(2, 6, 12)
    for fused in (True, False):
        torch.manual_seed(0)
        set_fused_attn(fused)
        attn = random_attention()
        assert attn.fused_attn == fused
        outputs.append(attn(tokens, **kwargs))
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


def test_masked_keys_have_no_influence():
    attn, tokens = random_attention(), torch.randn(1, 6, 12)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[:, 4] = False
    changed = tokens.clone()
    changed[:, 4] += 1
    torch.testing.assert_close(attn(tokens, attn_mask=mask)[:, :4], attn(changed, attn_mask=mask)[:, :4])
    assert not torch.allclose(attn(tokens)[:, :4], attn(changed)[:, :4])
    torch.testing.assert_close(attn(tokens, is_causal=True)[:, :4], attn(changed, is_causal=True)[:, :4])


def test_set_grid_size_keeps_requires_grad_and_the_zero_key():
    attn = random_attention()
    attn.requires_grad_(False)
    zero_key_bias = attn.rel_pos.zero_key_bias.clone()
    attn.set_grid_size((4, 4))
    assert attn.grid_size == (4, 4)
    assert not any(parameter.requires_grad for parameter in attn.parameters())
    assert torch.equal(attn.rel_pos.zero_key_bias, zero_key_bias)
    assert attn(torch.randn(1, 16, 12)).shape == (1, 16, 12)


def plain(attn):
    """The same layer without absorption."""
    attn = copy.deepcopy(attn)
    attn.absorb = False
    return attn


@given(
    dim=st.integers(1, 12), head_dim=st.integers(1, 20), dim_out=st.integers(1, 12), num_heads=st.integers(1, 4),
    grid=pairs, qkv_bias=st.booleans(), mask=st.booleans(), seed=st.integers(0, 2 ** 16))
def test_absorption_is_the_same_function_with_the_same_gradients(
        dim, head_dim, dim_out, num_heads, grid, qkv_bias, mask, seed):
    torch.manual_seed(seed)
    attn = random_attention(
        dim, grid, num_heads=num_heads, head_dim=head_dim, dim_out=dim_out, qkv_bias=qkv_bias, dtype=torch.float64)
    attn.train().absorb = True  # whatever is cheaper here
    results = []
    tokens = torch.randn(3, grid[0] * grid[1], dim, dtype=torch.float64)
    attn_mask = torch.randn(3, 1, len(tokens[0]), len(tokens[0]), dtype=torch.float64) if mask else None
    weights = torch.randn(3, grid[0] * grid[1], dim_out, dtype=torch.float64)
    for form in (attn, plain(attn)):
        x = tokens.clone().requires_grad_()
        y = form(x, attn_mask=attn_mask)
        gradients = torch.autograd.grad((y * weights).sum(), [x, *form.parameters()])
        results.append([y, *gradients])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-10)


def operations(attn, tokens):
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        attn(tokens)
    return counter.get_total_flops()


@pytest.mark.parametrize(('dim', 'head_dim', 'grid_size', 'expected'), [
    (64, 64, 4, True), (64, 96, 4, True), (64, 640, 4, True), (64, 16, 4, False), (48, 40, 4, True),
    (48, 30, 4, False), (64, 64, 2, True), (64, 64, 1, False)])
def test_absorption_follows_the_shapes(dim, head_dim, grid_size, expected):
    attn = random_attention(dim, grid_size, num_heads=2, head_dim=head_dim).train()
    tokens = torch.randn(NUM_IMAGES, grid_size ** 2, dim)
    assert attn.absorb == attn.can_absorb() == expected
    assert f'absorb={expected}' in repr(attn)
    other = copy.deepcopy(attn)
    other.absorb = not expected
    assert operations(other, tokens) > operations(attn, tokens)
    assert operations(attn.eval(), tokens) == operations(other.eval(), tokens), 'in training alone'


def test_what_an_encoding_or_a_look_at_maps_rules_out_is_left_undone():
    attn = random_attention(12, rel_pos='learned_content', head_dim=24).train()
    attn.absorb, attn.chunk_size = True, 4
    assert not attn.can_absorb()
    assert attn.fuse() is attn
    assert attn(torch.randn(2, 6, 12)).shape == (2, 6, 12)
    attn = random_attention(head_dim=24).train()
    assert attn.can_absorb()
    attn.fused_attn = False
    assert not attn.can_absorb()


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def double(linear):
    """Another layer in a projection's place, as fine-tuning of low-rank updates puts it there."""
    doubled = Doubled(linear.in_features, linear.out_features, dtype=linear.weight.dtype)
    doubled.load_state_dict(linear.state_dict())
    return doubled


def call(linear, method, seen):
    getattr(linear, method)(lambda *_: seen.append(linear.out_features))


def wrap_forward(linear, seen):
    """As Hugging Face's accelerate does."""
    forward = linear.forward
    linear.forward = lambda x: [seen.append(linear.out_features), forward(x)][1]


WATCH = {
    'forward hook': lambda linear, seen: call(linear, 'register_forward_hook', seen),
    'forward pre-hook': lambda linear, seen: call(linear, 'register_forward_pre_hook', seen),
    'backward hook': lambda linear, seen: call(linear, 'register_full_backward_hook', seen),
    'backward pre-hook': lambda linear, seen: call(linear, 'register_full_backward_pre_hook', seen),
    'forward': wrap_forward,
}


@pytest.mark.parametrize('how', WATCH)
@pytest.mark.parametrize('name', ['qkv', 'proj'])
def test_who_watches_a_projection_sees_it(how, name):
    attn, tokens, seen = random_attention(head_dim=24).train(), torch.randn(64, 6, 12, requires_grad=True), []
    assert attn.can_absorb()
    WATCH[how](getattr(attn, name), seen)
    attn(tokens).sum().backward()
    assert seen == [getattr(attn, name).out_features]
    assert attn.fuse() is attn


@pytest.mark.parametrize('name', ['qkv', 'proj'])
def test_a_layer_in_place_of_a_projection_is_called(name):
    attn, tokens = random_attention(head_dim=24, dtype=torch.float64), torch.randn(64, 6, 12, dtype=torch.float64)
    before = attn.train()(tokens)
    expected = plain(attn)
    getattr(expected, name).weight.data.mul_(2)
    getattr(expected, name).bias.data.mul_(2)
    setattr(attn, name, double(getattr(attn, name)))
    assert attn.fuse() is attn
    torch.testing.assert_close(attn(tokens), expected(tokens))
    assert not torch.allclose(attn(tokens), before)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('qkv_bias', [True, False])
def test_fused_layer_is_the_same_function(dtype, fused, qkv_bias):
    set_fused_attn(fused)
    attn = random_attention(12, (2, 3), head_dim=20, dim_out=8, qkv_bias=qkv_bias, dtype=dtype)
    for parameter in attn.parameters():
        parameter.data.mul_(0.3)
    absorbed, tokens = attn.fuse(), torch.randn(2, 6, 12, dtype=dtype)
    assert isinstance(absorbed, AbsorbedRelPosAttention)
    mask = torch.rand(6, 6) > 0.3
    for kwargs in ({}, {'attn_mask': mask}, {'is_causal': True}):
        actual, expected = absorbed(tokens, **kwargs), attn(tokens, **kwargs)
        assert actual.dtype == dtype
        assert (actual - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.abs().max()
    assert sum(p.numel() for p in absorbed.parameters()) < sum(p.numel() for p in attn.parameters())
    assert not any(p.requires_grad for p in absorbed.parameters())
    assert (absorbed.num_heads, absorbed.grid_size) == (9, (2, 3))
    assert all(p.requires_grad for p in attn.parameters()), 'the original stays as it was'
    absorbed.set_grid_size((4, 4))
    assert attn.grid_size == (2, 3)


def test_absorbed_weights_of_half_precision_are_rounded_once():
    attn = random_attention(12, (2, 3), head_dim=20, dtype=torch.bfloat16)
    double = copy.deepcopy(attn).double().fuse()
    for name, tensor in attn.fuse().state_dict().items():
        exact = double.state_dict()[name]
        assert (tensor - exact).abs().max() <= torch.finfo(torch.bfloat16).eps / 2 * exact.abs().max(), name


@pytest.mark.parametrize(('head_dim', 'grid_size'), [(3, 2), (8, 2), (11, 20)])
def test_what_would_take_longer_is_not_absorbed(head_dim, grid_size):
    """Thin heads; and heads that are a little thinner than tokens, where attention itself costs most."""
    attn = random_attention(12, grid_size, head_dim=head_dim)
    assert attn.fuse() is attn


def test_every_form_scales_alike():
    x = torch.randn(2, 16, 12)
    attn = RelPosAttention(12, 4, num_heads=3, head_dim=12)
    nn.init.normal_(attn.qkv.weight)
    attn.scale = 0.5
    outputs = []
    for attn.fused_attn, attn.absorb, attn.chunk_size in (
            (False, False, None), (True, False, None), (True, True, None), (True, False, 5)):
        outputs.append(attn.train()(x))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-5, rtol=1e-5)
