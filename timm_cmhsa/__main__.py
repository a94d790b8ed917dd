"""Run a script of timm with the models registered: python -m timm_cmhsa PATH/TO/train.py --model cmhsa_attn ...

Also under torchrun: torchrun --nproc_per_node 2 -m timm_cmhsa PATH/TO/train.py ...
"""
import argparse
import os
import runpy
import sys

import timm_cmhsa  # noqa: F401  registers the models

TIMM_SCRIPTS = 'train', 'validate', 'inference', 'benchmark', 'onnx_export'


def main() -> None:
    """Do what `python SCRIPT ARGUMENTS` does: the same `sys.argv`, `sys.path`, output and exit status.

    timm is imported before the script starts, so that it is the installed one, not one in the script's folder.
    """
    parser = argparse.ArgumentParser(prog='python -m timm_cmhsa', description=__doc__)
    parser.add_argument('script', metavar='SCRIPT')
    parser.add_argument('arguments', metavar='ARGUMENTS', nargs=argparse.REMAINDER).required = False  # in the message
    args = parser.parse_args()
    script = args.script
    if not os.path.isfile(script):
        parser.error(f"can't open file {os.path.abspath(script)!r}{_meant(os.path.basename(script))}")
    sys.argv = [script, *args.arguments]
    if not getattr(sys.flags, 'safe_path', False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name='__main__')


def _meant(script: str) -> str:
    """Return what is probably meant by the name of a script that is not there."""
    clone = 'a clone of https://github.com/huggingface/pytorch-image-models, as its package has no scripts'
    if script == 'train':
        return (". Did you mean this package's trainer, `python -m timm_cmhsa.train`? timm's is called by "
                f'`python -m timm_cmhsa PATH/TO/train.py`, from {clone}')
    if script.removesuffix('.py') in TIMM_SCRIPTS:
        ours = "; this package's trainer is `python -m timm_cmhsa.train`" if script == 'train.py' else ''
        return f". Did you mean timm's script? Give its path in {clone}{ours}"
    return ''


if __name__ == '__main__':
    main()
