"""A whole ResNet-18 as attention: convert, compare, fine-tune, on the digits: python experiments/attend_resnet.py

timm's `resnet18` is trained on digits, each at a random place on a 32 x 32 canvas. `attend_convs` then replaces its
convolutions by self-attention that computes the same function: all of them, or those of the last two stages. Both
train on, beside the CNN itself. About 20 minutes on 2 cores.

The output folder gets the table. The folders of the runs have pictures of what the heads look at, before and after
fine-tuning.
"""
from functools import partial
from pathlib import Path
from typing import Any, Dict, List

import torch
from common.images import BATCH_SIZE, CANVAS, OPTIONS
from common.options import make_run_parser
from common.report import markdown_table, show, spread, top1
from common.runs import Result, Run, create, replicate, run_all
from common.timing import step_seconds
from timm.models import load_checkpoint
from torch import nn

from timm_cmhsa import attend_convs
from timm_cmhsa.cnn import attention_summary


def attend(cnn: nn.Module, names: Any) -> nn.Module:
    """Rewrite a part of the CNN."""
    return cnn if names is None else attend_convs(cnn, names, (1, CANVAS, CANVAS))


NAMES: Dict[str, Any] = {'none': None, 'all convolutions': '*', 'last two stages': ['layer3.*', 'layer4.*']}
CNN = Run('CNN', 400, dict(
    OPTIONS, img_size=CANVAS, epochs=40, lr=2e-3, model='resnet18', model_kwargs=dict(in_chans=1)))
ROWS = {title: Run(title, 400, dict(OPTIONS, img_size=CANVAS, epochs=20, lr=2e-4), CNN, partial(attend, names=names))
        for title, names in NAMES.items()}


def main() -> None:
    args = make_run_parser(__doc__, 'attend_resnet', seeds=3).parse_args()
    runs = replicate(ROWS, args)
    results = run_all(runs, args)
    models = {title: attend(create(run), NAMES[title]) for title, (run, *_) in runs.items()}  # first weights
    for title, model in models.items():
        print(f'{title}:\n{attention_summary(model)}')
    show(markdown(models, runs, results, args.output), args.output / 'attend_resnet.md')


@torch.inference_mode()
def logits_error(run: Run, output: Path) -> float:
    """Return the largest difference of logits that the rewrite makes, relative to the largest logit."""
    cnn = create(run)
    load_checkpoint(cnn, str(run.checkpoint(output)))
    images = torch.randn(64, 1, CANVAS, CANVAS, generator=torch.Generator().manual_seed(0))
    logits = cnn.eval()(images)
    return ((attend(cnn, NAMES[run.title])(images) - logits).abs().max() / logits.abs().max()).item()


def markdown(
        models: Dict[str, nn.Module], runs: Dict[str, List[Run]], results: Dict[str, List[Result]], output: Path,
) -> str:
    """Return the table of all forms, over the seeds."""
    seconds = step_seconds(models, torch.randn(BATCH_SIZE, 1, CANVAS, CANVAS))
    head = ['convolutions that became attention', 'parameters', 'logits differ by', 'top-1', 'fine-tuned', 'step, ms']
    rows = []
    for title, seeds in results.items():
        error = max(logits_error(run, output) for run in runs[title])
        before, after = (spread(top1(seeds, when)) for when in ('before', 'test'))
        rows.append([
            title, f'{seeds[0]["params"]:.1f} M', f'{error:.1e}', before, after, f'{1e3 * seconds[title]:.0f}'])
    return markdown_table(head, rows) + (
        f'\nTop-1 on 597 test images, %, mean ± standard deviation over {len(seeds)} seeds; the largest difference '
        'of logits, relative to the largest logit; the median time of a training step of 20 images.\n')


if __name__ == '__main__':
    main()
