"""Does phase 2 learn to attend, on natural images? python experiments/natural_images.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Small models are trained on 3,000 images (300 a class), augmented by crops, flips, Mixup and CutMix, and
tested on all of validation/. Every row has its own best learning rate of a few, by 1,000 other training images.
Training is in bfloat16 (AMP) where the processor or GPU has it, evaluation in float32.

Runs are done side by side, one to a core or several to a GPU, and only once: what is in --results is read, and what was
stopped goes on where it stopped. One takes 10 to 60 minutes on one core, all of them about 35 hours. --rows and --seeds
choose a part of them; the table shows all that is there. Take another --results and --output for other data, models or
--num-held-out.
"""
import argparse
import fnmatch
import json
import math
import os
import statistics
from concurrent.futures import as_completed
from pathlib import Path
from statistics import mean
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import scipy.stats
import torch
from common.options import positive_float, positive_int
from common.photo_rows import (
    AS_MANY_STEPS,
    AS_MUCH_TIME,
    DRAWN,
    HELD,
    MAPPED,
    PHASE1,
    REWRITES,
    REWRITES_OF_RESNET,
    Row,
    make_rows,
)
from common.photos import IMG_SIZE, Photos, split_photos
from common.pool import make_pool
from common.report import make_figure, markdown_table, plot_mean_and_range, spread, write_whole
from common.runs import VERSIONS
from common.timing import processor
from common.training import Stage, create, evaluate, has_bfloat16, num_params, train
from timm.models import load_checkpoint
from torch import nn
from tqdm import tqdm

from timm_cmhsa import attention_maps, head_statistics
from timm_cmhsa.plots import attention_figure, attention_from
from timm_cmhsa.rel_pos import RelPosTable

NUM_LOOKED_AT, LOOKS = 64, ('best_weight', 'distance', 'entropy')  # images, and what is measured in them

Record = Dict[str, Any]
Results = Dict[str, Record]  # by the key of a run


class Run(NamedTuple):
    """One training."""
    row: Row
    seed: int
    lr: float
    num_train: int
    after: Optional['Run'] = None

    @property
    def key(self) -> str:
        rates = f'{self.lr:g}' if self.after is None else f'{self.after.lr:g} and {self.lr:g}'
        return f'{self.row.title} | {self.row.budget} | {self.num_train} images | lr {rates} | seed {self.seed}'

    def folder(self, output: Path) -> Path:
        return output / ''.join(c if c.isalnum() or c in '.-' else '_' for c in self.key)

    def checkpoint(self, output: Path) -> Path:
        return self.folder(output) / 'model' / 'last.pth.tar'


def main() -> None:
    args = parse_args()
    for folder in (args.output, args.results.parent):
        folder.mkdir(parents=True, exist_ok=True)
    results = read_results(args.results)
    rows = [row for row in make_rows(args.epochs1, args.epochs2)
            if any(fnmatch.fnmatch(row.title, each) for each in args.rows)]
    rates = tune({row.after.title: row.after for row in rows if row.after}.values(), {}, results, args)
    rates = tune([row for row in rows if row.title not in rates], rates, results, args)
    finish([plan(row, seed, rates, args) for seed in range(args.seeds) for row in rows], results, args)
    write_whole(args.results.with_suffix('.md'), report(results, args))
    draw_curves(results, args)
    draw_maps(results, args)
    print(report(results, args))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--data-dir', type=Path, required=True, help='images, see above')
    add('--num-train', type=positive_int, default=3000, help='number of training images (default: %(default)s)')
    add('--num-held-out', type=positive_int, default=1000, help='others, to choose by (default: %(default)s)')
    add('--learning-rates', type=positive_float, nargs='+', default=[1e-3, 2e-3],
        help='that every row chooses from (default: %(default)s)')
    add('--epochs1', type=positive_int, default=160, help='of phase 1 (default: %(default)s)')
    add('--epochs2', type=positive_int, default=40, help='of phase 2 (default: %(default)s)')
    add('--seeds', type=positive_int, default=3, help='number of seeds (default: %(default)s)')
    add('--rows', nargs='+', default=['*'], metavar='TITLE', help='of these titles only; * is any text')
    add('--results', type=Path, default=Path('output/natural_images/results.json'),
        help='file of results, which grows with every run; tables and pictures go beside it (default: %(default)s)')
    add('--output', type=Path, default=Path('output/natural_images'),
        help='folder of checkpoints (default: %(default)s)')
    add('--workers', type=positive_int, default=os.cpu_count(), help='runs at a time (default: one to a core)')
    args = parser.parse_args()
    titles = [row.title for row in make_rows(args.epochs1, args.epochs2)]
    for pattern in args.rows:
        if not fnmatch.filter(titles, pattern):
            shown = ', '.join(map(repr, titles))
            parser.error(f'no row is called {pattern!r}: choose of {shown}, or a part of a title with *')
    try:
        read_results(args.results)
        split_photos(args.data_dir, args.num_train, args.num_held_out, 0)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    return args


