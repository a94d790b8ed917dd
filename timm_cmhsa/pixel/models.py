"""Vision Transformers on pixels, whose heads attend by relative position.

Paper: `On the Relationship between Self-Attention and Convolutional Layers` - https://arxiv.org/abs/1911.03584

A token is a patch of 2 x 2 pixels (the paper's invertible downsampling), projected to 400 dimensions. Heads attend to
whole tokens. One matrix per head replaces its value and output projections (W^(h) of Equation 11), so that a layer has
the parameters of a convolution with one tap per head. Blocks are timm's, with normalization before attention and MLP;
the authors' code has BERT's, with normalization after them.
"""
from typing import Any, Dict

import torch
from timm.layers import to_2tuple
from timm.models import generate_default_cfgs, register_model
from torch import nn

from .. import layers
from ..layers import Mask, Size2d
from ..models import Cmhsa, cfg, create_cmhsa
from .encodings import ENCODINGS, resize_offset_embed


class PositionalAttention(nn.Module):
    """Heads that attend by relative position, and with `rel_pos='learned_content'` by content as well.

    Attention by position alone has the same weights for all images. Maps tokens of shape (B, N, dim) to the same shape.
    Heads are as wide as tokens. Arguments are those of `RelPosAttention`, and encodings those of `PixelAttn`.
    """
    fused_attn = False

    def __init__(
            self,
            dim: int,
            grid_size: Size2d,
            num_heads: int = 9,
            rel_pos: str = 'quadratic',
            attn_drop: float = 0.,
            proj_drop: float = 0.,
            **dd: Any,
    ) -> None:
        super().__init__()
        if rel_pos not in ENCODINGS:
            raise ValueError(f'{rel_pos=} is not an encoding of pixel models: use {", ".join(ENCODINGS)}.')
        self.num_heads = num_heads
        self.rel_pos = ENCODINGS[rel_pos](to_2tuple(grid_size), num_heads, dim, **dd)
        self.qk = nn.Linear(dim, 2 * num_heads * dim, **dd) if self.rel_pos.depends_on_queries else None
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

    def forward(self, x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
        B, N, D = x.shape
        if self.qk is None:  # the same weights for all images
            scores = layers.add_attn_mask(self.rel_pos.get_bias(), attn_mask, is_causal)
        else:
            q, k = self.qk(x).reshape(B, N, 2, self.num_heads, D).permute(2, 0, 3, 1, 4).unbind(0)
            attn_bias = layers.add_attn_mask(self.rel_pos.get_bias(q), attn_mask, is_causal)
            scores = (q * D ** -0.5) @ k.transpose(-2, -1) + attn_bias
        attn = self.attn_drop(scores.softmax(dim=-1))
        x = (attn.flatten(1, 2) @ x).reshape(B, self.num_heads, N, D).transpose(1, 2)
        return self.proj_drop(self.proj(self.value(x.flatten(2))))


class PixelAttn(Cmhsa):
    """A Vision Transformer on pixels (or 2 x 2 patches), whose heads attend by relative position."""

    def __init__(
            self,
            *,
            num_heads: int = 9,
            rel_pos: str = 'quadratic',
            patch_size: Size2d = 2,
            hidden_chans: int = 100,
            mlp_ratio: float = 1.28,
            **kwargs: Any,
    ) -> None:
        """See `Cmhsa`. `rel_pos` is 'quadratic', 'quadratic_gen', 'learned' or 'learned_content'."""
        super().__init__(patch_size=patch_size, hidden_chans=hidden_chans, mlp_ratio=mlp_ratio, **kwargs)
        for block in self.blocks:
            block.attn = PositionalAttention(
                self.embed_dim, self.patch_embed.grid_size, num_heads, rel_pos,
                attn_drop=self.drop_rates['attn_drop_rate'], **self.mixer_args)

    def model_args(self) -> Dict[str, Any]:
        attn = self.blocks[0].attn
        return dict(super().model_args(), num_heads=attn.num_heads, rel_pos=attn.rel_pos.name)


def checkpoint_filter_fn(state_dict: Dict[str, torch.Tensor], model: nn.Module) -> Dict[str, torch.Tensor]:
    """Pad or crop the offset embeddings of a checkpoint for another image size."""
    lengths = {name: len(parameter) for name, parameter in model.named_parameters() if name.endswith('_embed')}
    return {name: resize_offset_embed(tensor, lengths[name]) if name in lengths else tensor
            for name, tensor in state_dict.items()}


def _create_pixel_attn(variant: str, pretrained: bool, kwargs: Dict[str, Any], **defaults: Any) -> PixelAttn:
    return create_cmhsa(PixelAttn, variant, pretrained, kwargs, checkpoint_filter_fn, **defaults)


_PAPER: Dict[str, Any] = dict(
    size=32, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),  # of CIFAR-10
    paper_ids='arXiv:1911.03584', paper_name='On the Relationship between Self-Attention and Convolutional Layers')

default_cfgs = generate_default_cfgs({
    **{f'pixel_attn_{name}': cfg(num_classes=10, **_PAPER) for name in ENCODINGS},
    'test_pixel_attn': cfg(**_PAPER),
})


@register_model
def pixel_attn_quadratic(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ 6 layers of 9 heads that attend by round Gaussians ("SA quadratic emb.", Table 1). """
    return _create_pixel_attn('pixel_attn_quadratic', pretrained, kwargs, rel_pos='quadratic')


@register_model
def pixel_attn_quadratic_gen(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ 6 layers of 9 heads that attend by Gaussians of any shape ("SA quadratic emb. gen.", Table 4). """
    return _create_pixel_attn('pixel_attn_quadratic_gen', pretrained, kwargs, rel_pos='quadratic_gen')


@register_model
def pixel_attn_learned(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ 6 layers of 9 heads that attend by learned row and column embeddings ("SA learned emb.", Table 1). """
    return _create_pixel_attn('pixel_attn_learned', pretrained, kwargs, rel_pos='learned')


@register_model
def pixel_attn_learned_content(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ 6 layers of 9 heads that attend by such embeddings and content ("SA learned emb. + content", Table 1). """
    return _create_pixel_attn('pixel_attn_learned_content', pretrained, kwargs, rel_pos='learned_content')


@register_model
def test_pixel_attn(pretrained: bool = False, **kwargs: Any) -> PixelAttn:
    """ Attention on pixels, for unit tests. """
    return _create_pixel_attn('test_pixel_attn', pretrained, kwargs, patch_size=4, hidden_chans=3, depth=4)
