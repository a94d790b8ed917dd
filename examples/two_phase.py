"""Two-phase training on little data, from nothing to a better model: python examples/two_phase.py

A few hundred handwritten digits (real images, bundled with scikit-learn), each at a random place on a canvas, are all
that is trained on. Phase 1 trains a `cmhsa_conv_k5`; `convert_checkpoint` rewrites it, exactly, as a `cmhsa_attn`;
phase 2 trains on. For comparison, both models are trained alone for as many epochs as the two phases together.

The output folder gets the table, the loss curves, what the heads look at, and every checkpoint. A run that was stopped
goes on where it stopped.
"""
import argparse
import json
import random
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import matplotlib
import numpy as np
import timm
import torch
from digits import CANVAS, NUM_IMAGES, Digits, digits_on_canvas, preprocessing
from timm.layers import set_fused_attn
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import resume_checkpoint, save_for_hf
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AttentionExtract, CheckpointSaver, accuracy
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from timm_cmhsa import convert_checkpoint

matplotlib.use('Agg')
from matplotlib import pyplot as plt
from matplotlib.colors import PowerNorm

SHAPE = dict(img_size=CANVAS, patch_size=8, in_chans=1, hidden_chans=1, depth=4, num_classes=10)
NUM_HEADS = 12  # 9 express the convolution, 3 are free to look elsewhere
BATCH_SIZE = 20


class Stage(NamedTuple):
    """One model trained once."""
    name: str
    title: str
    model: str
    model_args: Dict[str, Any]
    epochs: int
    lr: float
    warmup_epochs: int = 5
    weight_decay: float = 0.05
    smoothing: float = 0.1
    eval_every: int = 5  # epochs
    canvas: Optional[int] = None  # pixels; by default the model's img_size
    checkpoint_hist: int = 1  # how many to keep, the best ones

    @property
    def img_size(self) -> int:
        return self.canvas or self.model_args['img_size']


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    check_settings(args)
    phase1, phase2, conv_only, attn_only = stages(args)
    train_data, test_data = digits_on_canvas(args.num_train, args.seed)
    device = torch.device(args.device)
    run = (args.output, args.seed, device)

    conv_model, phase1_history = train(phase1, create(phase1, args.seed), train_data, test_data, *run)
    converted = args.output / 'converted'
    report = convert_checkpoint(
        args.output / phase1.name / 'last.pth.tar', converted, model='cmhsa_attn', num_heads=NUM_HEADS, force=True)
    print(report)
    converted_model = timm.create_model(f'local-dir:{converted}', pretrained=True).to(device)
    before, after = evaluate(conv_model, test_data, device), evaluate(converted_model, test_data, device)
    print(f"top-1 before the conversion {before['top1']:.2f} %, after it {after['top1']:.2f} %")

    maps_before = attention_maps(converted, test_data)
    attn_model, phase2_history = train(phase2, converted_model, train_data, test_data, *run)
    final = args.output / 'model'
    save_for_hf(attn_model, str(final), model_args=dict(SHAPE, num_heads=NUM_HEADS), safe_serialization=True)
    loaded = evaluate(timm.create_model(f'local-dir:{final}', pretrained=True).to(device), test_data, device)
    print(f"saved in {final}, loaded back: top-1 {loaded['top1']:.2f} %")

    _, conv_history = train(conv_only, create(conv_only, args.seed), train_data, test_data, *run)
    _, attn_history = train(attn_only, create(attn_only, args.seed), train_data, test_data, *run)

    two_phase = phase1_history + [{**row, 'epoch': row['epoch'] + phase1.epochs} for row in phase2_history]
    histories = {'two phases': two_phase, conv_only.title: conv_history, attn_only.title: attn_history}
    rows = results(histories, phase1_history, after)
    (args.output / 'results.json').write_text(json.dumps(rows, indent=2))
    (args.output / 'results.md').write_text(markdown(rows))
    print(markdown(rows))
    plot_losses(histories, phase1.epochs, args.output / 'loss.png')
    plot_attention(maps_before, attention_maps(final, test_data), args.output / 'attention.png')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--epochs', type=int, default=80, help='epochs of each phase (default: %(default)s)')
    add('--num-train', type=int, default=400, help='training images (default: %(default)s)')
    add('--seed', type=int, default=0, help='of the data, the weights and the training (default: %(default)s)')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='default: %(default)s')
    add('--output', type=Path, default=Path('output/two_phase'), help='folder (default: %(default)s)')
    add('--quick', action='store_true', help='two epochs of each phase: shows that everything runs')
    args = parser.parse_args()
    if args.quick:
        args.epochs = 2
    if args.epochs < 1 or not BATCH_SIZE <= args.num_train <= 1700:
        parser.error(f'--epochs must be positive, --num-train between {BATCH_SIZE} and 1700 (of {NUM_IMAGES} images)')
    if args.output.exists() and not args.output.is_dir():
        parser.error(f'--output {args.output} is not a folder')
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as e:
        parser.error(f'--device {args.device} cannot be used: {str(e).splitlines()[0]}')
    return args


