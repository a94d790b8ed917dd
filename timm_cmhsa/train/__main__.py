"""The command: python -m timm_cmhsa.train --data-dir DIR"""
import sys
from typing import NoReturn

from ..cli import Parser, parse_options, run_command
from . import __doc__ as description
from .options import add_options
from .run import run


class TrainParser(Parser):
    """Knows what an option of timm's `train.py` is called here."""

    def error(self, message: str) -> NoReturn:
        if '--model-ema' in message:
            message += '; averaged weights are --ema DECAY here'
        super().error(message)


if __name__ == '__main__':
    parser = TrainParser(prog='python -m timm_cmhsa.train', description=description)
    add_options(parser)
    args = parse_options(parser)
    sys.exit(run_command(parser.prog, lambda: run(args)))
