"""The rows of Table 1 of the paper, and their trainings scaled down to the digits."""
import argparse
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from torch import nn

import timm_cmhsa

from .images import DIGIT, OPTIONS, digits
from .options import make_parser, positive_float, positive_int
from .report import spread
from .runs import Run, best_rates

TUNING_SIZE, TUNING_SEEDS = 300, (100, 101)
SHAPE = dict(patch_size=4, in_chans=1, hidden_chans=4, depth=3)
VIT = dict(patch_size=4, in_chans=1, depth=6)
BASE, SMALL = dict(VIT, embed_dim=64, num_heads=4), dict(VIT, embed_dim=32, num_heads=2)

Rates = Tuple[float, ...]  # one for each phase
Results = Dict[str, Dict[str, List[Dict[str, float]]]]  # by data and row; one for each seed


class Row(NamedTuple):
    """A row of the table: the model of each phase, with the arguments that scale it down to the digits."""
    title: str
    recipes: Tuple[str, ...]  # of examples/cifar100
    phases: Tuple[Tuple[str, Dict[str, Any]], ...]
    deit: bool = True  # augmentation and regularisation as DeiT's, on the digits random crops


CONV3, CONV5, ATTN = ('cmhsa_conv_k3', SHAPE), ('cmhsa_conv_k5', SHAPE), ('cmhsa_attn', SHAPE)
CMHSA3 = Row('CMHSA-3', ('cmhsa_conv_k3', 'cmhsa_attn'), (CONV3, ATTN))
CMHSA5 = Row('CMHSA-5', ('cmhsa_conv_k5', 'cmhsa_attn'), (CONV5, ATTN))
ROWS = (
    Row('ViT-base', ('vit_base',), (('vit_base_patch16_224', BASE),), deit=False),
    Row('DeiT-small', ('deit_small',), (('deit_small_patch16_224', SMALL),)),
    Row('DeiT-base', ('deit_base',), (('deit_base_patch16_224', BASE),)),
    Row('CMHSA-3 (1st phase)', ('cmhsa_conv_k3',), (CONV3,)),
    Row('CMHSA-5 (1st phase)', ('cmhsa_conv_k5',), (CONV5,)),
    Row('CMHSA (2nd phase)', ('cmhsa_attn',), (ATTN,)),
    CMHSA3,
    CMHSA5,
)


def make_row_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of everything that trains rows on the digits."""
    parser = make_parser(description, 'table1', seeds=5)
    add = parser.add_argument
    add('--images-per-phase', type=positive_int, default=12600,
        help='images that each of two phases trains on, at least as many as there are (default: %(default)s)')
    add('--learning-rates', type=positive_float, nargs='+', default=[5e-4, 1e-3, 2e-3, 4e-3],
        help='that every row chooses from (default: %(default)s)')
    return parser


def parse_row_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse options; no phase is shorter than one epoch of the images that choose the learning rates."""
    args = parser.parse_args()
    if args.images_per_phase < TUNING_SIZE:
        parser.error(f'--images-per-phase must be at least {TUNING_SIZE}')
    return args


def choose_rates(rows: Sequence[Row], rates: Sequence[float], images_per_phase: int, output: Path) -> Dict[str, Rates]:
    """Choose every row's learning rates; phase 1 of two has the rate of the row of the first phase alone.

    Args:
        rows: Of one and of two phases.
        rates: That every row chooses from.
        images_per_phase: Images that each of two phases trains on.
        output: Folder of the runs.
    """
    chosen: Dict[str, Rates] = {}
    for num_phases in (1, 2):
        first = {row.title: chosen[f'{row.title} (1st phase)'] if num_phases == 2 else ()
                 for row in rows if len(row.phases) == num_phases}
        candidates = {
            row.title: {rate: [plan(row, (*first[row.title], rate), TUNING_SIZE, seed, images_per_phase)
                               for seed in TUNING_SEEDS] for rate in rates}
            for row in rows if row.title in first}
        best = best_rates(candidates, output)
        chosen.update({title: (*first[title], rate) for title, rate in best.items()})
    return chosen


def plan(row: Row, rates: Rates, size: int, seed: int, images_per_phase: int) -> Run:
    """Plan the run of a row's last phase, with that of its first if there are two."""
    epochs = images_per_phase // size * (2 if len(row.phases) == 1 else 1)  # as many images as others in two phases
    (model, model_kwargs), *_ = row.phases
    options = dict(
        OPTIONS, img_size=DIGIT, shift=4, epochs=epochs, lr=rates[0], warmup_epochs=max(epochs // 14, 1))
    if not row.deit:
        options.update(shift=0, smoothing=0., weight_decay=0.)
    run = Run(row.title, size, seed, dict(options, model=model, model_kwargs=model_kwargs),
              data=partial(digits, canvas=DIGIT))
    if len(row.phases) == 2:
        run = run._replace(options=dict(options, lr=rates[1]), after=run, rewrite=to_attention)
    return run


def to_attention(model: Any) -> nn.Module:
    """Rewrite phase 1 as the paper does."""
    return timm_cmhsa.convert_model(model, 'cmhsa_attn')


def table_cells(results: Results, rates: Dict[str, str], models: Dict[str, nn.Module]) -> List[List[str]]:
    """Return the cells of the table, the head first: shapes, learning rates and accuracies."""
    measures = {'top1': 'Top-1', 'top5': 'Top-5'}
    measures = {key: name for key, name in measures.items() if key in next(iter(results.values()))[ROWS[0].title][0]}
    head = ['Model', 'L', 'N_H', 'd', 'd_FFN', 'Learning rate']
    head += [f'{name}, {data}' for name in measures.values() for data in results]
    cells = [head]
    for row in ROWS:
        accuracies = [spread([result[key] for result in rows[row.title]])
                      for key in measures for rows in results.values()]
        cells.append([row.title, *shape(models[row.phases[-1][0]]), rates[row.title], *accuracies])
    return cells


def shape(model: Any) -> List[str]:
    """Return L, N_H, d and d_FFN."""
    block = model.blocks[0]
    sizes = len(model.blocks), getattr(block.attn, 'num_heads', '-'), model.embed_dim, block.mlp.fc1.out_features
    return [str(size) for size in sizes]
