"""Phase 1 in, phase 2 out: state dicts, and checkpoint files that are verified before they are written."""
import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import timm
import torch
from timm.layers import to_2tuple
from timm.models import clean_state_dict
from timm.models._hub import save_config_for_hf
from torch import nn

from .checkpoints import Checkpoint, CheckpointError, check_destination, read_checkpoint, write_checkpoint
from .cmhsa import CmhsaAttn, CmhsaConv, init_patch_identity
from .construction import conv2d_to_attention, exact_sharpness, plan_heads
from .hub import PREFIXES, download
from .model_card import training_details
from .patches import Size2d
from .phase1 import (
    DTYPES,
    KNOWN_ARGS,
    PHASE2_MODELS,
    default_img_size,
    grid_size,
    infer_model_args,
    load_conv,
    matching_model,
)
from .rel_pos import POINTED
from .verify import LayerReport, load_images, verify
from .version import __version__

TOLERANCE = 1e-4
NUM_RANDOM_IMAGES = 8
CONSTRUCTION = 'Theorem 1 of arXiv 2111.01353, with a zero key'
APPROXIMATION = f'approximate; {CONSTRUCTION}, and the singular vectors that the heads have room for'


class VerificationError(RuntimeError):
    """The converted model computes something else than its source; nothing was written."""


class ConversionReport(NamedTuple):
    """What a conversion did and how exact it is."""
    architecture: str
    model_args: Dict[str, Any]  # for `timm.create_model`
    img_size_source: str
    sharpness: float
    approximate: bool  # for want of heads
    layers: List[LayerReport]
    logits_error: float  # largest, relative to the source's largest logit
    logits_rms_error: float  # root mean square, relative to that of the source's logits
    top1_agreement: float  # share of the images
    num_random_images: int
    num_real_images: int
    source: Dict[str, str]  # what was converted
    training: Dict[str, str]  # how that had been trained, as far as it tells

    @property
    def max_error(self) -> float:
        return max([self.logits_error] + [layer.error for layer in self.layers])

    @property
    def construction(self) -> str:
        return APPROXIMATION if self.approximate else CONSTRUCTION

    @property
    def details(self) -> Dict[str, Any]:
        """How the model was made, by heading, for its model card."""
        details = {
            'Phase 1': self.source,
            'Construction': {
                'Rewrite': self.construction,
                'Heads used': ', '.join(f'{layer.heads_used} of {layer.num_heads}' for layer in self.layers),
                'Sharpness': f'{self.sharpness:.3g}',
                'Largest error of a layer': f'{max(layer.error for layer in self.layers):.1e} of its largest value',
                'Error of the logits': f'{self.logits_error:.1e} of the largest logit, {self.logits_rms_error:.1e} of '
                                       'their root mean square',
                'Top-1 agreement': f'{self.top1_agreement:.2%} on {self.num_random_images} random and '
                                   f'{self.num_real_images} real images',
            },
        }
        return {**details, 'Training of Phase 1': self.training} if self.training else details

    def __str__(self) -> str:
        height, width = self.model_args['img_size']
        patch_h, patch_w = to_2tuple(self.model_args['patch_size'])
        shape = (f"{self.model_args['in_chans']}-channel images of {height} x {width} pixels ({self.img_size_source}), "
                 f'patches of {patch_h} x {patch_w}')
        rows = [(layer.name, f'{layer.heads_used} of {layer.num_heads}', layer.error, layer.rms_error)
                for layer in self.layers]
        rows.append(('logits', '', self.logits_error, self.logits_rms_error))
        approximate = ', approximate' if self.approximate else ''
        return '\n'.join([
            f'{self.architecture}: {shape}, sharpness {self.sharpness:.3g}{approximate}',
            'layer          heads used   largest error   rms error',
            *(f'{name:<14} {heads:<12} {error:>13.1e} {rms_error:>11.1e}' for name, heads, error, rms_error in rows),
            f'top-1 agreement {self.top1_agreement:.2%} on {self.num_random_images} random and '
            f'{self.num_real_images} real images',
        ])


