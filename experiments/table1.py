"""Table 1 of the paper, all eight rows, scaled down to the digits: python experiments/table1.py

Every row is trained on 100, 300 and 900 images with 5 seeds, in at most an hour and a half on 2 cores. All rows see as
many images in training, two-phase rows half of them in each phase. A row's learning rate is its own best of 5e-4 to
4e-3, by the validation images of two more seeds; of two-phase rows that is phase 2's, and phase 1 has the rate of the
row of the first phase alone. (table1_cifar100.py is the same table at the paper's scale.)

The output folder gets the table and the plot.
"""
import statistics
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import timm
import torch
from common.images import BATCH_SIZE, DIGIT, OPTIONS
from common.options import make_run_parser
from common.report import make_figure, markdown_table, seeds_note, show, spread
from common.runs import Run, replicate, run_all
from common.timing import step_seconds
from torch import nn

import timm_cmhsa

SIZES, IMAGES_PER_PHASE = (100, 300, 900), 12600
SHAPE = dict(patch_size=4, in_chans=1, hidden_chans=4, depth=3)
VIT = dict(patch_size=4, in_chans=1, depth=6)
BASE, SMALL = dict(VIT, embed_dim=64, num_heads=4), dict(VIT, embed_dim=32, num_heads=2)

Results = Dict[str, Dict[str, List[Dict[str, float]]]]  # by data and row; one for each seed


class Row(NamedTuple):
    """A row of the table: the model of each phase, with the arguments that scale it down to the digits."""
    title: str
    recipes: Tuple[str, ...]  # of examples/cifar100
    phases: Tuple[Tuple[str, Dict[str, Any]], ...]
    rates: Tuple[float, ...]  # one for each phase
    deit: bool = True  # augmentation and regularisation as DeiT's, on the digits random crops


CONV3, CONV5, ATTN = ('cmhsa_conv_k3', SHAPE), ('cmhsa_conv_k5', SHAPE), ('cmhsa_attn', SHAPE)
CMHSA5 = Row('CMHSA-5', ('cmhsa_conv_k5', 'cmhsa_attn'), (CONV5, ATTN), (4e-3, 2e-3))
ROWS = (
    Row('ViT-base', ('vit_base',), (('vit_base_patch16_224', BASE),), (2e-3,), deit=False),
    Row('DeiT-small', ('deit_small',), (('deit_small_patch16_224', SMALL),), (2e-3,)),
    Row('DeiT-base', ('deit_base',), (('deit_base_patch16_224', BASE),), (1e-3,)),
    Row('CMHSA-3 (1st phase)', ('cmhsa_conv_k3',), (CONV3,), (2e-3,)),
    Row('CMHSA-5 (1st phase)', ('cmhsa_conv_k5',), (CONV5,), (4e-3,)),
    Row('CMHSA (2nd phase)', ('cmhsa_attn',), (ATTN,), (2e-3,)),
    Row('CMHSA-3', ('cmhsa_conv_k3', 'cmhsa_attn'), (CONV3, ATTN), (2e-3, 2e-3)),
    CMHSA5,
)


def main() -> None:
    args = make_run_parser(__doc__, 'table1', seeds=5).parse_args()
    runs = replicate({(size, row.title): plan(row, size) for size in SIZES for row in ROWS}, args)
    done = run_all(runs, args)
    results = {f'{size} images': {row.title: [result['test'] for result in done[size, row.title]] for row in ROWS}
               for size in SIZES}
    show(markdown(results) + seeds_note(args.seeds), args.output / 'table1.md')
    plot(results, args.output / 'table1.png')


def plan(row: Row, size: int) -> Run:
    """Plan the run of a row's last phase, with that of its first if there are two."""
    epochs = IMAGES_PER_PHASE // size * (2 if len(row.phases) == 1 else 1)  # as many images as others in two phases
    (model, model_kwargs), *_ = row.phases
    options = dict(
        OPTIONS, img_size=DIGIT, shift=4, epochs=epochs, lr=row.rates[0], warmup_epochs=max(epochs // 14, 1))
    if not row.deit:
        options.update(shift=0, smoothing=0., weight_decay=0.)
    run = Run(row.title, size, dict(options, model=model, model_kwargs=model_kwargs))
    if len(row.phases) == 2:
        run = run._replace(options=dict(options, lr=row.rates[1]), after=run, rewrite=to_attention)
    return run


def to_attention(model: Any) -> nn.Module:
    """Rewrite phase 1 as the paper does."""
    return timm_cmhsa.convert_model(model, 'cmhsa_attn')


def markdown(results: Results) -> str:
    """Return the table; training times are those of a step relative to ViT-base, two phases as the mean of both."""
    models: Dict[str, nn.Module] = {
        model: timm.create_model(model, img_size=DIGIT, num_classes=10, **model_args)
        for row in ROWS for model, model_args in row.phases}
    of_model = step_seconds(models, torch.randn(BATCH_SIZE, 1, DIGIT, DIGIT), 20)
    seconds = [statistics.mean(of_model[model] for model, _ in row.phases) for row in ROWS]
    head, *rows = table_cells(results, [f'{row.rates[-1]:g}' for row in ROWS], models)
    rows = [[*row, f'{each / seconds[0]:.2f}x'] for row, each in zip(rows, seconds)]
    return markdown_table([*head, 'Training time'], rows)


def table_cells(results: Results, rates: Sequence[str], models: Dict[str, Any]) -> List[List[str]]:
    """Return the cells of the table, the head first: L, N_H, d and d_FFN, learning rates and accuracies."""
    measures = {'top1': 'Top-1', 'top5': 'Top-5'}
    measures = {key: name for key, name in measures.items() if key in next(iter(results.values()))[ROWS[0].title][0]}
    head = ['Model', 'L', 'N_H', 'd', 'd_FFN', 'Learning rate']
    cells = [[*head, *(f'{name}, {data}' for name in measures.values() for data in results)]]
    for row, rate in zip(ROWS, rates):
        model = models[row.phases[-1][0]]
        block = model.blocks[0]
        shape = len(model.blocks), getattr(block.attn, 'num_heads', '-'), model.embed_dim, block.mlp.fc1.out_features
        accuracies = [spread([result[key] for result in rows[row.title]])
                      for key in measures for rows in results.values()]
        cells.append([row.title, *map(str, shape), rate, *accuracies])
    return cells


def plot(results: Results, path: Path) -> None:
    """Draw top-1 accuracy against the number of training images, with the spread over seeds."""
    figure, (axis,) = make_figure((9, 5))
    styles = ('kv:', 'C7s--', 'ko--', 'C0<:', 'C1>:', 'C2D-', 'C0o-', 'C1o-')
    for index, (row, style) in enumerate(zip(ROWS, styles)):
        accuracies = [[result['top1'] for result in rows[row.title]] for rows in results.values()]
        spreads = [statistics.stdev(values) if len(values) > 1 else 0. for values in accuracies]
        places = [size * 1.04 ** (index - 3.5) for size in SIZES]  # side by side, so that the bars can be told apart
        axis.errorbar(
            places, [statistics.mean(values) for values in accuracies], spreads, fmt=style, capsize=2,
            label=row.title)
    axis.set(xscale='log', xlabel='training images', ylabel='top-1 accuracy, %')
    axis.set_xticks(SIZES, [str(size) for size in SIZES])
    axis.minorticks_off()
    figure.legend(loc='outside right upper')
    figure.savefig(path)


if __name__ == '__main__':
    main()
