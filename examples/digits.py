"""Handwritten digits: real images, bundled with scikit-learn, each at a random place on a canvas.

As an ImageFolder for timm's `train.py --data-dir FOLDER`: python examples/digits.py FOLDER
"""
import argparse
from pathlib import Path
from typing import Any, Dict, List, Tuple, Union

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
MEAN, STD = 0.1, 0.25


def preprocessing(img_size: int) -> Dict[str, Any]:
    """What timm's data configuration of a model for these images is."""
    return dict(input_size=(1, img_size, img_size), mean=(MEAN,), std=(STD,), interpolation='bicubic', crop_pct=1.0)


class Digits(Dataset):
    """Images of digits with their classes."""

    def __init__(self, images: List[Image.Image], targets: List[int], augment: bool) -> None:
        self.images, self.targets = images, targets
        img_size = images[0].width
        transform = create_transform(**preprocessing(img_size))
        self.tensors = [transform(image) for image in images]
        # Within these epochs, RandAugment, Mixup and averaged weights bring nothing more.
        self.augment = RandomCrop(img_size, padding=4, fill=-MEAN / STD) if augment else nn.Identity()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        return self.augment(self.tensors[index]), self.targets[index]


def digits_on_canvas(num_train: int, seed: int, canvas: int = CANVAS) -> Tuple[Digits, Digits]:
    """Training images, and all others for testing."""
    rng = np.random.RandomState(seed)
    images, targets = place_digits(rng, canvas)
    order = rng.permutation(NUM_IMAGES)
    return (
        Digits(*choose(images, targets, order[:num_train]), augment=True),
        Digits(*choose(images, targets, order[num_train:]), augment=False),
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


def choose(
        images: List[Image.Image],
        targets: List[int],
        indices: Union[np.ndarray, range],
) -> Tuple[List[Image.Image], List[int]]:
    return [images[i] for i in indices], [targets[i] for i in indices]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='gets train/CLASS/*.png and validation/CLASS/*.png')
    parser.add_argument('--num-train', type=int, default=400, help='training images (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='of places and split (default: %(default)s)')
    parser.add_argument(
        '--canvas', type=int, default=CANVAS, help=f'pixels of a side, at least {DIGIT} (default: %(default)s)')
    args = parser.parse_args()
    if not 1 <= args.num_train < NUM_IMAGES:
        parser.error(f'--num-train must be between 1 and {NUM_IMAGES - 1}')
    if args.canvas < DIGIT:
        parser.error(f'--canvas must be at least {DIGIT}, the size of a digit')
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        parser.error(f'{args.folder} exists and is not an empty folder')
    for split, data in zip(('train', 'validation'), digits_on_canvas(args.num_train, args.seed, args.canvas)):
        for index, (image, target) in enumerate(zip(data.images, data.targets)):
            path = args.folder / split / str(target) / f'{index:04}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
        print(f'{args.folder / split}: {len(data)} images of {args.canvas} x {args.canvas} pixels')


if __name__ == '__main__':
    main()
