"""A whole ResNet-18 as attention: convert, compare, fine-tune, on the digits: python experiments/attend_resnet.py

timm's `resnet18` is trained on digits, each at a random place on a 32 x 32 canvas. `attend_convs` then replaces its
convolutions by self-attention that computes the same function: all of them, or those of the last two stages. Both
train on, beside the CNN itself. About 20 minutes on 2 cores.

The output folder gets the table, and pictures of what the heads look at in the end. What was stopped goes on where it
stopped.
"""
import argparse
import copy
import json
from pathlib import Path
from typing import Any, Dict, List

import timm
import torch
from common.data import CANVAS, split_digits
from common.options import add_repeats, make_parser, positive_int
from common.report import markdown_table, spread, write_whole
from common.runs import CPU
from common.timing import step_seconds
from common.training import BATCH_SIZE, Stage, create, evaluate, num_params, train
from timm.models import load_checkpoint
from torch import nn

from timm_cmhsa import attend_convs
from timm_cmhsa.cnn import attention_summary
from timm_cmhsa.plots import plot_attention

INPUT_SIZE = (1, CANVAS, CANVAS)
MODEL_ARGS = dict(in_chans=1, num_classes=10)
ALL = 'all convolutions'
NAMES = {ALL: '*', 'last two stages': ['layer3.*', 'layer4.*']}  # of what becomes attention


def main() -> None:
    args = parse_args()
    folders = [
        args.output / f'images{args.num_train}-seed{seed}-epochs{args.epochs}' for seed in range(args.seeds)]
    results = [compare(seed, args.num_train, args.epochs, folder) for seed, folder in enumerate(folders)]
    models = forms_of(timm.create_model('resnet18', **MODEL_ARGS))
    for title in NAMES:
        print(f'{title}:\n{attention_summary(models[title])}')
    table = markdown(results, models, args.repeats)
    write_whole(args.output / 'attend_resnet.md', table)
    print(table)
    images = split_digits(args.num_train, seed=0)[2].first()
    draw(models[ALL], images, folders[0] / folder_name(ALL) / 'last.pth.tar', args.output / 'pictures')


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 'attend_resnet', seeds=3)
    add = parser.add_argument
    add('--num-train', type=positive_int, default=400, help='number of training images (default: %(default)s)')
    add('--epochs', type=positive_int, default=40, help='of the CNN; half as many to fine-tune (default: %(default)s)')
    add_repeats(parser, 5)
    return parser.parse_args()


def compare(seed: int, num_train: int, epochs: int, folder: Path) -> Dict[str, Dict[str, float]]:
    """Train the CNN, rewrite it, and fine-tune all forms; returns accuracies by form."""
    path = folder / 'result.json'
    if path.exists():
        return json.loads(path.read_text())
    stage = Stage('cnn', f'CNN, seed {seed}', 'resnet18', MODEL_ARGS, epochs, lr=2e-3, canvas=CANVAS)
    train_data, validation_data, test_data = split_digits(num_train, seed)
    cnn, _ = train(stage, create(stage, seed), train_data, validation_data, folder, seed, CPU)

    result = {}
    for title, model in forms_of(cnn).items():
        fine_tune = stage._replace(
            name=folder_name(title), title=f'fine-tuning, attention: {title}, seed {seed}',
            epochs=max(epochs // 2, 1), lr=2e-4)
        error, before = logits_error(cnn, model, test_data.first()), evaluate(model, test_data, CPU)
        model, _ = train(fine_tune, model, train_data, validation_data, folder, seed, CPU)
        result[title] = dict(error=error, before=before['top1'], after=evaluate(model, test_data, CPU)['top1'])
    write_whole(path, json.dumps(result))
    return result


def forms_of(cnn: nn.Module) -> Dict[str, nn.Module]:
    """Return the CNN, and what computes the same with attention."""
    attended = {title: attend_convs(copy.deepcopy(cnn), names, INPUT_SIZE) for title, names in NAMES.items()}
    return {'none': copy.deepcopy(cnn), **attended}


def folder_name(title: str) -> str:
    return title.replace(' ', '_')


@torch.inference_mode()
def logits_error(expected: nn.Module, actual: nn.Module, images: torch.Tensor) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    logits = expected(images)
    return ((actual(images) - logits).abs().max() / logits.abs().max()).item()


def markdown(results: List[Dict[str, Dict[str, Any]]], models: Dict[str, nn.Module], repeats: int) -> str:
    """Return the table of all forms, over the seeds."""
    seconds = step_seconds(models, torch.randn(BATCH_SIZE, *INPUT_SIZE), repeats)
    head = ['convolutions that became attention', 'parameters', 'logits differ by', 'top-1', 'fine-tuned', 'step, ms']
    rows = []
    for title, model in models.items():
        error = max(result[title]['error'] for result in results)
        before, after = (spread([result[title][when] for result in results]) for when in ('before', 'after'))
        rows.append(
            [title, f'{num_params(model):.1f} M', f'{error:.1e}', before, after, f'{1e3 * seconds[title]:.0f}'])
    return markdown_table(head, rows) + (
        f'\nTop-1 on 597 test images, %, mean ± standard deviation over {len(results)} seeds; the largest difference '
        'of logits, relative to the largest logit; the median time of a training step of 20 images.\n')


def draw(model: nn.Module, images: torch.Tensor, checkpoint: Path, output: Path) -> None:
    """Draw what fine-tuned heads look at: a checkpoint is loaded into a model that is made and rewritten alike."""
    load_checkpoint(model, str(checkpoint))
    plot_attention(model, output, images=images)


if __name__ == '__main__':
    main()