def read_results(path: Path) -> Results:
    """Return the results of a file, none if there is none yet. Raises ValueError if it holds anything else."""
    try:
        results = json.loads(path.read_text()) if path.exists() else {}
        is_ours = all(key.startswith(f'{record["title"]} | ') for key, record in results.items())
    except (AttributeError, KeyError, TypeError, ValueError):
        is_ours = False
    if not is_ours:
        raise ValueError(f'{path} holds no results of this script: give another --results')
    return results


def plan(row: Row, seed: int, rates: Dict[str, float], args: argparse.Namespace) -> Run:
    after = plan(row.after, seed, rates, args) if row.after else None
    return Run(row, seed, rates[row.title], args.num_train, after)


def tune(rows: Iterable[Row], known: Dict[str, float], results: Results, args: argparse.Namespace) -> Dict[str, float]:
    """Choose the learning rate of every row by the held-out images of the first seed, and add it to those known."""
    runs = {row.title: [plan(row, 0, {**known, row.title: lr}, args) for lr in args.learning_rates] for row in rows}
    finish([run for each in runs.values() for run in each], results, args)
    best = {title: max(each, key=lambda run: results[run.key]['held_out']['top1']).lr for title, each in runs.items()}
    return {**known, **best}


def finish(runs: Sequence[Run], results: Results, args: argparse.Namespace) -> None:
    """Do what is not done yet, first that whose checkpoint others start from."""
    todo = [run for run in runs if run.key not in results]
    first = {run.after.key: run.after for run in todo if run.after}
    do_all([run for key, run in first.items()
            if key not in results or not run.checkpoint(args.output).exists()], results, args)
    do_all(todo, results, args)


def do_all(runs: Sequence[Run], results: Results, args: argparse.Namespace) -> None:
    if not runs:
        return
    with make_pool(args.workers) as pool:
        futures = [pool.submit(do, run, args.data_dir, args.num_held_out, args.output) for run in runs]
        for future in tqdm(as_completed(futures), 'runs', total=len(futures), disable=False):
            key, record = future.result()
            results[key] = record
            write_whole(args.results, json.dumps(dict(sorted(results.items())), indent=1) + '\n')


def do(run: Run, data_dir: Path, num_held_out: int, output: Path) -> Tuple[str, Record]:
    """Train one run; return its key and result."""
    torch.set_num_threads(1)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    name = torch.cuda.get_device_name() if device.type == 'cuda' else processor()
    folder = run.folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    data = split_photos(data_dir, run.num_train, num_held_out, run.seed)
    stage, model = start(run, output)
    model = model.to(device)
    held = [values for layer in tables(model) for values in global_head(layer)] if run.row.rewrite == HELD else []
    copies = [values.clone() for values in held]

    def hold() -> None:
        with torch.no_grad():
            for values, copy in zip(held, copies):
                values.copy_(copy)

    biases = [layer.rel_pos.offset_bias().detach().clone() for layer in tables(model)]
    seen, before = look(model, data.held_out), evaluate(model, data.test, device)
    model, history = train(stage, model, data.train, data.held_out, folder, run.seed, device, hold)
    moved = [(layer.rel_pos.offset_bias() - bias).abs().max().item() for layer, bias in zip(tables(model), biases)]
    return run.key, dict(
        title=run.row.title,
        after=run.after.key if run.after else None,
        seed=run.seed,
        lr=run.lr,
        params=num_params(model),
        before=before,
        test=evaluate(model, data.test, device),
        held_out=evaluate(model, data.held_out, device),
        train_loss=history[-1]['train_loss'],
        seconds=history[-1]['seconds'],
        history=history,
        looks={'before': seen, 'after': look(model, data.held_out)},
        bias_movement=moved,
        device=f'{name} in {"bfloat16" if stage.amp else "float32"}',
        versions=VERSIONS,
    )


