"""Compare starts of a stock ViT on few photos: python experiments/vit_starts.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Every run trains timm's vit_tiny, with 6 layers and 8 x 8 patches, on --images of them, and is judged by 1,000
other training images, which choose the learning rate of every start. The test images choose nothing.

Runs are done side by side and only once: each appends a line to --results, and what was stopped goes on. One takes
about 30 minutes on one core.
"""
import io
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List

import timm
import torch
from common.images import photos
from common.options import add_queue, make_parser, positive_float, positive_int
from common.queue import run_queue
from timm.layers import build_sincos2d_pos_embed
from timm.models import register_model

import timm_cmhsa
from timm_cmhsa.train import train_two_phases

HELD_OUT = 1000  # images
PEAKS = 0.35, 0.2, 0.5, 0.75, 0.9
COLUMNS = 'start', 'lr', 'images', 'seed', 'epochs', 'seconds', 'train_loss', 'top1', 'test_top1'


def factors(matrix: torch.Tensor, rank: int) -> Any:
    """Return L, (..., n, rank), and R, (..., n, rank), with L R^T the best approximation of a matrix."""
    u, s, vh = torch.linalg.svd(matrix)
    root = s[..., None, :rank].sqrt()
    return u[..., :rank] * root, vh[..., :rank, :].transpose(-1, -2) * root


def near_identity(noise: float, identity: float, *size: int) -> torch.Tensor:
    """Return a multiple of the identity and of a random matrix, whose columns have a norm of about one."""
    return noise * torch.randn(*size) / size[-1] ** 0.5 + identity * torch.eye(size[-1])


@torch.no_grad()
def set_values(attn: Any) -> None:
    """Make the product of values and output projection a negative multiple of the identity, and noise."""
    dim = attn.qkv.in_features
    left, right = factors(near_identity(0.4, -0.4, dim, dim), dim)
    attn.qkv.weight[2 * dim:], attn.proj.weight[:] = left.t(), right


@torch.no_grad()
def mimetic(model: Any) -> None:
    """Apply the mimetic initialization, arXiv 2305.09828: queries and keys are alike, with a sin-cos embedding."""
    model.pos_embed[:, model.num_prefix_tokens:] = build_sincos2d_pos_embed(
        model.patch_embed.grid_size, model.embed_dim, interleave_sin_cos=True)
    for attn in (block.attn for block in model.blocks):
        dim = attn.qkv.in_features
        queries, keys = factors(near_identity(0.7, 0.7, attn.num_heads, dim, dim), attn.head_dim)
        attn.qkv.weight[:2 * dim] = torch.cat([each.transpose(1, 2).flatten(0, 1) for each in (queries, keys)])
        set_values(attn)


@torch.no_grad()
def structured(model: Any, embed_gain: float = 18., gain: float = 7.) -> None:
    """Apply the structured initialization, arXiv 2505.19985: of rank head_dim, from 1000 times the wanted maps."""
    height, width = model.patch_embed.grid_size
    model.pos_embed *= embed_gain
    code = torch.nn.functional.layer_norm(model.pos_embed[0, model.num_prefix_tokens:], [model.embed_dim])
    inverse = torch.linalg.pinv(code, rtol=1e-3)
    offsets = [(0, 0), (-1, 0), (0, 1)]  # centre, up and right, in all layers
    rows, cols = (each.flatten() for each in torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij'))
    for attn in (block.attn for block in model.blocks):
        wanted = 3 * torch.nn.init.trunc_normal_(torch.empty(attn.num_heads, len(code), len(code)), std=0.6)
        for each, (y, x) in zip(wanted, offsets):
            each[(rows[:, None] + y == rows) & (cols[:, None] + x == cols)] = 1000
        queries, keys = factors(inverse @ wanted @ inverse.t(), attn.head_dim)
        attn.qkv.weight[:2 * model.embed_dim] = torch.cat([
            gain * (each / each.norm(dim=(1, 2), keepdim=True)).transpose(1, 2).flatten(0, 1)
            for each in (queries, keys)])
        set_values(attn)


STARTS: Dict[str, Callable[[Any], Any]] = {
    'timm': lambda model: model,
    'mimetic': mimetic,
    'structured': structured,
    **{f'convolution, peak {peak}': partial(timm_cmhsa.start_as_convolution, peak=peak) for peak in PEAKS},
    'convolution, K = 5': partial(timm_cmhsa.start_as_convolution, kernel_size=5),
}


@register_model
def vit_photos(pretrained: bool = False, start: str = 'timm', **kwargs: Any) -> torch.nn.Module:
    """Create a stock ViT of 6 layers, 192 wide, with 3 heads, for patches of 4 x 4 pixels."""
    model = timm.create_model('vit_tiny_patch16_224', patch_size=4, depth=6, **kwargs)
    STARTS[start](model)
    return model


def do(start: str, lr: float, images: int, seed: int, epochs: int, data_dir: Path, output: Path) -> List[Any]:
    """Train one run and return its line of the results."""
    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()):
        results = train_two_phases(
            photos(output, images, seed, data_dir, HELD_OUT), output=output / f'{start}-{lr}-{images}-{seed}-{epochs}',
            model='vit_photos', model_kwargs={'start': start}, lr=lr, seed=seed, epochs=epochs, switch=1.)
    loss = results['curves']['phase 1'][-1]['train_loss']
    return [start, lr, images, seed, epochs, round(results['seconds']), f'{loss:.3f}', f'{results["top1"]:.2f}',
            f'{results["test"]["phase 1"]:.2f}']


def main() -> None:
    parser = make_parser(__doc__, 'vit_starts', seeds=3)
    add = parser.add_argument
    add('--images', type=positive_int, default=3000, help='number of training images (default: %(default)s)')
    add('--epochs', type=positive_int, default=50, help='(default: %(default)s)')
    add('--starts', nargs='+', choices=STARTS, default=list(STARTS), metavar='START', help='(default: all)')
    add('--lrs', nargs='+', type=positive_float, default=[0.001, 0.0005, 0.002], metavar='LR', help='(%(default)s)')
    add_queue(parser, 'vit_starts')
    args = parser.parse_args()
    runs = [(start, lr, args.images, seed, args.epochs)
            for seed in range(args.seeds) for lr in args.lrs for start in args.starts]
    run_queue(args, runs, do, COLUMNS, HELD_OUT)


if __name__ == '__main__':
    main()
