"""Input images of a model: from a folder, prepared as timm does for validation, or noise. And back to pixels."""
import logging
import os
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from PIL import Image, ImageOps
from timm.data import create_transform, resolve_data_config
from torch import nn
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import Compose

from .errors import CheckpointError, one_line
from .files import PathLike

_logger = logging.getLogger(__name__)

NUM_NOISE_IMAGES = 8
SYSTEM_FOLDERS = '__MACOSX', '@eaDir', '$RECYCLE.BIN', 'System Volume Information', 'lost+found'
IMAGE_SUFFIXES = (*IMG_EXTENSIONS, '.gif')
FORMATS = ('PNG', 'JPEG', 'WEBP', 'GIF', 'BMP', 'TIFF', 'PPM')  # Pillow runs external programs for some others


def data_config(model: nn.Module) -> Dict[str, Any]:
    """Return how timm prepares images for a model, with the model's actual image size and number of channels."""
    config = resolve_data_config({}, model=model)
    img_size = getattr(getattr(model, 'patch_embed', None), 'img_size', None)
    if img_size is not None:
        config['input_size'] = (getattr(model, 'in_chans', config['input_size'][0]), *img_size)
    in_chans = config['input_size'][0]
    for key in ('mean', 'std'):  # a model for gray images may still have the values of three channels
        if len(config[key]) != in_chans:
            config[key] = (sum(config[key]) / len(config[key]),) * in_chans
    return config


def choose_images(
        images: Optional[Union[torch.Tensor, PathLike]], model: nn.Module, num_images: int,
) -> Tuple[torch.Tensor, List[str], str]:
    """Return images for a model, a name for each, and a title: from a folder, as given, or by default random noise."""
    kind, about = 'image', ''
    if images is None:
        size = (NUM_NOISE_IMAGES, *data_config(model)['input_size'])
        images = torch.randn(size, generator=torch.Generator().manual_seed(0), device='cpu')
        kind, about = 'noise', ' of random noise'
    if isinstance(images, torch.Tensor):
        pixels, names = images, [f'{kind} {i + 1}' for i in range(len(images))]
    else:
        pixels, names = read_folder(images, model, num_images)
    title = f'1 image{about}' if len(names) == 1 else f'{len(names)} images{about}'
    return pixels.to(next(model.parameters())), names, title  # to the model's device and type


def evenly_spaced(total: int, count: int) -> List[int]:
    """Return `count` indices below `total` at equal distances, or all of them."""
    count = min(count, total)
    return [i * total // count for i in range(count)]


def is_hidden(name: str) -> bool:
    return name.startswith('.') or name in SYSTEM_FOLDERS


def class_name(folder: str) -> str:
    """Return the class that a folder of this name is for, in composed Unicode, as systems differ in that."""
    return unicodedata.normalize('NFC', os.fsencode(folder).decode(errors='replace'))


def find_images(root: Path) -> List[Path]:
    """Return the image files of a folder and its subfolders, sorted, without hidden ones such as Jupyter's."""
    files = []
    for folder, names, found in os.walk(root, followlinks=True):
        names[:] = [name for name in names if not is_hidden(name)]
        files += [Path(folder, name) for name in found]
    # a broken link is an image that cannot be read, and named as such; a pipe is none
    return sorted(file for file in files if is_image(file) and (file.is_file() or file.is_symlink()))


def is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and not is_hidden(file.name)


def read_folder(folder: PathLike, model: nn.Module, count: int) -> Tuple[torch.Tensor, List[str]]:
    """Return at most `count` images of a folder and its subfolders, (B, C, H, W), and their paths in the folder.

    Images that cannot be read are left out with a warning. If none can be, CheckpointError is raised.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f'{folder} is not a folder of images.')
    if count < 1:
        raise CheckpointError(f'{count} images of {folder} were asked for: ask for 1 or more.')
    files = find_images(root)
    if not files:
        raise CheckpointError(f'{folder} has no images ({", ".join(IMAGE_SUFFIXES)}).')
    files = [files[i] for i in evenly_spaced(len(files), count)]
    images, reasons = read_images(image_reader(model), files)
    names = [str(file.relative_to(root)) for file in files]
    for name, reason in zip(names, reasons):
        if reason:
            _logger.warning('%s cannot be read: %s It is left out.', name, reason)
    if images is None:
        raise CheckpointError(f'{folder} has no readable images: {names[-1]} cannot be read: {reasons[-1]}')
    return images, [name for name, reason in zip(names, reasons) if not reason]


def try_read(read: Callable[[Path], Any], file: Path) -> Tuple[Any, str]:
    """Return the image of a file and '', or None and why it cannot be read."""
    try:
        return read(file), ''
    except Exception as e:  # decoders raise anything
        return None, one_line(e)


def read_images(read: Callable[[Path], Any], files: Sequence[Path]) -> Tuple[Optional[torch.Tensor], List[str]]:
    """Return the images that can be read, (B, C, H, W), if any, and for every file why it cannot, or ''."""
    images, reasons = zip(*(try_read(read, file) for file in files))
    readable = [image for image in images if image is not None]
    return torch.stack(readable) if readable else None, list(reasons)


def load_image(file: PathLike, mode: str = 'RGB', side: Optional[int] = None) -> Image.Image:
    """Return the image of a file as viewers show it: upright, with white where it is transparent.

    A large JPEG file is decoded smaller, to no less than `side`, which is faster. Pillow refuses images of more than
    179 megapixels.

    Raises:
        ValueError: If 8 bits cannot hold it: Pillow would clip gray values, and drop the low byte of colours.
    """
    with Image.open(file, formats=FORMATS) as opened:
        if side is not None:
            opened.draft('RGB', (side, side))
        tiles: Any = opened.tile
        is_deep = any(';16' in str(args) or (codec.startswith('ppm') and args[1] > 255) for codec, _, _, args in tiles)
        if is_deep or opened.mode[0] in 'IF':
            raise ValueError('it has more than 8 bits per channel: convert it')
        image = ImageOps.exif_transpose(opened)
    if image.has_transparency_data:
        image = image.convert('RGBA')
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    return image.convert(mode)


def image_reader(model: nn.Module) -> Callable[[Path], torch.Tensor]:
    """Return a function that reads an image file and prepares it for a model: shape (C, H, W)."""
    config = data_config(model)
    in_chans = config['input_size'][0]
    if in_chans not in (1, 3):
        raise CheckpointError(
            f'Image files have 1 or 3 channels, but the model takes {in_chans}: leave them out, or pass a tensor.')
    return Compose([partial(load_image, mode='L' if in_chans == 1 else 'RGB'), create_transform(**config)])


def to_pixels(images: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Return the colours of a model's input images, (B, C, H, W), as (B, H, W, 3) of type uint8."""
    config = data_config(model)
    mean, std = (images.new_tensor(config[key]).view(-1, 1, 1) for key in ('mean', 'std'))
    pixels = images.float() * std + mean
    if pixels.shape[1] != 3:
        pixels = pixels.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
