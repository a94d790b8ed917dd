"""Figures of attention: where the heads look, their centres, how both move during training. Needs matplotlib."""
import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Rectangle

from ..analysis import HeadStatistics
from .data import Gaussians, PlotError, QueryAttention

CONTOURS: Dict[int, Dict[str, Any]] = {  # percentage of a Gaussian, and how its contour is drawn
    50: {'linestyle': '-', 'linewidth': 1.1},
    90: {'linestyle': ':', 'linewidth': 0.9},
}
MIN_INV_VARIANCE = 1e-6  # patches^-2; a contour of a flatter Gaussian is far outside any picture
MIN_WIDTH = 6  # inches, for the title
MAX_SIDE, MAX_PANELS = 200, 2000  # beside each other, and in all: the layout of more takes minutes
ALIKE = 1e-3  # difference of heads that look the same, relative to the brightest
# Names are no formulas, whatever stands between dollars.
plain_text = rc_context({'text.parse_math': False, 'axes.formatter.use_mathtext': False})
# of `HeadStatistics`: what it says, colours, factor and format of the numbers, and what colours reach to at least
MEASURES = {
    'best_weight': ('weight on the best offset, %: 100 is a tap of a convolution', 'viridis', 100, '{:.0f}', 100),
    'distance': ('distance of the centre from the query, patches', 'cividis', 1, '{:.1f}', 1),
    'entropy': ('entropy of the weights, nats: 0 is all on one patch', 'cividis', 1, '{:.1f}', 1),
}


@plain_text
def attention_figure(
        attention: Mapping[str, QueryAttention],
        title: str = 'Attention',
        image: Optional[torch.Tensor] = None,
) -> Figure:
    """Draw where every head looks from one patch: a row per layer, or per checkpoint, a column per head.

    Args:
        attention: Rows by name, see `attention_from`. Heads and grids may differ.
        image: Shape (H, W, 3), uint8: the image that all this is for, shown in front, the query marked.

    Raises:
        PlotError: If there is no row, or there are too many panels for a picture.
    """
    if not attention:
        raise PlotError('no attention layer was called with these images.')
    num_heads = max(len(row.weights) for row in attention.values())
    if max(len(attention), num_heads) > MAX_SIDE or len(attention) * num_heads > MAX_PANELS:
        raise PlotError(
            f'{len(attention)} rows of {num_heads} heads are too many for a picture: choose one layer, or fewer '
            'checkpoints.')
    first = 0 if image is None else 1  # column of a head
    row_height = 1.0 if all(row.zero_key is None for row in attention.values()) else 1.15
    size = max(1.6 + 0.95 * (first + num_heads), MIN_WIDTH), 0.9 + row_height * len(attention)
    figure = Figure(figsize=size, dpi=120, layout='constrained')
    empty = {'xticks': [], 'yticks': [], 'frame_on': False}
    axes = figure.subplots(len(attention), first + num_heads, squeeze=False, subplot_kw=empty)
    for head, axis in enumerate(axes[0, first:]):
        axis.set_title(f'head {head + 1}', fontsize=8)
    shown = None
    for line, (name, row) in zip(axes, attention.items()):
        brightest = row.weights.max().item()
        line[0].text(
            -0.12, 0.5, f'{name}\nbrightest: {_percent(brightest)}', transform=line[0].transAxes, ha='right',
            va='center', fontsize=8, linespacing=1.5)
        _, height, width = row.weights.shape
        if image is not None and shown != (height, width, row.query):
            shown = height, width, row.query
            line[0].imshow(image.numpy(), extent=(-0.5, width - 0.5, height - 0.5, -0.5), aspect='auto')
            line[0].set_box_aspect(image.shape[0] / image.shape[1])
            _frame(line[0], row.query)
        flat = row.weights.flatten(1)
        twins = (torch.cdist(flat, flat, p=math.inf) <= ALIKE * brightest).int().argmax(dim=1)  # the first of each
        for head, (axis, weights) in enumerate(zip(line[first:], row.weights)):
            axis.imshow(weights.numpy(), norm=PowerNorm(0.5, vmin=0, vmax=brightest or 1.), cmap='magma')
            _frame(axis, row.query)
            if twins[head] < head and weights.max() > ALIKE * brightest:
                axis.set_xlabel(f'as head {twins[head] + 1}', fontsize=7, labelpad=2)
            elif row.zero_key is not None and row.zero_key[head] >= 0.005:
                axis.set_xlabel(f'nothing: {_percent(row.zero_key[head].item())}', fontsize=7, labelpad=2)
    figure.suptitle(f'{title}, from the framed patch\n(brightness: square root of the weight)', fontsize=10)
    return figure


