"""How wide should the heads of phase 2 be? Accuracy against training time: python examples/thin_heads.py

The task of two_phase.py (digits at a random place on a canvas, 400 training images), kernels 3 and 5, 5 seeds. Every
choice of heads starts from the same phase-1 models, converted exactly, and has its own best learning rate by the
validation images of one more seed; the test images choose nothing. About 45 minutes on 2 cores.

The output folder gets the table and the plot. What was stopped goes on where it stopped.
"""
import argparse
import statistics
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import matplotlib
import timm
import torch
from digits import CANVAS
from runs import Run, run_all
from table1 import spread
from timing import training_times
from torch import nn
from two_phase import BATCH_SIZE, SHAPE, Stage

from timm_cmhsa.construction import plan_heads

matplotlib.use('Agg')
from matplotlib import pyplot as plt

KERNELS = (3, 5)
NUM_TRAIN = 400
TUNING_SEED = 100


class Heads(NamedTuple):
    """Heads of this width (None: that of a token), as many as the kernel needs, and some to spare."""
    title: str
    head_dim: Optional[int] = None
    spare: int = 0


CHOICES = (
    Heads('as wide as a token'),
    Heads('a quarter as wide', head_dim=16),
    Heads('an eighth as wide', head_dim=8),
    Heads('an eighth as wide, 6 spare', head_dim=8, spare=6),
)


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rates = {heads: best_rate(heads, args) for heads in CHOICES}
    runs = [plan(heads, kernel, rates[heads], seed, args)
            for heads in CHOICES for kernel in KERNELS for seed in range(args.seeds)]
    results = iter(run_all(runs, args.output / 'runs', 'heads'))
    by_choice = {heads: {kernel: [next(results) for _ in range(args.seeds)] for kernel in KERNELS}
                 for heads in CHOICES}
    seconds = step_seconds()
    table = markdown(by_choice, rates, seconds)
    (args.output / 'thin_heads.md').write_text(table)
    print(table)
    plot(by_choice, seconds, args.output / 'thin_heads.png')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--seeds', type=int, default=5, help='number of seeds (default: %(default)s)')
    add('--epochs', type=int, default=80, help='epochs of each phase (default: %(default)s)')
    add('--output', type=Path, default=Path('output/thin_heads'), help='folder (default: %(default)s)')
    add('--learning-rates', type=float, nargs='+', default=[1e-3, 2e-3, 4e-3],
        help='that every choice of heads chooses from (default: %(default)s)')
    args = parser.parse_args()
    if args.seeds < 1 or args.epochs < 1 or min(args.learning_rates) <= 0:
        parser.error('--seeds, --epochs and --learning-rates must be positive')
    return args


def best_rate(heads: Heads, args: argparse.Namespace) -> float:
    if len(args.learning_rates) == 1:
        return args.learning_rates[0]
    runs = [plan(heads, kernel, rate, TUNING_SEED, args) for rate in args.learning_rates for kernel in KERNELS]
    results = iter(run_all(runs, args.output / 'runs', f'learning rates, {heads.title}'))
    top1 = {rate: statistics.mean(next(results)['validation']['top1'] for _ in KERNELS)
            for rate in args.learning_rates}
    print(heads.title, ', '.join(f'{rate:g}: {accuracy:.1f} %' for rate, accuracy in top1.items()))
    return max(top1, key=lambda rate: top1[rate])


def plan(heads: Heads, kernel: int, rate: float, seed: int, args: argparse.Namespace) -> Run:
    """Phase 2 with these heads, from phase 1 with this kernel."""
    conv = f'cmhsa_conv_k{kernel}'
    phase1 = Stage('phase1', conv, conv, SHAPE, args.epochs, lr=3e-3)
    phase2 = Stage('phase2', heads.title, 'cmhsa_attn', model_args(heads, kernel), args.epochs, lr=rate)
    return Run(phase2, NUM_TRAIN, seed, phase1=Run(phase1, NUM_TRAIN, seed))


def model_args(heads: Heads, kernel: int) -> Dict[str, Any]:
    conv = nn.Conv2d(SHAPE['hidden_chans'], SHAPE['hidden_chans'], kernel, padding=kernel // 2)
    needed = plan_heads(conv, SHAPE['patch_size'], CANVAS // SHAPE['patch_size'], head_dim=heads.head_dim)
    return dict(SHAPE, num_heads=len(needed) + heads.spare, head_dim=heads.head_dim)


def step_seconds() -> Dict[str, float]:
    """Seconds of a training step of phase 2 with all heads, by `shape`."""
    args = [model_args(heads, kernel) for heads in CHOICES for kernel in KERNELS]
    models: Dict[str, nn.Module] = {shape(each): timm.create_model('cmhsa_attn', **each) for each in args}
    times = training_times(models, torch.randn(BATCH_SIZE, SHAPE['in_chans'], CANVAS, CANVAS), repeats=50)
    return {title: statistics.median(values) for title, values in times.items()}


def shape(args: Dict[str, Any]) -> str:
    return f"{args['num_heads']} of {args['head_dim'] or 'd'}"


def markdown(
        by_choice: Dict[Heads, Dict[int, List[Dict[str, Any]]]],
        rates: Dict[Heads, float],
        seconds: Dict[str, float],
) -> str:
    columns = [f'K = {kernel}, {what}' for kernel in KERNELS for what in ('heads', 'start', 'end', 'step, ms')]
    lines = ['| ' + ' | '.join(['heads of phase 2', 'learning rate', *columns]) + ' |',
             '|---|' + '---:|' * (len(columns) + 1)]
    for heads, results in by_choice.items():
        cells = [heads.title, f'{rates[heads]:g}']
        for kernel in KERNELS:
            title = shape(model_args(heads, kernel))
            cells += [title, *(spread([result[when]['top1'] for result in results[kernel]])
                               for when in ('before', 'test')), f'{1e3 * seconds[title]:.1f}']
        lines.append('| ' + ' | '.join(cells) + ' |')
    num_seeds = len(by_choice[CHOICES[0]][KERNELS[0]])
    return '\n'.join(lines) + (
        f'\n\nTop-1 on the test images, mean ± standard deviation over {num_seeds} seeds, %, before and after phase 2; '
        'median time of a training step.\n')


def plot(
        by_choice: Dict[Heads, Dict[int, List[Dict[str, Any]]]],
        seconds: Dict[str, float],
        path: Path,
) -> None:
    """Validation accuracy over the training time of phase 2: mean and range of the seeds."""
    figure, axes = plt.subplots(1, len(KERNELS), figsize=(10, 4), layout='constrained', sharey=True)
    for axis, kernel in zip(axes, KERNELS):
        for heads, results in by_choice.items():
            curves = [[row['top1'] for row in result['history']] for result in results[kernel]]
            steps = [row['epoch'] * (NUM_TRAIN // BATCH_SIZE) for row in results[kernel][0]['history']]
            times = [step * seconds[shape(model_args(heads, kernel))] for step in steps]
            axis.plot(times, [statistics.mean(values) for values in zip(*curves)], label=heads.title)
            axis.fill_between(times, [min(v) for v in zip(*curves)], [max(v) for v in zip(*curves)], alpha=0.15)
        axis.set(title=f'K = {kernel}', xlabel='training time of phase 2, s')
        axis.grid(alpha=0.3)
    axes[0].set_ylabel('top-1 accuracy, validation, %')
    axes[-1].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == '__main__':
    main()
