"""What the figures show: the drawn arrays and labels, not only that there is a file."""
import copy

import numpy as np
import pytest
import timm
import torch
from matplotlib.patches import Rectangle
from timm.utils import ModelEmaV3
from torch import nn

from timm_cmhsa import RelPosAttention, analysis, attention_maps, conv2d_to_attention, head_statistics, plots
from timm_cmhsa.images import to_pixels
from timm_cmhsa.pixel.models import PositionalAttention
from timm_cmhsa.plots.draw import draw_figures

PICTURES = {'attention.png', 'statistics.png'}


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


def panels(figure):
    return [axis for axis in figure.axes if axis.images]


def labels(figure):
    """Return the labels of the rows, without what is said about them."""
    return [text.get_text().split('\n')[0] for axis in figure.axes for text in axis.texts]


def test_attention_is_that_of_the_query(two_grids):
    model, images = two_grids
    maps = attention_maps(model, images)
    figure = plots.attention_figure({name: plots.attention_from(one, (0.3, 0.7)) for name, one in maps.items()})
    fine, coarse = panels(figure)[:3], panels(figure)[3:]
    for head, axis in enumerate(fine):  # the query is row 1 of 4 and column 4 of 6
        expected = maps['fine'].weights[:, head, 1 * 6 + 4].mean(dim=0).view(4, 6)
        np.testing.assert_allclose(axis.images[0].get_array(), expected)
        assert axis.images[0].norm.vmax == pytest.approx(maps['fine'].weights[:, :, 10].mean(dim=0).max().item())
    for head, axis in enumerate(coarse):  # and row 0 of 2 and column 2 of 3
        np.testing.assert_allclose(axis.images[0].get_array(), maps['coarse'].weights[0, head, 2].view(2, 3))
    for axes, corner in ((fine, (3.5, 0.5)), (coarse, (1.5, -0.5))):
        for axis in axes:
            frame, = [patch for patch in axis.patches if isinstance(patch, Rectangle)]
            assert (frame.get_xy(), frame.get_width(), frame.get_height()) == (corner, 1, 1)
    assert labels(figure) == ['fine', 'coarse']


def test_the_zero_key_is_named():
    attn = conv2d_to_attention(nn.Conv2d(3, 3, 3, padding=1), 4, 5, head_dim=16)  # three heads for the patch itself
    maps, = attention_maps(attn, torch.randn(1, 25, 48)).values()
    notes = [axis.get_xlabel() for axis in panels(plots.attention_figure({'': plots.attention_from(maps)}))]
    assert not any(notes)
    notes = [axis.get_xlabel() for axis in panels(plots.attention_figure({'': plots.attention_from(maps, (0, 0))}))]
    assert [note.partition(':')[0] for note in notes] == [
        *['nothing'] * 4, '', '', '', '', 'nothing', '', '']


def test_an_image_is_shown_before_its_attention(two_grids):
    model, images = two_grids
    attention = {name: plots.attention_from(one) for name, one in attention_maps(model, images[:1]).items()}
    pixels = to_pixels(images[:1], model)[0]
    figure = plots.attention_figure(attention, image=pixels)
    shown = [axis for axis in panels(figure) if axis.images[0].get_array().ndim == 3]
    for axis, extent in zip(shown, ([-0.5, 5.5, 3.5, -0.5], [-0.5, 2.5, 1.5, -0.5]), strict=True):
        np.testing.assert_array_equal(axis.images[0].get_array(), pixels)
        assert axis.images[0].get_extent() == extent  # in patches, as the frame of the query


def test_pixels_are_those_of_the_image_file():
    model = timm.create_model('test_cmhsa_attn')
    pixels = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8)
    mean, std = (torch.tensor(model.pretrained_cfg[key]) for key in ('mean', 'std'))
    images = ((pixels / 255 - mean) / std).permute(0, 3, 1, 2)
    assert torch.equal(to_pixels(images, model), pixels)


def test_mean_attention_does_not_depend_on_the_batch_size(two_grids, monkeypatch):
    model, images = two_grids
    monkeypatch.setattr(analysis, 'BATCH_WEIGHTS', 2 * (3 * 24 ** 2 + 2 * 6 ** 2))  # batches of 2, 2 and 1
    means, statistics = plots.mean_attention(model, images)
    for name, maps in attention_maps(model, images).items():
        torch.testing.assert_close(means[name].weights, maps.weights.mean(dim=0, keepdim=True))
        if maps.zero_key is not None:
            torch.testing.assert_close(means[name].zero_key, maps.zero_key.mean(dim=0, keepdim=True))
        for head, expected in zip(statistics[name], head_statistics(maps), strict=True):
            assert head.best_offset == expected.best_offset
            assert head.entropy == pytest.approx(expected.entropy, rel=1e-5)
            assert head.distance == pytest.approx(expected.distance, rel=1e-4)


