"""Attention on pixels, by four relative position encodings, beside a ResNet-18: python examples/pixel_models.py

After "On the Relationship between Self-Attention and Convolutional Layers" (arXiv 1911.03584), Tables 1 and 4, scaled
down to digits of 16 x 16 pixels, 400 of them to train on, and models of a quarter of the width. About 40 minutes on 2
cores. With several --learning-rates, every model takes its best one by the validation images of one more seed; the test
images choose nothing. (examples/cifar10 has the recipes for the models in full size.)

The output folder gets the table, and what the heads look at and how that changed in training. What was stopped goes on
where it stopped.
"""
import argparse
import json
import statistics
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import timm
import torch
from digits import DIGIT
from runs import Run, run_all, split_digits
from table1 import spread
from timing import training_times
from two_phase import BATCH_SIZE, Stage, evaluate, train, write_whole

from timm_cmhsa import attention_maps, head_statistics, prune_degenerate_heads
from timm_cmhsa.analysis import HeadStatistics
from timm_cmhsa.plot_cli import in_order_of_training
from timm_cmhsa.plots import plot_attention

NUM_TRAIN = 400
TUNING_SEED = 100
SHAPE = dict(img_size=DIGIT, in_chans=1, hidden_chans=24, num_classes=10)  # 8 x 8 tokens of width 96


class Choice(NamedTuple):
    """One row of the table."""
    title: str
    model: str
    model_args: Dict[str, Any]
    lr: float = 2e-3


CHOICES = (
    Choice('ResNet-18', 'resnet18_cifar', dict(in_chans=1, num_classes=10)),
    Choice('quadratic', 'pixel_attn_quadratic', SHAPE),
    Choice('generalised quadratic', 'pixel_attn_quadratic_gen', SHAPE),
    Choice('learned', 'pixel_attn_learned', SHAPE),
    Choice('learned, with content', 'pixel_attn_learned_content', SHAPE, lr=5e-4),
)


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rates = {choice.title: best_rate(choice, args) for choice in CHOICES}
    runs = {choice.title: [plan(choice, rates[choice.title], seed, args) for seed in range(args.seeds)]
            for choice in CHOICES}
    results = iter(run_all([run for each in runs.values() for run in each], args.output / 'runs', 'models'))
    by_title = {title: [next(results) for _ in each] for title, each in runs.items()}
    by_title['generalised quadratic, pruned'] = [prune(run, args.output) for run in runs['generalised quadratic']]
    table = markdown(by_title, rates) + likeness(runs, args.output)
    write_whole(args.output / 'pixel_models.md', table)
    print(table)
    for title in ('quadratic', 'generalised quadratic', 'learned, with content'):
        pictures(runs[title][0], args.output)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--seeds', type=int, default=3, help='number of seeds (default: %(default)s)')
    add('--epochs', type=int, default=60, help='default: %(default)s')
    add('--output', type=Path, default=Path('output/pixel_models'), help='folder (default: %(default)s)')
    add('--learning-rates', type=float, nargs='+', default=[],
        help='that every model chooses from (default: rates that were found to do)')
    args = parser.parse_args()
    if args.seeds < 1 or args.epochs < 1 or min(args.learning_rates, default=1.) <= 0:
        parser.error('--seeds, --epochs and --learning-rates must be positive')
    return args


def plan(choice: Choice, rate: float, seed: int, args: argparse.Namespace) -> Run:
    stage = Stage(
        choice.model, choice.title, choice.model, choice.model_args, args.epochs, lr=rate, canvas=DIGIT,
        checkpoint_hist=args.epochs)
    return Run(stage, NUM_TRAIN, seed)


def best_rate(choice: Choice, args: argparse.Namespace) -> float:
    if not args.learning_rates:
        return choice.lr
    if len(args.learning_rates) == 1:
        return args.learning_rates[0]
    runs = [plan(choice, rate, TUNING_SEED, args) for rate in args.learning_rates]
    results = run_all(runs, args.output / 'runs', f'learning rates, {choice.title}')
    top1 = {rate: result['validation']['top1'] for rate, result in zip(args.learning_rates, results)}
    print(choice.title, ', '.join(f'{rate:g}: {accuracy:.1f} %' for rate, accuracy in top1.items()))
    return max(top1, key=lambda rate: top1[rate])


