"""Folders of images for the experiments: train/, validation/, which learning rates are chosen by, and test/."""
import random
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Tuple

from torchvision.datasets import CIFAR10, ImageFolder

from timm_cmhsa.train.data import CANVAS as CANVAS, DIGIT as DIGIT, write_digits

NUM_VALIDATION, NUM_TEST, MIN_TRAIN, MAX_TRAIN = 300, 597, 60, 900  # digits
BATCH_SIZE = 20
OPTIONS: Dict[str, Any] = dict(batch_size=BATCH_SIZE, mixup=0., cutmix=0., no_flip=True, no_amp=True)  # of all digits


def digits(root: Path, num_train: int, seed: int, canvas: int = CANVAS) -> Path:
    """Return a folder of digits, those for testing the same for all seeds, at other places. Write it if needed."""
    def write(folder: Path) -> None:
        write_digits(folder, num_train, seed, canvas, NUM_TEST)
        others = sorted(folder.glob('validation/*/*'))
        for path in random.Random(seed).sample(others, len(others) - NUM_VALIDATION):
            path.unlink()
    return written(root / 'images' / f'digits{canvas}-{num_train}-seed{seed}', write)


def photos(root: Path, num_train: int, seed: int, data_dir: Path, num_held_out: int) -> Path:
    """Return a folder with an equal number of training images of every class, and all test images.

    Args:
        root: Where the folder is written if it is not there.
        num_train: Number of training images.
        seed: Chooses training and held-out images.
        data_dir: Has the folders train/CLASS and validation/CLASS, or is where torchvision keeps CIFAR-10.
        num_held_out: Number of further images of the training set, for validation.
    """
    def write(folder: Path) -> None:
        for split, (dataset, indices) in sample_photos(data_dir, num_train, seed, num_held_out).items():
            for index in indices:
                image, target = dataset[index]
                path = folder / split / dataset.classes[target] / f'{index:05}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
    name = f'{data_dir.resolve().name}-{num_train}-{num_held_out}-seed{seed}'
    return written(root / 'images' / name, write)


def sample_photos(
        data_dir: Path, num_train: int, seed: int, num_held_out: int) -> Dict[str, Tuple[Any, Iterable[int]]]:
    """Return the dataset and the indices of every split, see `photos`.

    Raises:
        ValueError: If there are too few images.
    """
    train, test = open_split(data_dir, 'train'), open_split(data_dir, 'validation')
    by_class: Dict[int, List[int]] = {}
    for index, target in enumerate(train.targets):
        by_class.setdefault(target, []).append(index)
    per_class, held_out_per_class = num_train // len(by_class), num_held_out // len(by_class)
    fewest = min(map(len, by_class.values()))
    if fewest < per_class + held_out_per_class or not per_class or not held_out_per_class:
        raise ValueError(
            f'{data_dir} has {fewest} training images of a class, where {per_class} to train on and '
            f'{held_out_per_class} to hold out were asked for: choose other numbers.')
    rng = random.Random(seed)
    samples = [rng.sample(indices, per_class + held_out_per_class) for indices in by_class.values()]
    return {
        'train': (train, [index for sample in samples for index in sample[:per_class]]),
        'validation': (train, [index for sample in samples for index in sample[per_class:]]),
        'test': (test, range(len(test))),
    }


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
