"""How wide should the heads of phase 2 be? Accuracy against training time: python experiments/thin_heads.py

The task is digits at a random place on a canvas, 400 training images, kernels 3 and 5, 5 seeds.
Every choice of heads starts from the same phase-1 models, converted exactly, and has its own best learning rate by the
validation images of one more seed; the test images choose nothing. About 45 minutes on 2 cores.

The output folder gets the table and the plot. What was stopped goes on where it stopped.
"""
import argparse
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import timm
import torch
from common.images import BATCH_SIZE, CANVAS, OPTIONS
from common.options import add_num_train, add_repeats, make_parser, positive_float, positive_int
from common.report import make_figure, markdown_table, plot_mean_and_range, spread, write_whole
from common.runs import Result, Run, best_rates, run_all, top1
from common.timing import step_seconds
from torch import nn

import timm_cmhsa
from timm_cmhsa.construction import plan_heads

KERNELS = (3, 5)
TUNING_SEED = 100
SHAPE: Dict[str, Any] = dict(patch_size=8, in_chans=1, hidden_chans=1, depth=4)


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

Results = Dict[Tuple[Heads, int], List[Result]]  # by heads and kernel


def main() -> None:
    args = parse_args()
    candidates = {heads.title: {rate: [plan(heads, kernel, rate, TUNING_SEED, args) for kernel in KERNELS]
                                for rate in args.learning_rates} for heads in CHOICES}
    rates = best_rates(candidates, args.output / 'runs')
    runs = {(heads, kernel): [plan(heads, kernel, rates[heads.title], seed, args)
                              for seed in range(args.seeds)] for heads in CHOICES for kernel in KERNELS}
    results = run_all(runs, args.output / 'runs', 'heads')
    seconds = time_shapes(args.repeats)
    table = markdown(results, rates, seconds)
    write_whole(args.output / 'thin_heads.md', table)
    print(table)
    plot(results, seconds, args.num_train // BATCH_SIZE, args.output / 'thin_heads.png')


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 'thin_heads', seeds=5)
    add = parser.add_argument
    add_num_train(parser)
    add('--epochs', type=positive_int, default=80, help='epochs of each phase (default: %(default)s)')
    add('--learning-rates', type=positive_float, nargs='+', default=[1e-3, 2e-3, 4e-3],
        help='that every choice of heads chooses from (default: %(default)s)')
    add_repeats(parser, 50)
    return parser.parse_args()


def plan(heads: Heads, kernel: int, rate: float, seed: int, args: argparse.Namespace) -> Run:
    """Plan phase 2 with these heads, from phase 1 with this kernel."""
    conv = f'cmhsa_conv_k{kernel}'
    options = dict(OPTIONS, img_size=CANVAS, epochs=args.epochs)
    phase1 = Run(conv, args.num_train, seed, dict(options, lr=3e-3, model=conv, model_kwargs=SHAPE))
    return Run(
        f'K = {kernel}, heads {heads.title}', args.num_train, seed, dict(options, lr=rate), after=phase1,
        rewrite=partial(timm_cmhsa.convert_model, architecture='cmhsa_attn', **shape_of(heads, kernel)),
        curves=('top1',))


def shape_of(heads: Heads, kernel: int) -> Dict[str, Any]:
    """Return number and width of the heads of a phase-2 model: as many as the kernel needs, and the spare ones."""
    conv = nn.Conv2d(SHAPE['hidden_chans'], SHAPE['hidden_chans'], kernel, padding=kernel // 2)
    needed = plan_heads(conv, SHAPE['patch_size'], CANVAS // SHAPE['patch_size'], head_dim=heads.head_dim)
    return dict(num_heads=len(needed) + heads.spare, head_dim=heads.head_dim)


def shape(heads: Heads, kernel: int) -> str:
    """Return number and width of the heads, such as '9 of d'."""
    return f"{shape_of(heads, kernel)['num_heads']} of {heads.head_dim or 'd'}"


def time_shapes(repeats: int) -> Dict[str, float]:
    """Measure the seconds of a training step of phase 2 with all heads, by `shape`."""
    models: Dict[str, nn.Module] = {
        shape(heads, kernel): timm.create_model(
            'cmhsa_attn', img_size=CANVAS, num_classes=10, **SHAPE, **shape_of(heads, kernel))
        for heads in CHOICES for kernel in KERNELS}
    return step_seconds(models, torch.randn(BATCH_SIZE, SHAPE['in_chans'], CANVAS, CANVAS), repeats)


def markdown(results: Results, rates: Dict[str, float], seconds: Dict[str, float]) -> str:
    head = [f'K = {kernel}, {what}' for kernel in KERNELS for what in ('heads', 'start', 'end', 'step, ms')]
    rows = []
    for heads in CHOICES:
        cells = [heads.title, f'{rates[heads.title]:g}']
        for kernel in KERNELS:
            seeds, title = results[heads, kernel], shape(heads, kernel)
            cells += [title, *(spread(top1(seeds, when)) for when in ('before', 'test')), f'{1e3 * seconds[title]:.1f}']
        rows.append(cells)
    return markdown_table(['heads of phase 2', 'learning rate', *head], rows) + (
        f'\nTop-1 on the test images, mean ± standard deviation over {len(seeds)} seeds, %, before and after phase 2; '
        'median time of a training step.\n')


def plot(results: Results, seconds: Dict[str, float], steps: int, path: Path) -> None:
    """Draw validation accuracy over the training time of phase 2: mean and range of the seeds."""
    figure, axes = make_figure((10, 4), len(KERNELS), sharey=True)
    for axis, kernel in zip(axes, KERNELS):
        for heads in CHOICES:
            seeds, step = results[heads, kernel], seconds[shape(heads, kernel)]
            times = [epoch * steps * step for epoch in seeds[0]['curves']['epoch']]
            curves = [result['curves']['top1'] for result in seeds]
            plot_mean_and_range(axis, times, curves, label=heads.title)
        axis.set(title=f'K = {kernel}', xlabel='training time of phase 2, s')
    axes[0].set_ylabel('top-1 accuracy, validation, %')
    axes[-1].legend()
    figure.savefig(path)


if __name__ == '__main__':
    main()
