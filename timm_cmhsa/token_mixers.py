"""Tokens and what mixes them.

A token is a flattened image patch, so a mixer can see the tokens as the image they were cut from. `PatchConv2d`
convolves that image (phase 1), `RelPosAttention` attends over the tokens (phase 2): tokens in, tokens out.
"""
import math
from typing import Any, Final, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import Attention, RelPosBias, to_2tuple
from timm.models import register_notrace_function
from torch import nn

Size2d = Union[int, Tuple[int, int]]


# Functions that branch on what fx tracing sees as a proxy stay leaves of its graph.
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
        patch_size: Pixels per patch side, P or (P_h, P_w).
        grid_size: Patches per image side, h or (h, w), with h * w = N.

    Returns:
        Images of shape (B, C, h * P_h, w * P_w).

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
    return pixels.permute(0, 5, 1, 3, 2, 4).reshape(
        batch, chans, grid_size[0] * patch_size[0], grid_size[1] * patch_size[1])


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
        return x.transpose(1, 2).reshape(B, -1, H // self.patch_size[0], W // self.patch_size[1])


@torch.fx.wrap
@register_notrace_function
def reject_attn_mask(
        x: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
) -> torch.Tensor:
    """Return x, the tokens of a mixer that has no use for a mask, if there is none."""
    if attn_mask is not None or is_causal:
        raise ValueError('A convolution has no attention to mask: call the model without attn_mask and is_causal.')
    return x


@torch.fx.wrap
@register_notrace_function
def add_attn_mask(
        attn_bias: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
) -> torch.Tensor:
    """Add a mask over N keys to a bias over N + 1 keys: the zero key, which comes last, is never masked."""
    if is_causal:
        num_tokens = attn_bias.shape[-2]
        attn_mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=attn_bias.device).tril()
    if attn_mask is None:
        return attn_bias
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=attn_bias.dtype).masked_fill(~attn_mask, float('-inf'))
    return attn_bias + F.pad(attn_mask, [0, 1])


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
            ValueError: If a token is no patch, or the kernel is even: with the same padding on both sides it would
                change the image size.
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

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        x = reject_attn_mask(x, attn_mask, is_causal)
        x = self.conv(unpatchify(x, self.patch_size, self.grid_size))
        return self.proj_drop(patchify(x, self.patch_size))


class ZeroKeyRelPosBias(RelPosBias):
    """timm's relative position bias table, and a learned bias per head for one more key: the zero key.

    An offset means the same at any grid size, so that a change of grid pads the table with zeros or crops it. Offsets
    that a smaller grid does not have are forgotten.
    """
    window_size: Tuple[int, int]
    bias_shape: Tuple[int, int, int]
    relative_position_bias_table: nn.Parameter
    relative_position_index: torch.Tensor

    def __init__(self, window_size: Tuple[int, int], num_heads: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(window_size, num_heads, device=device, dtype=dtype)
        self.zero_key_bias = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, 'zero_key_bias'):  # timm's constructor calls this before ours is done
            nn.init.zeros_(self.zero_key_bias)

    def set_window_size(self, window_size: Tuple[int, int]) -> None:
        """Change the grid. The bias of every offset that both grids know is kept."""
        if window_size == self.window_size:
            return
        table = resize_bias_table(self.relative_position_bias_table.detach(), self.window_size, window_size)
        self.window_size = window_size
        self.window_area = window_size[0] * window_size[1]
        self.bias_shape = (self.window_area, self.window_area, table.shape[1])
        self.relative_position_bias_table = nn.Parameter(
            table, requires_grad=self.relative_position_bias_table.requires_grad)
        self.relative_position_index = self.relative_position_index.new_empty(self.window_area ** 2)
        self._init_buffers()

    def get_bias(self) -> torch.Tensor:
        """Bias of every query and key, the zero key last: shape (1, num_heads, N, N + 1)."""
        bias = self.relative_position_bias_table[self.relative_position_index].view(self.bias_shape)
        zero_key_bias = self.zero_key_bias.expand(bias.shape[0], 1, -1)
        return torch.cat([bias, zero_key_bias], dim=1).permute(2, 0, 1).unsqueeze(0).contiguous()


