"""The `plot_attention` command: from checkpoints to pictures of what the heads look at."""
import argparse
import re
import signal
import sys
from pathlib import Path
from typing import List, Optional, Sequence

from timm.utils import ParseKwargs

from .checkpoints import CheckpointError
from .plot_data import CENTER, PlotError
from .version import __version__

DESCRIPTION = '''\
Draw what the heads of a model look at, their centres where they have some, and how much like a convolution they are;
from several checkpoints, also how that moves during training. Exit code 2: bad input; nothing is written then.'''


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns its exit code."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except ValueError:  # of timm's ParseKwargs
        parser.error('argument --model-kwargs: expected NAME=VALUE')
    try:
        from .plots import plot_attention
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split('.')[0] != 'matplotlib':
            raise
        return _fail("matplotlib is missing: pip install 'timm_cmhsa[plots]'")
    try:
        args.source = in_order_of_training(args.source)
        for path in plot_attention(**vars(args)):
            print(path)
    except (CheckpointError, PlotError) as e:
        return _fail(str(e))
    except KeyboardInterrupt:
        print('\nplot_attention: interrupted, nothing was written.', file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def in_order_of_training(paths: List[Path]) -> List[Path]:
    """Checkpoints of `train.py` by their epochs: a shell has put checkpoint-10 before checkpoint-9."""
    matches = [re.fullmatch(r'checkpoint-(\d+)\.pth\.tar', path.name) for path in paths]
    by_epoch = {int(match[1]): path for match, path in zip(matches, paths) if match}
    if len(by_epoch) < len(paths):
        return paths
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _fail(message: str) -> int:
    print(f'plot_attention: error: {message}', file=sys.stderr)
    return 2


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive number')
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='plot_attention', description=DESCRIPTION)
    add = parser.add_argument
    add('source', metavar='CHECKPOINT', nargs='+', type=Path,
        help="checkpoint of timm's train.py, state dict (.pth, .safetensors) or local-dir: folder; several in the "
             'order of training (checkpoint-N.pth.tar in any)')
    add('--output', metavar='FOLDER', type=Path, required=True,
        help='gets the pictures; older pictures there are replaced')
    add('--images', metavar='DIR', type=Path, help='folder of images to look at (default: random noise)')
    add('--num-images', metavar='N', type=_positive, default=100,
        help='take at most N images of the folder (default: %(default)s)')
    add('--query', metavar=('ROW', 'COL'), nargs=2, type=float, default=CENTER,
        help='the patch to look from, 0 0 is the upper left corner of the image and 1 1 the lower right one (default: '
             'the centre)')
    add('--layer', metavar='NAME', help='draw this layer alone, such as blocks.0.attn')
    add('--html', action='store_true', help='write attention.html, a page to explore with the mouse, too')
    add('--model', metavar='NAME', help='name of the model, where the checkpoint does not tell')
    add('--model-kwargs', metavar='NAME=VALUE', nargs='*', default={}, action=ParseKwargs,
        help='arguments of the model, likewise')
    add('--version', action='version', version=f'timm_cmhsa {__version__}')
    return parser


if __name__ == '__main__':
    sys.exit(main())
