"""What does phase 2 add to a hybrid? python experiments/hybrid_phase2.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Every run is one schedule of `timm_cmhsa.train` on --images of them, in which the convolutions are rewritten
in one of several ways, and is judged by 1,000 other training images. All rows take about as long as --epochs of phase 1
alone, about 20 minutes on one core. The test images choose nothing.

The output folder gets the table, and gain.png with what phase 2 gains at every number of images in --results.
"""
import math
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

from common.options import make_run_parser, positive_int
from common.report import accuracies, half_interval, make_figure, show
from common.runs import NARROW, Result, Run, read_results, replicate, run_all
from timm.models import VisionTransformer
from torch import nn

import timm_cmhsa
from timm_cmhsa.attention import RelPosAttention
from timm_cmhsa.layers import Mask, PatchConv2d


class Beside(PatchConv2d):
    """A convolution, and attention beside it."""
    beside: RelPosAttention

    def forward(self, x: Any, attn_mask: Mask = None, is_causal: bool = False) -> Any:
        return super().forward(x, attn_mask, is_causal) + self.beside(x)


def plain(model: Any) -> nn.Module:
    """Make the trainer take a model of mixed layers for any model of timm."""
    model.__class__ = VisionTransformer
    model.no_weight_decay = lambda: {'*.rel_pos.*'}
    return model


def attend_last(model: Any) -> nn.Module:
    """Rewrite the last block alone."""
    model.blocks[-1].attn = timm_cmhsa.convert_model(model).blocks[-1].attn
    return plain(model)


def add_beside(model: Any, num_heads: int = 4, head_dim: int = 24, qk_dim: int = 16) -> nn.Module:
    """Add heads beside every convolution, which add nothing at first."""
    for mixer in (block.attn for block in model.blocks):
        mixer.__class__ = Beside
        mixer.beside = RelPosAttention(
            model.embed_dim, mixer.grid_size, num_heads, head_dim, qk_dim, rel_pos='padded_table')
        nn.init.zeros_(mixer.beside.proj.weight)
    return plain(model)


ALONE, BESIDE = 'phase 1 alone', 'heads beside, switch 0.4'
FINE: Dict[str, Any] = dict(model_kwargs=dict(NARROW, stem='32-96p', patch_size=2))
WIDE: Dict[str, Any] = dict(model_kwargs={})  # as cmhsa_hybrid_conv_32 is
RAW: Dict[str, Any] = dict(model='cmhsa_conv_k5_patch4_32', model_kwargs=dict(hidden_chans=6, depth=4))
ROWS: Dict[str, Tuple[float, Optional[Callable[[Any], nn.Module]], Dict[str, Any]]] = {
    # the epochs that take as long as one of phase 1 alone, how it is rewritten, and options
    ALONE: (1., None, dict(switch=1.)),
    'phase 1 alone, weights averaged': (1., None, dict(switch=1., ema=0.995)),
    'all blocks, switch 0.4': (0.48, None, dict(switch=0.4)),
    'all blocks, switch 0.75': (0.69, None, dict(switch=0.75)),
    'last block, switch 0.4': (0.77, attend_last, dict(switch=0.4)),
    BESIDE: (0.78, add_beside, dict(switch=0.4)),
    # for --muon
    'wide, phase 1 alone': (1., None, dict(switch=1., **WIDE)),
    'wide, all blocks': (1., None, dict(switch=0.4, **WIDE)),
    'wide, heads beside': (1., add_beside, dict(switch=0.4, **WIDE)),
    # and a GPU
    'heads beside on a tenth of the width': (1., partial(add_beside, num_heads=2, head_dim=5), dict(switch=0.4)),
    '16 x 16 tokens, phase 1 alone': (1., None, dict(switch=1., **FINE)),
    '16 x 16 tokens, last block': (1., attend_last, dict(switch=0.4, **FINE)),
    'raw patches, phase 1 alone': (1., None, dict(switch=1., **RAW)),
    'raw patches, all blocks': (1., None, dict(switch=0.4, **RAW)),
}


def main() -> None:
    parser = make_run_parser(__doc__, 'hybrid_phase2', seeds=2, photos=True)
    add = parser.add_argument
    add('--images', type=positive_int, default=3000, help='number of training images (default: %(default)s)')
    add('--epochs', type=positive_int, default=120, help='of phase 1 alone (default: %(default)s)')
    add('--batch-size', type=positive_int, help='images of a step (default: as the trainer chooses)')
    add('--muon', action='store_true', help='Muon, equal epochs, and the means of mirror images')
    args = parser.parse_args()
    batch_size = args.batch_size or 2 ** min(6, int(math.log2(args.images / 8)))  # as the trainer chooses, and rates
    recipe: Dict[str, Any] = dict(opt='muon', lr=0.05, tta=True) if args.muon else dict(lr=2e-3)
    recipe.update(batch_size=batch_size, lr=float(f'{recipe["lr"] * min(batch_size / 64, 1.) ** 0.5:.1e}'))
    rows = {}
    for title, (share, rewrite, options) in ROWS.items():
        epochs = max(round((1 if args.muon else share) * args.epochs), 2)
        options = {
            'model': 'cmhsa_hybrid_conv_32', 'model_kwargs': NARROW, 'img_size': 32, 'epochs': epochs, **recipe,
            **options}
        rows[title] = Run(title, args.images, options, rewrite=rewrite)
    show(accuracies(run_all(replicate(rows, args), args)), args.output / 'hybrid_phase2.md')
    draw(read_results(args.results).values(), args.output / 'gain.png')


def gains(results: Iterable[Result], row: str = BESIDE, baseline: str = ALONE) -> Dict[int, Tuple[float, float]]:
    """Return the mean gain on the test images at every number of images, over the seeds that two rows share, and half
    of its 95 % interval: Student's, paired, from three seeds on, and else that of the 5,000 test images alone."""
    test = {(each['title'], each['num_train'], each['seed']): each['test']['top1'] for each in results}
    found = {}
    for images in sorted({number for _, number, _ in test}):
        pairs = [(top1, test[baseline, images, seed]) for (title, number, seed), top1 in test.items()
                 if (title, number) == (row, images) and (baseline, images, seed) in test]
        if pairs:
            differences = [top1 - other for top1, other in pairs]
            half = half_interval(differences) if len(pairs) >= 3 else (
                1.96 * (sum(each * (100 - each) for pair in pairs for each in pair) / 5000) ** 0.5 / len(pairs))
            found[images] = mean(differences), half
    return found


def draw(results: Iterable[Result], path: Path) -> None:
    """Draw the gain of phase 2 over phase 1 alone, in as much time, against the number of images."""
    found = gains(results)
    figure, (axis,) = make_figure((7, 4))
    axis.set_xscale('log')  # before the points, as there may be none yet
    axis.errorbar(
        list(found), [gain for gain, _ in found.values()], [half for _, half in found.values()], marker='o', capsize=3,
        label='hybrid, 4 heads beside every convolution')
    axis.set_xticks(list(found), [f'{number:,}' for number in found])
    axis.minorticks_off()
    axis.axhline(0, color='black', linewidth=1)
    axis.set(xlabel='training images', ylabel='gain of phase 2 in as much time, points of top-1')
    axis.legend()
    figure.savefig(path)


if __name__ == '__main__':
    main()
