"""Does phase 2 learn to attend, on natural images? python experiments/natural_images.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Small models are trained on 3,000 images (300 a class), augmented by crops, flips, Mixup and CutMix, and
tested on all of validation/. Every row has its own best learning rate of a few, by 1,000 other training images.
Training is in bfloat16 (AMP) where the processor or GPU has it, evaluation in float32. Queries and keys are as wide as
values, as in the paper.

Runs are done side by side and only once: what is in --results is read, and what was stopped goes on where it stopped.
One takes 10 to 60 minutes on one core, all of them about 35 hours. --rows and --seeds choose a part of them. The output
folder gets the table of all results and the pictures, and each run's folder has a picture of its attention before and
after phase 2. `--results benchmarks/natural_images.jsonl` has those of docs/results.md, which an earlier trainer made
(seconds are those of the processor, images were shifted with the mean colour): give another file for new runs.
"""
import argparse
import fnmatch
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import scipy.stats
from common.images import photos, sample_photos
from common.options import make_parser, positive_float, positive_int
from common.report import make_figure, markdown_table, plot_mean_and_range, spread, write_whole
from common.runs import LOOKS, RESULTS, Result, Results, Run, best_rates, read_results, run_all
from matplotlib.axes import Axes
from torch import nn

import timm_cmhsa
from timm_cmhsa.rel_pos import BIAS_SCALE, PaddedRelPosTable

sys.path.insert(0, str(Path(__file__).parents[1] / 'examples' / 'cifar10'))
import resnet18_cifar  # noqa: F401  registers the model

IMG_SIZE = 32  # pixels
TOKENS = dict(patch_size=4)  # 8 x 8
CONV = 'cmhsa_conv_k5', dict(TOKENS, hidden_chans=6, depth=4)  # of width 96
ATTENTION = 'cmhsa_attn', dict(CONV[1], qk_dim=96)
VIT = 'vit_tiny_patch16_224', dict(
    TOKENS, embed_dim=192, depth=4, num_heads=3, class_token=False, global_pool='avg')
CONVIT = 'convit_tiny', dict(TOKENS, embed_dim=48, depth=4, num_heads=4, local_up_to_layer=3)  # 4 x 48
CONVNEXT = 'convnext_atto', dict(patch_size=2, dims=(32, 64, 128, 256), depths=(1, 1, 2, 1))
RESNET = 'resnet18_cifar', dict(channels=(24, 48, 96, 192))
# time of an epoch, in epochs of phase 1: measured on two cores of an Intel Xeon with AMX, fixed since budgets follow
COSTS = {'soft heads': 3.4, 'attention': 3.1, 'ViT': 3.4, 'ConViT': 3.8, 'ConvNeXt': 0.75, 'ResNet': 3.}
PHASE1, CNN = 'phase 1', 'ResNet-18'
AS_MANY_STEPS, AS_MUCH_TIME = (f'{PHASE1} alone, {long}' for long in ('as many steps', 'as much time'))
SOFT = 'two phases, soft heads'
DRAWN = (  # those whose curves are drawn
    PHASE1, AS_MUCH_TIME, 'two phases, hard heads', SOFT, 'attention alone', 'ViT', 'ConViT', 'ConvNeXt', CNN)
SHORT = {AS_MUCH_TIME: 'phase 1', SOFT: 'phase 1, then phase 2', 'ViT': 'ViT'}  # those of the README, with labels


class Row(NamedTuple):
    """A way to train: a model from a random start, with its arguments, or what another row trained, rewritten."""
    title: str
    epochs: int
    model: Optional[Tuple[str, Dict[str, Any]]] = None
    after: Optional['Row'] = None
    rewrite: Optional[Callable[[Any], nn.Module]] = None

    @property
    def budget(self) -> str:
        """Return the epochs of all phases."""
        return f'{self.epochs}' if self.after is None else f'{self.after.epochs} + {self.epochs}'


def keep(model: nn.Module) -> nn.Module:
    """Return the model as it is: what the second schedule does alone."""
    return model


def hard(model: Any, is_thin: bool = False) -> nn.Module:
    """Rewrite a model with hard heads, which are trained as shifts: the same, for less."""
    width = model.embed_dim // 2 if is_thin else model.embed_dim
    model = timm_cmhsa.convert_model(model, 'cmhsa_attn', head_dim=width, qk_dim=width)
    model.set_hard_attn()
    return model


