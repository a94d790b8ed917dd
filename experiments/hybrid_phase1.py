"""Compare ingredients of phase 1 after a stem, on 8 x 8 tokens: python experiments/hybrid_phase1.py --data-dir DIR

DIR has the folders train/CLASS with images of 32 x 32 pixels. Every run trains on 3,000 of them (300 a class) and is
judged by 1,000 others, chosen by the seed; the validation images are never read. Runs are done one after the other on
one core, in bfloat16 where it has that. Each appends a line to --results and is not done again, so that the queue can
be stopped and started. A run is a model with options, such as 'hybrid depth=6 lr=0.002'; without --runs all below are
done.
"""
import argparse
import csv
import random
import re
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm import layers
from timm.data import ImageDataset, Mixup, rand_augment_transform
from timm.loss import SoftTargetCrossEntropy
from timm.models.convmixer import ConvMixer
from timm.models.resnet import BasicBlock
from timm.models.resnetv2 import ResNetV2
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

INGREDIENTS = (
    '', 'act=relu', 'ema=0.995', 'ema=0.998', 'stem=32p-96-96p', 'stem=48-48p-96-96p',
    'stem=64p-128-128p depth=3 act=relu', 'norm=batch', 'mlp=plain', 'mlp=bn', 'pool=attn', 'depth=3', 'depth=6',
    'weight_decay=0.2', 'aug=rand-m5-n1-mstd0.5-inc1', 'epochs=200')
QUEUE = (
    'cnn', 'cnn lr=0.002', 'wrn', 'wrn lr=0.002', 'hybrid',
    *(f'hybrid lr=0.002 {options}'.rstrip() for options in INGREDIENTS), 'resnet18 lr=0.002',
    'convmixer dim=256 depth=7 lr=0.002', 'cct lr=0.001', 'cct lr=0.002', 'wrn lr=0.002 depth=28')
# quiet_seconds: the fastest epoch times the number of epochs, which other work on the machine disturbs least
COLUMNS = 'name', 'options', 'seed', 'epochs', 'params', 'core_seconds', 'quiet_seconds', 'top1', 'train_loss'
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))


def make_stem(stem: str, act_layer: Any) -> Tuple[List[nn.Module], int]:
    """Build convolutions such as '48-48p-96rp': widths, with s: stride 2, r: a residual block, p: max pooling."""
    modules: List[nn.Module] = []
    chans = 3
    for width, flags in re.findall(r'(\d+)([srp]*)', stem):
        modules.append(layers.ConvNormAct(chans, int(width), 3, stride=2 if 's' in flags else 1, act_layer=act_layer))
        chans = int(width)
        if 'r' in flags:
            modules.append(BasicBlock(chans, chans, act_layer=act_layer))
        if 'p' in flags:
            modules.append(nn.MaxPool2d(2))
    return modules, chans


