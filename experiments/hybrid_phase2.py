"""What does phase 2 add to a hybrid? python experiments/hybrid_phase2.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Every run is one schedule of `timm_cmhsa.train` on --images of them, in which the convolutions are rewritten
in one of several ways, and is judged by other training images and all of validation/, with mirror images averaged
(--tta). A run takes 20 to 60 minutes on one core. The test images choose nothing. The output folder gets the table;
take another one for another --batch-size or --held-out.
"""
import math
from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple

from common.options import make_run_parser, positive_int
from common.report import accuracies, show
from common.runs import NARROW, Run, replicate, run_all
from timm.models import VisionTransformer
from torch import nn

import timm_cmhsa
from timm_cmhsa.attention import RelPosAttention
from timm_cmhsa.layers import Mask, PatchConv2d

RATES = {'muon': 0.05, 'adamw': 2e-3}


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


WIDE: Dict[str, Any] = dict(model_kwargs={})  # as cmhsa_hybrid_conv_32 is
FINE: Dict[str, Any] = dict(model_kwargs=dict(NARROW, stem='32-96p', patch_size=2))
RAW: Dict[str, Any] = dict(model='cmhsa_conv_k5_patch4_32', model_kwargs=dict(hidden_chans=6, depth=4))
ROWS: Dict[str, Tuple[float, Optional[Callable[[Any], nn.Module]], Dict[str, Any]]] = {
    # the share of phase 1, how it is rewritten, and options
    'wide, phase 1 alone': (1., None, WIDE),
    'wide, all blocks': (0.4, None, WIDE),
    'wide, heads beside': (0.4, add_beside, WIDE),
    'phase 1 alone': (1., None, {}),
    'all blocks': (0.4, None, {}),
    'last block': (0.4, attend_last, {}),
    'heads beside': (0.4, add_beside, {}),
    'heads beside on a tenth of the width': (0.4, partial(add_beside, num_heads=2, head_dim=5), {}),
    '16 x 16 tokens, phase 1 alone': (1., None, FINE),
    '16 x 16 tokens, last block': (0.4, attend_last, FINE),
    'raw patches, phase 1 alone': (1., None, RAW),
    'raw patches, all blocks': (0.4, None, RAW),
    'raw patches, heads beside': (0.4, add_beside, RAW),
}


def main() -> None:
    parser = make_run_parser(__doc__, 'hybrid_phase2', seeds=2, photos=True)
    add = parser.add_argument
    add('--images', type=positive_int, default=3000, help='number of training images (default: %(default)s)')
    add('--epochs', type=positive_int, default=100, help='of every row (default: %(default)s)')
    add('--batch-size', type=positive_int, help='images of a step (default: as the trainer chooses)')
    add('--opt', choices=list(RATES), default='muon', help='(default: %(default)s)')
    parser.set_defaults(num_held_out=2000)
    args = parser.parse_args()
    batch_size = args.batch_size or 2 ** min(6, int(math.log2(args.images / 8)))  # as the trainer chooses
    rate = float(f'{RATES[args.opt] * min(batch_size / 64, 1.) ** 0.5:.1e}')
    rows = {}
    for title, (switch, rewrite, options) in ROWS.items():
        rows[title] = Run(title, args.images, {
            'model': 'cmhsa_hybrid_conv_32', 'model_kwargs': NARROW, 'img_size': 32, 'epochs': args.epochs,
            'switch': switch, 'opt': args.opt, 'lr': rate, 'batch_size': batch_size, 'tta': True, **options},
            rewrite=rewrite)
    show(accuracies(run_all(replicate(rows, args), args)), args.output / 'hybrid_phase2.md')


if __name__ == '__main__':
    main()
