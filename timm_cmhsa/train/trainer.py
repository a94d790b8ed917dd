"""Train a model for some epochs of a schedule. One that was stopped goes on to the same weights, by as many workers."""
import copy
import math
import time
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.optim import create_optimizer_v2, muon
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, accuracy, distribute_bn, random_seed, reduce_tensor
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import convert_conv2d_weight_memory_format
from tqdm import tqdm

from ..checkpoint import Checkpoint
from ..errors import one_line
from ..images import data_config
from ..models import Cmhsa
from ..predict import mirrored
from .data import Images, make_loaders
from .options import MUON

TIMED, TIMING = (1, 4, 16), '-timing'  # steps in a row, and what ends the name of their checkpoint
NUM_POINTS = 50  # of a curve: how often a training is validated and saved
WARMUP_OF_NEW = 0.02  # of the schedule: warm-up of parameters that the rewrite adds
NEW_OF_MUON = 0.03  # their learning rate, relative to that of others
ORTHOGONALIZE = muon.zeropower_via_newtonschulz  # timm's Muon looks it up in its module in every step

Point = Dict[str, float]  # of a curve


@dataclass
class Trained:
    """A model in training, and everything else that a checkpoint holds."""
    model: nn.Module
    forward: Any  # the same, compiled and distributed
    epochs: range
    schedule: range  # epochs of the learning rate's schedule, of which those can be a part
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    average: Optional[ModelEmaV3]
    scaler: torch.amp.GradScaler  # does something in float16 alone
    history: List[Point] = field(default_factory=list)

    @property
    def judged(self) -> nn.Module:
        """Return the model to judge and to save: the averaged one, if there is one."""
        return self.model if self.average is None else self.average.module

    def _parts(self) -> Dict[str, Any]:
        parts = dict(
            state_dict=self.model, optimizer=self.optimizer,
            amp_scaler=self.scaler if self.scaler.is_enabled() else None,
            state_dict_ema=self.average and self.average.module)
        return {name: part for name, part in parts.items() if part is not None}

    def save(self, path: Path) -> None:
        """Save a checkpoint. A kill or a full disk at any moment leaves the old one or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state: Dict[str, Any] = {name: part.state_dict() for name, part in self._parts().items()}
        if isinstance(self.model, Cmhsa) or hasattr(self.model, 'attended'):  # what load_model reads
            spec = Checkpoint.of(self.model).spec
            state['args'] = {**spec.pretrained_cfg, 'model': spec.architecture, 'model_kwargs': spec.model_args,
                             'attend': spec.attend}
        try:
            torch.save({'history': self.history, **state}, path.with_suffix('.part'))
        except RuntimeError as e:
            raise OSError(f'{path} cannot be written: {one_line(e)} Make room, and run the same command again.') from e
        path.with_suffix('.part').replace(path)

    def load(self, path: Path) -> List[Point]:
        """Load a checkpoint, and return its history."""
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(checkpoint[name])
        return checkpoint['history']


@dataclass
class Judged:
    """A model as the tables name it, and what it takes the images of each split for."""
    title: str
    model: nn.Module
    predicted: Dict[str, Tuple[torch.Tensor, torch.Tensor]]  # logits in float32, (N, num_classes), and classes, (N,)
    history: Sequence[Point] = ()  # none if only the rewrite made it

    def top1(self, split: str = 'validation') -> float:
        """Return the top-1 accuracy in percent."""
        return accuracy(*self.predicted[split])[0].item()

    def right(self, split: str) -> torch.Tensor:
        """Return 1 for every image that is classified right, and 0 for the others: float64, (N,)."""
        logits, targets = self.predicted[split]
        return (logits.argmax(dim=1) == targets).double()


class Trainer:
    """Trains models with the complete options of the command, on images that are prepared as for the first of them."""

    def __init__(self, args: Namespace, images: Images, model: nn.Module) -> None:
        self.args, self.images, self.device = args, images, torch.device(args.device)
        self.loaders = make_loaders(images, args, data_config(model))
        self.updates = len(self.loaders.train)  # of an epoch
        self.mixup = None
        if args.mixup or args.cutmix:
            self.mixup = Mixup(
                args.mixup, args.cutmix, prob=args.mixup_prob, label_smoothing=args.smoothing,
                num_classes=len(args.classes))
        self.class_weights = None
        if args.class_weights:
            counts = torch.tensor([target for _, target in images.splits['train']]).bincount().float()
            self.class_weights = (counts.mean() / counts).to(self.device)

    def fit(
            self, name: str, model: nn.Module, epochs: range, before: Optional[Trained] = None,
            average: Optional[nn.Module] = None) -> Trained:
        """Train a model for some of the options' epochs, or go on where this was stopped.

        Phase 2 keeps what the optimizer of phase 1, `before`, knows about parameters that stay. An average of weights,
        if one is asked for, starts from `average`, by default from the model.
        """
        args, path = self.args, Path(self.args.output, 'checkpoints', f'{name}.pth.tar')
        convert_conv2d_weight_memory_format(model.to(self.device), torch.channels_last)  # faster
        forward = torch.compile(model) if args.compile else model
        optimizer = self._optimizer(model, before)
        schedule = epochs if args.separate_schedules else range(args.epochs)
        scheduler, _ = create_scheduler_v2(
            optimizer, num_epochs=len(schedule), min_lr=optimizer.defaults['lr'] / 100, warmup_lr=1e-6,
            warmup_epochs=min(args.warmup_epochs, len(schedule) // 4), step_on_epochs=False,
            updates_per_epoch=self.updates)
        state = Trained(
            model, DistributedDataParallel(forward) if args.distributed else forward, epochs, schedule, optimizer,
            scheduler, ModelEmaV3(average or model, args.ema, use_warmup=True) if args.ema else None,
            torch.amp.GradScaler(self.device.type, enabled=args.amp_dtype == 'float16'))
        if path.exists():
            state.history = state.load(path)
        history = state.history or (before.history if before else [])  # that of phase 1 ends where phase 2 begins
        first, seconds = (int(history[-1]['epoch']), history[-1]['seconds']) if history else (epochs.start, 0.)
        if state.history and not args.rank and not name.endswith(TIMING):
            tqdm.write(f'{name} ' + (f'goes on after epoch {first}' if first < epochs.stop else 'was trained before'))
        with self._one_line_errors(name), tqdm(
                desc=name, total=len(epochs) * self.updates, initial=(first - epochs.start) * self.updates, unit='step',
                **({'disable': True} if args.rank else {})) as progress:  # or as TQDM_DISABLE says
            for epoch in range(first, epochs.stop):
                loss, duration = self._train_epoch(epoch, state, progress)
                seconds += duration
                # in the same order in all processes, which a set would not have
                for each in dict.fromkeys((model, state.judged)) if args.distributed else ():
                    distribute_bn(each, args.world_size, reduce=True)
                if not math.isfinite(loss) and name in ('phase1', 'phase2'):  # a rival may
                    raise ValueError(f'{name} diverged in epoch {epoch + 1}: use a smaller --lr, and another --output.')
                if (epoch + 1) % max(len(schedule) // NUM_POINTS, 1) and epoch + 1 < epochs.stop:
                    continue
                start = time.perf_counter()
                with self._autocast():  # curves need no more
                    logits, targets = self._predict(state.judged)
                point = dict(
                    epoch=epoch + 1, train_loss=loss, seconds=seconds,
                    judging=self._means(time.perf_counter() - start)[0],
                    loss=F.cross_entropy(logits, targets).item(), top1=accuracy(logits, targets)[0].item())
                state.history.append(point)
                if args.rank == 0:
                    state.save(path)
                progress.set_postfix(loss=f'{loss:.3f}', top1=f"{point['top1']:.1f}")
        for each in (model, state.judged):
            convert_conv2d_weight_memory_format(each, torch.contiguous_format)  # as safetensors needs it
        return state

    def seconds_per_epoch(self, name: str, model: nn.Module) -> Tuple[float, float]:
        """Return how long an epoch and its validation take, by a few steps of a copy. This stays when a run goes on."""
        few, model = copy.copy(self), copy.deepcopy(model)
        few.args = Namespace(**{**vars(self.args), 'epochs': 3})
        shortest = math.inf  # a step, and the start of a loader
        few.loaders = self.loaders._replace(judged={'validation': self.loaders.few})
        for steps in TIMED:
            few.updates = min(self.updates, steps)
            history = few.fit(f'{name}-{steps}{TIMING}', model, range(3)).history
            # without the first, which may compile
            seconds = median(after['seconds'] - before['seconds'] for before, after in pairwise(history))
            shortest = min(shortest, seconds)
            if seconds > max(4, 3 * shortest):  # slow steps, beside which the start is little
                break
        num_drawn, num_judged = len(self.loaders.drawn[0]), len(self.images.splits['validation'])
        judging = history[-1]['judging'] * num_judged / num_drawn / max(self.args.workers, 1)
        return seconds * self.updates / few.updates, judging

    def _optimizer(self, model: nn.Module, before: Optional[Trained]) -> torch.optim.Optimizer:
        """Create an optimizer. Parameters that `before` does not have warm up, and learn at a rate of their own."""
        args = self.args
        optimizer = create_optimizer_v2(
            model, args.opt, lr=(before and args.phase2_lr) or args.lr, weight_decay=args.weight_decay,
            layer_decay=args.layer_decay, fallback_no_weight_decay=True, **args.opt_kwargs)  # Muon is for matrices
        if args.amp_dtype != 'bfloat16':  # which is Muon's own, and slow where it is emulated
            in_float32 = partial(ORTHOGONALIZE, dtype=torch.float32)
            optimizer.register_step_pre_hook(lambda *_: setattr(muon, ORTHOGONALIZE.__name__, in_float32))
            optimizer.register_step_post_hook(lambda *_: setattr(muon, ORTHOGONALIZE.__name__, ORTHOGONALIZE))
        if before is None:
            return optimizer
        old = dict(before.model.named_parameters())
        kept = {parameter: old[name] for name, parameter in model.named_parameters()
                if name in old and old[name].shape == parameter.shape}
        if not args.separate_schedules:
            optimizer.state.update(
                {parameter: before.optimizer.state[source] for parameter, source in kept.items()
                 if source in before.optimizer.state})
        for group in list(optimizer.param_groups):
            new = [parameter for parameter in group['params'] if parameter not in kept]
            group['params'] = [parameter for parameter in group['params'] if parameter in kept]
            scale = group.get('lr_scale', 1.) * (NEW_OF_MUON if args.opt.lower() in MUON else 1.)
            optimizer.add_param_group({**group, 'params': new, 'full_scale': scale})
        return optimizer

    def _train_epoch(self, epoch: int, state: Trained, progress: tqdm) -> List[float]:
        """Train an epoch, whose randomness depends on the seed and its number alone. Return mean loss and seconds."""
        args, optimizer, start = self.args, state.optimizer, time.perf_counter()
        random_seed((args.seed * 100_003 + epoch * args.world_size) % 2 ** 31, args.rank)
        if args.distributed:
            self.loaders.train.sampler.set_epoch(epoch)
        warmup = max(WARMUP_OF_NEW * len(state.schedule) * self.updates, 1)
        total, updates = torch.zeros((), device=self.device), range(epoch * self.updates, (epoch + 1) * self.updates)
        state.model.train()
        for update, (images, targets) in zip(updates, self.loaders.train):
            for group in optimizer.param_groups:
                if 'full_scale' in group:
                    warm = min((update - state.epochs.start * self.updates + 1) / warmup, 1.)
                    group['lr_scale'] = group['full_scale'] * warm
            state.scheduler.step_update(update - state.schedule.start * self.updates)
            optimizer.zero_grad()
            images, targets = images.to(self.device), targets.to(self.device)
            if self.mixup is not None:
                images, targets = self.mixup(images, targets)
            with self._autocast():
                logits = state.forward(images)
            loss = self._loss(logits.float(), targets)
            total += loss.detach()
            state.scaler.scale(loss).backward()
            state.scaler.step(optimizer)
            state.scaler.update()
            if state.average is not None:
                state.average.update(state.model, step=update)
            progress.update()
        return self._means(total.item() / self.updates, time.perf_counter() - start)

    def _means(self, *values: float) -> List[float]:
        """Return numbers as means over all processes."""
        means = torch.tensor(values, device=self.device)
        return (reduce_tensor(means, self.args.world_size) if self.args.distributed else means).tolist()

    def _autocast(self) -> torch.autocast:
        dtype = getattr(torch, self.args.amp_dtype or 'bfloat16')
        return torch.autocast(self.device.type, dtype, enabled=bool(self.args.amp_dtype))

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, for classes, (N,), or for what Mixup makes of them, (N, num_classes)."""
        smoothing = self.args.smoothing
        losses = F.cross_entropy(logits, targets, label_smoothing=0. if self.mixup else smoothing, reduction='none')
        if self.class_weights is not None:
            # Of an image, not of a class: cross_entropy's own weights would multiply what smoothing gives a rare class.
            shares = (targets - smoothing / targets.shape[1]) / (1 - smoothing) if self.mixup else (
                F.one_hot(targets, logits.shape[1]).float())
            losses = losses * (shares @ self.class_weights)
        return losses.mean()

    @contextmanager
    def _one_line_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except torch._dynamo.exc.TorchDynamoException as e:
            raise ValueError(f'{name} cannot be compiled: {one_line(e)} Leave out --compile.') from e
        except torch.cuda.OutOfMemoryError as e:
            raise ValueError(f'{name} does not fit into memory: use a smaller --batch-size and a new --output.') from e
        except RuntimeError as e:
            raise ValueError(
                f'{name} stopped: {one_line(e)} The same command goes on after the last epoch that was saved.') from e

    def _predict(self, model: nn.Module, split: str = 'validation') -> Tuple[torch.Tensor, torch.Tensor]:
        model.to(self.device).eval()
        classify, logits, targets = mirrored(model) if self.args.tta else model, [], []
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            for images, target in self.loaders.judged[split]:
                logits.append(classify(images.to(self.device)).float().cpu())
                targets.append(target.cpu())
        return torch.cat(logits), torch.cat(targets)

    def judge(self, title: str, model: nn.Module, history: Sequence[Point] = ()) -> Judged:
        """Classify the images of every split, once a training has ended."""
        with self._one_line_errors(title):
            return Judged(title, model, {split: self._predict(model, split) for split in self.loaders.judged}, history)
