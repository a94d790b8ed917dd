"""Many trainings on the digits, side by side; each is done once, in a folder of its own.

Small models on few images: a run takes about a minute. The name of the folder is made from a run's settings and the
versions of torch and timm: runs that differ never mix, and what was stopped goes on where it stopped. The test images
are the same in all runs and choose nothing: learning rates are chosen on validation images.
"""
import hashlib
import json
import math
import os
import statistics
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, TypeVar

import timm
import torch
import torchvision
from torch import nn
from tqdm import tqdm

import timm_cmhsa
from timm_cmhsa.checkpoints import MAX_ERROR

from .data import split_digits
from .pool import make_pool
from .report import write_whole
from .training import BATCH_SIZE, Stage, create, evaluate, train

MAX_WORKERS = 16
CPU = torch.device('cpu')
VERSIONS = {module.__name__: module.__version__ for module in (torch, torchvision, timm, timm_cmhsa)}

Key = TypeVar('Key', bound=Hashable)
Result = Dict[str, Any]


class Run(NamedTuple):
    """One stage trained on some images, from a random start or from the conversion of another run's model."""
    stage: Stage
    num_train: int
    seed: int
    augment: bool = True
    phase1: Optional['Run'] = None
    sharpness: Optional[float] = None  # of the conversion; None is exact
    zero_key: bool = True  # free to learn; without it, no head can attend to nothing

    @property
    def name(self) -> str:
        settings = digest([self, VERSIONS, BATCH_SIZE])
        return f'{self.stage.name}-n{self.num_train}-seed{self.seed}-lr{self.stage.lr:g}-{settings}'

    def checkpoint(self, output: Path) -> Path:
        """Return where the last checkpoint of this run is."""
        return output / self.name / self.stage.name / 'last.pth.tar'


def digest(settings: Any) -> str:
    """Return a few characters that differ where settings do."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def best_rates(candidates: Mapping[str, Mapping[float, List[Run]]], output: Path) -> Dict[str, float]:
    """Choose for every title the learning rate with the best validation accuracy.

    Args:
        candidates: Runs by title and learning rate; their mean counts. Where there is only one rate, nothing is run.
        output: Folder of the runs.
    """
    tried = {(title, rate): runs for title, by_rate in candidates.items() if len(by_rate) > 1
             for rate, runs in by_rate.items()}
    results = run_all(tried, output, 'learning rates')
    accuracies = {pair: statistics.mean(top1(each, 'validation')) for pair, each in results.items()}
    for (title, rate), accuracy in accuracies.items():
        print(f'{title}, learning rate {rate:g}: {accuracy:.1f} %')
    return {title: max(by_rate, key=lambda rate: accuracies.get((title, rate), 0.))
            for title, by_rate in candidates.items()}


def run_all(runs: Mapping[Key, List[Run]], output: Path, title: str) -> Dict[Key, List[Result]]:
    """Return the results of runs, under the keys of the runs.

    Those that are done already are read. Only one process at a time may work in an output folder.
    """
    flat = [run for each in runs.values() for run in each]
    finish([run.phase1 for run in flat if run.phase1 is not None], output, f'{title}: phase 1')
    finish(flat, output, title)
    return {key: [read_result(run, output) for run in each] for key, each in runs.items()}


def read_result(run: Run, output: Path) -> Result:
    return json.loads((output / run.name / 'result.json').read_text())


def top1(results: Sequence[Result], when: str = 'test') -> List[float]:
    """Return the top-1 accuracies on test images, 'before' or after ('test') training, or on 'validation' images."""
    return [result[when]['top1'] for result in results]


def finish(runs: List[Run], output: Path, title: str) -> None:
    """Do what is not done yet, on all cores."""
    todo = [run for run in {run.name: run for run in runs}.values() if not (output / run.name / 'result.json').exists()]
    if not todo:
        return
    workers = min(os.cpu_count() or 1, MAX_WORKERS, len(todo))
    with make_pool(workers) as pool:
        futures = [pool.submit(do, run, output) for run in todo]
        for future in tqdm(as_completed(futures), title, total=len(futures)):
            future.result()


def do(run: Run, output: Path) -> None:
    """Train one run and write its result."""
    torch.set_num_threads(1)
    folder = output / run.name
    folder.mkdir(parents=True, exist_ok=True)
    train_data, validation_data, test_data = split_digits(run.num_train, run.seed, run.stage.img_size, run.augment)
    model = create(run.stage, run.seed) if run.phase1 is None else convert(run, run.phase1, output)
    if not run.zero_key:
        remove_zero_keys(model)
    before = evaluate(model, test_data, CPU)
    model, history = train(run.stage, model, train_data, validation_data, folder, run.seed, CPU)
    result = dict(
        validation=evaluate(model, validation_data, CPU),
        before=before,
        test=evaluate(model, test_data, CPU),
        history=history,
        settings=run,
        versions=VERSIONS,
    )
    write_whole(folder / 'result.json', json.dumps(result))


def convert(run: Run, phase1: Run, output: Path) -> nn.Module:
    """Rewrite the model of phase 1 as what phase 2 starts from."""
    folder = output / run.name / 'converted'
    timm_cmhsa.convert_checkpoint(
        phase1.checkpoint(output),
        folder,
        model=run.stage.model,
        num_heads=run.stage.model_args.get('num_heads'),
        head_dim=run.stage.model_args.get('head_dim'),
        sharpness=run.sharpness,
        tolerance=MAX_ERROR if run.sharpness is None else math.inf,
        force=True,
    )
    return timm.create_model(f'local-dir:{folder}', pretrained=True)


@torch.no_grad()
def remove_zero_keys(model: nn.Module) -> None:
    """Give the zero keys a weight of zero, which gets no gradient: attention as the paper has it."""
    for name, parameter in model.named_parameters():
        if name.endswith('.zero_key_bias'):
            parameter.fill_(-1e4)
