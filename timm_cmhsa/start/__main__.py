"""The command: python -m timm_cmhsa.start MODEL OUT"""
import argparse
import shlex
import sys
from pathlib import Path

import safetensors.torch
import timm
import torch
from timm.utils import ParseKwargs, random_seed

from ..checkpoint import check_destination, replacing
from ..cli import Parser, parse_options, run_command
from ..errors import one_line
from ..images import data_config
from . import start_as_convolution

DESCRIPTION = '''\
Write an untrained ViT of timm, with every head pointed at one of the K x K nearest patches, as a checkpoint for
--initial-checkpoint of timm's train.py. Exit code 2: bad input; nothing is written then.'''

FLAGS = {'global_pool': '--gp', 'drop_rate': '--drop', 'drop_path_rate': '--drop-path'}  # of train.py


def start(args: argparse.Namespace) -> None:
    """Create a model, point its heads and write it."""
    if args.out.suffix not in ('.safetensors', '.pth'):
        raise ValueError(f'{args.out} must end in .safetensors or .pth.')
    out = check_destination(args.out, args.force)
    random_seed(args.seed)
    try:
        model = timm.create_model(args.model, **args.model_kwargs)
    except Exception as e:  # timm raises anything
        raise ValueError(f'{args.model} cannot be created: {one_line(e)}') from e
    start_as_convolution(model, args.images, args.peak, args.kernel_size, args.seed)
    with replacing(out, args.force) as new:
        write = safetensors.torch.save_file if new.suffix == '.safetensors' else torch.save
        write(model.state_dict(), new)
    options, kwargs = ['--model', args.model], []
    for name, value in args.model_kwargs.items():
        if name in FLAGS:
            options += [FLAGS[name], str(value)]
        elif name not in ('num_classes', 'in_chans'):
            kwargs.append(f'{name}={value}')
    options += ['--model-kwargs', *kwargs] if kwargs else []
    options += ['--input-size', *map(str, data_config(model)['input_size']), '--num-classes', str(model.num_classes)]
    options += ['--initial-checkpoint', str(args.out)]
    print(f"written to {args.out}; train it with timm's train.py {shlex.join(options)}")


def main() -> int:
    parser = Parser(prog='python -m timm_cmhsa.start', description=DESCRIPTION)
    add = parser.add_argument
    add('model', metavar='MODEL', help='name in timm, such as vit_tiny_patch16_224')
    add('out', metavar='OUT', type=Path, help='.safetensors or .pth file')
    add('--model-kwargs', metavar='NAME=VALUE', nargs='*', default={}, action=ParseKwargs,
        help='arguments of the model, such as num_classes=10 img_size=64 patch_size=8')
    add('--images', metavar='DIR', type=Path, help='folder of images to measure layer norm on (default: noise)')
    add('--peak', metavar='P', type=float, default=0.75, help='weight of a head on its patch (default: %(default)s)')
    add('--kernel-size', metavar='K', type=int, default=3, help='heads look at K x K patches (default: %(default)s)')
    add('--seed', metavar='N', type=int, default=0, help='of weights and offsets (default: %(default)s)')
    add('--force', action='store_true', help='replace OUT')
    args = parse_options(parser)
    return run_command(parser.prog, lambda: start(args))


if __name__ == '__main__':
    sys.exit(main())
