"""Start a stock ViT of timm as a convolution: every head looks at one of the K x K nearest patches.

The paper's rewrite (arXiv 2111.01353) needs nine heads and a bias for every offset. A stock ViT has fewer heads and
knows where a patch is from its position embedding alone. So the embedding gets a code of the position, which queries
and keys compare: a query, moved by the head's offset, is most like the key of the patch there.
"""
import contextlib
import math
from functools import partial
from typing import Any, List, Optional, Tuple

import torch
from timm.layers import Attention
from timm.models import Beit, VisionTransformer
from timm.models.vision_transformer import Block
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

from ..analysis import eval_mode

Offset = Tuple[int, int]  # of the key from the query, (row, column), in patches

NUM_IMAGES = 8  # of noise, if there are no images
BORDER = 0.75  # score of a class token, where the patch at the offset has 1, and others in its row or column have 0.5
MAX_GAIN = 1e6


@torch.no_grad()
def start_as_convolution(
        model: Any,
        images: Optional[torch.Tensor] = None,
        peak: float = 0.75,
        kernel_size: int = 3,
        seed: int = 0,
) -> Any:
    """Point every head of an untrained ViT at one of the K x K nearest patches, in place.

    The model keeps its interface: it trains, loads and exports as before, and other weights keep their values. Call
    this again after `set_input_size`, which would stretch the code of the position.

    Models with tables of relative position biases (BEiT, `vit_relpos_*` with `rel_pos_type='bias'`) get the heads of
    Theorem 1, arXiv 2111.01353: zero queries, and the weight `peak`, exactly, wherever the patch lies in the image. In
    a `VisionTransformer`, half of a head's dimensions compare positions, and `peak` is the mean over the heads of a
    layer. Class tokens take the weight of a patch outside the image.

    Args:
        model: A `VisionTransformer`, `VisionTransformerRelPos` or `Beit` of timm.
        images: Some images, (B, in_chans, H, W), normalized as for the training, to measure what layer norm does to the
            code; by default noise.
        peak: Weight of a head on its own patch, between 0 and 1.
        kernel_size: K, odd. The K x K offsets are dealt to heads and layers, none twice before all were.
        seed: Shuffles the offsets.

    Returns:
        The model.

    Raises:
        ValueError: If the attention of the model cannot be pointed, or an argument is bad. The model is as it was.
    """
    grid_size = _grid_size(model)
    if not 0 < peak < 1:
        raise ValueError(f'{peak=} must be between 0 and 1.')
    if kernel_size % 2 == 0 or not 0 < kernel_size < 2 * min(grid_size):
        raise ValueError(f'{kernel_size=} must be odd and below {2 * min(grid_size)}, for {grid_size} patches.')
    if not isinstance(model, VisionTransformer):
        _point_tables(model, grid_size, peak, kernel_size, seed)
        return model
    num_freqs, num_heads = _num_freqs(model, grid_size), model.blocks[0].attn.num_heads
    offsets = _deal(len(model.blocks) * num_heads, kernel_size, seed)
    if images is None:
        size = model.patch_embed.proj.weight.shape[1], *model.patch_embed.img_size
        images = torch.randn(NUM_IMAGES, *size, generator=torch.Generator().manual_seed(seed))
    _write_code(model, position_code(grid_size, num_freqs))
    with eval_mode(model), contextlib.ExitStack() as hooks:
        for i, block in enumerate(model.blocks):
            point = partial(
                _point_queries, offsets=offsets[i * num_heads:][:num_heads], grid_size=grid_size, num_freqs=num_freqs,
                num_prefix_tokens=model.num_prefix_tokens, peak=peak)
            hooks.enter_context(block.attn.register_forward_pre_hook(point))
        model.forward_features(images.to(model.pos_embed))
    return model


def position_code(grid_size: Tuple[int, int], num_freqs: int) -> torch.Tensor:
    """Return cos and sin of omega_f y, then of omega_f x, for every patch: shape (N, 4 * num_freqs).

    With omega_f = pi (2f - 1) / 2F, the codes of two rows have the product sum_f cos(omega_f (y - y')), which is F for
    the same row, 0 for all others less than 2F away, and never positive below 4F.
    """
    omega = _frequencies(num_freqs)
    rows, cols = (torch.arange(size)[:, None] * omega for size in grid_size)
    rows, cols = rows.repeat_interleave(len(cols), 0), cols.repeat(len(rows), 1)
    return torch.cat([rows.cos(), rows.sin(), cols.cos(), cols.sin()], dim=1)


