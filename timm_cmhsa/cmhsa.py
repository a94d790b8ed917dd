"""Convolutionalized multi-head self-attention (CMHSA): Vision Transformers that can start as convolutional networks.

Paper: `Can Vision Transformers Perform Convolution?` - https://arxiv.org/abs/2111.01353

A token is a flattened P x P patch of C channels, so its width is d = P * P * C. Phase 1 (`CmhsaConv`) mixes tokens by
a convolution over the whole image, phase 2 (`CmhsaAttn`) by self-attention with relative position bias. Otherwise
both are timm's `VisionTransformer` without class token and position embedding, with global average pooling.
"""
import contextlib
import logging
import math
from numbers import Integral
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Type, Union

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerType, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from .attention import RelPosAttention
from .efficient import is_watched
from .encodings import POINTABLE, resize_offset_embed
from .messages import shorten_names
from .patch_conv import PatchConv2d
from .patches import PatchReshape, Size2d, unpatchify
from .rel_pos import OffsetRelPos, PaddedRelPosTable, RelPos, RelPosTable, exact_sharpness, padding_of, precise_dtype

__all__ = ['Cmhsa', 'CmhsaAttn', 'CmhsaConv']

_logger = logging.getLogger(__name__)


class CmhsaBlock(Block):
    """timm's block, which tells its attention what normalizes the tokens."""
    if TYPE_CHECKING:
        attn: Any  # TorchScript knows no such annotation

    def fuse(self) -> nn.Module:
        """Give the attention its form for inference, for `timm.utils.reparameterize_model`."""
        if hasattr(self.attn, 'fuse'):
            self.attn = self.attn.fuse(self.attn_norm())
        return self

    def attn_norm(self) -> Optional[nn.Module]:
        """Return what normalizes the input of the attention, None if a subclass or a hook may do otherwise."""
        if type(self) is not CmhsaBlock or is_watched(self) or is_watched(self.attn):
            return None
        return self.norm1


