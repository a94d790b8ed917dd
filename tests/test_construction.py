"""Theorem 1: a convolution as attention, exact on the whole image, or as close as the heads allow."""
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, max_error
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from timm.layers import Conv2dSame, StdConv2d, to_2tuple
from torch import nn

from timm_cmhsa import attention_maps, conv2d_to_attention, head_statistics, patchify, unpatchify
from timm_cmhsa.construction import plan_heads
from timm_cmhsa.rel_pos import exact_sharpness

seeds = st.integers(0, 2 ** 16)
head_dims = st.sampled_from([None, None, 1, 5, 16, 64])


def rewrite_error(conv, patch_size, grid_size, **options):
    """Return the largest error of a rewrite on random images, relative to the convolution's largest output."""
    patch_size, grid_size = to_2tuple(patch_size), to_2tuple(grid_size)
    images = torch.randn(2, conv.in_channels, *(p * g for p, g in zip(patch_size, grid_size))).to(conv.weight)
    attn = conv2d_to_attention(conv, patch_size, grid_size, **options)
    with torch.no_grad():
        expected = patchify(conv(images), tuple(p // s for p, s in zip(patch_size, conv.stride)))
        actual = attn(patchify(images, patch_size))
    return max_error(expected, actual) if expected.any() else actual.abs().max().item()


@st.composite
def convolutions(draw):
    """A convolution that has an exact rewrite, with a patch size and a grid size that fit it."""
    patch, grid, kernel, dilation = (draw(st.tuples(*[st.integers(1, most)] * 2)) for most in (6, 5, 9, 4))
    stride = tuple(draw(st.sampled_from([s for s in range(1, p + 1) if p % s == 0])) for p in patch)
    padding = 'same'
    if stride != (1, 1):
        padding = []
        for p, g, k, d, s in zip(patch, grid, kernel, dilation, stride):
            span = d * (k - 1)
            fitting = [pad for pad in range(span + 1) if (p * g + 2 * pad - span - 1) // s + 1 == p * g // s]
            assume(fitting)
            padding.append(draw(st.sampled_from(fitting)))
        padding = tuple(padding)
    groups = draw(st.sampled_from([1, 2, 3]))
    padding_mode = draw(st.sampled_from(['zeros', 'circular']))
    if padding_mode == 'circular':  # PyTorch wraps around once only
        assume(all(d * (k - 1) <= p * g for p, g, k, d in zip(patch, grid, kernel, dilation)))
    torch.manual_seed(draw(seeds))
    conv = nn.Conv2d(
        groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), kernel, stride=stride, padding=padding,
        dilation=dilation, groups=groups, bias=draw(st.booleans()), padding_mode=padding_mode)
    return conv, patch, grid


exactness = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
even_kernels = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@even_kernels
@exactness
@given(convolutions(), head_dims, st.sampled_from(['table', 'padded_table']))
def test_hard_heads_are_exact(case, head_dim, rel_pos):
    conv, patch, grid = case
    assert rewrite_error(conv, patch, grid, head_dim=head_dim, rel_pos=rel_pos) <= 2e-6
    assert rewrite_error(conv.double(), patch, grid, head_dim=head_dim, rel_pos=rel_pos) <= 1e-12


@even_kernels
@exactness
@given(convolutions(), head_dims, st.floats(0.1, 30))
def test_soft_heads_are_exact_at_any_peak(case, head_dim, sharpness):
    """The less a head looks at its own offset, the more of its output is subtracted again, and rounds."""
    conv, patch, grid = case
    num_keys = conv2d_to_attention(conv, patch, grid, head_dim=head_dim, rel_pos='padded_table').rel_pos.num_keys(grid)
    assume(num_keys > 1)
    peak = math.exp(sharpness) / (math.exp(sharpness) + num_keys - 1)
    subtracted = 1 + num_keys / math.expm1(sharpness)
    assert rewrite_error(conv, patch, grid, head_dim=head_dim, peak=peak) <= max(2e-6, 1e-6 * subtracted)
    assert rewrite_error(conv.double(), patch, grid, head_dim=head_dim, peak=peak) <= max(1e-12, 1e-14 * subtracted)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('padding_mode', ['zeros', 'circular'])
def test_half_precision_is_off_by_rounding_only(dtype, padding_mode):
    conv = nn.Conv2d(3, 3, 5, padding=2, padding_mode=padding_mode, dtype=dtype)
    assert rewrite_error(conv, 8, 4) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(('patch_size', 'grid_size'), [(16, 14), (2, 40)])
@pytest.mark.parametrize('options', [{}, {'peak': 0.75}])
def test_large_grids_are_exact(patch_size, grid_size, options):
    assert rewrite_error(nn.Conv2d(3, 3, 3, padding=1), patch_size, grid_size, **options) <= 3e-6


def test_theorem_1_needs_the_zero_key_at_the_borders():
    """Without it, a head that points outside the image averages all patches."""
    conv, images = nn.Conv2d(3, 3, 3, padding=1), torch.randn(2, 3, 32, 32)
    attn = conv2d_to_attention(conv, 8, 4)
    nn.init.constant_(attn.rel_pos.zero_key_bias, -math.inf)
    error = (unpatchify(attn(patchify(images, 8)), 8, 4) - conv(images)).abs().amax(dim=(0, 1))
    of_patches = F.max_pool2d(error[None], 8)[0]
    assert of_patches[1:-1, 1:-1].max() <= 2e-6
    of_patches[1:-1, 1:-1] = math.inf
    assert of_patches.min() > 1e-2


def test_sharpness_trades_exactness():
    errors = [rewrite_error(nn.Conv2d(2, 2, 3, padding=1), 4, 4, sharpness=sharpness) for sharpness in (4, 8, 16, 40)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-2
    assert exact_sharpness(196, torch.float32) == pytest.approx(42.4, abs=0.1)
    assert exact_sharpness(196, torch.float64) == pytest.approx(82.6, abs=0.1)


def test_output_projection_is_the_impulse_response():
    """The block of an offset is what the convolution makes of one patch, in the patch at minus that offset."""
    conv, patch, grid = nn.Conv2d(2, 4, 5, padding=6, dilation=3, groups=2, bias=False), 4, 5
    dim, middle = patch * patch * 2, grid * grid // 2
    impulses = torch.zeros(dim, grid * grid, dim)
    impulses[:, middle] = torch.eye(dim)
    response = patchify(conv(unpatchify(impulses, patch, grid)), patch)
    attn = conv2d_to_attention(conv, patch, grid)
    blocks = attn.proj.weight.unflatten(1, (attn.num_heads, -1)).permute(1, 2, 0)
    for head, block in zip(plan_heads(conv, patch, grid), blocks, strict=True):
        torch.testing.assert_close(block, response[:, middle - head.offset[0] * grid - head.offset[1]])


@given(kernel_size=st.sampled_from([1, 3, 5, 7, 9]), patch_size=st.integers(1, 5))
def test_number_of_heads_is_theorem_1s(kernel_size, patch_size):
    attn = conv2d_to_attention(nn.Conv2d(2, 2, kernel_size, padding=kernel_size // 2), patch_size, 9)
    assert attn.num_heads == (2 * math.ceil((kernel_size - 1) / (2 * patch_size)) + 1) ** 2
    assert attn.head_dim == patch_size ** 2 * 2


@pytest.mark.parametrize(('kernel_size', 'head_dim', 'peak', 'num_heads', 'center_is_soft'), [
    (3, 96, None, 16, False), (5, 96, None, 16, False), (3, 64, None, 20, False), (5, 64, None, 24, False),
    (3, 192, None, 12, False), (9, 192, None, 12, False),
    (3, None, 0.75, 10, True), (5, None, 0.75, 10, True),  # one head subtracts all means
    (3, 96, 0.75, 18, False), (5, 96, 0.75, 20, False),  # 180 and 336 of 768 inputs are near a border
    (1, None, 0.75, 1, False),
])
def test_number_of_heads_at_the_papers_patch_size(kernel_size, head_dim, peak, num_heads, center_is_soft):
    conv = nn.Conv2d(3, 3, kernel_size, padding=kernel_size // 2)
    heads = plan_heads(conv, 16, 14, head_dim, peak)
    assert len(heads) == num_heads
    assert {head.is_soft for head in heads if head.offset == (0, 0)} == {center_is_soft}


def test_heads_that_never_meet_the_grid_are_left_out():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    assert conv2d_to_attention(conv, 4, (1, 6)).num_heads == 3
    reads_padding_only = nn.Conv2d(2, 2, (1, 2), dilation=(1, 2), padding='same')
    assert rewrite_error(reads_padding_only, 1, (3, 1), peak=0.5) <= 1e-7


@pytest.mark.parametrize('head_dim', [None, 8])
@pytest.mark.parametrize('peak', [0.3, 0.75, 0.97, 1 - 1e-6])
def test_the_peak_is_what_maps_show(peak, head_dim):
    conv = nn.Conv2d(2, 2, 3, padding=1)
    attn = conv2d_to_attention(conv, 4, (3, 4), head_dim=head_dim, peak=peak)
    maps = attention_maps(attn, torch.randn(2, 12, 32))['']
    for i, (head, found) in enumerate(zip(plan_heads(conv, 4, (3, 4), head_dim, peak), head_statistics(maps))):
        if head.offset is None:  # all 5 x 6 patches alike, those of the padding in the zero key
            torch.testing.assert_close(maps.weights[:, i], torch.full((2, 12, 12), 1 / 30))
        else:
            assert found.best_offset == head.offset
            assert found.best_weight == pytest.approx(peak if head.is_soft else 1, abs=1e-5)


@pytest.mark.parametrize('options', [{}, {'peak': 0.75}])
def test_spare_heads_keep_the_function_and_start_as_usual(options):
    conv = nn.Conv2d(2, 2, 3, padding=1)
    needed = conv2d_to_attention(conv, 4, 3, **options).num_heads
    options.update(num_heads=needed + 3, head_dim=40, qk_dim=16)
    assert rewrite_error(conv, 4, 3, **options) <= 2e-6
    attn = conv2d_to_attention(conv, 4, 3, **options)
    assert (attn.num_heads, attn.head_dim, attn.qk_dim) == (needed + 3, 40, 16)
    query, key, value = (part.unflatten(0, (needed + 3, -1)) for part in attn.qkv.weight.split(attn.widths))
    assert not query[:needed].any()
    assert attn.used_heads().tolist() == [True] * needed + [False] * 3
    for usual in (query[needed:], key, value[needed:]):
        assert 0.01 < usual.std() < 0.03
    assert 0 < attn.rel_pos.offset_bias()[:, needed:].abs().max() < 0.1
    assert not attn.rel_pos.zero_key_bias[needed:].any()


def gradients(attn, tokens, target):
    """Return the largest gradients of what decides where heads look, and of values."""
    attn.zero_grad()
    F.mse_loss(attn(tokens), target).backward()
    query, key, value = attn.qkv.weight.grad.split(attn.widths)
    found = {'query': query, 'key': key, 'value': value, 'zero key': attn.rel_pos.zero_key_bias.grad,
             'bias': attn.rel_pos.relative_position_bias_table.grad / getattr(attn.rel_pos, 'bias_scale', 1)}
    return {name: grad.abs().max().item() for name, grad in found.items()}


def test_soft_heads_learn_where_to_look_and_hard_heads_cannot():
    conv, tokens, target = nn.Conv2d(2, 2, 3, padding=1), torch.randn(4, 16, 32), torch.randn(4, 16, 32)
    hard = gradients(conv2d_to_attention(conv, 4, 4), tokens, target)
    assert max(hard['bias'], hard['zero key'], hard['query']) <= 1e-6 * hard['value']
    attn = conv2d_to_attention(conv, 4, 4, peak=0.75)
    soft = gradients(attn, tokens, target)
    assert min(soft['bias'], soft['zero key']) >= 0.1 * soft['value']
    assert soft['query'] >= 0.005 * soft['value']
    assert soft['key'] == 0
    torch.optim.AdamW(attn.parameters(), lr=0.01).step()  # keys learn as soon as queries are not zero
    assert gradients(attn, tokens, target)['key'] >= 1e-6


@given(
    sizes=st.sampled_from([((2, 2), (2, 3)), ((1, 2), (3, 3)), ((3, 2), (2, 2)), ((1, 1), (3, 4))]),
    kernel=st.sampled_from([(1, 3), (3, 1), 3]), in_chans=st.integers(1, 2),
    padding_mode=st.sampled_from(['zeros', 'circular']), head_dim=st.integers(1, 12),
    peak=st.sampled_from([None, 0.6]), data=st.data())
def test_too_few_heads_are_refused_by_a_number_that_suffices(
        sizes, kernel, in_chans, padding_mode, head_dim, peak, data):
    conv, (patch, grid) = nn.Conv2d(in_chans, 2, kernel, padding='same', padding_mode=padding_mode), sizes
    needed = len(plan_heads(conv, patch, grid, head_dim, peak))
    assume(needed > 1)
    num_heads = data.draw(st.integers(1, needed - 1))
    with pytest.raises(ValueError, match='cannot express this convolution exactly') as error:
        conv2d_to_attention(conv, patch, grid, num_heads, head_dim, peak=peak)
    assert f'use {needed} heads of {head_dim}' in str(error.value)
    assert conv2d_to_attention(conv, patch, grid, needed, head_dim, peak=peak)


CONV = nn.Conv2d(3, 3, 3, padding=1)


@pytest.mark.parametrize(('conv', 'options', 'message'), [
    (nn.Conv2d(3, 3, 3, padding=1, padding_mode='reflect'), {}, "use 'zeros' or 'circular'"),
    (nn.Conv2d(3, 3, 3, padding=1, stride=3), {}, 'use a patch size divisible by 3'),
    (nn.Conv2d(3, 3, (3, 5)), {}, r'use padding=\(1, 2\)'),
    (nn.Conv2d(3, 3, 5, dilation=3, padding='valid'), {}, r'use padding=\(6, 6\)'),
    (nn.Conv2d(3, 3, (4, 3), stride=(1, 2), padding=(0, 1)), {}, 'use an odd kernel'),
    (CONV, {'num_heads': 2.5}, 'num_heads=2.5 must be a whole number from 1 to'),
    (CONV, {'head_dim': 10 ** 20}, 'from 1 to 100000'), (CONV, {'qk_dim': -1}, 'qk_dim=-1 must be a whole number'),
    (CONV, {'num_heads': 10 ** 4, 'head_dim': 10 ** 5}, 'take fewer or thinner ones'),
    (CONV, {'grid_size': 0}, 'must be positive'), (CONV, {'sharpness': math.nan}, 'sharpness=nan must be above 0'),
    (CONV, {'rel_pos': 'quadratic'}, "use 'table' or 'padded_table'"),
    (CONV, {'peak': 1.}, 'peak=1.0 must be a number between 0 and 1'), (CONV, {'peak': 0.04}, 'above 1 / 25'),
    (CONV, {'peak': 0.5, 'rel_pos': 'table'}, "needs rel_pos='padded_table'"),
    (CONV, {'peak': 0.04 * (1 + 1e-7)}, 'too close to 1 / 25'),  # it would round to 1e9
    (nn.Conv2d(3, 3, 3, padding=1).half(), {'peak': 0.045}, r'too close to 1 / 25, .* for torch\.float16'),
])
def test_what_has_no_rewrite_is_an_error_that_says_what_has(conv, options, message):
    with pytest.raises(ValueError, match=message):
        conv2d_to_attention(conv, **{'patch_size': 4, 'grid_size': 3, **options})


def test_only_convolutions_are_rewritten():
    for module in (nn.Linear(2, 2), nn.Conv1d(3, 3, 3), StdConv2d(3, 3, 3, padding=1), Conv2dSame(3, 3, 3)):
        with pytest.raises(TypeError, match=f'a plain nn.Conv2d .* got {type(module).__name__}'):
            conv2d_to_attention(module, 4, 3)


def test_the_default_device_does_not_matter():
    expected = conv2d_to_attention(CONV, 4, 3, peak=0.75).state_dict()
    with torch.device('meta'):
        actual = conv2d_to_attention(CONV, 4, 3, peak=0.75).state_dict()
    assert_equal(expected, actual)
