"""What the figures show: the drawn arrays, ellipses and lines, not only that there is a file."""
import copy
import io
import math

import numpy as np
import pytest
import timm
import torch
from matplotlib.patches import Ellipse, Rectangle
from matplotlib.text import Text
from PIL import Image
from timm.utils import ModelEmaV3
from torch import nn

from timm_cmhsa import RelPosAttention, conv2d_to_attention
from timm_cmhsa.analysis import attention_maps, head_statistics
from timm_cmhsa.images import to_pixels
from timm_cmhsa.pixel import PositionalAttention
from timm_cmhsa.plots import (
    PlotError,
    attention_figure,
    attention_from,
    center_figure,
    data as plot_data,
    explorer,
    explorer_html,
    gaussians,
    mean_attention,
    plot_attention,
    statistics_figure,
    statistics_movement_figure,
)
from timm_cmhsa.plots.data import QueryAttention
from timm_cmhsa.plots.draw import draw_figures


class TwoGrids(nn.Module):
    """Three heads with a zero key on a grid of 4 x 6, then two without on a grid of 2 x 3."""

    def __init__(self):
        super().__init__()
        self.fine = RelPosAttention(8, (4, 6), num_heads=3)
        self.coarse = PositionalAttention(8, (2, 3), num_heads=2)

    def forward(self, x):
        x = self.fine(nn.functional.avg_pool2d(x, 4).flatten(2).transpose(1, 2).repeat(1, 1, 3)[..., :8])
        x = nn.functional.avg_pool2d(x.transpose(1, 2).unflatten(-1, (4, 6)), 2)
        return self.coarse(x.flatten(2).transpose(1, 2))


@pytest.fixture
def two_grids():
    model = TwoGrids()
    nn.init.normal_(model.fine.rel_pos.relative_position_bias_table)
    nn.init.constant_(model.fine.rel_pos.zero_key_bias, 2.)
    return model, torch.randn(5, 3, 16, 24)


@pytest.fixture(scope='module')
def model():
    torch.manual_seed(0)
    return timm.create_model('test_pixel_attn', depth=2, rel_pos='quadratic_gen').eval()


def pictures(figure):
    """Of every panel that shows one."""
    return [axis for axis in figure.axes if axis.images]


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return Image.open(buffer)


def test_attention_figure_draws_the_mean_weights_of_every_layer_and_head(two_grids):
    model, images = two_grids
    maps = attention_maps(model, images)
    figure = attention_figure({name: attention_from(one, (0.3, 0.9)) for name, one in maps.items()})
    panels = pictures(figure)
    assert len(panels) == 3 + 2
    fine, coarse = panels[:3], panels[3:]
    for head, axis in enumerate(fine):  # the query is row 1 of 4 and column 5 of 6
        expected = maps['fine'].weights[:, head, 1 * 6 + 5].mean(dim=0).view(4, 6)
        np.testing.assert_allclose(axis.images[0].get_array(), expected)
        assert axis.images[0].norm.vmax == pytest.approx(maps['fine'].weights[:, :, 11].mean(dim=0).max().item())
    for head, axis in enumerate(coarse):  # and row 0 of 2 and column 2 of 3
        np.testing.assert_allclose(axis.images[0].get_array(), maps['coarse'].weights[0, head, 2].view(2, 3))
    for panels, place in ((fine, (4.5, 0.5)), (coarse, (1.5, -0.5))):
        for axis in panels:
            frame, = [patch for patch in axis.patches if isinstance(patch, Rectangle)]
            assert (frame.get_xy(), frame.get_width(), frame.get_height()) == (place, 1, 1)
    png(figure)


def test_attention_figure_tells_its_scale_and_the_zero_key(two_grids):
    model, images = two_grids
    maps = attention_maps(model, images)
    figure = attention_figure({name: attention_from(one) for name, one in maps.items()})
    zero_key = maps['fine'].zero_key[:, :, 2 * 6 + 3].mean(dim=0)
    assert [axis.get_xlabel() for axis in pictures(figure)] == [
        *(f'nothing: {100 * weight:.0f} %' for weight in zero_key), '', '']
    labels = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert len(labels) == 2
    assert labels[0] == f"fine\nbrightest: {100 * maps['fine'].weights[:, :, 15].mean(dim=0).max():.0f} %"
    assert 'square root' in figure.get_suptitle()


