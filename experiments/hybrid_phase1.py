"""Compare phase 1 of a hybrid with CNNs: python experiments/hybrid_phase1.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Every model trains on 3,000 of them for --epochs by the defaults of the trainer, by Muon, and is judged by
2,000 other training images and by all of validation/, with mirror images averaged (--tta). A run takes 10 to 25 minutes
on one core. The output folder gets the table.
"""
from typing import Any, Dict, Tuple

from common.options import make_run_parser, positive_int
from common.report import accuracies, show
from common.runs import NARROW, Run, replicate, run_all
from timm.layers import BatchNormAct2d, create_conv2d
from timm.models import register_model
from timm.models.convmixer import ConvMixer
from timm.models.resnetv2 import ResNetV2
from torch import nn


def register(build: Any) -> Any:
    """Register a function that builds a model for 32 x 32 pixels and so many classes with timm."""
    def create(pretrained_cfg_overlay: Any = None, num_classes: int = 10, **kwargs: Any) -> nn.Module:
        model = build(num_classes)
        model.pretrained_cfg = {'input_size': (3, 32, 32), **(pretrained_cfg_overlay or {})}
        return model
    create.__name__, create.__module__ = build.__name__, build.__module__
    return register_model(create)


@register
def wrn_photos(num_classes: int) -> nn.Module:
    """Build a WRN-16-2."""
    model = ResNetV2(
        [2, 2, 2], (32, 64, 128), num_classes, stem_chs=16, basic=True, bottle_ratio=1.,
        conv_layer=create_conv2d, norm_layer=BatchNormAct2d)
    model.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return model


@register
def convmixer_photos(num_classes: int) -> nn.Module:
    return ConvMixer(256, 7, kernel_size=5, patch_size=4, num_classes=num_classes)


OPTIONS = dict(img_size=32, opt='muon', tta=True)
MODELS: Dict[str, Tuple[str, Dict[str, Any]]] = {
    'hybrid': ('cmhsa_hybrid_conv_32', {}),
    'hybrid, narrow': ('cmhsa_hybrid_conv_32', NARROW),
    'WRN-16-2': ('wrn_photos', {}),
    'ResNet-18': ('resnet18_cifar', dict(channels=(24, 48, 96, 192))),
    'ConvMixer': ('convmixer_photos', {}),
}
ROWS = {title: Run(title, 3000, dict(OPTIONS, model=model, model_kwargs=model_kwargs))
        for title, (model, model_kwargs) in MODELS.items()}


def main() -> None:
    parser = make_run_parser(__doc__, 'hybrid_phase1', seeds=1, photos=True)
    add = parser.add_argument
    add('--epochs', type=positive_int, default=100, help='of every row (default: %(default)s)')
    add('--lr', type=float, default=0.05, help='learning rate of Muon (default: %(default)s)')
    parser.set_defaults(num_held_out=2000)
    args = parser.parse_args()
    rows = {title: run.change(dict(epochs=args.epochs, lr=args.lr)) for title, run in ROWS.items()}
    show(accuracies(run_all(replicate(rows, args), args)), args.output / 'hybrid_phase1.md')


if __name__ == '__main__':
    main()
