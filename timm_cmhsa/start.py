"""Start a stock ViT of timm as a convolution: every head looks at one of the K x K nearest patches.

The paper's rewrite (arXiv 2111.01353) needs nine heads and a bias for every offset. A stock ViT has fewer heads and
knows where a patch is from its position embedding alone. So the embedding gets a code of the position, which queries
and keys compare: a query, moved by the head's offset, is most like the key of the patch there.
"""
import copy
import math
from typing import Any, List, Optional, Tuple, Union

import torch
from timm.layers import Attention, build_fourier_pos_embed
from timm.models import VisionTransformer
from timm.models.vision_transformer import Block
from torch import nn

from .analysis import eval_mode
from .files import PathLike
from .images import choose_images, data_config, evenly_spaced
from .rel_pos import Grid
from .shifts import Offset, shift_tokens

NUM_IMAGES = 8  # to measure with
LENGTH = 2.  # of the code, relative to the content of tokens in the layer where that is longest
VALUES = 0.4  # size of values times output projection
BORDER = 0.75  # score of a class token, where the patch at the offset has 1, and others in its row or column have 0.5


@torch.no_grad()
def start_as_convolution(
        model: Any, images: Optional[Union[torch.Tensor, PathLike]] = None, peak: float = 0.75, kernel_size: int = 3,
        seed: int = 0) -> Any:
    """Point every head of an untrained ViT at one of the K x K nearest patches, in place. Return the model.

    The model keeps its interface: it trains, loads and exports as before. Call this again after `set_input_size`, which
    interpolates the code of the position.

    Half of a head's dimensions compare positions. Class tokens take the weight of a patch outside the image. Values
    times output projection are near a negative identity, as in the mimetic initialization, arXiv 2305.09828.

    Args:
        model: A `VisionTransformer` of timm.
        images: A folder, or some images normalized as for the training, (B, in_chans, H, W), to measure what layer norm
            does to the code; by default noise.
        peak: Mean weight of the heads of a layer on their own patches, below 1.
        kernel_size: K, odd. The K x K offsets are dealt to heads and layers, none twice before all were.
        seed: Shuffles the offsets, and draws the values.

    Raises:
        ValueError: If the model's attention cannot be pointed, or an argument is out of range. Nothing was changed.
    """
    grid_size = _check(model, peak, kernel_size)
    started = copy.deepcopy(model)  # an error leaves the model as it was
    _point_by_code(started, images, grid_size, peak, kernel_size, seed)
    model.load_state_dict(started.state_dict())
    return model


def _check(model: Any, peak: float, kernel_size: int) -> Grid:
    """Return the grid of a model whose heads can be pointed so. Raise ValueError if they cannot."""
    refusal = f'{type(model).__name__} cannot be started as a convolution: it needs'
    if not isinstance(model, VisionTransformer):
        raise ValueError(f'{refusal} to be a VisionTransformer of timm (vit_*, deit_*).')
    needs = {
        "timm's Block with its Attention (qk_norm=False) and an MLP with fc2 in every layer": all(
            type(block) is Block and type(block.attn) is Attention and isinstance(block.attn.q_norm, nn.Identity)
            and hasattr(block.mlp, 'fc2') for block in model.blocks),
        "a position embedding for a head to find a patch by (pos_embed='learn')": model.pos_embed is not None,
        'a projection of patches, no backbone, and a fixed number of them (dynamic_img_pad=False)': hasattr(
            model.patch_embed.proj, 'weight') and not getattr(model.patch_embed, 'dynamic_img_pad', False)}
    for need, is_there in needs.items():
        if not is_there:
            raise ValueError(f'{refusal} {need}.')
    grid_size: Grid = model.patch_embed.grid_size
    if not 1 < peak * math.prod(grid_size) < math.prod(grid_size):
        raise ValueError(f'{peak=} must be below 1, and above that of even attention, 1 / {math.prod(grid_size)}.')
    if kernel_size % 2 == 0 or not 0 < kernel_size < 2 * min(grid_size):
        raise ValueError(f'{kernel_size=} must be odd and below {2 * min(grid_size)}, for {grid_size} patches.')
    return grid_size


