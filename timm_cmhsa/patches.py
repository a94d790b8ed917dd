"""Images as tokens, and back: a token is a flattened patch."""
from typing import Tuple, Union

import torch
import torch.nn.functional as F
from timm.models import register_notrace_function
from torch import nn

Size2d = Union[int, Tuple[int, int]]


# Keep these as leaves for FX: they branch on traced values.
@torch.fx.wrap
@register_notrace_function
def patchify(images: torch.Tensor, patch_size: Size2d) -> torch.Tensor:
    """Cut images into flattened patches, row by row; within a patch the channel varies fastest (Section 2.2).

    Args:
        images: Shape (B, C, H, W).
        patch_size: Pixels per patch side, P or (P_h, P_w).

    Returns:
        Tokens of shape (B, N, P_h * P_w * C) with N = (H / P_h) * (W / P_w).

    Raises:
        ValueError: If the image size is not divisible by the patch size.
    """
    if isinstance(patch_size, int):
        patch_size = (patch_size, patch_size)
    batch, chans, height, width = images.shape
    if height % patch_size[0] != 0 or width % patch_size[1] != 0:
        raise ValueError(f'Images of {height} x {width} pixels cannot be cut into patches of {patch_size}.')
    grid_h, grid_w = height // patch_size[0], width // patch_size[1]
    pixels = images.reshape(batch, chans, grid_h, patch_size[0], grid_w, patch_size[1])
    return pixels.permute(0, 2, 4, 3, 5, 1).reshape(batch, grid_h * grid_w, patch_size[0] * patch_size[1] * chans)


@torch.fx.wrap
@register_notrace_function
def unpatchify(tokens: torch.Tensor, patch_size: Size2d, grid_size: Size2d) -> torch.Tensor:
    """Lay flattened patches back as the images they were cut from; the inverse of `patchify`.

    Args:
        tokens: Shape (B, N, P_h * P_w * C).
        patch_size, grid_size: Pixels per patch side, P or (P_h, P_w), and patches per image side, h or (h, w).

    Returns:
        Images of shape (B, C, h * P_h, w * P_w), channels last in memory, which is faster to convolve on a CPU.

    Raises:
        ValueError: If N or the token width do not fit the grid and patch sizes.
    """
    if isinstance(patch_size, int):
        patch_size = (patch_size, patch_size)
    if isinstance(grid_size, int):
        grid_size = (grid_size, grid_size)
    batch, num_patches, dim = tokens.shape
    if num_patches != grid_size[0] * grid_size[1] or dim % (patch_size[0] * patch_size[1]) != 0:
        raise ValueError(
            f'{num_patches} tokens of width {dim} are not a grid of {grid_size} patches of {patch_size} pixels.')
    chans = dim // (patch_size[0] * patch_size[1])
    pixels = tokens.reshape(batch, grid_size[0], grid_size[1], patch_size[0], patch_size[1], chans)
    images = pixels.transpose(2, 3).reshape(
        batch, grid_size[0] * patch_size[0], grid_size[1] * patch_size[1], chans)
    return images.permute(0, 3, 1, 2)


class PatchReshape(nn.Module):
    """Phase 1's patch projection: the identity, a reshape without parameters.

    Maps images (B, in_chans, H, W) to (B, P * P * hidden_chans, h, w). Channels beyond the image's start at zero.
    """

    def __init__(self, patch_size: Tuple[int, int], in_chans: int, hidden_chans: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.extra_chans = hidden_chans - in_chans

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, _, H, W = x.shape
        x = patchify(F.pad(x, [0, 0, 0, 0, 0, self.extra_chans]), self.patch_size)
        return x.transpose(1, 2).reshape(B, x.shape[2], H // self.patch_size[0], W // self.patch_size[1])
