"""Table 1 of the paper at the paper's scale, on CIFAR-100: python experiments/table1_cifar100.py --timm TIMM

Drives `train.py` and `validate.py` of TIMM, a clone of pytorch-image-models, through the recipes in examples/cifar100;
see docs/cifar100.md. (benchmarks/speed.py measures the training times.)

The output folder gets the table. Every training has a folder named after its recipe, options, processes and versions,
so that trainings that differ never mix; one that was stopped goes on from its last checkpoint.
"""
import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple

import timm
import torch
import yaml
from common.options import make_parser, positive_int
from common.report import markdown_table, seeds_note, show
from common.runs import VERSIONS
from table1 import ROWS, table_cells
from torch import nn

import timm_cmhsa

RECIPES = Path(__file__).parents[1] / 'examples' / 'cifar100'
TOTAL_BATCH = 128
# Of a first and of a second phase. The paper does not say what rows of one phase try: here, what a first phase does.
PAPER_RATES = ((1e-4, 3e-4, 5e-4), (1e-5, 3e-5, 5e-5, 7e-5))
DEFAULT_RATES = (3e-4, 3e-5)
# What train.py and validate.py both take; the batch of a validation changes nothing.
VALIDATION_KEYS = (
    'model', 'data_dir', 'dataset', 'class_map', 'input_key', 'target_key', 'input_img_mode', 'num_classes', 'gp',
    'img_size', 'input_size', 'in_chans', 'crop_pct', 'mean', 'std', 'interpolation', 'device', 'workers', 'amp',
    'amp_dtype', 'model_dtype', 'channels_last')


def main() -> None:
    args = parse_args()
    results, shown = {}, []
    for row in ROWS:
        epochs = 2 * args.epochs_per_phase // len(row.recipes)
        rates = search_rates(args, row.recipes, epochs) if args.search_rates else DEFAULT_RATES[:len(row.recipes)]
        results[row.title] = [train_phases(args, row.recipes, rates, seed, epochs) for seed in range(args.seeds)]
        shown.append(', '.join(f'{rate:g}' for rate in rates))
    models: Dict[str, nn.Module] = {
        model: timm.create_model(model, num_classes=100) for row in ROWS for model, _ in row.phases}
    head, *rows = table_cells({'CIFAR-100': results}, shown, models)
    show(markdown_table(head, rows) + seeds_note(args.seeds), args.output / 'table1.md')


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 'cifar100', seeds=5)
    add = parser.add_argument
    add('--timm', type=Path, required=True, help='clone of pytorch-image-models')
    add('--num-processes', type=positive_int, default=max(torch.cuda.device_count(), 1),
        help='default: one for each GPU')
    add('--epochs-per-phase', type=positive_int, default=200, help='default: %(default)s')
    add('--search-rates', action='store_true', help='try all the learning rates of the paper, with seed 0')
    add('options', nargs='*', help='after --, more options for every train.py, such as --data-dir DIR')
    args = parser.parse_args()
    if not all((args.timm / script).is_file() for script in ('train.py', 'validate.py')):
        parser.error(f'{args.timm} has no train.py and validate.py: give a clone of pytorch-image-models')
    if not torch.cuda.is_available() and '--device' not in args.options:
        parser.error('the paper\'s scale needs a GPU; to try it on the CPU all the same, end with -- --device cpu')
    if TOTAL_BATCH % (2 * args.num_processes):
        parser.error(f'--num-processes must divide the batch of {TOTAL_BATCH} into even ones, as Mixup needs')
    ours = {'--seed', '--lr', '--epochs', '--batch-size', '-b', '--output', '--experiment', '--resume', '--config'}
    if ours & set(args.options):
        parser.error(f'after --, {" ".join(sorted(ours & set(args.options)))} is set by table1_cifar100.py itself')
    return args


