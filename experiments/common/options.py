"""Options that the experiments share."""
import argparse
import os
from pathlib import Path


def make_parser(description: str, name: str, seeds: int) -> argparse.ArgumentParser:
    """Return a parser with the number of seeds and the output folder, which is named after the experiment."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--seeds', type=positive_int, default=seeds, help='number of seeds (default: %(default)s)')
    add('--output', type=Path, default=Path('output', name), help='folder (default: %(default)s)')
    return parser


def make_run_parser(description: str, name: str, seeds: int, photos: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options of `runs.py` too; `photos` need a folder."""
    parser = make_parser(description, name, seeds)
    add = parser.add_argument
    if photos:
        add('--data-dir', type=Path, required=True,
            help='train/CLASS and validation/CLASS with images, or where torchvision keeps CIFAR-10')
        add('--held-out', dest='num_held_out', type=positive_int, default=1000,
            help='training images to validate on (default: %(default)s)')
        add('--rows', nargs='+', default=['*'], metavar='TITLE', help='rows of these titles only; * is any text')
    add('--results', type=Path, help='file with a line for each run (default: results.jsonl in the output folder)')
    add('--workers', type=positive_int, default=os.cpu_count(), help='runs at a time (default: %(default)s)')
    add('--quick', action='store_true', help='two epochs of 100 images: is this script in order?')
    return parser


def positive_int(text: str) -> int:
    """Read an integer that is at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text} is not positive')
    return int(text)
