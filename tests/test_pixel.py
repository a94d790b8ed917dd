import copy
import itertools
import math

import numpy as np
import pytest
import timm
import torch
from centers import center_figure, gaussians
from helpers import train
from hypothesis import given, strategies as st
from matplotlib.patches import Ellipse, Rectangle
from timm.layers import set_fused_attn
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from timm_cmhsa.pixel import PositionalAttention
from timm_cmhsa.pixel.encodings import ENCODINGS

QUADRATIC = ['quadratic', 'quadratic_gen']
sizes = st.integers(1, 4)
grids = st.tuples(sizes, sizes)
all_encodings = pytest.mark.parametrize('rel_pos', ENCODINGS)
by_position_and_by_content = pytest.mark.parametrize('rel_pos', ['quadratic', 'learned_content'])


@pytest.mark.parametrize(('rel_pos', 'params', 'paper_params', 'operations', 'all_operations'), [
    ('quadratic', 12.09, 12.1, 6.2, 9.0), ('quadratic_gen', 12.09, 12.1, 6.2, 9.0), ('learned', 12.18, 12.3, 6.2, 9.0),
    ('learned_content', 29.49, 29.5, 15., 20.9)])
def test_models_are_the_papers(rel_pos, params, paper_params, operations, all_operations):
    """The paper counts two operations per multiplication by a weight, and leaves out attention itself."""
    set_fused_attn(False)  # all versions count its operations alike
    model = timm.create_model(f'pixel_attn_{rel_pos}', device='meta').eval()
    assert (model.embed_dim, len(model.blocks), model.patch_embed.grid_size) == (400, 6, (16, 16))
    assert (model.patch_embed.proj.kernel_size, model.patch_embed.proj.stride) == ((2, 2), (2, 2))
    for block in model.blocks:
        assert (block.attn.num_heads, block.attn.rel_pos.name) == (9, rel_pos)
        assert block.mlp.fc1.out_features == 512
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert count == pytest.approx(params, abs=0.005)
    assert count == pytest.approx(paper_params, rel=0.01)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32, device='meta'))
    by_operator = {str(op): flops / 1e9 for op, flops in counter.get_flop_counts()['Global'].items()}
    weights = sum(flops for op, flops in by_operator.items() if 'addmm' in op or 'convolution' in op)
    assert weights == pytest.approx(operations, rel=0.02)
    assert sum(by_operator.values()) == pytest.approx(all_operations, rel=0.02)


def expected_bias(rel_pos, head, row, col, q):
    """The bias of one head at one offset, by the formulas of the paper."""
    if rel_pos.name.startswith('learned'):  # embeddings are in the order of query minus key, as in timm
        height, width = rel_pos.grid_size
        embed = torch.cat([rel_pos.row_embed[height - 1 - row], rel_pos.col_embed[width - 1 - col]])
        return rel_pos.head_vector[head] @ embed if rel_pos.name == 'learned' else q @ embed / len(embed) ** 0.5
    distance = torch.tensor([row, col]) - rel_pos.center[head]
    if rel_pos.name == 'quadratic':
        return -rel_pos.inv_std[head] ** 2 / 2 * distance.norm() ** 2
    return -distance @ rel_pos.inv_std[head] @ rel_pos.inv_std[head].T @ distance / 2


@all_encodings
@given(grid=grids, num_heads=sizes, dim=st.integers(1, 5), seed=st.integers(0, 2 ** 16))
def test_bias_is_the_papers(rel_pos, grid, num_heads, dim, seed):
    torch.manual_seed(seed)
    rel_pos = ENCODINGS[rel_pos](grid, num_heads, dim, dtype=torch.float64).requires_grad_(False)
    for parameter in rel_pos.parameters():
        nn.init.normal_(parameter)
    patches = list(itertools.product(range(grid[0]), range(grid[1])))
    q = torch.randn(2, num_heads, len(patches), dim, dtype=torch.float64)
    bias = rel_pos.get_bias(q)
    assert bias.shape == (2 if rel_pos.depends_on_queries else 1, num_heads, len(patches), len(patches))
    expected = [
        expected_bias(rel_pos, head, key[0] - query[0], key[1] - query[1], q[-1, head, i])
        for head, (i, query), key in itertools.product(range(num_heads), enumerate(patches), patches)]
    torch.testing.assert_close(bias[-1].flatten(), torch.stack(expected), atol=1e-10, rtol=1e-10)


@all_encodings
@given(grid=grids, new_grid=grids)
def test_another_grid_keeps_the_bias_of_every_offset_that_both_have(rel_pos, grid, new_grid):
    rel_pos = ENCODINGS[rel_pos](grid, 2, 4).requires_grad_(False)
    q = torch.randn(1, 2, 1, 4)
    before = rel_pos.get_bias(q.expand(1, 2, math.prod(grid), 4)).view(2, *grid, *grid)
    rel_pos.set_grid_size(new_grid)
    after = rel_pos.get_bias(q.expand(1, 2, math.prod(new_grid), 4)).view(2, *new_grid, *new_grid)
    height, width = map(min, zip(grid, new_grid))
    torch.testing.assert_close(
        after[:, :height, :width, :height, :width], before[:, :height, :width, :height, :width])
    assert not any(parameter.requires_grad for parameter in rel_pos.parameters())


