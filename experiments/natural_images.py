"""Does phase 2 learn to attend, on natural images? python experiments/natural_images.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Small models are trained on 5,000 images (500 a class), augmented by crops, flips, Mixup and CutMix, and
tested on all of validation/. Every row has its own best learning rate of a few, by 1,000 other training images.
Training is in bfloat16 where that is for speed only (AMP), evaluation in float32.

Runs are done side by side, one to a core or several to a GPU, and only once: what is in --results is read, and what was
stopped goes on where it stopped. --rows and --seeds choose a part of them; the table shows all that is there.
"""
import argparse
import fnmatch
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from common.options import positive_float, positive_int
from common.photos import IMG_SIZE, Photos, split_photos
from common.report import make_figure, markdown_table, plot_mean_and_range, spread, write_whole
from common.runs import VERSIONS
from common.training import Stage, create, evaluate, num_params, train
from timm.models import load_checkpoint
from torch import nn
from tqdm import tqdm

import timm_cmhsa
from timm_cmhsa import attention_maps, head_statistics
from timm_cmhsa.rel_pos import PaddedRelPosTable, RelPosTable

NUM_LOOKED_AT = 64  # images
TOKENS = dict(img_size=IMG_SIZE, patch_size=4)
SHAPE = dict(TOKENS, hidden_chans=6, depth=4, num_classes=10)  # 8 x 8 tokens of width 96
PHASE1, PHASE1_TITLE = ('cmhsa_conv_k5', SHAPE), 'phase 1'

Record = Dict[str, Any]
Results = Dict[str, Record]  # by the key of a run


class Row(NamedTuple):
    """A way to train: a model from a random start, or phase 2 after a phase 1 that several rows share."""
    title: str
    model: str
    model_args: Dict[str, Any]
    epochs: int
    start: Optional[str] = None  # of phase 2, one of STARTS


def frozen(model: nn.Module) -> nn.Module:
    """Return the rewrite with one-hot heads."""
    return timm_cmhsa.convert_model(model)


def frozen_thin(model: nn.Module) -> nn.Module:
    """Return the rewrite with one-hot heads of half the width."""
    return timm_cmhsa.convert_model(model, head_dim=48)


def frozen_spare(model: nn.Module) -> nn.Module:
    """Return the rewrite with one-hot heads, and one more head, which attends from a random start."""
    return timm_cmhsa.convert_model(model, 'cmhsa_attn_soft')


def soft(peak: float, head_dim: Optional[int] = None, scale: float = PaddedRelPosTable.bias_scale) -> Callable:
    """Return how to rewrite a model with soft heads whose biases learn so many times as fast as weights."""
    def convert(model: nn.Module) -> nn.Module:
        model = timm_cmhsa.convert_model(model, head_dim=head_dim, peak=peak)
        for module in model.modules():
            if isinstance(module, PaddedRelPosTable):
                module.relative_position_bias_table.data *= module.bias_scale / scale
                module.bias_scale = scale
        return model
    return convert


HELD = 'peak 0.75, global head held'
STARTS: Dict[str, Callable[[nn.Module], nn.Module]] = {
    'one-hot': frozen,
    'one-hot, thin': frozen_thin,
    'one-hot, a spare head': frozen_spare,
    'peak 0.75': soft(0.75),
    'peak 0.5': soft(0.5),
    'peak 0.75, slow biases': soft(0.75, scale=1.),
    'peak 0.75, fast biases': soft(0.75, scale=30.),
    'peak 0.75, thin': soft(0.75, head_dim=48),
    HELD: soft(0.75),
}
def make_rows(epochs: int) -> List[Row]:
    """Return all rows; each phase of two has as many epochs."""
    return [
        Row(PHASE1_TITLE, *PHASE1, epochs),
        Row('phase 1 alone, as many steps', *PHASE1, 2 * epochs),
        Row('phase 1 alone, as much time', *PHASE1, 5 * epochs),
        *(Row(f'two phases, {start}', *PHASE1, epochs, start) for start in STARTS),
        Row('attention alone', 'cmhsa_attn', SHAPE, 2 * epochs),
        Row('ViT', 'vit_tiny_patch16_224',
            dict(TOKENS, embed_dim=192, depth=4, num_heads=3, num_classes=10, class_token=False, global_pool='avg'),
            2 * epochs),
        Row('ConViT', 'convit_tiny',
            dict(TOKENS, embed_dim=192, depth=4, num_heads=4, num_classes=10, local_up_to_layer=3), 2 * epochs),
        Row('ConvNeXt', 'convnext_atto',
            dict(patch_size=2, dims=(32, 64, 128, 256), depths=(1, 1, 2, 1), num_classes=10), 2 * epochs),
    ]