def check_settings(args: argparse.Namespace) -> None:
    """Never continue a run that had other settings."""
    settings = {key: getattr(args, key) for key in ('epochs', 'num_train', 'seed')}
    path = args.output / 'settings.json'
    if path.exists() and json.loads(path.read_text()) != settings:
        raise SystemExit(f'{args.output} holds a run with other settings: {path.read_text()}; choose another --output.')
    path.write_text(json.dumps(settings))


def stages(args: argparse.Namespace) -> Tuple[Stage, Stage, Stage, Stage]:
    attn_args = dict(SHAPE, num_heads=NUM_HEADS)
    return (
        Stage('phase1', 'phase 1', 'cmhsa_conv_k5', SHAPE, args.epochs, lr=3e-3),
        Stage('phase2', 'phase 2', 'cmhsa_attn', attn_args, args.epochs, lr=1e-3),
        Stage('conv_only', 'phase 1 alone', 'cmhsa_conv_k5', SHAPE, 2 * args.epochs, lr=3e-3),
        Stage('attn_only', 'attention alone', 'cmhsa_attn', attn_args, 2 * args.epochs, lr=1e-3),
    )


def create(stage: Stage, seed: int) -> nn.Module:
    seed_everything(seed)
    return timm.create_model(stage.model, **stage.model_args)


