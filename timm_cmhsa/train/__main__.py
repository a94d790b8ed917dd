"""The command: python -m timm_cmhsa.train --data-dir DIR"""
import sys

from ..cli import Parser, parse_options, run_command
from . import __doc__ as description
from .options import add_options
from .run import run

if __name__ == '__main__':
    parser = Parser(prog='python -m timm_cmhsa.train', description=description)
    add_options(parser)
    args = parse_options(parser)
    sys.exit(run_command(parser.prog, lambda: run(args)))
