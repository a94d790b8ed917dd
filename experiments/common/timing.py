"""Seconds of a training step: forward, backward and optimizer; and the processor that takes them."""
import platform
import re
import statistics
import time
from pathlib import Path
from typing import Callable, Dict

import torch
from timm.optim import create_optimizer_v2
from torch import nn


def step_seconds(models: Dict[str, nn.Module], images: torch.Tensor, repeats: int = 5) -> Dict[str, float]:
    """Measure the median time of a training step of every model.

    The models take turns, so that a drift of the machine meets all alike.
    """
    images = images.to(memory_format=torch.channels_last)  # as the trainer has models and images
    steps = [training_step(each.to(memory_format=torch.channels_last).train(), images) for each in models.values()]
    rounds = [[timed(step) for step in steps] for _ in range(repeats + 2)][2:]  # the first two warm up
    return dict(zip(models, map(statistics.median, zip(*rounds))))


def timed(step: Callable[[], None]) -> float:
    """Return the seconds that a step takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def training_step(model: nn.Module, images: torch.Tensor, amp: bool = False) -> Callable[[], None]:
    """Return a function that does one step and waits for its end."""
    optimizer = create_optimizer_v2(model, opt='adamw', lr=1e-5, weight_decay=0.05)
    targets = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
            loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        synchronize(images.device)
    return step


def inference_step(model: nn.Module, images: torch.Tensor, amp: bool = False) -> Callable[[], None]:
    """Return a function that computes the logits and waits for them."""
    @torch.inference_mode()
    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
            model(images)
        synchronize(images.device)
    return step


def synchronize(device: torch.device) -> None:
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


def processor() -> str:
    """Return the name of the CPU, with its family and model where these are known: virtual machines hide the rest."""
    cpuinfo = Path('/proc/cpuinfo')
    first = cpuinfo.read_text().split('\n\n')[0] if cpuinfo.exists() else ''
    fields = dict(re.findall(r'^(.+?)\s*: (.*)$', first, re.MULTILINE))
    name = fields.get('model name') or platform.processor() or platform.machine()
    return f'{name} (family {fields["cpu family"]}, model {fields["model"]})' if 'cpu family' in fields else name
