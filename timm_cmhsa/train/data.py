"""Images to train on: a folder, a data set that timm knows, or the digits that scikit-learn ships."""
import argparse
import copy
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

import numpy as np
from PIL import Image, ImageOps
from timm.data import create_dataset
from torch.distributed import barrier
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from ..errors import one_line
from ..images import evenly_spaced, open_image

VALIDATION_NAMES = 'validation', 'val', 'valid', 'test'
HELD_OUT = 10  # one of so many images of a class is held out where there is no folder for validation
CANVAS, DIGIT = 32, 16  # pixels
NUM_MEASURED = 100  # images whose size is looked at
DECODED = 512  # pixels: JPEG files are decoded to an eighth, a quarter or half of their sides that is no smaller


class Data(NamedTuple):
    """Images to train and to validate on, of which timm's loader sets the transform, and others to test on."""
    train: Any
    validation: Any
    class_names: List[str]
    side: int  # the shorter one, of the median image, pixels
    notes: List[str]  # what was found or assumed
    options: Mapping[str, Any] = {}  # that fit them, where none are given
    test: Any = None
    digest: str = ''  # of the names and sizes of the files


class Photos(ImageFolder):
    """A folder of images, without hidden folders such as Jupyter's."""

    def find_classes(self, directory: str) -> Tuple[List[str], Dict[str, int]]:
        names = [name for name in super().find_classes(directory)[0] if not is_hidden(name)]
        return names, {name: i for i, name in enumerate(names)}


def is_hidden(name: str) -> bool:
    return name.startswith('.') or name == '__MACOSX'


def load_photo(path: str, side: int = DECODED) -> Image.Image:
    """Return a photo, upright. A large JPEG file is decoded smaller, to no less than this side, which is faster."""
    with Image.open(path) as image:
        image.draft('RGB', (side, side))
        return ImageOps.exif_transpose(image).convert('RGB')


def open_folder(root: Path) -> Data:
    """Open `train/CLASS/*` and `validation/CLASS/*`, or `CLASS/*` alone, from which every tenth image is held out.

    If there is `test/CLASS/*` besides, with the same classes, the models are tested on it in the end.

    Raises:
        ValueError: If it is not such a folder, a class is empty, or the classes differ.
    """
    if not root.is_dir():
        raise ValueError(f'{root} is not a folder: give one with train/CLASS/* and validation/CLASS/*, or CLASS/*.')
    classes = {path: sorted(child.name for child in path.iterdir() if child.is_dir() and not is_hidden(child.name))
               for path in root.iterdir() if path.is_dir()}
    parts = {path.name.lower(): path for path, names in classes.items() if names}
    held_out = next((parts[name] for name in VALIDATION_NAMES if name in parts), None)
    tests, root = parts.get('test'), parts.get('train', root)
    notes: List[str] = []
    train = _read(root, notes)
    if held_out is not None:
        validation = _read(held_out, notes)
        if train.classes != validation.classes:
            names = ', '.join(sorted(set(train.classes) ^ set(validation.classes))[:5])
            raise ValueError(f'{names}: in one of {root} and {held_out} only. Both need the same classes.')
    else:
        validation, by_class = copy.copy(train), [
            [sample for sample in train.samples if sample[1] == i] for i in range(len(train.classes))]
        validation.samples = [sample for samples in by_class for sample in samples[::HELD_OUT]]
        train.samples = [sample for samples in by_class for i, sample in enumerate(samples) if i % HELD_OUT]
        notes.append(f'every tenth image of a class in {root} is held out for validation')
    for i, name in enumerate(train.classes):
        if any(all(target != i for _, target in part.samples) for part in (train, validation)):
            missing = f'{root}: {name} needs an image to train on, and one to validate on'
            raise ValueError('; '.join([*notes, missing]))
    sides = []
    for path, _ in (train.samples[i] for i in evenly_spaced(len(train), NUM_MEASURED)):
        with Image.open(path) as image:
            sides.append(min(image.size))
    test = None
    if tests is not None and tests != held_out:
        if classes[tests] == train.classes:
            test = _read(tests, notes)
        else:
            others = ', '.join(sorted(set(train.classes) ^ set(classes[tests]))[:5])
            notes.append(f'{others}: in one of {root} and {tests} only, so no model is tested on the latter')
    return Data(train, validation, train.classes, round(median(sides)), notes, test=test,
                digest=_digest(train, validation))


