"""The registered models, and their configurations.

The hybrids put convolutions before the tokens, and a depthwise convolution and batch norm into the MLPs.
"""
from typing import Any, Dict, Tuple

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from timm.models import generate_default_cfgs, register_model

from .models import CmhsaAttn, CmhsaConv, create_cmhsa
from .patches import Size2d

HYBRID_SIZES = 32, 64, 96, 224  # pixels


def cfg(**kwargs: Any) -> Dict[str, Any]:
    return {
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': None,
        'crop_pct': .9, 'interpolation': 'bicubic', 'fixed_input_size': True,
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'classifier': 'head',
        'paper_ids': 'arXiv:2111.01353', 'paper_name': 'Can Vision Transformers Perform Convolution?',
        **kwargs
    }


_SMALL = dict(input_size=(3, 32, 32), crop_pct=1.0)

default_cfgs = generate_default_cfgs({
    'cmhsa_conv_k3': cfg(),
    'cmhsa_conv_k5': cfg(),
    'cmhsa_attn': cfg(),
    'cmhsa_attn_soft': cfg(),

    'cmhsa_conv_k3_patch4_32': cfg(**_SMALL),
    'cmhsa_conv_k5_patch4_32': cfg(**_SMALL),
    'cmhsa_attn_patch4_32': cfg(**_SMALL),
    'cmhsa_attn_soft_patch4_32': cfg(**_SMALL),

    'cmhsa_hybrid_conv_32': cfg(**_SMALL),
    'cmhsa_hybrid_conv_64': cfg(input_size=(3, 64, 64), crop_pct=1.0),
    'cmhsa_hybrid_conv_96': cfg(input_size=(3, 96, 96), crop_pct=1.0),
    'cmhsa_hybrid_conv_224': cfg(),
    'cmhsa_hybrid_attn_32': cfg(**_SMALL),
    'cmhsa_hybrid_attn_64': cfg(input_size=(3, 64, 64), crop_pct=1.0),
    'cmhsa_hybrid_attn_96': cfg(input_size=(3, 96, 96), crop_pct=1.0),
    'cmhsa_hybrid_attn_224': cfg(),

    'test_cmhsa_conv_k3': cfg(**_SMALL),
    'test_cmhsa_attn': cfg(**_SMALL),
})

_PATCH4_32: Dict[str, Any] = dict(patch_size=4, hidden_chans=12)
_TEST: Dict[str, Any] = dict(patch_size=4, depth=4)
_HYBRID: Dict[str, Any] = dict(hidden_chans=96, depth=4, mlp_layer='depthwise')
_HYBRID_32 = dict(_HYBRID, stem='32p-96p', patch_size=4)
_HYBRID_64 = dict(_HYBRID, stem='24p-48p-96p', patch_size=8)
_HYBRID_224 = dict(_HYBRID, stem='24p-48p-96p-96p', patch_size=16)
_WIDE_SOFT: Dict[str, Any] = dict(num_heads=10, qk_dim=16, rel_pos='padded_table')


def registered_hybrid(kind: str, img_size: Size2d) -> str:
    """Return the hybrid of a kind, 'conv' or 'attn', for the largest images that these are not smaller than."""
    size = max((size for size in HYBRID_SIZES if size <= min(to_2tuple(img_size))), default=HYBRID_SIZES[0])
    return f'cmhsa_hybrid_{kind}_{size}'


def registered_variant(
        kind: str, patch_size: Tuple[int, int], hidden_chans: int, stem: str, img_size: Size2d) -> str:
    """Return the registered model of a kind, such as 'cmhsa_attn', with tokens of this shape, or else the kind.

    With a stem it is a hybrid for images of this size, whatever its tokens.
    """
    if stem:
        return registered_hybrid('attn' if 'attn' in kind else 'conv', img_size)
    small = patch_size == to_2tuple(_PATCH4_32['patch_size']) and hidden_chans == _PATCH4_32['hidden_chans']
    return f'{kind}_patch4_32' if small else kind


