"""Many trainings, side by side. Each is done once, has a line in a file of results, and goes on where it was stopped.

A run is known by its title, epochs, number of images, learning rates and seed. Whatever else differs, such as the model
or the data, needs another title or another output folder. The test images choose nothing: learning rates are chosen on
the validation images.
"""
import io
import json
import os
import statistics
from concurrent.futures import as_completed
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Callable, Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar

import timm
import torch
import torchvision
from torch import nn
from tqdm import tqdm

import timm_cmhsa
from timm_cmhsa import attention_maps, head_statistics, load_model
from timm_cmhsa.images import choose_images
from timm_cmhsa.models import Cmhsa
from timm_cmhsa.rel_pos import RelPosTable
from timm_cmhsa.train import create_model, train_two_phases

from .images import digits
from .pool import make_pool
from .report import write_whole
from .timing import processor

VERSIONS = {module.__name__: module.__version__ for module in (torch, torchvision, timm, timm_cmhsa)}
RESULTS = 'results.jsonl'  # in the output folder
NUM_LOOKED_AT, LOOKS = 64, ('best_weight', 'distance', 'entropy')  # images, and what is measured in them

Key = TypeVar('Key', bound=Hashable)
Result = Dict[str, Any]
Results = Dict[str, Result]  # by the key of a run


class Run(NamedTuple):
    """A call of `train_two_phases`: one model from a random start, or phase 2 after what another run trained."""
    title: str
    num_train: int
    seed: int
    options: Dict[str, Any]  # of this phase, with model, epochs and lr
    data: Callable[[Path, int, int], Path] = digits  # the images, given the output folder, a number and a seed
    after: Optional['Run'] = None
    rewrite: Optional[Callable[[Any], nn.Module]] = None  # of the model of `after`
    curves: Tuple[str, ...] = ()  # measures to keep of all epochs

    @property
    def key(self) -> str:
        phases = [run.options for run in (self.after, self) if run is not None]
        epochs, rates = ' + '.join(str(each['epochs']) for each in phases), ' and '.join(
            f'{each["lr"]:g}' for each in phases)
        return f'{self.title} | {epochs} epochs | {self.num_train} images | lr {rates} | seed {self.seed}'

    def folder(self, output: Path) -> Path:
        return output / ''.join(c if c.isalnum() or c in '.-' else '_' for c in self.key)

    def checkpoint(self, output: Path) -> Path:
        """Return where the last checkpoint of this run is."""
        return self.folder(output) / 'checkpoints' / f'phase{1 if self.after is None else 2}.pth.tar'

    def call(self, output: Path) -> Dict[str, Any]:
        """Return the options of `train_two_phases`. Phases have schedules of their own, so that runs can share one."""
        options = dict(
            self.options, data_dir=self.data(output, self.num_train, self.seed), output=self.folder(output),
            seed=self.seed, switch=1)
        if self.after is not None:
            first, epochs = self.after.options, self.options['epochs']
            options = {
                **first, **options, 'epochs': first['epochs'] + epochs,
                'switch': first['epochs'] / (first['epochs'] + epochs), 'separate_schedules': True,
                'lr': first['lr'], 'phase2_lr': self.options['lr']}
        return options


def best_rates(candidates: Mapping[str, Mapping[float, List[Run]]], output: Path, **options: Any) -> Dict[str, float]:
    """Choose for every title the learning rate with the best accuracy on validation images.

    Args:
        candidates: Runs by title and learning rate; their mean counts. Where there is only one rate, nothing is run.
        output, options: See `run_all`.
    """
    tried = {(title, rate): runs for title, by_rate in candidates.items() if len(by_rate) > 1
             for rate, runs in by_rate.items()}
    results = run_all(tried, output, 'learning rates', **options)
    accuracies = {pair: statistics.mean(top1(each, 'held_out')) for pair, each in results.items()}
    for (title, rate), accuracy in accuracies.items():
        print(f'{title}, learning rate {rate:g}: {accuracy:.1f} %')
    return {title: max(by_rate, key=lambda rate: accuracies.get((title, rate), 0.))
            for title, by_rate in candidates.items()}


def run_all(
        runs: Mapping[Key, Sequence[Run]],
        output: Path,
        title: str,
        path: Optional[Path] = None,
        workers: Optional[int] = None,
) -> Dict[Key, List[Result]]:
    """Return the results of runs, under the keys of the mapping. Do those that are not done yet.

    Only one process at a time may work in an output folder.

    Args:
        runs: Lists of runs by any keys.
        output: Folder of the trainings.
        title: What is shown while they run.
        path: File of results, by default in the output folder.
        workers: Number of runs at a time, by default one to a core.
    """
    path = path or output / RESULTS
    results = read_results(path)
    todo = {run.key: run for each in runs.values() for run in each if run.key not in results}
    first = {run.after.key: run.after for run in todo.values() if run.after is not None}
    first = {key: run for key, run in first.items() if key not in results or not run.checkpoint(output).exists()}
    if todo:
        for run in (*first.values(), *todo.values()):
            run.data(output, run.num_train, run.seed)  # here, as runs share their images
        with make_pool(min(workers or os.cpu_count() or 1, len(todo))) as pool:
            for batch in (first, {key: run for key, run in todo.items() if key not in first}):
                futures = [pool.submit(do, run, output) for run in batch.values()]
                for future in tqdm(as_completed(futures), title, total=len(futures)):
                    result = future.result()
                    results[result['run']] = result
                    write_whole(path, ''.join(f'{json.dumps(results[key])}\n' for key in sorted(results)))
    return {key: [results[run.key] for run in each] for key, each in runs.items()}


