"""Rewriting the six convolutions of the paper's model: python benchmarks/construction.py

Time and memory of the exact rewrite; peak extra memory is what the process needs at most beyond the finished layers,
relative to their size; it is read from the operating system in a process of its own.
"""
import argparse
import platform
import resource
import statistics
import subprocess
import sys
import time

import timm
import torch
from torch import nn

from timm_cmhsa import RelPosAttention, conv2d_to_attention

DEPTH = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--memory', type=int, metavar='KERNEL', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        measure_memory(args.memory)
        return
    print(f'{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, '
          f'torch {torch.__version__}, timm {timm.__version__}\n')
    print('| kernel | median | fastest to slowest | result | peak extra memory |')
    print('|---|---:|---:|---:|---:|')
    kernel_sizes = (3, 5)
    # first, since a new process is charged with its parent's peak
    memory = {kernel_size: subprocess.run(
        [sys.executable, __file__, '--memory', str(kernel_size)], check=True, capture_output=True, text=True,
    ).stdout.strip() for kernel_size in kernel_sizes}
    for kernel_size in kernel_sizes:
        seconds = [construct(kernel_size)[1] for _ in range(args.repeats + 1)][1:]
        print(f'| {kernel_size} x {kernel_size} | {statistics.median(seconds):.2f} s | '
              f'{min(seconds):.2f} to {max(seconds):.2f} s | {memory[kernel_size]} |')


def construct(kernel_size: int) -> tuple[list[RelPosAttention], float]:
    """Return the attention layers of the paper's model (P = 16, C = 3, 14 x 14 patches), and the seconds they took."""
    convs = random_convs(kernel_size)
    start = time.perf_counter()
    layers = [conv2d_to_attention(conv, patch_size=16, grid_size=14) for conv in convs]
    return layers, time.perf_counter() - start


def random_convs(kernel_size: int) -> list[nn.Conv2d]:
    return [nn.Conv2d(3, 3, kernel_size, padding=kernel_size // 2) for _ in range(DEPTH)]


def measure_memory(kernel_size: int) -> None:
    conv2d_to_attention(nn.Conv2d(1, 1, 3, padding=1), patch_size=2, grid_size=3)  # everything is loaded now
    before = peak_bytes()
    layers, _ = construct(kernel_size)
    result = sum(t.numel() * t.element_size() for layer in layers for t in [*layer.parameters(), *layer.buffers()])
    extra = peak_bytes() - before - result
    print(f'{result / 2 ** 20:.0f} MiB | {extra / result:.2f} times the result')


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


if __name__ == '__main__':
    main()
