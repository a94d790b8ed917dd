"""Images to train on: found and looked at first, and then, by the options chosen for them, prepared by loaders."""
import hashlib
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from PIL import Image
from timm.data import create_loader, create_transform
from timm.data.transforms import CenterCropOrPad, ResizeKeepRatio
from torch.distributed import barrier
from torch.utils.data import Dataset, Subset
from torchvision.transforms import Compose, InterpolationMode, RandomCrop, RandomHorizontalFlip, Resize
from tqdm import tqdm

from ..images import IMAGE_SUFFIXES, class_name, evenly_spaced, find_images, is_hidden, is_image, load_image, try_read

HELD_OUT = 10  # one of so many images of a class is held out where there is no folder for validation
CANVAS, DIGIT = 32, 16  # pixels
NUM_MEASURED = 100  # images whose size is looked at
NUM_DRAWN = 32  # images whose attention is drawn
OF_DIGITS = dict(  # options
    model='cmhsa_conv_k5', model_kwargs=dict(patch_size=8, in_chans=1, hidden_chans=1, depth=4), batch_size=20,
    epochs=160, opt='adamw', lr=3e-3, mixup_prob=0., no_flip=True)
DECODED = 512  # pixels: JPEG files are decoded to an eighth, a quarter or half of their sides that is no smaller

Samples = Sequence[Tuple[Path, int]]  # the file of an image, and its class


class Images(NamedTuple):
    """Images that were found, and what options are chosen by."""
    splits: Dict[str, Samples]  # to train and to validate on, and perhaps to test on
    class_names: List[str]
    sizes: Sequence[Tuple[int, int]]  # of some training images, pixels
    notes: List[str]  # what was found or assumed
    options: Mapping[str, Any] = {}  # that fit them, where none are given
    digest: str = ''  # of the names and sizes of the files


class Loaders(NamedTuple):
    """Batches of images as a model gets them, and of their classes."""
    train: Any
    judged: Dict[str, Any]  # validation, and test if there is one
    few: Any  # some of validation, in a batch
    drawn: Any  # that batch, on the device


class Prepared(Dataset):
    """Images of a split, each prepared when it is asked for. timm's loaders set a `transform`, which is not used."""

    def __init__(self, samples: Samples, prepare: Callable[[Any], Any]) -> None:
        self.samples, self.prepare = samples, prepare

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tuple[Any, int]:
        path, target = self.samples[index]
        return self.prepare(path), target


def make_loaders(images: Images, args: Namespace, config: Mapping[str, Any]) -> Loaders:
    """Return loaders that prepare images for a model (`data_config`), by the complete options of the command."""
    in_chans, size, is_cuda = config['input_size'][0], args.img_size, torch.device(args.device).type == 'cuda'
    if in_chans not in (1, 3):
        raise ValueError(f'Images have 1 or 3 channels, but the model takes {in_chans}: leave in_chans out.')
    pixels: Dict[str, Any] = dict(
        input_size=(in_chans, size, size), mean=config['mean'], std=config['std'],
        interpolation=config['interpolation'], use_prefetcher=is_cuda)
    erasing = dict(re_prob=args.reprob, re_mode='pixel')  # on a GPU, the loader does that
    load = partial(load_image, mode='L' if in_chans == 1 else 'RGB', side=max(DECODED, 2 * size))  # crops stay sharp
    crop, augment, finish = create_transform(
        is_training=True, scale=(args.scale, 1.), hflip=0., color_jitter=0., auto_augment=args.aa or None,
        separate=True, **erasing, **pixels)
    side, mode = size if args.scale == 1 else 2 * size, InterpolationMode(config['interpolation'])
    fit = {'crop': [], 'squash': [Resize((side, side), mode)], 'pad': [
        ResizeKeepRatio(side, longest=1., interpolation=config['interpolation']),
        CenterCropOrPad(side, fill=[round(255 * value) for value in config['mean']])]}[args.fit]
    if args.scale == 1:  # shift images instead of cropping them, as DeiT does with small ones
        crop = Compose([Resize(size, mode), RandomCrop((size, size), padding=args.shift)])
    flip = [] if args.no_flip else [RandomHorizontalFlip()]
    augmented = Compose([load, *fit, crop, *flip, augment, finish])
    plain = Compose([load, create_transform(crop_pct=config['crop_pct'], crop_mode=config['crop_mode'], **pixels)])

    def loader(dataset: Dataset, workers: int = args.workers, **options: Any) -> Any:
        loader = create_loader(
            dataset, num_workers=workers, device=torch.device(args.device), pin_memory=is_cuda,
            persistent_workers=False, **pixels, **options)  # an epoch then depends on its seed alone
        if workers and sys.platform == 'linux':  # from Python 3.14 on, each would import torch in every epoch
            getattr(loader, 'loader', loader).multiprocessing_context = 'fork'
        return loader

    train = loader(
        Prepared(images.splits['train'], augmented), batch_size=args.batch_size, is_training=True,
        distributed=args.distributed, **erasing)
    if args.distributed:
        train.sampler.seed = args.seed
    judged = {split: Prepared(samples, plain) for split, samples in images.splits.items() if split != 'train'}
    drawn = Subset(judged['validation'], evenly_spaced(len(judged['validation']), NUM_DRAWN))
    few = loader(drawn, workers=0, batch_size=NUM_DRAWN)
    return Loaders(
        train, {split: loader(dataset, batch_size=2 * args.batch_size) for split, dataset in judged.items()},
        few, [each.to(args.device) for each in next(iter(few))])


