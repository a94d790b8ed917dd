"""A page to explore attention with the mouse: one HTML file that needs nothing else, and no network."""
import base64
import io
import json
from importlib import resources
from typing import Any, Container, Dict, List, Optional, Sequence

import torch
from PIL import Image
from torch import nn

from ..analysis import AttentionMaps, attention_maps
from ..images import to_pixels
from ..pixel import PositionalAttention, PositionalContentAttention
from .data import PlotError, layers_to_draw, num_weights

NUM_IMAGES = 4  # that make a page worth to look at
MAX_PAGE_BYTES = 64 * 2 ** 20
STEPS = 255  # a weight is stored as a share of the largest of its map, in so many steps


def explorer_html(
        model: nn.Module,
        images: torch.Tensor,
        titles: Optional[Sequence[str]] = None,
        layers: Optional[Container[str]] = None,
) -> str:
    """Make a page that shows where every head looks from the patch under the mouse.

    Every map (one head, one query) is stored in 255 steps of its largest weight, the weight of the zero key exactly.

    Args:
        model: A model with attention layers of this package.
        images: Its input, shape (B, C, H, W).
        titles: Names of the images.
        layers: Names of the layers to show; by default all.

    Returns:
        The page, with everything in it.

    Raises:
        PlotError: If the page would be too large, or the model has no such layer.
    """
    shown = {name: layer for name, layer in layers_to_draw(model).items() if layers is None or name in layers}
    _check_size(shown, len(images))
    contents: Dict[str, Dict[str, Any]] = {}
    for image in images.split(1):
        for name, maps in attention_maps(model, image).items():
            if name not in shown:
                continue
            if name not in contents:
                contents[name] = {
                    'name': name, 'grid': maps.grid_size, 'heads': maps.weights.shape[1], 'maps': []}
            if not contents[name]['maps'] or not _is_same_for_all_images(shown[name]):
                contents[name]['maps'].append(_encode_maps(maps))
    data = {
        'model': getattr(model, 'pretrained_cfg', {}).get('architecture') or type(model).__name__,
        'steps': STEPS,
        'images': [
            {'title': title, 'png': _png(pixels)}
            for title, pixels in zip(titles or _default_titles(len(images)), to_pixels(images, model))],
        'layers': list(contents.values()),
    }
    page = resources.files(__package__).joinpath('explorer.html').read_text(encoding='utf-8')
    # no title can end the script that the data is in
    return page.replace('{{data}}', json.dumps(data).replace('<', '\\u003c'))


def _check_size(layers: Dict[str, Any], num_images: int) -> None:
    size = sum(num_weights(layer) * (1 if _is_same_for_all_images(layer) else num_images) for layer in layers.values())
    size = size * 4 // 3  # base64
    if size > MAX_PAGE_BYTES:
        raise PlotError(
            f'the page would be {size / 2 ** 20:.0f} MB large, more than {MAX_PAGE_BYTES // 2 ** 20} MB: '
            'take fewer images, a smaller input or fewer layers.')


def _is_same_for_all_images(layer: nn.Module) -> bool:
    return isinstance(layer, PositionalAttention) and not isinstance(layer, PositionalContentAttention)


def _encode_maps(maps: AttentionMaps) -> Dict[str, Optional[str]]:
    """Maps of one image: weights as shares of the largest, this scale, and the zero key's weight, by head and query."""
    weights = maps.weights[0]
    scale = weights.amax(dim=-1)
    shares = weights / scale.clamp(min=torch.finfo(scale.dtype).tiny).unsqueeze(-1)
    return {
        'weights': _base64((shares * STEPS).round().to(torch.uint8)),
        'scale': _base64(scale),
        'zeroKey': None if maps.zero_key is None else _base64(maps.zero_key[0]),
    }


def _base64(tensor: torch.Tensor) -> str:
    array = tensor.contiguous().cpu().numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder('<')).tobytes()).decode()


def _png(pixels: torch.Tensor) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, format='PNG')
    return base64.b64encode(buffer.getvalue()).decode()


def _default_titles(num_images: int) -> List[str]:
    return [f'image {i + 1}' for i in range(num_images)]