def test_one_image_is_shown_before_its_attention_wherever_the_grid_changes(two_grids):
    model, images = two_grids
    attention = {name: attention_from(one) for name, one in attention_maps(model, images[:1]).items()}
    pixels = to_pixels(images[:1], model)[0]
    figure = attention_figure({'first': attention['fine'], **attention}, image=pixels)
    shown = [axis for axis in pictures(figure) if axis.images[0].get_array().ndim == 3]
    assert len(shown) == 2
    for axis, extent in zip(shown, ([-0.5, 5.5, 3.5, -0.5], [-0.5, 2.5, 1.5, -0.5])):
        np.testing.assert_array_equal(axis.images[0].get_array(), pixels)
        assert axis.images[0].get_extent() == extent
    png(figure)


def test_pixels_are_those_of_the_image_file():
    model = timm.create_model('test_pixel_attn')
    pixels = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8)
    mean, std = (torch.tensor(model.pretrained_cfg[key]) for key in ('mean', 'std'))
    images = ((pixels / 255 - mean) / std).permute(0, 3, 1, 2)
    assert torch.equal(to_pixels(images, model), pixels)


def test_mean_attention_does_not_depend_on_how_many_images_are_seen_at_once(two_grids, monkeypatch):
    model, images = two_grids
    monkeypatch.setattr(plot_data, 'BATCH_WEIGHTS', 2 * (3 * 24 ** 2 + 2 * 6 ** 2))  # two images: batches of 2, 2 and 1
    means, statistics = mean_attention(model, images)
    for name, maps in attention_maps(model, images).items():
        torch.testing.assert_close(means[name].weights, maps.weights.mean(dim=0, keepdim=True))
        if maps.zero_key is not None:
            torch.testing.assert_close(means[name].zero_key, maps.zero_key.mean(dim=0, keepdim=True))
        for head, expected in zip(statistics[name], head_statistics(maps)):
            assert head.best_offset == expected.best_offset
            assert head.entropy == pytest.approx(expected.entropy, rel=1e-5)
            assert head.distance == pytest.approx(expected.distance, rel=1e-4)


@pytest.mark.parametrize('rel_pos', ['quadratic', 'quadratic_gen'])
def test_contours_hold_their_share_of_the_gaussian(rel_pos):
    layer = PositionalAttention(4, (8, 8), num_heads=5, rel_pos=rel_pos)
    nn.init.normal_(layer.rel_pos.inv_std)
    figure = center_figure([gaussians(layer)])
    axis = figure.axes[0]
    inv_covariance = layer.rel_pos.inv_covariance().detach().numpy()
    ellipses = [patch for patch in axis.patches if isinstance(patch, Ellipse)]
    assert len(ellipses) == 5 * 2
    for i, ellipse in enumerate(ellipses):
        head, share = i // 2, (0.5, 0.9)[i % 2]
        center = layer.rel_pos.center[head].detach().numpy()
        np.testing.assert_allclose(ellipse.get_center(), center[::-1], rtol=1e-5)
        variances = 1 / np.linalg.eigvalsh(inv_covariance[head])
        axes = 2 * np.sqrt(variances * -2 * math.log(1 - share))
        np.testing.assert_allclose(sorted([ellipse.width, ellipse.height]), sorted(axes), rtol=1e-3)
        for col, row in [*ellipse.get_vertices(), *ellipse.get_co_vertices()]:
            offset = np.array([row, col]) - center
            assert offset @ inv_covariance[head] @ offset == pytest.approx(-2 * math.log(1 - share), rel=1e-3)


def test_centers_lie_in_an_image_whose_rows_point_down(model):
    figure = center_figure([gaussians(model)])
    assert [axis.get_title() for axis in figure.axes] == ['blocks.0.attn', 'blocks.1.attn']
    for axis, block in zip(figure.axes, model.blocks):
        dots = np.array([line.get_xydata()[-1] for line in axis.lines])
        np.testing.assert_allclose(dots[:, ::-1], block.attn.rel_pos.center.detach())
        assert axis.yaxis_inverted()
        assert not axis.xaxis_inverted()
        query, = [patch for patch in axis.patches if type(patch) is Rectangle]
        assert (query.get_xy(), query.get_width(), query.get_height()) == ((-0.5, -0.5), 1, 1)


def test_flat_and_sharp_gaussians_and_far_centers_leave_the_picture_readable():
    layer = PositionalAttention(4, (8, 8), num_heads=4, rel_pos='quadratic_gen')
    inv_std = torch.stack([torch.zeros(2, 2), 1e4 * torch.eye(2), torch.diag(torch.tensor([1., 0.])), torch.eye(2)])
    layer.rel_pos.inv_std = nn.Parameter(inv_std)
    layer.rel_pos.center = nn.Parameter(torch.tensor([[0., 0.], [1., 1.], [0., 2.], [-30., 4.]]))
    figure = center_figure([gaussians(layer)])
    assert figure.axes[0].get_xlim() == (-7.5, 7.5)
    assert figure.axes[0].get_ylim() == (7.5, -7.5)
    assert figure.axes[0].get_title() == '\n(beyond: head 4)'
    assert all(np.isfinite([patch.width, patch.height]).all()
               for patch in figure.axes[0].patches if isinstance(patch, Ellipse))
    assert max(png(figure).size) < 1000


