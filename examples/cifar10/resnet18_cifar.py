"""ResNet-18 for 32 x 32 images, with which the pixel models are compared: importing this registers it with timm."""
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet
from torch import nn


class CifarResNet(ResNet):
    """timm's ResNet with the usual stem for 32 x 32 images: a 3 x 3 convolution without stride, and no pooling."""
    conv1: nn.Conv2d

    def __init__(self, *args: Any, in_chans: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, in_chans=in_chans, **kwargs)
        weight = self.conv1.weight
        self.conv1 = nn.Conv2d(
            in_chans, len(weight), 3, padding=1, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.kaiming_normal_(self.conv1.weight, mode='fan_out', nonlinearity='relu')
        self.maxpool = nn.Identity()
        for info in self.feature_info:
            info['reduction'] //= 2 if info['module'] == 'act1' else 4


default_cfgs = generate_default_cfgs({
    'resnet18_cifar': {
        'num_classes': 10, 'input_size': (3, 32, 32), 'pool_size': (4, 4),
        'crop_pct': 1.0, 'interpolation': 'bicubic',
        'mean': (0.4914, 0.4822, 0.4465), 'std': (0.2470, 0.2435, 0.2616),  # of CIFAR-10
        'first_conv': 'conv1', 'classifier': 'fc',
        'paper_ids': 'arXiv:1512.03385', 'paper_name': 'Deep Residual Learning for Image Recognition',
    },
})


@register_model
def resnet18_cifar(pretrained: bool = False, **kwargs: Any) -> ResNet:
    """ The ResNet-18 of Table 1 of arXiv 1911.03584. """
    model_args = dict(block=BasicBlock, layers=(2, 2, 2, 2), num_classes=10)
    return build_model_with_cfg(CifarResNet, 'resnet18_cifar', pretrained, **dict(model_args, **kwargs))
