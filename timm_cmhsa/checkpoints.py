"""Models of files: a phase-1 model from a file, folder or the Hub; a model into a file or folder; the road between."""
import json
import math
import os
from numbers import Integral
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple, Union

import safetensors.torch
import timm
import torch
from timm.layers import to_2tuple
from timm.models._hub import save_config_for_hf

from .cmhsa import Cmhsa, CmhsaAttn, CmhsaConv
from .construction import HeadOptions
from .convert import BATCH_SIZE, check_architecture, convert_model, fit_heads, matching_architecture, verify
from .destination import PICKLE_SUFFIXES, check_destination, whole_or_nothing
from .files import CheckpointError, read_checkpoint
from .hub.download import PREFIXES, download
from .images import read_folder
from .messages import printable
from .patches import Size2d
from .phase1 import DTYPES, UNTOLD_ARGS, build_phase1, default_img_size, matching_model, told_by_user
from .rel_pos import precise_dtype
from .report import ConversionReport

MAX_ERROR = 1e-4  # of the logits and of a layer, relative to the largest value
NUM_RANDOM_IMAGES, MAX_REAL_IMAGES = 8, 64
ASSUMED_ARGS = ('patch_size', 'in_chans', 'global_pool', 'norm_layer', 'act_layer')  # that fit the tensors as well
DEFAULT_LAYERS = {'norm_layer': 'layernorm', 'act_layer': 'gelu'}  # timm's names of them
# Those arguments of train.py that say how a model was trained. None can be a path or the name of something private.
TRAINING_ARGS = (
    'epochs', 'batch_size', 'world_size', 'grad_accum_steps', 'opt', 'opt_betas', 'momentum', 'lr', 'lr_base', 'sched',
    'warmup_epochs', 'warmup_lr', 'cooldown_epochs', 'min_lr', 'weight_decay', 'layer_decay', 'clip_grad', 'drop',
    'drop_path', 'aa', 'aug_repeats', 'reprob', 'color_jitter', 'hflip', 'vflip', 'scale', 'ratio', 'mixup', 'cutmix',
    'smoothing', 'bce_loss', 'model_ema', 'model_ema_decay', 'amp', 'amp_dtype', 'seed')


class VerificationError(RuntimeError):
    """The converted model computes something else than its source; nothing was written."""


class Phase1(NamedTuple):
    """A phase-1 model, and where it comes from."""
    model: CmhsaConv  # computes in float32 at least
    dtypes: Dict[str, torch.dtype]  # of the tensors to write
    img_size_source: str
    assumed: Dict[str, Any]  # arguments that nothing tells
    unrounded: Optional[CmhsaConv]  # the model before it was rounded to another type
    source: Dict[str, str]  # for the model card
    training: Dict[str, str]  # how it was trained, as far as it tells


