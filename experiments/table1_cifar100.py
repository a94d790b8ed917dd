"""Table 1 of the paper at the paper's scale, on CIFAR-100: python experiments/table1_cifar100.py --timm TIMM

Drives `train.py` and `validate.py` of TIMM, a clone of pytorch-image-models, through the recipes in examples/cifar100;
see docs/cifar100.md. (benchmarks/speed.py measures the training times.)

The output folder gets the table. Every training has a folder named after its recipe, options, processes and versions,
so that trainings that differ never mix; one that was stopped goes on from its last checkpoint.
"""
import argparse
import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

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


class Machine(NamedTuple):
    """Where trainings run: timm's scripts, processes (one for each GPU), options for all, and the folder of results."""
    clone: Path
    num_processes: int
    options: List[str]
    output: Path


def main() -> None:
    args = parse_args()
    machine = Machine(args.timm, args.num_processes, args.options, args.output / 'runs')
    results, shown = {}, []
    for row in ROWS:
        epochs = 2 * args.epochs_per_phase // len(row.recipes)
        rates = search_rates(machine, row.recipes, epochs) if args.search_rates else DEFAULT_RATES[:len(row.recipes)]
        results[row.title] = [
            validate(machine, train_phases(machine, row.recipes, rates, seed, epochs)) for seed in range(args.seeds)]
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


def search_rates(machine: Machine, recipes: Tuple[str, ...], epochs: int) -> Tuple[float, ...]:
    """Choose phase by phase the best of the paper's rates with seed 0, by the test images: CIFAR-100 has no others."""
    chosen: Tuple[float, ...] = ()
    for phase in range(len(recipes)):
        def top1(rate: float, phase: int = phase, before: Tuple[float, ...] = chosen) -> float:
            folder = train_phases(machine, recipes[:phase + 1], (*before, rate), 0, epochs)
            return validate(machine, folder)['top1']
        chosen += (max(PAPER_RATES[phase], key=top1),)
    return chosen


def train_phases(
        machine: Machine, recipes: Tuple[str, ...], rates: Tuple[float, ...], seed: int, epochs: int) -> Path:
    """Train one phase after the other, the second from the first's conversion; returns the folder of the last."""
    folder = None
    for recipe, rate in zip(recipes, rates):
        folder = train(machine, recipe, seed, rate, epochs, folder)
    assert folder is not None
    return folder


def train(machine: Machine, recipe: str, seed: int, rate: float, epochs: int, phase1: Optional[Path]) -> Path:
    """Train by a recipe, from the conversion of phase 1 if there was one, and return the folder of the checkpoints."""
    options = ['--seed', seed, '--lr', rate, '--epochs', epochs, '--batch-size', TOTAL_BATCH // machine.num_processes]
    if machine.num_processes == 1:
        options += ['--aug-repeats', 0]  # timm repeats augmentations only across processes
    options += machine.options
    settings = [yaml.safe_load((RECIPES / f'{recipe}.yaml').read_text()), options, phase1 and phase1.name,
                machine.num_processes, VERSIONS]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
    folder = machine.output / f'{recipe}-seed{seed}-lr{rate:g}-{digest}'
    if epochs_done(folder) < epochs:
        command = ['--config', RECIPES / f'{recipe}.yaml', '--device-modules', 'timm_cmhsa', *options]
        command += ['--output', folder.parent, '--experiment', folder.name]
        checkpoints = sorted(folder.glob('*.pth.tar'), key=lambda path: path.stat().st_mtime)
        if checkpoints:  # the newest: between two epochs there is a moment without a last.pth.tar
            command += ['--resume', checkpoints[-1]]
        elif phase1 is not None:
            command += ['--initial-checkpoint', convert(phase1)]
        launch(machine, command)
    return folder


def epochs_done(folder: Path) -> int:
    """Return the epochs in the summary that train.py keeps, but for one whose checkpoint is not written yet."""
    summary, last = folder / 'summary.csv', folder / 'last.pth.tar'
    if not summary.exists() or not last.exists() or last.stat().st_mtime < summary.stat().st_mtime:
        return 0
    with open(summary) as f:  # a resumed training writes its header once more
        return 1 + max((int(row['epoch']) for row in csv.DictReader(f) if row['epoch'].isdigit()), default=-1)


def launch(machine: Machine, options: List[Any]) -> None:
    command: List[Any] = [sys.executable]
    if machine.num_processes > 1:
        command += ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', machine.num_processes]
    command = [str(part) for part in (*command, '-m', 'timm_cmhsa', machine.clone / 'train.py', *options)]
    if subprocess.run(command).returncode:
        raise SystemExit(f'train.py failed, for the reason above. To go on, mend it and run the same again: {command}')


def convert(folder: Path) -> Path:
    """Rewrite phase 1's last checkpoint for phase 2."""
    path = folder / 'phase2.safetensors'
    print(timm_cmhsa.convert_checkpoint(folder / 'last.pth.tar', path, force=True))
    return path


def validate(machine: Machine, folder: Path) -> Dict[str, float]:
    """Return top-1 and top-5 accuracy in percent, of the last checkpoint's own weights, not of their average."""
    results = folder / 'validation.json'
    if not results.exists():
        args = yaml.safe_load((folder / 'args.yaml').read_text())
        options = ['--split', args['val_split'], '--checkpoint', str(folder / 'last.pth.tar')]
        for key in VALIDATION_KEYS:
            if args.get(key):
                values = args[key] if isinstance(args[key], list) else [args[key]]
                options += [f"--{key.replace('_', '-')}", *(str(value) for value in values if value is not True)]
        options += ['--model-kwargs', *(f'{key}={value}' for key, value in args['model_kwargs'].items())]
        scores = folder / 'scores.json'
        subprocess.run([
            sys.executable, '-m', 'timm_cmhsa', str(machine.clone / 'validate.py'), *options, '--results-file',
            str(scores), '--results-format', 'json'], check=True)
        scores.replace(results)
    scores = json.loads(results.read_text())
    return {'top1': float(scores['top1']), 'top5': float(scores['top5'])}


if __name__ == '__main__':
    main()