@register_model
def cmhsa_conv_k3(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA-3, convolution phase: 6 blocks of width 768 with 3 x 3 convolutions (Section 4.1). """
    return create_cmhsa(CmhsaConv, 'cmhsa_conv_k3', pretrained, kwargs, kernel_size=3)


@register_model
def cmhsa_conv_k5(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA-5, convolution phase: 6 blocks of width 768 with 5 x 5 convolutions (Section 4.1). """
    return create_cmhsa(CmhsaConv, 'cmhsa_conv_k5', pretrained, kwargs, kernel_size=5)


@register_model
def cmhsa_attn(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase: 6 blocks of width 768 with 9 heads of 768 (Section 4.1). """
    return create_cmhsa(CmhsaAttn, 'cmhsa_attn', pretrained, kwargs)


@register_model
def cmhsa_attn_soft(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase: 6 blocks of width 768 with 20 thin heads of 96, enough for soft heads. """
    return create_cmhsa(
        CmhsaAttn, 'cmhsa_attn_soft', pretrained, kwargs, num_heads=20, head_dim=96, rel_pos='padded_table')


@register_model
def cmhsa_conv_k3_patch4_32(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA-3, convolution phase, for 32 x 32 images: 6 blocks of width 192. """
    return create_cmhsa(CmhsaConv, 'cmhsa_conv_k3_patch4_32', pretrained, kwargs, kernel_size=3, **_PATCH4_32)


@register_model
def cmhsa_conv_k5_patch4_32(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA-5, convolution phase, for 32 x 32 images: 6 blocks of width 192. """
    return create_cmhsa(CmhsaConv, 'cmhsa_conv_k5_patch4_32', pretrained, kwargs, kernel_size=5, **_PATCH4_32)


@register_model
def cmhsa_attn_patch4_32(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, for 32 x 32 images: 6 blocks of width 192 with 9 heads of 192. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_attn_patch4_32', pretrained, kwargs, **_PATCH4_32)


@register_model
def cmhsa_attn_soft_patch4_32(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, for 32 x 32 images: 6 blocks of width 192 with 20 thin heads of 48. """
    return create_cmhsa(
        CmhsaAttn, 'cmhsa_attn_soft_patch4_32', pretrained, kwargs, num_heads=20, head_dim=48, rel_pos='padded_table',
        **_PATCH4_32)


@register_model
def cmhsa_hybrid_conv_32(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA hybrid, convolution phase: a stem, then 4 blocks on 8 x 8 tokens of width 96. """
    return create_cmhsa(CmhsaConv, 'cmhsa_hybrid_conv_32', pretrained, kwargs, **_HYBRID_32)


@register_model
def cmhsa_hybrid_conv_64(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA hybrid, convolution phase: a stem, then 4 blocks on 8 x 8 tokens of width 96. """
    return create_cmhsa(CmhsaConv, 'cmhsa_hybrid_conv_64', pretrained, kwargs, **_HYBRID_64)


@register_model
def cmhsa_hybrid_conv_96(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA hybrid, convolution phase: a stem, then 4 blocks on 12 x 12 tokens of width 96. """
    return create_cmhsa(CmhsaConv, 'cmhsa_hybrid_conv_96', pretrained, kwargs, **_HYBRID_64)


@register_model
def cmhsa_hybrid_conv_224(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA hybrid, convolution phase: a stem, then 4 blocks on 14 x 14 tokens of width 96. """
    return create_cmhsa(CmhsaConv, 'cmhsa_hybrid_conv_224', pretrained, kwargs, **_HYBRID_224)


@register_model
def cmhsa_hybrid_attn_32(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA hybrid, self-attention phase: a stem, then 4 blocks on 8 x 8 tokens of width 96. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_hybrid_attn_32', pretrained, kwargs, **_WIDE_SOFT, **_HYBRID_32)


@register_model
def cmhsa_hybrid_attn_64(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA hybrid, self-attention phase: a stem, then 4 blocks on 8 x 8 tokens of width 96. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_hybrid_attn_64', pretrained, kwargs, **_WIDE_SOFT, **_HYBRID_64)


@register_model
def cmhsa_hybrid_attn_96(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA hybrid, self-attention phase: a stem, then 4 blocks on 12 x 12 tokens of width 96. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_hybrid_attn_96', pretrained, kwargs, **_WIDE_SOFT, **_HYBRID_64)


@register_model
def cmhsa_hybrid_attn_224(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA hybrid, self-attention phase: a stem, then 4 blocks on 14 x 14 tokens of width 96. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_hybrid_attn_224', pretrained, kwargs, **_WIDE_SOFT, **_HYBRID_224)


@register_model
def test_cmhsa_conv_k3(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA-3, convolution phase, for unit tests. """
    return create_cmhsa(CmhsaConv, 'test_cmhsa_conv_k3', pretrained, kwargs, kernel_size=3, **_TEST)


@register_model
def test_cmhsa_attn(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, for unit tests. """
    return create_cmhsa(CmhsaAttn, 'test_cmhsa_attn', pretrained, kwargs, **_TEST)
