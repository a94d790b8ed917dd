"""Time, memory and FLOP/s of our models beside timm's: python benchmarks/speed.py

A training step (forward, backward, AdamW) and an inference batch of every model and form, in rounds, so that a drift of
the machine meets all alike. Writes benchmarks/speed/SETTING.json, round by round (stopped, it goes on from there), and
the tables of all that is in that folder into benchmarks/RESULTS.md. Linux only: a CPU's peak memory is what the
operating system says.
"""
import argparse
import gc
import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import timm
import torch
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.collect_env import get_nvidia_driver_version, run as run_command
from torch.utils.flop_counter import FlopCounterMode

import timm_cmhsa

sys.path.insert(0, str(Path(__file__).parents[1] / 'experiments'))
from common.timing import processor, training_step

HERE = Path(__file__).parent
FOLDER = HERE / 'speed'
BASELINE = 'deit_base_patch16_224'
START, END = '<!-- speed: written by benchmarks/speed.py -->\n', '<!-- speed: end -->\n'
PHASES = ('training', 'inference')


THIN = dict(num_heads=16, head_dim=96)  # what hard heads need for 3 x 3 and 5 x 5 convolutions
MODELS: Dict[str, Dict[str, Any]] = {  # arguments by title, which begins with the name
    **{key: {} for key in (BASELINE, 'convit_base', 'resnet50', 'cmhsa_conv_k3', 'cmhsa_conv_k5', 'cmhsa_attn_soft')},
    'cmhsa_attn_soft, qk_dim=16': dict(qk_dim=16),
    'cmhsa_attn_soft, qk_dim=96': dict(qk_dim=96),
    'cmhsa_attn': {},
    'cmhsa_attn, qk_dim=768 (the paper)': dict(qk_dim=768),
    'cmhsa_attn, 16 heads of 96': THIN,
    'cmhsa_attn, 16 heads of 96, hard_attn': dict(THIN, hard_attn=True),
    **{key: {} for key in ('resnet18', 'cmhsa_hybrid_conv_224', 'cmhsa_hybrid_attn_224')},
}
NAMES = ', '.join(f'"{name}"' for name in MODELS)
TWO_PHASES = {  # of equal length
    'two phases, k5, soft': ('cmhsa_conv_k5', 'cmhsa_attn_soft'),
    'two phases, k5, hard_attn': ('cmhsa_conv_k5', 'cmhsa_attn, 16 heads of 96, hard_attn'),
    'two phases, k5, the paper': ('cmhsa_conv_k5', 'cmhsa_attn, qk_dim=768 (the paper)'),
}


