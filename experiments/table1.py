"""Table 1 of the paper, all eight rows: python examples/table1.py

By default every row is a scaled-down model on the digits, trained on 100, 300 and 900 images with 5 seeds: about two
hours on 2 cores. All rows see as many images in training, two-phase rows half of them in each phase. A row's learning
rate is its own best of the same few, by validation images of two more seeds; of two-phase rows that is phase 2's, and
phase 1 has the rate of the row of the first phase alone. `--paper TIMM` is the paper's scale: it drives `train.py` of
TIMM, a clone of pytorch-image-models, through the recipes in examples/cifar100.

The output folder gets the table and the plot. What was stopped goes on where it stopped.
"""
import argparse
import statistics
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import matplotlib
import timm
import torch
from digits import DIGIT, NUM_IMAGES
from recipes import TOTAL_BATCH, Machine, train_rows
from runs import NUM_TEST, NUM_VALIDATION, Run, run_all
from timing import training_times
from torch import nn
from two_phase import BATCH_SIZE, Stage

matplotlib.use('Agg')
from matplotlib import pyplot as plt

TUNING_SIZE, TUNING_SEEDS = 300, (100, 101)
SHAPE = dict(img_size=DIGIT, patch_size=4, in_chans=1, hidden_chans=4, depth=3, num_classes=10)
VIT = dict(img_size=DIGIT, patch_size=4, in_chans=1, depth=6, num_classes=10)
BASE, SMALL = dict(VIT, embed_dim=64, num_heads=4), dict(VIT, embed_dim=32, num_heads=2)

Results = Dict[str, Dict[str, List[Dict[str, float]]]]  # by data and row; one for each seed


class Row(NamedTuple):
    """A row of the table: the model of each phase, with the arguments that scale it down to the digits."""
    title: str
    recipes: Tuple[str, ...]  # of examples/cifar100
    phases: Tuple[Tuple[str, Dict[str, Any]], ...]
    deit: bool = True  # augmentation and regularisation as DeiT's, on the digits as two_phase.py's