def open_images(args: Namespace) -> Images:
    """Find the images that the options name, and look at them."""
    if args.data_dir:
        images = open_folder(Path(args.data_dir))
        for samples in images.splits.values():
            root, output = samples[0][0].parents[1].resolve(), args.output.resolve()
            if root in (output, *output.parents):
                raise ValueError(f'{args.output} would become a class of {root}: give an --output elsewhere.')
        return images
    folder = args.output / f'digits-{args.seed}'
    if args.rank == 0:
        write_digits(folder, seed=args.seed)
    if args.distributed:
        barrier()
    return open_folder(folder)._replace(options=OF_DIGITS)


def open_folder(root: Path) -> Images:
    """Open `train/CLASS/*` and `validation/CLASS/*`, or `CLASS/*` alone, from which every tenth image is held out.

    If there is `test/CLASS/*` besides, with the same classes, the models are tested on it in the end.
    """
    if not root.is_dir():
        raise ValueError(f'{root} is not a folder: give one with train/CLASS/* and validation/CLASS/*, or CLASS/*.')
    parts = {path.name.lower(): path for path in root.iterdir() if path.is_dir() and _classes(path)}
    held_out = next((parts[name] for name in ('validation', 'val', 'valid', 'test') if name in parts), None)
    tests, root = parts.get('test'), parts.get('train', root)
    notes: List[str] = []
    names, train = list(_classes(root)), _read(root, notes)
    if held_out is not None:
        validation = _read(held_out, notes)
        if names != list(_classes(held_out)):
            raise ValueError(f'{_in_one_only(root, held_out)}. Both need the same classes.')
    else:
        by_class = [[sample for sample in train if sample[1] == i] for i in range(len(names))]
        validation = [sample for samples in by_class for sample in samples[::HELD_OUT]]
        train = [sample for samples in by_class for i, sample in enumerate(samples) if i % HELD_OUT]
        notes.append(f'every tenth image of a class in {root} is held out for validation')
    in_both = {target for _, target in train} & {target for _, target in validation}
    for i, name in enumerate(names):
        if i not in in_both:
            raise ValueError('; '.join([*notes, f'{root}: {name} needs an image to train on, and one to validate on']))
    files = [f'{path.relative_to(path.parents[1])} {path.stat().st_size}' for path, _ in (*train, *validation)]
    digest = hashlib.sha256('\n'.join(files).encode(errors='surrogateescape')).hexdigest()[:12]
    splits: Dict[str, Samples] = {'train': train, 'validation': validation}
    if tests is not None and tests != held_out:
        if names == list(_classes(tests)):
            splits['test'] = _read(tests, notes)
        else:
            notes.append(f'{_in_one_only(root, tests)}, so no model is tested on the latter')
    return Images(splits, names, _sizes(train), notes, digest=digest)


def _classes(root: Path) -> Dict[str, Path]:
    """Return the folders of classes by name."""
    folders = [path for path in root.iterdir() if path.is_dir() and not is_hidden(path.name)]
    names = [class_name(path.name) for path in folders]
    if len({*names}) < len(names):
        raise ValueError(f'{root} has two folders of the same name, such as {max(names, key=names.count)}: rename one.')
    return dict(sorted(zip(names, folders)))


def _in_one_only(root: Path, other: Path) -> str:
    names = sorted({*_classes(root)} ^ {*_classes(other)})
    return f'{", ".join(names[:5])}: in one of {root} and {other} only'


def _read(root: Path, notes: List[str]) -> Samples:
    """Return the images of a folder, without those that cannot be read, which are noted."""
    classes = _classes(root)
    files = {name: find_images(folder) for name, folder in classes.items()}
    empty = ', '.join(name for name, paths in files.items() if not paths)
    if empty:
        formats = ', '.join(IMAGE_SUFFIXES)
        raise ValueError(f'{root}: Found no valid file for the classes {empty}. Supported extensions are: {formats}.')
    if len(classes) < 2:
        found = f'one class, {next(iter(classes))}' if classes else 'no class'
        raise ValueError(f'{root} has {found}: expected two folders of images or more.')
    samples = [(path, i) for i, paths in enumerate(files.values()) for path in paths]
    for path, _ in samples:
        if path.parent.parent != root:
            raise ValueError(f'{path.parent} is a folder in a folder: expected {root}/CLASS/IMAGE.')
    loose = sum(map(is_image, root.iterdir()))
    if loose:
        notes.append(f'left out {loose} images of {root} that are in no folder of a class')
    others = sorted(path.name for folder in classes.values() for path in folder.iterdir()
                    if not is_image(path) and not is_hidden(path.name))
    if others:
        notes.append(f'left out {len(others)} files of {root} in other formats ({", ".join(others[:3])})')
    read = partial(load_image, side=32)  # decodes JPEG faster
    with ThreadPoolExecutor() as pool:
        checks = pool.map(lambda sample: try_read(read, sample[0])[1].rstrip('.'), samples)
        reasons = list(tqdm(checks, 'reading images', len(samples), leave=False, disable=None))
    bad = [f'{path}: {reason}' for (path, _), reason in zip(samples, reasons) if reason]
    if bad:
        notes.append(f'left out {len(bad)} of {len(samples)} images that cannot be used ({"; ".join(bad[:3])})')
    return [sample for sample, reason in zip(samples, reasons) if not reason]


def _sizes(samples: Samples) -> List[Tuple[int, int]]:
    """Return the sizes of some images, width and height in pixels."""
    sizes = []
    for i in evenly_spaced(len(samples), NUM_MEASURED):
        with Image.open(samples[i][0]) as opened:
            sizes.append(opened.size)
    return sizes


def write_digits(folder: Path, num_train: int = 400, seed: int = 0, canvas: int = CANVAS, num_test: int = 0) -> None:
    """Write scikit-learn's digits at random places of a canvas, those of `test` (if any) the same for all seeds."""
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
