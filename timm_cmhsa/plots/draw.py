"""One call from a model or checkpoints to pictures of attention."""
import contextlib
import io
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from matplotlib.figure import Figure
from torch import nn

from ..analysis import attention_maps
from ..images import to_pixels
from .data import (
    CENTER,
    Images,
    PathLike,
    PlotError,
    Snapshot,
    attention_from,
    check_same_model,
    choose_images,
    evenly_spaced,
    open_models,
    take_snapshot,
)
from .explorer import NUM_IMAGES, explorer_html
from .figures import attention_figure, center_figure, statistics_figure, statistics_movement_figure


def plot_attention(
        source: Union[nn.Module, PathLike, Sequence[PathLike]],
        output: PathLike,
        images: Optional[Union[torch.Tensor, PathLike]] = None,
        query: Tuple[float, float] = CENTER,
        layer: Optional[str] = None,
        html: bool = False,
        model: Optional[str] = None,
        model_kwargs: Optional[Mapping[str, Any]] = None,
        num_images: int = 100,
) -> List[Path]:
    """Draw what the heads of a model look at, and from several checkpoints, how that moves during training.

    Args:
        source: A model, a checkpoint (see `load_model`), or several checkpoints in the order of training.
        output: Folder for the pictures, made if there is none; older pictures there are replaced.
        images: A folder of images, or input of the model, normalised, of shape (B, C, H, W); by default random noise,
            which serves where attention is by position alone.
        query: Row and column of the patch to look from, from 0 to 1, relative to the size of the image.
        layer: Draw this layer alone.
        html: Write a page to explore the last checkpoint with the mouse, too.
        model, model_kwargs: Name and arguments of the model, where the checkpoints do not tell.
        num_images: At most so many images of a folder are taken.

    Returns:
        Paths of the pictures.

    Raises:
        CheckpointError: If checkpoints or images cannot be read. Nothing was written.
        PlotError: If there is no attention to draw, or it cannot be drawn or written. Nothing was written.
    """
    check_output(Path(output))
    snapshots: List[Snapshot] = []
    inputs: Optional[Images] = None
    for title, last in open_models(source, model, model_kwargs):
        inputs = inputs or choose_images(images, last, num_images)
        snapshots.append(take_snapshot(title, last, inputs.pixels, query, layer))
        check_same_model(snapshots[0], snapshots[-1])
    assert inputs is not None
    figures = checkpoint_figures(snapshots[-1], inputs.title)
    if images is not None:
        figures['attention_image.png'] = _one_image_figure(snapshots[-1], last, inputs, query)
    if len(snapshots) > 1:
        figures.update(movement_figures(snapshots, inputs.title))
    files = {name: _png(figure) for name, figure in figures.items()}
    if html:
        shown = evenly_spaced(len(inputs.pixels), NUM_IMAGES)
        names = [inputs.names[i] for i in shown]
        page = explorer_html(last, inputs.pixels[shown], names, layers=snapshots[-1].attention)
        files['attention.html'] = page.encode()
    return write_files(Path(output), files)


def checkpoint_figures(snapshot: Snapshot, images_title: str) -> Dict[str, Figure]:
    """Figures of one checkpoint, by name of the file; the title tells what images were seen."""
    title = snapshot.title
    figures = {
        'attention.png': attention_figure(snapshot.attention, f'{title}: attention, mean of {images_title}'),
        'statistics.png': statistics_figure(
            snapshot.statistics, f'{title}: how much like a convolution, mean of {images_title}'),
    }
    if snapshot.gaussians:
        figures['centers.png'] = center_figure([snapshot.gaussians], f'{title}: centres of the heads')
    return figures


def _one_image_figure(
        snapshot: Snapshot,
        model: nn.Module,
        inputs: Images,
        query: Tuple[float, float],
) -> Figure:
    image = inputs.pixels[:1]
    maps = attention_maps(model, image)
    attention = {name: attention_from(maps[name], query) for name in snapshot.attention}
    title = f'{snapshot.title}: attention for {inputs.names[0]}'
    return attention_figure(attention, title, to_pixels(image, model)[0])


def movement_figures(snapshots: List[Snapshot], images_title: str) -> Dict[str, Figure]:
    """Figures of several checkpoints in the order of training, by name of the file."""
    names = [snapshot.title for snapshot in snapshots]
    figures = {
        f'movement_{layer}.png': attention_figure(
            {snapshot.title: snapshot.attention[layer] for snapshot in snapshots},
            f'{layer}: attention, mean of {images_title}')
        for layer in snapshots[-1].attention}
    figures['statistics_movement.png'] = statistics_movement_figure(
        {snapshot.title: snapshot.statistics for snapshot in snapshots})
    if snapshots[-1].gaussians:
        figures['center_paths.png'] = center_figure(
            [snapshot.gaussians for snapshot in snapshots],
            f'Centres of the heads\nfrom {names[0]} to {names[-1]}, {len(names)} checkpoints')
    return figures


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png')
    return buffer.getvalue()


def check_output(folder: Path) -> None:
    """Refuse a folder that cannot be written, before any work is done.

    Raises:
        PlotError: If it is something else, or cannot be made.
    """
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not existing.is_dir():
        raise PlotError(f'{existing} is not a folder: choose another output.')
    if not os.access(existing, os.W_OK):
        raise PlotError(f'{existing} is not writable: choose another output.')


def write_files(folder: Path, files: Mapping[str, bytes]) -> List[Path]:
    """Write files into a folder, each whole or not at all: first all beside their places, then each into its place.

    Raises:
        PlotError: If they cannot be written.
    """
    partials = {folder / f'.{name}.partial': folder / name for name in files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for partial, content in zip(partials, files.values()):
            partial.write_bytes(content)
        for partial, path in partials.items():
            partial.replace(path)
    except OSError as e:
        raise PlotError(f'{folder} cannot be written: {e.strerror or e}.') from e
    finally:
        for partial in partials:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    return list(partials.values())