class AttnPool(nn.Module):
    """Average tokens by a softmax of learned scores, the sequence pooling of CCT (arXiv 2104.05704)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Conv2d(dim, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.score(x).flatten(2).softmax(-1).view_as(x[:, :1])).sum((2, 3))


class Block(nn.Module):
    """Mix tokens by a dense 3 x 3 convolution, then apply an MLP: 'plain', with batch norm ('bn'), or also with a
    depthwise 3 x 3 in the middle ('dw'), as in LocalViT (arXiv 2104.05707)."""

    def __init__(self, dim: int, mlp: str, norm_layer: Any, act_layer: Any) -> None:
        super().__init__()
        conv, hidden = partial(layers.ConvNormAct, act_layer=act_layer), 4 * dim
        self.norm1, self.norm2 = norm_layer(dim), norm_layer(dim)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1)
        self.mlp: nn.Module = {
            'plain': lambda: layers.Mlp(dim, hidden, act_layer=act_layer, use_conv=True),
            'bn': lambda: nn.Sequential(conv(dim, hidden), conv(hidden, dim, apply_act=False)),
            'dw': lambda: nn.Sequential(
                conv(dim, hidden), conv(hidden, hidden, 3, groups=hidden), conv(hidden, dim, apply_act=False)),
        }[mlp]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.conv(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def hybrid(
        stem: str = '32p-96p', depth: int = 4, mlp: str = 'dw', norm: str = 'layer', pool: str = 'avg',
        act: str = 'gelu') -> nn.Module:
    act_layer = layers.get_act_layer(act)
    norm_layer = {'layer': layers.LayerNorm2d, 'batch': nn.BatchNorm2d}[norm]
    modules, dim = make_stem(stem, act_layer)
    pooling = {'avg': layers.SelectAdaptivePool2d(flatten=True), 'attn': AttnPool(dim)}[pool]
    blocks = [Block(dim, mlp, norm_layer, act_layer) for _ in range(depth)]
    return nn.Sequential(*modules, *blocks, norm_layer(dim), pooling, nn.Linear(dim, 10))


def cnn(stem: str = '64p-128p-256p') -> nn.Module:
    modules, dim = make_stem(stem, nn.ReLU)
    return nn.Sequential(*modules, layers.SelectAdaptivePool2d(flatten=True), nn.Linear(dim, 10))


def wrn(depth: int = 16, width: int = 2) -> nn.Module:
    model = ResNetV2(
        [(depth - 4) // 6] * 3, (16 * width, 32 * width, 64 * width), 10, stem_chs=16, basic=True, bottle_ratio=1.,
        conv_layer=layers.create_conv2d, norm_layer=layers.BatchNormAct2d)
    model.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return model


def resnet18(width: int = 24) -> nn.Module:
    model = timm.create_model('resnet18', num_classes=10, channels=(width, 2 * width, 4 * width, 8 * width))
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def convmixer(dim: int = 192, depth: int = 6) -> nn.Module:
    return ConvMixer(dim, depth, kernel_size=5, patch_size=4, num_classes=10)


def cct(dim: int = 128, depth: int = 6) -> nn.Module:
    """Build a CCT-4/3x2 (arXiv 2104.05704) of more layers, without what slows a short training down."""
    from vit_pytorch.cct import CCT

    return CCT(
        img_size=32, embedding_dim=dim, n_conv_layers=2, kernel_size=3, stride=1, padding=1, num_layers=depth,
        num_heads=2, mlp_ratio=1., num_classes=10, attention_dropout=0., stochastic_depth_rate=0.)


MODELS: Dict[str, Callable[..., nn.Module]] = {
    'hybrid': hybrid, 'cnn': cnn, 'wrn': wrn, 'resnet18': resnet18, 'convmixer': convmixer, 'cct': cct}


def read_images(data_dir: Path) -> Tuple[torch.Tensor, torch.Tensor]:
    """Read all training images, (N, 3, 32, 32), uint8, and their classes; from train.pt after the first time."""
    cache = data_dir / 'train.pt'
    if not cache.exists():
        images, targets = zip(*((pil_to_tensor(image), target) for image, target in ImageDataset(data_dir / 'train')))
        torch.save((torch.stack(images), torch.tensor(targets)), cache)
    return torch.load(cache)


def normalize(images: torch.Tensor) -> torch.Tensor:
    return ((images / 255 - MEAN) / STD).contiguous(memory_format=torch.channels_last)


def augment(images: torch.Tensor, policy: Any) -> torch.Tensor:
    """Apply RandAugment if there is a policy, normalize, crop with a padding of 4, and flip."""
    if policy:
        images = torch.stack([pil_to_tensor(policy(to_pil_image(image))) for image in images])
    windows = F.pad(normalize(images), [4] * 4).unfold(2, 32, 1).unfold(3, 32, 1)  # (B, 3, 9, 9, 32, 32)
    rows, columns = torch.randint(9, (2, len(images)))
    images = windows[torch.arange(len(images)), :, rows, columns]
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(-1), images)


def train(
        model: nn.Module, images: torch.Tensor, targets: torch.Tensor, epochs: int = 100, batch_size: int = 100,
        opt: str = 'adamw', lr: float = 1e-3, weight_decay: float = 0.05, aug: str = '', ema: float = 0.,
) -> Tuple[nn.Module, float, float]:
    """Train a model; return it or its average, the loss of the last epoch and the seconds of the fastest."""
    policy = rand_augment_transform(aug, {'translate_const': 10, 'img_mean': (125, 123, 114)}) if aug else None
    mixup, loss_fn = Mixup(0.8, 1., prob=0.5, label_smoothing=0.1, num_classes=10), SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(model, opt, lr, weight_decay)
    steps = len(images) // batch_size
    scheduler, _ = create_scheduler_v2(
        optimizer, num_epochs=epochs, warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, step_on_epochs=False,
        updates_per_epoch=steps)
    average = ModelEmaV3(model, ema, use_warmup=True) if ema else None
    loss, fastest = 0., float('inf')
    for epoch in range(epochs):
        total, start = 0., time.process_time()
        for step, batch in enumerate(torch.randperm(len(images))[:steps * batch_size].view(steps, -1)):
            x, y = mixup(augment(images[batch], policy), targets[batch])
            with torch.autocast('cpu', torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
                logits = model(x.contiguous(memory_format=torch.channels_last))
            batch_loss = loss_fn(logits.float(), y)
            optimizer.zero_grad()
            batch_loss.backward()
            optimizer.step()
            scheduler.step_update(epoch * steps + step + 1)
            total += batch_loss.item()
            if average:
                average.update(model, step=epoch * steps + step)
        loss, fastest = total / steps, min(fastest, time.process_time() - start)
        if epoch % 20 == 19:
            print(f'  epoch {epoch + 1}: loss {loss:.3f}, fastest epoch {fastest:.2f} s', flush=True)
    return average.module if average else model, loss, fastest


def do(run: str, seed: int, images: torch.Tensor, targets: torch.Tensor) -> Tuple[Any, ...]:
    """Train and judge a model, and return its line of the results."""
    name, model_args, train_args = parse(run)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    chosen = torch.stack([order[targets[order] == target][:400] for target in range(10)])
    train_set, held_out = chosen[:, :300].flatten(), chosen[:, 300:].flatten()
    torch.manual_seed(seed)
    model = MODELS[name](**model_args).to(memory_format=torch.channels_last)
    params, start = sum(parameter.numel() for parameter in model.parameters()), time.process_time()
    for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
        seed_generator(seed)
    model, loss, fastest = train(model, images[train_set], targets[train_set], **train_args)
    seconds, epochs = time.process_time() - start, train_args.get('epochs', 100)
    with torch.inference_mode():
        logits = torch.cat([model.eval()(normalize(x)) for x in images[held_out].split(250)])
    top1 = 100 * logits.argmax(1).eq(targets[held_out]).float().mean().item()
    return (name, ' '.join(run.split()[1:]), seed, epochs, params, round(seconds), round(fastest * epochs),
            f'{top1:.1f}', f'{loss:.3f}')


def parse(run: str) -> Tuple[str, Dict[str, Any], Dict[str, Any]]:
    """Return the name of a run's model, the options of the model, and those of the training."""
    name, *options = run.split()
    model_args: Dict[str, Any] = {}
    train_args: Dict[str, Any] = {}
    for key, text in (option.split('=') for option in options):
        value = int(text) if text.isdigit() else float(text) if re.fullmatch(r'\d*\.?\d+(e-?\d+)?', text) else text
        (train_args if key in train.__annotations__ else model_args)[key] = value
    return name, model_args, train_args


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data-dir', type=Path, required=True, help='folder with train/CLASS')
    parser.add_argument('--runs', nargs='+', default=QUEUE, metavar='RUN', help='models with options')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1], help='(default: %(default)s)')
    parser.add_argument('--results', type=Path, default=Path('benchmarks/hybrid_phase1.csv'), help='(%(default)s)')
    args = parser.parse_args()
    torch.set_num_threads(1)
    images, targets = read_images(args.data_dir)
    for name, model_args, _ in map(parse, args.runs):
        MODELS[name](**model_args)  # a mistake shows now, not after hours
    for run, seed in ((run, seed) for run in args.runs for seed in args.seeds):
        lines = list(csv.reader(args.results.open())) if args.results.exists() else []
        if [*run.split()[:1], ' '.join(run.split()[1:]), str(seed)] in [line[:3] for line in lines]:
            continue
        print(f'{time.strftime("%F %T")} {run}, seed {seed}', flush=True)
        result = do(run, seed, images, targets)
        with args.results.open('a', newline='') as file:
            csv.writer(file, lineterminator='\n').writerows([result] if lines else [COLUMNS, result])
        print(f'  {dict(zip(COLUMNS, result))}', flush=True)


if __name__ == '__main__':
    main()
