"""Options that the experiments share."""
import argparse
import os
from pathlib import Path

from .images import MAX_TRAIN, MIN_TRAIN


def make_parser(description: str, name: str, seeds: int) -> argparse.ArgumentParser:
    """Return a parser with the number of seeds and the output folder, which is named after the experiment."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--seeds', type=positive_int, default=seeds, help='number of seeds (default: %(default)s)')
    add('--output', type=Path, default=Path('output', name), help='folder (default: %(default)s)')
    return parser


def add_queue(parser: argparse.ArgumentParser, name: str) -> None:
    """Add images, the file of results, which is named after the experiment, and the number of runs at a time."""
    add = parser.add_argument
    add('--data-dir', type=Path, required=True, help='images')
    add('--results', type=Path, default=Path(f'benchmarks/{name}.csv'), help='(default: %(default)s)')
    add('--workers', type=positive_int, default=os.cpu_count(), help='runs at a time (default: %(default)s)')


def add_repeats(parser: argparse.ArgumentParser, default: int) -> None:
    """Add how often a training step is timed."""
    parser.add_argument(
        '--repeats', type=positive_int, default=default, help='timed steps of every model (default: %(default)s)')


def add_num_train(parser: argparse.ArgumentParser) -> None:
    """Add the number of digits to train on."""
    parser.add_argument(
        '--num-train', type=num_digits, default=400, help='number of training images (default: %(default)s)')


def num_digits(text: str) -> int:
    """Read a number of digits: all ten must be among them, and some be left."""
    if not MIN_TRAIN <= int(text) <= MAX_TRAIN:
        raise argparse.ArgumentTypeError(f'{text} is not between {MIN_TRAIN} and {MAX_TRAIN}')
    return int(text)


def positive_int(text: str) -> int:
    """Read an integer that is at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text} is not positive')
    return int(text)


def positive_float(text: str) -> float:
    """Read a number above 0."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f'{text} is not positive')
    return float(text)