def resize_bias_table(table: torch.Tensor, grid_size: Tuple[int, int], new_grid_size: Tuple[int, int]) -> torch.Tensor:
    """Pad with zeros, or crop, a bias table for another grid. Interpolation would smear its one-hot entries.

    Args:
        table: Shape ((2h - 1) * (2w - 1), num_heads), offsets row by row.
        grid_size: Patches per image side, (h, w), that the table is for.
        new_grid_size: Patches per image side, (h', w'), that it shall be for.

    Returns:
        Table of shape ((2h' - 1) * (2w' - 1), num_heads).
    """
    table_2d = table.reshape(2 * grid_size[0] - 1, 2 * grid_size[1] - 1, -1)
    grow_h, grow_w = (new - old for new, old in zip(new_grid_size, grid_size))
    return F.pad(table_2d, (0, 0, grow_w, grow_w, grow_h, grow_h)).flatten(0, 1)


class RelPosAttention(Attention):
    """Phase 2's token mixer: multi-head self-attention with relative position bias (Equations 2 to 4).

    One more key than there are tokens, the zero key, has a zero key, a zero value and a learned bias per head (what
    `nn.MultiheadAttention` calls `add_zero_attn`): a head can attend to nothing, as it must where its offset points
    outside the image. Maps tokens of shape (B, N, dim) to (B, N, dim_out).
    """

    def __init__(
            self,
            dim: int,
            grid_size: Size2d,
            num_heads: int = 9,
            head_dim: Optional[int] = None,
            dim_out: Optional[int] = None,
            qkv_bias: bool = True,
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
    ) -> None:
        """
        Args:
            dim: Token width.
            grid_size: Patches per image side.
            num_heads: Number of heads.
            head_dim: Width of a head; by default that of a token, as in the paper (d_H = d).
            dim_out: Output width; by default that of a token.
            qkv_bias: Give queries, keys and values a bias.
            attn_drop: Dropout rate of the attention weights.
            proj_drop: Dropout rate of the output.

        Raises:
            ValueError: If there is no head, or a head has no width.
        """
        if num_heads < 1 or (head_dim is not None and head_dim < 1):
            raise ValueError(f'{num_heads=} and {head_dim=} must be positive.')
        dd = {'device': device, 'dtype': dtype}
        super().__init__(
            dim,
            num_heads=num_heads,
            attn_head_dim=head_dim or dim,
            dim_out=dim_out,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            **dd,
        )
        self.rel_pos = ZeroKeyRelPosBias(to_2tuple(grid_size), num_heads, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.qkv, self.proj):
            nn.init.trunc_normal_(linear.weight, std=.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.rel_pos.reset_parameters()

    @property
    def grid_size(self) -> Tuple[int, int]:
        return self.rel_pos.window_size

    def set_grid_size(self, grid_size: Tuple[int, int]) -> None:
        self.rel_pos.set_window_size(grid_size)

    def forward(
            self,
            x: torch.Tensor,
            attn_mask: Optional[torch.Tensor] = None,
            is_causal: bool = False,
    ) -> torch.Tensor:
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = F.pad(k, [0, 0, 0, 1]), F.pad(v, [0, 0, 0, 1])
        attn_bias = add_attn_mask(self.rel_pos.get_bias(), attn_mask, is_causal)

        fused_attn = self.fused_attn
        if not torch.jit.is_scripting():  # PyTorch's ONNX exporter fails on a fused attention with a bias
            fused_attn = fused_attn and not torch.onnx.is_in_onnx_export()
        if fused_attn:
            x = F.scaled_dot_product_attention(
                q, k, v,
                attn_mask=attn_bias,
                dropout_p=self.attn_drop.p if self.training else 0.,
            )
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1) + attn_bias
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v

        x = x.transpose(1, 2).reshape(B, N, self.attn_dim)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x
