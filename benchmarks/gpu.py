"""What only a GPU can show, within ten minutes: python benchmarks/gpu.py [FOLDER]

Runs the tests of tests/test_cuda.py, then benchmarks/speed.py and benchmarks/resolution.py in bfloat16. Writes
report.md, log.txt and JSON into the folder, after each part. A part that fails or takes too long does not stop the
next, and time that it leaves is the next one's. Speed goes on from what a stopped run of the same folder has measured.
Ends with 2 where there is no CUDA GPU, with 1 where a part did not pass.
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
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # The package need not be installed.
import resolution  # noqa: E402
import speed  # noqa: E402

# the most important first, since compiling may take all the time there is
COMPILED = (
    speed.BASELINE, 'cmhsa_conv_k5', 'cmhsa_attn_soft', 'cmhsa_attn, 16 heads of 96, hard_attn', 'cmhsa_attn',
    'cmhsa_attn, qk_dim=768 (the paper)')


class Part(NamedTuple):
    title: str
    until: float  # share of the whole time by which it ends
    command: List[str]
    data: Optional[Path] = None
    table: Callable[[Dict[str, Any]], str] = speed.table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('folder', type=Path, nargs='?', default=HERE / 'gpu', help='of what it writes (default: %(default)s)')
    add('--minutes', type=float, default=9.5, help='whole time (default: %(default)s)')
    add('--quick', action='store_true', help='the smallest form of everything, on a CPU too: is this script in order?')
    args = parser.parse_args()
    if not (torch.cuda.is_available() or args.quick):
        print('There is no CUDA GPU here.', file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no part outlives this script
    start = time.monotonic()
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    args.folder.mkdir(parents=True, exist_ok=True)
    results = {'about': speed.about(' '.join(['python', *sys.argv]), argparse.Namespace(device=device)), 'parts': {}}
    parts = quick_parts(args.folder, device) if args.quick else all_parts(args.folder)
    log = args.folder / 'log.txt'
    log.write_text('')
    for part in parts:
        limit = start + 60 * args.minutes * part.until - time.monotonic()
        results['parts'][part.title] = run(part, limit, log, device)
        (args.folder / 'gpu.json').write_text(json.dumps(results, indent=1))
        (args.folder / 'report.md').write_text(report(results, parts))
    print(report(results, parts))
    failed = [title for title, result in results['parts'].items() if result['status'] != 'passed']
    if failed:
        sys.exit(f'Failed: {", ".join(failed)}. See {log}.')


def all_parts(folder: Path) -> List[Part]:
    tests = [sys.executable, '-m', 'pytest', '-v', '--tb=short', '--durations=5']
    # The fixtures of the other tests need more packages than these tests.
    tests += ['--noconftest', '-p', 'no:cacheprovider', str(ROOT / 'tests' / 'test_cuda.py')]
    measure = [sys.executable, str(HERE / 'speed.py'), '--amp', '--folder', str(folder)]
    grids = [sys.executable, str(HERE / 'resolution.py'), '--amp', '--batch-size', '8']
    compiled = ['--compile', '--rounds', '1', '--models', *COMPILED]
    data = folder / 'resolution.json'
    return [
        Part('Tests', 0.4, tests),
        Part('Speed', 0.7, measure, folder / 'cuda-bfloat16-batch128.json'),
        Part('As the grid grows', 0.77, [*grids, '--output', str(data)], data, resolution.table),
        Part('Operators', 0.82, [*measure, '--profile', 'cmhsa_attn', 'cmhsa_attn_soft']),
        Part('Speed, compiled', 1., [*measure, *compiled], folder / 'cuda-bfloat16-batch128-compile.json'),
    ]


def quick_parts(folder: Path, device: str) -> List[Part]:
    """Return the parts but for the compiled one, each with little to do."""
    tests, measure, grids, operators, _ = all_parts(folder)
    model, small = 'cmhsa_conv_k3', ['--device', device, '--batch-size', '1']
    layers = resolution.BASELINE, 'cmhsa_attn_soft'
    return [
        tests._replace(command=[*tests.command, '-k', 'rewrite_is_exact']),
        measure._replace(
            command=[*measure.command, *small, '--steps', '1', '--rounds', '1', '--models', model],
            data=folder / f'{device}-bfloat16-batch1.json'),
        grids._replace(command=[*grids.command, *small, '--repeats', '1', '--grids', '2', '--layers', *layers]),
        operators._replace(command=[*operators.command[:-2], model, *small]),
    ]


def run(part: Part, limit: float, log: Path, device: str) -> Dict[str, Any]:
    """Run a part for so many seconds at most, and return what became of it and the end of its output."""
    print(f'{part.title}: at most {max(limit, 0):.0f} s', flush=True)
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    env = {**os.environ, 'PYTHONPATH': path, 'PYTHONUNBUFFERED': '1', 'TORCH_DEVICE': device}
    start, offset = time.monotonic(), log.stat().st_size
    with log.open('a') as output:
        process = subprocess.Popen(
            part.command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        status = 'failed' if process.wait(max(limit, 0)) else 'passed'
    except subprocess.TimeoutExpired:
        status = 'stopped'
    finally:
        end(process)
    with log.open() as output:
        output.seek(offset)
        lines = output.read().splitlines()
    return {'status': status, 'seconds': time.monotonic() - start, 'output': lines[-40:]}


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started; torchrun ends its own when it is asked to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def report(results: Dict[str, Any], parts: List[Part]) -> str:
    made = results['about']
    keys = 'python', 'torch', 'timm', 'timm_cmhsa', 'commit'
    versions = ', '.join(f"{key} {made[key] or 'unknown'}" for key in keys)
    lines = ['# On a GPU\n', f"`{made['command']}`: {made['hardware']}; {versions}.\n"]
    lines += ['| part | | seconds |', '|---|---|---:|']
    lines += [f"| {title} | {part['status']} | {part['seconds']:.0f} |" for title, part in results['parts'].items()]
    for part in parts[:len(results['parts'])]:
        result = results['parts'][part.title]
        lines.append(f'\n## {part.title}\n')
        if part.data is not None and part.data.exists():
            lines.append(part.table(json.loads(part.data.read_text())))
        if part.data is None or result['status'] != 'passed':
            lines += ['```', *result['output'], '```']
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    main()