def test_paths_lead_from_the_first_to_the_last_center(model):
    history = [gaussians(model)]
    for step in (1, 2):
        history.append({name: layer._replace(center=layer.center + step) for name, layer in history[0].items()})
    figure = center_figure(history)
    for axis, name in zip(figure.axes, history[0]):
        paths = [line for line in axis.lines if len(line.get_xydata()) == 3]
        assert len(paths) == 9
        for head, path in enumerate(paths):
            assert (path.get_marker(), path.get_markevery()) == ('o', [0])  # a circle at the first alone
            centers = torch.stack([layers[name].center[head] for layers in history])
            np.testing.assert_allclose(path.get_xydata()[:, ::-1], centers)
        ellipse = next(patch for patch in axis.patches if isinstance(patch, Ellipse))
        np.testing.assert_allclose(ellipse.get_center()[::-1], history[-1][name].center[0])


def test_movement_is_drawn_from_every_checkpoint(two_grids):
    model, images = two_grids
    attention, statistics, encodings = {}, {}, {}
    for title in ('first', 'middle', 'last'):
        nn.init.normal_(model.fine.rel_pos.relative_position_bias_table)
        nn.init.normal_(model.coarse.rel_pos.center)
        maps, statistics[title] = mean_attention(model, images)
        attention[title] = {name: attention_from(one, (0., 1.)) for name, one in maps.items()}
        encodings[title] = gaussians(model)
    figures = draw_figures(attention, statistics, encodings, '5 images')
    assert set(figures) == {
        'attention.png', 'statistics.png', 'centers.png', 'movement_fine.png', 'movement_coarse.png',
        'statistics_movement.png', 'center_paths.png'}
    shown = [axis.images[0].get_array() for axis in pictures(figures['movement_fine.png'])]
    expected = [weights for layers in attention.values() for weights in layers['fine'].weights]
    np.testing.assert_allclose(shown, torch.stack(expected))
    assert not torch.equal(expected[0], expected[3])
    labels = [text.get_text().split('\n')[0] for axis in figures['movement_fine.png'].axes for text in axis.texts]
    assert labels == ['first', 'middle', 'last']
    assert len(figures['center_paths.png'].axes[0].lines[0].get_xdata()) == 3
    ticks = [label.get_text() for label in figures['statistics_movement.png'].axes[0].get_xticklabels()]
    assert ticks == ['first', 'middle', 'last']


def test_statistics_figure_shows_every_measure_of_every_head(two_grids):
    statistics = {name: head_statistics(maps) for name, maps in attention_maps(*two_grids).items()}
    figure = statistics_figure(statistics)
    assert len(figure.axes) == 3
    for axis, measure, factor in zip(figure.axes, ('best_weight', 'distance', 'entropy'), (100, 1, 1)):
        values = np.ma.filled(axis.images[0].get_array(), np.nan)
        expected = [[factor * getattr(head, measure) for head in heads] for heads in statistics.values()]
        np.testing.assert_allclose(values, [expected[0], [*expected[1], np.nan]])
        assert len(axis.texts) == 5
    png(figure)


def test_statistics_over_checkpoints_are_means_of_the_heads(two_grids):
    model, images = two_grids
    history = {}
    for title in ('first', 'last'):
        history[title] = {name: head_statistics(maps) for name, maps in attention_maps(model, images).items()}
        nn.init.normal_(model.fine.rel_pos.relative_position_bias_table)
    figure = statistics_movement_figure(history)
    for line, name in zip(figure.axes[2].lines, ('fine', 'coarse')):
        expected = [np.mean([head.entropy for head in statistics[name]]) for statistics in history.values()]
        np.testing.assert_allclose(line.get_ydata(), expected)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ['first', 'last']


def test_a_model_in_memory_is_drawn(two_grids, tmp_path):
    model, images = two_grids
    paths = plot_attention(model, tmp_path / 'new' / 'folder', images=images, html=True)
    assert {path.name for path in paths} == {
        'attention.png', 'attention_image.png', 'centers.png', 'statistics.png', 'attention.html'}
    assert sorted((tmp_path / 'new' / 'folder').iterdir()) == sorted(paths)