def train(
        stage: Stage,
        model: nn.Module,
        train_data: Digits,
        test_data: Digits,
        output: Path,
        seed: int,
        device: torch.device,
) -> Tuple[nn.Module, List[Dict[str, float]]]:
    """Train one stage, or go on where it stopped; returns the model and its losses and accuracies over the epochs."""
    folder = output / stage.name
    folder.mkdir(parents=True, exist_ok=True)
    model.to(device)
    loader = DataLoader(train_data, BATCH_SIZE, shuffle=True, drop_last=True)
    loss_fn = LabelSmoothingCrossEntropy(stage.smoothing)
    optimizer = create_optimizer_v2(model, opt='adamw', lr=stage.lr, weight_decay=stage.weight_decay)
    scheduler, _ = create_scheduler_v2(
        optimizer, num_epochs=stage.epochs, warmup_epochs=min(stage.warmup_epochs, stage.epochs // 2), warmup_lr=1e-6,
        min_lr=1e-5, step_on_epochs=False, updates_per_epoch=len(loader))
    checkpoint_args = argparse.Namespace(  # with train.py's names, which the conversion and the model card read
        model=stage.model, model_kwargs=stage.model_args, **preprocessing(stage.img_size),
        epochs=stage.epochs, batch_size=BATCH_SIZE, opt='adamw', lr=stage.lr, sched='cosine',
        warmup_epochs=stage.warmup_epochs, weight_decay=stage.weight_decay, smoothing=stage.smoothing, seed=seed)
    saver = CheckpointSaver(
        model, optimizer, args=checkpoint_args, checkpoint_dir=str(folder), max_history=stage.checkpoint_hist)

    last, history_file = folder / 'last.pth.tar', folder / 'history.json'
    start_epoch, history = 0, []
    if last.exists():
        start_epoch = resume_checkpoint(model, str(last), optimizer, log_info=False) or 0
        history = [row for row in json.loads(history_file.read_text()) if row['epoch'] <= start_epoch]
    seconds = history[-1]['seconds'] if history else 0.
    start = time.perf_counter()
    progress = tqdm(range(start_epoch, stage.epochs), stage.title, initial=start_epoch, total=stage.epochs)
    for epoch in progress:
        seed_everything(seed * 1000 + epoch)
        model.train()
        total = 0.
        for step, (images, targets) in enumerate(loader):
            loss = loss_fn(model(images.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step_update(epoch * len(loader) + step + 1)
            total += loss.item()
        if (epoch + 1) % stage.eval_every == 0 or epoch + 1 == stage.epochs:
            row = {'epoch': epoch + 1, 'train_loss': total / len(loader), **evaluate(model, test_data, device)}
            history.append({**row, 'seconds': seconds + time.perf_counter() - start})
            write_whole(history_file, json.dumps(history))
            saver.save_checkpoint(epoch, row['top1'])
            progress.set_postfix(loss=f"{row['train_loss']:.3f}", top1=f"{row['top1']:.2f}")
    return model.eval(), history


def write_whole(path: Path, text: str) -> None:
    """Write a file such that a kill at any moment leaves the old one or the new one."""
    partial = path.with_suffix('.partial')
    partial.write_text(text)
    partial.replace(path)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.inference_mode()
def evaluate(model: nn.Module, data: Digits, device: torch.device) -> Dict[str, float]:
    """Loss, top-1 and top-5 accuracy in percent."""
    model.eval()
    logits, targets = [], []
    for images, target in DataLoader(data, 200):
        logits.append(model(images.to(device)).cpu())
        targets.append(target)
    output, target = torch.cat(logits), torch.cat(targets)
    top1, top5 = accuracy(output, target, topk=(1, 5))
    return {'loss': nn.functional.cross_entropy(output, target).item(), 'top1': top1.item(), 'top5': top5.item()}


def results(
        histories: Dict[str, List[Dict[str, float]]],
        phase1_history: List[Dict[str, float]],
        converted: Dict[str, float],
) -> List[Dict[str, Any]]:
    """The rows of the final table; times are those of all training that led to a row."""
    phase1, two_phase = phase1_history[-1], histories['two phases'][-1]
    rows = {
        'phase 1': phase1,
        'phase 1, converted': {**phase1, **converted},
        'phase 1, converted, phase 2': {**two_phase, 'seconds': phase1['seconds'] + two_phase['seconds']},
        **{title: history[-1] for title, history in histories.items() if title != 'two phases'},
    }
    return [{'training': title, 'epochs': row['epoch'], **{key: row[key] for key in ('top1', 'top5', 'seconds')}}
            for title, row in rows.items()]


def markdown(rows: List[Dict[str, Any]]) -> str:
    lines = ['| training | epochs | top-1 | top-5 | time |', '|---|---:|---:|---:|---:|']
    lines += ['| {training} | {epochs} | {top1:.2f} % | {top5:.2f} % | {seconds:.0f} s |'.format(**row) for row in rows]
    return '\n'.join(lines) + '\n'


def plot_losses(histories: Dict[str, List[Dict[str, float]]], switch_epoch: int, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout='constrained')
    for axis, key, label in zip(axes, ('loss', 'top1'), ('test loss', 'top-1 accuracy, %')):
        for title, history in histories.items():
            axis.plot([row['epoch'] for row in history], [row[key] for row in history], label=title)
        axis.axvline(switch_epoch, color='gray', linestyle=':', label='conversion')
        axis.set(xlabel='epoch', ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


@torch.inference_mode()
def attention_maps(folder: Path, data: Digits) -> torch.Tensor:
    """Mean attention over the first test images: shape (depth, num_heads, N, N + 1), the zero key last."""
    set_fused_attn(False)  # the fused kernel never forms the maps
    model = timm.create_model(f'local-dir:{folder}', pretrained=True)
    set_fused_attn(True)
    images = torch.stack([data[i][0] for i in range(64)])
    return torch.stack([maps.mean(dim=0) for maps in AttentionExtract(model, method='hook')(images).values()])


def plot_attention(before: torch.Tensor, after: torch.Tensor, path: Path) -> None:
    """What every head of the first and the last block looks at from one patch, before and after phase 2."""
    grid = CANVAS // SHAPE['patch_size']
    query = (grid // 2) * grid + grid // 2
    rows = [(f'block {block + 1}\n{when}', maps[block, :, query])
            for block in (0, len(before) - 1) for when, maps in (('before', before), ('after', after))]
    figure, axes = plt.subplots(len(rows), NUM_HEADS, figsize=(NUM_HEADS, len(rows) * 1.2), layout='constrained')
    for (title, maps), line in zip(rows, axes):
        line[0].set_ylabel(title)
        for axis, weights in zip(line, maps):
            axis.imshow(weights[:-1].reshape(grid, grid), norm=PowerNorm(0.5, vmin=0, vmax=1), cmap='magma')
            axis.plot(query % grid, query // grid, 'c+')
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f'nothing: {weights[-1]:.0%}' if weights[-1] >= 0.005 else '', fontsize=7)
    for head, axis in enumerate(axes[0]):
        axis.set_title(f'head {head + 1}' if head < 9 else 'spare', fontsize=8)
    figure.suptitle('Attention from the patch marked +, mean of 64 test images (brightness: square root)', fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == '__main__':
    main()
