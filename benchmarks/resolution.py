"""Time and memory of one attention layer of width 768 as the grid grows: python benchmarks/resolution.py

Ours beside that of timm's vit_relpos_base_patch16_224, for one image: a training step (forward and backward) and
inference, each in a process of its own. Linux only.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Callable, Dict

import timm
import torch
from speed import hardware, peak_bytes, reset_peak
from timm.utils import reparameterize_model
from torch import nn

import timm_cmhsa  # noqa: F401

BASELINE = 'vit_relpos_base_patch16_224'
LAYERS: Dict[str, Callable[[int], nn.Module]] = {
    BASELINE: lambda grid: create(BASELINE, grid),
    'cmhsa_attn': lambda grid: create('cmhsa_attn', grid),
    'cmhsa_attn, folded': lambda grid: reparameterize_model(create('cmhsa_attn', grid)),
    'cmhsa_attn_16x96': lambda grid: create('cmhsa_attn_16x96', grid),
}


def create(name: str, grid: int) -> nn.Module:
    """A model's only block's attention, in a module that `reparameterize_model` can replace it in."""
    model = timm.create_model(name, img_size=16 * grid, depth=1)
    return nn.Sequential(model.blocks[0].attn)


def main() -> None:
    args = parse_args()
    if args.measure:
        layer, grid, phase = args.measure
        print(json.dumps(measure(layer, int(grid), phase, args)))
        return
    print(f'{hardware(args.device)}, float32; torch {torch.__version__}, timm {timm.__version__}\n')
    print('| grid | layer | training, ms | | training, MiB | | inference, ms | | inference, MiB | |')
    print('|---|---|---:|---:|---:|---:|---:|---:|---:|---:|')
    for grid in args.grids:
        base: Dict[str, float] = {}
        for layer in LAYERS:
            cells = []
            for phase in ('training', 'inference'):
                if phase == 'training' and layer.endswith(', folded'):
                    cells += ['-'] * 4
                    continue
                command = [sys.executable, __file__, *sys.argv[1:], '--measure', layer, str(grid), phase]
                result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                measured = json.loads(result.stdout.splitlines()[-1])
                for key, value in measured.items():
                    ratio = value / base.setdefault(phase + key, value)
                    cells += [f'{value:.0f}', f'{ratio:.2f}x']
            print(f"| {grid} x {grid} | {layer} | {' | '.join(cells)} |", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='default: %(default)s')
    add('--grids', type=int, nargs='+', default=[14, 28, 42, 64], help='patches per side (default: %(default)s)')
    add('--repeats', type=int, default=3, help='default: %(default)s')
    add('--measure', nargs=3, metavar=('LAYER', 'GRID', 'PHASE'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.repeats, *args.grids) < 1:
        parser.error('--grids and --repeats must be positive')
    return args


def measure(layer: str, grid: int, phase: str, args: argparse.Namespace) -> Dict[str, float]:
    training = phase == 'training'
    x = torch.randn(1, grid * grid, 768, device=args.device, requires_grad=training)
    before = reset_peak(args.device)
    attn = LAYERS[layer](grid).to(args.device).train(training)
    reset_peak(args.device)
    seconds = []
    for _ in range(args.repeats + 1):  # the first warms up
        start = time.perf_counter()
        with torch.inference_mode(not training):
            y = attn(x)
            if training:
                y.sum().backward()
        if args.device != 'cpu':
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return {'ms': 1e3 * statistics.median(seconds[1:]), 'MiB': (peak_bytes(args.device) - before) / 2 ** 20}


if __name__ == '__main__':
    main()
