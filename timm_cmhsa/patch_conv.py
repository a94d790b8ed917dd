"""Phase 1's token mixer: a convolution over the whole image."""
import math
from typing import Final, Optional, Tuple

import torch
from timm.layers import to_2tuple
from torch import nn

from .patches import Size2d, patchify, unpatchify
from .rel_pos import Mask, reject_attn_mask

# Keep these as leaves for FX: they branch on traced values.
torch.fx.wrap('patchify')
torch.fx.wrap('unpatchify')
torch.fx.wrap('reject_attn_mask')


class PatchConv2d(nn.Module):
    """Phase 1's token mixer: a convolution over the whole image that the tokens are patches of.

    Zero padding keeps the image size. Maps tokens of shape (B, N, P * P * C) to the same shape.
    """
    patch_size: Final[Tuple[int, int]]

    def __init__(
            self,
            dim: int,
            patch_size: Size2d,
            grid_size: Size2d,
            kernel_size: Size2d = 3,
            proj_drop: float = 0.,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
    ) -> None:
        """
        Args:
            dim: Token width, P * P * C.
            patch_size: Pixels per patch side.
            grid_size: Patches per image side.
            kernel_size: Kernel of the convolution, odd.
            proj_drop: Dropout rate of the output.

        Raises:
            ValueError: If a token is no patch, or the kernel is even, which would change the image size.
        """
        super().__init__()
        kernel_h, kernel_w = to_2tuple(kernel_size)
        if dim % math.prod(to_2tuple(patch_size)):
            raise ValueError(f'dim={dim} is not the width of a patch of {patch_size} pixels a side.')
        if kernel_h % 2 == 0 or kernel_w % 2 == 0:
            raise ValueError(f'kernel_size={kernel_size} cannot be centred on a pixel: use an odd size such as 3 or 5.')
        self.patch_size = to_2tuple(patch_size)
        self.grid_size = to_2tuple(grid_size)
        chans = dim // (self.patch_size[0] * self.patch_size[1])
        padding = (kernel_h // 2, kernel_w // 2)
        self.conv = nn.Conv2d(chans, chans, (kernel_h, kernel_w), padding=padding, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        self.grid_size = grid_size

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        x = reject_attn_mask(x, attn_mask, is_causal)
        x = self.conv(unpatchify(x, self.patch_size, self.grid_size))
        return self.proj_drop(patchify(x, self.patch_size))
