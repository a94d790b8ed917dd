"""What the tensors of a phase-1 model say of it, and whether they are those of one."""
import math
from typing import Any, Dict, Tuple

import timm
import torch
from timm.layers import to_2tuple
from torch import nn

from .checkpoints import CheckpointError
from .cmhsa import CmhsaConv

DTYPES = {'float64': torch.float64, 'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
KNOWN_ARGS = ('img_size', 'patch_size', 'in_chans', 'global_pool', 'fc_norm', 'norm_layer', 'act_layer')
PHASE2_MODELS = '*cmhsa_attn*'


def infer_model_args(state_dict: Dict[str, torch.Tensor], known: Dict[str, Any]) -> Dict[str, Any]:
    """Read the arguments of a `CmhsaConv` from its tensors, and check that these fit together.

    Args:
        state_dict: Tensors of a `CmhsaConv`.
        known: Arguments that tensors do not tell, such as the image size.

    Returns:
        Arguments of `CmhsaConv`.

    Raises:
        CheckpointError: If these are not the tensors of a phase-1 model, or NaN or Inf is among them.
    """
    _check_phase1(state_dict)
    kernel, embed_dim = state_dict['blocks.0.attn.conv.weight'], len(state_dict['blocks.0.norm1.weight'])
    chans = kernel.shape[0]
    args = {'patch_size': math.isqrt(embed_dim // chans), 'in_chans': min(chans, 3), **known}
    args.update(
        hidden_chans=chans,
        num_classes=state_dict['head.weight'].shape[0] if 'head.weight' in state_dict else 0,
        depth=len({name.split('.')[1] for name in state_dict if name.startswith('blocks.')}),
        mlp_ratio=mlp_ratio(state_dict['blocks.0.mlp.fc1.weight'].shape[0], embed_dim),
        kernel_size=tuple(kernel.shape[2:]),
    )
    if math.prod(to_2tuple(args['patch_size'])) * chans != embed_dim:
        raise CheckpointError(
            f'tokens of width {embed_dim} (blocks.0.norm1.weight) with {chans} channels (blocks.0.attn.conv.weight) '
            f"are not patches of {args['patch_size']} pixels a side: give the patch size.")
    args.setdefault('img_size', default_img_size(matching_model(args)))
    args['img_size'] = to_2tuple(args['img_size'])
    _check_tensors(state_dict, args)
    return args


def _check_phase1(state_dict: Dict[str, torch.Tensor]) -> None:
    needed = {'blocks.0.attn.conv.weight': 4, 'blocks.0.mlp.fc1.weight': 2, 'blocks.0.norm1.weight': 1}
    missing = [name for name in needed if name not in state_dict]
    if missing and any('.attn.conv.' in name for name in state_dict):
        raise CheckpointError(f'the phase-1 checkpoint has missing keys: {", ".join(missing)}.')
    if missing:
        raise CheckpointError(f'not a phase-1 checkpoint (cmhsa_conv_*): it looks like {_describe(state_dict)}.')
    for name, ndim in {**needed, 'head.weight': 2}.items():
        tensor = state_dict.get(name)
        if tensor is not None and (tensor.ndim != ndim or not tensor.numel()):
            raise CheckpointError(f'{name} has shape {tuple(tensor.shape)}, where {ndim} dimensions were expected.')


def _describe(state_dict: Dict[str, torch.Tensor]) -> str:
    if any('.rel_pos.zero_key_bias' in name for name in state_dict):
        return 'a phase-2 checkpoint, which is converted already'
    if any('.attn.qkv.' in name for name in state_dict):
        return 'a Vision Transformer such as ViT or DeiT'
    if any(name.startswith('layer1.') for name in state_dict):
        return 'a ResNet'
    return f'none of ours; it starts with {", ".join(list(state_dict)[:3])}'


def _check_tensors(state_dict: Dict[str, torch.Tensor], args: Dict[str, Any]) -> None:
    try:
        expected = CmhsaConv(**args, device=torch.device('meta')).state_dict()
    except ValueError as e:
        raise CheckpointError(str(e)) from e
    except (TypeError, KeyError, AttributeError, AssertionError, RuntimeError) as e:
        raise CheckpointError(f'no phase-1 model can be built with {args}: {e}') from e
    missing, unexpected = expected.keys() - state_dict.keys(), state_dict.keys() - expected.keys()
    for what, names in (('missing', missing), ('unexpected', unexpected)):
        if names:
            raise CheckpointError(f'the phase-1 checkpoint has {what} keys: {", ".join(sorted(names))}.')
    for name, tensor in state_dict.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f'{name} has shape {tuple(tensor.shape)}, where the other tensors ask for '
                f'{tuple(expected[name].shape)}.')
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(f'{name} is of type {tensor.dtype}, where one of {", ".join(DTYPES)} was expected.')
        if not tensor.isfinite().all():
            raise CheckpointError(f'{name} holds NaN or Inf: the training diverged, take an earlier checkpoint.')


def mlp_ratio(hidden_dim: int, embed_dim: int) -> float:
    """The ratio that gives this hidden width back, though timm multiplies and rounds down."""
    ratio = hidden_dim / embed_dim
    return ratio if int(embed_dim * ratio) == hidden_dim else math.nextafter(ratio, math.inf)


def matching_model(args: Dict[str, Any]) -> str:
    """The registered phase-2 model with tokens of this shape and heads as wide as they, or else `cmhsa_attn`."""
    for name in timm.list_models(PHASE2_MODELS):
        model = timm.create_model(name, device=torch.device('meta'))
        shape = model.patch_embed.patch_size, model.hidden_chans, model.blocks[0].attn.head_dim
        if shape == (to_2tuple(args['patch_size']), args['hidden_chans'], model.embed_dim):
            return name
    return 'cmhsa_attn'


def default_img_size(model_name: str) -> Tuple[int, int]:
    return tuple(timm.get_pretrained_cfg_value(model_name, 'input_size')[1:])


def grid_size(args: Dict[str, Any]) -> Tuple[int, int]:
    height, width = (s // p for s, p in zip(args['img_size'], to_2tuple(args['patch_size'])))
    return height, width


def load_conv(weight: torch.Tensor, bias: torch.Tensor) -> nn.Conv2d:
    """The convolution of a `PatchConv2d` with these tensors."""
    chans_out, chans_in, height, width = weight.shape
    conv = nn.Conv2d(chans_in, chans_out, (height, width), padding=(height // 2, width // 2), device='meta')
    conv.load_state_dict({'weight': weight, 'bias': bias}, assign=True)
    return conv