@pytest.mark.parametrize('wrap', [nn.DataParallel, ModelEmaV3, torch.compile])
def test_a_wrapped_model_is_drawn(wrap, model, tmp_path):
    names = {path.name for path in plot_attention(wrap(model), tmp_path, html=True)}
    assert names == {'attention.png', 'centers.png', 'statistics.png', 'attention.html'}
    wrapped, images = wrap(model), torch.zeros(1, 3, 32, 32)
    assert explorer_html(wrapped, images, before=wrapped) == explorer_html(model, images, before=model)


def test_layers_without_heads_are_left_out(tmp_path):
    model = timm.create_model('test_pixel_attn', depth=3, num_heads=[0, 2, 1])
    maps, _ = mean_attention(model, torch.randn(1, 3, 32, 32))
    assert list(maps) == ['blocks.1.attn', 'blocks.2.attn']
    plot_attention(model, tmp_path, html=True)
    with pytest.raises(PlotError, match='no attention layer of the model has a head'):
        plot_attention(timm.create_model('test_pixel_attn', depth=1, num_heads=0), tmp_path)


@pytest.mark.parametrize('name', ['$\\frac{$', 'a$b$c', 'a\\$b', '%s{0}<b>'])
def test_names_are_shown_as_they_are(name, two_grids):
    """Not as formulas, in titles, labels of rows and of ticks, and legends."""
    model, images = two_grids
    maps, statistics = mean_attention(model, images)
    attention = {name: attention_from(maps['fine'])}
    figures = [
        attention_figure(attention, name), statistics_figure({name: statistics['fine']}, name),
        statistics_movement_figure({name: {name: statistics['fine']}}, name),
        center_figure([{name: gaussians(model)['coarse']}], name)]
    for figure in figures:
        png(figure)
        texts = [text for text in figure.findobj(Text) if name in text.get_text()]
        assert len(texts) >= 2
        assert not any(text.get_parse_math() for text in texts)


def test_heads_that_look_alike_say_so():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    attn = conv2d_to_attention(conv, 4, 5, head_dim=16)  # three heads look at the patch itself
    maps, = attention_maps(attn, torch.randn(1, 25, 48)).values()
    labels = [axis.get_xlabel() for axis in pictures(attention_figure({'': attention_from(maps)}))]
    assert labels == [*[''] * 5, 'as head 5', 'as head 5', *[''] * 4]
    labels = [axis.get_xlabel() for axis in pictures(attention_figure({'': attention_from(maps, (0, 0))}))]
    assert labels == [*['nothing: 100 %'] * 4, '', 'as head 5', 'as head 5', '', 'nothing: 100 %', '', '']


def test_what_cannot_be_drawn_is_refused(two_grids, tmp_path, monkeypatch):
    model, images = two_grids
    with pytest.raises(PlotError, match=r'not of input of shape \(0, 3, 16, 24\)'):
        plot_attention(model, tmp_path, images[:0])
    with pytest.raises(PlotError, match=r'201 rows of 1 heads are too many for a picture: choose one layer'):
        attention_figure({str(i): QueryAttention(torch.ones(1, 1, 1), None, (0, 0)) for i in range(201)})
    idle = copy.deepcopy(model)
    idle.forward = lambda x: x
    with pytest.raises(PlotError, match='no attention layer was called'):
        plot_attention(idle, tmp_path, images)
    monkeypatch.setattr(explorer, 'MAX_PAGE_BYTES', 100)
    nn.init.constant_(model.fine.rel_pos.zero_key_bias, float('nan'))
    with pytest.raises(PlotError, match='the page would be'):  # before the model runs
        plot_attention(model, tmp_path, images, html=True)
    with pytest.raises(PlotError, match='the attention of fine is NaN: the training diverged'):
        plot_attention(model, tmp_path, images)
    monkeypatch.setattr(plot_data, 'MAX_WEIGHTS', 3 * 24 ** 2)
    with pytest.raises(PlotError, match='the attention of one image takes 0 GB, more than 0 GB: take a smaller input'):
        plot_attention(model, tmp_path, images)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('dtype', [
    torch.float16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float64))])
def test_models_of_other_types_are_drawn(dtype, model, tmp_path):
    names = {path.name for path in plot_attention(copy.deepcopy(model).to(dtype), tmp_path, html=True)}
    assert names == {'attention.png', 'centers.png', 'statistics.png', 'attention.html'}


def test_queries_outside_the_image_are_refused(model):
    maps = attention_maps(model, torch.zeros(1, 3, 32, 32))['blocks.0.attn']
    assert attention_from(maps, (1., 0.)).query == (7, 0)
    for query in ((1.1, 0.), (0., -0.1), (float('nan'), 0.)):
        with pytest.raises(PlotError, match='outside the image'):
            attention_from(maps, query)
