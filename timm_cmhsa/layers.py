"""Images as tokens, and back; stems; phase 1's token mixer, a convolution over the image; depthwise MLPs."""
import math
import re
from numbers import Integral
from typing import Any, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, ConvNormAct, create_conv2d, to_2tuple
from timm.layers.attention import resolve_self_attn_mask
from torch import nn

Size2d = Union[int, Tuple[int, int]]
Mask = Optional[torch.Tensor]  # (..., N, N): which keys a query may attend to, or what to add to the scores


# Keep these functions as leaves for FX: they branch on traced values.
@torch.fx.wrap
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
    (patch_h, patch_w), (batch, chans, height, width) = patch_size, images.shape
    if height % patch_h != 0 or width % patch_w != 0:
        raise ValueError(f'Images of {height} x {width} pixels cannot be cut into patches of {patch_size}.')
    grid_h, grid_w = height // patch_h, width // patch_w
    pixels = images.reshape(batch, chans, grid_h, patch_h, grid_w, patch_w)
    return pixels.permute(0, 2, 4, 3, 5, 1).reshape(batch, grid_h * grid_w, patch_h * patch_w * chans)


@torch.fx.wrap
def unpatchify(tokens: torch.Tensor, patch_size: Size2d, grid_size: Size2d) -> torch.Tensor:
    """Put flattened patches back together as images; the inverse of `patchify`.

    Args:
        tokens: Shape (B, N, P_h * P_w * C).
        patch_size: Pixels per patch side, P or (P_h, P_w).
        grid_size: Patches per image side, h or (h, w).

    Returns:
        Images of shape (B, C, h * P_h, w * P_w), channels last in memory, which is faster to convolve on a CPU.

    Raises:
        ValueError: If N or the token width do not fit the grid and patch sizes.
    """
    if isinstance(patch_size, int):
        patch_size = (patch_size, patch_size)
    if isinstance(grid_size, int):
        grid_size = (grid_size, grid_size)
    (patch_h, patch_w), (grid_h, grid_w), (batch, num_patches, dim) = patch_size, grid_size, tokens.shape
    if num_patches != grid_h * grid_w or dim % (patch_h * patch_w) != 0:
        raise ValueError(
            f'{num_patches} tokens of width {dim} are not a grid of {grid_size} patches of {patch_size} pixels.')
    pixels = tokens.reshape(batch, grid_h, grid_w, patch_h, patch_w, dim // (patch_h * patch_w)).transpose(2, 3)
    return pixels.reshape(batch, grid_h * patch_h, grid_w * patch_w, pixels.shape[-1]).permute(0, 3, 1, 2)


@torch.fx.wrap
def reject_attn_mask(x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
    """Return the tokens of a mixer that has no attention to mask. Raise ValueError if there is a mask."""
    if attn_mask is not None or is_causal:
        raise ValueError('Convolutions and hard heads have no attention to mask: leave out attn_mask and is_causal.')
    return x


@torch.fx.wrap
def add_attn_mask(attn_bias: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
    """Add a mask over N keys to a bias over N or N + 1 keys. The zero key, which comes last, is never masked."""
    mask = resolve_self_attn_mask(attn_bias.shape[-2], attn_bias, attn_mask, is_causal)
    if mask is None:
        return attn_bias
    return attn_bias + F.pad(mask, [0, attn_bias.shape[-1] - mask.shape[-1]])


def check_divisible(img_size: Size2d, patch_size: Size2d) -> None:
    """Raise ValueError if an image, H x W pixels, cannot be cut into whole patches."""
    sizes, patches = to_2tuple(img_size), to_2tuple(patch_size)
    if len(sizes) != 2 or len(patches) != 2 or not all(isinstance(side, Integral) for side in (*sizes, *patches)):
        raise ValueError(f'{img_size=} and {patch_size=} must be one or two whole numbers, height and width.')
    if any(patch < 1 or size < patch or size % patch for size, patch in zip(sizes, patches)):
        raise ValueError(f'{img_size=} is not divisible by {patch_size=}: use a multiple of the patch size.')


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


@torch.no_grad()
def init_patch_identity(proj: nn.Conv2d) -> None:
    """Make a patch projection, of weight (d, in_chans, P_h, P_w), compute the same as phase 1's reshape."""
    one_hot_tokens = torch.eye(len(proj.weight), device=proj.weight.device).unsqueeze(1)
    proj.weight.copy_(unpatchify(one_hot_tokens, (proj.kernel_size[0], proj.kernel_size[1]), 1)[:, :proj.in_channels])
    if proj.bias is not None:
        nn.init.zeros_(proj.bias)


class PatchConv2d(nn.Module):
    """Phase 1's token mixer: a convolution over the whole image, with zero padding that keeps its size.

    Maps tokens of shape (B, N, P * P * C) to the same shape. The kernel must be odd, or else the size would change.
    """

    def __init__(
            self, dim: int, patch_size: Size2d, grid_size: Size2d, kernel_size: Size2d = 3, proj_drop: float = 0.,
            **dd: Any) -> None:
        super().__init__()
        kernel_h, kernel_w = to_2tuple(kernel_size)
        if kernel_h % 2 == 0 or kernel_w % 2 == 0:
            raise ValueError(f'kernel_size={kernel_size} cannot be centred on a pixel: use an odd size such as 3 or 5.')
        self.patch_size = to_2tuple(patch_size)
        self.grid_size = to_2tuple(grid_size)
        chans = dim // math.prod(self.patch_size)
        self.conv = nn.Conv2d(chans, chans, (kernel_h, kernel_w), padding=(kernel_h // 2, kernel_w // 2), **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        self.grid_size = grid_size

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        x = reject_attn_mask(x, attn_mask, is_causal)
        x = self.conv(unpatchify(x, self.patch_size, self.grid_size))
        return self.proj_drop(patchify(x, self.patch_size))


class ConvStem(nn.Sequential):
    """Convolutions before the tokens (arXiv 2104.05704, 2106.14881): 3 x 3, each with batch norm and activation.

    Maps images (B, in_chans, H, W) to (B, width, H / reduction, W / reduction). The text `stem` has the width of every
    convolution, with a 'p' where a max pooling by 2 follows, as after the last: '32p-96p'. It is right after the
    convolution, so that norm and activation have less to do.
    """

    def __init__(self, stem: str, in_chans: int = 3, act_layer: Any = nn.GELU, **dd: Any) -> None:
        if not isinstance(stem, str) or not re.fullmatch(r'([1-9][0-9]*p?-)*[1-9][0-9]*p', stem):
            raise ValueError(f"{stem=}: give widths, such as '24-48p-96p', where p pools by 2, as the last must.")
        super().__init__()
        self.reduction, self.width = 2 ** stem.count('p'), in_chans
        for layer in stem.split('-'):
            width = int(layer.rstrip('p'))
            self.append(create_conv2d(self.width, width, 3, **dd))
            if layer.endswith('p'):
                self.append(nn.MaxPool2d(2))
            self.append(BatchNormAct2d(width, act_layer=act_layer, **dd))
            self.width = width


class DepthwiseMlp(nn.Module):
    """MLP with batch norm and a depthwise 3 x 3 convolution over the grid of tokens (LocalViT, arXiv 2104.05707).

    Takes the arguments that timm's ViT gives an MLP, but has its own norm and no biases. The model sets its grid. As it
    mixes neighbours, an attention mask does not keep them apart. Maps tokens (B, N, in_features) to the same shape.
    """

    def __init__(
            self, in_features: int, hidden_features: Optional[int] = None, act_layer: Any = nn.GELU,
            norm_layer: Any = None, bias: bool = False, drop: float = 0., **dd: Any) -> None:
        super().__init__()
        hidden = hidden_features or in_features
        self.grid_size = (1, 1)
        self.fc1 = ConvNormAct(in_features, hidden, 1, act_layer=act_layer, **dd)
        self.conv = ConvNormAct(hidden, hidden, 3, groups=hidden, act_layer=act_layer, **dd)
        self.fc2 = ConvNormAct(hidden, in_features, 1, apply_act=False, **dd)
        self.drop = nn.Dropout(drop)

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        self.grid_size = grid_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc2(self.conv(self.fc1(unpatchify(x, 1, self.grid_size))))
        return self.drop(patchify(x, 1))
