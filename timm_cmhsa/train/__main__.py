"""The command: python -m timm_cmhsa.train --data-dir DIR"""
import sys
from typing import NoReturn

from ..cli import Parser, parse_options, run_command
from . import __doc__ as description
from .options import add_options
from .run import run

INSTEAD = {  # of options of timm's train.py
    '--model-ema': 'averaged weights are --ema DECAY here',
    '--num-classes': 'the classes are the folders of --data-dir'}


class TrainParser(Parser):
    """Says what is instead of an option of timm's `train.py`."""

    def error(self, message: str) -> NoReturn:
        super().error('; '.join([message, *(instead for name, instead in INSTEAD.items() if name in message)]))


if __name__ == '__main__':
    parser = TrainParser(prog='python -m timm_cmhsa.train', description=description)
    add_options(parser)
    args = parse_options(parser)
    sys.exit(run_command(parser.prog, lambda: run(args)))
