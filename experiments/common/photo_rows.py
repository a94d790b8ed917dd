"""The ways to train on natural images that experiments/natural_images.py compares."""
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from torch import nn

import timm_cmhsa
from timm_cmhsa.rel_pos import BIAS_SCALE, PaddedRelPosTable

from .photos import IMG_SIZE

sys.path.insert(0, str(Path(__file__).parents[2] / 'examples' / 'cifar10'))
import resnet18_cifar  # noqa: F401  registers the model

TOKENS = dict(img_size=IMG_SIZE, patch_size=4)  # 8 x 8
CONV = 'cmhsa_conv_k5', dict(TOKENS, hidden_chans=6, depth=4, num_classes=10)  # of width 96
ATTENTION = 'cmhsa_attn', CONV[1]
VIT = 'vit_tiny_patch16_224', dict(
    TOKENS, embed_dim=192, depth=4, num_heads=3, num_classes=10, class_token=False, global_pool='avg')
CONVIT = 'convit_tiny', dict(TOKENS, embed_dim=48, depth=4, num_heads=4, num_classes=10, local_up_to_layer=3)  # 4 x 48
CONVNEXT = 'convnext_atto', dict(patch_size=2, dims=(32, 64, 128, 256), depths=(1, 1, 2, 1), num_classes=10)
RESNET = 'resnet18_cifar', dict(channels=(24, 48, 96, 192), num_classes=10)
# time of an epoch, in epochs of phase 1: measured on two cores of an Intel Xeon with AMX, fixed since budgets follow
COSTS = {'soft heads': 3.4, 'attention': 3.1, 'ViT': 3.4, 'ConViT': 3.8, 'ConvNeXt': 0.75, 'ResNet': 3.}
PHASE1, CNN = 'phase 1', 'ResNet-18'
AS_MANY_STEPS, AS_MUCH_TIME = (f'{PHASE1} alone, {long}' for long in ('as many steps', 'as much time'))
MAPPED = 'two phases, peak 0.75'  # the row whose attention is drawn
DRAWN = (  # those whose curves answer what to take
    PHASE1, AS_MUCH_TIME, 'two phases, one-hot', MAPPED, 'attention alone', 'ViT', 'ConViT',
    'ConvNeXt', CNN)


class Row(NamedTuple):
    """A way to train: a model from a random start, or what another row trained, rewritten."""
    title: str
    model: str
    model_args: Dict[str, Any]
    epochs: int
    after: Optional['Row'] = None
    rewrite: Optional[str] = None  # one of REWRITES

    @property
    def budget(self) -> str:
        """Return the epochs of all phases."""
        return f'{self.epochs} epochs' if self.after is None else f'{self.after.epochs} + {self.epochs} epochs'


def one_hot(is_thin: bool = False) -> Callable:
    """Return how to rewrite a model with one-hot heads, which are trained as shifts: the same, for less."""
    def rewrite(model: Any) -> nn.Module:
        model = timm_cmhsa.convert_model(model, head_dim=model.embed_dim // 2 if is_thin else None)
        model.set_hard_attn()
        return model
    return rewrite


def one_hot_and_spare(scale: float) -> Callable:
    """Return how to rewrite a model with one-hot heads, and one more head, which attends from a random start."""
    return lambda model: with_bias_scale(timm_cmhsa.convert_model(model, 'cmhsa_attn_soft'), scale)


def soft(peak: float, is_thin: bool = False, scale: float = BIAS_SCALE) -> Callable:
    """Return how to rewrite a model with soft heads whose biases learn so many times as fast as weights."""
    def rewrite(model: Any) -> nn.Module:
        model = timm_cmhsa.convert_model(model, head_dim=model.embed_dim // 2 if is_thin else None, peak=peak)
        return with_bias_scale(model, scale)
    return rewrite


def with_bias_scale(model: nn.Module, scale: float) -> nn.Module:
    """Change how fast biases learn, and not what they are."""
    for module in model.modules():
        if isinstance(module, PaddedRelPosTable):
            module.relative_position_bias_table.data *= module.bias_scale / scale
            module.bias_scale.fill_(scale)
    return model


def attend_stages(peak: Optional[float]) -> Callable:
    """Return how to rewrite the last two stages of a ResNet."""
    def rewrite(model: Any) -> nn.Module:
        timm_cmhsa.attend_convs(model, ['layer3.*', 'layer4.*'], (3, IMG_SIZE, IMG_SIZE), peak=peak)
        model.no_weight_decay = lambda: {'*.rel_pos.*'}  # timm's optimizers ask for it
        return model
    return rewrite


HELD = 'peak 0.75, bias scale 10, global head held'
REWRITES: Dict[str, Callable[[nn.Module], nn.Module]] = {
    'not rewritten': lambda model: model,  # what the second schedule does alone
    'one-hot': one_hot(),
    'peak 0.75': soft(0.75),
    'one-hot, thin': one_hot(is_thin=True),
    'peak 0.75, thin': soft(0.75, is_thin=True),
    'peak 0.75, bias scale 10': soft(0.75, scale=10.),
    'peak 0.75, bias scale 100': soft(0.75, scale=100.),
    'peak 0.5, bias scale 10': soft(0.5, scale=10.),
    'one-hot, a spare head, bias scale 10': one_hot_and_spare(scale=10.),
    HELD: soft(0.75, scale=10.),
}
REWRITES_OF_RESNET: Dict[str, Callable[[nn.Module], nn.Module]] = {
    'trained on': lambda model: model,
    'last two stages one-hot': attend_stages(None),
    'last two stages peak 0.75': attend_stages(0.75),
}


def make_rows(epochs1: int, epochs2: int) -> List[Row]:
    """Return all rows, given the epochs of phase 1 and of phase 2.

    Where nothing else is said, models train for as much time as two phases with soft heads. The ResNet has that time
    as well, and then half of phase 2's epochs to be trained on, whatever these take. What attends from a random start
    does not fit its images by then, so it also has four times as long.
    """
    time = epochs1 + COSTS['soft heads'] * epochs2
    phase1, cnn = Row(PHASE1, *CONV, epochs1), Row(CNN, *RESNET, round(time / COSTS['ResNet']))
    return [
        phase1,
        Row(AS_MANY_STEPS, *CONV, epochs1 + epochs2),
        Row(AS_MUCH_TIME, *CONV, round(time)),
        *(Row(f'two phases, {name}', *CONV, epochs2, phase1, name) for name in REWRITES),
        Row('attention alone', *ATTENTION, round(time / COSTS['attention'])),
        Row('attention alone, 4 times as long', *ATTENTION, round(4 * time / COSTS['attention'])),
        Row('ViT', *VIT, round(time / COSTS['ViT'])),
        Row('ViT, 4 times as long', *VIT, round(4 * time / COSTS['ViT'])),
        Row('ConViT', *CONVIT, round(time / COSTS['ConViT'])),
        Row('ConViT, 4 times as long', *CONVIT, round(4 * time / COSTS['ConViT'])),
        Row('ConvNeXt', *CONVNEXT, round(time / COSTS['ConvNeXt'])),
        cnn,
        *(Row(f'{CNN}, {name}', *RESNET, (epochs2 + 1) // 2, cnn, name) for name in REWRITES_OF_RESNET),
    ]
