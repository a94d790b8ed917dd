"""Compare phase 1 of a hybrid with CNNs, on 8 x 8 tokens: python experiments/hybrid_phase1.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Every model trains on 3,000 of them for 100 epochs, with each learning rate, and is judged by 1,000 other
training images. A run takes 10 to 40 minutes on one core. The output folder gets the table.
"""
from typing import Any

from common.options import make_run_parser
from common.report import accuracies, show
from common.runs import NARROW, Run, replicate, run_all
from timm import layers
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
def cnn_photos(num_classes: int) -> nn.Module:
    """Build three convolutions with pooling."""
    convs = [layers.ConvNormAct(*chans, 3, act_layer=nn.ReLU) for chans in ((3, 64), (64, 128), (128, 256))]
    return nn.Sequential(*(each for conv in convs for each in (conv, nn.MaxPool2d(2))),
                         layers.SelectAdaptivePool2d(flatten=True), nn.Linear(256, num_classes))


@register
def wrn_photos(num_classes: int) -> nn.Module:
    """Build a WRN-16-2."""
    model = ResNetV2(
        [2, 2, 2], (32, 64, 128), num_classes, stem_chs=16, basic=True, bottle_ratio=1.,
        conv_layer=layers.create_conv2d, norm_layer=layers.BatchNormAct2d)
    model.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return model


@register
def convmixer_photos(num_classes: int) -> nn.Module:
    return ConvMixer(256, 7, kernel_size=5, patch_size=4, num_classes=num_classes)


@register
def cct_photos(num_classes: int) -> nn.Module:
    """Build a CCT-4/3x2 (arXiv 2104.05704) of more layers, without what slows a short training down."""
    from vit_pytorch.cct import CCT

    return CCT(
        img_size=32, embedding_dim=128, n_conv_layers=2, kernel_size=3, stride=1, padding=1, num_layers=6, num_heads=2,
        mlp_ratio=1., num_classes=num_classes, attention_dropout=0., stochastic_depth_rate=0.)


def run(title: str, model: str, lr: float, ema: float = 0., **model_kwargs: Any) -> Run:
    return Run(f'{title}, {lr:g}', 3000, dict(
        model=model, model_kwargs=model_kwargs, img_size=32, batch_size=100, epochs=100, lr=lr, ema=ema))


def hybrid(title: str, lr: float, ema: float = 0., **model_kwargs: Any) -> Run:
    return run(title, 'cmhsa_hybrid_conv_32', lr, ema, **{**NARROW, **model_kwargs})


ROWS = [
    hybrid('hybrid', lr=1e-3),
    hybrid('hybrid', lr=2e-3),
    hybrid('hybrid, ReLU', lr=2e-3, act_layer='relu'),
    hybrid('hybrid, weights averaged', lr=2e-3, ema=0.995),
    hybrid('hybrid, a third convolution in the stem', lr=2e-3, stem='32p-96-96p'),
    hybrid('hybrid, four', lr=2e-3, stem='48-48p-96-96p'),
    run('WRN-16-2', 'wrn_photos', 1e-3),
    run('WRN-16-2', 'wrn_photos', 2e-3),
    run('three convolutions', 'cnn_photos', 1e-3),
    run('three convolutions', 'cnn_photos', 2e-3),
    run('ResNet-18', 'resnet18_cifar', 2e-3, channels=(24, 48, 96, 192)),
    run('CCT', 'cct_photos', 1e-3),
    run('CCT', 'cct_photos', 2e-3),
    run('ConvMixer', 'convmixer_photos', 2e-3),
]


def main() -> None:
    args = make_run_parser(__doc__, 'hybrid_phase1', seeds=2, photos=True).parse_args()
    results = run_all(replicate({row.title: row for row in ROWS}, args), args)
    show(accuracies(results), args.output / 'hybrid_phase1.md')


if __name__ == '__main__':
    main()
