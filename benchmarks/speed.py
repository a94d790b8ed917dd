"""Time, memory and FLOP/s of our models beside timm's: python benchmarks/speed.py

A training step (forward, backward, AdamW) and an inference batch of every model and form, in rounds, so that a drift of
the machine meets all alike. Writes benchmarks/speed/SETTING.json, round by round (stopped, it goes on from there), and
the tables of all that is in that folder into benchmarks/RESULTS.md. Linux only: a CPU's peak memory is what the
operating system says.
"""
import argparse
import gc
import itertools
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Dict

import timm
import torch
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.collect_env import get_nvidia_driver_version, run as run_command
from torch.utils.flop_counter import FlopCounterMode

import timm_cmhsa

sys.path.insert(0, str(Path(__file__).parents[1] / 'experiments'))
from common.options import positive_int
from common.timing import inference_step, processor, timed, training_step

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
    'cmhsa_attn, 16 heads of 96, hard_attn': THIN,
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
    setting = f"{args.device}-{'bfloat16' if args.amp else 'float32'}-batch{args.batch_size}{'-compile' * args.compile}"
    path = args.folder / f'{setting}.json'
    results = json.loads(path.read_text()) if path.exists() else {'about': about(args), 'measured': {}}
    if results['about'] != about(args):
        raise SystemExit(f'{path} is of another machine, other versions or other options: move it away first.')
    path.parent.mkdir(exist_ok=True)
    failed = []
    for number in range(args.rounds):
        models = args.models[::(-1) ** number]  # there and back, against a steady drift
        for phase, model in itertools.product(PHASES, models):
            measured = results['measured'].setdefault(model, {}).setdefault(phase, [])
            if len(measured) > number:
                continue
            try:
                measured.append(measure_apart(model, phase, args))
            except Exception:  # such as too little memory for one model
                traceback.print_exc()
                failed.append(f'{phase} of {model}')
                continue
            seconds = statistics.median(measured[-1]['seconds'])
            print(f'round {number + 1}, {phase}, {model}: {1e3 * seconds:.0f} ms', flush=True)
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
    add('--batch-size', type=positive_int, help='images (default: 128 on a GPU, 32 on the CPU)')
    add('--steps', type=positive_int, help='timed steps of a round (default: 20 on a GPU, 2 on the CPU)')
    add('--rounds', type=positive_int, default=2, help='default: %(default)s')
    add('--amp', action='store_true', help='autocast to bfloat16')
    add('--compile', action='store_true', help='torch.compile')
    add('--models', nargs='+', choices=MODELS, default=list(MODELS), metavar='MODEL', help=f'default: all of {NAMES}')
    add('--folder', type=Path, default=FOLDER, help='of the JSON; any other one leaves RESULTS.md as it is')
    args = parser.parse_args()
    cpu = args.device == 'cpu'
    args.batch_size = args.batch_size or (32 if cpu else 128)
    args.steps = args.steps or (2 if cpu else 20)
    return args


def about(args: argparse.Namespace) -> Dict[str, Any]:
    """Return what the figures hold for."""
    options = f'--device {args.device} --batch-size {args.batch_size} --steps {args.steps}'
    options += ' --amp' * args.amp + ' --compile' * args.compile
    git = 'git log -1 --format=%h -- ../timm_cmhsa 2>/dev/null'
    hardware = f'{processor()}, {torch.get_num_threads()} threads' if args.device == 'cpu' else (
        f'{torch.cuda.get_device_name(args.device)}, driver {get_nvidia_driver_version(run_command)}, '
        f'CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}')
    return dict(
        command=f'python benchmarks/speed.py {options}', hardware=hardware,
        commit=subprocess.run(git, shell=True, stdout=subprocess.PIPE, text=True, cwd=HERE).stdout.strip(),
        python=platform.python_version(), torch=str(torch.__version__), timm=timm.__version__,
        timm_cmhsa=timm_cmhsa.__version__)


