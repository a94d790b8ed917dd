"""Table 1 of the paper at the paper's scale, on CIFAR-100: python experiments/table1_cifar100.py --timm TIMM

Drives `train.py` and `validate.py` of TIMM, a clone of pytorch-image-models, through the recipes in examples/cifar100;
see docs/cifar100.md. (benchmarks/speed.py measures the training times.)

The output folder gets the table. What was stopped goes on where it stopped.
"""
import argparse
from pathlib import Path
from typing import Dict

import timm
import torch
from common.options import make_parser, positive_int
from common.report import markdown_table, seeds_note, show
from recipes import TOTAL_BATCH, Machine, train_rows
from table1 import ROWS, table_cells
from torch import nn


def main() -> None:
    args = parse_args()
    machine = Machine(args.timm, args.num_processes, args.options, args.output / 'runs')
    results, rates = train_rows(
        {row.title: row.recipes for row in ROWS}, machine, args.seeds, args.epochs_per_phase, args.search_rates)
    models: Dict[str, nn.Module] = {
        model: timm.create_model(model, num_classes=100) for row in ROWS for model, _ in row.phases}
    shown = [', '.join(f'{rate:g}' for rate in rates[row.title]) for row in ROWS]
    head, *rows = table_cells({'CIFAR-100': results}, shown, models)
    show(markdown_table(head, rows) + seeds_note(args.seeds), args.output / 'table1.md')


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 'cifar100', seeds=5)
    add = parser.add_argument
    add('--timm', type=Path, required=True, help='clone of pytorch-image-models')
    add('--num-processes', type=positive_int, default=max(torch.cuda.device_count(), 1),
        help='default: one for each GPU')
    add('--epochs-per-phase', type=positive_int, default=200, help='default: %(default)s')
    add('--search-rates', action='store_true', help='try all the learning rates of the paper, with seed 0')
    add('options', nargs='*', help='after --, more options for every train.py, such as --data-dir DIR')
    args = parser.parse_args()
    check_clone(parser, args.timm)
    if not torch.cuda.is_available() and '--device' not in args.options:
        parser.error('the paper\'s scale needs a GPU; to try it on the CPU all the same, end with -- --device cpu')
    if TOTAL_BATCH % (2 * args.num_processes):
        parser.error(f'--num-processes must divide the batch of {TOTAL_BATCH} into even ones, as Mixup needs')
    ours = {'--seed', '--lr', '--epochs', '--batch-size', '-b', '--output', '--experiment', '--resume', '--config'}
    if ours & set(args.options):
        parser.error(f'after --, {" ".join(sorted(ours & set(args.options)))} is set by table1_cifar100.py itself')
    return args


def check_clone(parser: argparse.ArgumentParser, clone: Path) -> None:
    """Check that timm's scripts are there, in the version of the installed timm."""
    if not all((clone / script).is_file() for script in ('train.py', 'validate.py')):
        parser.error(f'{clone} has no train.py and validate.py: give a clone of pytorch-image-models')
    version_file = clone / 'timm' / 'version.py'  # train.py imports the timm beside it, not the installed one
    if version_file.exists() and f"'{timm.__version__}'" not in version_file.read_text():
        theirs = version_file.read_text().strip()
        parser.error(f'{clone} has {theirs}, timm {timm.__version__} is installed: check out its tag')


if __name__ == '__main__':
    main()
