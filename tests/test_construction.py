import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from timm.layers import Conv2dSame, StdConv2d
from torch import nn

from timm_cmhsa import conv2d_to_attention, patchify, unpatchify
from timm_cmhsa.construction import exact_sharpness, plan_heads
from timm_cmhsa.encodings import POINTABLE


def relative_error(actual, expected):
    scale = expected.abs().max().item() or 1.
    return (actual - expected).abs().max().item() / scale


def rewrite_error(conv, patch_size, grid_size, **kwargs):
    """Largest error of the rewrite on one random image batch, relative to the convolution's largest output."""
    (patch_h, patch_w), (grid_h, grid_w) = patch_size, grid_size
    images = torch.randn(2, conv.in_channels, patch_h * grid_h, patch_w * grid_w).to(conv.weight)
    attn = conv2d_to_attention(conv, patch_size, grid_size, **kwargs)
    out_patch = patch_h // conv.stride[0], patch_w // conv.stride[1]
    with torch.no_grad():
        return relative_error(attn(patchify(images, patch_size)), patchify(conv(images), out_patch))


@st.composite
def convolutions(draw):
    """A convolution that has an exact rewrite, on patches and a grid that fit it."""
    patch = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    grid = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    kernel = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    dilation = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    stride = tuple(draw(st.sampled_from([s for s in range(1, p + 1) if p % s == 0])) for p in patch)
    if stride == (1, 1):
        padding = 'same'
    else:
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
    torch.manual_seed(draw(st.integers(0, 2 ** 16)))
    conv = nn.Conv2d(
        groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), kernel, stride=stride, padding=padding,
        dilation=dilation, groups=groups, bias=draw(st.booleans()), padding_mode=padding_mode)
    head_dim = draw(st.sampled_from([None, None, 1, 5, 16, 64]))
    return conv, patch, grid, dict(head_dim=head_dim, rel_pos=draw(st.sampled_from(POINTABLE)))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(convolutions())
def test_rewrite_is_exact(case):
    conv, patch, grid, kwargs = case
    assert rewrite_error(conv, patch, grid, **kwargs) <= 2e-6
    assert rewrite_error(conv.double(), patch, grid, **kwargs) <= 1e-12