def test_movement_is_drawn_from_every_checkpoint(two_grids):
    model, images = two_grids
    attention, statistics = {}, {}
    for title in ('first', 'middle', 'last'):
        nn.init.normal_(model.fine.rel_pos.relative_position_bias_table)
        maps, statistics[title] = plots.mean_attention(model, images)
        attention[title] = {name: plots.attention_from(one, (0., 1.)) for name, one in maps.items()}
    figures = draw_figures(attention, statistics, '5 images')
    assert set(figures) == {
        *PICTURES, 'movement_fine.png', 'movement_coarse.png', 'statistics_movement.png'}
    shown = [axis.images[0].get_array() for axis in panels(figures['movement_fine.png'])]
    expected = [weights for layers in attention.values() for weights in layers['fine'].weights]
    np.testing.assert_allclose(shown, torch.stack(expected))
    assert labels(figures['movement_fine.png']) == ['first', 'middle', 'last']
    lines = figures['statistics_movement.png'].axes[2].lines
    for line, name in zip(lines, ('fine', 'coarse'), strict=True):
        means = [np.mean([head.entropy for head in layers[name]]) for layers in statistics.values()]
        np.testing.assert_allclose(line.get_ydata(), means)
    ticks = [label.get_text() for label in figures['statistics_movement.png'].axes[0].get_xticklabels()]
    assert ticks == ['first', 'middle', 'last']


def test_statistics_of_every_head_are_shown(two_grids):
    statistics = {name: head_statistics(maps) for name, maps in attention_maps(*two_grids).items()}
    figure = plots.statistics_figure(statistics)
    for axis, measure, factor in zip(figure.axes, ('best_weight', 'distance', 'entropy'), (100, 1, 1), strict=True):
        values = np.ma.filled(axis.images[0].get_array(), np.nan)
        expected = [[factor * getattr(head, measure) for head in heads] for heads in statistics.values()]
        np.testing.assert_allclose(values, [expected[0], [*expected[1], np.nan]])
        assert len(axis.texts) == 5


@pytest.mark.parametrize('wrap', [nn.DataParallel, ModelEmaV3, torch.compile])
def test_a_wrapped_model_is_drawn(wrap, tmp_path):
    model, images = timm.create_model('test_cmhsa_attn', depth=2), torch.zeros(1, 3, 32, 32)
    wrapped = wrap(model)
    assert {path.name for path in plots.plot_attention(wrapped, tmp_path)} == PICTURES
    assert plots.explorer_html(wrapped, images, before=wrapped) == plots.explorer_html(model, images, before=model)


@pytest.mark.parametrize(('name', 'dtype'), [
    ('test_cmhsa_attn', torch.float16), ('test_cmhsa_attn', torch.bfloat16), ('test_vit', torch.float64)])
def test_models_of_other_types_are_drawn(name, dtype, tmp_path):
    model = timm.create_model(name, depth=1).to(dtype)
    paths = plots.plot_attention(model, tmp_path, images=torch.zeros(1, *model.pretrained_cfg['input_size']), html=True)
    assert {path.name for path in paths} == {*PICTURES, 'attention_image.png', 'attention.html'}


def test_what_cannot_be_drawn_is_refused(two_grids, tmp_path, monkeypatch):
    model, images = two_grids
    diverged = copy.deepcopy(model)
    nn.init.constant_(diverged.fine.rel_pos.zero_key_bias, float('nan'))
    monkeypatch.setattr(plots.explorer, 'MAX_PAGE_BYTES', 100)
    for each, pixels, options, message in (
            (model, images, dict(query=(0., -0.1)), 'outside the image'),
            (model, images, dict(query=(float('nan'), 0.)), 'outside the image'),
            (model, images, dict(html=True), 'The page would have'),
            (model, images[:0], {}, 'cannot be drawn: use images'),
            (model, images[0], {}, 'cannot be drawn: use images'),
            (diverged, images, {}, 'The attention of fine is NaN')):
        with pytest.raises(plots.PlotError, match=message):
            plots.plot_attention(each, tmp_path, pixels, **options)
    assert not list(tmp_path.iterdir())
