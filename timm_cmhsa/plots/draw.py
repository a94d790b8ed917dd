"""One call from a model or its checkpoints to pictures of attention."""
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import nn

from ..errors import one_line
from ..files import PathLike
from ..images import choose_images, evenly_spaced, to_pixels
from .data import (
    PlotError,
    attention_from,
    check_alike,
    finite_maps,
    layers_to_draw,
    mean_attention,
    open_models,
)
from .explorer import explorer_html
from .figures import attention_figure, statistics_figure, statistics_movement_figure

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
        PlotError: If the attention cannot be drawn or written.
    """
    attention: History = {}
    statistics: History = {}
    for title, model in open_models(source, architecture, model_kwargs):
        if not attention:
            first = model
            pixels, names, seen = choose_images(images, model, num_images)
            if pixels.dim() != 4 or not len(pixels):
                raise PlotError(f'Input of shape {tuple(pixels.shape)} cannot be drawn: use images, (B, C, H, W).')
        check_alike(first, model)
        drawn = layers_to_draw(model, layer)
        maps, measured = mean_attention(model, pixels)
        attention[title] = {name: attention_from(maps[name], query) for name in drawn}
        statistics[title] = {name: measured[name] for name in drawn}
    figures = draw_figures(attention, statistics, seen)
    if images is not None:
        maps = finite_maps(model, pixels[:1])
        figures['attention_image.png'] = attention_figure(
            {name: attention_from(maps[name], query) for name in drawn},
            f'{title}: attention for {names[0]}',
            to_pixels(pixels[:1], model)[0])
    files: Dict[str, Union[Figure, str]] = {**figures}
    if html:
        shown = evenly_spaced(len(pixels), NUM_PAGE_IMAGES)
        files['attention.html'] = explorer_html(model, pixels[shown], [names[i] for i in shown], layers=drawn)
    return write_files(Path(output), files)


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


def write_files(folder: Path, files: Mapping[str, Union[Figure, str]]) -> List[Path]:
    """Write pictures and pages into a folder. Return their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if isinstance(content, Figure):
                content.savefig(folder / name)
            else:
                (folder / name).write_text(content, encoding='utf-8')
    except OSError as e:
        raise PlotError(f'{folder} cannot be written: {one_line(e)}') from e
    return [folder / name for name in files]