@pytest.mark.parametrize(('rel_pos', 'unit'), [('quadratic', 1.), ('quadratic_gen', torch.eye(2))])
def test_quadratic_encodings_start_as_in_section_4_2(rel_pos, unit):
    """Centres are N(0, 2 I), and Gaussians about one patch wide."""
    rel_pos = ENCODINGS[rel_pos]((4, 4), 4000, 8)
    assert rel_pos.center.var().item() == pytest.approx(2, rel=0.1)
    assert abs(rel_pos.center.mean().item()) < 0.1
    assert abs((rel_pos.inv_std - unit).mean().item()) < 1e-3
    assert (rel_pos.inv_std - unit).std().item() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize('rel_pos', QUADRATIC)
def test_half_precision_does_not_move_large_offsets(rel_pos):
    rel_pos = ENCODINGS[rel_pos]((1, 400), 1, dtype=torch.bfloat16).requires_grad_(False)
    rel_pos.center.copy_(torch.tensor([0, 300]))
    bias = rel_pos.get_bias()[0, 0, 0]
    assert (bias.argmax(), bias.max()) == (300, 0)
    assert bias[[299, 301]].max() < -0.4


def attention_by_hand(attn, x, mask):
    """Equations 12 and 18 and Section 4.3, head by head."""
    B, N, D = x.shape
    qk = None if attn.qk is None else attn.qk(x).view(B, N, 2, attn.num_heads, D).permute(2, 0, 3, 1, 4)
    bias = attn.rel_pos.get_bias(None if qk is None else qk[0])
    y = torch.zeros_like(x)
    for b, head in itertools.product(range(B), range(attn.num_heads)):
        scores = bias[b % len(bias), head]
        if qk is not None:
            scores = scores + qk[0, b, head] @ qk[1, b, head].T / D ** 0.5
        scores = scores.masked_fill(~mask[b, 0], -math.inf)
        y[b] += scores.softmax(dim=-1) @ x[b] @ attn.value.weight[:, head * D:(head + 1) * D].T
    return attn.proj(y + attn.value.bias)


@all_encodings
@pytest.mark.parametrize('fused', [True, False])
def test_attention_is_the_papers(rel_pos, fused):
    set_fused_attn(fused)
    attn = PositionalAttention(6, (2, 3), num_heads=3, rel_pos=rel_pos, dtype=torch.float64).eval()
    for parameter in attn.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    mask = (torch.rand(2, 1, 6, 6) < 0.5) | torch.eye(6, dtype=torch.bool)  # another one for each image
    torch.testing.assert_close(attn(x), attention_by_hand(attn, x, torch.ones_like(mask)))
    torch.testing.assert_close(attn(x, attn_mask=mask), attention_by_hand(attn, x, mask))


@pytest.mark.parametrize('rel_pos', QUADRATIC)
def test_gaussians_on_the_taps_of_a_kernel_are_a_convolution(rel_pos):
    """Lemma 2: one narrow Gaussian per tap. It has no zero key, so a tap outside the image sees the nearest pixel."""
    conv = nn.Conv2d(6, 6, 3, padding=1, padding_mode='replicate').double()
    attn = PositionalAttention(6, (5, 7), num_heads=9, rel_pos=rel_pos, dtype=torch.float64).requires_grad_(False)
    attn.rel_pos.center.copy_(torch.tensor(list(itertools.product([-1, 0, 1], repeat=2))))
    attn.rel_pos.inv_std.mul_(10)
    attn.value.weight.copy_(conv.weight.permute(0, 2, 3, 1).flatten(1))
    attn.value.bias.copy_(conv.bias)
    nn.init.eye_(attn.proj.weight)
    images = torch.randn(2, 6, 5, 7, dtype=torch.float64)
    y = attn(images.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (5, 7))
    torch.testing.assert_close(y, conv(images))


@by_position_and_by_content
@pytest.mark.parametrize('fused', [True, False])
def test_dropout_of_attention_weights(rel_pos, fused):
    set_fused_attn(fused)
    attn = PositionalAttention(48, 8, rel_pos=rel_pos, attn_drop=1.).train()
    torch.testing.assert_close(attn(torch.randn(2, 64, 48)), attn.proj(attn.value.bias).expand(2, 64, 48))


def test_unknown_encodings_are_refused():
    with pytest.raises(ValueError, match='use quadratic, quadratic_gen, learned, learned_content'):
        timm.create_model('test_pixel_attn', rel_pos='table')


