"""The `convert_checkpoint` command: a phase-1 checkpoint in, a phase-2 checkpoint out, on disk and on the Hub."""
import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .checkpoints import PICKLE_SUFFIXES, CheckpointError, check_destination, same_model_folders
from .convert import TOLERANCE, VerificationError, convert_checkpoint
from .hub import PREFIXES, check_label_names, check_push, describe, upload
from .hub_errors import HubError
from .model_card import check_results
from .phase1 import DTYPES
from .rel_pos import POINTED
from .version import __version__

DESCRIPTION = '''\
Rewrite a phase-1 (cmhsa_conv_*) checkpoint as a phase-2 (cmhsa_attn) checkpoint that computes the same. Verified before
it is written. Exit code 1: the error is above the tolerance; 2: bad input; nothing is written then. 3: the Hugging Face
Hub was not reached or refused; what is converted by then is kept.'''


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns its exit code."""
    parser, push_options = _parser()
    args = parser.parse_args(argv)
    if args.push_to_hub is None:
        _refuse_without_push(parser, push_options, args)
        if args.dst is None:
            parser.error('DST is missing: give a file or folder, or --push-to-hub USER/NAME')
    convert_args = {key: value for key, value in vars(args).items() if key not in push_options}
    try:
        if args.push_to_hub is None:
            print(f'{convert_checkpoint(**convert_args)}\nwritten to {args.dst}')
        else:
            _convert_and_push(convert_args, args)
    except (CheckpointError, HubError, VerificationError, OSError) as e:
        print(f'convert_checkpoint: {e}', file=sys.stderr)
        return 1 if isinstance(e, VerificationError) else 3 if isinstance(e, HubError) else 2
    except KeyboardInterrupt:
        print('\nconvert_checkpoint: interrupted. The same command goes on from here.', file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _convert_and_push(convert_args: Dict[str, Any], args: argparse.Namespace) -> None:
    check_push(args.push_to_hub, args.revision, args.create_pr, args.commit_message)
    label_names = None
    if args.label_names is not None:
        label_names = read_label_names(args.label_names)
        check_label_names(label_names, args.num_classes or len(label_names))
        convert_args['num_classes'] = len(label_names)
    about = dict(
        label_names=label_names,
        license=args.license,
        datasets=args.dataset,
        base_model=args.src.partition(':')[2].partition('@')[0] if args.src.startswith(PREFIXES) else None,
        results=None if args.results is None else read_results(args.results),
    )
    dst = args.dst or Path(args.push_to_hub.split('/')[1].replace('.', '_'))
    if dst.suffix in ('.safetensors', *PICKLE_SUFFIXES):
        raise CheckpointError(f'{dst} is the name of a file: what goes to the Hub is a folder, give the name of one.')
    convert_args['describe'] = lambda model, folder, report: describe(
        model, folder, args.push_to_hub, details=report.details, **about)
    _convert_once(dst, convert_args)
    try:
        url = upload(
            dst, args.push_to_hub, private=args.private, revision=args.revision, create_pr=args.create_pr,
            commit_message=args.commit_message, overwrite_readme=args.overwrite_readme,
            overwrite_model=args.overwrite_model)
    except (HubError, OSError) as e:
        raise HubError(f'{e} The converted model is kept in {dst}.') from e
    print(f'pushed to {url}')


def _convert_once(dst: Path, convert_args: Dict[str, Any]) -> None:
    """Convert into a folder, unless that holds just this already: the same command goes on after an interruption."""
    if not dst.is_dir() or not any(dst.iterdir()) or convert_args['force']:
        print(f"{convert_checkpoint(**{**convert_args, 'dst': dst})}\nwritten to {dst}")
        return
    check_destination(dst, None, force=True)  # is it a converted model?
    with tempfile.TemporaryDirectory(prefix=f'.{dst.name}.', dir=dst.parent) as parent:
        again = Path(parent) / dst.name
        report = convert_checkpoint(**{**convert_args, 'dst': again})
        if not same_model_folders(again, dst):
            raise CheckpointError(
                f'{dst} exists already and holds something else than this command writes: overwrite it with --force '
                '(which overwrites nothing on the Hub), or give another DST.')
    print(f'{report}\n{dst} is up to date')


def _refuse_without_push(parser: argparse.ArgumentParser, push_options: List[str], args: argparse.Namespace) -> None:
    for name in push_options:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is for --push-to-hub USER/NAME")


def read_label_names(path: Path) -> List[str]:
    """Names of the classes, one a line, in the order of the classes.

    Raises:
        CheckpointError: If the file cannot be read, or a line is empty.
    """
    try:
        names = [line.strip() for line in path.read_text(encoding='utf-8-sig').rstrip().splitlines()]
    except (OSError, ValueError) as e:
        raise CheckpointError(f'{path} cannot be read: {getattr(e, "strerror", None) or e}.') from e
    if not all(names) or not names:
        raise CheckpointError(f'{path} is empty or has an empty line: expected the name of one class in every line.')
    return names


def read_results(path: Path) -> Dict[str, float]:
    """Accuracies in percent, from the file that `validate.py --results-format json` writes.

    Raises:
        CheckpointError: If it is none.
    """
    try:
        content = json.loads(path.read_text())
        results = {f'Top-{k}': content[f'top{k}'] for k in (1, 5) if f'top{k}' in content}
    except (OSError, ValueError, TypeError) as e:
        raise CheckpointError(f'{path} cannot be read as JSON: {getattr(e, "strerror", None) or e}.') from e
    if not results:
        raise CheckpointError(
            f'{path} holds no top1 or top5: give what validate.py --results-file FILE --results-format json writes.')
    return check_results(results)


def _size(text: str) -> Tuple[int, int]:
    height, _, width = text.partition('x')
    try:
        return int(height), int(width or height)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f'{text!r} is neither N nor HxW') from e


def _parser() -> Tuple[argparse.ArgumentParser, List[str]]:
    """The parser, and the names of its options for the Hub."""
    parser = argparse.ArgumentParser(prog='convert_checkpoint', description=DESCRIPTION)
    add = parser.add_argument
    add('src', metavar='SRC',
        help="checkpoint of timm's train.py, state dict (.pth, .safetensors), local-dir: folder, or model on the "
             'Hugging Face Hub, hf-hub:USER/NAME[@REVISION]')
    add('dst', metavar='DST', nargs='?', type=Path,
        help='.safetensors, .pth, or a folder for timm.create_model("local-dir:DST") '
             '(default with --push-to-hub: a folder named as the repository)')
    add('--model', metavar='NAME',
        help='registered phase-2 model (default: the one with tokens of this shape and wide heads)')
    add('--img-size', metavar='N or HxW', type=_size, help='input size, where the checkpoint does not tell')
    add('--patch-size', metavar='N or HxW', type=_size, help='of patches that are not square, likewise')
    add('--in-chans', metavar='N', type=int, help='image channels, likewise (default: those of a token, at most 3)')
    add('--num-heads', metavar='N', type=int, help="number of heads (default: the model's; with --head-dim: as needed)")
    add('--head-dim', metavar='N', type=int, help="width of a head (default: the model's, mostly that of a token)")
    add('--sharpness', metavar='M', type=float, help='bias of the wanted offset (default: exact to rounding)')
    add('--approximate', action='store_true',
        help='where the heads are too few, convert with the least error of heads that look at one offset each')
    add('--rel-pos', choices=POINTED, default='table', help='relative position encoding (default: %(default)s)')
    add('--num-classes', metavar='N', type=int, help='refuse a checkpoint with another number of classes')
    add('--use-ema', action='store_true', help='convert the EMA weights')
    add('--dtype', choices=DTYPES,
        help="type of the written tensors (default: the source's); rounding to it is no error")
    add('--images', metavar='DIR', type=Path, help='verify on images of this folder too')
    add('--tolerance', metavar='E', type=float,
        help=f'largest accepted error, relative to the largest value (default: {TOLERANCE}; where approximate, any)')
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
