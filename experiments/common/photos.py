"""Small natural images from folders by class, as tensors: CIFAR-10, or anything like it."""
import random
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
from timm.data import ImageDataset
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10
from torchvision.transforms import Compose, RandomCrop, RandomHorizontalFlip
from torchvision.transforms.functional import pil_to_tensor

IMG_SIZE = 32  # pixels
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10
PREPROCESSING: Dict[str, Any] = dict(
    input_size=(3, IMG_SIZE, IMG_SIZE), mean=MEAN, std=STD, interpolation='bicubic', crop_pct=1.0)


class Photos(Dataset):
    """Images, (N, 3, 32, 32), normalized, with their classes."""
    config = PREPROCESSING

    def __init__(self, images: torch.Tensor, targets: List[int], augment: bool = False) -> None:
        self.images, self.targets = images, targets
        # filled with the mean colour, as the model sees it: 0
        self.augment = Compose([RandomCrop(IMG_SIZE, padding=4), RandomHorizontalFlip()] if augment else [])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        return self.augment(self.images[index]), self.targets[index]


class Split(NamedTuple):
    """Training images, held-out ones to choose learning rates by, and test images, the same for all seeds."""
    train: Photos
    held_out: Photos
    test: Photos


def split_photos(data_dir: Path, num_train: int, num_held_out: int, seed: int) -> Split:
    """Read as many training images of every class as of any other, chosen by the seed, and all test images.

    Args:
        data_dir: Has the folders train/CLASS and validation/CLASS, or is where torchvision keeps CIFAR-10.
        num_train: Number of training images.
        num_held_out: Number of further images, also of the training set.
        seed: Chooses both.
    """
    train, test = open_folder(data_dir, 'train'), open_folder(data_dir, 'validation')
    by_class: Dict[int, List[int]] = {}
    for index, target in enumerate(targets_of(train)):
        by_class.setdefault(target, []).append(index)
    rng = random.Random(seed)
    per_class, held_out_per_class = num_train // len(by_class), num_held_out // len(by_class)
    chosen: Tuple[List[int], List[int]] = [], []
    for indices in by_class.values():
        if len(indices) < per_class + held_out_per_class:
            raise ValueError(
                f'{data_dir} has {len(indices)} training images of a class, where {per_class} to train on and '
                f'{held_out_per_class} to hold out were asked for: choose fewer.')
        sample = rng.sample(indices, per_class + held_out_per_class)
        chosen[0].extend(sample[:per_class])
        chosen[1].extend(sample[per_class:])
    return Split(
        read(train, chosen[0], augment=True), read(train, chosen[1]), read(test, range(len(targets_of(test)))))


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


def read(dataset: Any, indices: Sequence[int], augment: bool = False) -> Photos:
    """Read images into memory, normalized."""
    samples = [dataset[index] for index in indices]
    images = torch.stack([pil_to_tensor(image) for image, _ in samples]).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return Photos((images - mean) / std, [target for _, target in samples], augment)
