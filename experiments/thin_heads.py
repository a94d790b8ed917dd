"""How wide should the heads of phase 2 be? Accuracy against training time: python experiments/thin_heads.py

The task is digits at a random place on a canvas, 400 training images, kernels 3 and 5, 5 seeds.
Every choice of heads starts from the same phase-1 models, converted exactly, and has its own best learning rate of
1e-3, 2e-3 and 4e-3 by the validation images of one more seed; the test images choose nothing. At most 45 minutes on 2
cores. The output folder gets the table and the plot.
"""
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import timm
import torch
from common.images import BATCH_SIZE, CANVAS, OPTIONS
from common.options import make_run_parser
from common.report import make_figure, markdown_table, plot_mean_and_range, show, spread, top1
from common.runs import Result, Run, replicate, run_all
from common.timing import step_seconds
from torch import nn

import timm_cmhsa
from timm_cmhsa.construction import plan_heads

KERNELS = (3, 5)
SHAPE: Dict[str, Any] = dict(patch_size=8, in_chans=1, hidden_chans=1, depth=4)


class Heads(NamedTuple):
    """Heads of this width (None: that of a token), as many as the kernel needs, and some to spare."""
    title: str
    lr: float
    head_dim: Optional[int] = None
    spare: int = 0


CHOICES = (
    Heads('as wide as a token', 4e-3),
    Heads('a quarter as wide', 4e-3, head_dim=16),
    Heads('an eighth as wide', 2e-3, head_dim=8),
    Heads('an eighth as wide, 6 spare', 4e-3, head_dim=8, spare=6),
)

Results = Dict[Tuple[Heads, int], List[Result]]  # by heads and kernel


def main() -> None:
    args = make_run_parser(__doc__, 'thin_heads', seeds=5).parse_args()
    results = run_all(replicate({each: plan(*each) for each in product(CHOICES, KERNELS)}, args), args)
    create = partial(timm.create_model, 'cmhsa_attn', img_size=CANVAS, num_classes=10, **SHAPE)
    models: Dict[str, nn.Module] = {shape(*each): create(**shape_of(*each)) for each in results}
    seconds = step_seconds(models, torch.randn(BATCH_SIZE, SHAPE['in_chans'], CANVAS, CANVAS), 20)
    show(markdown(results, seconds), args.output / 'thin_heads.md')
    plot(results, seconds, args.output / 'thin_heads.png')


def plan(heads: Heads, kernel: int) -> Run:
    """Plan phase 2 with these heads, from phase 1 with this kernel."""
    conv, options = f'cmhsa_conv_k{kernel}', dict(OPTIONS, img_size=CANVAS, epochs=80)
    return Run(
        f'K = {kernel}, heads {heads.title}', 400, dict(options, lr=heads.lr),
        after=Run(conv, 400, dict(options, lr=3e-3, model=conv, model_kwargs=SHAPE)),
        rewrite=partial(timm_cmhsa.convert_model, architecture='cmhsa_attn', **shape_of(heads, kernel)))


def shape_of(heads: Heads, kernel: int) -> Dict[str, Any]:
    """Return number and width of the heads of a phase-2 model: as many as the kernel needs, and the spare ones."""
    conv = nn.Conv2d(SHAPE['hidden_chans'], SHAPE['hidden_chans'], kernel, padding=kernel // 2)
    needed = plan_heads(conv, SHAPE['patch_size'], CANVAS // SHAPE['patch_size'], head_dim=heads.head_dim)
    return dict(num_heads=len(needed) + heads.spare, head_dim=heads.head_dim)


def shape(heads: Heads, kernel: int) -> str:
    """Return number and width of the heads, such as '9 of d'."""
    return f"{shape_of(heads, kernel)['num_heads']} of {heads.head_dim or 'd'}"


def markdown(results: Results, seconds: Dict[str, float]) -> str:
    head = [f'K = {kernel}, {what}' for kernel in KERNELS for what in ('heads', 'start', 'end', 'step, ms')]
    rows = []
    for heads in CHOICES:
        cells = [heads.title, f'{heads.lr:g}']
        for kernel in KERNELS:
            seeds, title = results[heads, kernel], shape(heads, kernel)
            cells += [title, *(spread(top1(seeds, when)) for when in ('before', 'test')), f'{1e3 * seconds[title]:.1f}']
        rows.append(cells)
    return markdown_table(['heads of phase 2', 'learning rate', *head], rows) + (
        f'\nTop-1 on the test images, mean ± standard deviation over {len(seeds)} seeds, %, before and after phase 2; '
        'median time of a training step.\n')


def plot(results: Results, seconds: Dict[str, float], path: Path) -> None:
    """Draw validation accuracy over the training time of phase 2: mean and range of the seeds."""
    figure, axes = make_figure((10, 4), len(KERNELS), sharey=True)
    for axis, kernel in zip(axes, KERNELS):
        for heads in CHOICES:
            seeds, step = results[heads, kernel], seconds[shape(heads, kernel)]
            times = [epoch * seeds[0]['num_train'] // BATCH_SIZE * step for epoch in seeds[0]['curves']['epoch']]
            curves = [result['curves']['top1'] for result in seeds]
            plot_mean_and_range(axis, times, curves, label=heads.title)
        axis.set(title=f'K = {kernel}', xlabel='training time of phase 2, s')
    axes[0].set_ylabel('top-1 accuracy, validation, %')
    axes[-1].legend()
    figure.savefig(path)


if __name__ == '__main__':
    main()