@all_encodings
def test_a_model_learns_with_every_encoding(rel_pos):
    """The classes are positions of a bright pixel, and pooling is the same everywhere: only attention can find them."""
    model = timm.create_model('test_pixel_attn', rel_pos=rel_pos, img_size=16, num_classes=2, depth=1)
    x = torch.zeros(16, 3, 16, 16)
    targets = torch.arange(16) % 2
    for i in range(16):
        x[i, :, i // 2 * 2, 2 if targets[i] else 12] = 1.  # near the left or the right border
    assert train(model, x, targets, 40, lr=3e-3)[-1] < 0.3


@by_position_and_by_content
def test_models_go_everywhere(rel_pos):
    model = timm.create_model('test_pixel_attn', rel_pos=rel_pos, img_size=16, depth=1).eval()
    x = torch.randn(2, 3, 16, 16)
    expected = model(x)
    for form in (torch.jit.script(model), torch.export.export(model, (x,)).module(), torch.fx.symbolic_trace(model),
                 torch.compile(model, backend='eager', fullgraph=True)):
        torch.testing.assert_close(form(x), expected, atol=1e-5, rtol=1e-5)


@all_encodings
def test_models_have_timms_interfaces(rel_pos):
    kwargs = dict(rel_pos=rel_pos, depth=2, mlp_layer='depthwise')  # that knows the grid
    model = timm.create_model('test_pixel_attn', num_classes=10, **kwargs).eval()
    model.set_input_size((16, 24))
    model.reset_classifier(3)
    x = torch.randn(2, 3, 16, 24)
    same = timm.create_model('test_pixel_attn', **model.model_args()).eval()
    same.load_state_dict(model.state_dict())
    assert model(x).shape == (2, 3)
    torch.testing.assert_close(same(x), model(x))
    features = timm.create_model('test_pixel_attn', features_only=True, out_indices=(0, 1), **kwargs)
    assert [tuple(map_.shape) for map_ in features(torch.randn(1, 3, 32, 32))] == [(1, 48, 8, 8)] * 2


@all_encodings
def test_weights_of_another_image_size_load(rel_pos, tmp_path):
    source = timm.create_model('test_pixel_attn', rel_pos=rel_pos, depth=2).eval()
    overlay = dict(file=str(tmp_path / 'weights.pth'))
    torch.save(source.state_dict(), overlay['file'])
    for img_size in ((16, 48), 16):
        model = timm.create_model(
            'test_pixel_attn', rel_pos=rel_pos, depth=2, img_size=img_size, pretrained=True,
            pretrained_cfg_overlay=overlay).eval()
        expected = copy.deepcopy(source)
        expected.set_input_size(img_size)
        x = torch.randn(1, 3, *model.patch_embed.img_size)
        torch.testing.assert_close(model(x), expected(x))


def ellipses(axis):
    return [patch for patch in axis.patches if isinstance(patch, Ellipse)]


@pytest.mark.parametrize('rel_pos', QUADRATIC)
def test_contours_hold_their_share_of_the_gaussian(rel_pos):
    layer = PositionalAttention(4, (8, 8), num_heads=5, rel_pos=rel_pos).requires_grad_(False)
    nn.init.normal_(layer.rel_pos.inv_std)
    contours = ellipses(center_figure(gaussians(layer), gaussians(layer), '').axes[0])
    assert len(contours) == 5 * 2
    for i, (root, center) in enumerate(zip(layer.rel_pos.inv_root(), layer.rel_pos.center)):
        for ellipse, share in zip(contours[2 * i:2 * i + 2], (0.5, 0.9)):
            np.testing.assert_allclose(ellipse.get_center(), center.flip(0), rtol=1e-5)
            assert ellipse.width * ellipse.height / 4 == pytest.approx(  # the area
                -2 * math.log(1 - share) / root.det().abs().item(), rel=1e-3)
            for col, row in [*ellipse.get_vertices(), *ellipse.get_co_vertices()]:
                distance = (torch.tensor([row, col]).float() - center) @ root
                assert distance.square().sum().item() == pytest.approx(-2 * math.log(1 - share), rel=1e-3)


def test_paths_lead_from_the_first_to_the_last_center():
    """In panels with the rows of an image, the query in their middle."""
    before = gaussians(timm.create_model('test_pixel_attn', depth=2, rel_pos='quadratic_gen'))
    after = {name: layer._replace(center=layer.center + 1) for name, layer in before.items()}
    figure = center_figure(after, before, '')
    assert [axis.get_title() for axis in figure.axes] == list(before) == ['blocks.0.attn', 'blocks.1.attn']
    for axis, name in zip(figure.axes, before):
        assert axis.yaxis_inverted()
        query, = [patch for patch in axis.patches if type(patch) is Rectangle]
        assert (query.get_xy(), query.get_width(), query.get_height()) == ((-0.5, -0.5), 1, 1)
        paths = [line for line in axis.lines if len(line.get_xydata()) == 2]
        for head, (path, ellipse) in enumerate(zip(paths, ellipses(axis)[::2], strict=True)):
            centers = torch.stack([layers[name].center[head] for layers in (before, after)])
            np.testing.assert_allclose(path.get_xydata()[:, ::-1], centers)
            np.testing.assert_allclose(ellipse.get_center()[::-1], centers[-1])