def prune(run: Run, output: Path) -> Dict[str, Any]:
    """Remove degenerate heads and train on for a tenth of the epochs, at a tenth of the learning rate (Appendix E)."""
    path = output / 'runs' / run.name / 'pruned.json'
    if not path.exists():
        train_data, validation_data, test_data = split_digits(run)
        model = load(run, output)
        heads = [len(pruned) for pruned in prune_degenerate_heads(model).values()]
        stage = run.stage._replace(
            name='pruned', title=f'pruned, seed {run.seed}', epochs=max(run.stage.epochs // 10, 1),
            lr=run.stage.lr / 10, warmup_epochs=0)
        before, device = evaluate(model, test_data, torch.device('cpu')), torch.device('cpu')
        model, _ = train(stage, model, train_data, validation_data, path.parent, run.seed, device)
        write_whole(path, json.dumps(dict(before=before, test=evaluate(model, test_data, device), pruned=heads)))
    return json.loads(path.read_text())


def load(run: Run, output: Path) -> torch.nn.Module:
    checkpoint = output / 'runs' / run.name / run.stage.name / 'last.pth.tar'
    return timm.create_model(run.stage.model, checkpoint_path=str(checkpoint), **run.stage.model_args).eval()


def markdown(by_title: Dict[str, List[Dict[str, Any]]], rates: Dict[str, float]) -> str:
    models = {choice.title: timm.create_model(choice.model, **choice.model_args) for choice in CHOICES}
    seconds = training_times(models, torch.randn(BATCH_SIZE, 1, DIGIT, DIGIT), repeats=20)
    lines = ['| model | parameters | learning rate | top-1, % | step, ms |', '|---|---:|---:|---:|---:|']
    for title, results in by_title.items():
        accuracy = spread([result['test']['top1'] for result in results])
        if title in models:
            params = sum(parameter.numel() for parameter in models[title].parameters()) / 1e6
            milliseconds = 1e3 * statistics.median(seconds[title])
            lines.append(f'| {title} | {params:.2f} M | {rates[title]:g} | {accuracy} | {milliseconds:.0f} |')
        else:
            lines.append(f'| {title} | | | {accuracy} | |')
    pruned = [result['pruned'] for result in by_title['generalised quadratic, pruned']]
    return '\n'.join(lines) + (
        f'\n\nTop-1 on the test images, mean ± standard deviation over {len(pruned)} seeds. Degenerate heads by layer, '
        f'of every seed: {", ".join(map(str, pruned))}.\n\n')


def likeness(runs: Dict[str, List[Run]], output: Path) -> str:
    """How much like a convolution the heads are after training: means over heads, of all seeds."""
    lines = ['| layer | ' + ' | '.join(title for title in runs if title != 'ResNet-18') + ' |']
    lines.append('|---|' + '---:|' * (len(runs) - 1))
    columns = []
    for title, each in runs.items():
        if title != 'ResNet-18':
            layers: Dict[str, List[HeadStatistics]] = {}
            for run in each:
                images = torch.stack([split_digits(run)[2][i][0] for i in range(64)])
                for name, maps in attention_maps(load(run, output), images).items():
                    layers.setdefault(name, []).extend(head_statistics(maps))
            columns.append([
                f'{statistics.mean(h.best_weight for h in heads):.2f}, {statistics.mean(h.distance for h in heads):.1f}'
                for heads in layers.values()])
    lines += [f'| {layer + 1} | ' + ' | '.join(cells) + ' |' for layer, cells in enumerate(zip(*columns))]
    return '\n'.join(lines) + (
        '\n\nOf the heads of every layer: mean weight on the best single offset (1 is a tap of a convolution), and '
        'mean distance of their centres from the query, in tokens.\n')


def pictures(run: Run, output: Path) -> None:
    """What the heads of the trained model look at, and how that changed in training."""
    folder = output / 'runs' / run.name / run.stage.name
    checkpoints = in_order_of_training(list(folder.glob('checkpoint-*.pth.tar')))
    images = torch.stack([split_digits(run)[2][i][0] for i in range(64)])
    plot_attention(checkpoints, output / 'pictures' / run.stage.name, images=images, html=True)


if __name__ == '__main__':
    main()