CONV3, CONV5, ATTN = ('cmhsa_conv_k3', SHAPE), ('cmhsa_conv_k5', SHAPE), ('cmhsa_attn', SHAPE)
ROWS = (
    Row('ViT-base', ('vit_base',), (('vit_base_patch16_224', BASE),), deit=False),
    Row('DeiT-small', ('deit_small',), (('deit_small_patch16_224', SMALL),)),
    Row('DeiT-base', ('deit_base',), (('deit_base_patch16_224', BASE),)),
    Row('CMHSA-3 (1st phase)', ('cmhsa_conv_k3',), (CONV3,)),
    Row('CMHSA-5 (1st phase)', ('cmhsa_conv_k5',), (CONV5,)),
    Row('CMHSA (2nd phase)', ('cmhsa_attn',), (ATTN,)),
    Row('CMHSA-3', ('cmhsa_conv_k3', 'cmhsa_attn'), (CONV3, ATTN)),
    Row('CMHSA-5', ('cmhsa_conv_k5', 'cmhsa_attn'), (CONV5, ATTN)),
)


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.paper:
        results, rates = at_paper_scale(args)
    else:
        results, rates = on_digits(args)
        plot(results, args.output / 'table1.png')
    models = create_models(scaled=not args.paper)
    # At the paper's scale, benchmarks/speed.py measures the times.
    table = markdown(results, rates, models, None if args.paper else time_rows(models))
    (args.output / 'table1.md').write_text(table)
    print(table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add = parser.add_argument
    add('--sizes', type=int, nargs='+', default=[100, 300, 900], help='training images (default: %(default)s)')
    paper = parser.add_argument_group('the paper\'s scale')
    add = paper.add_argument
    add('--paper', type=Path, metavar='TIMM', help='clone of pytorch-image-models; trains on CIFAR-100')
    add('--num-processes', type=int, default=max(torch.cuda.device_count(), 1), help='default: one for each GPU')
    add('--epochs-per-phase', type=int, default=200, help='default: %(default)s')
    add('--search-rates', action='store_true', help='try all the learning rates of the paper, with seed 0')
    add('options', nargs='*', help='after --, more options for every train.py, such as --data-dir DIR')
    args = parser.parse_args()
    largest = NUM_IMAGES - NUM_TEST - NUM_VALIDATION
    if not all(BATCH_SIZE <= size <= largest for size in args.sizes):
        parser.error(f'--sizes must be between {BATCH_SIZE} and {largest}')
    check_options(parser, args)
    if args.images_per_phase < max(args.sizes):
        parser.error('--images-per-phase must be at least the largest of --sizes')
    if args.paper:
        check_paper_options(parser, args)
    elif args.options or args.search_rates:
        parser.error('--search-rates and options for train.py are for --paper TIMM')
    return args


def check_paper_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not all((args.paper / script).is_file() for script in ('train.py', 'validate.py')):
        parser.error(f'--paper {args.paper} has no train.py and validate.py: give a clone of pytorch-image-models')
    version_file = args.paper / 'timm' / 'version.py'  # train.py imports the timm beside it, not the installed one
    if version_file.exists() and f"'{timm.__version__}'" not in version_file.read_text():
        theirs = version_file.read_text().strip()
        parser.error(f'--paper {args.paper} has {theirs}, timm {timm.__version__} is installed: check out its tag')
    if not torch.cuda.is_available() and '--device' not in args.options:
        parser.error('the paper\'s scale needs a GPU; to try it on the CPU all the same, end with -- --device cpu')
    if args.num_processes < 1 or TOTAL_BATCH % (2 * args.num_processes):
        parser.error(f'--num-processes must divide the batch of {TOTAL_BATCH} into even ones, as Mixup needs')
    if args.epochs_per_phase < 1:
        parser.error('--epochs-per-phase must be positive')
    ours = {'--seed', '--lr', '--epochs', '--batch-size', '-b', '--output', '--experiment', '--resume', '--config'}
    if ours & set(args.options):
        parser.error(f'after --, {" ".join(sorted(ours & set(args.options)))} is set by table1.py itself')


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of everything that compares models on the digits."""
    add = parser.add_argument
    add('--seeds', type=int, default=5, help='number of seeds (default: %(default)s)')
    add('--output', type=Path, default=Path('output/table1'), help='folder (default: %(default)s)')
    add('--images-per-phase', type=int, default=12600,
        help='images that each of two phases trains on (default: %(default)s)')
    add('--learning-rates', type=float, nargs='+', default=[5e-4, 1e-3, 2e-3, 4e-3],
        help='that every row chooses from (default: %(default)s)')


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.seeds < 1:
        parser.error('--seeds must be at least 1')
    if args.images_per_phase < TUNING_SIZE:
        parser.error(f'--images-per-phase must be at least {TUNING_SIZE}')
    if min(args.learning_rates) <= 0:
        parser.error('--learning-rates must be positive')


def on_digits(args: argparse.Namespace) -> Tuple[Results, Dict[str, str]]:
    """Accuracies and learning rates of every row, scaled down."""
    rates = choose_rates(args)
    return train_all(rates, args), {title: f'{rate:g}' for title, rate in rates.items()}


def at_paper_scale(args: argparse.Namespace) -> Tuple[Results, Dict[str, str]]:
    """Accuracies and learning rates of every row, at the paper's scale."""
    machine = Machine(args.paper, args.num_processes, args.options, args.output / 'cifar100')
    results, rates = train_rows(
        {row.title: row.recipes for row in ROWS}, machine, args.seeds, args.epochs_per_phase, args.search_rates)
    return {'CIFAR-100': results}, {title: ', '.join(f'{x:g}' for x in rate) for title, rate in rates.items()}


def choose_rates(args: argparse.Namespace) -> Dict[str, float]:
    """Every row's best learning rate; that of two phases is phase 2's, phase 1 takes that of the first phase alone."""
    if len(args.learning_rates) == 1:
        return {row.title: args.learning_rates[0] for row in ROWS}
    rates: Dict[str, float] = {}
    for rows in ([row for row in ROWS if len(row.phases) == 1], [row for row in ROWS if len(row.phases) == 2]):
        runs = [plan(row, {**rates, row.title: rate}, TUNING_SIZE, seed, args.images_per_phase)
                for row in rows for rate in args.learning_rates for seed in TUNING_SEEDS]
        results = iter(run_all(runs, args.output / 'runs', 'learning rates'))
        for row in rows:
            top1 = {rate: statistics.mean(next(results)['validation']['top1'] for _ in TUNING_SEEDS)
                    for rate in args.learning_rates}
            rates[row.title] = max(top1, key=lambda rate: top1[rate])
            print(row.title, ', '.join(f'{rate:g}: {accuracy:.1f} %' for rate, accuracy in top1.items()))
    return rates


def train_all(rates: Dict[str, float], args: argparse.Namespace) -> Results:
    runs = [plan(row, rates, size, seed, args.images_per_phase)
            for size in args.sizes for row in ROWS for seed in range(args.seeds)]
    results = iter(run_all(runs, args.output / 'runs', 'table'))
    return {f'{size} images': {row.title: [next(results)['test'] for _ in range(args.seeds)] for row in ROWS}
            for size in args.sizes}


def plan(row: Row, rates: Dict[str, float], size: int, seed: int, images: int) -> Run:
    """The run of a row's last phase, with that of its first if there are two."""
    epochs = images // size * (2 if len(row.phases) == 1 else 1)
    # ViT-base's row has none of it, and no random crops either (`augment`)
    regularisation: Dict[str, Any] = {} if row.deit else dict(weight_decay=0., smoothing=0.)

    def run(phase: int, rate: float, **kwargs: Any) -> Run:
        model, model_args = row.phases[phase]
        stage = Stage(
            model, row.title, model, model_args, epochs, rate, warmup_epochs=max(epochs // 14, 1),
            eval_every=max(epochs // 6, 1), **regularisation)
        return Run(stage, size, seed, augment=row.deit, **kwargs)

    if len(row.phases) == 1:
        return run(0, rates[row.title])
    return run(1, rates[row.title], phase1=run(0, rates[f'{row.title} (1st phase)']))


def create_models(scaled: bool) -> Dict[str, nn.Module]:
    """The models of all rows, by name."""
    return {model: timm.create_model(model, **(args if scaled else dict(num_classes=100)))
            for row in ROWS for model, args in row.phases}


def time_rows(models: Dict[str, nn.Module]) -> Dict[str, float]:
    """Seconds of a training step of every row, scaled down, with two-phase rows as the mean of both."""
    times = training_times(models, torch.randn(BATCH_SIZE, 1, DIGIT, DIGIT))
    return row_times({name: statistics.median(values) for name, values in times.items()})


def markdown(
        results: Results,
        rates: Dict[str, str],
        models: Dict[str, nn.Module],
        seconds: Optional[Dict[str, float]],
) -> str:
    shapes = {row.title: shape(models[row.phases[-1][0]]) for row in ROWS}
    head = ['Model', 'L', 'N_H', 'd', 'd_FFN', 'Learning rate']
    head += [f'{key}, {data}' for key in ('Top-1', 'Top-5') for data in results] + ['Training time']
    lines = ['| ' + ' | '.join(head) + ' |', '|---|' + '---:|' * (len(head) - 1)]
    for row in ROWS:
        cells = [row.title, *shapes[row.title], rates[row.title]]
        cells += [spread([result[key] for result in rows[row.title]])
                  for key in ('top1', 'top5') for rows in results.values()]
        cells.append(f"{seconds[row.title] / seconds['ViT-base']:.2f}x" if seconds else '-')
        lines.append('| ' + ' | '.join(cells) + ' |')
    num_seeds = len(next(iter(results.values()))[ROWS[0].title])
    return '\n'.join(lines) + (f'\n\nMean ± standard deviation over {num_seeds} seeds, %.\n' if num_seeds > 1 else '\n')


def shape(model: Any) -> List[str]:
    """L, N_H, d and d_FFN."""
    block = model.blocks[0]
    sizes = len(model.blocks), getattr(block.attn, 'num_heads', '-'), model.embed_dim, block.mlp.fc1.out_features
    return [str(size) for size in sizes]


def row_times(seconds: Dict[str, float]) -> Dict[str, float]:
    """Seconds of a row's average step, from those of its models."""
    return {row.title: statistics.mean(seconds[model] for model, _ in row.phases) for row in ROWS}


def spread(values: Sequence[float]) -> str:
    return f'{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}' if len(values) > 1 else f'{values[0]:.1f}'


def plot(results: Results, path: Path) -> None:
    """Top-1 accuracy against the number of training images, with the spread over seeds."""
    figure, axis = plt.subplots(figsize=(9, 5), layout='constrained')
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
    axis.grid(alpha=0.3)
    figure.legend(loc='outside right upper')
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == '__main__':
    main()
