"""Finds the phase-1 model that some tensors belong to, and checks that they are all there."""
import math
from typing import Any, Dict, Mapping, Optional, Tuple

import timm
import torch
from timm.layers import to_2tuple

from .cmhsa import CmhsaConv
from .files import CheckpointError
from .messages import one_line, shorten, shorten_names
from .untrusted import check_num_patches, checked_args

UNTOLD_ARGS = ('img_size', 'patch_size', 'in_chans', 'global_pool', 'fc_norm', 'norm_layer', 'act_layer')
DTYPES = {'float64': torch.float64, 'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def build_phase1(
        state_dict: Mapping[str, torch.Tensor],
        architecture: Optional[str] = None,
        pretrained_cfg: Optional[Mapping[str, Any]] = None,
        **known: Any,
) -> CmhsaConv:
    """Build the phase-1 model of these tensors. It holds these themselves, and not copies.

    The shapes of the tensors tell most of its arguments; `known` are some of `UNTOLD_ARGS`, with the image size. By
    default patches are square, and images have as many channels as a token carries, at most 3.
    """
    name, args = architecture or 'cmhsa_conv_k3', infer_model_args(state_dict, known)
    overlay = dict(pretrained_cfg or {})
    try:
        model = timm.create_model(name, **args, pretrained_cfg_overlay=overlay, device=torch.device('meta'))
        check_num_patches(model)
    except ValueError as e:
        raise CheckpointError(str(e)) from e
    except Exception as e:  # timm's layers raise many kinds
        raise CheckpointError(f'no {name} can be built with {args}: {one_line(e)}') from e
    if not isinstance(model, CmhsaConv):
        raise CheckpointError(f'the checkpoint says that it is of {name}, which is no phase-1 model (cmhsa_conv_*).')
    _check_tensors(state_dict, model.state_dict())
    model.load_state_dict(state_dict, assign=True)
    return model.eval()


def infer_model_args(state_dict: Mapping[str, torch.Tensor], known: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the arguments of a `CmhsaConv`, from the shapes of its tensors and from what is known."""
    _check_phase1(state_dict)
    kernel, embed_dim = state_dict['blocks.0.attn.conv.weight'], len(state_dict['blocks.0.norm1.weight'])
    chans = kernel.shape[0]
    told = {
        'hidden_chans': chans,
        'num_classes': state_dict['head.weight'].shape[0] if 'head.weight' in state_dict else 0,
        'depth': len({name.split('.')[1] for name in state_dict if name.startswith('blocks.')}),
        'mlp_ratio': mlp_ratio(state_dict['blocks.0.mlp.fc1.weight'].shape[0], embed_dim),
        'kernel_size': tuple(kernel.shape[2:]),
        'init_values': 1e-5 if 'blocks.0.ls1.gamma' in state_dict else None,  # these are in the tensors
    }
    try:
        checked_args(told)
    except ValueError as e:
        raise CheckpointError(f'the tensors are of no phase-1 model: {e}.') from e
    args = {'patch_size': math.isqrt(embed_dim // chans), 'in_chans': min(chans, 3), **known, **told}
    if math.prod(to_2tuple(args['patch_size'])) * chans != embed_dim:
        raise CheckpointError(
            f'tokens of width {embed_dim} (blocks.0.norm1.weight) with {chans} channels (blocks.0.attn.conv.weight) '
            f"are not patches of {args['patch_size']} pixels: give patch_size=HxW with H * W = {embed_dim // chans}.")
    return args


def told_by_user(model_kwargs: Optional[Mapping[str, Any]], **options: Any) -> Dict[str, Any]:
    """Return the arguments of the model in `model_kwargs`, and in `options` where they are not None."""
    told = dict(model_kwargs or {})
    for key, value in options.items():
        if value is not None and to_2tuple(told.setdefault(key, value)) != to_2tuple(value):
            raise CheckpointError(f'{key} was given twice, {told[key]} and {value}.')
    for key in told.keys() - set(UNTOLD_ARGS):
        raise CheckpointError(f'model_kwargs has {key}, where only {", ".join(UNTOLD_ARGS)} are left to tell.')
    try:
        return checked_args(told)
    except ValueError as e:
        raise CheckpointError(f'{e}.') from e


def matching_model(
        state_dict: Mapping[str, torch.Tensor],
        known: Mapping[str, Any],
        architecture: Optional[str] = None,
) -> Optional[str]:
    """Return a registered model with patches of this size: the architecture asked for, or the first of phase 1."""
    patch_size = to_2tuple(infer_model_args(state_dict, known)['patch_size'])
    for name in [*([architecture] if architecture else []), *timm.list_models('cmhsa_conv*')]:
        if timm.create_model(name, depth=1, device=torch.device('meta')).patch_embed.patch_size == patch_size:
            return name
    return None


def default_img_size(name: Optional[str]) -> Tuple[int, int]:
    """Return the image size of a registered model."""
    size = None if name is None else timm.get_pretrained_cfg_value(name, 'input_size')
    if size is None:
        raise CheckpointError('nothing tells the size of the images that the model was trained on: give img_size=N.')
    return size[1:]


def mlp_ratio(hidden_dim: int, embed_dim: int) -> float:
    """Return the ratio that gives this hidden width back, though timm multiplies and rounds down."""
    ratio = hidden_dim / embed_dim
    return ratio if int(embed_dim * ratio) == hidden_dim else math.nextafter(ratio, math.inf)


def _check_phase1(state_dict: Mapping[str, torch.Tensor]) -> None:
    if not any('.attn.conv.' in name for name in state_dict):
        kinds = {'.rel_pos.zero_key_bias': 'a phase-2 checkpoint, which is converted already',
                 '.attn.qkv.': 'a Vision Transformer such as ViT or DeiT', 'layer1.': 'a ResNet'}
        found = [kind for part, kind in kinds.items() if any(part in name for name in state_dict)]
        kind = [*found, f'none of ours; it holds {shorten_names(state_dict)}'][0]
        raise CheckpointError(f'not a phase-1 checkpoint (cmhsa_conv_*): it looks like {kind}.')
    needed = {'blocks.0.attn.conv.weight': 4, 'blocks.0.mlp.fc1.weight': 2, 'blocks.0.norm1.weight': 1}
    missing = [name for name in needed if name not in state_dict]
    if missing:
        raise CheckpointError(f'the phase-1 checkpoint has missing keys: {shorten_names(missing)}.')
    for name, ndim in {**needed, 'head.weight': 2}.items():
        tensor = state_dict.get(name)
        if tensor is not None and (tensor.ndim != ndim or not tensor.numel()):
            raise CheckpointError(
                f'{name} has shape {shorten(tuple(tensor.shape))}, where {ndim} dimensions were expected.')


def _check_tensors(state_dict: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    missing, unexpected = expected.keys() - state_dict.keys(), state_dict.keys() - expected.keys()
    for what, names in (('missing', missing), ('unexpected', unexpected)):
        if names:
            raise CheckpointError(f'the phase-1 checkpoint has {what} keys: {shorten_names(names)}.')
    for name, tensor in state_dict.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f'{name} has shape {shorten(tuple(tensor.shape))}, where the other tensors ask for '
                f'{tuple(expected[name].shape)}.')
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(f'{name} is of type {tensor.dtype}, where one of {", ".join(DTYPES)} was expected.')
        if not tensor.isfinite().all():
            raise CheckpointError(f'{name} holds NaN or Inf: the training diverged, take an earlier checkpoint.')
