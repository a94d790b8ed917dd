"""Images to train on: handwritten digits, bundled with scikit-learn, each at a random place on a canvas."""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_transform
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import RandomCrop

CANVAS = 32  # pixels
DIGIT = 16  # pixels; scikit-learn's 8 x 8, enlarged
NUM_IMAGES = 1797
NUM_TEST, NUM_VALIDATION = 597, 300  # of the experiments
MEAN, STD = 0.1, 0.25


class Images(Dataset):
    """Images in memory with their classes, preprocessed by timm's data configuration of a model."""

    def __init__(
            self,
            images: Sequence[Image.Image],
            targets: Sequence[int],
            config: Dict[str, Any],
            augment: Optional[nn.Module] = None,
    ) -> None:
        self.images, self.targets, self.config = images, targets, config
        transform = create_transform(**config)
        self.tensors = [transform(image) for image in images]
        self.augment = augment or nn.Identity()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        return self.augment(self.tensors[index]), self.targets[index]

    def first(self, num_images: int = 64) -> torch.Tensor:
        """Return the first images as one batch, not augmented."""
        return torch.stack(self.tensors[:num_images])


Split = Tuple[Images, Images, Images]  # training, held-out and test images


class Digits(Images):
    """Digits with the given indices."""

    def __init__(
            self,
            images: List[Image.Image],
            targets: List[int],
            indices: Sequence[int],
            augment: bool = False,
    ) -> None:
        size = images[0].width
        super().__init__(
            [images[i] for i in indices],
            [targets[i] for i in indices],
            dict(input_size=(1, size, size), mean=(MEAN,), std=(STD,), interpolation='bicubic', crop_pct=1.0),
            # Within the epochs of the experiments, RandAugment, Mixup and averaged weights bring nothing more.
            RandomCrop(size, padding=4, fill=-MEAN / STD) if augment else None,
        )


def place_digits(rng: np.random.RandomState, canvas: int = CANVAS) -> Tuple[List[Image.Image], List[int]]:
    """Place every digit at a random position on an empty canvas, whose side is given in pixels."""
    digits = load_digits()
    images = []
    for pixels in digits.images:
        image = Image.new('L', (canvas, canvas))
        digit = Image.fromarray((pixels * 255 / 16).astype(np.uint8)).resize((DIGIT, DIGIT), Image.Resampling.BICUBIC)
        image.paste(digit, tuple(rng.randint(0, canvas - DIGIT + 1, size=2)))
        images.append(image)
    return images, digits.target.tolist()


def digits_on_canvas(num_train: int, seed: int, canvas: int = CANVAS) -> Tuple[Digits, Digits]:
    """Return training images, and all others for testing."""
    rng = np.random.RandomState(seed)
    images, targets = place_digits(rng, canvas)
    order = rng.permutation(NUM_IMAGES).tolist()
    return Digits(images, targets, order[:num_train], augment=True), Digits(images, targets, order[num_train:])


def split_digits(num_train: int, seed: int, canvas: int = CANVAS, augment: bool = True) -> Split:
    """Return training, held-out and test images; the last are the same for all seeds."""
    rng = np.random.RandomState(seed)
    images, targets = place_digits(rng, canvas)
    order = rng.permutation(NUM_IMAGES - NUM_TEST).tolist()
    if num_train + NUM_VALIDATION > len(order):
        raise ValueError(f'{num_train} training images are too many: at most {len(order) - NUM_VALIDATION}.')
    return (
        Digits(images, targets, order[:num_train], augment),
        Digits(images, targets, order[-NUM_VALIDATION:]),
        Digits(images, targets, range(NUM_IMAGES - NUM_TEST, NUM_IMAGES)),
    )
