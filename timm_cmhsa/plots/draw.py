"""Pictures of attention: a figure for each kind, and one call from a model or its checkpoints to all of them."""
import math
import re
from itertools import groupby
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from timm.utils import natural_key, unwrap_model
from torch import nn

from ..analysis import AttentionMaps, HeadStatistics, PlotError, attention_layers, attention_maps, mean_attention
from ..checkpoint import load_model, open_model
from ..files import PathLike
from ..images import choose_images, evenly_spaced, to_pixels
from .explorer import check_alike, explorer_html, model_name

NUM_IMAGES, NUM_PAGE_IMAGES = 100, 4  # of a folder at most, and of a page
MIN_WIDTH = 6  # inches, for the title
# Fields of `HeadStatistics`: title, colours, factor and format of the numbers, lowest upper end of the colours.
MEASURES = {
    'best_weight': ('weight on the best offset, %: 100 is a tap of a convolution', 'viridis', 100, '{:.0f}', 100),
    'distance': ('distance of the centre from the query, patches', 'cividis', 1, '{:.1f}', 1),
    'entropy': ('entropy of the weights, nats: 0 is all on one patch', 'cividis', 1, '{:.1f}', 1),
}

History = Dict[str, Dict[str, Any]]  # by title of the checkpoint, then by name of the layer


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
        for head, (axis, weights) in enumerate(zip(line[first:], row.weights)):
            axis.imshow(weights.numpy(), norm=PowerNorm(0.5, vmin=0, vmax=brightest or 1.), cmap='magma')
            _frame(axis, row.query)
            if row.zero_key is not None and row.zero_key[head] >= 0.005:
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


@rc_context({'text.parse_math': False})  # names are text
def plot_attention(
        source: Union[nn.Module, PathLike, Sequence[PathLike]],
        output: PathLike,
        images: Optional[Union[torch.Tensor, PathLike]] = None,
        query: Tuple[float, float] = (0.5, 0.5),
        layer: Optional[str] = None,
        html: bool = False,
        architecture: Optional[str] = None,
        model_kwargs: Optional[Mapping[str, Any]] = None,
) -> List[Path]:
    """Draw the attention of a model, and for several checkpoints how it changes. Return the paths of the pictures.

    Args:
        source: A model, a checkpoint (see `load_model`), or several checkpoints in the order of training.
        output: Folder for the pictures, created if needed. Older pictures are replaced.
        images: A folder of images, 100 of which are taken at most, or input of the model of shape (B, C, H, W). The
            default is random noise, which is enough for attention by position alone.
        query: Row and column of the patch to look from, from 0 to 1, relative to the size of the image.
        layer: Draw only this layer.
        html: Also write a page to explore the last checkpoint with the mouse.
        architecture: timm's name of the model, if the checkpoints do not have it.
        model_kwargs: Arguments of the model that the checkpoints do not have.

    Raises:
        CheckpointError: If checkpoints or images cannot be read. Nothing was written.
        HubError: If a checkpoint cannot be downloaded. Nothing was written.
        PlotError: If the attention cannot be drawn. Nothing was written.
        OSError: If the pictures cannot be written.
    """
    attention: History = {}
    statistics: History = {}
    for title, model in open_models(source, architecture, model_kwargs or {}):
        if not attention:
            first = model
            pixels, names, seen = choose_images(images, model, NUM_IMAGES)
            if pixels.dim() != 4 or not len(pixels):
                raise PlotError(f'Input of shape {tuple(pixels.shape)} cannot be drawn: use images, (B, C, H, W).')
        check_alike(first, model)
        layers = list(attention_layers(model))
        if layer is not None and layer not in layers:
            raise PlotError(f'There is no attention layer {layer!r}: choose one of {", ".join(layers)}.')
        drawn = layers if layer is None else [layer]
        maps, measured = mean_attention(model, pixels)
        attention[title] = {name: attention_from(maps[name], query) for name in drawn}
        statistics[title] = {name: measured[name] for name in drawn}
    figures = draw_figures(attention, statistics, seen)
    if images is not None:
        maps = attention_maps(model, pixels[:1])
        figures['attention_image.png'] = attention_figure(
            {name: attention_from(maps[name], query) for name in drawn},
            f'{title}: attention for {names[0]}',
            to_pixels(pixels[:1], model)[0])
    pages = {}
    if html:
        shown = evenly_spaced(len(pixels), NUM_PAGE_IMAGES)
        pages['attention.html'] = explorer_html(model, pixels[shown], [names[i] for i in shown], layers=drawn)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / name)
    for name, page in pages.items():
        (folder / name).write_text(page, encoding='utf-8')
    return [folder / name for name in (*figures, *pages)]


def open_models(
        source: Any, architecture: Optional[str], model_kwargs: Mapping[str, Any]) -> Iterator[Tuple[str, nn.Module]]:
    """Yield the title and the model of every checkpoint, or those of a model itself."""
    if isinstance(source, nn.Module):
        model = unwrap_model(source)
        yield model_name(model), model
        return
    paths = [source] if isinstance(source, (str, Path)) else source
    titles = [Path(path).name.split('.')[0] for path in paths]
    if len(set(titles)) < len(paths):
        titles = [str(path) for path in paths]
    for title, path in zip(titles, paths):
        told = architecture or model_kwargs
        yield title, load_model(path, architecture, **model_kwargs) if told else open_model(path)


def in_order_of_training(paths: Sequence[PathLike]) -> List[PathLike]:
    """Sort neighbouring checkpoints of `train.py` by epoch, since a shell puts checkpoint-10 before checkpoint-9."""
    runs = groupby(paths, key=lambda path: re.sub(r'(?<=checkpoint-)\d+', '', str(path)))
    return [path for _, run in runs for path in sorted(run, key=lambda path: natural_key(str(path)))]


def draw_figures(attention: History, statistics: History, seen: str) -> Dict[str, Figure]:
    """Draw the last checkpoint, and the changes if there are several. Return figures by name of the file."""
    *_, last = attention
    figures = {
        'attention.png': attention_figure(attention[last], f'{last}: attention, mean of {seen}'),
        'statistics.png': statistics_figure(statistics[last], f'{last}: how much like a convolution, mean of {seen}'),
    }
    if len(attention) > 1:
        for layer in attention[last]:
            figures[f'movement_{layer}.png'] = attention_figure(
                {title: layers[layer] for title, layers in attention.items()}, f'{layer}: attention, mean of {seen}')
        figures['statistics_movement.png'] = statistics_movement_figure(statistics)
    return figures