def measure_apart(title: str, phase: str, args: argparse.Namespace) -> Dict[str, Any]:
    """Measure so that nothing is left of other measurements: on a CPU in a new process.

    A GPU's allocator tells peaks apart, and there, starting a process would take longer than to measure.
    """
    if args.device == 'cpu':
        with ProcessPoolExecutor(1, get_context('spawn')) as pool:
            return pool.submit(measure, title, phase, args).result()
    torch.compiler.reset()
    return measure(title, phase, args)


def measure(title: str, phase: str, args: argparse.Namespace) -> Dict[str, Any]:
    """Return seconds of every timed step, peak memory beyond what was there before the model, and operations."""
    torch.backends.cudnn.benchmark = True
    images = torch.randn(args.batch_size, 3, 224, 224, device=args.device).to(memory_format=torch.channels_last)
    before = reset_peak(args.device)
    with torch.device(args.device):
        model = create_for(title, phase).to(memory_format=torch.channels_last)  # the fastest way for CNNs
    if args.compile:
        model.compile()
    step = (training_step if phase == 'training' else inference_step)(model, images, args.amp)
    reset_peak(args.device)  # what making the model took
    warmup = 1 if args.device == 'cpu' and not args.compile else 5
    seconds = [timed(step) for _ in range(warmup + args.steps)][warmup:]
    peak = peak_bytes(args.device) - before
    return dict(seconds=seconds, peak_bytes=peak, operations=operations(title, phase, args.batch_size))


def create_for(title: str, phase: str) -> nn.Module:
    model = timm.create_model(title.split(',')[0], **MODELS[title])
    if 'hard_attn' in title:
        for attn in (block.attn for block in model.blocks):
            for head in range(attn.num_heads):
                attn.rel_pos.point_head(head, [(head // 4 - 1, head % 4 - 1)], sharpness=50.)
            attn.qkv.weight.data[:attn.widths[0]] = 0
        model.set_hard_attn()
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


def table(results: Dict[str, Any]) -> str:
    """Return medians, their ratios to the baseline, and two phases of equal length."""
    made = results['about']
    lines = [f"`{made['command']}`: {made['hardware']}; Python {made['python']}, torch {made['torch']}, timm "
             f"{made['timm']}, commit {made['commit'] or 'unknown'}. Ratios are to {BASELINE}.\n"]
    for phase in PHASES:
        lines += [f'| {phase} | ms | fastest to slowest | time | operations | GFLOP/s | peak memory, MiB | memory |',
                  '|---|---:|---:|---:|---:|---:|---:|---:|']
        medians: Dict[str, Any] = {}
        for model in MODELS:
            if rounds := results['measured'].get(model, {}).get(phase):
                seconds = [value for one in rounds for value in one['seconds']]
                peak = statistics.median(one['peak_bytes'] for one in rounds)
                medians[model] = statistics.median(seconds), rounds[0]['operations'], peak
                median, count, _ = medians[model]
                base = medians.get(BASELINE, 3 * [math.nan])
                times, counts, memory = (f'{value / each:.2f}x' for value, each in zip(medians[model], base))
                lines.append(
                    f'| {model} | {1e3 * median:.0f} | {1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f} | {times} '
                    f'| {counts} | {1e-9 * count / median:.0f} | {peak / 2 ** 20:.0f} | {memory} |')
        for title, pair in TWO_PHASES.items():
            if phase == 'training' and {BASELINE, *pair} <= {*medians}:
                ratio = statistics.mean(medians[model][0] for model in pair) / medians[BASELINE][0]
                lines.append(f'| {title} | | | {ratio:.2f}x | | | | |')
        lines.append('')
    return '\n'.join(lines)


def update_results(path: Path) -> None:
    """Write all tables between the marks of a document."""
    tables = [table(json.loads(file.read_text())) for file in sorted(FOLDER.glob('*.json'))]
    before, _, rest = path.read_text().partition(START)
    _, _, after = rest.partition(END)
    path.write_text(before + START + '\n' + '\n'.join(tables) + END + after)


if __name__ == '__main__':
    main()