def convert_checkpoint(
        src: Union[str, Path],
        dst: Union[str, Path],
        *,
        model: Optional[str] = None,
        img_size: Optional[Size2d] = None,
        patch_size: Optional[Size2d] = None,
        in_chans: Optional[int] = None,
        model_kwargs: Optional[Mapping[str, Any]] = None,
        num_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        sharpness: Optional[float] = None,
        approximate: bool = False,
        rel_pos: str = 'table',
        peak: Optional[float] = None,
        num_classes: Optional[int] = None,
        use_ema: bool = False,
        dtype: Optional[Union[str, torch.dtype]] = None,
        images: Optional[Union[str, Path]] = None,
        tolerance: Optional[float] = None,
        force: bool = False,
) -> ConversionReport:
    """Rewrite a phase-1 checkpoint as a phase-2 checkpoint, verify that both compute the same, and write it.

    Args:
        src: Checkpoint of timm's `train.py`, state dict (pickled or safetensors), folder in its `local-dir:` layout,
            or model on the Hugging Face Hub, `hf-hub:USER/NAME` or `hf-hub:USER/NAME@revision`.
        dst: `.safetensors`, `.pth`, or a folder that `timm.create_model('local-dir:...', pretrained=True)` loads.
        model: Registered phase-2 model to convert to, see `convert_model`.
        img_size, patch_size, in_chans: Image size and patch size, pixels, and image channels, where the checkpoint does
            not tell. By default the size of the registered model with such patches, square patches, and as many
            channels as a token carries, at most 3.
        model_kwargs: More arguments of the phase-1 model, where the checkpoint does not tell: `global_pool`,
            `norm_layer`, `act_layer` and `fc_norm`, by timm's names. What is assumed instead is reported, but cannot be
            verified.
        num_heads, head_dim, sharpness, approximate, rel_pos, peak: See `convert_model`.
        num_classes: Refuse a checkpoint with another number of classes.
        use_ema: Convert the averaged weights of a training checkpoint.
        dtype: Type of the written tensors; by default the source's. The error of rounding to it is reported separately.
            With a peak, tensors of attention are float32 at least.
        images: Folder of images to verify on besides random ones; at most 64 of all its classes are taken.
        tolerance: Largest accepted error of the logits and of any layer's output, relative to the largest value; by
            default 1e-4, and any where the rewrite is approximate.
        force: Overwrite an existing destination.

    Returns:
        What was done, and the measured errors.

    Raises:
        CheckpointError: If the input is bad or the output cannot be written. Nothing was written.
        HubError: If the input cannot be had from the Hub. Nothing was written.
        VerificationError: If the error is above the tolerance. Nothing was written.
    """
    heads = HeadOptions(num_heads, head_dim, sharpness, approximate, rel_pos, peak)
    told = told_by_user(model_kwargs, img_size=img_size, patch_size=patch_size, in_chans=in_chans)
    check_options(model, heads, dtype, images, tolerance)
    path, dst = locate(src, dst, force)
    phase1 = load_phase1(path, src, model, told, num_classes, use_ema, dtype)
    converted, report = convert_and_verify(phase1, model, heads, images, tolerance)
    save_model(converted, dst, report.metadata, force)
    return report


def check_options(
        architecture: Optional[str],
        heads: HeadOptions,
        dtype: Optional[Union[str, torch.dtype]],
        images: Optional[Union[str, Path]],
        tolerance: Optional[float],
) -> None:
    """Refuse options that fit no checkpoint, before any work is done. See `convert_checkpoint`."""
    try:
        heads.check()
        if architecture is not None:
            check_architecture(architecture)
    except ValueError as e:
        raise CheckpointError(str(e)) from e
    if dtype is not None and dtype not in (*DTYPES, *DTYPES.values()):
        raise CheckpointError(f'dtype {dtype} is none of {", ".join(DTYPES)}.')
    if images is not None and not Path(images).is_dir():
        raise CheckpointError(f'{images} is not a folder of images.')
    if tolerance is not None and not tolerance >= 0:
        raise CheckpointError(f'{tolerance=} must be 0 or more.')


def locate(src: Union[str, Path], dst: Union[str, Path], force: bool) -> Tuple[Path, Path]:
    """Return the file or folder of a source, fetched from the Hub if it is there, and the destination."""
    check_destination(dst, None, force)  # before anything is fetched
    src = str(src)
    path = Path(os.path.realpath(download(src) if src.startswith(PREFIXES) else src.removeprefix('local-dir:')))
    return path, check_destination(dst, path, force)


