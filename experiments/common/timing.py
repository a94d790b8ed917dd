"""Seconds of a training step: forward, backward and optimizer."""
import time
from contextlib import nullcontext
from typing import Any, Callable, Dict, List

import torch
from timm.optim import create_optimizer_v2
from torch import nn


def training_times(
        models: Dict[str, nn.Module],
        images: torch.Tensor,
        repeats: int = 20,
        amp: bool = False,
) -> Dict[str, List[float]]:
    """Seconds of every step of every model; the models take turns, so that a drift of the machine meets all alike."""
    steps = {name: training_step(model.to(images.device).train(), images, amp) for name, model in models.items()}
    seconds: Dict[str, List[float]] = {name: [] for name in models}
    for _ in range(repeats + 2):  # the first two warm up
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[2:] for name, times in seconds.items()}


def training_step(model: nn.Module, images: torch.Tensor, amp: bool) -> Callable[[], None]:
    optimizer = create_optimizer_v2(model, opt='adamw', lr=1e-5, weight_decay=0.05)
    targets = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def step() -> None:
        context: Any = torch.autocast(images.device.type, dtype=torch.bfloat16) if amp else nullcontext()
        with context:
            loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if images.device.type != 'cpu':
            torch.accelerator.synchronize()
    return step