def _point_by_code(model: Any, images: Any, grid_size: Grid, peak: float, kernel_size: int, seed: int) -> None:
    """Point the heads of a model with a position embedding, which gets a code of the position."""
    (pixels, _, _), size = choose_images(images, model, NUM_IMAGES), data_config(model)['input_size']
    if tuple(pixels.shape[1:]) != size or not len(pixels):
        raise ValueError(f'Images of shape {tuple(pixels.shape)} where (B, {", ".join(map(str, size))}) is needed.')
    pixels = pixels[evenly_spaced(len(pixels), NUM_IMAGES)]
    head_dim, num_positions = model.blocks[0].attn.head_dim, max(grid_size) + kernel_size // 2
    num_freqs = max(head_dim // 8, -(-num_positions // 4))  # half of a head's dimensions, or more to tell all apart
    if 4 * num_freqs >= head_dim:
        raise ValueError(
            f'Heads of {head_dim} dimensions cannot tell {num_positions} positions in a row apart: use larger patches, '
            f'or heads of {4 * num_freqs + 1} or more.')
    reserved = 4 * num_freqs + 1 + 2 * bool(model.num_prefix_tokens)  # two mark patches and other tokens
    if not model.patch_embed.proj.weight[reserved:].flatten(1).any(dim=1).all():
        raise ValueError(f'{type(model).__name__} was started with a longer code: create it anew for this size.')
    offsets = _deal(len(model.blocks), model.blocks[0].attn.num_heads, kernel_size, seed)
    _write_values(model, seed)
    _reserve(model, reserved)
    with eval_mode(model):
        longest = model.patch_embed(pixels).square().sum(dim=-1).mean().sqrt()
        for _ in range(2):  # the first measures how long the content gets
            _write_code(model, num_freqs, reserved, LENGTH * longest)
            longest, weights = _point_layers(model, pixels, offsets, num_freqs, reserved, peak)
    worst = max(weights, key=lambda weight: abs(weight - peak))
    if not abs(worst - peak) < 0.01:
        raise ValueError(
            f'Heads have a weight of {worst:.2f} on their patches where {peak=} was asked for: use another peak, '
            'other images, or float32.')


def _reserve(model: Any, reserved: int) -> None:
    """Keep everything but layer norms, queries and keys from writing or reading the first dimensions of tokens."""
    layers = [model.patch_embed.proj, getattr(model.patch_embed, 'norm', nn.Identity()), model.norm, model.fc_norm]
    for block in model.blocks:
        layers += [block.attn.proj, block.mlp.fc2]
        block.attn.qkv.weight[-block.attn.attn_dim:, :reserved] = 0  # of values
        for name, layer in block.mlp.named_children():
            if name.startswith('fc1'):
                layer.weight[:, :reserved] = 0
    for layer in layers:
        for parameter in layer.parameters():
            parameter[:reserved] = 0


def _write_code(model: Any, num_freqs: int, reserved: int, length: torch.Tensor) -> None:
    """Give every patch the code of its position, and of this length. Mark class tokens and registers, and patches."""
    size, code = 4 * num_freqs, position_code(model.patch_embed.grid_size, num_freqs) @ basis(4 * num_freqs)
    amplitude = length / math.sqrt(2 * num_freqs)  # of cos and sin
    for name, tokens in model.named_parameters(recurse=False):  # pos_embed, cls_token, reg_token, dist_token
        tokens[..., :reserved] = 0
        if name != 'pos_embed':
            tokens[..., size + 1] = amplitude
    patches = model.pos_embed[:, -len(code):]
    patches[..., :size + 1] = amplitude * code.to(amplitude)
    patches[..., size + 2:reserved] = amplitude


def _write_values(model: Any, seed: int) -> None:
    """Make the product of values and output projection near a negative identity, as in trained ViTs (2305.09828)."""
    generator = torch.Generator().manual_seed(seed)
    for attn in (block.attn for block in model.blocks):
        dim = attn.qkv.in_features
        product = torch.randn(dim, dim, generator=generator, device='cpu') * VALUES / math.sqrt(dim)
        product -= VALUES * torch.eye(dim, device='cpu')
        u, s, vh = torch.linalg.svd(product)
        rank = min(dim, attn.attn_dim)
        attn.qkv.weight[-attn.attn_dim:][:rank] = (u[:, :rank] * s[:rank].sqrt()).t().to(attn.qkv.weight)
        attn.proj.weight[:, :rank] = (vh[:rank].t() * s[:rank].sqrt()).to(attn.proj.weight)


def _point_layers(
        model: Any, images: torch.Tensor, offsets: List[List[Offset]], num_freqs: int, reserved: int, peak: float,
) -> Tuple[torch.Tensor, List[torch.Tensor]]:
    """Point the heads of all layers, and let layer norms give the content the length that it has without the code.

    Return the length of the content in the layer where it is longest, and the mean weight in every layer.
    """
    def level(norm: Any, x: torch.Tensor) -> torch.Tensor:
        if getattr(norm, 'weight', None) is not None:
            norm.weight[reserved:] /= norm(x)[..., reserved:].square().mean().sqrt()
        return norm(x)

    lengths, weights = [], []
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    for block, dealt in zip(model.blocks, offsets):
        lengths.append(x[..., reserved:].square().sum(dim=-1).mean().sqrt())
        tokens = level(block.norm1, x)
        weights.append(_point_layer(block.attn, tokens, dealt, model.patch_embed.grid_size, num_freqs, peak))
        level(block.norm2, x + block.ls1(block.attn(tokens)))
        x = block(x)
    level(model.fc_norm, model.pool(level(model.norm, x)))
    return torch.stack(lengths).max(), weights


def _point_layer(
        attn: Any, tokens: torch.Tensor, offsets: List[Offset], grid_size: Grid, num_freqs: int, peak: float,
) -> torch.Tensor:
    """Point the heads of a layer, given its input, and return their mean weight on the patch there.

    Keys are the position codes, and queries are codes moved by the head's offset. The gain of both is such that the
    weight is `peak`, if there is one.
    """
    prefix, size = tokens.shape[1] - math.prod(grid_size), 4 * num_freqs
    heads = attn.num_heads, attn.head_dim
    weights = attn.qkv.weight.view(3, *heads, -1)[:2]  # of queries and keys
    coded, reads = weights[:, :, :size + 1], basis(size)  # to be scaled by the gain
    coded[:] = 0
    coded[0, :, :size, :size + 1] = torch.stack([rotation(offset, num_freqs) @ reads for offset in offsets]).to(coded)
    coded[1, :, :size, :size + 1] = reads.to(coded)
    if attn.qkv.bias is not None:
        attn.qkv.bias.view(3, *heads)[:2, :, :size + 1] = 0
    if prefix:  # patches have a query for class tokens, which have none and look at all patches evenly
        marks = tokens[:, prefix:, size + 2].mean() / tokens[:, :prefix, size + 1].mean()
        coded[0, :, size, size + 2] = BORDER * 2 * num_freqs * marks
        coded[1, :, size, size + 1] = 1
    q, k, _ = attn.qkv(tokens).float().unflatten(-1, (3, *heads)).permute(2, 0, 3, 1, 4)
    q, k = q[:, :, prefix:] * attn.scale, k.transpose(-2, -1)
    by_position = q[..., :size + 1] @ k[..., :size + 1, :]
    by_content = q[..., size + 1:] @ k[..., size + 1:, :]
    numbers = torch.arange(math.prod(grid_size), device=tokens.device).view(1, -1, 1) + 1
    patch = torch.cat([shift_tokens(numbers, offset, grid_size) for offset in offsets]) - 1  # at its offset, or -1
    is_inside = patch.squeeze(-1) >= 0
    low, high = 1e-4, 1e4
    for _ in range(16):  # bisection, of the logarithm
        gain = math.sqrt(low * high)
        attention = (gain * by_position + by_content).softmax(dim=-1)[..., prefix:]
        weight = attention.gather(-1, patch.clamp(min=0).expand(len(tokens), -1, -1, -1))[:, is_inside].mean()
        low, high = (gain, high) if weight < peak else (low, gain)
    coded *= math.sqrt(gain)
    return weight


def position_code(grid_size: Grid, num_freqs: int) -> torch.Tensor:
    """Return cos and sin of omega_f y, then of omega_f x, for every patch: shape (N, 4 * num_freqs).

    With omega_f = pi (2f - 1) / 2F, the codes of two rows have the product sum_f cos(omega_f (y - y')), which is F for
    the same row, 0 for all others less than 2F away, and never positive for others less than 4F away.
    """
    sin, cos = build_fourier_pos_embed(list(grid_size), bands=_frequencies(num_freqs), in_pixels=False)
    return torch.stack([cos, sin], dim=-2).flatten(0, 1).flatten(1)


def basis(size: int) -> torch.Tensor:
    """Return orthonormal rows whose sum is zero, (size, size + 1): the cosines of a DCT.

    Layer norm subtracts the mean of a token from all of it. That of a code in this basis is zero, so that the content
    does not depend on the position.
    """
    steps = torch.arange(size + 1)
    return (math.pi / (size + 1) * steps[1:, None] * (steps + 0.5)).cos() * math.sqrt(2 / (size + 1))


def _frequencies(num_freqs: int) -> torch.Tensor:
    return math.pi * (2 * torch.arange(num_freqs) + 1) / (2 * num_freqs)


def rotation(offset: Offset, num_freqs: int) -> torch.Tensor:
    """Return the matrix that moves a position code by an offset: shape (4 * num_freqs, 4 * num_freqs)."""
    angles = torch.tensor(offset).unsqueeze(1) * _frequencies(num_freqs)
    cos, sin = angles.cos().diag_embed(), angles.sin().diag_embed()  # of rows and of columns
    return torch.block_diag(*torch.cat([torch.cat([cos, -sin], dim=2), torch.cat([sin, cos], dim=2)], dim=1))


def _deal(num_layers: int, num_heads: int, kernel_size: int, seed: int) -> List[List[Offset]]:
    """Return an offset for every head of every layer, shuffled, with none twice before all were dealt."""
    generator, offsets = torch.Generator().manual_seed(seed), []
    for _ in range(-(-num_layers * num_heads // kernel_size ** 2)):
        order = torch.randperm(kernel_size ** 2, generator=generator, device='cpu').tolist()
        offsets += [(i // kernel_size - kernel_size // 2, i % kernel_size - kernel_size // 2) for i in order]
    return [offsets[layer * num_heads:][:num_heads] for layer in range(num_layers)]
