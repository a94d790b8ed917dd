"""A whole ResNet-18 as attention: convert, compare, fine-tune, on the digits: python experiments/attend_resnet.py

timm's `resnet18` is trained on digits, each at a random place on a 32 x 32 canvas. `attend_convs` then replaces its
convolutions by self-attention that computes the same function: all of them, or those of the last two stages. Both
train on, beside the CNN itself. About 20 minutes on 2 cores.

The output folder gets the table. The folders of the runs have pictures of what the heads look at, before and after
fine-tuning. What was stopped goes on where it stopped.
"""
import argparse
import copy
from functools import partial
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Union

import torch
from common.images import BATCH_SIZE, CANVAS, OPTIONS
from common.options import add_num_train, add_repeats, make_parser, positive_int
from common.report import markdown_table, spread, write_whole
from common.runs import Result, Run, create, run_all, top1
from common.timing import step_seconds
from timm.models import load_checkpoint
from torch import nn

from timm_cmhsa import attend_convs
from timm_cmhsa.cnn import attention_summary

NAMES: Dict[str, Optional[Union[str, Sequence[str]]]] = {  # of what becomes attention
    'none': None, 'all convolutions': '*', 'last two stages': ['layer3.*', 'layer4.*']}


def main() -> None:
    args = parse_args()
    folder = args.output / 'runs'
    runs = {title: [plan(title, seed, args) for seed in range(args.seeds)] for title in NAMES}
    results = run_all(runs, folder, 'runs')
    for title in list(NAMES)[1:]:
        print(f'{title}:\n{attention_summary(attend(create(runs[title][0]), NAMES[title]))}')
    table = markdown(runs, results, folder, args.repeats)
    write_whole(args.output / 'attend_resnet.md', table)
    print(table)


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 'attend_resnet', seeds=3)
    add = parser.add_argument
    add_num_train(parser)
    add('--epochs', type=positive_int, default=40, help='of the CNN; half as many to fine-tune (default: %(default)s)')
    add_repeats(parser, 5)
    return parser.parse_args()


def plan(title: str, seed: int, args: argparse.Namespace) -> Run:
    """Plan fine-tuning of the CNN, parts of which became attention."""
    options = dict(OPTIONS, img_size=CANVAS)
    cnn = Run('CNN', args.num_train, seed, dict(
        options, epochs=args.epochs, lr=2e-3, model='resnet18', model_kwargs=dict(in_chans=1)))
    return Run(title, args.num_train, seed, dict(options, epochs=max(args.epochs // 2, 1), lr=2e-4), after=cnn,
               rewrite=partial(attend, names=NAMES[title]))


def attend(cnn: nn.Module, names: Optional[Union[str, Sequence[str]]]) -> nn.Module:
    """Rewrite a part of the CNN."""
    return cnn if names is None else attend_convs(cnn, names, (1, CANVAS, CANVAS))


@torch.inference_mode()
def logits_error(run: Run, folder: Path) -> float:
    """Return the largest difference of logits that the rewrite makes, relative to the largest logit."""
    assert run.after is not None
    cnn = create(run)
    load_checkpoint(cnn, str(run.after.checkpoint(folder)))
    images = torch.randn(64, 1, CANVAS, CANVAS, generator=torch.Generator().manual_seed(0))
    logits = cnn.eval()(images)
    attended = attend(copy.deepcopy(cnn), NAMES[run.title])
    return ((attended(images) - logits).abs().max() / logits.abs().max()).item()


def markdown(runs: Dict[str, List[Run]], results: Dict[str, List[Result]], folder: Path, repeats: int) -> str:
    """Return the table of all forms, over the seeds."""
    models = {title: attend(create(run), NAMES[title]) for title, (run, *_) in runs.items()}
    seconds = step_seconds(models, torch.randn(BATCH_SIZE, 1, CANVAS, CANVAS), repeats)
    head = ['convolutions that became attention', 'parameters', 'logits differ by', 'top-1', 'fine-tuned', 'step, ms']
    rows = []
    for title, seeds in results.items():
        error = max(logits_error(run, folder) for run in runs[title])
        before, after = (spread(top1(seeds, when)) for when in ('before', 'test'))
        rows.append([
            title, f'{seeds[0]["params"]:.1f} M', f'{error:.1e}', before, after, f'{1e3 * seconds[title]:.0f}'])
    return markdown_table(head, rows) + (
        f'\nTop-1 on 597 test images, %, mean ± standard deviation over {len(seeds)} seeds; the largest difference '
        'of logits, relative to the largest logit; the median time of a training step of 20 images.\n')


if __name__ == '__main__':
    main()