def hard_and_spare(model: Any, scale: float) -> nn.Module:
    """Rewrite a model with hard heads, and one more head, which attends from a random start."""
    width = model.embed_dim
    return with_bias_scale(timm_cmhsa.convert_model(
        model, 'cmhsa_attn', num_heads=10, head_dim=width, qk_dim=width, rel_pos='padded_table'), scale)


def soft(model: Any, peak: float = 0.75, is_thin: bool = False, scale: float = BIAS_SCALE) -> nn.Module:
    """Rewrite a model with soft heads, whose biases learn `scale` times as fast as weights."""
    width = model.embed_dim // 2 if is_thin else model.embed_dim
    return with_bias_scale(timm_cmhsa.convert_model(model, head_dim=width, qk_dim=width, peak=peak), scale)


def with_bias_scale(model: nn.Module, scale: float) -> nn.Module:
    """Change how fast biases learn, and not what they are."""
    for module in model.modules():
        if isinstance(module, PaddedRelPosTable):
            module.relative_position_bias_table.data *= module.bias_scale / scale
            module.bias_scale.fill_(scale)
    return model


def attend_stages(model: Any, peak: Optional[float] = None) -> nn.Module:
    """Rewrite the last two stages of a ResNet."""
    timm_cmhsa.attend_convs(model, ['layer3.*', 'layer4.*'], (3, IMG_SIZE, IMG_SIZE), peak=peak)
    model.no_weight_decay = lambda: {'*.rel_pos.*'}  # timm's optimizers ask for it
    return model


REWRITES: Dict[str, Callable[[Any], nn.Module]] = {
    'not rewritten': keep,
    'hard heads': hard,
    'soft heads': soft,
    'thin hard heads': partial(hard, is_thin=True),
    'thin soft heads': partial(soft, is_thin=True),
    'soft heads, bias scale 10': partial(soft, scale=10.),
    'soft heads, bias scale 100': partial(soft, scale=100.),
    'soft heads, peak 0.5, bias scale 10': partial(soft, peak=0.5, scale=10.),
    'hard heads and a spare one, bias scale 10': partial(hard_and_spare, scale=10.),
}
REWRITES_OF_RESNET: Dict[str, Callable[[Any], nn.Module]] = {
    'trained on': keep,
    'last two stages with hard heads': attend_stages,
    'last two stages with soft heads': partial(attend_stages, peak=0.75),
}


def make_rows(epochs1: int, epochs2: int) -> List[Row]:
    """Return all rows, given the epochs of phase 1 and of phase 2.

    Where nothing else is said, models train for as much time as two phases with soft heads. The ResNet has that time
    as well, and then half of phase 2's epochs to be trained on, whatever these take. What attends from a random start
    does not fit its images by then, so it also has four times as long.
    """
    time = epochs1 + COSTS['soft heads'] * epochs2
    phase1, cnn = Row(PHASE1, epochs1, CONV), Row(CNN, round(time / COSTS['ResNet']), RESNET)
    return [
        phase1,
        Row(AS_MANY_STEPS, epochs1 + epochs2, CONV),
        Row(AS_MUCH_TIME, round(time), CONV),
        *(Row(f'two phases, {name}', epochs2, None, phase1, rewrite) for name, rewrite in REWRITES.items()),
        Row('attention alone', round(time / COSTS['attention']), ATTENTION),
        Row('attention alone, 4 times as long', round(4 * time / COSTS['attention']), ATTENTION),
        Row('ViT', round(time / COSTS['ViT']), VIT),
        Row('ViT, 4 times as long', round(4 * time / COSTS['ViT']), VIT),
        Row('ConViT', round(time / COSTS['ConViT']), CONVIT),
        Row('ConViT, 4 times as long', round(4 * time / COSTS['ConViT']), CONVIT),
        Row('ConvNeXt', round(time / COSTS['ConvNeXt']), CONVNEXT),
        cnn,
        *(Row(f'{CNN}, {name}', (epochs2 + 1) // 2, None, cnn, rewrite)
          for name, rewrite in REWRITES_OF_RESNET.items()),
    ]


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rows = [row for row in make_rows(args.epochs1, args.epochs2)
            if any(fnmatch.fnmatch(row.title, each) for each in args.rows)]
    where: Dict[str, Any] = dict(output=args.output, path=args.results, workers=args.workers)
    rates: Dict[str, float] = {}
    for tuned in [row.after for row in rows if row.after], rows:
        candidates = {row.title: {lr: [plan(row, 0, {**rates, row.title: lr}, args)] for lr in args.learning_rates}
                      for row in tuned if row.title not in rates}
        rates.update(best_rates(candidates, **where))
    runs = {row.title: [plan(row, seed, rates, args) for seed in range(args.seeds)] for row in rows}
    run_all(runs, title='runs', **where)
    results = read_results(args.results)
    write_whole(args.output / 'natural_images.md', report(results, args))
    draw_curves(results, args)
    print(report(results, args))


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 'natural_images', seeds=3)
    add = parser.add_argument
    add('--data-dir', type=Path, required=True, help='images, see above')
    add('--num-train', type=positive_int, default=3000, help='number of training images (default: %(default)s)')
    add('--num-held-out', type=positive_int, default=1000, help='others, to choose by (default: %(default)s)')
    add('--learning-rates', type=positive_float, nargs='+', default=[1e-3, 2e-3],
        help='that every row chooses from (default: %(default)s)')
    add('--epochs1', type=positive_int, default=160, help='of phase 1 (default: %(default)s)')
    add('--epochs2', type=positive_int, default=40, help='of phase 2 (default: %(default)s)')
    add('--rows', nargs='+', default=['*'], metavar='TITLE', help='of these titles only; * is any text')
    add('--results', type=Path, help=f'file of results, which grows with every run (default: {RESULTS} in --output)')
    add('--workers', type=positive_int, help='runs at a time (default: one to a core)')
    args = parser.parse_args()
    args.results = args.results or args.output / RESULTS
    titles = [row.title for row in make_rows(args.epochs1, args.epochs2)]
    for pattern in args.rows:
        if not fnmatch.filter(titles, pattern):
            shown = ', '.join(map(repr, titles))
            parser.error(f'no row is called {pattern!r}: choose from {shown}, or a part of a title with *')
    try:
        read_results(args.results)
        sample_photos(args.data_dir, args.num_train, 0, args.num_held_out)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    return args


