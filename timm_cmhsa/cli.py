"""The commands `convert_checkpoint` and `plot_attention`: options, exit codes and one-line errors."""
import argparse
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence, TextIO, Tuple, Type

from timm.utils import ParseKwargs

from .checkpoints import (
    MAX_ERROR,
    VerificationError,
    check_options,
    convert_and_verify,
    convert_checkpoint,
    load_phase1,
    locate,
)
from .construction import HeadOptions
from .destination import FILE_SUFFIXES, temporary_folder
from .encodings import POINTABLE
from .files import CheckpointError, read_json, read_text, reading, same_model_folders
from .hub.card import check_results
from .hub.download import PREFIXES
from .hub.errors import HubError, without_credentials
from .hub.publish import check_label_names, check_push, push_folder_to_hub, save_for_hub
from .messages import printable
from .phase1 import DTYPES, UNTOLD_ARGS, told_by_user
from .report import ConversionReport
from .version import __version__

UPLOAD_OPTIONS = ('private', 'revision', 'create_pr', 'commit_message', 'overwrite_readme', 'overwrite_model')
CONVERT_DESCRIPTION = '''\
Rewrite a phase-1 (cmhsa_conv_*) checkpoint as a phase-2 (cmhsa_attn) checkpoint that computes the same. Verified before
it is written. Exit code 1: the error is above the tolerance; 2: bad input; nothing is written then. 3: the Hugging Face
Hub was not reached or refused; what is converted by then is kept.'''

PLOT_DESCRIPTION = '''\
Draw what the heads of a model look at, their centres where they have some, and how much like a convolution they are;
from several checkpoints, also how that moves during training. Exit code 2: bad input; nothing is written then.'''


def convert_main(argv: Optional[Sequence[str]] = None) -> int:
    """Run `convert_checkpoint`; return its exit code."""
    parser, push_options = _convert_parser()
    args = parse_args(parser, argv)
    if args.push_to_hub is None:
        for name in push_options:
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} is for --push-to-hub USER/NAME")
        if args.dst is None:
            parser.error('DST is missing: give a file or folder, or --push-to-hub USER/NAME')
    return run_command(
        parser, lambda: _convert(parser, push_options, args),
        {VerificationError: 1, CheckpointError: 2, OSError: 2, HubError: 3})


def _convert(parser: argparse.ArgumentParser, push_options: Sequence[str], args: argparse.Namespace) -> None:
    if args.push_to_hub is None:
        report = convert_checkpoint(**{key: value for key, value in vars(args).items() if key not in push_options})
        _say_converted(report, f'written to {args.dst}')
    else:
        _push(parser, args)


def _say_converted(report: ConversionReport, done: str) -> None:
    say(*str(report).splitlines(), f'options for train.py, if loaded from a file: {report.train_options}', done)


