"""Handwritten digits as an ImageFolder, for timm's `train.py --data-dir FOLDER`: python examples/digits.py FOLDER

Real images, bundled with scikit-learn, each at a random place on a canvas.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / 'experiments'))
from common.data import CANVAS, DIGIT, NUM_IMAGES, digits_on_canvas


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
