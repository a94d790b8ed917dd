"""What only a GPU can show, within 40 minutes: python benchmarks/gpu.py [FOLDER] --data-dir CIFAR10

Runs the tests of tests/test_cuda.py, then benchmarks/speed.py in bfloat16, then the same compiled, then rows of
experiments/hybrid_phase2.py with all images of --data-dir: is attention worth its time there? Writes report.md, logs
and JSON into the folder, after each part. A part that fails or takes too long does not stop the next, and time that it
leaves is the next one's; trainings take what is left, one after another. The same command goes on where it was stopped,
with the parts that have not passed.
"""
import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import List

import timm
import torch
from packaging.version import Version

ROWS = (  # of experiments/hybrid_phase2.py, the most telling first
    'phase 1 alone', 'heads beside on a tenth of the width', 'wide, phase 1 alone', 'last block', 'all blocks',
    '16 x 16 tokens, phase 1 alone', '16 x 16 tokens, last block', 'wide, all blocks',
    'raw patches, phase 1 alone', 'raw patches, all blocks')

if Version(timm.__version__) < Version('1.0.27'):
    sys.exit(f'timm {timm.__version__} is too old: carry 1.0.27 or later along, and name its folder in PYTHONPATH.')
HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # The package need not be installed.
import speed  # noqa: E402

# the most important first, since compiling may take all the time there is
COMPILED = (
    speed.BASELINE, 'cmhsa_conv_k5', 'cmhsa_attn_soft', 'cmhsa_attn, 16 heads of 96, hard_attn', 'cmhsa_attn',
    'cmhsa_attn, qk_dim=768 (the paper)')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('folder', type=Path, nargs='?', default=HERE / 'gpu', help='of what it writes (default: %(default)s)')
    add('--data-dir', type=Path, help='CIFAR-10, for the trainings: train/CLASS/* and validation/CLASS/*')
    add('--epochs', type=int, default=200, help='of a training (default: %(default)s)')
    add('--minutes', type=float, default=40, help='whole time (default: %(default)s)')
    add('--quick', action='store_true', help='the smallest form of everything, on a CPU too: is this script in order?')
    args = parser.parse_args()
    if not (torch.cuda.is_available() or args.quick):
        sys.exit('There is no CUDA GPU here.')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no part outlives this script
    args.folder = args.folder / 'quick' if args.quick else args.folder
    start, device = time.monotonic(), 'cuda' if torch.cuda.is_available() else 'cpu'
    args.folder.mkdir(parents=True, exist_ok=True)
    # The fixtures of the other tests need more packages than these tests.
    tests = [sys.executable, '-m', 'pytest', '-v', '--tb=short', '--durations=5', '--noconftest', '-p',
             'no:cacheprovider', str(ROOT / 'tests' / 'test_cuda.py')]
    measure = [sys.executable, str(HERE / 'speed.py'), '--amp', '--folder', str(args.folder)]
    train = [sys.executable, str(ROOT / 'experiments' / 'hybrid_phase2.py'), '--seeds', '1', '--workers', '1',
             '--data-dir', str(args.data_dir), '--output', str(args.folder / 'trainings')]
    full = ['--images', '49000', '--held-out', '1000', '--epochs', str(args.epochs), '--batch-size', '512']
    parts = {  # by title, with the share of the whole time by which they end
        'Tests': (0.15, tests),
        'Speed': (0.25, measure),
        'Speed, compiled': (
            0.4 if args.data_dir else 1., [*measure, '--compile', '--rounds', '1', '--models', *COMPILED])}
    trainings = {row: (1., [*train, *full, '--rows', row]) for row in ROWS}
    if args.quick:
        small = ['--device', device, '--batch-size', '1', '--steps', '1', '--rounds', '1', '--models', 'cmhsa_conv_k3']
        parts = {'Tests': (0.4, [*tests, '-k', 'rewrite_is_exact']), 'Speed': (0.75, [*measure, *small])}
        trainings = {ROWS[1]: (1., [*train, '--quick', '--rows', ROWS[1]])}
    if args.data_dir:
        parts.update(trainings)
    memory = args.folder / 'status.json'
    statuses = json.loads(memory.read_text()) if memory.exists() else {}
    report = ['# On a GPU']
    for title, (until, command) in parts.items():
        log = args.folder / f'{title}.txt'
        if statuses.get(title) != 'passed':
            statuses[title] = run(command, start + 60 * args.minutes * until - time.monotonic(), log, device)
            memory.write_text(json.dumps(statuses))
        report += [f'## {title}: {statuses[title]}', '\n'.join(['```', *log.read_text().splitlines()[-40:], '```'])]
        tables = [speed.table(json.loads(path.read_text())) for path in sorted(args.folder.glob('*bfloat16*.json'))]
        (args.folder / 'report.md').write_text('\n\n'.join([*report, *tables]))
    print((args.folder / 'report.md').read_text())
    failed = ', '.join(title for title in parts if statuses[title] != 'passed')
    if failed:
        sys.exit(f'Failed: {failed}. See {args.folder}.')


def run(command: List[str], seconds: float, log: Path, device: str) -> str:
    """Run a part for so many seconds at most, and return what became of it."""
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    env = {**os.environ, 'PYTHONPATH': path, 'PYTHONUNBUFFERED': '1', 'TORCH_DEVICE': device}
    with log.open('w') as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        return 'failed' if process.wait(max(seconds, 0)) else 'passed'
    except subprocess.TimeoutExpired:
        return 'stopped'
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun ends its own when it is asked to
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


if __name__ == '__main__':
    main()
