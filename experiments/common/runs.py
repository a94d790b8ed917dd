"""Many trainings, side by side. Each is done once, has a line in a file of results, and goes on where it was stopped.

A run is known by its title, epochs, number of images, learning rates and seed. Whatever else differs, such as the model
or the data, needs another title or another output folder. The test images choose nothing: learning rates are those that
were the best of a few on the validation images.
"""
import fnmatch
import io
import json
import os
import signal
import statistics
import sys
import threading
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, Callable, Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, TypeVar

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

from .images import digits, photos
from .timing import processor

sys.path.insert(0, str(Path(__file__).parents[2] / 'examples' / 'cifar10'))
import resnet18_cifar  # noqa: F401  registers the model

VERSIONS = {module.__name__: module.__version__ for module in (torch, torchvision, timm, timm_cmhsa)}
NARROW: Dict[str, Any] = dict(  # the hybrid for 32 pixels that most tables of the docs are of: 8 x 8 tokens of width 96
    stem='32p-96p', patch_size=4, hidden_chans=96, depth=4, mlp_ratio=4.)
NUM_LOOKED_AT, LOOKS = 64, ('best_weight', 'distance', 'entropy')  # images, and what is measured in them

Key = TypeVar('Key', bound=Hashable)
Result = Dict[str, Any]
Results = Dict[str, Result]  # by the key of a run


class Run(NamedTuple):
    """A call of `train_two_phases`: a model from a random start, or phase 2 after what another run trained."""
    title: str
    num_train: int
    options: Dict[str, Any]  # of this phase, with model, img_size, epochs and lr
    after: Optional['Run'] = None
    rewrite: Optional[Callable[[Any], nn.Module]] = None  # of the model of phase 1
    data: Callable[..., Path] = digits  # the images, given the output folder, a number and a seed
    seed: int = 0

    @property
    def key(self) -> str:
        phases = [run.options for run in (self.after, self) if run is not None]
        epochs = ' + '.join(str(each['epochs']) for each in phases)
        rates = ' and '.join(f'{each["lr"]:g}' for each in phases)
        return f'{self.title} | {epochs} epochs | {self.num_train} images | lr {rates} | seed {self.seed}'

    def change(self, options: Mapping[str, Any] = {}, **changes: Any) -> 'Run':
        """Return this run and the one before it with other options."""
        return self._replace(options={**self.options, **options}, **changes,
                             after=self.after and self.after.change(options, **changes))

    def folder(self, output: Path) -> Path:
        return output / 'runs' / ''.join(c if c.isalnum() or c in '.-' else '_' for c in self.key)

    def checkpoint(self, output: Path) -> Path:
        """Return the checkpoint of phase 1."""
        return self.folder(output) / 'checkpoints' / 'phase1.pth.tar'

    def images(self, output: Path) -> Path:
        return self.data(output, self.num_train, self.seed)

    def call(self, output: Path) -> Dict[str, Any]:
        """Return the options of `train_two_phases`. Phases have schedules of their own, so that runs can share one."""
        options = {'switch': 1, 'opt': 'adamw', **self.options}
        if self.after is not None:
            first, epochs = self.after.options, self.after.options['epochs'] + self.options['epochs']
            options = {
                **first, **options, 'epochs': epochs, 'switch': first['epochs'] / epochs, 'separate_schedules': True,
                'lr': first['lr'], 'phase2_lr': self.options['lr']}
        return {**options, 'data_dir': self.images(output), 'output': self.folder(output), 'seed': self.seed}


def replicate(rows: Mapping[Key, Run], args: Namespace) -> Dict[Key, List[Run]]:
    """Return the runs of all seeds, of the rows that `args` asks for."""
    wanted = getattr(args, 'rows', ['*'])
    chosen = {key: run for key, run in rows.items() if any(fnmatch.fnmatch(run.title, each) for each in wanted)}
    if not chosen:
        titles = ', '.join(repr(run.title) for run in rows.values())
        raise SystemExit(f'No row is called {wanted}: choose from {titles}, or a part of a title with *.')
    changes: Dict[str, Any] = dict(num_train=100, options=dict(epochs=2)) if args.quick else {}

    def data(run: Run) -> Callable[..., Path]:
        if 'data_dir' in args:
            return partial(photos, data_dir=args.data_dir, num_held_out=10 if args.quick else args.num_held_out)
        return partial(run.data, num_validation=100, num_test=100) if args.quick else run.data

    return {key: [run.change(**changes, data=data(run), seed=seed) for seed in range(args.seeds)]
            for key, run in chosen.items()}