def start(run: Run, output: Path) -> Tuple[Stage, Any]:
    """Return how a run trains, and its model before that."""
    stage = Stage(
        'model', run.row.title, run.row.model, run.row.model_args, run.row.epochs, run.lr, canvas=IMG_SIZE,
        batch_size=100, mixup=0.5, amp=has_bfloat16())
    model = create(stage, run.seed)
    if run.after:
        load_checkpoint(model, str(run.after.checkpoint(output)))
        assert run.row.rewrite is not None
        model = {**REWRITES, **REWRITES_OF_RESNET}[run.row.rewrite](model.eval())
    return stage, model


def tables(model: nn.Module) -> List[Any]:
    """Return the attention layers with a table of biases."""
    return [module for module in model.modules() if isinstance(getattr(module, 'rel_pos', None), RelPosTable)]


def global_head(attn: Any) -> List[torch.Tensor]:
    """Return views of all that the last head of a layer, the global one, consists of."""
    with torch.no_grad():
        qkv = attn.qkv.weight.view(3, attn.num_heads, attn.head_dim, -1)[:, -1]
        bias = attn.qkv.bias.view(3, attn.num_heads, attn.head_dim)[:, -1]
        output = attn.proj.weight.view(-1, attn.num_heads, attn.head_dim)[:, -1]
        return [qkv, bias, output, attn.rel_pos.relative_position_bias_table[:, -1], attn.rel_pos.zero_key_bias[-1:]]


@torch.no_grad()
def look(model: nn.Module, photos: Photos) -> List[Dict[str, float]]:
    """Return what the heads of every layer look at, on average: weight on one offset, distance, and entropy."""
    if not tables(model):
        return []
    means = []
    images = photos.images[:NUM_LOOKED_AT].to(next(model.parameters()).device)
    for maps in attention_maps(model, images).values():
        heads = head_statistics(maps)
        means.append({name: mean(getattr(head, name) for head in heads) for name in LOOKS})
    return means


def report(results: Results, args: argparse.Namespace) -> str:
    """Return the results of all rows, each at its best learning rate, as two tables in Markdown."""
    best = best_records(results, args)
    devices = '; '.join(f'{phase1_epoch(device, results):.2g} s on {device}'
                        for device in sorted({record['device'] for record in results.values()}))
    return f"""{accuracies(best, results, args)}
Top-1 on the test images in %, mean ± standard deviation over the seeds; the mean gain over phase 1 alone with as many
steps, and with as much time, from the seeds that both have, from three on with its 95 % interval over seeds (Student's
t, paired); the loss of the last epoch, which Mixup makes noisy; the training time with that of the first phase, in
epochs of phase 1 on the same machine ({devices}).

{looks(best)}
Over all heads and layers, before and after training: the weight on one offset, the distance of where a head looks from
the query (patches), the entropy of the weights (nats), and how much the bias moved that moved most.
"""


def accuracies(best: Dict[str, List[Record]], results: Results, args: argparse.Namespace) -> str:
    budgets = {row.title: row.budget for row in make_rows(args.epochs1, args.epochs2)}
    head = ['', 'epochs', 'seeds', 'parameters, M', 'learning rate', 'start', 'top-1', 'as many steps', 'as much time',
            'training loss', 'time']
    cells = []
    for title, records in best.items():
        gains = [gain(records, best.get(alone, [])) for alone in (AS_MANY_STEPS, AS_MUCH_TIME)]
        time = mean(curve(record, results)[-1]['time'] for record in records)
        cells.append([
            title, budgets[title].removesuffix(' epochs'), str(len(records)),
            f"{mean(record['params'] for record in records):.2f}",
            f'{records[0]["lr"]:g}', f"{mean(record['before']['top1'] for record in records):.1f}",
            spread([record['test']['top1'] for record in records]), *gains,
            f"{mean(record['train_loss'] for record in records):.3f}", f'{time:.0f}'])
    return markdown_table(head, cells)


def gain(records: List[Record], baseline: List[Record]) -> str:
    """Return the mean gain in top-1 over the same seeds of another row, from three seeds on with its 95 % interval."""
    others = {record['seed']: record for record in baseline}
    gains = [record['test']['top1'] - others[record['seed']]['test']['top1']
             for record in records if record['seed'] in others]
    if not gains or records is baseline:
        return '-'
    if len(gains) < 3:
        return f'{mean(gains):+.1f}'
    half = scipy.stats.t.ppf(0.975, len(gains) - 1) * statistics.stdev(gains) / len(gains) ** 0.5
    return f'{mean(gains):+.1f} ({mean(gains) - half:+.1f} to {mean(gains) + half:+.1f})'