class Cmhsa(VisionTransformer):
    """Vision Transformer on raw patches, the base of both phases. Subclasses give every block its token mixer."""

    def __init__(
            self,
            img_size: Size2d = 224,
            patch_size: Size2d = 16,
            in_chans: int = 3,
            hidden_chans: int = 3,
            num_classes: int = 1000,
            global_pool: str = 'avg',
            fc_norm: Optional[bool] = False,
            depth: int = 6,
            mlp_ratio: float = 4.,
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
            hidden_chans: Channels per pixel that a token carries, C; at least `in_chans`. A token's width is P * P * C.
            num_classes: Number of classes for the classification head.
            global_pool: Type of global pooling of the final tokens.
            fc_norm: Normalize after the pooling instead of before.
            depth: Number of blocks.
            mlp_ratio: Ratio of MLP hidden width to token width.
            init_values: Initial values of layer scale; None for no layer scale.
            drop_rate: Head dropout rate.
            proj_drop_rate: Dropout rate of token mixers and MLPs.
            attn_drop_rate: Dropout rate of the attention weights; phase 1 has none.
            drop_path_rate: Stochastic depth rate.
            norm_layer: Normalization layer.
            act_layer: MLP activation layer.

        Raises:
            ValueError: If the image is not divisible by the patch, or has more channels than a token carries.
        """
        _check_divisible(img_size, patch_size)
        if global_pool == 'token':
            raise ValueError("global_pool='token' needs a class token, which these models have not: use 'avg'.")
        if in_chans < 1 or hidden_chans < 1 or depth < 1:
            raise ValueError(f'{in_chans=}, {hidden_chans=} and {depth=} must be positive.')
        if in_chans > hidden_chans:
            raise ValueError(
                f'in_chans={in_chans} image channels do not fit into hidden_chans={hidden_chans} token channels: '
                f'set hidden_chans to {in_chans} or more.')
        embed_dim = math.prod(to_2tuple(patch_size)) * hidden_chans
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=math.gcd(embed_dim, 12),  # of global_pool='map'
            mlp_ratio=mlp_ratio,
            init_values=init_values,
            class_token=False,
            pos_embed='none',
            fc_norm=fc_norm,
            drop_rate=drop_rate,
            proj_drop_rate=proj_drop_rate,
            drop_path_rate=drop_path_rate,
            norm_layer=norm_layer,
            act_layer=act_layer,
            block_fn=CmhsaBlock,
            attn_layer=nn.Identity,  # a place for the subclass's token mixer
            device=device,
            dtype=dtype,
        )
        self.in_chans, self.hidden_chans = in_chans, hidden_chans
        self.fixed_args = dict(
            patch_size=to_2tuple(patch_size), in_chans=in_chans, hidden_chans=hidden_chans, mlp_ratio=mlp_ratio,
            init_values=init_values, fc_norm=fc_norm, norm_layer=norm_layer, act_layer=act_layer)
        self.drop_rates = dict(
            drop_rate=drop_rate, proj_drop_rate=proj_drop_rate, attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate)

    def model_args(self) -> Dict[str, Any]:
        """Return the arguments of `timm.create_model` for a model of the present shape."""
        return dict(
            self.fixed_args, img_size=self.patch_embed.img_size, num_classes=self.num_classes,
            global_pool=self.global_pool, depth=len(self.blocks))

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        return {name for name, _ in self.named_parameters() if '.rel_pos.' in name}

    def set_input_size(self, img_size: Optional[Size2d] = None, patch_size: Optional[Size2d] = None) -> None:
        """Change the input resolution, pixels; what is known of every offset between patches is kept.

        Raises:
            ValueError: If the image is not divisible by the patch, or the patch size would change.
            RuntimeError: If there is no memory for so many offsets. In all cases the model is left as it was.
        """
        if patch_size is not None and to_2tuple(patch_size) != self.patch_embed.patch_size:
            raise ValueError(
                f'patch_size={patch_size} would change the width of a token from {self.embed_dim}: '
                f'create a new model with that patch_size instead.')
        if img_size is not None:
            _check_divisible(img_size, self.patch_embed.patch_size)
        with unchanged_on_error(self):
            super().set_input_size(img_size=None if img_size is None else to_2tuple(img_size))
            for block in self.blocks:
                block.attn.set_grid_size(self.patch_embed.grid_size)

    def _pos_embed(self, x: torch.Tensor) -> torch.Tensor:
        return x  # There is none to add, and timm's method fails for an empty batch.


@contextlib.contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give every module its attributes, parameters and buffers back if an error leaves the block."""
    kinds = '_parameters', '_buffers', '_modules'
    before = [(module, {**vars(module), **{kind: dict(vars(module)[kind]) for kind in kinds}})
              for module in model.modules()]
    learned = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for parameter, is_learned in learned:
            parameter.requires_grad_(is_learned)
        raise


def _check_divisible(img_size: Size2d, patch_size: Size2d) -> None:
    for name, sides in (('img_size', to_2tuple(img_size)), ('patch_size', to_2tuple(patch_size))):
        if len(sides) != 2 or not all(isinstance(side, Integral) for side in sides):
            raise ValueError(f'{name}={sides} must be one or two whole numbers, height and width.')
    for size, patch in zip(to_2tuple(img_size), to_2tuple(patch_size)):
        if patch < 1 or size < patch or size % patch:
            raise ValueError(
                f'img_size={img_size} is not divisible by patch_size={patch_size}: use a multiple of the patch size.')


class CmhsaConv(Cmhsa):
    """Phase 1: every attention replaced by a K x K convolution over the whole image, the patch projection fixed."""

    def __init__(self, *, kernel_size: Size2d = 3, **kwargs: Any) -> None:
        """
        Args:
            kernel_size: Kernel of the convolutions, odd.
            **kwargs: See `Cmhsa`.
        """
        super().__init__(**kwargs)
        dd = {key: kwargs.get(key) for key in ('device', 'dtype')}
        patch_size, grid_size = self.patch_embed.patch_size, self.patch_embed.grid_size
        self.patch_embed.proj = PatchReshape(patch_size, self.in_chans, self.hidden_chans)
        for block in self.blocks:
            block.attn = PatchConv2d(
                self.embed_dim, patch_size, grid_size, kernel_size=kernel_size,
                proj_drop=self.drop_rates['proj_drop_rate'], **dd)

    def model_args(self) -> Dict[str, Any]:
        return dict(super().model_args(), kernel_size=self.blocks[0].attn.conv.kernel_size)


class CmhsaAttn(Cmhsa):
    """Phase 2: multi-head self-attention with relative position bias, the patch projection free to learn."""
    hard_attn = False

    def __init__(
            self,
            *,
            num_heads: Union[int, Sequence[int]] = 9,
            head_dim: Optional[int] = None,
            qkv_bias: bool = True,
            rel_pos: str = 'table',
            padding: Optional[Size2d] = None,
            hard_attn: bool = False,
            **kwargs: Any,
    ) -> None:
        """
        Args:
            num_heads: Number of heads, N_H, of every block or of each.
            head_dim: Width of a head, d_H; by default that of a token.
            qkv_bias: Give queries, keys and values a bias.
            rel_pos: Relative position encoding: 'table', 'padded_table', 'quadratic', 'quadratic_gen', 'learned' or
                'learned_content'.
            padding: Patches of padding that the zero key of a 'padded_table' stands for; by default one on every side.
            hard_attn: Compute heads as shifts, see `set_hard_attn`. They start at the offsets nearest to the query.
            **kwargs: See `Cmhsa`.
        """
        super().__init__(**kwargs)
        dd = {key: kwargs.get(key) for key in ('device', 'dtype')}
        for block, block_heads in zip(self.blocks, heads_of_blocks(num_heads, len(self.blocks))):
            block.attn = RelPosAttention(
                self.embed_dim,
                self.patch_embed.grid_size,
                num_heads=block_heads,
                head_dim=head_dim,
                qkv_bias=qkv_bias,
                attn_drop=self.drop_rates['attn_drop_rate'],
                proj_drop=self.drop_rates['proj_drop_rate'],
                rel_pos=rel_pos,
                padding=padding,
                **dd,
            )
        self.hard_attn = hard_attn
        if hard_attn:
            self._init_hard_attn()
        self.register_load_state_dict_post_hook(_find_shifts_again)

    def model_args(self) -> Dict[str, Any]:
        attn = self.blocks[0].attn
        if not isinstance(attn, RelPosAttention):
            raise ValueError('A model that was reparameterized for inference cannot be built anew: use its source.')
        return dict(
            super().model_args(), num_heads=common_num_heads(self.blocks), head_dim=attn.head_dim,
            qkv_bias=attn.qkv.bias is not None, rel_pos=attn.rel_pos.name,
            padding=padding_of(attn.rel_pos))

    def init_weights(self, mode: str = '', needs_reset: bool = True) -> None:
        super().init_weights(mode, needs_reset)
        init_patch_identity(self.patch_embed.proj)
        if self.hard_attn:
            self._init_hard_attn()

    @torch.no_grad()
    def _init_hard_attn(self) -> None:
        rel_pos = self.blocks[0].attn.rel_pos
        if rel_pos.name not in POINTABLE:
            raise ValueError(f'hard_attn=True needs heads with one offset: rel_pos={rel_pos.name!r} has none.')
        if _is_on_meta(self):
            return
        for attn in (block.attn for block in self.blocks):
            point_at_nearest(attn.rel_pos)
            for parameter in attn.qkv.parameters():  # queries are zero, as after a conversion
                parameter[:attn.attn_dim] = 0
        self.set_hard_attn()

    def set_hard_attn(self, enable: bool = True) -> None:
        """Compute the heads of all blocks as shifts, for training too, or as attention again.

        Shifts cost less. Parameters are the same for both, and so is the function, up to `certificates.MAX_LEAK` of
        the attention. While heads are shifts, biases are frozen and queries and keys do not learn; where attention is
        not to be fused (`TIMM_FUSED_ATTN=0`), the model computes attention all the same. Make the optimizer afterwards,
        and call this again after loading weights into single blocks.

        Raises:
            ValueError: If a head is no shift by proof, attention weights would be dropped, or the model was
                reparameterized. The model is left as it was.
        """
        if not all(isinstance(block.attn, RelPosAttention) for block in self.blocks):
            raise ValueError('A model that was reparameterized for inference cannot be trained: use its source.')
        shifts = [block.attn.hard_shifts(block.attn_norm()) if enable else None for block in self.blocks]
        for block, block_shifts in zip(self.blocks, shifts):
            block.attn.set_hard_attn(block_shifts)
        self.hard_attn = enable
        args: Optional[Dict[str, Any]] = getattr(self, '_model_args', None)
        if args is not None:  # what newer versions of timm make the model anew from
            self._model_args = {**args, 'hard_attn': enable}

    def set_input_size(self, img_size: Optional[Size2d] = None, patch_size: Optional[Size2d] = None) -> None:
        with unchanged_on_error(self):
            super().set_input_size(img_size, patch_size)
            if self.hard_attn and not _is_on_meta(self):
                self.set_hard_attn()  # which fails if on this grid heads leak too much


def _is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _find_shifts_again(model: nn.Module, incompatible_keys: Any) -> None:
    """Find the shifts of the weights that were loaded. Where heads are none, the model is attention again."""
    assert isinstance(model, CmhsaAttn)
    if not model.hard_attn or _is_on_meta(model):
        return
    try:
        model.set_hard_attn()
    except ValueError:
        model.set_hard_attn(False)
        raise


def point_at_nearest(rel_pos: OffsetRelPos) -> None:
    """Make every head attend to one offset, the nearest ones first."""
    reach = rel_pos.padding if isinstance(rel_pos, PaddedRelPosTable) else rel_pos.grid_size
    offsets = [(row, col) for row, col in rel_pos.offsets.tolist() if abs(row) <= reach[0] and abs(col) <= reach[1]]
    offsets.sort(key=lambda offset: (max(map(abs, offset)), offset))
    sharpness = exact_sharpness(math.prod(rel_pos.grid_size), precise_dtype(next(rel_pos.parameters()).dtype))
    for head in range(rel_pos.num_heads):
        rel_pos.point_head(head, [offsets[head % len(offsets)]], sharpness)


def heads_of_blocks(num_heads: Union[int, Sequence[int]], depth: int) -> List[int]:
    """Return the number of heads of each block, given one for all or a list."""
    heads = [int(num_heads)] * depth if isinstance(num_heads, (int, Integral)) else list(num_heads)
    if len(heads) != depth:
        raise ValueError(f'num_heads={num_heads} has {len(heads)} numbers for depth={depth} blocks: give one for each.')
    return heads


def common_num_heads(blocks: nn.Sequential) -> Union[int, List[int]]:
    """Return the number of heads that all blocks have, or else the list of their numbers."""
    heads: List[int] = [block.get_submodule('attn').num_heads for block in blocks]  # type: ignore[misc]
    return heads[0] if len(set(heads)) == 1 else heads


@torch.no_grad()
def init_patch_identity(proj: nn.Conv2d) -> None:
    """Make a patch projection, of weight (d, in_chans, P_h, P_w), compute what phase 1's reshape does."""
    embed_dim, in_chans, *patch_size = proj.weight.shape
    one_hot_tokens = torch.eye(embed_dim, device=proj.weight.device, dtype=proj.weight.dtype).unsqueeze(1)
    proj.weight.copy_(unpatchify(one_hot_tokens, (patch_size[0], patch_size[1]), (1, 1))[:, :in_chans])
    if proj.bias is not None:
        nn.init.zeros_(proj.bias)


def checkpoint_filter_fn(state_dict: Dict[str, torch.Tensor], model: Cmhsa) -> Dict[str, torch.Tensor]:
    """Pad or crop the bias tables, and embeddings of offsets, of a checkpoint made for another image size.

    Raises:
        ValueError: If its layers have other relative position encodings, or it is not known which grid a table is of.
    """
    check_encodings(state_dict, model)
    told_chans = model.pretrained_cfg['input_size'][0]
    if isinstance(model, CmhsaConv) and model.in_chans != told_chans:
        _logger.warning(
            'in_chans=%d, but the weights are of a configuration with %d channels: phase 1 has no projection to adapt, '
            'so each channel is taken for the one at its place.', model.in_chans, told_chans)
    grid_size, modules = model.patch_embed.grid_size, dict(model.named_modules())
    out_dict = {}
    for name, tensor in state_dict.items():
        if name.endswith('.rel_pos.row_embed'):
            tensor = resize_offset_embed(tensor, grid_size[0])
        elif name.endswith('.rel_pos.col_embed'):
            tensor = resize_offset_embed(tensor, grid_size[1])
        elif name.endswith('.relative_position_bias_table'):
            prefix = name.rpartition('.')[0]
            rel_pos = modules.get(prefix)
            if isinstance(rel_pos, RelPosTable):
                source_grid_size = _source_grid_size(model, len(tensor), rel_pos)
                if source_grid_size is not None and source_grid_size != grid_size:
                    scale = state_dict.get(f'{prefix}.bias_scale')
                    if scale is not None and scale.ndim:  # refused when it is loaded; here it could fill the memory
                        scale = None
                    tensor = rel_pos.resize_table(tensor, source_grid_size, grid_size, scale)
        out_dict[name] = tensor
    return out_dict


def check_encodings(state_dict: Dict[str, torch.Tensor], model: nn.Module) -> None:
    """Raise ValueError where a layer's encoding has other tensors than the model's: timm may load them non-strictly."""
    for name, module in model.named_modules():
        if isinstance(module, RelPos):
            expected = set(module.state_dict())
            found = {key.removeprefix(f'{name}.') for key in state_dict if key.startswith(f'{name}.')}
            if found and found != expected:
                raise ValueError(
                    f'{name} has {shorten_names(found)} in the checkpoint, and {shorten_names(expected)} in the model: '
                    'create the model with the rel_pos of the checkpoint.')


def _source_grid_size(model: Cmhsa, table_length: int, rel_pos: RelPosTable) -> Optional[Tuple[int, int]]:
    """Return the grid of a bias table: what its checkpoint says if that fits, else the model's, else a square one.

    Raises:
        ValueError: If a padded table is of a square one, or of one of the others with another padding.
    """
    source_size = getattr(model, 'pretrained_model_args', {}).get('img_size') or model.pretrained_cfg['input_size'][-2:]
    told = tuple(s // p for s, p in zip(to_2tuple(source_size), model.patch_embed.patch_size))
    side, (pad_h, pad_w) = (math.isqrt(table_length) + 1) // 2, rel_pos.padding

    def fits(grid_size: Tuple[int, int], padding: Tuple[int, int]) -> bool:
        rows, cols = (2 * (size + pad) - 1 for size, pad in zip(grid_size, padding))
        return rows * cols == table_length

    likely = told, model.patch_embed.grid_size
    for grid_size in likely:
        if fits(grid_size, rel_pos.padding):
            return grid_size
    if not fits((side - pad_h, side - pad_w), rel_pos.padding):
        return None
    paddings = [
        pad for grid_size in likely for pad in range(max(side - max(grid_size), 0), side - min(grid_size) + 1)
        if fits(grid_size, (pad, pad))]
    if paddings and isinstance(rel_pos, PaddedRelPosTable):
        raise ValueError(
            f'A table of {table_length} offsets may have padding={paddings[0]} or be of an image of another size: give '
            'the padding of the checkpoint, or its size, pretrained_cfg_overlay=dict(input_size=(C, H, W)).')
    return side - pad_h, side - pad_w


def create_cmhsa(cls: Type[Cmhsa], variant: str, pretrained: bool, kwargs: Dict[str, Any], **defaults: Any) -> Any:
    """Build a registered model; `kwargs` overrule the variant's `defaults`."""
    return build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop('out_indices', 3), feature_cls='getter'),
        **{**defaults, **kwargs},
    )


