"""The commands `convert_checkpoint` and `plot_attention`: options, exit codes and one-line errors."""
import argparse
import io
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional, Sequence, Tuple

from timm.utils import ParseKwargs

from .checkpoint import load_model
from .conversion import MAX_ERROR, convert_checkpoint
from .errors import HubError, VerificationError, one_line
from .files import MODEL_SUFFIXES
from .hub import check_repo_id, push_to_hub
from .version import __version__

SOURCE = "checkpoint of timm's train.py, state dict (.pth, .safetensors), local-dir: folder, or hf-hub:USER/NAME"
ANY_SOURCE = f'{SOURCE}, also of a stock model of timm; or the name of a pretrained one'
CONVERT_DESCRIPTION = '''\
Rewrite a phase-1 (cmhsa_conv_*) checkpoint as a phase-2 (cmhsa_attn*) checkpoint that computes the same, and verify it
before it is written. Exit code 1: the error is above the tolerance; 2: bad input; nothing is written then. 3: the
Hugging Face Hub was not reached or refused; a model that was converted before is kept.'''
PLOT_DESCRIPTION = '''\
Draw what the heads of a model look at, and how much like a convolution they are; from several checkpoints, also how
that moves during training. Exit code 2: bad input; nothing is written then.'''


class Parser(argparse.ArgumentParser):
    """Prints an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: error: {message} (see {self.prog} --help)\n')


def _size(text: str) -> Tuple[int, int]:
    match = re.fullmatch(r'(\d+)(?:x(\d+))?', text)
    if not match:
        raise argparse.ArgumentTypeError(f'{text!r} is neither N nor HxW')
    return int(match[1]), int(match[2] or match[1])


def convert_main(argv: Optional[Sequence[str]] = None) -> int:
    """Run `convert_checkpoint`; return its exit code."""
    parser = Parser(prog='convert_checkpoint', description=CONVERT_DESCRIPTION)
    add = parser.add_argument
    add('src', metavar='SRC', help=SOURCE)
    add('dst', metavar='DST', type=Path, help='folder for --model local-dir:DST, or a .safetensors or .pth file')
    add('--architecture', '--model', metavar='NAME',
        help='registered phase-2 model, such as cmhsa_attn_soft (default: cmhsa_attn; with --peak cmhsa_attn_soft; '
             'for hybrids cmhsa_hybrid_attn_*)')
    add('--peak', metavar='P', type=float,
        help='weight between 0 and 1 that a soft head gives to its own offset (default for cmhsa_attn_soft: 0.75)')
    add('--num-heads', metavar='N', type=int, help='number of heads (default: as the architecture, or more if needed)')
    add('--head-dim', metavar='N', type=int, help='width of a head (default: as the architecture)')
    add('--qk-dim', metavar='N', type=int, help='width of queries and keys (default: as the architecture)')
    add('--img-size', metavar='N', type=_size, help='image size, N or HxW pixels, if the checkpoint lacks it')
    add('--patch-size', metavar='N', type=_size, help='patch size, N or HxW pixels, if the checkpoint lacks it')
    add('--in-chans', metavar='N', type=int, help='image channels, if the checkpoint lacks it')
    add('--model-kwargs', metavar='NAME=VALUE', nargs='*', default={}, action=ParseKwargs,
        help='other arguments of the phase-1 model that the checkpoint lacks, such as global_pool=max')
    add('--no-ema', dest='use_ema', action='store_false', help='convert the raw weights, not the averaged ones')
    add('--images', metavar='DIR', type=Path, help='verify on images of this folder, too, 64 of them at most')
    add('--tolerance', metavar='E', type=float, default=MAX_ERROR,
        help='largest accepted error, relative to the largest value (default: %(default)s)')
    add('--force', action='store_true', help='replace the model at DST')
    add('--push-to-hub', metavar='USER/NAME', help='publish DST, a folder, on the Hugging Face Hub')
    add('--private', action='store_true', help='make a private repository')
    add('--license', metavar='ID', help='license on the model card, such as apache-2.0 (default: none)')
    add('--version', action='version', version=f'timm_cmhsa {__version__}')
    args = vars(parse_options(parser, argv))
    dst, repo_id = args['dst'], args.pop('push_to_hub')
    private, license = args.pop('private'), args.pop('license')
    if repo_id is None and (private or license):
        parser.error('--private and --license are for --push-to-hub USER/NAME')
    if repo_id is not None and dst.suffix in MODEL_SUFFIXES:
        parser.error(f'DST is the file {dst}: --push-to-hub publishes a folder')

    def convert() -> None:
        if repo_id is not None:
            check_repo_id(repo_id)
        report = convert_checkpoint(**args)
        print(f'{report}\nwritten to {dst}')
        if repo_id is not None:
            url = push_to_hub(load_model(dst), repo_id, private=private, license=license, details=report.details)
            print(f'published at {url}')
        elif dst.is_dir():
            print(f"train it by timm's train.py with --model {shlex.quote(f'local-dir:{dst}')} --pretrained")

    return run_command(parser.prog, convert)


def plot_main(argv: Optional[Sequence[str]] = None) -> int:
    """Run `plot_attention`; return its exit code."""
    parser = Parser(prog='plot_attention', description=PLOT_DESCRIPTION)
    add = parser.add_argument
    add('source', metavar='CHECKPOINT', nargs='+', help=f'{SOURCE}; several in the order of training')
    add('--output', metavar='FOLDER', type=Path, required=True, help='for the pictures; older ones there are replaced')
    add('--images', metavar='DIR', type=Path,
        help='folder of images to look at, 100 of them at most (default: random noise)')
    add('--query', metavar=('ROW', 'COL'), nargs=2, type=float, default=(0.5, 0.5),
        help='patch to look from: 0 0 is the upper left corner of the image, 1 1 the lower right one (default: centre)')
    add('--layer', metavar='NAME', help='draw this layer alone, such as blocks.0.attn')
    add('--html', action='store_true', help='write attention.html, a page to explore with the mouse, too')
    add('--architecture', '--model', metavar='NAME', help='name of the model, if the checkpoint lacks it')
    add('--model-kwargs', metavar='NAME=VALUE', nargs='*', default={}, action=ParseKwargs,
        help='arguments of the model that the checkpoint lacks')
    add('--version', action='version', version=f'timm_cmhsa {__version__}')
    args = parse_options(parser, argv)

    def plot() -> None:
        from .plots import in_order_of_training, plot_attention

        args.source = in_order_of_training(args.source)
        print(*plot_attention(**vars(args)), sep='\n')

    return run_command(parser.prog, plot)


def run_command(prog: str, command: Callable[[], Any], extra: str = 'train') -> int:
    """Run a command, which may need an extra of this package; print an error in one line. Return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')  # names may have letters that a console has not
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # temporary files are removed then
    code, report = 2, []
    try:
        command()
        return 0
    except KeyboardInterrupt:
        print(f'\n{prog}: interrupted', file=sys.stderr)
        return 130
    except VerificationError as e:
        code, (*report, reason) = 1, str(e).splitlines()
    except HubError as e:
        code, reason = 3, one_line(e, 1000)
    except ModuleNotFoundError as e:
        reason = f"{one_line(e)} Try pip install 'timm_cmhsa[{extra}]'."
    except (ValueError, TypeError, OSError) as e:
        file = getattr(e, 'filename', None)
        reason = f'{"" if file is None else f"{file}: "}{one_line(e, 1000)}'
    print(*report, f'{prog}: error: {reason}', sep='\n', file=sys.stderr)
    return code


def parse_options(parser: argparse.ArgumentParser, argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    try:
        return parser.parse_args(argv)
    except (ValueError, SyntaxError):  # of timm's ParseKwargs
        parser.error('argument --model-kwargs and the like: expected NAME=VALUE')
