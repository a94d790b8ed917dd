"""Table 1 of the paper, all eight rows: python examples/table1.py

By default every row is a scaled-down model on the digits, trained on 100, 300 and 900 images with 5 seeds: about two
hours on 2 cores. All rows see as many images in training, two-phase rows half of them in each phase. A row's learning
rate is its own best of the same few, by validation images of two more seeds. `--paper TIMM` is the paper's scale: it
drives `train.py` of TIMM, a clone of pytorch-image-models, through the recipes in examples/cifar100.

The output folder gets the table and the plot. What was stopped goes on where it stopped.
"""
import argparse
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import matplotlib
import timm
import torch
from digits import DIGIT, NUM_IMAGES
from runs import NUM_TEST, NUM_VALIDATION, Run, run_all
from timm.optim import create_optimizer_v2
from torch import nn
from two_phase import BATCH_SIZE, Stage

matplotlib.use('Agg')
from matplotlib import pyplot as plt

LEARNING_RATES = (5e-4, 1e-3, 2e-3, 4e-3)
TUNING_SIZE, TUNING_SEEDS = 300, (100, 101)
SHAPE = dict(img_size=DIGIT, patch_size=4, in_chans=1, hidden_chans=4, depth=3, num_classes=10)
VIT = dict(img_size=DIGIT, patch_size=4, in_chans=1, depth=6, num_classes=10)
BASE, SMALL = dict(VIT, embed_dim=64, num_heads=4), dict(VIT, embed_dim=32, num_heads=2)


class Row(NamedTuple):
    """A row of the table: the model of each phase, with what scales it down to the digits."""
    title: str
    phases: Tuple[Tuple[str, Dict[str, Any]], ...]
    deit: bool = True  # augmentation and regularisation as DeiT's, on the digits as two_phase.py's


