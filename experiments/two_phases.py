"""Draw accuracy over training time through the rewrite: python experiments/two_phases.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. `timm_cmhsa.train` trains every model on 3,000 of the images by its default optimizer, with mirror images
averaged (--tta), and validates on 2,000 other training images. Those are drawn; the table has the images of
DIR/validation, too. A seed takes one to two hours on one core. Other work on the machine disturbs the times: `--workers
1` does one run after the other.
"""
from pathlib import Path
from statistics import mean
from typing import Any, Dict, List

from common.options import make_run_parser
from common.report import accuracies, make_figure, plot_mean_and_range, show
from common.runs import Result, Run, replicate, run_all

BOTH, SWITCH = 'both phases', 0.4


def run(title: str, model: str, epochs: int, lr: float = 0.05, switch: float = 1., **model_kwargs: Any) -> Run:
    return Run(title, 3000, dict(
        model=model, model_kwargs=model_kwargs, img_size=32, epochs=epochs, opt='muon', lr=lr, switch=switch, tta=True))


ROWS = {row.title: row for row in (  # of as many epochs as take half an hour, on one core in float32
    run(BOTH, 'cmhsa_conv_k5_patch4_32', 60, switch=SWITCH, hidden_chans=6, depth=4),
    run('ViT', 'vit_tiny_patch16_224', 44, lr=0.01, patch_size=4, depth=4, class_token=False, global_pool='avg'),
    run('hybrid, phase 1', 'cmhsa_hybrid_conv_32', 50),
    run('ResNet-18', 'resnet18_cifar', 48, channels=(24, 48, 96, 192)),
)}


def main() -> None:
    parser = make_run_parser(__doc__, 'two_phases', seeds=3, photos=True)
    parser.set_defaults(num_held_out=2000)
    args = parser.parse_args()
    results = run_all(replicate(ROWS, args), args)
    draw(results, args.output / 'rewrite.png')
    show(accuracies(results), args.output / 'two_phases.md')


def draw(results: Dict[str, List[Result]], path: Path) -> None:
    figure, (axis,) = make_figure((7, 4))
    for title, seeds in results.items():
        times = [mean(seconds) / 60 for seconds in zip(*(each['curves']['seconds'] for each in seeds), strict=True)]
        plot_mean_and_range(axis, times, [each['curves']['top1'] for each in seeds], label=title)
        if title == BOTH:
            minutes = times[seeds[0]['curves']['epoch'].index(max(round(SWITCH * seeds[0]['epochs']), 1))]
            axis.axvline(minutes, color='gray', linestyle=':')
            axis.annotate(' convolutions are\n rewritten as attention', (minutes, 0.04), fontsize=8, color='gray',
                          xycoords=('data', 'axes fraction'))
    axis.set(xlabel='training time, minutes on one core', ylabel='top-1 on held-out images, %')
    axis.legend(loc='lower right')
    figure.savefig(path)


if __name__ == '__main__':
    main()