@torch.no_grad()
def convert_state_dict(
        state_dict: Dict[str, torch.Tensor],
        img_size: Optional[Size2d] = None,
        patch_size: Optional[Size2d] = None,
        in_chans: Optional[int] = None,
        num_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        sharpness: Optional[float] = None,
        approximate: bool = False,
        rel_pos: str = 'table',
) -> Dict[str, torch.Tensor]:
    """Rewrite the tensors of a phase-1 model as those of a phase-2 model that computes the same.

    The same tensors always give the same result: the random start of keys and spare heads has a fixed seed.

    Args:
        state_dict: Tensors of a `CmhsaConv`.
        img_size: Input image size, pixels; by default that of the registered model with tokens of this shape.
        patch_size: Pixels per patch side; by default the patches are square.
        in_chans: Number of image channels; by default as many as a token carries, at most 3.
        num_heads: Number of heads; by default 9, or as many as needed if `head_dim` is given or these are more (9 all
            the same where `approximate`).
        head_dim: Width of a head; by default that of a token.
        sharpness, approximate, rel_pos: See `conv2d_to_attention`.

    Returns:
        Tensors of a `CmhsaAttn`, of the same type.

    Raises:
        CheckpointError: If these are not the tensors of a phase-1 model, or there is no exact rewrite.
    """
    state_dict = clean_state_dict(state_dict)
    known = dict(img_size=img_size, patch_size=patch_size, in_chans=in_chans)
    args = infer_model_args(state_dict, {key: value for key, value in known.items() if value is not None})
    num_heads, head_dim = _choose_heads(args, (9, None), num_heads, head_dim, approximate)
    _check_rel_pos(rel_pos)
    return _rewrite(state_dict, args, num_heads, head_dim, sharpness, approximate, rel_pos)