CONV3, CONV5, ATTN = ('cmhsa_conv_k3', SHAPE), ('cmhsa_conv_k5', SHAPE), ('cmhsa_attn', SHAPE)
ROWS = (
    Row('ViT-base', (('vit_base_patch16_224', BASE),), deit=False),
    Row('DeiT-small', (('deit_small_patch16_224', SMALL),)),
    Row('DeiT-base', (('deit_base_patch16_224', BASE),)),
    Row('CMHSA-3 (1st phase)', (CONV3,)),
    Row('CMHSA-5 (1st phase)', (CONV5,)),
    Row('CMHSA (2nd phase)', (ATTN,)),
    Row('CMHSA-3', (CONV3, ATTN)),
    Row('CMHSA-5', (CONV5, ATTN)),
)


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rates = choose_rates(args)
    results = train_all(rates, args)
    table = markdown(results, rates, training_times(scaled_models(), torch.randn(BATCH_SIZE, 1, DIGIT, DIGIT)))
    (args.output / 'table1.md').write_text(table)
    print(table)
    plot(results, args.output / 'table1.png')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        '--sizes', type=int, nargs='+', default=[100, 300, 900], help='training images (default: %(default)s)')
    args = parser.parse_args()
    largest = NUM_IMAGES - NUM_TEST - NUM_VALIDATION
    if not all(BATCH_SIZE <= size <= largest for size in args.sizes) or args.seeds < 1:
        parser.error(f'--sizes must be between {BATCH_SIZE} and {largest}, --seeds at least 1')
    if args.images_per_phase < max(*args.sizes, TUNING_SIZE):
        parser.error(f'--images-per-phase must be at least {TUNING_SIZE} and the largest of --sizes')
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of everything that compares models on the digits."""
    add = parser.add_argument
    add('--seeds', type=int, default=5, help='number of seeds (default: %(default)s)')
    add('--images-per-phase', type=int, default=12600,
        help='images that each of two phases trains on (default: %(default)s)')
    add('--output', type=Path, default=Path('output/table1'), help='folder (default: %(default)s)')


def choose_rates(args: argparse.Namespace) -> Dict[str, float]:
    """Every row's best learning rate; that of two phases is phase 2's, phase 1 takes that of the first phase alone."""
    rates: Dict[str, float] = {}
    for rows in ([row for row in ROWS if len(row.phases) == 1], [row for row in ROWS if len(row.phases) == 2]):
        runs = [plan(row, {**rates, row.title: rate}, TUNING_SIZE, seed, args.images_per_phase)
                for row in rows for rate in LEARNING_RATES for seed in TUNING_SEEDS]
        results = iter(run_all(runs, args.output / 'runs', 'learning rates'))
        for row in rows:
            top1 = {rate: statistics.mean(next(results)['validation']['top1'] for _ in TUNING_SEEDS)
                    for rate in LEARNING_RATES}
            rates[row.title] = max(top1, key=lambda rate: top1[rate])
            print(row.title, ', '.join(f'{rate:g}: {accuracy:.1f} %' for rate, accuracy in top1.items()))
    return rates


def train_all(rates: Dict[str, float], args: argparse.Namespace) -> Dict[int, List[List[Dict[str, Any]]]]:
    """Results of all seeds of all rows, by number of training images."""
    runs = [plan(row, rates, size, seed, args.images_per_phase)
            for size in args.sizes for row in ROWS for seed in range(args.seeds)]
    results = iter(run_all(runs, args.output / 'runs', 'table'))
    return {size: [[next(results) for _ in range(args.seeds)] for _ in ROWS] for size in args.sizes}


def plan(row: Row, rates: Dict[str, float], size: int, seed: int, images: int) -> Run:
    """The run of a row's last phase, with that of its first if there are two."""
    epochs = images // size * (2 if len(row.phases) == 1 else 1)
    regularisation = {} if row.deit else dict(weight_decay=0., smoothing=0.)

    def run(phase: int, rate: float, **kwargs: Any) -> Run:
        model, model_args = row.phases[phase]
        stage = Stage(
            model, row.title, model, model_args, epochs, rate, warmup_epochs=max(epochs // 14, 1),
            eval_every=max(epochs // 6, 1), **regularisation)
        return Run(stage, size, seed, augment=row.deit, **kwargs)

    if len(row.phases) == 1:
        return run(0, rates[row.title])
    return run(1, rates[row.title], phase1=run(0, rates[f'{row.title} (1st phase)']))


def scaled_models() -> Dict[str, List[nn.Module]]:
    return {row.title: [timm.create_model(model, **args) for model, args in row.phases] for row in ROWS}


def training_times(rows: Dict[str, List[nn.Module]], images: torch.Tensor, repeats: int = 20) -> Dict[str, float]:
    """Median seconds of a training step, the mean of a row's phases; rows in turn, so that drift meets all alike."""
    steps = {title: [training_step(model, images) for model in models] for title, models in rows.items()}
    seconds: Dict[str, List[float]] = {title: [] for title in rows}
    for _ in range(repeats + 2):
        for title, phases in steps.items():
            start = time.perf_counter()
            for step in phases:
                step()
            seconds[title].append((time.perf_counter() - start) / len(phases))
    return {title: statistics.median(times[2:]) for title, times in seconds.items()}


def training_step(model: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    optimizer = create_optimizer_v2(model.train(), opt='adamw', lr=1e-3, weight_decay=0.05)
    targets = torch.zeros(len(images), dtype=torch.long)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return step


def markdown(
        results: Dict[int, List[List[Dict[str, Any]]]],
        rates: Dict[str, float],
        seconds: Dict[str, float],
) -> str:
    sizes = list(results)
    head = ['Model', 'L', 'N_H', 'd', 'd_FFN', 'learning rate']
    head += [f'{key}, {size} images' for key in ('Top-1', 'Top-5') for size in sizes] + ['Training time']
    lines = ['| ' + ' | '.join(head) + ' |', '|---|' + '---:|' * (len(head) - 1)]
    for index, row in enumerate(ROWS):
        cells = [row.title, *shape(row), f'{rates[row.title]:g}']
        cells += [spread([result['test'][key] for result in results[size][index]])
                  for key in ('top1', 'top5') for size in sizes]
        cells.append(f"{seconds[row.title] / seconds['ViT-base']:.2f}x")
        lines.append('| ' + ' | '.join(cells) + ' |')
    num_seeds = len(results[sizes[0]][0])
    return '\n'.join(lines) + f'\n\nMean ± standard deviation over {num_seeds} seeds, %.\n'


def shape(row: Row) -> List[str]:
    """L, N_H, d and d_FFN of the model of a row's last phase."""
    model, args = row.phases[-1]
    blocks = timm.create_model(model, **args).blocks
    attn, mlp = blocks[0].attn, blocks[0].mlp
    return [str(x) for x in (len(blocks), getattr(attn, 'num_heads', '-'), mlp.fc1.in_features, mlp.fc1.out_features)]


def spread(values: Sequence[float]) -> str:
    return f'{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}'


def plot(results: Dict[int, List[List[Dict[str, Any]]]], path: Path) -> None:
    """Top-1 accuracy against the number of training images, with the spread over seeds."""
    figure, axis = plt.subplots(figsize=(7, 5), layout='constrained')
    styles = ('k:', 'C7--', 'k--', 'C0-.', 'C1-.', 'C2-', 'C0-', 'C1-')
    for index, (row, style) in enumerate(zip(ROWS, styles)):
        accuracies = [[result['test']['top1'] for result in rows[index]] for rows in results.values()]
        spreads = [statistics.stdev(values) if len(values) > 1 else 0. for values in accuracies]
        places = [size * 1.02 ** (index - 3.5) for size in results]  # side by side, so that the bars can be told apart
        axis.errorbar(
            places, [statistics.mean(values) for values in accuracies], spreads, fmt=style, marker='o', capsize=2,
            label=row.title)
    axis.set(xscale='log', xlabel='training images', ylabel='top-1 accuracy, %')
    axis.set_xticks(list(results), [str(size) for size in results])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == '__main__':
    main()
