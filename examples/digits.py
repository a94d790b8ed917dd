"""Handwritten digits as an ImageFolder, for timm's `train.py --data-dir FOLDER`: python examples/digits.py FOLDER

Real images, bundled with scikit-learn, each at a random place on a canvas.
"""
import argparse
from pathlib import Path

from timm_cmhsa.train.data import CANVAS, DIGIT, write_digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='gets train/CLASS/*.png and validation/CLASS/*.png')
    parser.add_argument('--num-train', type=int, default=400, help='training images (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='of places and split (default: %(default)s)')
    parser.add_argument(
        '--canvas', type=int, default=CANVAS, help=f'pixels of a side, at least {DIGIT} (default: %(default)s)')
    args = parser.parse_args()
    if args.canvas < DIGIT:
        parser.error(f'--canvas must be at least {DIGIT}, the size of a digit')
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        parser.error(f'{args.folder} exists and is not an empty folder')
    write_digits(args.folder, args.num_train, args.seed, args.canvas)


if __name__ == '__main__':
    main()