def plan(row: Row, seed: int, rates: Dict[str, float], args: argparse.Namespace) -> Run:
    options: Dict[str, Any] = dict(img_size=IMG_SIZE, batch_size=100, epochs=row.epochs, lr=rates[row.title])
    if row.model is not None:
        options['model'], options['model_kwargs'] = row.model
    return Run(
        row.title,
        args.num_train,
        seed,
        options,
        data=partial(photos, data_dir=args.data_dir, num_held_out=args.num_held_out),
        after=plan(row.after, seed, rates, args) if row.after else None,
        rewrite=row.rewrite,
        curves=('train_loss', 'top1') if row.title in DRAWN else (),
    )


def report(results: Results, args: argparse.Namespace) -> str:
    """Return the results of all rows, each at its best learning rate, as two tables in Markdown."""
    best = best_results(results, args)
    devices = '; '.join(f'{phase1_epoch(device, results):.2g} s on {device}'
                        for device in sorted({result['device'] for result in results.values()}))
    return f"""{accuracies(best, results, args)}
Top-1 on the test images in %, mean ± standard deviation over the seeds; the mean gain over phase 1 alone with as many
steps, and with as much time, from the seeds that both have, from three on with its 95 % interval over seeds (Student's
t, paired); the loss of the last epoch, which Mixup makes noisy; the training time with that of the first phase, in
epochs of phase 1 on the same machine ({devices}).

{looks(best)}
Over all heads and layers, before and after training: the weight on one offset, the distance of where a head looks from
the query (patches), the entropy of the weights (nats), and how much the bias moved that moved most.
"""


def accuracies(best: Dict[str, List[Result]], results: Results, args: argparse.Namespace) -> str:
    budgets = {row.title: row.budget for row in make_rows(args.epochs1, args.epochs2)}
    head = ['', 'epochs', 'seeds', 'parameters, M', 'learning rate', 'start', 'top-1', 'as many steps', 'as much time',
            'training loss', 'time']
    cells = []
    for title, seeds in best.items():
        gains = [gain(seeds, best.get(alone, [])) for alone in (AS_MANY_STEPS, AS_MUCH_TIME)]
        time = mean(time_of(result, results) for result in seeds)
        cells.append([
            title, budgets[title], str(len(seeds)), f"{mean(result['params'] for result in seeds):.2f}",
            f'{seeds[0]["lr"]:g}', start(seeds),
            spread([result['test']['top1'] for result in seeds]), *gains,
            f"{mean(result['train_loss'] for result in seeds):.3f}", f'{time:.0f}'])
    return markdown_table(head, cells)


def start(seeds: List[Result]) -> str:
    """Return the mean top-1 right after the rewrite."""
    return f"{mean(result['before']['top1'] for result in seeds):.1f}" if seeds[0]['after'] else '-'


