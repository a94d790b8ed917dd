"""Attention models on pixels: every head as wide as the output, attending by relative position.

Paper: `On the Relationship between Self-Attention and Convolutional Layers` - https://arxiv.org/abs/1911.03584

A token is a 2 x 2 patch (the paper's invertible downsampling, space to depth), projected to 400 dimensions. Heads
attend to whole tokens, and one matrix per head takes the place of its value and output projections (W^(h) of Equation
11): as many parameters as a convolution with a kernel of that many taps. The blocks are timm's, which normalize before
attention and MLP; the authors' code has BERT's, which normalize after them. The paper's models with 16 heads
(Appendix F) are the registered ones with `num_heads=16`.
"""
import copy
import math
from typing import Any, Dict, List, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple, use_fused_attn
from timm.models import generate_default_cfgs, register_model
from torch import nn

from .attention import replace_weight
from .cmhsa import Cmhsa, cfg, common_num_heads, create_cmhsa, heads_of_blocks
from .efficient import is_onnx_export, is_plain_linear
from .encodings import ENCODINGS, create_rel_pos
from .patches import Size2d
from .rel_pos import Mask, add_attn_mask
from .shiftable import ShiftableAttention
from .shifts import Factors, Shift, ShiftedAttention, group_heads

torch.fx.wrap('add_attn_mask')  # keep as a leaf for FX
torch.fx.wrap('attend')

__all__ = ['PixelAttn', 'PositionalAttention', 'PositionalContentAttention']


