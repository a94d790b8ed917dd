"""Attention on pixels with four relative position encodings, and a ResNet-18: python experiments/pixel_models.py

After "On the Relationship between Self-Attention and Convolutional Layers" (arXiv 1911.03584), Tables 1 and 4, scaled
down to digits of 16 x 16 pixels, 400 training images, and models of a quarter of the width. About 40 minutes on 2
cores. With several --learning-rates, each model takes its best one on held-out images of one more seed; the test images
choose nothing. examples/cifar10 has recipes for the models in full size.

The output folder gets the table, and pictures of the heads and how they changed in training. A stopped experiment
resumes where it stopped.
"""
import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import timm
import torch
from centers import center_figure, gaussians
from common.data import DIGIT
from common.options import add_repeats, make_parser, positive_float, positive_int
from common.report import markdown_table, spread, write_whole
from common.runs import CPU, Result, Run, best_rates, run_all, top1
from common.timing import step_seconds
from common.training import BATCH_SIZE, Stage, evaluate, num_params, train

from timm_cmhsa import attention_maps, head_statistics, load_model
from timm_cmhsa.analysis import HeadStatistics
from timm_cmhsa.pixel import prune_degenerate_heads
from timm_cmhsa.plots import in_order_of_training, plot_attention

sys.path.insert(0, str(Path(__file__).parents[1] / 'examples' / 'cifar10'))
import resnet18_cifar  # noqa: F401  registers the model

TUNING_SEED = 100
SHAPE = dict(img_size=DIGIT, in_chans=1, hidden_chans=24, num_classes=10)  # 8 x 8 tokens of width 96


class Choice(NamedTuple):
    """One row of the table."""
    title: str
    model: str
    model_args: Dict[str, Any]
    lr: float = 2e-3


RESNET, PRUNED = 'ResNet-18', 'generalized quadratic, pruned'
CHOICES = (
    Choice(RESNET, 'resnet18_cifar', dict(in_chans=1, num_classes=10)),
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
    results[PRUNED] = [prune(run, folder) for run in runs['generalized quadratic']]
    del runs[RESNET]
    table = markdown(results, rates, args.repeats) + '\n' + likeness(runs, folder)
    write_whole(args.output / 'pixel_models.md', table)
    print(table)
    for title in ('quadratic', 'generalized quadratic', 'learned, with content'):
        draw(runs[title][0], folder, args.output / 'pictures' / runs[title][0].stage.name)


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 'pixel_models', seeds=3)
    add = parser.add_argument
    add('--num-train', type=positive_int, default=400, help='number of training images (default: %(default)s)')
    add('--epochs', type=positive_int, default=60, help='default: %(default)s')
    add('--learning-rates', type=positive_float, nargs='+', default=[],
        help='to choose from for each model (default: a rate that works)')
    add_repeats(parser, 5)
    return parser.parse_args()


def plan(choice: Choice, rate: float, seed: int, args: argparse.Namespace) -> Run:
    stage = Stage(
        choice.model, choice.title, choice.model, choice.model_args, args.epochs, lr=rate, canvas=DIGIT,
        checkpoint_hist=args.epochs)
    return Run(stage, args.num_train, seed)


def prune(run: Run, folder: Path) -> Result:
    """Remove degenerate heads and train on for a tenth of the epochs, at a tenth of the learning rate (Appendix E)."""
    path = folder / run.name / 'pruned.json'
    if not path.exists():
        train_data, held_out, test_data = run.images()
        model = load_model(run.checkpoint(folder))
        heads = [len(pruned) for pruned in prune_degenerate_heads(model).values()]
        stage = run.stage._replace(
            name='pruned', title=f'pruned, seed {run.seed}', epochs=max(run.stage.epochs // 10, 1),
            lr=run.stage.lr / 10, warmup_epochs=0)
        before = evaluate(model, test_data, CPU)
        trained, _ = train(stage, model, train_data, held_out, path.parent, run.seed, CPU)
        write_whole(path, json.dumps(dict(before=before, test=evaluate(trained, test_data, CPU), pruned=heads)))
    return json.loads(path.read_text())


def markdown(results: Dict[str, List[Result]], rates: Dict[str, float], repeats: int) -> str:
    """Return the table of the models, with the accuracy after pruning."""
    models = {choice.title: timm.create_model(choice.model, **choice.model_args) for choice in CHOICES}
    seconds = step_seconds(models, torch.randn(BATCH_SIZE, 1, DIGIT, DIGIT), repeats)
    rows = [[title, f'{num_params(model):.2f} M', f'{rates[title]:g}', spread(top1(results[title])),
             f'{1e3 * seconds[title]:.0f}'] for title, model in models.items()]
    rows.append([PRUNED, '', '', spread(top1(results[PRUNED])), ''])
    heads = [result['pruned'] for result in results[PRUNED]]
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
        for name, maps in attention_maps(load_model(run.checkpoint(folder)), run.images()[2].first()).items():
            layers.setdefault(name, []).extend(head_statistics(maps))
    return list(layers.values())


def draw(run: Run, folder: Path, output: Path) -> None:
    """Draw the attention of the trained model, and how it changed in training."""
    checkpoints = in_order_of_training(list(run.checkpoint(folder).parent.glob('checkpoint-*.pth.tar')))
    plot_attention(checkpoints, output, images=run.images()[2].first(), html=True)
    centers = [gaussians(load_model(path)) for path in checkpoints]
    if centers[-1]:
        center_figure(centers, f'Centres of the heads over {len(centers)} checkpoints').savefig(output / 'centers.png')


if __name__ == '__main__':
    main()
