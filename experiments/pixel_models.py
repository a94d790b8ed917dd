"""Attention on pixels with four relative position encodings, and a ResNet-18: python experiments/pixel_models.py

After "On the Relationship between Self-Attention and Convolutional Layers" (arXiv 1911.03584), Tables 1 and 4, scaled
down to digits of 16 x 16 pixels, 400 training images, and models of a quarter of the width. About 40 minutes on 2
cores. examples/cifar10 has recipes for the models in full size. The output folder gets the table, and pictures of the
heads.
"""
from pathlib import Path
from statistics import mean
from typing import Any, Dict, List

import torch
from centers import center_figure, gaussians
from common.images import BATCH_SIZE, DIGIT, OPTIONS
from common.options import make_run_parser
from common.report import markdown_table, show, spread, top1
from common.runs import Result, Run, create, replicate, run_all
from common.timing import step_seconds

from timm_cmhsa import attention_maps, head_statistics, load_model
from timm_cmhsa.analysis import HeadStatistics
from timm_cmhsa.images import choose_images
from timm_cmhsa.plots import plot_attention


def plan(title: str, model: str, lr: float = 2e-3, **model_kwargs: Any) -> Run:
    options = dict(OPTIONS, img_size=DIGIT, shift=4, epochs=60, lr=lr, model=model,
                   model_kwargs=dict(in_chans=1, **model_kwargs))
    return Run(title, 400, options)


WIDTH = 24  # hidden_chans: 8 x 8 tokens of width 96
RESNET, GENERAL = 'ResNet-18', 'generalized quadratic'
ROWS = {run.title: run for run in (
    plan(RESNET, 'resnet18_cifar'),
    plan('quadratic', 'pixel_attn_quadratic', hidden_chans=WIDTH),
    plan(GENERAL, 'pixel_attn_quadratic_gen', hidden_chans=WIDTH),
    plan('learned', 'pixel_attn_learned', hidden_chans=WIDTH),
    plan('learned, with content', 'pixel_attn_learned_content', lr=5e-4, hidden_chans=WIDTH),
)}


def main() -> None:
    args = make_run_parser(__doc__, 'pixel_models', seeds=3).parse_args()
    runs = replicate(ROWS, args)
    results = run_all(runs, args)
    table = markdown(runs, results)
    attending = {title: each for title, each in runs.items() if title != RESNET}
    show(f'{table}\n{likeness(attending, args.output)}', args.output / 'pixel_models.md')
    for title in ('quadratic', GENERAL, 'learned, with content'):
        run = runs[title][0]
        draw(run, args.output, args.output / 'pictures' / run.options['model'])


def trained(run: Run, output: Path) -> Any:
    return load_model(run.folder(output) / 'model')


def markdown(runs: Dict[str, List[Run]], results: Dict[str, List[Result]]) -> str:
    """Return the table of the models."""
    models = {title: create(seeds[0]) for title, seeds in runs.items()}
    seconds = step_seconds(models, torch.randn(BATCH_SIZE, 1, DIGIT, DIGIT))
    rows = [[title, f'{results[title][0]["params"]:.2f} M', f'{results[title][0]["lr"]:g}',
             spread(top1(results[title])), f'{1e3 * seconds[title]:.0f}'] for title in models]
    return markdown_table(['model', 'parameters', 'learning rate', 'top-1, %', 'step, ms'], rows) + (
        f'\nTop-1 on the test images, mean ± standard deviation over {len(results[RESNET])} seeds.\n')


def likeness(runs: Dict[str, List[Run]], output: Path) -> str:
    """Return how much like a convolution the heads are after training: means over heads and seeds."""
    models = [[f'{mean(head.best_weight for head in heads):.2f}, {mean(head.distance for head in heads):.1f}'
               for heads in all_heads(each, output)] for each in runs.values()]
    rows = [[str(layer), *cells] for layer, cells in enumerate(zip(*models), start=1)]
    return markdown_table(['layer', *runs], rows) + (
        '\nFor the heads of every layer: mean weight on the best single offset (1 is a tap of a convolution), and mean '
        'distance of their centres from the query, in tokens.\n')


def all_heads(runs: List[Run], output: Path) -> List[List[HeadStatistics]]:
    """Measure the heads of the trained models of several seeds, layer by layer."""
    layers: Dict[str, List[HeadStatistics]] = {}
    for run in runs:
        model = trained(run, output)
        for name, maps in attention_maps(model, choose_images(run.images(output) / 'test', model, 64)[0]).items():
            layers.setdefault(name, []).extend(head_statistics(maps))
    return list(layers.values())


def draw(run: Run, output: Path, folder: Path) -> None:
    """Draw the attention of the trained model, and where the centres of its heads began and ended."""
    model = trained(run, output)
    plot_attention(model, folder, images=run.images(output) / 'test', html=True)
    if after := gaussians(model):
        figure = center_figure(after, gaussians(create(run)), 'Centres of the heads, before and after training')
        figure.savefig(folder / 'centers.png')


if __name__ == '__main__':
    main()
