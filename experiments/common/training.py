"""Training of one model on small images, which goes on where it was stopped."""
import argparse
import json
import random
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import timm
import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import CheckpointSaver, accuracy
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from .data import Images
from .report import write_whole

BATCH_SIZE = 20

History = List[Dict[str, float]]


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
    batch_size: int = BATCH_SIZE
    mixup: float = 0.  # probability of Mixup (0.8) or CutMix (1.0), one or the other, in a batch
    amp: bool = False  # in bfloat16

    @property
    def img_size(self) -> int:
        return self.canvas or self.model_args['img_size']


def has_bfloat16() -> bool:
    """Return whether the processor, or the GPU if there is one, has bfloat16. Emulating it is far slower."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported()


def create(stage: Stage, seed: int) -> nn.Module:
    """Create the model of a stage, with weights that depend on the seed alone."""
    seed_everything(seed)
    return timm.create_model(stage.model, **stage.model_args)


def train(
        stage: Stage,
        model: nn.Module,
        train_data: Images,
        test_data: Images,
        output: Path,
        seed: int,
        device: torch.device,
) -> Tuple[nn.Module, History]:
    """Train one stage, or go on where it stopped; checkpoints are in the stage's folder in output.

    Returns:
        The model, and its losses and accuracies over the epochs, with the seconds that they took: on a CPU those of the
        process itself, whatever else the machine does.
    """
    folder = output / stage.name
    folder.mkdir(parents=True, exist_ok=True)
    model.to(device)
    loader = DataLoader(train_data, stage.batch_size, shuffle=True, drop_last=True)
    optimizer = create_optimizer_v2(model, opt='adamw', lr=stage.lr, weight_decay=stage.weight_decay)
    scheduler, _ = create_scheduler_v2(
        optimizer, num_epochs=stage.epochs, warmup_epochs=min(stage.warmup_epochs, stage.epochs // 2), warmup_lr=1e-6,
        min_lr=1e-5, step_on_epochs=False, updates_per_epoch=len(loader))
    saver = CheckpointSaver(
        model, optimizer, args=checkpoint_args(stage, seed, train_data.config), checkpoint_dir=str(folder),
        max_history=stage.checkpoint_hist)

    start_epoch, history = resume(folder, model, optimizer)
    seconds = history[-1]['seconds'] if history else 0.
    clock = time.process_time if device.type == 'cpu' else time.perf_counter
    start = clock()
    progress = tqdm(range(start_epoch, stage.epochs), stage.title, initial=start_epoch, total=stage.epochs)
    for epoch in progress:
        seed_everything(seed * 1000 + epoch)
        train_loss = train_epoch(stage, epoch, model, loader, optimizer, scheduler, device)
        if (epoch + 1) % stage.eval_every == 0 or epoch + 1 == stage.epochs:
            row = {'epoch': epoch + 1, 'train_loss': train_loss, **evaluate(model, test_data, device)}
            history.append({**row, 'seconds': seconds + clock() - start})
            write_whole(folder / 'history.json', json.dumps(history))
            saver.save_checkpoint(epoch, row['top1'])
            progress.set_postfix(loss=f"{row['train_loss']:.3f}", top1=f"{row['top1']:.2f}")
    return model.eval(), history


def checkpoint_args(stage: Stage, seed: int, config: Dict[str, Any]) -> argparse.Namespace:
    """Return a stage under the names of `train.py`'s options, which the conversion and the model card read."""
    return argparse.Namespace(
        model=stage.model, model_kwargs=stage.model_args, **config,
        epochs=stage.epochs, batch_size=stage.batch_size, opt='adamw', lr=stage.lr, sched='cosine',
        warmup_epochs=stage.warmup_epochs, weight_decay=stage.weight_decay, smoothing=stage.smoothing, seed=seed)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tuple[int, History]:
    """Load the last checkpoint, if there is one; returns the epochs done and their history."""
    last = folder / 'last.pth.tar'
    if not last.exists():
        return 0, []
    epochs = resume_checkpoint(model, str(last), optimizer, log_info=False) or 0
    history = json.loads((folder / 'history.json').read_text())
    return epochs, [row for row in history if row['epoch'] <= epochs]  # a kill may leave a row without a checkpoint


def train_epoch(
        stage: Stage,
        epoch: int,
        model: nn.Module,
        loader: DataLoader,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler,
        device: torch.device,
) -> float:
    """Train one epoch and return its mean loss."""
    loss_fn: nn.Module = LabelSmoothingCrossEntropy(stage.smoothing)
    if stage.mixup:
        mixup = Mixup(0.8, 1.0, prob=stage.mixup, label_smoothing=stage.smoothing, num_classes=model.num_classes)
        loss_fn = SoftTargetCrossEntropy()
    model.train()
    total = 0.
    for step, (images, targets) in enumerate(loader):
        if stage.mixup:
            images, targets = mixup(images, targets)
        with torch.autocast(device.type, torch.bfloat16, enabled=stage.amp):
            logits = model(images.to(device))
        loss = loss_fn(logits.float(), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step_update(epoch * len(loader) + step + 1)
        total += loss.item()
    return total / len(loader)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.inference_mode()
def evaluate(model: nn.Module, data: Images, device: torch.device) -> Dict[str, float]:
    """Return loss, top-1 and top-5 accuracy in percent."""
    model.eval()
    logits, targets = [], []
    for images, target in DataLoader(data, 200):
        logits.append(model(images.to(device)).cpu())
        targets.append(target)
    output, target = torch.cat(logits), torch.cat(targets)
    top1, top5 = accuracy(output, target, topk=(1, 5))
    return {'loss': nn.functional.cross_entropy(output, target).item(), 'top1': top1.item(), 'top5': top5.item()}


def num_params(model: nn.Module) -> float:
    """Return the number of parameters in millions."""
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6
