"""Attention on pixels with four relative position encodings, and a ResNet-18: python experiments/pixel_models.py

After "On the Relationship between Self-Attention and Convolutional Layers" (arXiv 1911.03584), Tables 1 and 4, scaled
down to digits of 16 x 16 pixels, 400 training images, and models of a quarter of the width. About 40 minutes on 2
cores. With several --learning-rates, each model takes its best one on held-out images of one more seed; the test images
choose nothing. examples/cifar10 has recipes for the models in full size.

The output folder gets the table, and pictures of the heads. A stopped experiment resumes where it stopped.
"""
import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import torch
from centers import center_figure, gaussians
from common.images import BATCH_SIZE, DIGIT, OPTIONS, digits
from common.options import add_num_train, add_repeats, make_parser, positive_float, positive_int
from common.report import markdown_table, spread, write_whole
from common.runs import Result, Run, best_rates, create, run_all, top1
from common.timing import step_seconds
from torch import nn

from timm_cmhsa import attention_maps, head_statistics, load_model
from timm_cmhsa.analysis import HeadStatistics, attention_layers
from timm_cmhsa.images import choose_images
from timm_cmhsa.pixel import prune_degenerate_heads
from timm_cmhsa.plots import plot_attention

sys.path.insert(0, str(Path(__file__).parents[1] / 'examples' / 'cifar10'))
import resnet18_cifar  # noqa: F401  registers the model

TUNING_SEED = 100
SHAPE = dict(in_chans=1, hidden_chans=24)  # 8 x 8 tokens of width 96


class Choice(NamedTuple):
    """One row of the table."""
    title: str
    model: str
    model_args: Dict[str, Any]
    lr: float = 2e-3


RESNET, PRUNED = 'ResNet-18', 'generalized quadratic, pruned'
CHOICES = (
    Choice(RESNET, 'resnet18_cifar', dict(in_chans=1)),
    Choice('quadratic', 'pixel_attn_quadratic', SHAPE),
    Choice('generalized quadratic', 'pixel_attn_quadratic_gen', SHAPE),
    Choice('learned', 'pixel_attn_learned', SHAPE),
    Choice('learned, with content', 'pixel_attn_learned_content', SHAPE, lr=5e-4),
)


def main() -> None:
    args = parse_args()
    folder = args.output / 'runs'
    candidates = {choice.title: {rate: [plan(choice, rate, TUNING_SEED, args)]
                                 for rate in args.learning_rates or [choice.lr]} for choice in CHOICES}
    rates = best_rates(candidates, folder)
    runs = {choice.title: [plan(choice, rates[choice.title], seed, args) for seed in range(args.seeds)]
            for choice in CHOICES}
    results = run_all(runs, folder, 'models')
    pruned = {PRUNED: list(map(plan_pruning, runs['generalized quadratic']))}
    results |= run_all(pruned, folder, 'pruning')
    heads = [degenerate_heads(run, folder) for run in pruned[PRUNED]]
    table = markdown(runs, results, heads, args.repeats)
    del runs[RESNET]
    table += '\n' + likeness(runs, folder)
    write_whole(args.output / 'pixel_models.md', table)
    print(table)
    for title in ('quadratic', 'generalized quadratic', 'learned, with content'):
        run = runs[title][0]
        draw(run, folder, args.output / 'pictures' / run.options['model'])


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 'pixel_models', seeds=3)
    add = parser.add_argument
    add_num_train(parser)
    add('--epochs', type=positive_int, default=60, help='default: %(default)s')
    add('--learning-rates', type=positive_float, nargs='+', default=[],
        help='to choose from for each model (default: a rate that works)')
    add_repeats(parser, 5)
    return parser.parse_args()


def plan(choice: Choice, rate: float, seed: int, args: argparse.Namespace) -> Run:
    options = dict(OPTIONS, img_size=DIGIT, shift=4, epochs=args.epochs, lr=rate, model=choice.model,
                   model_kwargs=choice.model_args)
    return Run(choice.title, args.num_train, seed, options, data=partial(digits, canvas=DIGIT))


def plan_pruning(run: Run) -> Run:
    """Plan to train on for a tenth of the epochs, at a tenth of the learning rate (Appendix E)."""
    changes = dict(epochs=max(run.options['epochs'] // 10, 1), lr=run.options['lr'] / 10, warmup_epochs=0)
    return run._replace(title=PRUNED, options={**run.options, **changes}, after=run, rewrite=prune)


def prune(model: nn.Module) -> nn.Module:
    """Remove degenerate heads."""
    prune_degenerate_heads(model)
    return model


def degenerate_heads(run: Run, folder: Path) -> List[int]:
    """Return how many heads were removed, by layer."""
    layers = attention_layers(load_model(run.folder(folder) / 'model'))
    return [9 - layer.num_heads for layer in layers.values()]


def markdown(
        runs: Dict[str, List[Run]], results: Dict[str, List[Result]], heads: List[List[int]], repeats: int) -> str:
    """Return the table of the models, with the accuracy after pruning."""
    models = {title: create(seeds[0]) for title, seeds in runs.items()}
    seconds = step_seconds(models, torch.randn(BATCH_SIZE, 1, DIGIT, DIGIT), repeats)
    rows = [[title, f'{results[title][0]["params"]:.2f} M', f'{results[title][0]["lr"]:g}',
             spread(top1(results[title])), f'{1e3 * seconds[title]:.0f}'] for title in runs]
    rows.append([PRUNED, '', '', spread(top1(results[PRUNED])), ''])
    return markdown_table(['model', 'parameters', 'learning rate', 'top-1, %', 'step, ms'], rows) + (
        f'\nTop-1 on the test images, mean ± standard deviation over {len(heads)} seeds. Degenerate heads by layer, '
        f'of every seed: {", ".join(map(str, heads))}.\n')


def likeness(runs: Dict[str, List[Run]], folder: Path) -> str:
    """Return how much like a convolution the heads are after training: means over heads and seeds."""
    layers = [[f'{statistics.mean(head.best_weight for head in heads):.2f}, '
               f'{statistics.mean(head.distance for head in heads):.1f}' for heads in all_heads(each, folder)]
              for each in runs.values()]
    rows = [[str(layer), *cells] for layer, cells in enumerate(zip(*layers), start=1)]
    return markdown_table(['layer', *runs], rows) + (
        '\nFor the heads of every layer: mean weight on the best single offset (1 is a tap of a convolution), and mean '
        'distance of their centres from the query, in tokens.\n')


def all_heads(runs: List[Run], folder: Path) -> List[List[HeadStatistics]]:
    """Measure the heads of the trained models of several seeds, layer by layer."""
    layers: Dict[str, List[HeadStatistics]] = {}
    for run in runs:
        model = load_model(run.folder(folder) / 'model')
        for name, maps in attention_maps(model, choose_images(test_images(run, folder), model, 64)[0]).items():
            layers.setdefault(name, []).extend(head_statistics(maps))
    return list(layers.values())


def test_images(run: Run, folder: Path) -> Path:
    return run.data(folder, run.num_train, run.seed) / 'test'


def draw(run: Run, folder: Path, output: Path) -> None:
    """Draw the attention of the trained model, and where the centres of its heads began and ended."""
    model = load_model(run.folder(folder) / 'model')
    plot_attention(model, output, images=test_images(run, folder), html=True)
    centers = [gaussians(each) for each in (create(run), model)]
    if centers[-1]:
        center_figure(centers, 'Centres of the heads, before and after training').savefig(output / 'centers.png')


if __name__ == '__main__':
    main()