def _percent(weight: float) -> str:
    return f'{100 * weight:.0f} %' if weight >= 0.01 else f'{100 * weight:.2g} %'


def _frame(axis: Axes, query: Tuple[int, int]) -> None:
    row, col = query
    axis.set_frame_on(True)
    axis.add_patch(Rectangle((col - 0.5, row - 0.5), 1, 1, fill=False, edgecolor='cyan', linewidth=1.2))


@plain_text
def center_figure(history: Sequence[Mapping[str, Gaussians]], title: str = 'Centres of the heads') -> Figure:
    """Draw the centres of the heads with their 50 % and 90 % contours, as seen from the query: a panel per layer.

    Figures 3 and 4 of arXiv 1911.03584. What lies beyond the reach of the grid is not shown, since no head can look
    there; heads with their centre there are named.

    Args:
        history: The Gaussians of every layer (see `gaussians`) at one checkpoint, or at several, first to last: lines
            lead to the centre at the last, where circles mark the first.
    """
    last = history[-1]
    columns = math.ceil(math.sqrt(len(last)))
    rows = math.ceil(len(last) / columns)
    colors = _head_colors(max(len(layer.center) for layer in last.values()))
    figure = Figure(figsize=(max(1.8 + 3 * columns, MIN_WIDTH), 1 + 3.1 * rows), dpi=120, layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False)
    reach = _reach(last)
    for axis in axes.flat[len(last):]:
        axis.set_axis_off()
    for axis, (name, layer) in zip(axes.flat, last.items()):
        axis.set(xlim=(-reach, reach), ylim=(reach, -reach), aspect='equal')
        axis.grid(alpha=0.2)
        axis.tick_params(labelsize=7)
        beyond = [str(head + 1) for head, center in enumerate(layer.center) if center.abs().max() > reach]
        note = f"\n(beyond: head{'s' if len(beyond) > 1 else ''} {', '.join(beyond)})" if beyond else ''
        axis.set_title(name + note, fontsize=8)
        axis.add_patch(Rectangle((-0.5, -0.5), 1, 1, fill=False, edgecolor='black', linewidth=2, zorder=2))
        for head, color in zip(range(len(layer.center)), colors):
            _draw_head(axis, [layers[name] for layers in history], head, color)
    figure.supxlabel('columns from the query, patches', fontsize=8)
    figure.supylabel('rows from the query, patches', fontsize=8)
    handles = [
        Line2D([], [], color=color, marker='o', markersize=4, label=f'head {i + 1}') for i, color in enumerate(colors)]
    handles += [Line2D([], [], color='black', label=f'{share} % contour', **line) for share, line in CONTOURS.items()]
    handles.append(Line2D([], [], color='black', marker='s', markerfacecolor='none', linestyle='', label='query'))
    if len(history) > 1:
        handles.append(Line2D([], [], color='black', marker='o', markerfacecolor='white', label='first checkpoint'))
    figure.legend(handles=handles, loc='outside right upper', fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def _head_colors(num_heads: int) -> np.ndarray:
    if num_heads <= 20:
        return colormaps['tab10' if num_heads <= 10 else 'tab20'](range(num_heads))
    return colormaps['hsv'](np.linspace(0, 1, num_heads, endpoint=False))


def _semi_axes(layer: Gaussians, share: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return half the axes of the contours that hold this share, the longer first, and their directions as columns."""
    inv_variances, directions = torch.linalg.eigh(layer.inv_covariance)
    return (-2 * math.log(1 - share / 100) / inv_variances.clamp(min=MIN_INV_VARIANCE)).sqrt(), directions


def _reach(layers: Mapping[str, Gaussians]) -> float:
    """Return how far from the query to look: as far as most 90 % contours go, but no farther than the grid."""
    of_grids = max(max(layer.grid_size) - 1 for layer in layers.values())
    of_contours = torch.cat([
        layer.center.abs().amax(dim=-1) + _semi_axes(layer, 90)[0].amax(dim=-1) for layer in layers.values()])
    return max(min(of_contours.quantile(0.9).item(), of_grids), 1) + 0.5


def _draw_head(axis: Axes, history: List[Gaussians], head: int, color: Any) -> None:
    rows, cols = torch.stack([layer.center[head] for layer in history], dim=1).numpy()
    if len(history) > 1:
        axis.plot(cols, rows, 'o-', color=color, markersize=5, markerfacecolor='white', markevery=[0], zorder=3)
    axis.plot(cols[-1:], rows[-1:], 'o', markersize=4, color=color, zorder=3)
    for share, line in CONTOURS.items():
        lengths, directions = _semi_axes(history[-1], share)
        (long, short), (down, right) = lengths[head].tolist(), directions[head, :, 0].tolist()
        axis.add_patch(Ellipse(
            (cols[-1], rows[-1]), 2 * long, 2 * short, angle=math.degrees(math.atan2(down, right)), fill=False,
            edgecolor=color, **line))


@plain_text
def statistics_figure(
        statistics: Mapping[str, List[HeadStatistics]],
        title: str = 'How much like a convolution every head is',
) -> Figure:
    """Draw the measures of every head in every layer (see `head_statistics`): the brighter, the larger.

    Args:
        statistics: By name of the layer; the numbers of heads may differ.
    """
    num_heads = max(len(heads) for heads in statistics.values())
    height = 0.28 * len(statistics) + 0.6
    figure = Figure(figsize=(max(2.6 + 0.42 * num_heads, MIN_WIDTH), 0.6 + 3 * height), dpi=120, layout='constrained')
    for axis, (measure, (label, cmap, factor, number, top)) in zip(figure.subplots(3, 1), MEASURES.items()):
        values = np.full((len(statistics), num_heads), np.nan)
        for row, heads in zip(values, statistics.values()):
            row[:len(heads)] = [factor * getattr(head, measure) for head in heads]
        picture = axis.imshow(values, cmap=cmap, vmin=0, vmax=max(np.nanmax(values), top), aspect='auto')
        for row_index, head in np.argwhere(~np.isnan(values)):
            value = values[row_index, head]
            color = 'black' if np.dot(picture.to_rgba(value)[:3], (0.3, 0.59, 0.11)) > 0.5 else 'white'
            axis.text(head, row_index, number.format(value), ha='center', va='center', fontsize=7, color=color)
        axis.set_xticks(range(num_heads), [str(head + 1) for head in range(num_heads)], fontsize=7)
        axis.set_yticks(range(len(statistics)), list(statistics), fontsize=7)
        axis.tick_params(length=0)
        axis.set_title(label, fontsize=9)
    axis.set_xlabel('head', fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


@plain_text
def statistics_movement_figure(
        history: Mapping[str, Mapping[str, List[HeadStatistics]]],
        title: str = 'How much like a convolution the heads are, mean of every layer',
) -> Figure:
    """Draw the same measures over several checkpoints, first to last: a line per layer, the mean of its heads.

    Args:
        history: By name of the checkpoint, then of the layer.
    """
    layers = list(next(iter(history.values())))
    step = math.ceil(len(history) / 15)  # names of more would overlap
    figure = Figure(figsize=(12, 3.8), dpi=120, layout='constrained')
    axes = figure.subplots(1, 3)
    for axis, (measure, (label, _, factor, *_)) in zip(axes, MEASURES.items()):
        for layer, color in zip(layers, colormaps['viridis'](np.linspace(0, 0.9, len(layers)))):
            means = [factor * np.mean([getattr(head, measure) for head in statistics[layer]])
                     for statistics in history.values()]
            axis.plot(means, 'o-', color=color, markersize=3, label=layer)
        axis.set_xticks(range(0, len(history), step), list(history)[::step], fontsize=7, rotation=30, ha='right')
        axis.set_ylim(0, 1.08 * axis.dataLim.ymax or 1)
        axis.set_title(label, fontsize=9)
        axis.grid(alpha=0.3)
    figure.legend(handles=axes[0].get_lines(), loc='outside right upper', fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure
