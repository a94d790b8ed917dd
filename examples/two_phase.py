"""Two-phase training on little data, from nothing to a better model: python examples/two_phase.py

A few hundred handwritten digits (real images, bundled with scikit-learn), each at a random place on a canvas, are all
that is trained on. Phase 1 trains a `cmhsa_conv_k5`; `convert_checkpoint` rewrites it, exactly, as a `cmhsa_attn`;
phase 2 trains on. For comparison, both models are trained alone for as many epochs as the two phases together.

The output folder gets the table, the loss curves, what the heads look at, and every checkpoint. A run that was stopped
goes on where it stopped.
"""
import argparse
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import timm
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from timm.layers import set_fused_attn
from timm.models import save_for_hf
from timm.utils import AttentionExtract

from timm_cmhsa import convert_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / 'experiments'))
from common.data import CANVAS, NUM_IMAGES, digits_on_canvas
from common.report import make_figure, markdown_table
from common.training import BATCH_SIZE, History, Stage, create, evaluate, train

SHAPE = dict(img_size=CANVAS, patch_size=8, in_chans=1, hidden_chans=1, depth=4, num_classes=10)
NUM_HEADS = 12  # 9 express the convolution, 3 are free to look elsewhere


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    check_settings(args)
    phase1, phase2, conv_only, attn_only = stages(args)
    train_data, test_data = digits_on_canvas(args.num_train, args.seed)
    device = torch.device(args.device)
    run = (args.output, args.seed, device)

    conv_model, phase1_history = train(phase1, create(phase1, args.seed), train_data, test_data, *run)
    converted = args.output / 'converted'
    report = convert_checkpoint(
        args.output / phase1.name / 'last.pth.tar',
        converted,
        architecture='cmhsa_attn',
        num_heads=NUM_HEADS,
        force=True,
    )
    print(report)
    converted_model = timm.create_model(f'local-dir:{converted}', pretrained=True).to(device)
    before, after = evaluate(conv_model, test_data, device), evaluate(converted_model, test_data, device)
    print(f"top-1 before the conversion {before['top1']:.2f} %, after it {after['top1']:.2f} %")

    maps_before = attention_maps(converted, test_data.first())
    attn_model, phase2_history = train(phase2, converted_model, train_data, test_data, *run)
    final = args.output / 'model'
    save_for_hf(attn_model, str(final), model_args=dict(SHAPE, num_heads=NUM_HEADS), safe_serialization=True)
    loaded = evaluate(timm.create_model(f'local-dir:{final}', pretrained=True).to(device), test_data, device)
    print(f"saved in {final}, loaded back: top-1 {loaded['top1']:.2f} %")

    _, conv_history = train(conv_only, create(conv_only, args.seed), train_data, test_data, *run)
    _, attn_history = train(attn_only, create(attn_only, args.seed), train_data, test_data, *run)

    two_phase = phase1_history + [{**row, 'epoch': row['epoch'] + phase1.epochs} for row in phase2_history]
    histories = {'two phases': two_phase, conv_only.title: conv_history, attn_only.title: attn_history}
    rows = results(histories, phase1_history, after)
    (args.output / 'results.json').write_text(json.dumps(rows, indent=2))
    (args.output / 'results.md').write_text(markdown(rows))
    print(markdown(rows))
    plot_losses(histories, phase1.epochs, args.output / 'loss.png')
    plot_attention(maps_before, attention_maps(final, test_data.first()), args.output / 'attention.png')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--epochs', type=int, default=80, help='epochs of each phase (default: %(default)s)')
    add('--num-train', type=int, default=400, help='training images (default: %(default)s)')
    add('--seed', type=int, default=0, help='of the data, the weights and the training (default: %(default)s)')
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='default: %(default)s')
    add('--output', type=Path, help='folder (default: output/two_phase, or output/quick)')
    add('--quick', action='store_true', help='two epochs of each phase: shows that everything runs')
    args = parser.parse_args()
    if args.quick:
        args.epochs = 2
    args.output = args.output or Path('output', 'quick' if args.quick else 'two_phase')
    if args.epochs < 1 or not BATCH_SIZE <= args.num_train <= 1700:
        parser.error(f'--epochs must be positive, --num-train between {BATCH_SIZE} and 1700 (of {NUM_IMAGES} images)')
    if args.output.exists() and not args.output.is_dir():
        parser.error(f'--output {args.output} is not a folder')
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as e:
        parser.error(f'--device {args.device} cannot be used: {str(e).splitlines()[0]}')
    return args


