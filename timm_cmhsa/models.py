"""Convolutionalized multi-head self-attention (CMHSA): Vision Transformers that can start as convolutional networks.

Paper: `Can Vision Transformers Perform Convolution?` - https://arxiv.org/abs/2111.01353

A token is a flattened P x P patch of C channels, so its width is d = P * P * C. With a stem, it is a pixel of the
stem's output. Phase 1 (`CmhsaConv`) mixes tokens by a convolution over the whole image, phase 2 (`CmhsaAttn`) by
self-attention with relative position bias. Otherwise both are timm's `VisionTransformer` without class token and
position embedding, with global average pooling.
"""
import math
from typing import Any, Callable, Dict, Mapping, Optional, Set, Tuple, Type

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerType, Mlp, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from .attention import RelPosAttention
from .layers import ConvStem, DepthwiseMlp, PatchConv2d, PatchReshape, Size2d, check_divisible, init_patch_identity
from .rel_pos import Grid, RelPosTable

MLP_LAYERS = {'mlp': Mlp, 'depthwise': DepthwiseMlp}


class Cmhsa(VisionTransformer):
    """Vision Transformer, the base of both phases. Subclasses give every block its token mixer."""

    def __init__(
            self,
            img_size: Size2d = 224,
            patch_size: Size2d = 16,
            in_chans: int = 3,
            hidden_chans: int = 3,
            stem: str = '',
            num_classes: int = 1000,
            global_pool: str = 'avg',
            fc_norm: Optional[bool] = False,
            depth: int = 6,
            mlp_ratio: float = 4.,
            mlp_layer: str = 'mlp',
            init_values: Optional[float] = None,
            drop_rate: float = 0.,
            proj_drop_rate: float = 0.,
            attn_drop_rate: float = 0.,
            drop_path_rate: float = 0.,
            norm_layer: Optional[LayerType] = None,
            act_layer: Optional[LayerType] = None,
            device: Optional[torch.device] = None,
            dtype: Optional[torch.dtype] = None,
    ) -> None:
        """
        Args:
            img_size: Input image size, pixels; divisible by the patch size.
            patch_size: Pixels per patch side, P.
            in_chans: Number of image channels.
            hidden_chans: Channels per pixel that a token carries, C; without a stem at least `in_chans`. A token's
                width is P * P * C.
            stem: Convolutions before the tokens, see `ConvStem`. A token is then a pixel of the stem's output: it
                covers `patch_size` pixels of the image, as many as the stem reduces to one, and has `hidden_chans`
                channels, the stem's last width.
            num_classes, global_pool, fc_norm, depth, mlp_ratio, init_values: As in timm's `VisionTransformer`, and so
                are all rates; phase 1 has no attention weights to drop.
            mlp_layer: 'mlp', or 'depthwise' for `DepthwiseMlp`.
            norm_layer: Normalization layer; the stem and `DepthwiseMlp` have batch norm.
            act_layer: Activation layer of MLPs and stem.

        Raises:
            ValueError: If the image is not divisible by the patch, or has more channels than a token carries, or the
                stem makes other tokens.
        """
        check_divisible(img_size, patch_size)
        if global_pool == 'token':
            raise ValueError("global_pool='token' needs a class token, which these models do not have: use 'avg'.")
        if in_chans < 1 or hidden_chans < 1 or depth < 1:
            raise ValueError(f'{in_chans=}, {hidden_chans=} and {depth=} must be positive.')
        if mlp_layer not in MLP_LAYERS:
            raise ValueError(f'mlp_layer={mlp_layer!r} must be one of {", ".join(MLP_LAYERS)}.')
        if not stem and in_chans > hidden_chans:
            raise ValueError(f'{in_chans=} do not fit into {hidden_chans=}: set hidden_chans to {in_chans} or more.')
        embed_dim = hidden_chans * (1 if stem else math.prod(to_2tuple(patch_size)))
        self.stem = stem  # timm's constructor calls init_weights
        self.drop_rates = dict(
            drop_rate=drop_rate, proj_drop_rate=proj_drop_rate, attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate)
        super().__init__(
            img_size=img_size, patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, num_classes=num_classes,
            global_pool=global_pool, fc_norm=fc_norm, depth=depth, mlp_ratio=mlp_ratio, init_values=init_values,
            norm_layer=norm_layer, act_layer=act_layer, mlp_layer=MLP_LAYERS[mlp_layer], **self.drop_rates,
            num_heads=math.gcd(embed_dim, 12),  # of global_pool='map'
            attn_layer=nn.Identity,  # a place for the subclass's token mixer
            class_token=False, pos_embed='none', device=device, dtype=dtype)
        self.mixer_args: Any = dict(proj_drop=proj_drop_rate, device=device, dtype=dtype)
        self.in_chans, self.hidden_chans = in_chans, hidden_chans
        self.token_size = (1, 1) if stem else to_2tuple(patch_size)  # pixels that a token holds, of the stem if any
        self.fixed_args = dict(
            patch_size=to_2tuple(patch_size), in_chans=in_chans, hidden_chans=hidden_chans, stem=stem,
            mlp_ratio=mlp_ratio, mlp_layer=mlp_layer, init_values=init_values, fc_norm=fc_norm, norm_layer=norm_layer,
            act_layer=act_layer)
        if stem:
            proj = ConvStem(stem, in_chans, act_layer or nn.GELU, device=device, dtype=dtype)
            if (to_2tuple(proj.reduction), proj.width) != (to_2tuple(patch_size), hidden_chans):
                raise ValueError(
                    f'{stem=} makes other tokens: use hidden_chans={proj.width} and patch_size={proj.reduction}.')
            self.patch_embed.proj = proj
        self._set_grid_size()

    def model_args(self) -> Dict[str, Any]:
        """Return the arguments of `timm.create_model` for a model of the present shape."""
        return dict(
            self.fixed_args, img_size=self.patch_embed.img_size, num_classes=self.num_classes,
            global_pool=self.global_pool, depth=len(self.blocks))

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        return {name for name, _ in self.named_parameters() if '.rel_pos.' in name}

    def set_input_size(self, img_size: Optional[Size2d] = None, patch_size: Optional[Size2d] = None) -> None:
        """Change the input resolution, pixels; the bias of every offset between patches is kept.

        Raises:
            ValueError: If the image is not divisible by the patch, or the patch size would change.
        """
        if patch_size is not None and to_2tuple(patch_size) != self.patch_embed.patch_size:
            raise ValueError(
                f'{patch_size=} would change the width of a token from {self.embed_dim}: create a new model instead.')
        if img_size is not None:
            check_divisible(img_size, self.patch_embed.patch_size)
        super().set_input_size(img_size=None if img_size is None else to_2tuple(img_size))
        self._set_grid_size()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if strict:
            check_phase(state_dict, self)
        return super().load_state_dict(state_dict, strict, assign)

    def _set_grid_size(self) -> None:
        for module in list(self.blocks.modules()):
            if hasattr(module, 'set_grid_size') and module.grid_size != self.patch_embed.grid_size:
                module.set_grid_size(self.patch_embed.grid_size)