def cfg(**kwargs: Any) -> Dict[str, Any]:
    return {
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': None,
        'crop_pct': .9, 'interpolation': 'bicubic', 'fixed_input_size': True,
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'patch_embed.proj', 'classifier': 'head',
        'paper_ids': 'arXiv:2111.01353', 'paper_name': 'Can Vision Transformers Perform Convolution?',
        'license': 'apache-2.0',
        **kwargs
    }


_SMALL = dict(input_size=(3, 32, 32), crop_pct=1.0)
_CONV = dict(first_conv=())  # phase 1's projection has no weights to adapt to in_chans

default_cfgs = generate_default_cfgs({
    'cmhsa_conv_k3': cfg(**_CONV),
    'cmhsa_conv_k5': cfg(**_CONV),
    'cmhsa_attn': cfg(),
    'cmhsa_attn_16x96': cfg(),
    'cmhsa_attn_soft': cfg(),
    'cmhsa_attn_soft_20x96': cfg(),

    'cmhsa_conv_k3_patch4_32': cfg(**_CONV, **_SMALL),
    'cmhsa_conv_k5_patch4_32': cfg(**_CONV, **_SMALL),
    'cmhsa_attn_patch4_32': cfg(**_SMALL),
    'cmhsa_attn_16x48_patch4_32': cfg(**_SMALL),
    'cmhsa_attn_soft_patch4_32': cfg(**_SMALL),
    'cmhsa_attn_soft_20x48_patch4_32': cfg(**_SMALL),

    'test_cmhsa_conv_k3': cfg(**_CONV, **_SMALL),
    'test_cmhsa_attn': cfg(**_SMALL),
})