def check_settings(args: argparse.Namespace) -> None:
    """Never continue a run that had other settings."""
    settings = {key: getattr(args, key) for key in ('epochs', 'num_train', 'seed')}
    path = args.output / 'settings.json'
    if path.exists() and json.loads(path.read_text()) != settings:
        raise SystemExit(f'{args.output} holds a run with other settings: {path.read_text()}; choose another --output.')
    path.write_text(json.dumps(settings))


def stages(args: argparse.Namespace) -> Tuple[Stage, Stage, Stage, Stage]:
    """Return the two phases, and each of them alone for as many epochs as both together."""
    attn_args = dict(SHAPE, num_heads=NUM_HEADS)
    return (
        Stage('phase1', 'phase 1', 'cmhsa_conv_k5', SHAPE, args.epochs, lr=3e-3),
        Stage('phase2', 'phase 2', 'cmhsa_attn', attn_args, args.epochs, lr=1e-3),
        Stage('conv_only', 'phase 1 alone', 'cmhsa_conv_k5', SHAPE, 2 * args.epochs, lr=3e-3),
        Stage('attn_only', 'attention alone', 'cmhsa_attn', attn_args, 2 * args.epochs, lr=1e-3),
    )


def results(
        histories: Dict[str, History],
        phase1_history: History,
        converted: Dict[str, float],
) -> List[Dict[str, Any]]:
    """Return the rows of the final table; times are those of all training that led to a row."""
    phase1, two_phase = phase1_history[-1], histories['two phases'][-1]
    rows = {
        'phase 1': phase1,
        'phase 1, converted': {**phase1, **converted},
        'phase 1, converted, phase 2': {**two_phase, 'seconds': phase1['seconds'] + two_phase['seconds']},
        **{title: history[-1] for title, history in histories.items() if title != 'two phases'},
    }
    return [{'training': title, 'epochs': row['epoch'], **{key: row[key] for key in ('top1', 'top5', 'seconds')}}
            for title, row in rows.items()]


def markdown(rows: List[Dict[str, Any]]) -> str:
    cells = ('{training}', '{epochs}', '{top1:.2f} %', '{top5:.2f} %', '{seconds:.0f} s')
    return markdown_table(
        ['training', 'epochs', 'top-1', 'top-5', 'time'], [[cell.format(**row) for cell in cells] for row in rows])


def plot_losses(histories: Dict[str, History], switch_epoch: int, path: Path) -> None:
    """Draw test loss and accuracy over the epochs."""
    figure, axes = make_figure((10, 4), 2)
    for axis, key, label in zip(axes, ('loss', 'top1'), ('test loss', 'top-1 accuracy, %')):
        for title, history in histories.items():
            axis.plot([row['epoch'] for row in history], [row[key] for row in history], label=title)
        axis.axvline(switch_epoch, color='gray', linestyle=':', label='conversion')
        axis.set(xlabel='epoch', ylabel=label)
    axes[0].legend()
    figure.savefig(path)


@torch.inference_mode()
def attention_maps(folder: Path, images: torch.Tensor) -> torch.Tensor:
    """Return the mean attention over the images: shape (depth, num_heads, N, N + 1), the zero key last."""
    set_fused_attn(False)  # the fused kernel never forms the maps
    model = timm.create_model(f'local-dir:{folder}', pretrained=True)
    set_fused_attn(True)
    return torch.stack([maps.mean(dim=0) for maps in AttentionExtract(model, method='hook')(images).values()])


def plot_attention(before: torch.Tensor, after: torch.Tensor, path: Path) -> None:
    """Draw what every head of the first and the last block looks at from one patch, before and after phase 2."""
    grid = CANVAS // SHAPE['patch_size']
    query = (grid // 2) * grid + grid // 2
    rows = [(f'block {block + 1}\n{when}', maps[block, :, query])
            for block in (0, len(before) - 1) for when, maps in (('before', before), ('after', after))]
    figure = Figure((NUM_HEADS, len(rows) * 1.2), dpi=120, layout='constrained')
    axes = figure.subplots(len(rows), NUM_HEADS)
    for (title, maps), line in zip(rows, axes):
        line[0].set_ylabel(title)
        for axis, weights in zip(line, maps):
            axis.imshow(weights[:-1].reshape(grid, grid).numpy(), norm=PowerNorm(0.5, vmin=0, vmax=1), cmap='magma')
            axis.plot(query % grid, query // grid, 'c+')
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f'nothing: {weights[-1]:.0%}' if weights[-1] >= 0.005 else '', fontsize=7)
    for head, axis in enumerate(axes[0]):
        axis.set_title(f'head {head + 1}' if head < 9 else 'spare', fontsize=8)
    figure.suptitle('Attention from the patch marked +, mean of 64 test images (brightness: square root)', fontsize=10)
    figure.savefig(path)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit('\nStopped. The same command goes on from here.') from None
