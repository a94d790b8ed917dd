"""Run a script of timm with the models registered: python -m timm_cmhsa PATH/TO/train.py --model cmhsa_attn ...

Also under torchrun: torchrun --nproc_per_node 2 -m timm_cmhsa PATH/TO/train.py ...
"""
import argparse
import os
import runpy
import sys

import timm_cmhsa  # noqa: F401  registers the models

MISSING = '''\
can't open file {!r}. The scripts of timm are not in its package: give the path of one in a clone of \
https://github.com/huggingface/pytorch-image-models. This package's trainer is `python -m timm_cmhsa.train`'''


def main() -> None:
    """Do what `python SCRIPT ARGUMENTS` does, but with the installed timm, not one in the script's folder."""
    parser = argparse.ArgumentParser(prog='python -m timm_cmhsa', description=__doc__)
    parser.add_argument('script', metavar='SCRIPT')
    parser.add_argument('arguments', metavar='ARGUMENTS', nargs=argparse.REMAINDER).required = False  # in the message
    args = parser.parse_args()
    if not os.path.isfile(args.script):
        parser.error(MISSING.format(os.path.abspath(args.script)))
    sys.argv = [args.script, *args.arguments]
    if not getattr(sys.flags, 'safe_path', False):
        sys.path[0] = os.path.dirname(os.path.realpath(args.script))
    runpy.run_path(args.script, run_name='__main__')


if __name__ == '__main__':
    main()
