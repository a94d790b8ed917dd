"""Phase 1 in, phase 2 out: state dicts, and checkpoint files that are verified before they are written."""
import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import timm
import torch
from timm.layers import to_2tuple
from timm.models._hub import save_config_for_hf
from torch import nn

from .checkpoints import Checkpoint, CheckpointError, check_destination, read_checkpoint, write_checkpoint
from .cmhsa import CmhsaConv, init_patch_identity
from .construction import conv2d_to_attention, exact_sharpness, plan_heads
from .token_mixers import Size2d
from .verify import LayerReport, load_images, verify
from .version import __version__

TOLERANCE = 1e-4
NUM_RANDOM_IMAGES = 8
KNOWN_ARGS = ('img_size', 'patch_size', 'in_chans', 'global_pool', 'norm_layer', 'act_layer')
DTYPES = {'float64': torch.float64, 'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


class VerificationError(RuntimeError):
    """The converted model computes something else than its source; nothing was written."""


class ConversionReport(NamedTuple):
    """What a conversion did and how exact it is."""
    architecture: str
    model_args: Dict[str, Any]  # for `timm.create_model`
    img_size_source: str
    sharpness: float
    layers: List[LayerReport]
    logits_error: float  # largest, relative to the source's largest logit
    top1_agreement: float  # share of the images
    num_random_images: int
    num_real_images: int

    @property
    def max_error(self) -> float:
        return max([self.logits_error] + [layer.error for layer in self.layers])

    def __str__(self) -> str:
        height, width = self.model_args['img_size']
        table = [('layer', 'heads used', 'largest error')]
        table += [(layer.name, f'{layer.heads_used} of {layer.num_heads}', f'{layer.error:.1e}')
                  for layer in self.layers]
        table += [('logits', '', f'{self.logits_error:.1e}')]
        return '\n'.join([
            f'{self.architecture}, {height} x {width} pixels ({self.img_size_source}), sharpness {self.sharpness:.3g}',
            *(f'{name:<14} {heads:<12} {error:>13}' for name, heads, error in table),
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
) -> Dict[str, torch.Tensor]:
    """Rewrite the tensors of a phase-1 model as those of a phase-2 model that computes the same.

    The same tensors always give the same result: the random start of keys and spare heads has a fixed seed.

    Args:
        state_dict: Tensors of a `CmhsaConv`.
        img_size: Input image size, pixels; by default that of the registered model with tokens of this shape.
        patch_size: Pixels per patch side; by default the patches are square.
        in_chans: Number of image channels; by default as many as a token carries, at most 3.
        num_heads: Number of heads; by default 9, or as many as needed if these are more or `head_dim` is given.
        head_dim: Width of a head; by default that of a token.
        sharpness: See `conv2d_to_attention`.

    Returns:
        Tensors of a `CmhsaAttn`, of the same type.

    Raises:
        CheckpointError: If these are not the tensors of a phase-1 model, or there is no exact rewrite.
    """
    known = dict(img_size=img_size, patch_size=patch_size, in_chans=in_chans)
    args = infer_model_args(state_dict, {key: value for key, value in known.items() if value is not None})
    num_heads = num_heads or _default_num_heads(args, 9, head_dim)
    converted = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        proj = nn.Conv2d(args['in_chans'], state_dict['norm.weight'].numel(), to_2tuple(args['patch_size']))
        init_patch_identity(proj)
        for name, tensor in proj.state_dict().items():
            converted[f'patch_embed.proj.{name}'] = tensor.to(state_dict['norm.weight'])
        for name, tensor in state_dict.items():
            if '.attn.conv.' not in name:
                converted[name] = tensor.clone()
            elif name.endswith('.weight'):
                prefix = name.removesuffix('conv.weight')
                conv = _load_conv(tensor, state_dict[prefix + 'conv.bias'])
                try:
                    attn = conv2d_to_attention(
                        conv, args['patch_size'], _grid_size(args), num_heads, head_dim, sharpness)
                except ValueError as e:
                    raise CheckpointError(str(e)) from e
                converted.update({prefix + key: value for key, value in attn.state_dict().items()})
    return converted


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
    kernel = state_dict['blocks.0.attn.conv.weight']
    chans, embed_dim = kernel.shape[0], state_dict['norm.weight'].numel()
    side = math.isqrt(embed_dim // chans)
    args = {'patch_size': side, 'in_chans': min(chans, 3), **known}
    args.update(
        hidden_chans=chans,
        num_classes=state_dict['head.weight'].shape[0] if 'head.weight' in state_dict else 0,
        depth=len({name.split('.')[1] for name in state_dict if name.startswith('blocks.')}),
        mlp_ratio=_mlp_ratio(state_dict['blocks.0.mlp.fc1.weight'].shape[0], embed_dim),
        kernel_size=tuple(kernel.shape[2:]),
    )
    if math.prod(to_2tuple(args['patch_size'])) * chans != embed_dim:
        raise CheckpointError(
            f'tokens of width {embed_dim} (norm.weight) with {chans} channels (blocks.0.attn.conv.weight) are not '
            f"patches of {args['patch_size']} pixels a side.")
    args.setdefault('img_size', default_img_size(matching_model(args)))
    args['img_size'] = to_2tuple(args['img_size'])
    _check_tensors(state_dict, args)
    return args


def _check_phase1(state_dict: Dict[str, torch.Tensor]) -> None:
    needed = ('blocks.0.attn.conv.weight', 'blocks.0.mlp.fc1.weight', 'norm.weight')
    missing = [name for name in needed if name not in state_dict]
    if not missing:
        return
    if len(missing) < len(needed) and any('.attn.conv.' in name for name in state_dict):
        raise CheckpointError(f'the phase-1 checkpoint has missing keys: {", ".join(missing)}.')
    if any('.rel_pos.zero_key_bias' in name for name in state_dict):
        what = 'a phase-2 checkpoint, which is converted already'
    elif any('.attn.qkv.' in name for name in state_dict):
        what = 'a Vision Transformer such as ViT or DeiT'
    elif any(name.startswith('layer1.') for name in state_dict):
        what = 'a ResNet'
    else:
        what = f'none of ours; it starts with {", ".join(list(state_dict)[:3])}'
    raise CheckpointError(f'not a phase-1 checkpoint (cmhsa_conv_*): it looks like {what}.')


def _check_tensors(state_dict: Dict[str, torch.Tensor], args: Dict[str, Any]) -> None:
    try:
        expected = CmhsaConv(**args, device=torch.device('meta')).state_dict()
    except ValueError as e:
        raise CheckpointError(str(e)) from e
    missing, unexpected = expected.keys() - state_dict.keys(), state_dict.keys() - expected.keys()
    for what, names in (('missing', missing), ('unexpected', unexpected)):
        if names:
            raise CheckpointError(f'the phase-1 checkpoint has {what} keys: {", ".join(sorted(names))}.')
    for name, tensor in state_dict.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f'{name} has shape {tuple(tensor.shape)}, where the other tensors ask for '
                f'{tuple(expected[name].shape)}.')
        if not tensor.isfinite().all():
            raise CheckpointError(f'{name} holds NaN or Inf: the training diverged, take an earlier checkpoint.')


def _mlp_ratio(hidden_dim: int, embed_dim: int) -> float:
    ratio = hidden_dim / embed_dim
    return ratio if int(embed_dim * ratio) == hidden_dim else math.nextafter(ratio, math.inf)  # timm rounds down


def matching_model(args: Dict[str, Any]) -> str:
    """The registered phase-2 model with tokens of this shape, or else `cmhsa_attn`."""
    for name in timm.list_models('*cmhsa_attn*'):
        model = timm.create_model(name, device=torch.device('meta'))
        shape = model.patch_embed.patch_size, model.hidden_chans, len(model.blocks)
        if shape == (to_2tuple(args['patch_size']), args['hidden_chans'], args['depth']):
            return name
    return 'cmhsa_attn'


def default_img_size(model_name: str) -> Tuple[int, int]:
    return tuple(timm.get_pretrained_cfg_value(model_name, 'input_size')[1:])


def _grid_size(args: Dict[str, Any]) -> Tuple[int, int]:
    height, width = (s // p for s, p in zip(args['img_size'], to_2tuple(args['patch_size'])))
    return height, width


def _load_conv(weight: torch.Tensor, bias: torch.Tensor) -> nn.Conv2d:
    chans_out, chans_in, height, width = weight.shape
    conv = nn.Conv2d(chans_in, chans_out, (height, width), padding=(height // 2, width // 2), device='meta')
    conv.load_state_dict({'weight': weight, 'bias': bias}, assign=True)
    return conv


def _default_num_heads(args: Dict[str, Any], model_num_heads: int, head_dim: Optional[int]) -> int:
    weight = torch.empty(args['hidden_chans'], args['hidden_chans'], *args['kernel_size'], device='meta')
    conv = _load_conv(weight, weight[:, 0, 0, 0])
    needed = len(plan_heads(conv, args['patch_size'], _grid_size(args), head_dim=head_dim))
    return needed if head_dim else max(needed, model_num_heads)


def convert_checkpoint(
        src: Union[str, Path],
        dst: Union[str, Path],
        *,
        model: Optional[str] = None,
        img_size: Optional[Size2d] = None,
        in_chans: Optional[int] = None,
        num_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        sharpness: Optional[float] = None,
        num_classes: Optional[int] = None,
        use_ema: bool = False,
        dtype: Optional[Union[str, torch.dtype]] = None,
        images: Optional[Union[str, Path]] = None,
        tolerance: float = TOLERANCE,
        force: bool = False,
) -> ConversionReport:
    """Rewrite a phase-1 checkpoint as a phase-2 checkpoint, verify that both compute the same, and write it.

    Args:
        src: Checkpoint of timm's `train.py`, state dict (pickled or safetensors), or folder in its `local-dir:` layout.
        dst: `.safetensors`, `.pth`, or a folder that `timm.create_model('local-dir:...', pretrained=True)` loads.
        model: Registered phase-2 model to convert to; by default the one with tokens of this shape.
        img_size: Input image size, pixels, where the checkpoint does not tell; by default the model's.
        in_chans: Number of image channels, where the checkpoint does not tell.
        num_heads: Number of heads; by default the model's, or as many as needed if these are more or `head_dim` is
            given.
        head_dim: Width of a head; by default that of a token.
        sharpness: See `conv2d_to_attention`.
        num_classes: Refuse a checkpoint with another number of classes.
        use_ema: Convert the averaged weights of a training checkpoint.
        dtype: Type of the written tensors; by default the source's.
        images: Folder of images to verify on besides random ones; the first 64 are taken.
        tolerance: Largest accepted error of the logits and of any layer's output, relative to the largest value.
        force: Overwrite an existing destination.

    Returns:
        What was done, and the measured errors.

    Raises:
        CheckpointError: If the input is bad or the output cannot be written. Nothing was written.
        VerificationError: If the error is above the tolerance. Nothing was written.
    """
    src, dst = Path(src), Path(dst)
    check_destination(dst, src, force)
    source = read_checkpoint(src, use_ema)
    args, img_size_source = _source_args(source, model, img_size, in_chans)
    if num_classes is not None and num_classes != args['num_classes']:
        raise CheckpointError(f"the checkpoint has {args['num_classes']} classes, where {num_classes} were asked for.")
    architecture = model or matching_model(args)
    attn_args = _attn_args(args, architecture, num_heads, head_dim)
    state_dict = source.state_dict
    if dtype is not None:
        dtype = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if dtype not in DTYPES.values():
            raise CheckpointError(f'dtype must be one of {", ".join(DTYPES)}.')
        state_dict = {name: tensor.to(dtype) for name, tensor in state_dict.items()}

    # Rounding to the written type is done by now: what is measured below, in full precision, is the rewrite alone.
    compute_dtype = torch.promote_types(torch.float32, state_dict['norm.weight'].dtype)
    if sharpness is None:
        sharpness = exact_sharpness(math.prod(_grid_size(args)), compute_dtype)
    converted = convert_state_dict(
        state_dict,
        img_size=args['img_size'],
        patch_size=args['patch_size'],
        in_chans=args['in_chans'],
        num_heads=attn_args['num_heads'],
        head_dim=attn_args['head_dim'],
        sharpness=sharpness,
    )
    conv_model = CmhsaConv(**args, dtype=compute_dtype).eval()
    conv_model.load_state_dict(state_dict)
    attn_model = timm.create_model(
        architecture, **attn_args, dtype=compute_dtype, pretrained_cfg_overlay=_pretrained_cfg(source, args)).eval()
    attn_model.load_state_dict(converted)

    generator = torch.Generator().manual_seed(0)
    random_images = torch.randn(NUM_RANDOM_IMAGES, args['in_chans'], *args['img_size'], generator=generator)
    real_images = random_images[:0] if images is None else load_images(Path(images), attn_model)
    layers, logits_error, top1_agreement = verify(
        conv_model, attn_model, torch.cat([random_images, real_images]).to(compute_dtype))
    report = ConversionReport(
        architecture, attn_args, img_size_source, sharpness, layers, logits_error, top1_agreement,
        len(random_images), len(real_images))
    if not report.max_error <= tolerance:
        raise VerificationError(
            f'{report}\nerror {report.max_error:.1e} is above the tolerance of {tolerance:.1e}: nothing was written.')
    write_checkpoint(
        dst, converted, _metadata(report, source),
        lambda path: save_config_for_hf(attn_model, path, model_args=attn_args))
    return report


def _source_args(
        source: Checkpoint,
        model: Optional[str],
        img_size: Optional[Size2d],
        in_chans: Optional[int],
) -> Tuple[Dict[str, Any], str]:
    """Arguments of the phase-1 model, from all that is known of it, and where its image size is from."""
    known = {key: source.model_args[key] for key in KNOWN_ARGS if source.model_args.get(key) is not None}
    for key, value in (('img_size', img_size), ('in_chans', in_chans)):
        if value is not None and to_2tuple(known.setdefault(key, value)) != to_2tuple(value):
            raise CheckpointError(f'the checkpoint was trained with {key}={known[key]}, where {value} was asked for.')
    origin = 'as asked for' if img_size else 'from the checkpoint'
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
) -> Dict[str, Any]:
    """Arguments of `timm.create_model` for the phase-2 model."""
    choices = timm.list_models('*cmhsa_attn*')
    if architecture not in choices:
        raise CheckpointError(f'{architecture} is not a phase-2 model: choose one of {", ".join(choices)}.')
    default = timm.create_model(architecture, device=torch.device('meta')).blocks[0].attn
    return {
        **{key: value for key, value in args.items() if key != 'kernel_size'},
        'num_heads': num_heads or _default_num_heads(args, default.num_heads, head_dim),
        'head_dim': head_dim or math.prod(to_2tuple(args['patch_size'])) * args['hidden_chans'],
    }


def _pretrained_cfg(source: Checkpoint, args: Dict[str, Any]) -> Dict[str, Any]:
    return {
        **source.preprocessing,
        'input_size': (args['in_chans'], *args['img_size']),
        'num_classes': args['num_classes'],
    }


def _metadata(report: ConversionReport, source: Checkpoint) -> Dict[str, str]:
    return {
        'format': 'pt',
        'architecture': report.architecture,
        'model_args': json.dumps(report.model_args),
        'construction': 'Theorem 1 of arXiv 2111.01353, with a zero key',
        'source_sha256': source.sha256,
        'sharpness': str(report.sharpness),
        'heads_used': ', '.join(str(layer.heads_used) for layer in report.layers),
        'max_error': str(report.max_error),
        'logits_error': str(report.logits_error),
        'timm_cmhsa_version': __version__,
        'timm_version': timm.__version__,
        'torch_version': str(torch.__version__),
    }


def _parse_size(text: str) -> Tuple[int, int]:
    height, _, width = text.partition('x')
    return int(height), int(width or height)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='convert_checkpoint',
        description='Rewrite a phase-1 (cmhsa_conv_*) checkpoint as a phase-2 (cmhsa_attn) checkpoint that computes '
                    'the same. Verified before it is written. '
                    'Exit code 1: the error is above the tolerance; 2: bad input. Nothing is written then.')
    add = parser.add_argument
    add('src', metavar='SRC', help="checkpoint of timm's train.py, state dict (.pth, .safetensors), local-dir: folder")
    add('dst', metavar='DST', help='.safetensors, .pth, or a folder for timm.create_model("local-dir:DST")')
    add('--model', metavar='NAME', help='registered phase-2 model (default: the one with tokens of this shape)')
    add('--img-size', metavar='N or HxW', type=_parse_size, help='input size, where the checkpoint does not tell')
    add('--in-chans', metavar='N', type=int, help='image channels, where the checkpoint does not tell')
    add('--num-heads', metavar='N', type=int, help="number of heads (default: the model's; with --head-dim: as needed)")
    add('--head-dim', metavar='N', type=int, help='width of a head (default: that of a token)')
    add('--sharpness', metavar='M', type=float, help='bias of the wanted offset (default: exact to rounding)')
    add('--num-classes', metavar='N', type=int, help='refuse a checkpoint with another number of classes')
    add('--use-ema', action='store_true', help='convert the EMA weights')
    add('--dtype', choices=DTYPES, help="type of the written tensors (default: the source's)")
    add('--images', metavar='DIR', type=Path, help='verify on images of this folder too')
    add('--tolerance', metavar='E', type=float, default=TOLERANCE,
        help='largest accepted error, relative to the largest value (default: %(default)s)')
    add('--force', action='store_true', help='overwrite DST')
    add('--version', action='version', version=f'timm_cmhsa {__version__}')
    return parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """The `convert_checkpoint` command; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        print(convert_checkpoint(**vars(args)))
    except (CheckpointError, VerificationError) as e:
        print(f'convert_checkpoint: {e}', file=sys.stderr)
        return 1 if isinstance(e, VerificationError) else 2
    print(f'written to {args.dst}')
    return 0
