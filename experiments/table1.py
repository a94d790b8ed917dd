"""Table 1 of the paper, all eight rows, scaled down to the digits: python experiments/table1.py

Every row is trained on 100, 300 and 900 images with 5 seeds: an hour and a half on 2 cores. All rows see as many
images in training, two-phase rows half of them in each phase. A row's learning rate is its own best of the same few, by
validation images of two more seeds; of two-phase rows that is phase 2's, and phase 1 has the rate of the row of the
first phase alone. (table1_cifar100.py is the same table at the paper's scale.)

The output folder gets the table and the plot. What was stopped goes on where it stopped.
"""
import argparse
import statistics
from pathlib import Path
from typing import Dict

import timm
import torch
from common.images import BATCH_SIZE, DIGIT, MAX_TRAIN, MIN_TRAIN
from common.options import add_repeats
from common.report import make_figure, markdown_table, seeds_note, write_whole
from common.rows import ROWS, Rates, Results, choose_rates, make_row_parser, parse_row_args, plan, table_cells
from common.runs import run_all
from common.timing import step_seconds
from torch import nn


def main() -> None:
    args = parse_args()
    rates = choose_rates(ROWS, args.learning_rates, args.images_per_phase, args.output / 'runs')
    results = train_all(rates, args)
    table = markdown(results, rates, args.repeats)
    write_whole(args.output / 'table1.md', table)
    print(table)
    plot(results, args.output / 'table1.png')


def parse_args() -> argparse.Namespace:
    parser = make_row_parser(__doc__)
    parser.add_argument(
        '--sizes', type=int, nargs='+', default=[100, 300, 900], help='training images (default: %(default)s)')
    add_repeats(parser, 20)
    args = parse_row_args(parser)
    largest = min(MAX_TRAIN, args.images_per_phase)
    if not all(MIN_TRAIN <= size <= largest for size in args.sizes):
        parser.error(f'--sizes must be between {MIN_TRAIN} and {largest}')
    return args


def train_all(rates: Dict[str, Rates], args: argparse.Namespace) -> Results:
    """Train every row with every number of images and every seed."""
    runs = {(size, row.title): [plan(row, rates[row.title], size, seed, args.images_per_phase)
                                for seed in range(args.seeds)] for size in args.sizes for row in ROWS}
    results = run_all(runs, args.output / 'runs', 'table')
    return {f'{size} images': {row.title: [result['test'] for result in results[size, row.title]] for row in ROWS}
            for size in args.sizes}


def markdown(results: Results, rates: Dict[str, Rates], repeats: int) -> str:
    """Return the table; training times are those of a step relative to ViT-base, two phases as the mean of both."""
    models: Dict[str, nn.Module] = {
        model: timm.create_model(model, img_size=DIGIT, num_classes=10, **model_args)
        for row in ROWS for model, model_args in row.phases}
    of_model = step_seconds(models, torch.randn(BATCH_SIZE, 1, DIGIT, DIGIT), repeats)
    seconds = [statistics.mean(of_model[model] for model, _ in row.phases) for row in ROWS]
    head, *rows = table_cells(results, {title: f'{rate[-1]:g}' for title, rate in rates.items()}, models)
    rows = [[*row, f'{each / seconds[0]:.2f}x'] for row, each in zip(rows, seconds)]
    num_seeds = len(next(iter(results.values()))[ROWS[0].title])
    return markdown_table([*head, 'Training time'], rows) + seeds_note(num_seeds)


def plot(results: Results, path: Path) -> None:
    """Draw top-1 accuracy against the number of training images, with the spread over seeds."""
    figure, (axis,) = make_figure((9, 5))
    styles = ('kv:', 'C7s--', 'ko--', 'C0<:', 'C1>:', 'C2D-', 'C0o-', 'C1o-')
    sizes = [int(data.split()[0]) for data in results]
    for index, (row, style) in enumerate(zip(ROWS, styles)):
        accuracies = [[result['top1'] for result in rows[row.title]] for rows in results.values()]
        spreads = [statistics.stdev(values) if len(values) > 1 else 0. for values in accuracies]
        places = [size * 1.04 ** (index - 3.5) for size in sizes]  # side by side, so that the bars can be told apart
        axis.errorbar(
            places, [statistics.mean(values) for values in accuracies], spreads, fmt=style, capsize=2,
            label=row.title)
    axis.set(xscale='log', xlabel='training images', ylabel='top-1 accuracy, %')
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    figure.legend(loc='outside right upper')
    figure.savefig(path)


if __name__ == '__main__':
    main()
