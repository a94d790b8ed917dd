"""Folders of images for the experiments: train/, validation/, which learning rates are chosen by, and test/."""
import random
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List

from torchvision.datasets import CIFAR10, ImageFolder

from timm_cmhsa.train.data import DIGIT as DIGIT, write_digits

NUM_VALIDATION, NUM_TEST = 300, 597  # digits
BATCH_SIZE = 20
OPTIONS: Dict[str, Any] = dict(batch_size=BATCH_SIZE, mixup=0., cutmix=0., no_flip=True, no_amp=True)  # of all digits


def digits(
        root: Path, num_train: int, seed: int, num_validation: int = NUM_VALIDATION, num_test: int = NUM_TEST) -> Path:
    """Return a folder of digits, those for testing the same for all seeds. Write it if needed."""
    def write(folder: Path) -> None:
        write_digits(folder, num_train, seed, DIGIT, num_test)
        others = sorted(folder.glob('validation/*/*'))
        for path in random.Random(seed).sample(others, len(others) - num_validation):
            path.unlink()
    return written(root / 'images' / f'digits-{num_train}-{num_validation}-seed{seed}', write)


def photos(root: Path, num_train: int, seed: int, data_dir: Path, num_held_out: int) -> Path:
    """Return a folder with an equal number of training images of every class, and all test images.

    Args:
        root: Where the folder is written if it is not there.
        num_train: Number of training images.
        seed: Chooses training and held-out images.
        data_dir: Has the folders train/CLASS and validation/CLASS, or is where torchvision keeps CIFAR-10.
        num_held_out: Number of further images of the training set, for validation.

    Raises:
        ValueError: If there are too few images.
    """
    def write(folder: Path) -> None:
        train, test = open_split(data_dir, 'train'), open_split(data_dir, 'validation')
        by_class: Dict[int, List[int]] = {}
        for index, target in enumerate(train.targets):
            by_class.setdefault(target, []).append(index)
        first, others = num_train // len(by_class), num_held_out // len(by_class)
        fewest = min(map(len, by_class.values()))
        if fewest < first + others or not first or not others:
            raise ValueError(f'{data_dir} has {fewest} training images of a class, where {first} to train on and '
                             f'{others} to hold out were asked for: choose other numbers.')
        rng = random.Random(seed)
        samples = [rng.sample(indices, first + others) for indices in by_class.values()]
        for split, dataset, indices in (
                ('train', train, [index for sample in samples for index in sample[:first]]),
                ('validation', train, [index for sample in samples for index in sample[first:]]),
                ('test', test, range(len(test)))):
            for index in indices:
                image, target = dataset[index]
                path = folder / split / dataset.classes[target] / f'{index:05}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
    return written(root / 'images' / f'{data_dir.resolve().name}-{num_train}-{num_held_out}-seed{seed}', write)


def open_split(data_dir: Path, split: str) -> Any:
    """Return the images of a split, as a dataset of PIL images and classes."""
    if (data_dir / 'cifar-10-batches-py').is_dir():
        return CIFAR10(str(data_dir), train=split == 'train')
    if not (data_dir / split).is_dir():
        raise ValueError(
            f'{data_dir} has no folder {split}: expected train/CLASS and validation/CLASS with images, or '
            "cifar-10-batches-py, torchvision's CIFAR-10.")
    return ImageFolder(str(data_dir / split))


def written(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return a folder, written first if it is not there. A kill at any moment leaves none or the whole."""
    if not folder.exists():
        partial = folder.with_suffix('.partial')
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        partial.rename(folder)
    return folder