def attend(attn: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return what every head sees: shape (B, N, num_heads, dim), of weights (B or 1, num_heads, N, N) and tokens."""
    if attn.shape[0] == 1:  # one attention for the whole batch; ONNX has no einsum that broadcasts
        return torch.einsum('hnm,bmd->bnhd', attn[0], x)
    return torch.einsum('bhnm,bmd->bnhd', attn, x)


class PositionalAttention(ShiftableAttention, nn.Module):
    """Heads that attend by relative position alone: the same pattern for all images.

    Maps tokens of shape (B, N, dim) to the same shape.
    """
    fused_attn = False  # there is nothing to fuse: one softmax serves the whole batch

    def __init__(
            self,
            dim: int,
            grid_size: Size2d,
            num_heads: int = 9,
            rel_pos: str = 'quadratic',
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
    ) -> None:
        """See `RelPosAttention`. Heads are as wide as tokens; with none, the output is the same for all tokens."""
        if num_heads < 0:
            raise ValueError(f'{num_heads=} must not be negative.')
        super().__init__()
        dd: Dict[str, Any] = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.rel_pos = create_rel_pos(rel_pos, to_2tuple(grid_size), num_heads, dim, zero_key=False, **dd)
        if self.rel_pos.depends_on_queries and not isinstance(self, PositionalContentAttention):
            raise ValueError(f'{rel_pos=} needs queries: use PositionalContentAttention.')
        self.attn_drop = nn.Dropout(attn_drop)
        self.value = nn.Linear(num_heads * dim, dim, **dd)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=.02)
                nn.init.zeros_(module.bias)
        self.rel_pos.reset_parameters()

    def keep_heads(self, heads: List[int]) -> None:
        """Remove all other heads."""
        self.rel_pos.keep_heads(heads)
        weight = self.value.weight.view(-1, self.num_heads, self.proj.in_features)[:, heads].flatten(1)
        replace_weight(self.value, weight, self.value.bias)
        self.num_heads = len(heads)

    def max_content_score(self, norm: Optional[nn.Module] = None) -> torch.Tensor:
        return torch.zeros(self.num_heads, dtype=torch.double, device='cpu')  # there is none

    def shift_factors(self, shifts: Sequence[Optional[Shift]]) -> Dict[Shift, Factors]:
        dim = self.proj.in_features
        outputs = self.proj.weight @ self.value.weight.view(dim, -1, dim).transpose(0, 1)
        eye = torch.eye(dim, device=outputs.device, dtype=outputs.dtype)
        return {shift: Factors(eye, None, outputs[heads].sum(dim=0)) for shift, heads in group_heads(shifts).items()}

    @torch.no_grad()
    def with_shifts(self, shifts: Sequence[Optional[Shift]]) -> ShiftedAttention:
        others = [i for i, shift in enumerate(shifts) if shift is None]
        rest = None
        if others:
            rest = copy.deepcopy(self).requires_grad_(False)
            rest.keep_heads(others)
            rest.value.register_parameter('bias', None)
            rest.proj.register_parameter('bias', None)
        return ShiftedAttention(self.shift_factors(shifts), self.proj(self.value.bias), self.grid_size, rest)

    def without_shifts(self) -> nn.Module:
        return self

    def is_plain(self) -> bool:
        return is_plain_linear(self.value) and is_plain_linear(self.proj)

    def is_replaceable(self) -> bool:
        return type(self) in (PositionalAttention, PositionalContentAttention) and super().is_replaceable()

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        attn = add_attn_mask(self.rel_pos.get_bias(), attn_mask, is_causal).softmax(dim=-1)
        x = attend(self.attn_drop(attn), x).flatten(2)
        return self.proj_drop(self.proj(self.value(x)))


class PositionalContentAttention(PositionalAttention):
    """Heads that attend by relative position and by content, with queries and keys.

    Maps tokens of shape (B, N, dim) to the same shape.
    """

    def __init__(
            self, dim: int, grid_size: Size2d, num_heads: int = 9, rel_pos: str = 'learned_content', **kw: Any) -> None:
        """See `PositionalAttention`."""
        super().__init__(dim, grid_size, num_heads, rel_pos, **kw)
        self.fused_attn = use_fused_attn()
        self.qk = nn.Linear(dim, 2 * num_heads * dim, device=kw.get('device'), dtype=kw.get('dtype'))
        self.reset_parameters()

    def max_content_score(self, norm: Optional[nn.Module] = None) -> torch.Tensor:
        return torch.full((self.num_heads,), math.inf, dtype=torch.double, device='cpu')  # no bound is known

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        B, N, D = x.shape
        q, k = self.qk(x).reshape(B, N, 2, self.num_heads, D).permute(2, 0, 3, 1, 4).unbind(0)
        attn_bias = add_attn_mask(self.rel_pos.get_bias(q), attn_mask, is_causal)
        if self.fused_attn and not is_onnx_export():
            dropout_p = self.attn_drop.p if self.training else 0.
            v = x.unsqueeze(1).expand(B, self.num_heads, N, D)
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_bias, dropout_p=dropout_p).transpose(1, 2)
        else:
            attn = (q * D ** -0.5) @ k.transpose(-2, -1) + attn_bias
            x = torch.einsum('bhnm,bmd->bnhd', self.attn_drop(attn.softmax(dim=-1)), x)
        return self.proj_drop(self.proj(self.value(x.flatten(2))))


class PixelAttn(Cmhsa):
    """A Vision Transformer on pixels (or 2 x 2 patches), whose heads attend by relative position."""

    def __init__(
            self,
            *,
            num_heads: Union[int, Sequence[int]] = 9,
            rel_pos: str = 'quadratic',
            patch_size: Size2d = 2,
            hidden_chans: int = 100,
            mlp_ratio: float = 1.28,
            **kwargs: Any,
    ) -> None:
        """
        Args:
            num_heads: Number of heads of every block, or of each.
            rel_pos: Relative position encoding: 'table', 'quadratic', 'quadratic_gen', 'learned' or
                'learned_content', which attends by content as well.
            patch_size, hidden_chans, mlp_ratio, **kwargs: See `Cmhsa`.
        """
        super().__init__(patch_size=patch_size, hidden_chans=hidden_chans, mlp_ratio=mlp_ratio, **kwargs)
        dd = {key: kwargs.get(key) for key in ('device', 'dtype')}
        by_content = rel_pos in ENCODINGS and ENCODINGS[rel_pos].depends_on_queries
        attn_layer = PositionalContentAttention if by_content else PositionalAttention
        for block, block_heads in zip(self.blocks, heads_of_blocks(num_heads, len(self.blocks))):
            block.attn = attn_layer(
                self.embed_dim,
                self.patch_embed.grid_size,
                num_heads=block_heads,
                rel_pos=rel_pos,
                attn_drop=self.drop_rates['attn_drop_rate'],
                proj_drop=self.drop_rates['proj_drop_rate'],
                **dd,
            )

    def model_args(self) -> Dict[str, Any]:
        rel_pos = self.blocks[0].attn.rel_pos.name
        return dict(super().model_args(), num_heads=common_num_heads(self.blocks), rel_pos=rel_pos)


_PAPER = dict(
    input_size=(3, 32, 32), crop_pct=1.0, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),  # of CIFAR-10
    paper_ids='arXiv:1911.03584', paper_name='On the Relationship between Self-Attention and Convolutional Layers')

default_cfgs = generate_default_cfgs({
    'pixel_attn_quadratic': cfg(num_classes=10, **_PAPER),
    'pixel_attn_quadratic_gen': cfg(num_classes=10, **_PAPER),
    'pixel_attn_learned': cfg(num_classes=10, **_PAPER),
    'pixel_attn_learned_content': cfg(num_classes=10, **_PAPER),

    'test_pixel_attn': cfg(**_PAPER),
})


@register_model
def pixel_attn_quadratic(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ 6 layers of 9 heads that attend by round Gaussians ("SA quadratic emb.", Table 1). """
    return create_cmhsa(PixelAttn, 'pixel_attn_quadratic', pretrained, kwargs, rel_pos='quadratic')


@register_model
def pixel_attn_quadratic_gen(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ 6 layers of 9 heads that attend by Gaussians of any shape ("SA quadratic emb. gen.", Table 4). """
    return create_cmhsa(PixelAttn, 'pixel_attn_quadratic_gen', pretrained, kwargs, rel_pos='quadratic_gen')


@register_model
def pixel_attn_learned(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ 6 layers of 9 heads that attend by learned row and column embeddings ("SA learned emb.", Table 1). """
    return create_cmhsa(PixelAttn, 'pixel_attn_learned', pretrained, kwargs, rel_pos='learned')


@register_model
def pixel_attn_learned_content(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ 6 layers of 9 heads that attend by such embeddings and content ("SA learned emb. + content", Table 1). """
    return create_cmhsa(PixelAttn, 'pixel_attn_learned_content', pretrained, kwargs, rel_pos='learned_content')


@register_model
def test_pixel_attn(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ Attention on pixels, for unit tests. """
    return create_cmhsa(PixelAttn, 'test_pixel_attn', pretrained, kwargs, patch_size=4, hidden_chans=3, depth=4)
