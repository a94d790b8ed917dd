"""Compare starts of a stock ViT on few photos: python experiments/vit_starts.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Every run trains timm's vit_tiny, with 6 layers and 8 x 8 patches, on 3,000 of them, and is judged by 1,000
other training images. One takes about 30 minutes on one core. The output folder gets the table.
"""
from functools import partial
from typing import Any, Callable, Dict

import timm
import torch
from common.options import make_run_parser
from common.report import accuracies, show
from common.runs import Run, replicate, run_all
from timm.layers import build_sincos2d_pos_embed
from timm.models import register_model

import timm_cmhsa


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
    'structured': structured,
    'mimetic': mimetic,
    'convolution, peak 0.35': partial(timm_cmhsa.start_as_convolution, peak=0.35),
}


@register_model
def vit_photos(pretrained: bool = False, start: str = 'timm', **kwargs: Any) -> torch.nn.Module:
    """Create a stock ViT of 6 layers, 192 wide, with 3 heads, for patches of 4 x 4 pixels."""
    model = timm.create_model('vit_tiny_patch16_224', patch_size=4, depth=6, **kwargs)
    STARTS[start](model)
    return model


def main() -> None:
    args = make_run_parser(__doc__, 'vit_starts', seeds=3, photos=True).parse_args()
    rows = {start: Run(start, 3000, dict(
        model='vit_photos', model_kwargs=dict(start=start), img_size=32, epochs=50, lr=1e-3)) for start in STARTS}
    show(accuracies(run_all(replicate(rows, args), args)), args.output / 'vit_starts.md')


if __name__ == '__main__':
    main()