def gain(seeds: List[Result], baseline: List[Result]) -> str:
    """Return the mean gain in top-1 over the same seeds of another row, from three seeds on with its 95 % interval."""
    others = {result['seed']: result for result in baseline}
    gains = [result['test']['top1'] - others[result['seed']]['test']['top1']
             for result in seeds if result['seed'] in others]
    if not gains or seeds is baseline:
        return '-'
    if len(gains) < 3:
        return f'{mean(gains):+.1f}'
    half = scipy.stats.t.ppf(0.975, len(gains) - 1) * statistics.stdev(gains) / len(gains) ** 0.5
    return f'{mean(gains):+.1f} ({mean(gains) - half:+.1f} to {mean(gains) + half:+.1f})'


def looks(best: Dict[str, List[Result]]) -> str:
    cells = [
        [title, *(' -> '.join(f'{mean(result["looks"][when][name] for result in seeds):.2f}'
                              for when in ('before', 'after')) for name in LOOKS),
         f"{mean(result['bias_moved'] for result in seeds):.2f}"]
        for title, seeds in best.items() if seeds[0]['bias_moved'] is not None]
    return markdown_table(['', 'weight on one offset', 'distance', 'entropy', 'bias moved by'], cells)


def best_results(results: Results, args: argparse.Namespace) -> Dict[str, List[Result]]:
    """Return the results of every row, by seed, at the learning rate that its first seed chose."""
    best = {}
    for row in make_rows(args.epochs1, args.epochs2):
        by_rates: Dict[str, List[Result]] = {}
        for key, result in sorted(results.items()):
            if key.startswith(f'{row.title} | {row.budget} epochs | {args.num_train} images | '):
                by_rates.setdefault(key.split(' | ')[3], []).append(result)
        first = [seeds for seeds in by_rates.values() if seeds[0]['seed'] == 0]
        if first:
            best[row.title] = max(first, key=lambda seeds: seeds[0]['held_out']['top1'])
    return best


def time_of(result: Result, results: Results) -> float:
    """Return the time of a training and of the one before it, in epochs of phase 1 on the same machine."""
    before = time_of(results[result['after']], results) if result['after'] else 0.
    return before + result['seconds'] / phase1_epoch(result['device'], results)


def phase1_epoch(device: str, results: Results) -> float:
    """Return the mean seconds of an epoch of phase 1 on a device: machines differ, and are compared by it."""
    seconds = [result['seconds'] / result['epochs'] for result in results.values()
               if result['device'] == device and result['title'] in (PHASE1, AS_MANY_STEPS, AS_MUCH_TIME)]
    return mean(seconds) if seconds else math.nan


def draw_curves(results: Results, args: argparse.Namespace) -> None:
    """Draw training loss and held-out accuracy over the training time. Ablations are left to the table."""
    best = best_results(results, args)
    figure, axes = make_figure((12, 4.5), 2)
    for title in (title for title in DRAWN if title in best):
        for axis, name in zip(axes, ('train_loss', 'top1')):
            # phase 2 starts where phase 1 ends
            plot_curves(axis, [curve(result, results, name, since=-1) for result in best[title]], title)
    for axis, label in zip(axes, ('training loss', 'top-1 on held-out images, %')):
        axis.set(xlabel='training time, epochs of phase 1', ylabel=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside right upper', fontsize=7, frameon=False)
    figure.savefig(args.output / 'natural_images.png')

    figure, (axis,) = make_figure((7, 4))
    for title, label in SHORT.items():
        if title in best:
            plot_curves(axis, [curve(result, results, 'top1') for result in best[title]], label)
    axis.set(xlabel='training time, epochs of phase 1', ylabel='top-1 accuracy, %')
    axis.legend()
    figure.savefig(args.output / 'two_phases.png')


def plot_curves(axis: Axes, curves: List[List[Tuple[float, float]]], label: str) -> None:
    times = [mean(time for time, _ in points) for points in zip(*curves)]
    plot_mean_and_range(axis, times, [[value for _, value in points] for points in curves], label=label)


def curve(result: Result, results: Results, name: str, since: int = 0) -> List[Tuple[float, float]]:
    """Return (time, measure) of a training, and before it those of the first phase since a point."""
    points = curve(results[result['after']], results, name)[since:] if result['after'] else []
    begin, end = points[-1][0] if points else 0., time_of(result, results)
    epochs = result['curves']['epoch']
    times = [begin + (end - begin) * epoch / epochs[-1] for epoch in epochs]
    return [*points, *zip(times, result['curves'][name])]


if __name__ == '__main__':
    main()
