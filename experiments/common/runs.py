"""Many trainings, side by side. Each is done once, has a line in a file of results, and goes on where it was stopped.

A run is known by its title, epochs, number of images, learning rates and seed. Whatever else differs, such as the model
or the data, needs another title or another output folder. The test images choose nothing: learning rates are chosen on
held-out images.
"""
import json
import os
import statistics
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, Callable, Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar

import timm
import torch
import torchvision
from timm.models import load_checkpoint
from torch import nn
from tqdm import tqdm

import timm_cmhsa
from timm_cmhsa import attention_maps, head_statistics
from timm_cmhsa.rel_pos import RelPosTable

from .data import Images, Split, split_digits
from .pool import make_pool
from .report import write_whole
from .timing import processor
from .training import Stage, create, evaluate, num_params, train

CPU = torch.device('cpu')
VERSIONS = {module.__name__: module.__version__ for module in (torch, torchvision, timm, timm_cmhsa)}
RESULTS = 'results.jsonl'  # in the output folder
NUM_LOOKED_AT, LOOKS = 64, ('best_weight', 'distance', 'entropy')  # images, and what is measured in them

Key = TypeVar('Key', bound=Hashable)
Result = Dict[str, Any]
Results = Dict[str, Result]  # by the key of a run


class Run(NamedTuple):
    """One stage trained on some images, from a random start or from the rewritten model of another run."""
    stage: Stage
    num_train: int
    seed: int
    data: Optional[Callable[[int, int], Split]] = None  # of a number and a seed; by default digits
    after: Optional['Run'] = None
    rewrite: Optional[Callable[[Any], nn.Module]] = None  # of the model of `after`; by default into that of the stage
    curves: Tuple[str, ...] = ()  # measures to keep of all epochs

    @property
    def key(self) -> str:
        phases = [run.stage for run in (self.after, self) if run is not None]
        epochs, rates = ' + '.join(str(each.epochs) for each in phases), ' and '.join(f'{each.lr:g}' for each in phases)
        return f'{self.stage.title} | {epochs} epochs | {self.num_train} images | lr {rates} | seed {self.seed}'

    @property
    def name(self) -> str:
        """Return the name of this run's folder."""
        return ''.join(c if c.isalnum() or c in '.-' else '_' for c in self.key)

    def checkpoint(self, output: Path) -> Path:
        """Return where the last checkpoint of this run is."""
        return output / self.name / self.stage.name / 'last.pth.tar'

    def images(self) -> Split:
        if self.data is None:
            return split_digits(self.num_train, self.seed, self.stage.img_size)
        return self.data(self.num_train, self.seed)


def best_rates(candidates: Mapping[str, Mapping[float, List[Run]]], output: Path, **options: Any) -> Dict[str, float]:
    """Choose for every title the learning rate with the best accuracy on held-out images.

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
        output: Folder of the checkpoints.
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
        output.mkdir(parents=True, exist_ok=True)
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
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    name = torch.cuda.get_device_name() if device.type == 'cuda' else processor()
    folder = output / run.name
    folder.mkdir(parents=True, exist_ok=True)
    train_data, held_out, test = run.images()
    model = start(run, output).to(device)
    biases = [layer.rel_pos.offset_bias().detach().clone() for layer in tables(model)]
    before, seen = evaluate(model, test, device), look(model, held_out)
    model, history = train(run.stage, model, train_data, held_out, folder, run.seed, device)
    moved = [(layer.rel_pos.offset_bias() - bias).abs().max().item() for layer, bias in zip(tables(model), biases)]
    return rounded(dict(
        run=run.key,
        title=run.stage.title,
        after=run.after and run.after.key,
        seed=run.seed,
        epochs=run.stage.epochs,
        lr=run.stage.lr,
        params=num_params(model),
        before=before,
        held_out=evaluate(model, held_out, device),
        test=evaluate(model, test, device),
        train_loss=history[-1]['train_loss'],
        seconds=history[-1]['seconds'],
        looks={'before': seen, 'after': look(model, held_out)},
        bias_moved=max(moved, default=None),
        device=f'{name} in {"bfloat16" if run.stage.amp else "float32"}',
        versions=VERSIONS,
        curves={key: [point[key] for point in history] for key in ('epoch', *run.curves) if run.curves},
    ))


def start(run: Run, output: Path) -> nn.Module:
    """Return the model of a run before its training."""
    if run.after is None:
        return create(run.stage, run.seed)
    model = create(run.after.stage, run.seed)
    load_checkpoint(model, str(run.after.checkpoint(output)))
    if run.rewrite is not None:
        return run.rewrite(model.eval())
    heads: Any = {key: run.stage.model_args.get(key) for key in ('num_heads', 'head_dim', 'qk_dim')}
    return timm_cmhsa.convert_model(model.eval(), run.stage.model, **heads)


def tables(model: nn.Module) -> List[Any]:
    """Return the attention layers with a table of biases."""
    return [module for module in model.modules() if isinstance(getattr(module, 'rel_pos', None), RelPosTable)]


@torch.no_grad()
def look(model: nn.Module, images: Images) -> Dict[str, float]:
    """Return what the heads look at, on average: weight on one offset, distance, and entropy."""
    if not tables(model):
        return {}
    maps = attention_maps(model, images.first(NUM_LOOKED_AT).to(next(model.parameters()).device))
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