def load_phase1(
        path: Path,
        src: Union[str, Path],
        architecture: Optional[str] = None,
        told: Optional[Mapping[str, Any]] = None,
        num_classes: Optional[int] = None,
        use_ema: bool = False,
        dtype: Optional[Union[str, torch.dtype]] = None,
) -> Phase1:
    """Load the phase-1 model of a file or folder, which `src` names; `told` is what `told_by_user` returned."""
    checkpoint = read_checkpoint(path, use_ema)
    known = {key: checkpoint.model_args[key] for key in UNTOLD_ARGS if key in checkpoint.model_args}
    img_size_source = 'from the checkpoint' if 'img_size' in known else 'as asked for'
    for key, value in (told or {}).items():
        if to_2tuple(known.setdefault(key, value)) != to_2tuple(value):
            raise CheckpointError(f'the checkpoint was trained with {key}={known[key]}, where {value} was asked for.')
    registered = checkpoint.architecture if checkpoint.architecture in timm.list_models('*cmhsa*') else None
    if 'img_size' not in known:
        default = registered or matching_model(checkpoint.state_dict, known, architecture)
        known['img_size'], img_size_source = default_img_size(default), f'default of {default}'
    model = build_phase1(checkpoint.state_dict, registered, checkpoint.pretrained_cfg, **known)
    unrounded, state_dict = None, checkpoint.state_dict
    if dtype is not None:
        state_dict = _cast(state_dict, DTYPES[dtype] if isinstance(dtype, str) else dtype)
        unrounded, model = model, build_phase1(state_dict, registered, checkpoint.pretrained_cfg, **known)
    if num_classes is not None and num_classes != model.num_classes:
        raise CheckpointError(f'the checkpoint has {model.num_classes} classes, where {num_classes} were expected.')
    source = {
        **({'Architecture': checkpoint.architecture} if checkpoint.architecture else {}),
        # of a file only its name, as its folder is private; in UTF-8, whatever the locale
        'Checkpoint': printable(
            os.fsencode(src if str(src).startswith(PREFIXES) else Path(src).name).decode(errors='replace')),
        'Token mixer': '{} x {} convolution'.format(*model.blocks[0].attn.conv.kernel_size),
        'SHA-256': checkpoint.sha256,
    }
    return Phase1(
        model=_to_compute(model),
        dtypes={name: tensor.dtype for name, tensor in state_dict.items()},
        img_size_source=img_size_source,
        assumed={} if registered else {
            key: DEFAULT_LAYERS.get(key, value)
            for key, value in model.model_args().items() if key in ASSUMED_ARGS and key not in known},
        unrounded=None if unrounded is None else _to_compute(unrounded),
        source=source,
        training=training_details(checkpoint.training_args),
    )


def _to_compute(model: CmhsaConv) -> CmhsaConv:
    """Return a model in the type that it computes in: float32 at least."""
    return model.to(torch.float64 if torch.float64 in {p.dtype for p in model.parameters()} else torch.float32)


def convert_and_verify(
        phase1: Phase1,
        architecture: Optional[str] = None,
        heads: Optional[HeadOptions] = None,
        images: Optional[Union[str, Path]] = None,
        tolerance: Optional[float] = None,
) -> Tuple[CmhsaAttn, ConversionReport]:
    """Convert a phase-1 model and measure how exact that is. Arguments and errors are those of `convert_checkpoint`."""
    try:
        heads = heads or HeadOptions()
        architecture = architecture or matching_architecture(phase1.model, heads.peak)
        heads = fit_heads(phase1.model, architecture, heads)
        converted = convert_model(phase1.model, architecture, **heads._asdict())
    except ValueError as e:
        raise CheckpointError(str(e)) from e
    compute_dtype = next(phase1.model.parameters()).dtype
    _set_types(converted, phase1.dtypes, heads.peak)
    converted.to(compute_dtype)  # what is written is what is verified
    generator = torch.Generator().manual_seed(0)
    random_images = torch.randn(
        NUM_RANDOM_IMAGES, phase1.model.in_chans, *phase1.model.patch_embed.img_size, generator=generator)
    real_images = random_images[:0]
    if images is not None:
        real_images, _ = read_folder(Path(images), converted, MAX_REAL_IMAGES)
    all_images = torch.cat([random_images, real_images])
    measured = verify(phase1.model, converted, all_images.to(compute_dtype))
    assert heads.sharpness is not None
    report = ConversionReport(
        architecture=architecture,
        model_args=json_args(converted),
        img_size_source=phase1.img_size_source,
        assumed=phase1.assumed,
        rounding_error=None if phase1.unrounded is None else _difference(phase1.unrounded, phase1.model, all_images),
        sharpness=heads.sharpness,
        peak=heads.peak,
        approximate=heads.approximate,
        num_random_images=len(random_images),
        num_real_images=len(real_images),
        source=phase1.source,
        training=phase1.training,
        **vars(measured),
    )
    if tolerance is None:
        tolerance = math.inf if heads.approximate else MAX_ERROR
    if not report.max_error <= tolerance:
        raise VerificationError(
            f'{report}\nthe error of {report.max_error:.1e} is above the tolerance of {tolerance:.1e}: nothing was '
            'written.')
    _set_types(converted, phase1.dtypes, heads.peak)
    return converted, report