class Run(NamedTuple):
    """One training."""
    row: Row
    seed: int
    lr: float
    num_train: int
    phase1_lr: Optional[float] = None

    @property
    def key(self) -> str:
        rates = f'{self.lr:g}' if self.phase1_lr is None else f'{self.phase1_lr:g} and {self.lr:g}'
        return f'{self.row.title} | {self.row.epochs} epochs | {self.num_train} images | lr {rates} | seed {self.seed}'

    def folder(self, output: Path) -> Path:
        return output / ''.join(c if c.isalnum() or c in '.-' else '_' for c in self.key)


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results: Results = json.loads(args.results.read_text()) if args.results.exists() else {}
    first, *others = make_rows(args.epochs)
    rows = [row for row in others if any(fnmatch.fnmatch(row.title, pattern) for pattern in args.rows)]
    rates = tune([first], {}, results, args)
    rates.update(tune(rows, rates, results, args))
    finish([plan(row, seed, rates, args) for seed in range(args.seeds) for row in rows], results, args)
    write_whole(args.results.with_suffix('.md'), table(results, args))
    draw_curves(results, args)
    print(table(results, args))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--data-dir', type=Path, required=True, help='images, see above')
    add('--num-train', type=positive_int, default=5000, help='number of training images (default: %(default)s)')
    add('--num-held-out', type=positive_int, default=1000, help='others, to choose by (default: %(default)s)')
    add('--learning-rates', type=positive_float, nargs='+', default=[5e-4, 1e-3, 2e-3],
        help='that every row chooses from (default: %(default)s)')
    add('--epochs', type=positive_int, default=40, help='of each phase (default: %(default)s)')
    add('--seeds', type=positive_int, default=3, help='number of seeds (default: %(default)s)')
    add('--rows', nargs='+', default=['*'], metavar='TITLE', help='of these titles only; * is any text')
    add('--results', type=Path, default=Path('benchmarks/natural_images.json'),
        help='file of results, which grows with every run (default: %(default)s)')
    add('--output', type=Path, default=Path('output/natural_images'),
        help='folder of checkpoints (default: %(default)s)')
    add('--workers', type=positive_int, default=os.cpu_count(), help='runs at a time (default: one to a core)')
    return parser.parse_args()


def plan(row: Row, seed: int, rates: Dict[str, float], args: argparse.Namespace) -> Run:
    phase1_lr = rates[PHASE1_TITLE] if row.start else None
    return Run(row, seed, rates[row.title], args.num_train, phase1_lr)


def tune(rows: Sequence[Row], known: Dict[str, float], results: Results, args: argparse.Namespace) -> Dict[str, float]:
    """Choose the learning rate of every row by the held-out images of the first seed."""
    runs = {row.title: [plan(row, 0, {**known, row.title: lr}, args) for lr in args.learning_rates] for row in rows}
    finish([run for each in runs.values() for run in each], results, args)
    return {title: max(each, key=lambda run: results[run.key]['held_out']['top1']).lr for title, each in runs.items()}


def finish(runs: Sequence[Run], results: Results, args: argparse.Namespace) -> None:
    """Do what is not done yet, first phase 1 where phase 2 needs its checkpoint."""
    todo = [run for run in runs if run.key not in results]
    phase1 = {phase1_of(run).key: phase1_of(run) for run in todo if run.row.start}
    do_all([run for run in phase1.values() if not checkpoint(run, args.output).exists()], results, args)
    do_all(todo, results, args)


def phase1_of(run: Run) -> Run:
    assert run.phase1_lr is not None
    row = Row(PHASE1_TITLE, *PHASE1, run.row.epochs)
    return Run(row, run.seed, run.phase1_lr, run.num_train)


def checkpoint(run: Run, output: Path) -> Path:
    return run.folder(output) / 'model' / 'last.pth.tar'


