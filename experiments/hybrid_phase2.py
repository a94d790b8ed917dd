"""What does phase 2 add to a hybrid? python experiments/hybrid_phase2.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Every run is one schedule of `timm_cmhsa.train` on --images of them, in which the convolutions are rewritten
in one of several ways, and is judged by 1,000 other training images. All rows take about as long as --epochs of phase 1
alone. The test images choose nothing.

Runs are done side by side and only once: each appends a line to --results, and what was stopped goes on. One takes
about 20 minutes on one core. At the end, OUTPUT/gain.png draws what phase 2 gains at every number of images so far.
"""
import csv
import io
import statistics
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import scipy.stats
import torch
from common.images import photos
from common.options import add_queue, make_parser, positive_int
from common.queue import run_queue
from common.report import make_figure
from matplotlib.figure import Figure
from natural_images import with_bias_scale
from timm.models import VisionTransformer
from torch import nn

import timm_cmhsa
from timm_cmhsa.attention import RelPosAttention
from timm_cmhsa.layers import Mask, PatchConv2d
from timm_cmhsa.rel_pos import BIAS_SCALE
from timm_cmhsa.train import train_two_phases

HELD_OUT = 1000  # images
COLUMNS = 'row', 'images', 'seed', 'epochs', 'seconds', 'params', 'phase1_top1', 'converted_top1', 'top1', 'test_top1'


class Beside(PatchConv2d):
    """A convolution, and attention beside it."""
    beside: RelPosAttention

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        return super().forward(x, attn_mask, is_causal) + self.beside(x)


def plain(model: Any) -> nn.Module:
    """Make the trainer take a model of mixed layers for any model of timm."""
    model.__class__ = VisionTransformer
    model.no_weight_decay = lambda: {'*.rel_pos.*'}
    return model


def attend(model: Any, blocks: slice = slice(None), scale: float = BIAS_SCALE, **options: Any) -> nn.Module:
    """Rewrite some blocks with soft heads, whose biases learn `scale` times as fast as weights."""
    converted: Any = timm_cmhsa.convert_model(model, **options)
    kept = set(range(len(model.blocks))) - set(range(len(model.blocks))[blocks])
    for i in kept:
        converted.blocks[i].attn = model.blocks[i].attn
    with_bias_scale(converted, scale)
    return plain(converted) if kept else converted


def add_beside(model: Any, num_heads: int = 4, head_dim: int = 24, qk_dim: int = 16) -> nn.Module:
    """Add heads beside every convolution, which add nothing at first."""
    for mixer in (block.attn for block in model.blocks):
        mixer.__class__ = Beside
        mixer.beside = RelPosAttention(
            model.embed_dim, mixer.grid_size, num_heads, head_dim, qk_dim, rel_pos='padded_table')
        nn.init.zeros_(mixer.beside.proj.weight)
    return plain(model)


class Row(NamedTuple):
    """Share of phase 1, epochs (of those of phase 1 alone, in as much time), how it is rewritten, and its model."""
    switch: float
    epochs: float
    rewrite: Optional[Callable[[Any], nn.Module]] = None
    options: Mapping[str, Any] = {}


RAW = dict(model='cmhsa_conv_k5_patch4_32', model_kwargs=dict(depth=4, hidden_chans=6))
ROWS = {
    'phase 1 alone': Row(1., 1.),
    'phase 1 alone, weights averaged': Row(1., 1., options=dict(ema=0.995)),
    'all blocks, switch 0.4': Row(0.4, 0.48),
    'heads beside, switch 0.4': Row(0.4, 0.78, add_beside),
    'last block, switch 0.4': Row(0.4, 0.77, partial(attend, blocks=slice(3, None))),
    'all blocks, switch 0.75': Row(0.75, 0.69),
    'all blocks, switch 0.9': Row(0.9, 0.83),
    'last two blocks, switch 0.4': Row(0.4, 0.6, partial(attend, blocks=slice(2, None))),
    'all blocks, switch 0.75, bias scale 3': Row(0.75, 0.69, partial(attend, scale=3.)),
    'all blocks, switch 0.75, peak 0.9': Row(0.75, 0.69, partial(attend, peak=0.9)),
    'heads beside, switch 0.05': Row(0.05, 0.7, add_beside),
    # an exact rewrite of a convolution that has hardly been trained
    'all blocks, from the start': Row(0.01, 0.33),
    # nothing to rewrite: thin heads at the nine nearest offsets, computed as shifts, from a random start
    'hard heads of 32 from the start': Row(1., 1., options=dict(
        model='cmhsa_hybrid_attn_32', model_kwargs=dict(hard_attn=True, rel_pos='table', num_heads=9, head_dim=32))),
    'hard heads of 64 from the start': Row(1., 0.85, options=dict(
        model='cmhsa_hybrid_attn_32', model_kwargs=dict(hard_attn=True, rel_pos='table', num_heads=9, head_dim=64))),
    'raw patches, phase 1 alone': Row(1., 1., options=RAW),
    'raw patches, switch 0.75': Row(0.75, 0.57, options=RAW),
}
GAINS = {  # what is drawn: phase 2, and phase 1 alone
    'hybrid, 4 heads beside every convolution': ('heads beside, switch 0.4', 'phase 1 alone'),
    'raw patches, all blocks rewritten': ('raw patches, switch 0.75', 'raw patches, phase 1 alone'),
}