def run_command(
        parser: argparse.ArgumentParser,
        command: Callable[[], None],
        exit_codes: Mapping[Type[Exception], int],
) -> int:
    """Run a command and return its exit code. If it fails or is stopped, say so in one line."""
    handlers = {
        number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        command()
    except tuple(exit_codes) as e:
        *report, message = str(e).splitlines() if isinstance(e, VerificationError) else [str(e)]
        say(*report, f'{parser.prog}: error: {_in_flags(message, parser)}', file=sys.stderr)
        return next(code for kind, code in exit_codes.items() if isinstance(e, kind))
    except KeyboardInterrupt as e:
        say('', f'{parser.prog}: interrupted.', file=sys.stderr)  # on a line of its own: ^C or progress stands there
        return 128 + (e.args or (signal.SIGINT,))[0]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(number)  # so that libraries clean up after SIGTERM as after Ctrl-C


def say(*lines: str, file: Optional[TextIO] = None) -> None:
    """Print lines without passwords, as far as the terminal can show them. It may be closed, which is no failure."""
    stream = file or sys.stdout
    text = without_credentials('\n'.join(map(printable, lines)))
    encoding = getattr(stream, 'encoding', None) or 'utf-8'
    try:
        print(text.encode(encoding, 'backslashreplace').decode(encoding), file=stream, flush=True)
    except OSError:  # Python would flush once more at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Parser(argparse.ArgumentParser):
    """Prints help and errors by `say`; an error is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: error: {message} (see {self.prog} --help)\n')

    def _print_message(self, message: str, file: Any = None) -> None:
        say(*message.splitlines(), file=file or sys.stderr)


def parse_args(parser: argparse.ArgumentParser, argv: Optional[Sequence[str]]) -> argparse.Namespace:
    try:
        return parser.parse_args(argv)
    except (ValueError, SyntaxError):  # of timm's ParseKwargs
        parser.error('argument --model-kwargs: expected NAME=VALUE')


def _in_flags(message: str, parser: argparse.ArgumentParser) -> str:
    """Return a message about arguments (force=True, num_heads=4) as one about options (--force, --num-heads 4)."""
    for action in parser._actions:
        if action.option_strings:
            flag = action.option_strings[-1]
            message = re.sub(rf'(?<![^\s(]){action.dest}=True\b', flag, message)  # not within the name of a file
            message = re.sub(rf'(?<![^\s(]){action.dest}=(?=\S)', f'{flag} ', message)
            message = re.sub(rf'^{action.dest} is ', f'{flag} is ', message)
    return message


def _push(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    check_push(args.push_to_hub, args.revision, args.create_pr, args.commit_message)
    folder = Path(args.src.removeprefix('local-dir:'))
    if _is_converted(folder):
        for name in vars(args).keys() - {'src', 'push_to_hub', *UPLOAD_OPTIONS}:
            if getattr(args, name) != parser.get_default(name):
                raise CheckpointError(f'{folder} is converted already and published as it is: leave out {name}=...')
    else:
        folder = args.dst or Path(args.push_to_hub.split('/')[1].replace('.', '_'))
        _convert_into(folder, args)
    try:
        url = push_folder_to_hub(folder, args.push_to_hub, **{name: getattr(args, name) for name in UPLOAD_OPTIONS})
    except (HubError, OSError) as e:
        raise HubError(f'{e} The converted model is kept in {folder}.') from e
    say(f'pushed to {url}')


def _is_converted(folder: Path) -> bool:
    """Return whether this is a folder with a phase-2 model."""
    try:
        return 'cmhsa_attn' in str(read_json(folder / 'config.json', 'a configuration').get('architecture'))
    except CheckpointError:
        return False


def _convert_into(dst: Path, args: argparse.Namespace) -> None:
    """Convert into a folder with a model card, unless it holds just that already."""
    if dst.suffix in FILE_SUFFIXES:
        raise CheckpointError(f'{dst} is the name of a file: what goes to the Hub is a folder, give the name of one.')
    about = _about(args)
    heads = HeadOptions(
        args.num_heads, args.head_dim, args.sharpness, args.approximate, args.rel_pos, args.peak)
    told = told_by_user(args.model_kwargs, img_size=args.img_size, patch_size=args.patch_size, in_chans=args.in_chans)
    check_options(args.model, heads, args.dtype, args.images, args.tolerance)
    path, folder = locate(args.src, dst, force=True)  # An existing folder is compared below.
    phase1 = load_phase1(path, args.src, args.model, told, args.num_classes, args.use_ema, args.dtype)
    if about['label_names'] is not None:
        check_label_names(about['label_names'], phase1.model.num_classes)
    converted, report = convert_and_verify(phase1, args.model, heads, args.images, args.tolerance)
    about['details'] = report.details
    if args.force or not folder.is_dir() or not any(folder.iterdir()):
        save_for_hub(converted, folder, args.push_to_hub, force=args.force, **about)
        done = f'written to {dst}'
    else:
        with temporary_folder(folder.parent) as parent:
            save_for_hub(converted, parent / folder.name, args.push_to_hub, **about)
            if not same_model_folders(parent / folder.name, folder):
                raise CheckpointError(
                    f'{folder} exists already and holds something else than this command writes: overwrite it with '
                    '--force (which overwrites nothing on the Hub), or give another DST.')
        done = f'{dst} is up to date'
    _say_converted(report, done)


def _about(args: argparse.Namespace) -> Dict[str, Any]:
    """Return what the options tell of the model, for its card."""
    return dict(
        label_names=None if args.label_names is None else read_label_names(args.label_names),
        license=args.license,
        datasets=args.dataset,
        base_model=args.src.partition(':')[2].partition('@')[0] if args.src.startswith(PREFIXES) else None,
        results=None if args.results is None else read_results(args.results),
    )


def read_label_names(path: Path) -> List[str]:
    """Return the names of the classes, one a line, in the order of the classes."""
    content = read_text(path)
    with reading(path, 'a text'):
        names = [line.strip() for line in content.decode('utf-8-sig').rstrip().splitlines()]
    if not all(names) or not names:
        raise CheckpointError(f'{path} is empty or has an empty line: expected the name of one class in every line.')
    return names


def read_results(path: Path) -> Dict[str, float]:
    """Return accuracies in percent, from the file that `validate.py --results-format json` writes."""
    content = read_json(path, 'JSON')
    results = {f'Top-{k}': content[f'top{k}'] for k in (1, 5) if f'top{k}' in content}
    if not results:
        raise CheckpointError(
            f'{path} holds no top1 or top5: give what validate.py --results-file FILE --results-format json writes.')
    return check_results(results)


def _size(text: str) -> Tuple[int, int]:
    match = re.fullmatch(r'(\d+)(?:x(\d+))?', text)
    if not match:
        raise argparse.ArgumentTypeError(f'{text!r} is neither N nor HxW')
    return int(match[1]), int(match[2] or match[1])


def _convert_parser() -> Tuple[argparse.ArgumentParser, List[str]]:
    """Return the parser, and the names of its options for the Hub."""
    parser = Parser(prog='convert_checkpoint', description=CONVERT_DESCRIPTION)
    add = parser.add_argument
    add('src', metavar='SRC',
        help="checkpoint of timm's train.py, state dict (.pth, .safetensors), local-dir: folder, or model on the "
             'Hugging Face Hub, hf-hub:USER/NAME[@REVISION]; with --push-to-hub also a folder that is converted '
             'already, which is published as it is')
    add('dst', metavar='DST', nargs='?', type=Path,
        help='.safetensors, .pth, or a folder for timm.create_model("local-dir:DST") '
             '(default with --push-to-hub: a folder named as the repository)')
    add('--model', metavar='NAME',
        help='registered phase-2 model (default: the one with tokens of this shape and wide heads)')
    add('--img-size', metavar='N or HxW', type=_size, help='input size, where the checkpoint does not tell')
    add('--patch-size', metavar='N or HxW', type=_size,
        help='size of patches that are not square, where the checkpoint does not tell')
    add('--in-chans', metavar='N', type=int,
        help='image channels, where the checkpoint does not tell (default: those of a token, at most 3)')
    add('--model-kwargs', metavar='NAME=VALUE', nargs='*', default={}, action=ParseKwargs,
        help=f'more arguments of the model that the checkpoint does not tell, such as global_pool=max act_layer=relu: '
             f'{", ".join(UNTOLD_ARGS[3:])} (defaults that are assumed are reported)')
    add('--num-heads', metavar='N', type=int, help="number of heads (default: the model's; with --head-dim: as needed)")
    add('--head-dim', metavar='N', type=int, help="width of a head (default: the model's, mostly that of a token)")
    add('--sharpness', metavar='M', type=float, help='bias of the wanted offset (default: exact to rounding)')
    add('--peak', metavar='P', type=float,
        help='weight between 0 and 1 that a head gives to its own offset: still exact, and heads can learn where to '
             'look (default: the whole weight, which is faster, but such heads never learn to look elsewhere)')
    add('--approximate', action='store_true',
        help='where the heads are too few, convert with the least error of heads that look at one offset each')
    add('--rel-pos', choices=POINTABLE, default='table', help='relative position encoding (default: %(default)s)')
    add('--num-classes', metavar='N', type=int, help='refuse a checkpoint with another number of classes')
    add('--use-ema', action='store_true', help='convert the EMA weights')
    add('--dtype', choices=DTYPES,
        help="type of the written tensors (default: the source's); the error of rounding to it is reported separately")
    add('--images', metavar='DIR', type=Path, help='verify on images of this folder too, 64 of them at most')
    add('--tolerance', metavar='E', type=float,
        help=f'largest accepted error, relative to the largest value (default: {MAX_ERROR}; where approximate, any)')
    add('--force', action='store_true', help='overwrite DST (and nothing on the Hub)')
    add('--version', action='version', version=f'timm_cmhsa {__version__}')
    return parser, _add_push_options(parser)


def _add_push_options(parser: argparse.ArgumentParser) -> List[str]:
    group = parser.add_argument_group(
        'Hugging Face Hub', 'The token is the one of `hf auth login`, or in the environment variable HF_TOKEN.')
    add = group.add_argument
    options = [
        add('--push-to-hub', metavar='USER/NAME', help='publish the converted model there'),
        add('--private', action='store_true', help='make a private repository'),
        add('--revision', metavar='R', help='branch to push to, made if there is none (default: main)'),
        add('--create-pr', action='store_true', help='open a pull request instead of a commit'),
        add('--commit-message', metavar='M', default='Add model', help='default: %(default)s'),
        add('--overwrite-readme', action='store_true', help='replace a README.md that is there'),
        add('--overwrite-model', action='store_true', help='replace another model that is there'),
        add('--label-names', metavar='FILE', type=Path,
            help='names of the classes, one a line, in the order of their numbers (default: those that SRC tells)'),
        add('--license', metavar='ID', help='as the Hub knows it (default: what SRC tells, or else apache-2.0)'),
        add('--dataset', metavar='ID', action='append', default=[],
            help="training data's name on the Hub, such as uoft-cs/cifar100; can be given several times"),
        add('--results', metavar='FILE', type=Path,
            help='what validate.py --results-file FILE --results-format json wrote'),
    ]
    return [option.dest for option in options]


def plot_main(argv: Optional[Sequence[str]] = None) -> int:
    """Run `plot_attention`; return its exit code."""
    parser = _plot_parser()
    args = parse_args(parser, argv)
    try:
        from .plots import PlotError, in_order_of_training, plot_attention
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split('.')[0] != 'matplotlib':
            raise
        say("plot_attention: error: matplotlib is missing: pip install 'timm_cmhsa[plots]'", file=sys.stderr)
        return 2
    args.source = in_order_of_training(args.source)
    return run_command(
        parser, lambda: say(*map(str, plot_attention(**vars(args)))),
        {CheckpointError: 2, PlotError: 2, HubError: 2, OSError: 2})


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive number')
    return int(text)


def _plot_parser() -> argparse.ArgumentParser:
    parser = Parser(prog='plot_attention', description=PLOT_DESCRIPTION)
    add = parser.add_argument
    add('source', metavar='CHECKPOINT', nargs='+', type=Path,
        help="checkpoint of timm's train.py, state dict (.pth, .safetensors), local-dir: folder or hf-hub:USER/NAME; "
             'several in the order of training (checkpoint-N.pth.tar in any)')
    add('--output', metavar='FOLDER', type=Path, required=True,
        help='gets the pictures; older pictures there are replaced')
    add('--images', metavar='DIR', type=Path, help='folder of images to look at (default: random noise)')
    add('--num-images', metavar='N', type=_positive, default=100,
        help='take at most N images of the folder (default: %(default)s)')
    add('--query', metavar=('ROW', 'COL'), nargs=2, type=float, default=(0.5, 0.5),
        help='the patch to look from, 0 0 is the upper left corner of the image and 1 1 the lower right one (default: '
             'the centre)')
    add('--layer', metavar='NAME', help='draw this layer alone, such as blocks.0.attn')
    add('--html', action='store_true', help='write attention.html, a page to explore with the mouse, too')
    add('--model', metavar='NAME', help='name of the model, where the checkpoint does not tell')
    add('--model-kwargs', metavar='NAME=VALUE', nargs='*', default={}, action=ParseKwargs,
        help='arguments of the model, where the checkpoint does not tell')
    add('--version', action='version', version=f'timm_cmhsa {__version__}')
    return parser
