"""A page to explore attention with the mouse: one HTML file that needs nothing else, and no network."""
import base64
import io
import json
from importlib import resources
from typing import Any, Container, Dict, List, Mapping, Optional, Sequence

import torch
from matplotlib import colormaps
from matplotlib.colors import to_hex
from PIL import Image
from timm.utils import unwrap_model
from torch import nn

from ..analysis import AttentionMaps, PlotError, attention_layers, finite_maps, layer_grid_size, num_weights
from ..images import data_config, to_pixels

MAX_PAGE_BYTES = 64 * 2 ** 20
STEPS = 255  # of a weight, as a share of the scale of its map


def model_name(model: nn.Module) -> str:
    return getattr(model, 'pretrained_cfg', {}).get('architecture') or type(model).__name__


def check_alike(*models: nn.Module) -> None:
    """Refuse models whose heads cannot be compared for the same images."""
    shapes = [
        (data_config(model)['input_size'],
         {name: (layer.num_heads, *layer_grid_size(model, layer)) for name, layer in attention_layers(model).items()})
        for model in models]
    if any(shape != shapes[0] for shape in shapes):
        raise PlotError(
            'The models have different image sizes, attention layers, heads or grids: use checkpoints of one training.')


def explorer_html(
        model: nn.Module,
        images: torch.Tensor,
        titles: Optional[Sequence[str]] = None,
        layers: Optional[Container[str]] = None,
        before: Optional[nn.Module] = None,
) -> str:
    """Return a page that shows the attention of every head from the patch under the mouse.

    Every map (one head, one query) is stored in 255 steps of its largest weight, or of even attention if that is
    larger, the weight of the zero key exactly.

    Args:
        model: A model with attention of this package.
        images: Input of the model, (B, C, H, W).
        titles: Names of the images.
        layers: Names of the layers to show; by default all.
        before: The same model at an earlier time of its training, to show beside it.

    Raises:
        PlotError: If the page would be too large, a model has no attention, or the two have different layers or heads.
    """
    models = {key: unwrap_model(each) for key, each in (('maps', model), ('before', before)) if each is not None}
    model = models['maps']
    check_alike(*models.values())
    shown = {name: layer for name, layer in attention_layers(model).items() if layers is None or name in layers}
    size = len(models) * len(images) * num_weights(model, shown) * 4 // 3  # base64
    if size > MAX_PAGE_BYTES:
        raise PlotError(
            f'The page would have {size / 2 ** 20:.0f} MB, more than {MAX_PAGE_BYTES // 2 ** 20} MB: '
            'use fewer images, a smaller input or fewer layers.')
    encoded = {key: _encode_images(each, images, shown) for key, each in models.items()}
    titles = titles or [f'image {i + 1}' for i in range(len(images))]
    data = {
        'model': model_name(model),
        'steps': STEPS,
        'colors': [to_hex(color) for color in colormaps['magma'](range(256))],
        'images': [{'title': title, 'png': _png(pixels)} for title, pixels in zip(titles, to_pixels(images, model))],
        'layers': [
            {'name': name, 'grid': layer_grid_size(model, shown[name]), 'heads': shown[name].num_heads,
             **{key: maps[name] for key, maps in encoded.items()}}
            for name in encoded['maps']],
    }
    page = resources.files(__package__).joinpath('explorer.html').read_text(encoding='utf-8')
    # A title must not end the script that holds the data.
    return page.replace('{{data}}', json.dumps(data).replace('<', '\\u003c'))


def _encode_images(
        model: nn.Module, images: torch.Tensor, layers: Mapping[str, Any]) -> Dict[str, List[Dict[str, Optional[str]]]]:
    """Encode the maps of layers: a list by image for each, or a single entry if it is the same for all images."""
    by_image = [
        {name: _encode_maps(maps) for name, maps in finite_maps(model, image).items() if name in layers}
        for image in images.split(1)]
    encoded = {name: [maps[name] for maps in by_image] for name in by_image[0]}
    return {name: maps if any(each != maps[0] for each in maps) else maps[:1] for name, maps in encoded.items()}


def _encode_maps(maps: AttentionMaps) -> Dict[str, Optional[str]]:
    """Encode the maps of one image, by head and query: weights as shares of the largest, this scale, and zero keys."""
    weights = maps.weights[0]
    # a head that looks at nothing has weights near 0, which must not look like large ones
    scale = weights.amax(dim=-1).clamp(min=1 / weights.shape[-1])
    shares = weights / scale.unsqueeze(-1)
    return {
        'weights': _base64((shares * STEPS).round().to(torch.uint8)),
        'scale': _base64(scale),
        'zeroKey': None if maps.zero_key is None else _base64(maps.zero_key[0]),
    }


def _png(pixels: torch.Tensor) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, 'png')
    return base64.b64encode(file.getvalue()).decode()


def _base64(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode()  # little-endian, as browsers have it
