"""Run a script of timm with the models registered: python -m timm_cmhsa validate.py --model cmhsa_attn ...

Also under torchrun: torchrun --nproc_per_node 2 -m timm_cmhsa train.py ...
"""
import os
import runpy
import sys

import timm_cmhsa  # noqa: F401  registers the models

USAGE = 'usage: python -m timm_cmhsa SCRIPT [ARGUMENTS ...]'


def main() -> None:
    """Do what `python SCRIPT ARGUMENTS` does: the same `sys.argv`, `sys.path`, output and exit status.

    timm is imported before the script starts, so that it is the installed one, not one in the script's folder.
    """
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith('-'):
        asked = arguments[:1] in (['-h'], ['--help'])
        print(f'{__doc__}\n{USAGE}' if asked else USAGE, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    script = arguments[0]
    try:
        if not os.path.isdir(script):
            open(script, 'rb').close()
    except OSError as e:
        print(f"{sys.executable}: can't open file {os.path.abspath(script)!r}: [Errno {e.errno}] {e.strerror}",
              file=sys.stderr)
        sys.exit(2)
    sys.argv = arguments
    if not getattr(sys.flags, 'safe_path', False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name='__main__')


if __name__ == '__main__':
    main()
