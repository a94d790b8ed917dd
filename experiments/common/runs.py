"""Many trainings on the digits, side by side, for the examples that compare: each is done once, in a folder of its own.

Small models on few images: a run takes about a minute. The name of the folder is made from a run's settings and the
versions of torch and timm: runs that differ never mix, and what was stopped goes on where it stopped. The test images
are the same in all runs and choose nothing: learning rates are chosen on validation images.
"""
import hashlib
import json
import math
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import timm
import torch
import torchvision
from digits import NUM_IMAGES, Digits, choose, place_digits
from torch import nn
from tqdm import tqdm
from two_phase import BATCH_SIZE, Stage, create, evaluate, train, write_whole

import timm_cmhsa

NUM_TEST, NUM_VALIDATION = 597, 300
MAX_WORKERS = 16
VERSIONS = {module.__name__: module.__version__ for module in (torch, torchvision, timm, timm_cmhsa)}


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
        settings = json.dumps([self, VERSIONS, BATCH_SIZE], sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:10]
        return f'{self.stage.name}-n{self.num_train}-seed{self.seed}-lr{self.stage.lr:g}-{digest}'


def run_all(runs: List[Run], output: Path, title: str) -> List[Dict[str, Any]]:
    """Results in the order of the runs; what is done already is read, the rest is done on all cores.

    Only one process at a time may work in an output folder.
    """
    before = [run.phase1 for run in runs if run.phase1 is not None]
    if before:
        run_all(before, output, f'{title}: phase 1')
    todo = [run for run in {run.name: run for run in runs}.values() if not (output / run.name / 'result.json').exists()]
    workers = min(os.cpu_count() or 1, MAX_WORKERS, len(todo))
    if todo:
        os.environ['TQDM_DISABLE'] = '1'  # of the other processes
        with ProcessPoolExecutor(workers, mp_context=get_context('spawn')) as pool:
            futures = [pool.submit(do, run, output) for run in todo]
            try:
                for future in tqdm(as_completed(futures), title, total=len(futures)):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return [json.loads((output / run.name / 'result.json').read_text()) for run in runs]


def do(run: Run, output: Path) -> None:
    """Train one run and write its result."""
    torch.set_num_threads(1)
    folder, device = output / run.name, torch.device('cpu')
    folder.mkdir(parents=True, exist_ok=True)
    train_data, validation_data, test_data = split_digits(run)
    model = create(run.stage, run.seed) if run.phase1 is None else convert(run, output)
    if not run.zero_key:
        remove_zero_keys(model)
    before = evaluate(model, test_data, device)
    model, history = train(run.stage, model, train_data, validation_data, folder, run.seed, device)
    result = dict(
        validation=evaluate(model, validation_data, device),
        before=before,
        test=evaluate(model, test_data, device),
        history=history,
        settings=run,
        versions=VERSIONS,
    )
    write_whole(folder / 'result.json', json.dumps(result))


def split_digits(run: Run) -> Tuple[Digits, Digits, Digits]:
    """Training, validation and test images; the last are the same for all seeds."""
    rng = np.random.RandomState(run.seed)
    images, targets = place_digits(rng, canvas=run.stage.img_size)
    order = rng.permutation(NUM_IMAGES - NUM_TEST)
    if run.num_train + NUM_VALIDATION > len(order):
        raise ValueError(f'{run.num_train} training images are too many: at most {len(order) - NUM_VALIDATION}.')
    return (
        Digits(*choose(images, targets, order[:run.num_train]), augment=run.augment),
        Digits(*choose(images, targets, order[-NUM_VALIDATION:]), augment=False),
        Digits(*choose(images, targets, range(NUM_IMAGES - NUM_TEST, NUM_IMAGES)), augment=False),
    )


def convert(run: Run, output: Path) -> nn.Module:
    """Phase 2's start: the model of phase 1, rewritten."""
    assert run.phase1 is not None
    folder = output / run.name / 'converted'
    timm_cmhsa.convert_checkpoint(
        output / run.phase1.name / run.phase1.stage.name / 'last.pth.tar',
        folder,
        model=run.stage.model,
        num_heads=run.stage.model_args.get('num_heads'),
        head_dim=run.stage.model_args.get('head_dim'),
        sharpness=run.sharpness,
        tolerance=timm_cmhsa.convert.TOLERANCE if run.sharpness is None else math.inf,
        force=True,
    )
    return timm.create_model(f'local-dir:{folder}', pretrained=True)


@torch.no_grad()
def remove_zero_keys(model: nn.Module) -> None:
    """Give the zero keys a weight of zero, which gets no gradient: attention as the paper has it."""
    for name, parameter in model.named_parameters():
        if name.endswith('.zero_key_bias'):
            parameter.fill_(-1e4)
