"""The training-time column of the paper's Table 1, at the models' full size: python benchmarks/training_time.py

Time of a training step of every model, all in turn in one run. A row of two phases takes the mean of both.
"""
import argparse
import platform
import statistics
import sys
from pathlib import Path

import timm
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / 'examples'))
from table1 import ROWS, create_models, row_times
from timing import training_times

PAPER = dict(zip((row.title for row in ROWS), (1.00, 0.57, 1.00, 0.45, 0.49, 1.48, 0.96, 0.98)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='default: %(default)s')
    add('--batch-size', type=int, default=None, help='default: 32 on a GPU, as the paper has on each, 8 on the CPU')
    add('--repeats', type=int, default=10, help='timed steps (default: %(default)s)')
    add('--amp', action='store_true', help='autocast to bfloat16')
    args = parser.parse_args()
    if args.repeats < 1 or (args.batch_size is not None and args.batch_size < 1):
        parser.error('--repeats and --batch-size must be positive')
    batch_size = args.batch_size or (8 if args.device == 'cpu' else 32)

    models = create_models(scaled=False)
    images = torch.randn(batch_size, 3, 224, 224, device=args.device)
    times = training_times(models, images, args.repeats, args.amp)
    seconds = row_times({name: statistics.median(values) for name, values in times.items()})

    threads = f'{args.device}, {torch.get_num_threads()} threads'
    device = torch.cuda.get_device_name(images.device) if images.is_cuda else threads
    precision = 'bfloat16 (AMP)' if args.amp else 'float32'
    print(f'{device}, {precision}, batch of {batch_size}, {args.repeats} steps; Python {platform.python_version()}, '
          f'torch {torch.__version__}, timm {timm.__version__}\n')
    print('| model | step, ms | fastest to slowest |\n|---|---:|---:|')
    for name, values in times.items():
        milliseconds = [1e3 * value for value in (statistics.median(values), min(values), max(values))]
        print('| {} | {:.0f} | {:.0f} to {:.0f} |'.format(name, *milliseconds))
    print('\n| row | training time | in the paper |\n|---|---:|---:|')
    for title, value in seconds.items():
        print(f"| {title} | {value / seconds['ViT-base']:.2f}x | {PAPER[title]:.2f}x |")


if __name__ == '__main__':
    main()