def _read(root: Path, notes: List[str]) -> ImageFolder:
    """Return the images of a folder, without those that cannot be read, which are noted."""
    try:
        images = Photos(str(root), loader=load_photo)
    except FileNotFoundError as e:
        raise ValueError(f'{root}: {one_line(e)}') from e
    images.samples = [(path, target) for path, target in images.samples if not is_hidden(Path(path).parent.name)]
    if len(images.classes) < 2:
        raise ValueError(f'{root} has one class, {images.classes[0]}: expected two folders of images or more.')
    for path, _ in images.samples:
        if Path(path).parent.parent != root:
            raise ValueError(f'{Path(path).parent} is a folder in a folder: expected {root}/CLASS/IMAGE.')
    with ThreadPoolExecutor() as pool:
        checks = pool.map(_why_unreadable, (path for path, _ in images.samples))
        reasons = list(tqdm(checks, 'reading images', len(images), leave=False, disable=None))
    bad = [f'{path}: {reason}' for (path, _), reason in zip(images.samples, reasons) if reason]
    if bad:
        notes.append(f'left out {len(bad)} of {len(images)} images that cannot be used ({"; ".join(bad[:3])})')
    loose = sum(path.suffix.lower() in IMG_EXTENSIONS for path in root.iterdir())
    if loose:
        notes.append(f'left out {loose} images of {root} that are in no folder of a class')
    others = sorted(path.name for name in images.classes for path in (root / name).iterdir()
                    if path.suffix.lower() not in IMG_EXTENSIONS and not is_hidden(path.name))
    if others:
        notes.append(f'left out {len(others)} files of {root} in other formats ({", ".join(others[:3])})')
    images.samples = [sample for sample, reason in zip(images.samples, reasons) if not reason]
    return images


def _digest(*parts: ImageFolder) -> str:
    """Return a text that differs where other files are trained or validated on."""
    files = [f'{Path(path).relative_to(part.root)} {Path(path).stat().st_size}'
             for part in parts for path, _ in part.samples]
    return hashlib.sha256('\n'.join(files).encode()).hexdigest()[:12]


def _why_unreadable(path: str) -> str:
    try:
        with open_image(path) as image:
            image.draft('RGB', (32, 32))  # decodes JPEG faster
            image.load()
            ImageOps.exif_transpose(image)
    except Exception as e:  # decoders raise anything
        return one_line(e).rstrip('.')
    return ''


def open_dataset(args: argparse.Namespace) -> Data:
    """Open a data set that timm's `create_dataset` knows, such as 'torch/cifar10' or 'hfds/USER/NAME'."""
    name, root = args.dataset, str(args.data_dir or 'data')

    def open_split(split: str) -> Any:
        return create_dataset(name, root=root, split=split, download=args.download and args.rank == 0)

    if args.rank:
        barrier()  # while the first process downloads
    try:
        train = open_split('train')
        try:
            validation = open_split('validation')
        except Exception:  # data sets of the Hub may have only the other
            validation = open_split('test')
        side = median(min(train[i][0].size) for i in evenly_spaced(len(train), NUM_MEASURED))
    except Exception as e:  # every library has its own
        raise ValueError(f'{name} cannot be opened: {one_line(e)}') from e
    if args.distributed and args.rank == 0:
        barrier()
    classes = getattr(train, 'classes', None) or getattr(getattr(train, 'reader', None), 'class_to_idx', None)
    if not classes:
        raise ValueError(f'{name} does not name its classes: use another data set, or a folder for each class.')
    return Data(train, validation, [str(each) for each in classes], round(side), [])


def open_digits(args: argparse.Namespace) -> Data:
    """Open the digits that scikit-learn ships."""
    folder = args.output / f'digits-{args.seed}'
    if args.rank == 0:
        write_digits(folder, seed=args.seed)
    if args.distributed:
        barrier()
    return open_folder(folder)._replace(options=dict(
        model='cmhsa_conv_k5', model_kwargs=dict(patch_size=8, in_chans=1, hidden_chans=1, depth=4), batch_size=20,
        epochs=160, lr=3e-3, mixup_prob=0., no_flip=True))


def write_digits(folder: Path, num_train: int = 400, seed: int = 0, canvas: int = CANVAS, num_test: int = 0) -> None:
    """Write scikit-learn's handwritten digits, each at a random place of a canvas, as a folder for `open_folder`.

    The digits of `test`, if any, are the same for all seeds, at other places.
    """
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.RandomState(seed)
    num_others = len(digits.images) - num_test
    for i, index in enumerate([*rng.permutation(num_others).tolist(), *range(num_others, len(digits.images))]):
        image = Image.new('L', (canvas, canvas))
        digit = Image.fromarray((digits.images[index] * 255 / 16).astype(np.uint8)).resize((DIGIT, DIGIT))
        image.paste(digit, tuple(rng.randint(0, canvas - DIGIT + 1, size=2)))
        split = 'train' if i < num_train else 'validation' if i < num_others else 'test'
        path = folder / split / str(digits.target[index]) / f'{index:04}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
