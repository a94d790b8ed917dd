"""Time and memory of one attention layer of width 768 as the grid grows: python benchmarks/resolution.py

Ours beside that of timm's vit_relpos_base_patch16_224: a training step (forward and backward) and inference. Linux
only.
"""
import argparse
import json
import statistics
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict

import timm
import torch
from speed import PHASES, about, measure_apart, peak_bytes, reset_peak
from timm.utils import reparameterize_model
from torch import nn

import timm_cmhsa  # noqa: F401

BASELINE = 'vit_relpos_base_patch16_224'


def create(grid: int, name: str, **kwargs: Any) -> nn.Sequential:
    """Create a model's only block's attention, in a module that `reparameterize_model` can replace it in."""
    model = timm.create_model(name, img_size=16 * grid, depth=1, **kwargs)
    return nn.Sequential(model.blocks[0].attn)


LAYERS: Dict[str, Callable[[int], nn.Module]] = {
    BASELINE: partial(create, name=BASELINE),
    'cmhsa_attn': partial(create, name='cmhsa_attn'),
    'cmhsa_attn, qk_dim=768': partial(create, name='cmhsa_attn', qk_dim=768),
    'cmhsa_attn_soft': partial(create, name='cmhsa_attn_soft'),
    'cmhsa_attn_soft, qk_dim=96': partial(create, name='cmhsa_attn_soft', qk_dim=96),
}


def main() -> None:
    args = parse_args()
    if args.measure:
        layer, grid, phase = args.measure
        print(json.dumps(measure(layer, grid, phase, args)))
        return
    options = f"--device {args.device} --batch-size {args.batch_size}{' --amp' if args.amp else ''}"
    results: Dict[str, Any] = {'about': about(f'python benchmarks/resolution.py {options}', args), 'measured': {}}
    failed = []
    for grid in map(str, args.grids):
        for layer in args.layers:
            measured = results['measured'].setdefault(grid, {}).setdefault(layer, {})
            for phase in PHASES:
                try:
                    measured[phase] = measure_apart(measure, layer, grid, phase, args=args)
                except Exception:
                    traceback.print_exc()
                    failed.append(f'{phase} of {layer}, {grid} x {grid}')
            print(f'{grid} x {grid}, {layer}: {measured}', flush=True)
            if args.output:
                args.output.write_text(json.dumps(results, indent=1))
    print(table(results))
    if failed:
        raise SystemExit(f'Failed, see above: {", ".join(failed)}')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='default: %(default)s')
    add('--batch-size', type=int, default=1, help='images (default: %(default)s)')
    add('--amp', action='store_true', help='autocast to bfloat16')
    add('--grids', type=int, nargs='+', default=[14, 28, 42, 64], help='patches per side (default: %(default)s)')
    add('--layers', nargs='+', default=list(LAYERS), choices=list(LAYERS), metavar='LAYER', help='default: all')
    add('--repeats', type=int, default=3, help='default: %(default)s')
    add('--output', type=Path, metavar='FILE', help='JSON to write, layer by layer')
    add('--measure', nargs=3, metavar=('LAYER', 'GRID', 'PHASE'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.batch_size, args.repeats, *args.grids) < 1:
        parser.error('--batch-size, --grids and --repeats must be positive')
    return args


def measure(layer: str, grid: str, phase: str, args: argparse.Namespace) -> Dict[str, float]:
    training = phase == 'training'
    x = torch.randn(args.batch_size, int(grid) ** 2, 768, device=args.device, requires_grad=training)
    before = reset_peak(args.device)
    with torch.device(args.device):
        attn = LAYERS[layer](int(grid)).train(training)
    if not training:
        attn = reparameterize_model(attn.eval(), inplace=True)
    reset_peak(args.device)
    seconds = []
    for _ in range(args.repeats + 1):  # the first warms up
        start = time.perf_counter()
        with torch.inference_mode(not training), torch.autocast(x.device.type, torch.bfloat16, enabled=args.amp):
            y = attn(x)
        if training:
            y.sum().backward()
        if args.device != 'cpu':
            torch.accelerator.synchronize(x.device)
        seconds.append(time.perf_counter() - start)
    return {'ms': 1e3 * statistics.median(seconds[1:]), 'MiB': (peak_bytes(args.device) - before) / 2 ** 20}


def table(results: Dict[str, Any]) -> str:
    """Return time and memory, and their ratios to the baseline."""
    made = results['about']
    lines = [f"`{made['command']}`: {made['hardware']}; torch {made['torch']}, timm {made['timm']}.\n",
             '| grid | layer | training, ms | | training, MiB | | inference, ms | | inference, MiB | |',
             '|---|---|---:|---:|---:|---:|---:|---:|---:|---:|']
    for grid, layers in results['measured'].items():
        for layer, measured in layers.items():
            cells = []
            for phase in PHASES:
                base = layers.get(BASELINE, {}).get(phase, {})
                for key in ('ms', 'MiB'):
                    value = measured.get(phase, {}).get(key)
                    cells.append('-' if value is None else f'{value:.0f}' if value >= 10 else f'{value:.2f}')
                    cells.append(f'{value / base[key]:.2f}x' if value and base else '-')
            lines.append(f"| {grid} x {grid} | {layer} | {' | '.join(cells)} |")
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    main()