def _frequencies(num_freqs: int) -> torch.Tensor:
    return math.pi * (2 * torch.arange(num_freqs) + 1) / (2 * num_freqs)


def rotation(offset: Offset, num_freqs: int) -> torch.Tensor:
    """Return the matrix that moves a position code by an offset: shape (4 * num_freqs, 4 * num_freqs)."""
    blocks = []
    for distance in offset:
        angle = distance * _frequencies(num_freqs)
        cos, sin = angle.cos().diag(), angle.sin().diag()
        blocks.append(torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)]))
    return torch.block_diag(*blocks)


def _deal(count: int, kernel_size: int, seed: int) -> List[Offset]:
    """Return `count` offsets, shuffled, with none twice before all were dealt."""
    generator, reach = torch.Generator().manual_seed(seed), kernel_size // 2
    dealt: List[Offset] = []
    while len(dealt) < count:
        order = torch.randperm(kernel_size ** 2, generator=generator).tolist()
        dealt += [(i // kernel_size - reach, i % kernel_size - reach) for i in order]
    return dealt[:count]


def _grid_size(model: Any) -> Tuple[int, int]:
    """Return the grid of a model that can be pointed.

    Raises:
        ValueError: If it cannot be.
    """
    name = type(model).__name__
    if isinstance(model, VisionTransformer):
        for block in model.blocks:
            if type(block) is not Block or type(block.attn) is not Attention or not hasattr(block.mlp, 'fc2'):
                raise ValueError(
                    f"{name} has layers of {type(block).__name__}: only timm's Block with its Attention, and an MLP "
                    'with fc2, can be started as a convolution.')
            if not isinstance(block.attn.q_norm, nn.Identity):
                raise ValueError(f'{name} normalizes queries and keys, so that they lose their lengths: qk_norm=False.')
        if model.pos_embed is None:
            raise ValueError(f"{name} has no position embedding for a head to find a patch by: pos_embed='learn'.")
    elif not isinstance(model, (VisionTransformerRelPos, Beit)):
        raise ValueError(
            f'{name} cannot be started as a convolution: use a VisionTransformer (vit_*, deit_*), a Beit, or '
            "vit_relpos_* with rel_pos_type='bias'.")
    elif not _tables(model):
        raise ValueError(f"{name} has no table of position biases: rel_pos_type='bias', or use_rel_pos_bias=True.")
    return model.patch_embed.grid_size


def _tables(model: nn.Module) -> List[Any]:
    """Return the modules that have a table of relative position biases; one may serve all layers."""
    return [module for module in model.modules() if getattr(module, 'relative_position_bias_table', None) is not None]


def _num_freqs(model: Any, grid_size: Tuple[int, int]) -> int:
    """Return the number of frequencies of a position code, which takes four times as many dimensions.

    Raises:
        ValueError: If a head has too few dimensions.
    """
    head_dim = model.blocks[0].attn.head_dim
    num_freqs = max(head_dim // 8, -(-max(grid_size) // 4))
    if 4 * num_freqs >= head_dim:
        raise ValueError(
            f'Heads of {head_dim} dimensions cannot tell {max(grid_size)} patches in a row apart: use larger patches, '
            f'or heads of {4 * num_freqs + 1} or more.')
    return num_freqs


def _write_code(model: Any, code: torch.Tensor) -> None:
    """Give every patch the code of its position, in dimensions of the embedding that nothing else writes to.

    One more dimension marks the class token and registers.
    """
    num_patches, size = code.shape
    tokens = (getattr(model, name, None) for name in ('cls_token', 'reg_token', 'dist_token'))
    prefix = [token for token in tokens if token is not None]
    reserved = size + bool(prefix)
    written = (layer for block in model.blocks for layer in (block.attn.proj, block.mlp.fc2))
    for layer in (model.patch_embed.proj, *written):
        layer.weight[:reserved] = 0
        if layer.bias is not None:
            layer.bias[:reserved] = 0
    model.pos_embed[..., :reserved] = 0
    model.pos_embed[:, -num_patches:, :size] = code.to(model.pos_embed)
    for token in prefix:
        token[..., :reserved] = 0
        token[..., size] = 1


def _point_queries(
        attn: Any,
        args: Tuple[torch.Tensor],
        offsets: List[Offset],
        grid_size: Tuple[int, int],
        num_freqs: int,
        num_prefix_tokens: int,
        peak: float,
) -> None:
    """Point the heads of a layer, right before it is run on tokens.

    Keys are the position codes, and queries are codes moved by the head's offset. The gain of both is such that the
    mean weight on the patch there is `peak`.
    """
    tokens, prefix, size = args[0], num_prefix_tokens, 4 * num_freqs
    heads = attn.num_heads, attn.head_dim
    weights = attn.qkv.weight.view(3, *heads, -1)[:2]  # of queries and keys
    biases = tokens.new_zeros(2, *heads) if attn.qkv.bias is None else attn.qkv.bias.view(3, *heads)[:2]
    has_border = prefix > 0 and attn.qkv.bias is not None
    coded = slice(size + has_border)
    weights[:, :, coded], biases[:, :, coded] = 0, 0
    weights[0, :, :size, :size] = torch.stack([rotation(offset, num_freqs) for offset in offsets]).to(weights)
    weights[1, :, coded, coded] = torch.eye(size + has_border).to(weights)
    if has_border:
        score, mark = tokens[:, prefix:, :size].square().sum(-1).mean(), tokens[:, :prefix, size].mean()
        biases[0, :, size] = BORDER * score / mark
        weights[0, :, size, size] = -BORDER * score / mark ** 2  # the class token itself looks at all patches evenly
    q, k, _ = attn.qkv(tokens).float().unflatten(-1, (3, *heads)).permute(2, 0, 3, 1, 4)
    q, k = q[:, :, prefix:] * attn.scale, k.transpose(-2, -1)
    by_position, by_content = q[..., coded] @ k[..., coded, :], q[..., coded.stop:] @ k[..., coded.stop:, :]
    patch, is_inside = (each.to(tokens.device) for each in _patches_at(offsets, grid_size))
    low, high = 1 / MAX_GAIN, MAX_GAIN
    for _ in range(40):  # bisection, of the logarithm
        gain = math.sqrt(low * high)
        attention = (gain * by_position + by_content).softmax(dim=-1)[..., prefix:]
        peaks = attention.gather(-1, patch.expand(len(tokens), -1, -1).unsqueeze(-1)).squeeze(-1)
        low, high = (gain, high) if peaks[:, is_inside].mean() < peak else (low, gain)
    weights[:, :, coded] *= math.sqrt(gain)
    biases[:, :, coded] *= math.sqrt(gain)


def _patches_at(offsets: List[Offset], grid_size: Tuple[int, int]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the number of the patch at every offset from every patch, 0 if there is none, and if there is one."""
    (height, width), offset = grid_size, torch.tensor(offsets)[:, :, None, None]
    rows, cols = torch.arange(height)[:, None] + offset[:, 0], torch.arange(width) + offset[:, 1]
    is_inside = (rows >= 0) & (rows < height) & (cols >= 0) & (cols < width)
    return (rows * width + cols).where(is_inside, torch.tensor(0)).flatten(1), is_inside.flatten(1)


def _point_tables(model: Any, grid_size: Tuple[int, int], peak: float, kernel_size: int, seed: int) -> None:
    """Point the heads of a model with tables of biases: one bias per head and offset, as in Theorem 1."""
    height, width = grid_size
    prefix, tables = model.cls_token is not None, _tables(model)
    num_heads = tables[0].relative_position_bias_table.shape[1]
    offsets = torch.tensor(_deal(len(tables) * num_heads, kernel_size, seed)).view(len(tables), num_heads, 2)
    # exp(M) = t^2 is peak of the sum t^2 + t + N - 1, with the class token's exp(M / 2)
    odds = peak / (1 - peak)
    sharpness = 2 * math.log((prefix + math.sqrt(prefix + 4 * (height * width - 1) / odds)) * odds / 2)
    for table, (rows, cols) in zip(tables, offsets.transpose(1, 2)):
        bias = table.relative_position_bias_table
        bias.zero_()
        bias[(height - 1 - rows) * (2 * width - 1) + width - 1 - cols, torch.arange(num_heads)] = sharpness
        if prefix:  # class token to patches, patches to class token, class token to itself
            bias[-2] = sharpness / 2
    for attn in (block.attn for block in model.blocks):
        dim = attn.qkv.out_features // 3
        attn.qkv.weight[:dim] = 0
        for bias in (attn.qkv.bias, getattr(attn, 'q_bias', None)):
            if bias is not None:
                bias[:dim] = 0
