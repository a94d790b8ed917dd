"""Draw accuracy over training time through the rewrite: python experiments/two_phases.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. `timm_cmhsa.train` trains every model on 3,000 of the images, for about as long, and validates on 1,000 other
training images. Those are drawn; the table has the images of DIR/validation, too. A seed takes about 50 minutes on one
core; what was stopped goes on where it stopped. Time is that of the fastest epoch of each phase times their number,
which other work on the machine disturbs least.
"""
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, Dict, List, Tuple

import torch
from common.images import photos
from common.options import make_parser
from common.report import make_figure, markdown_table, plot_mean_and_range, seeds_note, show, spread

from timm_cmhsa.train import train_two_phases

sys.path.insert(0, str(Path(__file__).parents[1] / 'examples' / 'cifar10'))
import resnet18_cifar  # noqa: F401  registers the model

NUM_TRAIN, NUM_HELD_OUT = 3000, 1000  # images
ROWS: Dict[str, Dict[str, Any]] = {  # of as many epochs as take the same time
    'both phases': dict(
        model='cmhsa_conv_k5_patch4_32', model_kwargs=dict(hidden_chans=6, depth=4), epochs=60, switch=0.4),
    'ViT': dict(
        model='vit_tiny_patch16_224', epochs=53, switch=1,
        model_kwargs=dict(patch_size=4, depth=4, class_token=False, global_pool='avg')),
    'hybrid, phase 1': dict(model='cmhsa_hybrid_conv_32', epochs=87),
    'ResNet-18': dict(model='resnet18_cifar', model_kwargs=dict(channels=(24, 48, 96, 192)), epochs=72, switch=1),
}


def main() -> None:
    parser = make_parser(__doc__, 'two_phases', seeds=3)
    parser.add_argument('--data-dir', type=Path, required=True, help='images')
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: Dict[str, List[Dict[str, Any]]] = {title: [] for title in ROWS}
    for seed in range(args.seeds):
        images = photos(args.output, NUM_TRAIN, seed, args.data_dir, NUM_HELD_OUT)
        for title, options in ROWS.items():
            output = args.output / f'{title.replace(" ", "_")}-{seed}'
            results[title].append(train_two_phases(images, output=output, seed=seed, **options))
    draw(results, args.output / 'rewrite.png')
    show(markdown(results), args.output / 'results.md')


def curve(results: Dict[str, Any]) -> List[Tuple[float, float]]:
    """Return minutes and top-1, in percent, after epochs of all phases."""
    points, begin, first = [], 0., 0
    for history in (results['curves'].get(phase, []) for phase in ('phase 1', 'phase 2')):
        for point in history:
            minutes = begin + (point['epoch'] - first) * seconds_of_epoch(history) / 60
            points.append((minutes, point['top1']))
            last = point['epoch']
        begin, first = points[-1][0], last
    return points


def seconds_of_epoch(history: List[Dict[str, float]]) -> float:
    """Return the time of the fastest epoch."""
    return min(((after['seconds'] - before['seconds']) / (after['epoch'] - before['epoch'])
                for before, after in pairwise(history)))


def draw(results: Dict[str, List[Dict[str, Any]]], path: Path) -> None:
    figure, (axis,) = make_figure((7, 4))
    for title, seeds in results.items():
        curves = [curve(each) for each in seeds]
        times = [mean(minutes for minutes, _ in points) for points in zip(*curves, strict=True)]
        plot_mean_and_range(axis, times, [[top1 for _, top1 in points] for points in curves], label=title)
        if title == 'both phases':
            index = len(seeds[0]['curves']['phase 1']) - 1
            axis.axvline(times[index], color='gray', linestyle=':')
            axis.annotate(' convolutions are\n rewritten as attention', (times[index], 0.04), fontsize=8, color='gray',
                          xycoords=('data', 'axes fraction'))
    axis.set(xlabel='training time, minutes on one core', ylabel='top-1 on 1,000 held-out images, %')
    axis.legend(loc='lower right')
    figure.savefig(path)


def markdown(results: Dict[str, List[Dict[str, Any]]]) -> str:
    rows = [[
        title, f'{seeds[0]["parameters"] / 1e6:.2f} M', str(ROWS[title]['epochs']),
        f'{mean(curve(each)[-1][0] for each in seeds):.0f} min', spread([each['top1'] for each in seeds]),
        spread([each['test'].get('phase 2', each['test']['phase 1']) for each in seeds])]
        for title, seeds in results.items()]
    head = ['', 'parameters', 'epochs', 'time', 'held-out images', 'test images']
    return markdown_table(head, rows) + seeds_note(len(next(iter(results.values()))))


if __name__ == '__main__':
    main()