def looks(best: Dict[str, List[Record]]) -> str:
    cells = [
        [title, *(' -> '.join(f'{mean(layer[name] for record in records for layer in record["looks"][when]):.2f}'
                              for when in ('before', 'after')) for name in LOOKS),
         f"{mean(max(record['bias_movement']) for record in records):.2f}"]
        for title, records in best.items() if records[0]['bias_movement']]
    return markdown_table(['', 'weight on one offset', 'distance', 'entropy', 'bias moved by'], cells)


def best_records(results: Results, args: argparse.Namespace) -> Dict[str, List[Record]]:
    """Return the records of every row, by seed, at the learning rate that its first seed chose."""
    best = {}
    for row in make_rows(args.epochs1, args.epochs2):
        by_rates: Dict[str, List[Record]] = {}
        for key, record in sorted(results.items()):
            if key.startswith(f'{row.title} | {row.budget} | {args.num_train} images | '):
                by_rates.setdefault(key.split(' | ')[3], []).append(record)
        first = [records for records in by_rates.values() if records[0]['seed'] == 0]
        if first:
            best[row.title] = max(first, key=lambda records: records[0]['held_out']['top1'])
    return best


def draw_curves(results: Results, args: argparse.Namespace) -> None:
    """Draw training loss and held-out accuracy over the training time. Ablations are left to the table."""
    figure, axes = make_figure((12, 4.5), 2)
    best = best_records(results, args)
    for title in (title for title in DRAWN if title in best):
        curves = [curve(record, results) for record in best[title]]
        times = [mean(point['time'] for point in points) for points in zip(*curves)]
        for axis, measure in zip(axes, ('train_loss', 'top1')):
            measures = [[point[measure] for point in points] for points in curves]
            plot_mean_and_range(axis, times, measures, label=title)
    for axis, label in zip(axes, ('training loss', 'top-1 on held-out images, %')):
        axis.set(xlabel='training time, epochs of phase 1', ylabel=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside right upper', fontsize=7, frameon=False)
    figure.savefig(args.results.with_suffix('.png'))


def curve(record: Record, results: Results) -> List[Dict[str, float]]:
    """Return the points of a training with their time; those of a second phase follow the last one of the first."""
    epoch = phase1_epoch(record['device'], results)
    points = [{**point, 'time': point['seconds'] / epoch} for point in record['history']]
    if record['after'] is None:
        return points
    last = curve(results[record['after']], results)[-1]
    return [last, *({**point, 'time': last['time'] + point['time']} for point in points)]


def phase1_epoch(device: str, results: Results) -> float:
    """Return the mean seconds of an epoch of phase 1 on a device: machines differ, and are compared by it."""
    seconds = [record['seconds'] / record['history'][-1]['epoch'] for record in results.values()
               if record['device'] == device and record['title'] in (PHASE1, AS_MANY_STEPS, AS_MUCH_TIME)]
    return mean(seconds) if seconds else math.nan


def draw_maps(results: Results, args: argparse.Namespace) -> None:
    """Draw where heads look from the centre, before and after phase 2, if the checkpoints are there."""
    records = best_records(results, args).get(MAPPED)
    if not records:
        return
    record = records[0]
    first = results[record['after']]
    row = next(row for row in make_rows(args.epochs1, args.epochs2) if row.title == MAPPED)
    run = plan(row, record['seed'], {MAPPED: record['lr'], first['title']: first['lr']}, args)
    if not all(each.checkpoint(args.output).exists() for each in (run, run.after) if each):
        return
    images = split_photos(args.data_dir, args.num_train, args.num_held_out, run.seed).test.images[:NUM_LOOKED_AT]
    model = start(run, args.output)[1].eval()
    before = attention_maps(model, images)
    load_checkpoint(model, str(run.checkpoint(args.output)))
    attention: Dict[str, Any] = {}
    for name, maps in attention_maps(model, images).items():
        attention |= {f'{name}, before': attention_from(before[name]), f'{name}, after': attention_from(maps)}
    figure = attention_figure(attention, f'{MAPPED}: attention before and after phase 2')
    figure.savefig(args.results.with_name(f'{args.results.stem}_maps.png'))


if __name__ == '__main__':
    main()