def do_all(runs: Sequence[Run], results: Results, args: argparse.Namespace) -> None:
    if not runs:
        return
    os.environ['TQDM_DISABLE'] = '1'  # of the other processes
    with ProcessPoolExecutor(args.workers, mp_context=get_context('spawn')) as pool:
        futures = [pool.submit(do, run, args.data_dir, args.num_held_out, args.output) for run in runs]
        try:
            for future in tqdm(as_completed(futures), 'runs', total=len(futures), disable=False):
                key, record = future.result()
                results[key] = record
                write_whole(args.results, json.dumps(dict(sorted(results.items())), indent=1) + '\n')
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def do(run: Run, data_dir: Path, num_held_out: int, output: Path) -> Tuple[str, Record]:
    """Train one run; return its key and result."""
    torch.set_num_threads(1)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    folder = run.folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    data = split_photos(data_dir, run.num_train, num_held_out, run.seed)
    stage = Stage(
        'model', run.row.title, run.row.model, run.row.model_args, run.row.epochs, run.lr, canvas=IMG_SIZE,
        batch_size=100, mixup=0.5, amp=True)
    model = create(stage, run.seed)
    if run.row.start:
        load_checkpoint(model, str(checkpoint(phase1_of(run), output)))
        model = STARTS[run.row.start](model.eval())
    model = model.to(device)
    held = [values for layer in tables(model) for values in global_head(layer)] if run.row.start == HELD else []
    copies = [values.clone() for values in held]

    def hold() -> None:
        with torch.no_grad():
            for values, copy in zip(held, copies):
                values.copy_(copy)

    biases = [layer.rel_pos.offset_bias().detach().clone() for layer in tables(model)]
    looks, before = look(model, data.held_out), evaluate(model, data.test, device)
    model, history = train(stage, model, data.train, data.held_out, folder, run.seed, device, hold)
    moved = [(layer.rel_pos.offset_bias() - bias).abs().max().item() for layer, bias in zip(tables(model), biases)]
    return run.key, dict(
        title=run.row.title,
        phase1=phase1_of(run).key if run.row.start else None,
        seed=run.seed,
        lr=run.lr,
        params=num_params(model),
        before=before,
        test=evaluate(model, data.test, device),
        held_out=evaluate(model, data.held_out, device),
        train_loss=history[-1]['train_loss'],
        seconds=history[-1]['seconds'],
        history=history,
        looks={'before': looks, 'after': look(model, data.held_out)},
        bias_movement=moved,
        device=torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU',
        versions=VERSIONS,
    )


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
        means.append({name: statistics.mean(getattr(head, name) for head in heads)
                      for name in ('best_weight', 'distance', 'entropy')})
    return means


def table(results: Results, args: argparse.Namespace) -> str:
    """Return the results of all rows, each at its best learning rate, as a table in Markdown."""
    head = ['', 'seeds', 'parameters, M', 'learning rate', 'start', 'top-1', 'training loss', 'core minutes',
            'weight on one offset', 'biases moved by']
    cells = []
    for title, records in best_records(results, args).items():
        def mean(get: Callable[[Record], float], digits: int) -> str:
            return f'{statistics.mean(map(get, records)):.{digits}f}'  # noqa: B023
        minutes = mean(lambda record: (record['seconds'] + phase1_seconds(record, results)) / 60, 0)
        looks = '-'
        if records[0]['looks']['after']:
            looks = ' -> '.join(mean(
                lambda record: statistics.mean(layer['best_weight'] for layer in record['looks'][when]), 2)  # noqa: B023
                for when in ('before', 'after'))
        cells.append([
            title, str(len(records)), mean(lambda record: record['params'], 2), f'{records[0]["lr"]:g}',
            mean(lambda record: record['before']['top1'], 1), spread([record['test']['top1'] for record in records]),
            mean(lambda record: record['train_loss'], 3), minutes, looks,
            mean(lambda record: max(record['bias_movement']), 1) if records[0]['bias_movement'] else '-'])
    return markdown_table(head, cells)


def best_records(results: Results, args: argparse.Namespace) -> Dict[str, List[Record]]:
    """Return the records of every row, by seed, at the learning rate that its first seed chose."""
    best = {}
    for row in make_rows(args.epochs):
        records = [record for key, record in results.items()
                   if record['title'] == row.title and f'| {row.epochs} epochs | {args.num_train} images' in key]
        first = [record for record in records if record['seed'] == 0]
        if first:
            lr = max(first, key=lambda record: record['held_out']['top1'])['lr']
            best[row.title] = sorted((r for r in records if r['lr'] == lr), key=lambda record: record['seed'])
    return best


def phase1_seconds(record: Record, results: Results) -> float:
    return results[record['phase1']]['seconds'] if record['phase1'] else 0.


def draw_curves(results: Results, args: argparse.Namespace) -> None:
    """Draw training loss and held-out accuracy of every row over the epochs."""
    figure, axes = make_figure((13, 5), 2)
    for title, records in best_records(results, args).items():
        epochs = [point['epoch'] for point in records[0]['history']]
        for axis, measure in zip(axes, ('train_loss', 'top1')):
            plot_mean_and_range(
                axis, epochs, [[point[measure] for point in record['history']] for record in records], label=title)
    for axis, label in zip(axes, ('training loss', 'top-1 on held-out images, %')):
        axis.set(xlabel='epoch of the phase', ylabel=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside right upper', fontsize=7, frameon=False)
    figure.savefig(args.results.with_suffix('.png'))


if __name__ == '__main__':
    main()