def do(row: str, images: int, seed: int, epochs: int, data_dir: Path, output: Path) -> List[Any]:
    """Train one run and return its line of the results."""
    torch.set_num_threads(1)
    switch, _, rewrite, options = ROWS[row]
    name = f'{row}-{images}-{seed}-{epochs}'.replace(' ', '_')
    with redirect_stdout(io.StringIO()):
        results = train_two_phases(
            photos(output, images, seed, data_dir, HELD_OUT), rewrite, output=output / name, seed=seed, epochs=epochs,
            switch=switch, **options)
    phase = 'phase 1' if switch == 1 else 'phase 2'
    return [row, images, seed, epochs, round(results['seconds']), results['parameters'], *(
        '' if value is None else f'{value:.2f}' for value in (
            results['phase1_top1'], results['converted_top1'], results['top1'], results['test'][phase]))]


def gains(lines: List[Dict[str, str]], row: str, baseline: str) -> Dict[int, Tuple[float, float]]:
    """Return the mean gain on the test images at every number of images, over the seeds that two rows share, and half
    of its 95 % interval: Student's, paired, from three seeds on, and else that of the 5,000 test images alone."""
    test = {title: {(int(line['images']), line['seed']): float(line['test_top1']) for line in lines
                    if line['row'] == title} for title in (row, baseline)}
    found = {}
    for images in sorted({images for images, _ in test[row]}):
        pairs = [(top1, test[baseline][key]) for key, top1 in test[row].items()
                 if key[0] == images and key in test[baseline]]
        if not pairs:
            continue
        differences = [top1 - other for top1, other in pairs]
        if len(pairs) >= 3:
            half = scipy.stats.t.ppf(0.975, len(pairs) - 1) * statistics.stdev(differences) / len(pairs) ** 0.5
        else:
            half = 1.96 * (sum(each * (100 - each) for pair in pairs for each in pair) / 5000) ** 0.5 / len(pairs)
        found[images] = statistics.mean(differences), half
    return found


def draw(results: Path) -> Figure:
    """Draw the gain of phase 2 over phase 1 alone, in as much time, against the number of images."""
    with results.open() as file:
        lines = list(csv.DictReader(file))
    figure, (axis,) = make_figure((7, 4))
    axis.set_xscale('log')  # before the points, as there may be none yet
    for i, (title, rows) in enumerate(GAINS.items()):
        found = gains(lines, *rows)
        if not found:
            continue
        axis.errorbar(
            [images * 1.04 ** i for images in found],  # side by side
            [mean for mean, _ in found.values()],
            [half for _, half in found.values()], marker='o', capsize=3, label=title)
    numbers = sorted({int(line['images']) for line in lines})
    axis.set_xticks(numbers, [f'{number:,}' for number in numbers])
    axis.minorticks_off()
    axis.axhline(0, color='black', linewidth=1)
    axis.set(xlabel='training images', ylabel='gain of phase 2 in as much time, points of top-1')
    axis.legend()
    return figure


def main() -> None:
    parser = make_parser(__doc__, 'hybrid_phase2', seeds=2)
    add = parser.add_argument
    add('--images', type=positive_int, default=3000, help='number of training images (default: %(default)s)')
    add('--epochs', type=positive_int, default=120, help='of phase 1 alone (default: %(default)s)')
    add('--rows', nargs='+', choices=ROWS, default=list(ROWS), metavar='ROW', help='(default: all)')
    add_queue(parser, 'hybrid_phase2')
    args = parser.parse_args()
    runs = [(row, args.images, seed, max(round(ROWS[row].epochs * args.epochs), 2))
            for seed in range(args.seeds) for row in args.rows]
    run_queue(args, runs, do, COLUMNS, HELD_OUT)
    draw(args.results).savefig(args.output / 'gain.png')


if __name__ == '__main__':
    main()