@pytest.mark.parametrize('rel_pos', ['quadratic', 'quadratic_gen'])
@pytest.mark.parametrize('sharpness', [46., None])
@pytest.mark.parametrize(('kernel_size', 'grid_size'), [(3, (16, 16)), (5, (7, 20)), (7, (1, 9))])
def test_lemma_2_of_pixels(rel_pos, sharpness, kernel_size, grid_size):
    """One head for every tap, centred on it; alpha = 46 is exact in float32, at the borders too."""
    conv = nn.Conv2d(4, 6, kernel_size, padding=kernel_size // 2)
    assert rewrite_error(conv, (1, 1), grid_size, rel_pos=rel_pos, sharpness=sharpness) <= 1e-6
    attn = conv2d_to_attention(conv, 1, 16, rel_pos=rel_pos, sharpness=sharpness)
    assert attn.num_heads == kernel_size ** 2
    taps = itertools.product(range(-(kernel_size // 2), kernel_size // 2 + 1), repeat=2)
    assert attn.rel_pos.center.tolist() == [list(map(float, tap)) for tap in taps]
    alpha = attn.rel_pos.inv_covariance()[:, 0, 0] / 2
    torch.testing.assert_close(alpha, torch.full_like(alpha, sharpness or exact_sharpness(256, torch.float32)))
    torch.testing.assert_close(attn.rel_pos.zero_key_bias, -alpha / 2)


def test_a_gaussian_around_the_image_counts_for_the_patches_that_it_reaches():
    """Of two taps of the same size, the better one to keep is the one whose way around is taken more often."""
    conv = nn.Conv2d(1, 1, (1, 3), padding=(0, 1), padding_mode='circular', bias=False)
    conv.weight.data = torch.tensor([1., 0., 1.1]).view(1, 1, 1, 3)
    attn = conv2d_to_attention(conv, 1, (1, 5), num_heads=2, approximate=True, rel_pos='quadratic')
    assert sorted(attn.rel_pos.center[:, 1].tolist()) == [-1, 1]  # with 4 patches each; -4 and 4 have one


def test_a_gaussian_needs_a_head_for_every_way_around_the_image():
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode='circular')
    assert conv2d_to_attention(conv, 1, 5).num_heads == 9
    assert conv2d_to_attention(conv, 1, 5, rel_pos='quadratic').num_heads == 25  # 0, and -1, 4 and 1, -4, on each axis
    with pytest.raises(ValueError, match='it takes 25 heads of 2'):
        conv2d_to_attention(conv, 1, 5, num_heads=9, rel_pos='quadratic')


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('padding_mode', ['zeros', 'circular'])
def test_rewrite_in_half_precision_is_off_by_rounding_only(dtype, padding_mode):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 5, padding=2, padding_mode=padding_mode)
    conv.to(dtype)
    assert rewrite_error(conv, (8, 8), (4, 4)) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(('patch_size', 'grid_size'), [((16, 16), (14, 14)), ((2, 2), (40, 40))])
def test_rewrite_is_exact_on_large_grids(patch_size, grid_size):
    torch.manual_seed(0)
    assert rewrite_error(nn.Conv2d(3, 3, 3, padding=1), patch_size, grid_size) <= 2e-6


def test_theorem_1_alone_is_wrong_at_the_borders():
    """Without the zero key, a head that points outside the image averages patches: the reason for the zero key."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 3, 3, padding=1)
    images = torch.randn(2, 3, 32, 32)
    attn = conv2d_to_attention(conv, 8, 4)
    nn.init.constant_(attn.rel_pos.zero_key_bias, float('-inf'))
    actual, expected = unpatchify(attn(patchify(images, 8)), 8, 4), conv(images)
    assert relative_error(actual[..., 8:-8, 8:-8], expected[..., 8:-8, 8:-8]) <= 2e-6
    off = F.max_pool2d((actual - expected).abs().amax(dim=1), 8)  # of every patch
    off[:, 1:-1, 1:-1] = math.inf
    assert off.min() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize(('kernel_size', 'patch_size', 'num_heads'), [
    (1, 4, 1), (3, 4, 9), (5, 16, 9), (7, 3, 9), (9, 4, 9), (9, 3, 25), (3, 1, 9), (5, 1, 25), (7, 2, 25),
])
def test_number_of_heads_is_theorem_1s(kernel_size, patch_size, num_heads):
    assert num_heads == (2 * math.ceil((kernel_size - 1) / (2 * patch_size)) + 1) ** 2
    attn = conv2d_to_attention(nn.Conv2d(2, 2, kernel_size, padding=kernel_size // 2), patch_size, 9)
    assert attn.num_heads == num_heads
    assert attn.head_dim == patch_size ** 2 * 2


@pytest.mark.parametrize(('kernel_size', 'head_dim', 'num_heads'), [
    (3, 96, 16), (5, 96, 16), (3, 64, 20), (5, 64, 24), (3, 192, 12), (9, 192, 12),
])
def test_number_of_thin_heads(kernel_size, head_dim, num_heads):
    conv = nn.Conv2d(3, 3, kernel_size, padding=kernel_size // 2)
    assert len(plan_heads(conv, 16, 14, head_dim=head_dim)) == num_heads


def test_heads_that_never_meet_the_grid_are_left_out():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    assert conv2d_to_attention(conv, 4, (1, 6)).num_heads == 3
    assert rewrite_error(conv, (4, 4), (1, 6)) <= 2e-6
    assert rewrite_error(nn.Conv2d(1, 1, 2, dilation=8, padding='same'), (2, 2), (1, 1)) <= 2e-6


def test_output_projection_is_that_of_appendix_a2():
    """W^O_{(r-1)d + (s-1)C_in + i, (t-1)C_out + j} = W^C_{x(r,s,t), y(r,s,t), i, j}, 0 outside the kernel."""
    patch, kernel, chans_in, chans_out = 3, 5, 2, 4
    conv = nn.Conv2d(chans_in, chans_out, kernel, padding=kernel // 2)
    offsets = list(itertools.product((-1, 0, 1), (-1, 0, 1)))
    pixels = list(itertools.product(range(patch), range(patch)))
    dim = patch * patch * chans_in
    expected = torch.zeros(len(offsets) * dim, patch * patch * chans_out)
    for (r, offset), (s, read), (t, write) in itertools.product(
            enumerate(offsets), enumerate(pixels), enumerate(pixels)):
        x, y = (o * patch + p - q + kernel // 2 for o, p, q in zip(offset, read, write))
        if 0 <= x < kernel and 0 <= y < kernel:
            for i, j in itertools.product(range(chans_in), range(chans_out)):
                expected[r * dim + s * chans_in + i, t * chans_out + j] = conv.weight[j, i, x, y]

    attn = conv2d_to_attention(conv, patch, 4)
    assert torch.equal(attn.proj.weight.T, expected)
    _, _, value = attn.qkv.weight.view(3, len(offsets), dim, dim).unbind(0)
    assert torch.equal(value, torch.eye(dim).expand_as(value))


def test_output_projection_is_the_impulse_response():
    conv = nn.Conv2d(2, 4, 5, padding=6, dilation=3, groups=2, bias=False)
    patch, reach = 4, 2
    canvas = torch.zeros(patch * patch * 2, (2 * reach + 1) ** 2, patch * patch * 2)
    canvas[:, len(canvas[0]) // 2] = torch.eye(patch * patch * 2)
    response = patchify(conv(unpatchify(canvas, patch, 2 * reach + 1)), patch)
    attn = conv2d_to_attention(conv, patch, 2 * reach + 1)
    blocks = attn.proj.weight.unflatten(1, (attn.num_heads, -1)).permute(1, 2, 0)
    for head, block in zip(plan_heads(conv, patch, 2 * reach + 1), blocks):
        answering = (reach - head.offset[0]) * (2 * reach + 1) + reach - head.offset[1]
        torch.testing.assert_close(block, response[:, answering])


def test_spare_heads_keep_the_function_and_start_as_usual():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3, padding=1)
    assert rewrite_error(conv, (4, 4), (3, 3), num_heads=12) <= 2e-6
    attn = conv2d_to_attention(conv, 4, 3, num_heads=12)
    query, key, value = attn.qkv.weight.view(3, 12, 32, 32).unbind(0)
    output = attn.proj.weight.view(32, 12, 32)
    table = attn.rel_pos.relative_position_bias_table
    assert not query[:9].any()
    assert not output[:, 9:].any()
    for usual in (query[9:], key, value[9:]):
        assert 0.01 < usual.std() < 0.03
    assert 0 < table[:, 9:].abs().max() < 0.1
    assert not attn.rel_pos.zero_key_bias[9:].any()


def test_every_parameter_gets_to_learn():
    """The paper's zero queries and zero keys would never move; zero queries alone do, and the keys follow."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3, padding=1)
    attn = conv2d_to_attention(conv, 4, 3, num_heads=10, head_dim=40, sharpness=8)
    start = {name: parameter.clone() for name, parameter in attn.named_parameters()}
    optimizer = torch.optim.Adam(attn.parameters(), lr=1e-2)
    tokens, target = torch.randn(8, 9, 32), torch.randn(8, 9, 32)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(attn(tokens), target).backward()
        optimizer.step()
    for name, parameter in attn.named_parameters():
        assert not torch.equal(parameter, start[name]), name
    changed = (attn.qkv.weight != start['qkv.weight']).view(3, 10, -1).any(dim=-1)
    assert changed.all(), 'queries, keys and values of every head'


def test_sharpness_trades_exactness():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3, padding=1)
    errors = [rewrite_error(conv, (4, 4), (4, 4), sharpness=sharpness) for sharpness in (4, 8, 16, 40)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] <= 2e-6
    assert exact_sharpness(196, torch.float32) == pytest.approx(42.4, abs=0.1)
    assert exact_sharpness(196, torch.float64) == pytest.approx(82.6, abs=0.1)


def squared_error(conv, attn, patch, grid):
    """Of a rewrite, over all pixels that a unit impulse in each pixel makes; a convolution without bias, in float64."""
    height, width = patch[0] * grid[0], patch[1] * grid[1]
    impulses = torch.eye(conv.in_channels * height * width, dtype=torch.float64)
    impulses = impulses.view(-1, conv.in_channels, height, width)
    with torch.no_grad():
        return (attn(patchify(impulses, patch)) - patchify(conv(impulses), patch)).square().sum().item()


def blocks_by_offset(conv, patch, grid):
    """What the convolution makes of one patch in another, by their offset: (number of such patches, d, d_out)."""
    dim, num_patches = patch[0] * patch[1] * conv.in_channels, grid[0] * grid[1]
    impulses = torch.eye(num_patches * dim, dtype=torch.float64).view(-1, num_patches, dim)
    with torch.no_grad():
        answers = patchify(conv(unpatchify(impulses, patch, grid)), patch).view(num_patches, dim, num_patches, -1)
    blocks = {}
    for key, query in itertools.product(range(num_patches), repeat=2):
        offset = key // grid[1] - query // grid[1], key % grid[1] - query % grid[1]
        if conv.padding_mode == 'circular':
            offset = offset[0] % grid[0], offset[1] % grid[1]
        blocks.setdefault(offset, []).append(answers[key, :, query])
    return {offset: torch.stack(same) for offset, same in blocks.items() if torch.stack(same).any()}


@st.composite
def small_convolutions(draw):
    patch, grid = draw(st.sampled_from([((2, 2), (2, 3)), ((1, 2), (3, 3)), ((3, 2), (2, 2)), ((1, 1), (3, 4))]))
    kernel = draw(st.tuples(*[st.sampled_from([1, 3]) for _ in range(2)]))
    padding_mode = draw(st.sampled_from(['zeros', 'circular']))
    torch.manual_seed(draw(st.integers(0, 2 ** 16)))
    conv = nn.Conv2d(
        draw(st.integers(1, 2)), draw(st.integers(1, 2)), kernel, padding='same', padding_mode=padding_mode, bias=False,
        dtype=torch.float64)
    return conv, patch, grid


@given(small_convolutions(), st.integers(1, 4), st.integers(1, 5))
def test_no_other_assignment_of_heads_to_offsets_does_better(case, num_heads, head_dim):
    conv, patch, grid = case
    residuals = []  # of an offset, by its number of heads
    for same in blocks_by_offset(conv, patch, grid).values():
        energies = torch.linalg.svdvals(same).square().sum(dim=0)
        residuals.append([energies[number * head_dim:].sum().item() for number in range(num_heads + 1)])
    counts = itertools.product(range(num_heads + 1), repeat=len(residuals) - 1)
    best = min(
        sum(residual[count] for residual, count in zip(residuals, [*some, num_heads - sum(some)]))
        for some in counts if sum(some) <= num_heads)
    attn = conv2d_to_attention(conv, patch, grid, num_heads, head_dim, approximate=True)
    assert (attn.num_heads, attn.head_dim) == (num_heads, head_dim)
    assert squared_error(conv, attn, patch, grid) == pytest.approx(best, rel=1e-9, abs=1e-15)


@given(small_convolutions())
def test_more_or_wider_heads_are_never_worse(case):
    conv, patch, grid = case
    errors = [[squared_error(conv, conv2d_to_attention(conv, patch, grid, n, d, approximate=True), patch, grid)
               for d in (1, 2, 3, 8, 12)] for n in (1, 2, 4, 9, 20)]
    for along in (*errors, *zip(*errors)):
        assert all(after <= before + 1e-15 for before, after in itertools.pairwise(along))
    assert errors[-1][-1] <= 1e-15


@given(small_convolutions(), st.integers(0, 3), st.integers(1, 12))
def test_approximation_is_the_exact_rewrite_where_that_fits(case, spare, head_dim):
    conv, patch, grid = case
    num_heads = len(plan_heads(conv, patch, grid, head_dim=head_dim)) + spare
    layers = []
    for approximate in (False, True):
        torch.manual_seed(0)
        layers.append(conv2d_to_attention(conv, patch, grid, num_heads, head_dim, approximate=approximate))
    for (name, exact), approximation in zip(layers[0].state_dict().items(), layers[1].state_dict().values()):
        assert torch.equal(exact, approximation), name


def test_a_kernel_of_low_rank_fits_into_fewer_heads():
    conv = nn.Conv2d(4, 4, 3, padding=1, bias=False, dtype=torch.float64)
    nn.init.constant_(conv.weight, 0.1)  # sums channels: of rank one at every offset
    with pytest.raises(ValueError, match='it takes 36 heads of 1'):
        conv2d_to_attention(conv, 1, 4, num_heads=9, head_dim=1)
    attn = conv2d_to_attention(conv, 1, 4, num_heads=9, head_dim=1, approximate=True)
    assert squared_error(conv, attn, (1, 1), (4, 4)) <= 1e-24


def test_heads_that_an_approximation_has_no_use_for_are_spare():
    """Fewer output than input channels: at every offset the rank is less than the number of inputs."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 1, 3, padding=1)
    assert len(plan_heads(conv, 2, 4, head_dim=4)) == 16
    attn = conv2d_to_attention(conv, 2, 4, num_heads=12, head_dim=4, approximate=True)
    assert rewrite_error(conv, (2, 2), (4, 4), num_heads=12, head_dim=4, approximate=True) <= 2e-6
    query = attn.qkv.weight.view(3, 12, 4, 16)[0]
    used = attn.proj.weight.view(4, 12, 4).any(dim=2).any(dim=0)
    assert used.tolist() == [True] * 9 + [False] * 3
    assert not query[:9].any()
    assert query[9:].all()
    assert not attn.rel_pos.zero_key_bias[9:].any()


def lower_bound(conv, patch, grid, num_heads):
    """Least squared error of any attention with heads of any width and any pattern, at one patch far from the borders.

    A head adds its pattern over offsets times one d x d matrix: together they are of rank num_heads at most, and the
    convolution's offsets times d^2 matrix has these singular values (proofs of Theorems 5 and 6).
    """
    blocks = torch.stack([same[0].flatten() for same in blocks_by_offset(conv, patch, grid).values()])
    return torch.linalg.svdvals(blocks)[num_heads:].square().sum().item()


@pytest.mark.parametrize('kernel_size', [3, 5])
def test_theorem_6_eight_heads_cannot(kernel_size):
    """For P >= K; and the approximation is the best of all attentions, since no two offsets share a pixel pair."""
    torch.manual_seed(0)
    patch, grid = (kernel_size, kernel_size), (3, 3)
    conv = nn.Conv2d(
        1, 1, kernel_size, padding=kernel_size // 2, padding_mode='circular', bias=False, dtype=torch.float64)
    norm = sum(same[0].square().sum().item() for same in blocks_by_offset(conv, patch, grid).values())
    for num_heads in range(1, 10):
        bound = lower_bound(conv, patch, grid, num_heads)
        attn = conv2d_to_attention(conv, patch, grid, num_heads, approximate=True)
        assert squared_error(conv, attn, patch, grid) / 9 == pytest.approx(bound, rel=1e-9, abs=1e-20)
        assert (bound > 1e-4 * norm) == (num_heads < 9)
        if num_heads < 9:
            with pytest.raises(ValueError, match='it takes 9 heads of'):
                conv2d_to_attention(conv, patch, grid, num_heads)


@pytest.mark.parametrize('kernel_size', [3, 5])
def test_theorem_5_fewer_than_k_times_k_pixel_heads_cannot(kernel_size):
    torch.manual_seed(0)
    chans, grid, needed = kernel_size ** 2, (kernel_size, kernel_size), kernel_size ** 2
    conv = nn.Conv2d(
        chans, 1, kernel_size, padding=kernel_size // 2, padding_mode='circular', bias=False, dtype=torch.float64)
    norm = conv.weight.square().sum().item()
    for num_heads in (1, needed // 2, needed - 1, needed):
        bound = lower_bound(conv, (1, 1), grid, num_heads)
        attn = conv2d_to_attention(conv, 1, grid, num_heads, approximate=True)
        assert squared_error(conv, attn, (1, 1), grid) / needed >= bound - 1e-12
        assert (bound > 1e-6 * norm) == (num_heads < needed)
        if num_heads < needed:
            with pytest.raises(ValueError, match=f'it takes {needed} heads of'):
                conv2d_to_attention(conv, 1, grid, num_heads)


@pytest.mark.parametrize(('conv', 'kwargs', 'message'), [
    (nn.Conv2d(3, 3, 3, padding=1), {'num_heads': 8}, r'it takes 9 heads of 48, or approximate=True'),
    (nn.Conv2d(3, 3, 3, padding=1), {'num_heads': 9, 'head_dim': 12}, 'it takes 12 heads of 12 or 9 heads of 48'),
    (nn.Conv2d(3, 3, 3, padding=1), {'num_heads': 10, 'head_dim': 12}, 'it takes 12 heads of 12 or 10 heads of 24'),
    (nn.Conv2d(3, 3, 3, padding=1, padding_mode='reflect'), {}, "use 'zeros' or 'circular'"),
    (nn.Conv2d(3, 3, 3, padding=1, padding_mode='replicate'), {}, "use 'zeros' or 'circular'"),
    (nn.Conv2d(3, 3, 3, padding=1, stride=3), {}, 'use a patch size divisible by 3'),
    (nn.Conv2d(3, 3, 3), {}, r'use padding=\(1, 1\)'),
    (nn.Conv2d(3, 3, 3, padding=2), {}, r'use padding=\(1, 1\)'),
    (nn.Conv2d(3, 3, 4, padding=1), {}, 'use an odd kernel'),
    (nn.Conv2d(3, 3, (4, 3), stride=(1, 2), padding=(0, 1)), {}, 'use an odd kernel'),
    (nn.Conv2d(3, 3, (3, 5)), {}, r'use padding=\(1, 2\)'),
    (nn.Conv2d(3, 3, 3, padding=1), {'num_heads': 0}, 'must be a positive whole number'),
    (nn.Conv2d(3, 3, 3, padding=1), {'num_heads': 5, 'head_dim': 17}, 'it takes 11 heads of 17 or 9 heads of 48'),
    (nn.Conv2d(3, 3, 5, dilation=3, padding='valid'), {}, r'use padding=\(6, 6\)'),
    (nn.Conv2d(3, 3, 3, padding=1), {'head_dim': 0}, 'must be a positive whole number'),
    (nn.Conv2d(3, 3, 3, padding=1), {'grid_size': 0}, 'must be positive'),
])
def test_no_exact_rewrite_is_an_error_that_says_what_would_do(conv, kwargs, message):
    with pytest.raises(ValueError, match=message):
        conv2d_to_attention(conv, **{'patch_size': 4, 'grid_size': 3, **kwargs})


def test_the_numbers_an_error_names_would_do():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    assert conv2d_to_attention(conv, 4, 3, num_heads=10, head_dim=24).num_heads == 10
    assert conv2d_to_attention(conv, 4, 3, num_heads=12, head_dim=12).num_heads == 12


def test_only_convolutions_are_rewritten():
    for module in (nn.Linear(2, 2), nn.Conv1d(3, 3, 3), StdConv2d(3, 3, 3, padding=1), Conv2dSame(3, 3, 3)):
        with pytest.raises(TypeError, match=f'a plain nn.Conv2d .* got {type(module).__name__}'):
            conv2d_to_attention(module, 4, 3)


@pytest.mark.parametrize('rel_pos', POINTABLE)
def test_default_device_does_not_matter(rel_pos):
    conv, tokens = nn.Conv2d(3, 3, 3, padding=1), torch.randn(1, 9, 48)
    with torch.device('meta'):
        attn = conv2d_to_attention(conv, 4, 3, rel_pos=rel_pos)
    torch.testing.assert_close(attn(tokens), conv2d_to_attention(conv, 4, 3, rel_pos=rel_pos)(tokens))
