"""Images for a model: of a folder, as timm's validation would feed them, or noise; and back to pixels to look at."""
import logging
import math
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from PIL import Image
from timm.data import create_transform, get_img_extensions, resolve_data_config
from torch import nn

from .cmhsa import Cmhsa
from .files import CheckpointError
from .messages import one_line, printable

_logger = logging.getLogger(__name__)

NUM_NOISE_IMAGES = 8
MAX_VALUES = 2 ** 30  # of all images together: 4 GB
MAX_ASPECT = 100  # of an image: resized by its shorter side, one of a single row of pixels would fill the memory
FORMATS = ('PNG', 'JPEG', 'WEBP', 'GIF', 'BMP', 'TIFF')  # for others, Pillow runs programs (EPS)


def data_config(model: nn.Module) -> Dict[str, Any]:
    """Return how timm prepares the images of a model, by the channels and the size that the model really has."""
    config = resolve_data_config({}, model=model)
    if isinstance(model, Cmhsa):
        config['input_size'] = (model.in_chans, *model.patch_embed.img_size)
    in_chans = config['input_size'][0]
    for key in ('mean', 'std'):  # a model of gray images can have inherited those of three channels
        if len(config[key]) != in_chans:
            config[key] = (sum(config[key]) / len(config[key]),) * in_chans
    return config


def choose_images(
        images: Optional[Union[torch.Tensor, str, Path]],
        model: nn.Module,
        num_images: int,
) -> Tuple[torch.Tensor, List[str], str]:
    """Return images for a model, the name of each and that of all: those given, some of a folder, or random noise."""
    if images is None:
        size = (NUM_NOISE_IMAGES, *data_config(model)['input_size'])
        pixels = torch.randn(size, generator=torch.Generator().manual_seed(0))
        names = [f'noise {i + 1}' for i in range(len(pixels))]
    elif isinstance(images, torch.Tensor):
        pixels = images
        names = [f'image {i + 1}' for i in range(len(pixels))]
    else:
        pixels, names = read_folder(Path(images), model, num_images)
    title = '1 image' if len(names) == 1 else f'{len(names)} images'
    if images is None:
        title += ' of random noise'
    return pixels.to(next(model.parameters())), names, title  # to the model's device and type


def evenly_spaced(total: int, count: int) -> List[int]:
    """Return `count` indices below `total` at equal distances, or all of them."""
    count = min(count, total)
    return [i * total // count for i in range(count)]


def read_folder(folder: Path, model: nn.Module, count: int) -> Tuple[torch.Tensor, List[str]]:
    """Return images of a folder and the folders in it, prepared for a model, (B, C, H, W), and their names.

    Those that cannot be read are left out, with a warning. (timm's `ImageDataset` returns another one in their place.)
    """
    if not folder.is_dir():
        raise CheckpointError(f'{folder} is not a folder of images.')
    read, size = image_reader(model), data_config(model)['input_size']
    files = image_files(folder)
    files = [files[i] for i in evenly_spaced(len(files), count)]
    if len(files) * math.prod(size) > MAX_VALUES:
        raise CheckpointError(f'{len(files)} images of {size} do not fit into memory: take fewer.')
    images, names, unread = [], [], []
    for file in files:
        name = printable(str(file.relative_to(folder)))
        try:
            images.append(read(file))
            names.append(name)
        except Exception as e:  # Decoders of broken files raise anything.
            unread.append((name, one_line(e)))
    if not images:
        reason = '{}: {}'.format(*unread[0]) if unread else f'no file ends in {", ".join(get_img_extensions())}'
        raise CheckpointError(f'{folder} holds no images that can be read: {reason}.')
    for name, reason in unread:
        _logger.warning('%s is left out, it cannot be read: %s.', name, reason)
    return torch.stack(images), names


def image_reader(model: nn.Module) -> Callable[[Path], torch.Tensor]:
    """Return what reads an image file and prepares it for a model, (C, H, W)."""
    config = data_config(model)
    in_chans = config['input_size'][0]
    modes = {1: 'L', 3: 'RGB'}
    if in_chans not in modes:
        raise CheckpointError(f'images have 1 or 3 channels, the model {in_chans}.')
    transform = create_transform(**config)
    return lambda file: transform(read_image(file, modes[in_chans]))


def image_files(folder: Path) -> List[Path]:
    """Return the files in a folder that are called images, each once: links can lead in circles."""
    seen, files = set(), []
    for root, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(root) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        files += [Path(root, name) for name in names if Path(name).suffix.lower() in get_img_extensions()]
    return sorted(files)


def read_image(file: Path, mode: str) -> Image.Image:
    if not file.is_file():  # to open a pipe would wait forever
        raise OSError('it is no regular file')
    with Image.open(file, formats=FORMATS) as image:
        if max(image.size) > MAX_ASPECT * min(image.size):
            raise ValueError('it is too narrow, {} x {} pixels'.format(*image.size))
        return image.convert(mode)


def to_pixels(images: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Return the colours of a model's input images, (B, C, H, W), as (B, H, W, 3) of type uint8."""
    config = data_config(model)
    mean, std = (images.new_tensor(config[key]).view(-1, 1, 1) for key in ('mean', 'std'))
    pixels = images.float() * std + mean
    if pixels.shape[1] != 3:
        pixels = pixels.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
