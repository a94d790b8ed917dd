"""A whole ResNet-18 as attention: convert, compare, fine-tune, on the digits: python examples/attend_resnet.py

timm's `resnet18` is trained on 400 digits, each at a random place on a 32 x 32 canvas. `attend_convs` then replaces its
convolutions by self-attention that computes the same function: all of them, or those of the last two stages. Both
train on, beside the CNN itself. About 20 minutes on 2 cores.

The output folder gets the table, and pictures of what the heads look at in the end. What was stopped goes on where it
stopped.
"""
import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any, Dict, List

import timm
import torch
from digits import CANVAS, Digits
from runs import Run, split_digits
from table1 import spread
from timing import training_times
from timm.models import load_checkpoint
from torch import nn
from two_phase import BATCH_SIZE, Stage, create, evaluate, train, write_whole

from timm_cmhsa import attend_convs, attended_convs
from timm_cmhsa.plots import plot_attention

NUM_TRAIN = 400
INPUT_SIZE = (1, CANVAS, CANVAS)
MODEL_ARGS = dict(in_chans=1, num_classes=10)
NAMES = {'all convolutions': '*', 'last two stages': ['layer3.*', 'layer4.*']}  # of what becomes attention
CPU = torch.device('cpu')


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = [compare(seed, args) for seed in range(args.seeds)]
    for title, model in forms_of(timm.create_model('resnet18', **MODEL_ARGS)).items():
        if title in NAMES:
            print(f'{title}:\n{attended_convs(model)}')
    table = markdown(results)
    write_whole(args.output / 'attend_resnet.md', table)
    print(table)
    picture(args.output / folder_name(0, args), args.output / 'pictures')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--seeds', type=int, default=3, help='number of seeds (default: %(default)s)')
    add('--epochs', type=int, default=40, help='of the CNN; half as many to fine-tune (default: %(default)s)')
    add('--output', type=Path, default=Path('output/attend_resnet'), help='folder (default: %(default)s)')
    args = parser.parse_args()
    if args.seeds < 1 or args.epochs < 2:
        parser.error('--seeds must be positive, --epochs at least 2')
    return args


def folder_name(seed: int, args: argparse.Namespace) -> str:
    return f'seed{seed}-epochs{args.epochs}'


def compare(seed: int, args: argparse.Namespace) -> Dict[str, Dict[str, float]]:
    """Train the CNN, rewrite it, and fine-tune all forms: accuracies by form."""
    folder = args.output / folder_name(seed, args)
    path = folder / 'result.json'
    if path.exists():
        return json.loads(path.read_text())
    stage = Stage('cnn', f'CNN, seed {seed}', 'resnet18', MODEL_ARGS, args.epochs, lr=2e-3, canvas=CANVAS)
    train_data, validation_data, test_data = split_digits(Run(stage, NUM_TRAIN, seed))
    cnn, _ = train(stage, create(stage, seed), train_data, validation_data, folder, seed, CPU)

    result = {}
    for title, model in forms_of(cnn).items():
        fine_tune = stage._replace(
            name=title.replace(' ', '_'), title=f'fine-tuning, attention: {title}, seed {seed}',
            epochs=args.epochs // 2, lr=2e-4)
        row = dict(
            params=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
            error=logits_error(cnn, model, test_data),
            before=evaluate(model, test_data, CPU)['top1'],
        )
        model, _ = train(fine_tune, model, train_data, validation_data, folder, seed, CPU)
        result[title] = dict(row, after=evaluate(model, test_data, CPU)['top1'])
    write_whole(path, json.dumps(result))
    return result


def forms_of(cnn: nn.Module) -> Dict[str, nn.Module]:
    """The CNN, and what computes the same with attention."""
    attended = {title: attend_convs(copy.deepcopy(cnn), names, INPUT_SIZE) for title, names in NAMES.items()}
    return {'none': copy.deepcopy(cnn), **attended}


@torch.inference_mode()
def logits_error(expected: nn.Module, actual: nn.Module, data: Digits) -> float:
    """Largest difference of the logits of test images, relative to the largest logit."""
    images = torch.stack([data[i][0] for i in range(64)])
    logits = expected(images)
    return ((actual(images) - logits).abs().max() / logits.abs().max()).item()


def picture(folder: Path, output: Path) -> None:
    """What the fine-tuned heads look at: a checkpoint is loaded into a model that is made and rewritten alike."""
    title = 'all convolutions'
    model = forms_of(timm.create_model('resnet18', **MODEL_ARGS))[title]
    load_checkpoint(model, str(folder / title.replace(' ', '_') / 'last.pth.tar'))
    stage = Stage('cnn', 'CNN', 'resnet18', MODEL_ARGS, 1, lr=0., canvas=CANVAS)
    test_data = split_digits(Run(stage, NUM_TRAIN, seed=0))[2]
    plot_attention(model, output, images=torch.stack([test_data[i][0] for i in range(64)]))


def markdown(results: List[Dict[str, Dict[str, Any]]]) -> str:
    models = forms_of(timm.create_model('resnet18', **MODEL_ARGS))
    seconds = training_times(models, torch.randn(BATCH_SIZE, *INPUT_SIZE), repeats=10)
    lines = ['| convolutions that became attention | parameters | logits differ by | top-1 | fine-tuned | step, ms |',
             '|---|---:|---:|---:|---:|---:|']
    for title in results[0]:
        rows = [result[title] for result in results]
        lines.append(
            f"| {title} | {rows[0]['params']:.1f} M | {max(row['error'] for row in rows):.1e} "
            f"| {spread([row['before'] for row in rows])} | {spread([row['after'] for row in rows])} "
            f'| {1e3 * statistics.median(seconds[title]):.0f} |')
    return '\n'.join(lines) + (
        f'\n\nTop-1 on 597 test images, %, mean ± standard deviation over {len(results)} seeds; the largest difference '
        'of logits, relative to the largest logit; the median time of a training step of 20 images.\n')


if __name__ == '__main__':
    main()
