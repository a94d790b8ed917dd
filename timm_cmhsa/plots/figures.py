"""Figures: the attention of all heads from one patch, and how much like a convolution the heads are."""
import math
from typing import List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..analysis import AttentionMaps, HeadStatistics, PlotError

MIN_WIDTH = 6  # inches, for the title
ALIKE = 1e-3  # largest difference of heads that look alike, relative to the brightest
# Fields of `HeadStatistics`: title, colours, factor and format of the numbers, lowest upper end of the colours.
MEASURES = {
    'best_weight': ('weight on the best offset, %: 100 is a tap of a convolution', 'viridis', 100, '{:.0f}', 100),
    'distance': ('distance of the centre from the query, patches', 'cividis', 1, '{:.1f}', 1),
    'entropy': ('entropy of the weights, nats: 0 is all on one patch', 'cividis', 1, '{:.1f}', 1),
}


class QueryAttention(NamedTuple):
    """Attention of the heads of a layer from one patch."""
    weights: torch.Tensor  # to every patch: (num_heads, h, w)
    zero_key: Optional[torch.Tensor]  # to the zero key, if the layer has one: (num_heads,)
    query: Tuple[int, int]  # row and column of the patch


def attention_from(maps: AttentionMaps, query: Tuple[float, float] = (0.5, 0.5)) -> QueryAttention:
    """Return the attention of a layer from one patch, averaged over the images.

    The query is row and column, from 0 to 1, relative to the size of the image, since the grids of layers can differ.
    """
    if not all(0 <= place <= 1 for place in query):
        raise PlotError(f'The query {query[0]:g} {query[1]:g} is outside the image: row and column go from 0 to 1.')
    row, col = (min(int(place * size), size - 1) for place, size in zip(query, maps.grid_size))
    index = row * maps.grid_size[1] + col
    weights = maps.weights[:, :, index].mean(dim=0).unflatten(-1, maps.grid_size).cpu()
    zero_key = None if maps.zero_key is None else maps.zero_key[:, :, index].mean(dim=0).cpu()
    return QueryAttention(weights, zero_key, (row, col))


def attention_figure(
        attention: Mapping[str, QueryAttention],
        title: str = 'Attention',
        image: Optional[torch.Tensor] = None,
) -> Figure:
    """Draw the attention from one patch: a row for each layer or checkpoint, a column for each head.

    Args:
        attention: Rows by name, see `attention_from`. Heads and grids may differ.
        image: The image, shown in front of every row: shape (H, W, 3), uint8.
    """
    num_heads = max(len(row.weights) for row in attention.values())
    first = 0 if image is None else 1  # column of a head
    row_height = 1.0 if all(row.zero_key is None for row in attention.values()) else 1.15
    size = max(1.6 + 0.95 * (first + num_heads), MIN_WIDTH), 0.9 + row_height * len(attention)
    figure = Figure(figsize=size, dpi=120, layout='constrained')
    empty = {'xticks': [], 'yticks': [], 'frame_on': False}
    axes = figure.subplots(len(attention), first + num_heads, squeeze=False, subplot_kw=empty)
    for head, axis in enumerate(axes[0, first:]):
        axis.set_title(f'head {head + 1}', fontsize=8)
    for line, (name, row) in zip(axes, attention.items()):
        brightest = row.weights.max().item()
        line[0].text(
            -0.12, 0.5, f'{name}\nbrightest: {brightest:.1%}', transform=line[0].transAxes, ha='right',
            va='center', fontsize=8, linespacing=1.5)
        _, height, width = row.weights.shape
        if image is not None:
            line[0].imshow(image.numpy(), extent=(-0.5, width - 0.5, height - 0.5, -0.5), aspect='auto')
            line[0].set_box_aspect(image.shape[0] / image.shape[1])
            _frame(line[0], row.query)
        flat = row.weights.flatten(1)
        twins = (torch.cdist(flat, flat, p=math.inf) <= ALIKE * brightest).int().argmax(dim=1)  # the first one
        for head, (axis, weights) in enumerate(zip(line[first:], row.weights)):
            axis.imshow(weights.numpy(), norm=PowerNorm(0.5, vmin=0, vmax=brightest or 1.), cmap='magma')
            _frame(axis, row.query)
            if twins[head] < head and weights.max() > ALIKE * brightest:
                axis.set_xlabel(f'as head {twins[head] + 1}', fontsize=7, labelpad=2)
            elif row.zero_key is not None and row.zero_key[head] >= 0.005:
                axis.set_xlabel(f'nothing: {row.zero_key[head]:.1%}', fontsize=7, labelpad=2)
    figure.suptitle(f'{title}, from the framed patch\n(brightness: square root of the weight)', fontsize=10)
    return figure


def _frame(axis: Axes, query: Tuple[int, int]) -> None:
    row, col = query
    axis.set_frame_on(True)
    axis.add_patch(Rectangle((col - 0.5, row - 0.5), 1, 1, fill=False, edgecolor='cyan', linewidth=1.2))


def statistics_figure(
        statistics: Mapping[str, List[HeadStatistics]], title: str = 'How much like a convolution every head is',
) -> Figure:
    """Draw the statistics of all heads, by name of the layer. Layers may have different numbers of heads."""
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


def statistics_movement_figure(history: Mapping[str, Mapping[str, List[HeadStatistics]]]) -> Figure:
    """Draw the statistics, by title of the checkpoint and name of the layer, as means over the heads of every layer."""
    layers = list(next(iter(history.values())))
    step = math.ceil(len(history) / 15)  # names of more would overlap
    figure = Figure(figsize=(12, 3.8), dpi=120, layout='constrained')
    axes = figure.subplots(1, 3)
    for axis, (measure, (label, _, factor, _, top)) in zip(axes, MEASURES.items()):
        for layer, color in zip(layers, colormaps['viridis'](np.linspace(0, 0.9, len(layers)))):
            means = [factor * np.mean([getattr(head, measure) for head in statistics[layer]])
                     for statistics in history.values()]
            axis.plot(means, 'o-', color=color, markersize=3, label=layer)
        axis.set_xticks(range(0, len(history), step), list(history)[::step], fontsize=7, rotation=30, ha='right')
        axis.set_ylim(0, 1.08 * max(axis.dataLim.ymax, top))
        axis.set_title(label, fontsize=9)
        axis.grid(alpha=0.3)
    figure.legend(handles=axes[0].get_lines(), loc='outside right upper', fontsize=7, frameon=False)
    figure.suptitle('How much like a convolution the heads are, mean of every layer', fontsize=10)
    return figure