def search_rates(args: argparse.Namespace, recipes: Sequence[str], epochs: int) -> Tuple[float, ...]:
    """Choose phase by phase the best of the paper's rates with seed 0, by the test images: CIFAR-100 has no others."""
    chosen: Tuple[float, ...] = ()
    for phase, rates in enumerate(PAPER_RATES[:len(recipes)], 1):
        tried = [(*chosen, rate) for rate in rates]
        chosen = max(tried, key=lambda each: train_phases(args, recipes[:phase], each, 0, epochs)['top1'])
    return chosen


def train_phases(
        args: argparse.Namespace, recipes: Sequence[str], rates: Sequence[float], seed: int, epochs: int,
) -> Dict[str, float]:
    """Train one phase after the other, the second from the first's conversion. Return the accuracies of the last."""
    folder = None
    for recipe, rate in zip(recipes, rates):
        folder = train(args, recipe, seed, rate, epochs, folder)
    assert folder is not None
    return validate(args, folder)


def train(
        args: argparse.Namespace, recipe: str, seed: int, rate: float, epochs: int, phase1: Optional[Path]) -> Path:
    """Train by a recipe, from the conversion of phase 1 if there was one, and return the folder of the checkpoints."""
    options = ['--seed', seed, '--lr', rate, '--epochs', epochs, '--batch-size', TOTAL_BATCH // args.num_processes]
    if args.num_processes == 1:
        options += ['--aug-repeats', 0]  # timm repeats augmentations only across processes
    options += args.options
    settings = [yaml.safe_load((RECIPES / f'{recipe}.yaml').read_text()), options, phase1 and phase1.name,
                args.num_processes, VERSIONS]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
    folder = args.output / 'runs' / f'{recipe}-seed{seed}-lr{rate:g}-{digest}'
    if (folder / 'done').exists():
        return folder
    options = ['--config', RECIPES / f'{recipe}.yaml', '--device-modules', 'timm_cmhsa', *options]
    options += ['--output', folder.parent, '--experiment', folder.name]
    checkpoints = sorted(folder.glob('*.pth.tar'), key=lambda path: path.stat().st_mtime)
    if checkpoints:  # the newest: between two epochs there is a moment without a last.pth.tar
        options += ['--resume', checkpoints[-1]]
    elif phase1 is not None:
        converted = phase1 / 'phase2.safetensors'
        print(timm_cmhsa.convert_checkpoint(phase1 / 'last.pth.tar', converted, force=True))
        options += ['--initial-checkpoint', converted]
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', args.num_processes]
    run(*(torchrun if args.num_processes > 1 else []), '-m', 'timm_cmhsa', args.timm / 'train.py', *options)
    (folder / 'done').touch()
    return folder


def run(*command: Any) -> None:
    """Run Python with this command line."""
    words = [sys.executable, *map(str, command)]
    if subprocess.run(words).returncode:
        raise SystemExit(f'Failed, for the reason above. To go on, mend it and run the same again: {words}')


def validate(args: argparse.Namespace, folder: Path) -> Dict[str, float]:
    """Return top-1 and top-5 accuracy in percent, of the last checkpoint's own weights, not of their average."""
    results = folder / 'validation.json'
    if not results.exists():
        used = yaml.safe_load((folder / 'args.yaml').read_text())
        options = ['--split', used['val_split'], '--checkpoint', folder / 'last.pth.tar']
        for key in VALIDATION_KEYS:
            if used.get(key):
                values = used[key] if isinstance(used[key], list) else [used[key]]
                options += [f"--{key.replace('_', '-')}", *(value for value in values if value is not True)]
        options += ['--model-kwargs', *(f'{key}={value}' for key, value in used['model_kwargs'].items())]
        options += ['--results-file', results, '--results-format', 'json']
        run('-m', 'timm_cmhsa', args.timm / 'validate.py', *options)
    scores = json.loads(results.read_text())
    return {key: float(scores[key]) for key in ('top1', 'top5')}


if __name__ == '__main__':
    main()