def read_results(path: Path) -> Results:
    """Return the results of a file, none if there is none yet. Raises ValueError if it holds anything else."""
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        return {result['run']: result for result in map(json.loads, lines)}
    except (KeyError, TypeError, ValueError):
        raise ValueError(f'{path} is not a file of results: give another one') from None


def top1(results: Sequence[Result], when: str = 'test') -> List[float]:
    """Return the top-1 accuracies on test images, 'before' or after ('test') training, or on 'held_out' images."""
    return [result[when]['top1'] for result in results]


def do(run: Run, output: Path) -> Result:
    """Train one run and return its result."""
    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()):  # only tables are shown
        results, before, after = train(run, output)
    phase, earlier = 'phase 1', dict(epoch=0, seconds=0.)
    if run.after is not None:
        phase, earlier = 'phase 2', results['curves']['phase 1'][-1]
    history = results['curves'][phase]
    images = run.data(output, run.num_train, run.seed) / 'validation'
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    dtype = results['options']['amp_dtype']
    return rounded(dict(
        run=run.key,
        title=run.title,
        after=run.after and run.after.key,
        seed=run.seed,
        epochs=run.options['epochs'],
        lr=run.options['lr'],
        params=results['parameters'] / 1e6,
        before={'top1': results['test'].get('converted')},
        held_out={'top1': results['top1']},
        test={'top1': results['test'][phase]},
        train_loss=history[-1]['train_loss'],
        seconds=history[-1]['seconds'] - earlier['seconds'],
        looks={'before': look(before, images), 'after': look(after, images)},
        bias_moved=max(((new.rel_pos.offset_bias() - old.rel_pos.offset_bias()).abs().max().item()
                        for old, new in zip(tables(before), tables(after))), default=None),
        device=f'{name} in {"float32" if dtype == "None" else dtype}',
        versions=VERSIONS,
        curves={key: [point[key] - (earlier['epoch'] if key == 'epoch' else 0) for point in history]
                for key in ('epoch', *run.curves) if run.curves},
    ))


def train(run: Run, output: Path) -> Tuple[Dict[str, Any], Optional[nn.Module], Optional[nn.Module]]:
    """Train one run. Return its results, and the model of the last phase before and after, if it has attention."""
    call = run.call(output)
    models: List[nn.Module] = []
    if run.after is None:
        results, model = train_two_phases(**call), create(run)
        is_ours = isinstance(model, Cmhsa)
        return (results, model, load_model(call['output'] / 'model')) if is_ours else (results, None, None)
    share_phase1(run.after.checkpoint(output), call['output'] / 'checkpoints')

    def rewrite(model: nn.Module) -> nn.Module:
        assert run.rewrite is not None
        models.append(run.rewrite(model.eval()))
        return models[-1]

    results = train_two_phases(rewrite=rewrite, **call)
    return results, models[-2], models[-1]  # it judges the first, and trains the second


def share_phase1(checkpoint: Path, folder: Path) -> None:
    """Let a run begin with the phase 1 of another."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / checkpoint.name
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(checkpoint, folder))


def create(run: Run) -> nn.Module:
    """Create the model that a run begins with, with its first weights."""
    options = (run.after or run).options
    return create_model(options['model'], options['img_size'], run.seed, num_classes=10, **options['model_kwargs'])


def tables(model: Optional[nn.Module]) -> List[Any]:
    """Return the attention layers with a table of biases."""
    modules = () if model is None else model.modules()
    return [module for module in modules if isinstance(getattr(module, 'rel_pos', None), RelPosTable)]


@torch.no_grad()
def look(model: Optional[nn.Module], folder: Path) -> Dict[str, float]:
    """Return what the heads look at, on average: weight on one offset, distance, and entropy."""
    if model is None or not tables(model):
        return {}
    maps = attention_maps(model, choose_images(folder, model, NUM_LOOKED_AT)[0])
    layers = [head_statistics(each) for each in maps.values()]
    return {name: statistics.mean(statistics.mean(getattr(head, name) for head in heads) for heads in layers)
            for name in LOOKS}


def rounded(value: Any) -> Any:
    """Return a result with six digits, which is more than another machine repeats."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f'{value:.6g}') if isinstance(value, float) else value