def main() -> None:
    args = parse_args()
    if args.measure:
        title, phase = args.measure
        print(json.dumps(measure(title, phase, args)))
        return
    precision = 'bfloat16' if args.amp else 'float32'
    setting = f"{args.device}-{precision}-batch{args.batch_size}{'-compile' if args.compile else ''}"
    path = args.folder / f'{setting}.json'
    results = json.loads(path.read_text()) if path.exists() else {'about': about(args), 'measured': {}}
    if results['about'] != about(args):
        raise SystemExit(f'{path} is of another machine, other versions or other options: move it away first.')
    failed = []
    for number in range(args.rounds):
        for phase in PHASES:
            for model in args.models[::(-1) ** number]:  # there and back, against a steady drift
                measured = results['measured'].setdefault(model, {}).setdefault(phase, [])
                if len(measured) > number:
                    continue
                try:
                    measured.append(measure_apart(model, phase, args))
                except Exception:
                    traceback.print_exc()
                    failed.append(f'{phase} of {model}')
                    continue
                seconds = statistics.median(measured[-1]['seconds'])
                print(f'round {number + 1}, {phase}, {model}: {1e3 * seconds:.0f} ms', flush=True)
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(results, indent=1))
    print(table(results))
    if args.folder == FOLDER:
        update_results(HERE / 'RESULTS.md')
    if failed:
        raise SystemExit(f'Failed, see above: {", ".join(failed)}')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='default: %(default)s')
    add('--batch-size', type=int, help='images (default: 128 on a GPU, 32 on the CPU)')
    add('--steps', type=int, help='timed steps of a round (default: 20 on a GPU, 2 on the CPU)')
    add('--rounds', type=int, default=2, help='default: %(default)s')
    add('--amp', action='store_true', help='autocast to bfloat16')
    add('--compile', action='store_true', help='torch.compile')
    add('--models', nargs='+', default=list(MODELS), metavar='MODEL', help=f'default: all of {NAMES}')
    add('--folder', type=Path, default=FOLDER, help='of the JSON; any other one leaves RESULTS.md as it is')
    add('--measure', nargs=2, metavar=('MODEL', 'PHASE'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    cpu = args.device == 'cpu'
    args.batch_size = args.batch_size or (32 if cpu else 128)
    args.steps = args.steps or (2 if cpu else 20)
    if min(args.batch_size, args.steps, args.rounds) < 1:
        parser.error('--batch-size, --steps and --rounds must be positive')
    if not set(args.models) <= set(MODELS):
        parser.error(f'--models: {", ".join(set(args.models) - set(MODELS))} is none of {NAMES}')
    return args


def about(args: argparse.Namespace) -> Dict[str, Any]:
    """Return what the figures hold for."""
    options = f'--device {args.device} --batch-size {args.batch_size} --steps {args.steps}'
    options += f"{' --amp' if args.amp else ''}{' --compile' if args.compile else ''}"
    git = ['git', 'log', '-1', '--format=%h', '--', str(HERE.parent / 'timm_cmhsa')]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=HERE).stdout.strip() if shutil.which('git') else ''
    hardware = f'{processor()}, {torch.get_num_threads()} threads' if args.device == 'cpu' else (
        f'{torch.cuda.get_device_name(args.device)}, driver {get_nvidia_driver_version(run_command)}, '
        f'CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}')
    return dict(
        command=f'python benchmarks/speed.py {options}', commit=commit, hardware=hardware,
        python=platform.python_version(), torch=str(torch.__version__), timm=timm.__version__,
        timm_cmhsa=timm_cmhsa.__version__)


def measure_apart(title: str, phase: str, args: argparse.Namespace) -> Dict[str, Any]:
    """Measure so that nothing is left of other measurements: on a CPU in a new process.

    A GPU's allocator tells peaks apart, and there, starting a process would take longer than to measure.
    """
    if args.device != 'cpu':
        torch.compiler.reset()
        return measure(title, phase, args)
    command = [sys.executable, *sys.argv, '--measure', title, phase]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def measure(title: str, phase: str, args: argparse.Namespace) -> Dict[str, Any]:
    """Return seconds of every timed step, peak memory beyond what was there before the model, and operations."""
    cpu = args.device == 'cpu'
    images = torch.randn(args.batch_size, 3, 224, 224, device=args.device)
    before = reset_peak(args.device)
    with torch.device(args.device):
        model = create_for(title, phase)
    if not cpu:  # the fastest way for CNNs
        torch.backends.cudnn.benchmark = True
        images, model = images.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    step = training_step(model, images, args.amp) if phase == 'training' else inference_step(model, images, args.amp)
    reset_peak(args.device)  # what making the model took
    for _ in range(1 if cpu and not args.compile else 5):
        step()
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak = peak_bytes(args.device) - before
    return dict(seconds=seconds, peak_bytes=peak, operations=operations(title, phase, args.batch_size))


def create_for(title: str, phase: str) -> nn.Module:
    model = timm.create_model(title.split(',')[0], **MODELS[title])
    return model.train() if phase == 'training' else reparameterize_model(model.eval(), inplace=True)


def reset_peak(device: str) -> int:
    """Forget the peak of memory so far and return the bytes in use now."""
    gc.collect()
    if device != 'cpu':
        # The first matrix products of a process allocate workspaces, which stay.
        nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path('/proc/self/clear_refs').write_text('5')
    return peak_bytes(device)


def peak_bytes(device: str) -> int:
    if device != 'cpu':
        return torch.cuda.max_memory_allocated(device)
    kilobytes = re.findall(r'VmHWM:\s*(\d+) kB', Path('/proc/self/status').read_text())
    return int(kilobytes[0]) * 1024


def inference_step(model: nn.Module, images: torch.Tensor, amp: bool) -> Callable[[], None]:
    @torch.inference_mode()
    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
            model(images)
        if images.device.type != 'cpu':
            torch.accelerator.synchronize(images.device)
    return step


@lru_cache(maxsize=None)
def operations(title: str, phase: str, batch_size: int) -> int:
    """Return the floating-point operations of the matrix products and convolutions of a step."""
    training = phase == 'training'
    model = create_for(title, phase).to('meta')  # what it computes may depend on its weights, so it has some first
    images = torch.randn(batch_size, 3, 224, 224, device='meta')
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(training):
        logits = model(images)
        if training:
            logits.sum().backward()
    return counter.get_total_flops()


def summary(results: Dict[str, Any], model: str, phase: str) -> Optional[Dict[str, Any]]:
    """Return median and range of the seconds, peak memory and operations; None where nothing was measured."""
    measured = results['measured'].get(model, {}).get(phase)
    if not measured:
        return None
    seconds = [value for one in measured for value in one['seconds']]
    return dict(
        median=statistics.median(seconds), range=(min(seconds), max(seconds)),
        peak=statistics.median(one['peak_bytes'] for one in measured), operations=measured[0]['operations'])


def table(results: Dict[str, Any]) -> str:
    """Return medians, their ratios to the baseline, and two phases of equal length."""
    made = results['about']
    models = [model for model in MODELS if model in results['measured']]
    lines = [f"`{made['command']}`: {made['hardware']}; Python {made['python']}, torch {made['torch']}, timm "
             f"{made['timm']}, commit {made['commit'] or 'unknown'}. Ratios are to {BASELINE}.\n"]
    for phase in PHASES:
        lines += [f'| {phase} | ms | fastest to slowest | time | operations | GFLOP/s | peak memory, MiB | memory |',
                  '|---|---:|---:|---:|---:|---:|---:|---:|']
        rows = {model: row for model in models if (row := summary(results, model, phase))}
        base = rows.get(BASELINE)
        for model, row in rows.items():
            seconds, count, memory = (
                f'{row[key] / base[key]:.2f}x' if base else '-' for key in ('median', 'operations', 'peak'))
            low, high = (f'{1e3 * value:.0f}' for value in row['range'])
            lines.append(
                f"| {model} | {1e3 * row['median']:.0f} | {low} to {high} | {seconds} | {count} | "
                f"{1e-9 * row['operations'] / row['median']:.0f} | {row['peak'] / 2 ** 20:.0f} | {memory} |")
        if phase == 'training' and base:
            for title, pair in TWO_PHASES.items():
                if set(pair) <= set(rows):
                    ratio = statistics.mean(rows[model]['median'] for model in pair) / base['median']
                    lines.append(f'| {title} | | | {ratio:.2f}x | | | | |')
        lines.append('')
    return '\n'.join(lines)


def update_results(path: Path) -> None:
    """Write all tables between the marks of a document."""
    tables: List[str] = [table(json.loads(file.read_text())) for file in sorted(FOLDER.glob('*.json'))]
    before, _, rest = path.read_text().partition(START)
    _, _, after = rest.partition(END)
    path.write_text(before + START + '\n' + '\n'.join(tables) + END + after)


if __name__ == '__main__':
    main()
