"""Pictures of the centres of Gaussian heads, for pixel_models.py."""
import math
from typing import Any, Dict, Mapping, NamedTuple

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Rectangle
from timm.utils import unwrap_model
from torch import nn

from timm_cmhsa.pixel.encodings import QuadraticRelPos
from timm_cmhsa.rel_pos import Grid

CONTOURS: Dict[int, Any] = {50: '-', 90: ':'}  # line styles, by percentage of the Gaussian inside
MIN_INV_VARIANCE = 1e-6  # patches^-2; the contours of a flatter Gaussian are far outside any picture


class Gaussians(NamedTuple):
    """Heads of a layer with a quadratic encoding. Offsets are key minus query, in patches, (row, column)."""
    center: torch.Tensor  # (num_heads, 2)
    inv_covariance: torch.Tensor  # (num_heads, 2, 2)
    grid_size: Grid


@torch.no_grad()
def gaussians(model: nn.Module) -> Dict[str, Gaussians]:
    """Return the Gaussians of all layers that have a quadratic encoding and heads, by name of the layer."""
    encodings = {name: getattr(module, 'rel_pos', None) for name, module in unwrap_model(model).named_modules()}
    return {
        name: Gaussians(
            rel_pos.center.float().cpu().clone(), (rel_pos.inv_root() @ rel_pos.inv_root().mT).float().cpu(),
            rel_pos.grid_size)
        for name, rel_pos in encodings.items() if isinstance(rel_pos, QuadraticRelPos) and rel_pos.num_heads}


def center_figure(after: Mapping[str, Gaussians], before: Mapping[str, Gaussians], title: str) -> Figure:
    """Draw the centres of all heads with their 50 % and 90 % contours, relative to the query: a panel per layer.

    Figures 3 and 4 of arXiv 1911.03584. A line leads from a circle at the centre before training to a dot at the one
    after it. Centres beyond the reach of the grid are not shown.
    """
    columns = math.ceil(math.sqrt(len(after)))
    rows = math.ceil(len(after) / columns)
    num_heads = max(len(layer.center) for layer in after.values())
    colors = colormaps['tab10' if num_heads <= 10 else 'tab20'](range(num_heads))
    farthest = max(layer.center.abs().max().item() for layer in after.values())
    reach = min(farthest + 2, max(max(layer.grid_size) for layer in after.values()) - 0.5)
    figure = Figure(figsize=(max(1.8 + 3 * columns, 6), 1 + 3.1 * rows), dpi=120, layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(after):]:
        axis.set_axis_off()
    for axis, (name, layer) in zip(axes.flat, after.items()):
        axis.set(xlim=(-reach, reach), ylim=(reach, -reach), aspect='equal')
        axis.grid(alpha=0.2)
        axis.tick_params(labelsize=7)
        axis.set_title(name, fontsize=8)
        axis.add_patch(Rectangle((-0.5, -0.5), 1, 1, fill=False, edgecolor='black', linewidth=2, zorder=2))
        for head, color in zip(range(len(layer.center)), colors):
            draw_head(axis, before[name].center[head], layer.center[head], layer.inv_covariance[head], color)
    figure.supxlabel('columns from the query, patches', fontsize=8)
    figure.supylabel('rows from the query, patches', fontsize=8)
    handles = [
        Line2D([], [], color=color, marker='o', markersize=4, label=f'head {i + 1}') for i, color in enumerate(colors)]
    handles += [Line2D([], [], color='black', linestyle=style, label=f'{share} % contour')
                for share, style in CONTOURS.items()]
    handles.append(Line2D([], [], color='black', marker='s', markerfacecolor='none', linestyle='', label='query'))
    handles.append(Line2D([], [], color='black', marker='o', markerfacecolor='white', label='before training'))
    figure.legend(handles=handles, loc='outside right upper', fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def draw_head(axis: Axes, first: torch.Tensor, last: torch.Tensor, inv_covariance: torch.Tensor, color: Any) -> None:
    rows, cols = torch.stack([first, last], dim=1).numpy()
    axis.plot(cols, rows, 'o-', color=color, markersize=5, markerfacecolor='white', markevery=[0], zorder=3)
    axis.plot(cols[-1:], rows[-1:], 'o', markersize=4, color=color, zorder=3)
    inv_variances, directions = torch.linalg.eigh(inv_covariance)
    down, right = directions[:, 0].tolist()  # of the longer axis
    for share, style in CONTOURS.items():
        axes = (-2 * math.log(1 - share / 100) / inv_variances.clamp(min=MIN_INV_VARIANCE)).sqrt().tolist()
        axis.add_patch(Ellipse(
            (cols[-1], rows[-1]), 2 * axes[0], 2 * axes[1], angle=math.degrees(math.atan2(down, right)), fill=False,
            edgecolor=color, linestyle=style))
