"""One call from a model or its checkpoints to pictures of attention."""
import re
from itertools import groupby
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from timm.utils import unwrap_model
from torch import nn

from ..analysis import PlotError, attention_layers, attention_maps, mean_attention
from ..checkpoint import load_model
from ..files import PathLike
from ..images import choose_images, evenly_spaced, to_pixels
from .explorer import check_alike, explorer_html, model_name
from .figures import attention_figure, attention_from, statistics_figure, statistics_movement_figure

NUM_PAGE_IMAGES = 4
History = Dict[str, Dict[str, Any]]  # by title of the checkpoint, then by name of the layer


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
        num_images: int = 100,
) -> List[Path]:
    """Draw the attention of a model, and for several checkpoints how it changes. Return the paths of the pictures.

    Args:
        source: A model, a checkpoint (see `load_model`), or several checkpoints in the order of training.
        output: Folder for the pictures, created if needed. Older pictures are replaced.
        images: A folder of images, or input of the model of shape (B, C, H, W). The default is random noise, which is
            enough for attention by position alone.
        query: Row and column of the patch to look from, from 0 to 1, relative to the size of the image.
        layer: Draw only this layer.
        html: Also write a page to explore the last checkpoint with the mouse.
        architecture: timm's name of the model, if the checkpoints do not have it.
        model_kwargs: Arguments of the model that the checkpoints do not have.
        num_images: Number of images to take from a folder at most.

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
            pixels, names, seen = choose_images(images, model, num_images)
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
        yield title, load_model(path, architecture, **model_kwargs)


def in_order_of_training(paths: Sequence[PathLike]) -> List[PathLike]:
    """Sort neighbouring checkpoints of `train.py` by epoch, since a shell puts checkpoint-10 before checkpoint-9."""
    def epoch(path: PathLike) -> int:
        match = re.fullmatch(r'checkpoint-(\d+)\.pth\.tar', Path(path).name)
        return int(match[1]) if match else -1

    runs = groupby(paths, key=lambda path: (Path(path).parent, epoch(path) < 0))
    return [path for _, run in runs for path in sorted(run, key=epoch)]


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