class CmhsaConv(Cmhsa):
    """Phase 1: every attention replaced by a K x K convolution over the whole image. Raw patches are not projected.

    `kernel_size` is K, odd, or two such numbers. All other arguments are those of `Cmhsa`.
    """

    def __init__(self, *, kernel_size: Size2d = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not self.stem:
            self.patch_embed.proj = PatchReshape(self.token_size, self.in_chans, self.hidden_chans)
        for block in self.blocks:
            block.attn = PatchConv2d(
                self.embed_dim, self.token_size, self.patch_embed.grid_size, kernel_size, **self.mixer_args)

    def model_args(self) -> Dict[str, Any]:
        return dict(super().model_args(), kernel_size=self.blocks[0].attn.conv.kernel_size)


class CmhsaAttn(Cmhsa):
    """Phase 2: multi-head self-attention with relative position bias, the patch projection free to learn.

    The arguments from `num_heads` to `hard_attn` are those of `RelPosAttention`, all others those of `Cmhsa`.
    """

    def __init__(
            self, *, num_heads: int = 9, head_dim: Optional[int] = None, qk_dim: Optional[int] = None,
            qkv_bias: bool = True, rel_pos: str = 'table', padding: Optional[Size2d] = None, hard_attn: bool = False,
            **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.attn = RelPosAttention(
                self.embed_dim, self.patch_embed.grid_size, num_heads, head_dim, qk_dim, qkv_bias=qkv_bias,
                attn_drop=self.drop_rates['attn_drop_rate'], rel_pos=rel_pos, padding=padding, hard_attn=hard_attn,
                **self.mixer_args)

    def model_args(self) -> Dict[str, Any]:
        return dict(super().model_args(), **self.blocks[0].attn.args())

    def init_weights(self, mode: str = '', needs_reset: bool = True) -> None:
        super().init_weights(mode, needs_reset)
        if not self.stem:
            init_patch_identity(self.patch_embed.proj)

    def set_hard_attn(self, enable: bool = True) -> None:
        """Compute hard heads as shifts, for training too, or as attention again.

        Shifts cost less. Parameters and function stay the same. Meanwhile biases are frozen, and queries and keys do
        not learn. Create the optimizer and DistributedDataParallel afterwards.

        Raises:
            ValueError: If a head is not hard, or attention weights are to be dropped.
        """
        for block in self.blocks if enable else ():
            block.attn.all_hard_offsets()  # raises before any layer is changed
        for block in self.blocks:
            block.attn.set_hard_attn(enable)


def check_phase(state_dict: Mapping[str, Any], model: Cmhsa) -> None:
    """Raise ValueError if these are the tensors of the other phase."""
    if isinstance(model, CmhsaAttn) and 'blocks.0.attn.conv.weight' in state_dict:
        raise ValueError(
            'These are weights of phase 1 (cmhsa_*conv*), and the model is of phase 2: rewrite them by '
            '`convert_checkpoint CHECKPOINT FOLDER`, and take local-dir:FOLDER as the model, with pretrained=True.')
    if isinstance(model, CmhsaConv) and 'blocks.0.attn.rel_pos.zero_key_bias' in state_dict:
        raise ValueError(
            'These are weights of phase 2 (cmhsa_*attn*), and the model is of phase 1: load them into the model that '
            'they are of, or by timm_cmhsa.load_model.')


def checkpoint_filter_fn(state_dict: Dict[str, torch.Tensor], model: Cmhsa) -> Dict[str, torch.Tensor]:
    """Pad or crop the bias tables of a checkpoint for another image size."""
    check_phase(state_dict, model)
    out_dict = dict(state_dict)
    for name, module in model.named_modules():
        table = state_dict.get(f'{name}.relative_position_bias_table')
        if isinstance(module, RelPosTable) and table is not None:
            source = _grid_of_table(model, len(table), module.padding)
            if source is not None and source != module.grid_size:
                table = module.resize_table(table, source, module.grid_size, state_dict.get(f'{name}.bias_scale'))
                out_dict[f'{name}.relative_position_bias_table'] = table
    return out_dict


def _grid_of_table(model: Cmhsa, table_length: int, padding: Grid) -> Optional[Grid]:
    """Return the grid of a checkpoint's bias table: its configuration's if that fits, or the model's, or a square."""
    source_size = getattr(model, 'pretrained_model_args', {}).get('img_size') or model.pretrained_cfg['input_size'][-2:]
    height, width = (size // patch for size, patch in zip(to_2tuple(source_size), model.patch_embed.patch_size))
    side = (math.isqrt(table_length - 1) + 2 - sum(padding)) // 2
    for grid in ((height, width), model.patch_embed.grid_size, (side, side)):
        if math.prod(2 * (size + pad) - 1 for size, pad in zip(grid, padding)) == table_length:
            return grid
    return None


def create_cmhsa(
        cls: Type[Cmhsa], variant: str, pretrained: bool, kwargs: Dict[str, Any],
        filter_fn: Callable[..., Dict[str, torch.Tensor]] = checkpoint_filter_fn, **defaults: Any) -> Any:
    """Build a registered model; `kwargs` overrule the variant's `defaults` and `HEADS`."""
    args = {**HEADS.get(variant, {}), **defaults, **kwargs}
    first_conv = 'patch_embed.proj.0' if args.get('stem') else () if cls is CmhsaConv else 'patch_embed.proj'
    args['pretrained_cfg_overlay'] = {**(args.get('pretrained_cfg_overlay') or {}), 'first_conv': first_conv}
    feature_cfg = dict(out_indices=args.pop('out_indices', min(3, args.get('depth', 6))), feature_cls='getter')
    return build_model_with_cfg(
        cls, variant, pretrained, pretrained_filter_fn=filter_fn, feature_cfg=feature_cfg, **args)


HYBRID_SIZES = 32, 64, 224  # pixels


def cfg(size: int = 224, **kwargs: Any) -> Dict[str, Any]:
    return {
        'num_classes': 1000, 'input_size': (3, size, size), 'pool_size': None,
        'crop_pct': .9 if size == 224 else 1., 'interpolation': 'bicubic', 'fixed_input_size': True,
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'classifier': 'head',
        'paper_ids': 'arXiv:2111.01353', 'paper_name': 'Can Vision Transformers Perform Convolution?',
        **kwargs
    }


default_cfgs = generate_default_cfgs({
    **{f'cmhsa_{kind}{suffix}': cfg(size) for kind in ('conv_k3', 'conv_k5', 'attn', 'attn_soft')
       for suffix, size in (('', 224), ('_patch4_32', 32))},
    **{f'cmhsa_hybrid_{kind}_{size}': cfg(size) for kind in ('conv', 'attn') for size in HYBRID_SIZES},
    **{f'test_cmhsa_{kind}': cfg(32) for kind in ('conv_k3', 'attn')},
})

_PATCH4_32: Dict[str, Any] = dict(patch_size=4, hidden_chans=12)
_TEST: Dict[str, Any] = dict(patch_size=4, depth=4)
_HYBRID_32: Dict[str, Any] = dict(
    stem='24-64p-64-192p-192-192p', patch_size=8, hidden_chans=192, depth=1, mlp_ratio=2., mlp_layer='depthwise')
_HYBRID: Dict[str, Any] = dict(hidden_chans=96, depth=4, mlp_layer='depthwise')
_HYBRID_64 = dict(_HYBRID, stem='24p-48p-96p', patch_size=8)
_HYBRID_224 = dict(_HYBRID, stem='24p-48p-96p-96p', patch_size=16)
_SOFT: Dict[str, Any] = dict(num_heads=20, rel_pos='padded_table')
_WIDE_SOFT: Dict[str, Any] = dict(num_heads=10, qk_dim=16, rel_pos='padded_table')
HEADS: Dict[str, Dict[str, Any]] = {  # of the phase-2 models
    'cmhsa_attn': dict(num_heads=9),
    'cmhsa_attn_soft': dict(_SOFT, head_dim=96),
    'cmhsa_attn_patch4_32': dict(num_heads=9),
    'cmhsa_attn_soft_patch4_32': dict(_SOFT, head_dim=48),
    **{f'cmhsa_hybrid_attn_{size}': _WIDE_SOFT for size in HYBRID_SIZES},
    'test_cmhsa_attn': dict(num_heads=9),
}


def registered_hybrid(kind: str, img_size: Size2d) -> str:
    """Return the hybrid of a kind, 'conv' or 'attn', for the largest images that these are not smaller than."""
    size = max((size for size in HYBRID_SIZES if size <= min(to_2tuple(img_size))), default=HYBRID_SIZES[0])
    return f'cmhsa_hybrid_{kind}_{size}'


def registered_variant(
        kind: str, patch_size: Tuple[int, int], hidden_chans: int, stem: str, img_size: Size2d) -> str:
    """Return the registered model of a kind, such as 'cmhsa_attn', with such tokens, or with a stem for such images."""
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
    return create_cmhsa(CmhsaAttn, 'cmhsa_attn_soft', pretrained, kwargs)


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
    return create_cmhsa(CmhsaAttn, 'cmhsa_attn_soft_patch4_32', pretrained, kwargs, **_PATCH4_32)


@register_model
def cmhsa_hybrid_conv_32(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA hybrid, convolution phase: a stem of 6 convolutions, then a block on 4 x 4 tokens of width 192. """
    return create_cmhsa(CmhsaConv, 'cmhsa_hybrid_conv_32', pretrained, kwargs, **_HYBRID_32)


@register_model
def cmhsa_hybrid_conv_64(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA hybrid, convolution phase: a stem, then 4 blocks on 8 x 8 tokens of width 96. """
    return create_cmhsa(CmhsaConv, 'cmhsa_hybrid_conv_64', pretrained, kwargs, **_HYBRID_64)


@register_model
def cmhsa_hybrid_conv_224(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA hybrid, convolution phase: a stem, then 4 blocks on 14 x 14 tokens of width 96. """
    return create_cmhsa(CmhsaConv, 'cmhsa_hybrid_conv_224', pretrained, kwargs, **_HYBRID_224)


@register_model
def cmhsa_hybrid_attn_32(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA hybrid, self-attention phase: a stem of 6 convolutions, then a block on 4 x 4 tokens of width 192. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_hybrid_attn_32', pretrained, kwargs, **_HYBRID_32)


@register_model
def cmhsa_hybrid_attn_64(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA hybrid, self-attention phase: a stem, then 4 blocks on 8 x 8 tokens of width 96. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_hybrid_attn_64', pretrained, kwargs, **_HYBRID_64)


@register_model
def cmhsa_hybrid_attn_224(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA hybrid, self-attention phase: a stem, then 4 blocks on 14 x 14 tokens of width 96. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_hybrid_attn_224', pretrained, kwargs, **_HYBRID_224)


@register_model
def test_cmhsa_conv_k3(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA-3, convolution phase, for unit tests. """
    return create_cmhsa(CmhsaConv, 'test_cmhsa_conv_k3', pretrained, kwargs, kernel_size=3, **_TEST)


@register_model
def test_cmhsa_attn(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, for unit tests. """
    return create_cmhsa(CmhsaAttn, 'test_cmhsa_attn', pretrained, kwargs, **_TEST)