@torch.inference_mode()
def _difference(source: CmhsaConv, target: CmhsaConv, images: torch.Tensor) -> float:
    """Return the largest difference of the outputs of two models, relative to the largest output of the first."""
    expected, actual = (
        torch.cat([model(batch.to(next(model.parameters()))) for batch in images.split(BATCH_SIZE)]).double()
        for model in (source, target))
    tiny = torch.finfo(expected.dtype).tiny  # where a model has nothing but zeros
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=tiny)).item()


def _set_types(converted: CmhsaAttn, dtypes: Mapping[str, torch.dtype], peak: Optional[float]) -> None:
    """Give every tensor the type of the source's, those of an attention that of the convolution.

    With a peak it is float32 at least: heads add and take away what half precision would round.
    """
    for name, parameter in converted.named_parameters():
        of_attention = f"{name.partition('.attn.')[0]}.attn.conv.weight"
        dtype = dtypes.get(name, dtypes.get(of_attention, dtypes['blocks.0.norm1.weight']))
        is_soft = peak is not None and '.attn.' in name
        parameter.data = parameter.data.to(precise_dtype(dtype) if is_soft else dtype)


def _cast(state_dict: Dict[str, torch.Tensor], dtype: torch.dtype) -> Dict[str, torch.Tensor]:
    """Round tensors to another type; refuse those with all values, or the largest ones, outside its range."""
    cast = {name: tensor.to(dtype) for name, tensor in state_dict.items()}
    for name, tensor in state_dict.items():
        error = (cast[name].double() - tensor.double()).abs()
        if tensor.numel() and not error.max() <= torch.finfo(dtype).eps * tensor.double().abs().max():
            raise CheckpointError(f'{name} has values that do not fit into {dtype}: choose another dtype.')
    return cast


def training_details(args: Mapping[str, Any]) -> Dict[str, str]:
    """Return those of train.py's arguments that say how a model was trained, without the ones that are off."""
    known = {name: args.get(name) for name in TRAINING_ARGS}
    return {
        name.replace('_', '-'): printable(' '.join(map(str, value if isinstance(value, (list, tuple)) else [value])))
        for name, value in known.items() if value not in (None, False, 0, '', [])}


def save_model(model: Cmhsa, dst: Path, metadata: Dict[str, str], force: bool) -> None:
    """Write a model, whole or not at all, to a file by its suffix, or else to a folder for timm's `local-dir:`."""
    with whole_or_nothing(dst, force) as partial:
        if dst.suffix == '.safetensors':
            safetensors.torch.save_file(tensors_of(model), partial, metadata)
        elif dst.suffix in PICKLE_SUFFIXES:
            try:
                torch.save(tensors_of(model), partial)
            except RuntimeError as e:  # of a full disk
                raise OSError(str(e)) from e
        else:
            write_folder(model, partial, metadata)


def write_folder(model: Cmhsa, folder: Path, metadata: Dict[str, str], config: Optional[Dict[str, Any]] = None) -> None:
    """Write model.safetensors, with metadata, and config.json, with more configuration, into a new folder."""
    folder.mkdir()
    safetensors.torch.save_file(tensors_of(model), folder / 'model.safetensors', metadata)
    save_config_for_hf(model, folder / 'config.json', model_args=json_args(model), model_config=config)
    written = json.loads((folder / 'config.json').read_bytes())
    del written['model_args']['num_classes']  # which stands outside as well: transformers gives timm both
    written['model_args'].pop('hard_attn', None)  # how it was trained: it is attention
    (folder / 'config.json').write_text(json.dumps(written, indent=2), encoding='utf-8')


def tensors_of(model: Cmhsa) -> Dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def json_args(model: Cmhsa) -> Dict[str, Any]:
    """Return the arguments of `timm.create_model` for a model like this, as config.json can hold them."""
    args = {key: int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
            for key, value in model.model_args().items() if value is not None}
    for key, value in args.items():
        if not isinstance(value, (bool, int, float, str, tuple, list)):
            raise CheckpointError(f'{key}={value} does not go into config.json: give the name that timm has for it.')
    return args