def run_all(runs: Mapping[Key, Sequence[Run]], args: Namespace) -> Dict[Key, List[Result]]:
    """Return the results of runs, under the keys of the mapping. Do those that have no line in `args.results` yet.

    By default that is set to results.jsonl in the output folder, in which only one process at a time may work.
    """
    output = args.output
    args.results = args.results or output / 'results.jsonl'
    results = read_results(args.results)
    todo = {run.key: run for each in runs.values() for run in each if run.key not in results}
    first = {run.after.key: run.after for run in todo.values() if run.after is not None}
    first = {key: run for key, run in first.items() if key not in results or not run.checkpoint(output).exists()}
    try:
        for run in (*first.values(), *todo.values()):
            run.images(output)  # here, as runs share them
    except ValueError as e:
        raise SystemExit(str(e)) from e
    os.environ['TQDM_DISABLE'] = '1'  # read when a worker imports tqdm
    with ProcessPoolExecutor(args.workers, get_context('spawn'), end_with_parent) as pool:
        try:
            for batch in (first, {key: run for key, run in todo.items() if key not in first}):
                futures = [pool.submit(do, run, output) for run in batch.values()]
                for future in tqdm(as_completed(futures), 'runs', total=len(futures), disable=not futures):
                    result = future.result()
                    results[result['run']] = result
                    with args.results.open('a') as file:
                        file.write(f'{json.dumps(result)}\n')
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise
    return {key: [results[run.key] for run in each] for key, each in runs.items()}


def end_with_parent() -> None:
    """End this process with the one that started it: two of a kind would write to the same checkpoints."""
    def wait() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends the others
    threading.Thread(target=wait, daemon=True).start()


def read_results(path: Path) -> Results:
    """Return the results of a file, none if there is none yet. End the program if it holds anything else."""
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        return {result['run']: result for result in map(json.loads, lines)}
    except (KeyError, TypeError, ValueError):
        raise SystemExit(f'{path} is not a file of results: give another one.') from None


def do(run: Run, output: Path) -> Result:
    """Train one run and return its result."""
    torch.set_num_threads(1)
    models: List[nn.Module] = []

    def rewrite(model: nn.Module) -> nn.Module:
        assert run.rewrite is not None
        models.append(run.rewrite(model.eval()))
        return models[-1]

    if run.after is not None:
        link, phase1 = run.checkpoint(output), run.after.checkpoint(output)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(phase1, link.parent))
    with redirect_stdout(io.StringIO()):  # only tables are shown
        results = train_two_phases(rewrite=rewrite if run.rewrite else None, **run.call(output))
    before: nn.Module = nn.Identity()  # has no attention
    curves, earlier, after = results['curves'], dict(epoch=0, seconds=0.), before
    history = curves['phase 1'] + curves.get('phase 2', [])
    if run.after is not None:
        before, after = models[-2:]  # it judges the first, and trains the second
        earlier, history = curves['phase 1'][-1], curves['phase 2']
    elif isinstance(model := create(run), Cmhsa) and 'phase 2' not in curves:
        before, after = model, load_model(run.folder(output) / 'model')
    images = run.images(output) / 'validation'
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    dtype = results['options']['amp_dtype']
    return dict(
        run=run.key, title=run.title, after=run.after and run.after.key, num_train=run.num_train, seed=run.seed,
        epochs=run.options['epochs'], lr=run.options['lr'], params=results['parameters'] / 1e6,
        converted={'top1': results['converted_top1']},  # held-out images
        before={'top1': results['test'].get('converted')},
        held_out={'top1': results['top1']},
        test={'top1': results['test'].get('phase 2', results['test']['phase 1'])},
        train_loss=history[-1]['train_loss'], seconds=history[-1]['seconds'] - earlier['seconds'],
        looks={'before': look(before, images), 'after': look(after, images)},
        bias_moved=max(((new.offset_bias() - old.offset_bias()).abs().max().item()
                        for old, new in zip(tables(before), tables(after))), default=None),
        device=f'{name} in {"float32" if dtype == "None" else dtype}', versions=VERSIONS,
        curves={key: [point[key] - earlier.get(key, 0) for point in history]
                for key in ('epoch', 'seconds', 'train_loss', 'loss', 'top1')},
    )


def create(run: Run) -> nn.Module:
    """Create the model that a run begins with, with its first weights."""
    options = (run.after or run).options
    return create_model(
        options['model'], options['img_size'], run.seed, num_classes=10, **options.get('model_kwargs', {}))


def tables(model: nn.Module) -> List[RelPosTable]:
    """Return the tables of biases that a model learns."""
    return [module for module in model.modules() if isinstance(module, RelPosTable)]


@torch.no_grad()
def look(model: nn.Module, folder: Path) -> Dict[str, float]:
    """Return what the heads look at, on average: weight on one offset, distance, and entropy."""
    if not tables(model):
        return {}
    maps = attention_maps(model, choose_images(folder, model, NUM_LOOKED_AT)[0])
    layers = [head_statistics(each) for each in maps.values()]
    return {name: statistics.mean(statistics.mean(getattr(head, name) for head in heads) for heads in layers)
            for name in LOOKS}
