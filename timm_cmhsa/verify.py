"""Does a phase-2 model compute what its phase-1 source does? Measured on images, layer by layer and at the end."""
from pathlib import Path
from typing import List, NamedTuple, Tuple

import torch

from .cmhsa import CmhsaAttn, CmhsaConv
from .images import image_dataset, read_images
from .token_mixers import RelPosAttention

MAX_REAL_IMAGES = 64
BATCH_SIZE = 8


class LayerReport(NamedTuple):
    """How well one attention layer replaces its convolution."""
    name: str
    heads_used: int
    num_heads: int
    error: float  # largest, relative to the convolution's largest output
    rms_error: float  # root mean square, relative to that of the convolution's output


@torch.inference_mode()
def verify(
        conv_model: CmhsaConv,
        attn_model: CmhsaAttn,
        images: torch.Tensor,
) -> Tuple[List[LayerReport], Tuple[float, float], float]:
    """Compare a phase-1 model with its rewrite, layer by layer and at the end.

    Args:
        conv_model, attn_model: Models to compare, in eval mode.
        images: Shape (B, C, H, W).

    Returns:
        Layers, the two errors of the logits, and the share of images with the same top-1 class. A layer is fed what its
        convolution gets, so that its error is its own.
    """
    depth = len(conv_model.blocks)
    errors, scales = torch.zeros(depth + 1, 2), torch.zeros(depth + 1, 2)  # largest, sum of squares
    same_class = []

    def add(measured: torch.Tensor, values: torch.Tensor) -> None:
        measured[0] = torch.maximum(measured[0], values.abs().max())
        measured[1] += values.square().sum()

    def compare(i: int, expected: torch.Tensor, actual: torch.Tensor) -> None:
        add(errors[i], actual - expected)
        add(scales[i], expected)

    hooks = [
        block.attn.register_forward_hook(
            lambda _, inputs, output, i=i: compare(i, output, attn_model.blocks[i].attn(inputs[0])))
        for i, block in enumerate(conv_model.blocks)
    ]
    for batch in images.split(BATCH_SIZE):
        expected, actual = conv_model(batch), attn_model(batch)
        compare(depth, expected, actual)
        same_class.append(expected.argmax(dim=-1) == actual.argmax(dim=-1))
    for hook in hooks:
        hook.remove()
    ratios = errors / scales.clamp(min=torch.finfo(scales.dtype).tiny)
    *layer_errors, logits_errors = torch.stack([ratios[:, 0], ratios[:, 1].sqrt()], dim=1).tolist()
    layers = [
        LayerReport(f'blocks.{i}.attn', _heads_used(block.attn), block.attn.num_heads, *layer_error)
        for i, (block, layer_error) in enumerate(zip(attn_model.blocks, layer_errors))
    ]
    return layers, logits_errors, torch.cat(same_class).float().mean().item()


def _heads_used(attn: RelPosAttention) -> int:
    return int(attn.proj.weight.unflatten(1, (attn.num_heads, -1)).abs().amax(dim=(0, 2)).count_nonzero())


def load_images(folder: Path, model: CmhsaAttn) -> torch.Tensor:
    """The first images of a folder, as timm's validation would feed them: (B, C, H, W)."""
    dataset = image_dataset(folder, model)
    return read_images(dataset, folder, range(min(len(dataset), MAX_REAL_IMAGES)))
