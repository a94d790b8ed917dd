"""Seconds of a training step: forward, backward and optimizer; and the processor that takes them."""
import platform
import re
import statistics
import time
from pathlib import Path
from typing import Callable, Dict, List

import torch
from timm.optim import create_optimizer_v2
from torch import nn


def step_seconds(models: Dict[str, nn.Module], images: torch.Tensor, repeats: int = 5) -> Dict[str, float]:
    """Measure the median time of a training step of every model.

    The models take turns, so that a drift of the machine meets all alike.
    """
    steps = {name: training_step(model.to(images.device).train(), images) for name, model in models.items()}
    seconds: Dict[str, List[float]] = {name: [] for name in models}
    for _ in range(repeats + 2):  # the first two warm up
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[2:]) for name, times in seconds.items()}


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
        if images.device.type != 'cpu':
            torch.accelerator.synchronize(images.device)
    return step


def processor() -> str:
    """Return the name of the CPU, with its family and model where these are known: virtual machines hide the rest."""
    cpuinfo = Path('/proc/cpuinfo')
    first = cpuinfo.read_text().split('\n\n')[0] if cpuinfo.exists() else ''
    fields = dict(re.findall(r'^(.+?)\s*: (.*)$', first, re.MULTILINE))
    name = fields.get('model name') or platform.processor() or platform.machine()
    return f'{name} (family {fields["cpu family"]}, model {fields["model"]})' if 'cpu family' in fields else name