def _rewrite(
        state_dict: Dict[str, torch.Tensor],
        args: Dict[str, Any],
        num_heads: int,
        head_dim: int,
        sharpness: Optional[float],
        approximate: bool,
        rel_pos: str,
) -> Dict[str, torch.Tensor]:
    converted = {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        like = state_dict['blocks.0.norm1.weight']
        proj = nn.Conv2d(args['in_chans'], len(like), to_2tuple(args['patch_size']))
        init_patch_identity(proj)
        for name, tensor in proj.state_dict().items():
            converted[f'patch_embed.proj.{name}'] = tensor.to(like)
        for name, tensor in state_dict.items():
            if '.attn.conv.' not in name:
                converted[name] = tensor.clone(memory_format=torch.contiguous_format)
            elif name.endswith('.weight'):
                prefix = name.removesuffix('conv.weight')
                conv = load_conv(tensor, state_dict[prefix + 'conv.bias'])
                attn = conv2d_to_attention(
                    conv, args['patch_size'], grid_size(args), num_heads, head_dim, sharpness, approximate, rel_pos)
                converted.update({prefix + key: value for key, value in attn.state_dict().items()})
    return converted


def _check_rel_pos(rel_pos: str) -> None:
    if rel_pos not in POINTED:
        raise CheckpointError(f'rel_pos={rel_pos!r} cannot express a convolution: use one of {", ".join(POINTED)}.')


def _choose_heads(
        args: Dict[str, Any],
        default: Tuple[int, Optional[int]],
        num_heads: Optional[int],
        head_dim: Optional[int],
        approximate: bool,
) -> Tuple[int, int]:
    """Number and width of the heads, where they were not asked for those of the model; the rewrite fits into them."""
    if num_heads is not None and num_heads < 1:
        raise CheckpointError(f'num_heads={num_heads} must be positive.')
    token_dim = math.prod(to_2tuple(args['patch_size'])) * args['hidden_chans']
    width = (default[1] or token_dim) if head_dim is None else head_dim
    needed = _heads_needed(args, None if approximate else num_heads, width)
    if num_heads is not None:
        return num_heads, width
    if head_dim is not None:
        return needed, width
    return default[0] if approximate else max(needed, default[0]), width


def _heads_needed(args: Dict[str, Any], num_heads: Optional[int], head_dim: int) -> int:
    """Number of heads of this width that an exact rewrite takes; refuses less."""
    weight = torch.empty(args['hidden_chans'], args['hidden_chans'], *args['kernel_size'], device='meta')
    conv = load_conv(weight, weight[:, 0, 0, 0])
    try:
        return len(plan_heads(conv, args['patch_size'], grid_size(args), num_heads, head_dim))
    except ValueError as e:
        raise CheckpointError(str(e)) from e


def convert_checkpoint(
        src: Union[str, Path],
        dst: Union[str, Path],
        *,
        model: Optional[str] = None,
        img_size: Optional[Size2d] = None,
        patch_size: Optional[Size2d] = None,
        in_chans: Optional[int] = None,
        num_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        sharpness: Optional[float] = None,
        approximate: bool = False,
        rel_pos: str = 'table',
        num_classes: Optional[int] = None,
        use_ema: bool = False,
        dtype: Optional[Union[str, torch.dtype]] = None,
        images: Optional[Union[str, Path]] = None,
        tolerance: Optional[float] = None,
        force: bool = False,
        describe: Optional[Callable[[CmhsaAttn, Path, ConversionReport], None]] = None,
) -> ConversionReport:
    """Rewrite a phase-1 checkpoint as a phase-2 checkpoint, verify that both compute the same, and write it.

    Args:
        src: Checkpoint of timm's `train.py`, state dict (pickled or safetensors), folder in its `local-dir:` layout,
            or model on the Hugging Face Hub, `hf-hub:USER/NAME` or `hf-hub:USER/NAME@revision`.
        dst: `.safetensors`, `.pth`, or a folder that `timm.create_model('local-dir:...', pretrained=True)` loads.
        model: Registered phase-2 model to convert to; by default the one with tokens of this shape.
        img_size: Input image size, pixels, where the checkpoint does not tell; by default the model's.
        patch_size: Pixels per patch side, where the checkpoint does not tell and the patches are not square.
        in_chans: Number of image channels, where the checkpoint does not tell; by default as many as a token carries,
            at most 3.
        num_heads: Number of heads; by default the model's, or as many as needed if `head_dim` is given or these are
            more (the model's all the same where `approximate`).
        head_dim: Width of a head; by default the model's: that of a token, if it is no model of thin heads.
        sharpness, approximate, rel_pos: See `conv2d_to_attention`.
        num_classes: Refuse a checkpoint with another number of classes.
        use_ema: Convert the averaged weights of a training checkpoint.
        dtype: Type of the written tensors; by default the source's.
        images: Folder of images to verify on besides random ones; the first 64 are taken.
        tolerance: Largest accepted error of the logits and of any layer's output, relative to the largest value; by
            default 1e-4, and any where the rewrite is approximate.
        force: Overwrite an existing destination.
        describe: Writes config.json, and what else belongs there, into a folder; by default config.json alone.

    Returns:
        What was done, and the measured errors.

    Raises:
        CheckpointError: If the input is bad or the output cannot be written. Nothing was written.
        HubError: If the input cannot be had from the Hub. Nothing was written.
        VerificationError: If the error is above the tolerance. Nothing was written.
    """
    _check_rel_pos(rel_pos)
    path, dst = locate(src), Path(dst).resolve()
    check_destination(dst, path, force)
    source = read_checkpoint(path, use_ema)
    args, img_size_source = _source_args(source, model, img_size, patch_size, in_chans)
    if num_classes is not None and num_classes != args['num_classes']:
        raise CheckpointError(f"the checkpoint has {args['num_classes']} classes, where {num_classes} were expected.")
    architecture = model or matching_model(args)
    attn_args = dict(_attn_args(args, architecture, num_heads, head_dim, approximate), rel_pos=rel_pos)
    state_dict = source.state_dict if dtype is None else _cast(source.state_dict, dtype)

    # Rounding to the written type is done by now: what is measured below, in full precision, is the rewrite alone.
    compute_dtype = torch.promote_types(torch.float32, state_dict['blocks.0.norm1.weight'].dtype)
    if sharpness is None:
        sharpness = exact_sharpness(math.prod(grid_size(args)), compute_dtype)
    approximate = approximate and _heads_needed(args, None, attn_args['head_dim']) > attn_args['num_heads']
    converted = _rewrite(
        state_dict, args, attn_args['num_heads'], attn_args['head_dim'], sharpness, approximate, rel_pos)
    conv_model = CmhsaConv(**args, dtype=compute_dtype).eval()
    conv_model.load_state_dict(state_dict)
    attn_model = timm.create_model(
        architecture, **attn_args, dtype=compute_dtype, pretrained_cfg_overlay=_pretrained_cfg(source, args)).eval()
    attn_model.load_state_dict(converted)

    generator = torch.Generator().manual_seed(0)
    random_images = torch.randn(NUM_RANDOM_IMAGES, args['in_chans'], *args['img_size'], generator=generator)
    real_images = random_images[:0] if images is None else load_images(Path(images), attn_model)
    layers, logits_errors, top1_agreement = verify(
        conv_model, attn_model, torch.cat([random_images, real_images]).to(compute_dtype))
    report = ConversionReport(
        architecture, attn_args, img_size_source, sharpness, approximate, layers, *logits_errors, top1_agreement,
        len(random_images), len(real_images), _source_details(src, source, args),
        training_details(source.training_args))
    if tolerance is None:
        tolerance = math.inf if approximate else TOLERANCE
    if not report.max_error <= tolerance:
        raise VerificationError(
            f'{report}\nerror {report.max_error:.1e} is above the tolerance of {tolerance:.1e}: nothing was written.')
    describe = describe or _save_config
    write_checkpoint(dst, converted, _metadata(report, source), lambda folder: describe(attn_model, folder, report))
    return report


def _save_config(model: CmhsaAttn, folder: Path, report: ConversionReport) -> None:
    save_config_for_hf(model, folder / 'config.json', model_args=report.model_args)


def locate(src: Union[str, Path]) -> Path:
    """File or folder of a source, fetched from the Hub if it is there.

    Raises:
        HubError: If it cannot be had.
    """
    src = str(src)
    return (download(src) if src.startswith(PREFIXES) else Path(src.removeprefix('local-dir:'))).resolve()


def _source_details(src: Union[str, Path], source: Checkpoint, args: Dict[str, Any]) -> Dict[str, str]:
    src = str(src)
    details = {
        'Checkpoint': src if src.startswith(PREFIXES) else Path(src).name,  # other folders are nobody's business
        'SHA-256': source.sha256,
        'Token mixer': '{} x {} convolution'.format(*args['kernel_size']),
    }
    return {'Architecture': source.architecture, **details} if source.architecture else details


def _source_args(source: Checkpoint, model: Optional[str], *asked: Any) -> Tuple[Dict[str, Any], str]:
    """Arguments of the phase-1 model, from all that is known of it, and where its image size is from.

    Args:
        source: The phase-1 checkpoint.
        model: Phase-2 model asked for, if any.
        asked: Image size, patch size and image channels asked for, None where they are not.
    """
    known = {key: source.model_args[key] for key in KNOWN_ARGS if source.model_args.get(key) is not None}
    origin = 'from the checkpoint' if 'img_size' in known else 'as asked for'
    for key, value in zip(('img_size', 'patch_size', 'in_chans'), asked):
        if value is not None and to_2tuple(known.setdefault(key, value)) != to_2tuple(value):
            raise CheckpointError(f'the checkpoint was trained with {key}={known[key]}, where {value} was asked for.')
    if 'img_size' not in known:
        default = next((name for name in (source.architecture, model) if name and timm.is_model(name)), None)
        default = default or matching_model(infer_model_args(source.state_dict, known))
        known['img_size'], origin = default_img_size(default), f'default of {default}'
    return infer_model_args(source.state_dict, known), origin


def _attn_args(
        args: Dict[str, Any],
        architecture: str,
        num_heads: Optional[int],
        head_dim: Optional[int],
        approximate: bool,
) -> Dict[str, Any]:
    """Arguments of `timm.create_model` for the phase-2 model."""
    choices = timm.list_models(PHASE2_MODELS)
    if architecture not in choices:
        raise CheckpointError(f'{architecture} is not a phase-2 model: choose one of {", ".join(choices)}.')
    model = timm.create_model(architecture, device=torch.device('meta'))
    attn = model.blocks[0].attn
    default = attn.num_heads, None if attn.head_dim == model.embed_dim else attn.head_dim
    token_dim = math.prod(to_2tuple(args['patch_size'])) * args['hidden_chans']
    if default[1] is not None and head_dim is None and model.embed_dim != token_dim:
        raise CheckpointError(
            f'{architecture} has tokens of width {model.embed_dim}, the checkpoint of {token_dim}: choose a model of '
            f'that width, or {matching_model(args)} and the width of its heads (head_dim).')
    num_heads, head_dim = _choose_heads(args, default, num_heads, head_dim, approximate)
    shared = {key: value for key, value in args.items() if key != 'kernel_size'}
    return {**shared, 'num_heads': num_heads, 'head_dim': head_dim}


def _cast(state_dict: Dict[str, torch.Tensor], dtype: Union[str, torch.dtype]) -> Dict[str, torch.Tensor]:
    dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise CheckpointError(f'dtype {dtype} is none of {", ".join(DTYPES)}.')
    cast = {name: tensor.to(dtype) for name, tensor in state_dict.items()}
    for name, tensor in cast.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f'{name} has values that do not fit into {dtype}: choose another dtype.')
    return cast


def _pretrained_cfg(source: Checkpoint, args: Dict[str, Any]) -> Dict[str, Any]:
    return {
        **source.pretrained_cfg,
        'input_size': (args['in_chans'], *args['img_size']),
        'num_classes': args['num_classes'],
    }


def _metadata(report: ConversionReport, source: Checkpoint) -> Dict[str, str]:
    return {
        'format': 'pt',
        'architecture': report.architecture,
        'model_args': json.dumps(report.model_args),
        'construction': report.construction,
        'source_sha256': source.sha256,
        'sharpness': str(report.sharpness),
        'heads_used': ', '.join(str(layer.heads_used) for layer in report.layers),
        'max_error': str(report.max_error),
        'logits_error': str(report.logits_error),
        'timm_cmhsa_version': __version__,
        'timm_version': timm.__version__,
        'torch_version': str(torch.__version__),
    }
