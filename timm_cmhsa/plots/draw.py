"""One call from a model or checkpoints to pictures of attention."""
import io
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from matplotlib.figure import Figure
from torch import nn

from ..destination import remove_leftovers, temporary_folder
from ..images import choose_images, evenly_spaced, to_pixels
from ..messages import one_line
from .data import (
    PathLike,
    PlotError,
    attention_from,
    check_query,
    finite_maps,
    gaussians,
    layers_to_draw,
    mean_attention,
    open_models,
)
from .explorer import check_page_size, explorer_html
from .figures import attention_figure, center_figure, statistics_figure, statistics_movement_figure

NUM_PAGE_IMAGES = 4
History = Dict[str, Dict[str, Any]]  # by title of the checkpoint, then by name of the layer


def plot_attention(
        source: Union[nn.Module, PathLike, Sequence[PathLike]],
        output: PathLike,
        images: Optional[Union[torch.Tensor, PathLike]] = None,
        query: Tuple[float, float] = (0.5, 0.5),
        layer: Optional[str] = None,
        html: bool = False,
        model: Optional[str] = None,
        model_kwargs: Optional[Mapping[str, Any]] = None,
        num_images: int = 100,
) -> List[Path]:
    """Draw what the heads of a model look at, and from several checkpoints, how that moves; return the files' paths.

    Args:
        source: A model, a checkpoint (see `load_model`), or several checkpoints in the order of training.
        output: Folder for the pictures, made if there is none; older pictures there are replaced.
        images: A folder of images, or input of the model, normalized, of shape (B, C, H, W); by default random noise,
            which is enough where attention is by position alone.
        query: Row and column of the patch to look from, from 0 to 1, relative to the size of the image.
        layer: Draw this layer alone.
        html: Write a page to explore the last checkpoint with the mouse, too.
        model, model_kwargs: Name and arguments of the model, where the checkpoints do not tell.
        num_images: Take at most so many images of a folder.

    Raises:
        CheckpointError: If checkpoints or images cannot be read. Nothing was written.
        HubError: If a checkpoint cannot be downloaded. Nothing was written.
        PlotError: If there is no attention to draw, or it cannot be drawn or written. Nothing was written.
    """
    folder = Path(output)
    check_output(folder)  # before any work is done
    check_query(query)
    attention: History = {}
    statistics: History = {}
    encodings: History = {}
    shapes: Dict[str, List[Any]] = {}
    for title, last in open_models(source, model, model_kwargs):
        if not attention:
            pixels, names, seen = choose_images(images, last, num_images)
            if pixels.ndim != 4 or not len(pixels):
                raise PlotError(f'pictures are of images, (B, C, H, W), not of input of shape {tuple(pixels.shape)}.')
            shown = evenly_spaced(len(pixels), NUM_PAGE_IMAGES)
        drawn = layers_to_draw(last, layer)
        if html:
            check_page_size(drawn, len(shown))
        maps, measured = mean_attention(last, pixels)
        attention[title] = {name: attention_from(one, query) for name, one in maps.items() if name in drawn}
        statistics[title] = {name: heads for name, heads in measured.items() if name in drawn}
        encodings[title] = {name: heads for name, heads in gaussians(last).items() if name in drawn}
        shapes[title] = [(name, *row.weights.shape, name in encodings[title]) for name, row in attention[title].items()]
        first = next(iter(shapes))
        if shapes[title] != shapes[first]:
            raise PlotError(
                f'{first} and {title} are not of one model: their layers, heads or grids differ; draw them one by one.')
    figures = draw_figures(attention, statistics, encodings, seen)
    if images is not None:
        maps = finite_maps(last, pixels[:1])
        figures['attention_image.png'] = attention_figure(
            {name: attention_from(maps[name], query) for name in attention[title]},
            f'{title}: attention for {names[0]}',
            to_pixels(pixels[:1], last)[0])
    files = {}
    for name, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format='png')
        files[name] = buffer.getvalue()
    if html:
        page = explorer_html(last, pixels[shown], [names[i] for i in shown], layers=attention[title])
        files['attention.html'] = page.encode()
    write_files(folder, files)
    return [folder / name for name in files]


def draw_figures(attention: History, statistics: History, encodings: History, seen: str) -> Dict[str, Figure]:
    """Draw the last of the checkpoints and, where there are several, the movement; figures by name of the file."""
    first, last = next(iter(attention)), next(reversed(attention))
    figures = {
        'attention.png': attention_figure(attention[last], f'{last}: attention, mean of {seen}'),
        'statistics.png': statistics_figure(statistics[last], f'{last}: how much like a convolution, mean of {seen}'),
    }
    if encodings[last]:
        figures['centers.png'] = center_figure([encodings[last]], f'{last}: centres of the heads')
    if first == last:
        return figures
    for layer in attention[last]:
        figures[f'movement_{layer}.png'] = attention_figure(
            {title: layers[layer] for title, layers in attention.items()}, f'{layer}: attention, mean of {seen}')
    figures['statistics_movement.png'] = statistics_movement_figure(statistics)
    if encodings[last]:
        figures['center_paths.png'] = center_figure(
            list(encodings.values()), f'Centres of the heads\nfrom {first} to {last}, {len(encodings)} checkpoints')
    return figures


def check_output(folder: Path) -> None:
    try:
        existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    except (OSError, RuntimeError) as e:  # RuntimeError is of links that lead in a circle
        raise PlotError(f'{folder} cannot be written: {one_line(e)}.') from e
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise PlotError(f'{existing} is not a folder that can be written to: choose another output.')
    remove_leftovers(folder)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder: all of them are complete before the first takes its place."""
    for path in (folder / name for name in files):
        if path.exists() and not path.is_file():
            raise PlotError(f'{path} cannot be written: it is there, and not a file.')
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder) as new:
            for name, content in files.items():
                (new / name).write_bytes(content)
            for name in files:
                (new / name).replace(folder / name)
    except OSError as e:
        raise PlotError(f'{folder} cannot be written: {one_line(e)}.') from e