_PATCH4_32 = dict(patch_size=4, hidden_chans=12)
_TEST = dict(patch_size=4, depth=4)


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
def cmhsa_attn_16x96(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, with 16 thin heads of 96: as many as 3 x 3 and 5 x 5 convolutions need. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_attn_16x96', pretrained, kwargs, num_heads=16, head_dim=96)


@register_model
def cmhsa_attn_soft(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, with 10 heads of 768: as many as soft heads need. """
    return create_cmhsa(CmhsaAttn, 'cmhsa_attn_soft', pretrained, kwargs, num_heads=10, rel_pos='padded_table')


@register_model
def cmhsa_attn_soft_20x96(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, with 20 thin heads of 96: as many as soft heads need. """
    return create_cmhsa(
        CmhsaAttn, 'cmhsa_attn_soft_20x96', pretrained, kwargs, num_heads=20, head_dim=96, rel_pos='padded_table')


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
def cmhsa_attn_16x48_patch4_32(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, for 32 x 32 images: 6 blocks of width 192 with 16 thin heads of 48. """
    return create_cmhsa(
        CmhsaAttn, 'cmhsa_attn_16x48_patch4_32', pretrained, kwargs, num_heads=16, head_dim=48, **_PATCH4_32)


@register_model
def cmhsa_attn_soft_patch4_32(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, for 32 x 32 images: 6 blocks of width 192 with 10 soft heads of 192. """
    return create_cmhsa(
        CmhsaAttn, 'cmhsa_attn_soft_patch4_32', pretrained, kwargs, num_heads=10, rel_pos='padded_table', **_PATCH4_32)


@register_model
def cmhsa_attn_soft_20x48_patch4_32(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, for 32 x 32 images: 6 blocks of width 192 with 20 thin soft heads of 48. """
    return create_cmhsa(
        CmhsaAttn, 'cmhsa_attn_soft_20x48_patch4_32', pretrained, kwargs, num_heads=20, head_dim=48,
        rel_pos='padded_table', **_PATCH4_32)


@register_model
def test_cmhsa_conv_k3(pretrained: bool = False, **kwargs: Any) -> CmhsaConv:
    """ CMHSA-3, convolution phase, for unit tests. """
    return create_cmhsa(CmhsaConv, 'test_cmhsa_conv_k3', pretrained, kwargs, kernel_size=3, **_TEST)


@register_model
def test_cmhsa_attn(pretrained: bool = False, **kwargs: Any) -> CmhsaAttn:
    """ CMHSA, self-attention phase, for unit tests. """
    return create_cmhsa(CmhsaAttn, 'test_cmhsa_attn', pretrained, kwargs, **_TEST)
