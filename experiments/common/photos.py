"""Small natural images from folders by class: CIFAR-10, or anything like it."""
import random
from pathlib import Path
from typing import Any, Dict, List, Sequence

from timm.data import ImageDataset
from torch import nn
from torchvision.datasets import CIFAR10
from torchvision.transforms import RandomCrop, RandomHorizontalFlip

from .data import Images, Split

IMG_SIZE = 32  # pixels
PREPROCESSING: Dict[str, Any] = dict(
    input_size=(3, IMG_SIZE, IMG_SIZE), mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),  # of CIFAR-10
    interpolation='bicubic', crop_pct=1.0)


def split_photos(num_train: int, seed: int, data_dir: Path, num_held_out: int) -> Split:
    """Read an equal number of training images of every class, chosen by the seed, and all test images.

    Args:
        num_train: Number of training images.
        seed: Chooses training and held-out images.
        data_dir: Has the folders train/CLASS and validation/CLASS, or is where torchvision keeps CIFAR-10.
        num_held_out: Number of further images of the training set, to choose learning rates by.
    """
    train, test = open_folder(data_dir, 'train'), open_folder(data_dir, 'validation')
    by_class: Dict[int, List[int]] = {}
    for index, target in enumerate(targets_of(train)):
        by_class.setdefault(target, []).append(index)
    rng = random.Random(seed)
    per_class, held_out_per_class = num_train // len(by_class), num_held_out // len(by_class)
    chosen: List[int] = []
    held_out: List[int] = []
    for indices in by_class.values():
        if len(indices) < per_class + held_out_per_class:
            raise ValueError(
                f'{data_dir} has {len(indices)} training images of a class, where {per_class} to train on and '
                f'{held_out_per_class} to hold out were asked for: choose fewer.')
        sample = rng.sample(indices, per_class + held_out_per_class)
        chosen.extend(sample[:per_class])
        held_out.extend(sample[per_class:])
    # filled with the mean colour, as the model sees it: 0
    augment = nn.Sequential(RandomCrop(IMG_SIZE, padding=4), RandomHorizontalFlip())
    return read(train, chosen, augment), read(train, held_out), read(test, range(len(targets_of(test))))


def open_folder(data_dir: Path, split: str) -> Any:
    """Return the images of a split, as a dataset of PIL images and classes."""
    if (data_dir / 'cifar-10-batches-py').is_dir():
        return CIFAR10(str(data_dir), train=split == 'train')
    if not (data_dir / split).is_dir():
        raise ValueError(
            f'{data_dir} has no folder {split}: expected train/CLASS and validation/CLASS with images, or '
            "cifar-10-batches-py, torchvision's CIFAR-10.")
    return ImageDataset(str(data_dir / split))


def targets_of(dataset: Any) -> List[int]:
    return dataset.targets if isinstance(dataset, CIFAR10) else [target for _, target in dataset.reader.samples]


def read(dataset: Any, indices: Sequence[int], augment: Any = None) -> Images:
    images, targets = zip(*(dataset[index] for index in indices))
    return Images(images, targets, PREPROCESSING, augment)
