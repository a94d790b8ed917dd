"""Convert a phase-1 checkpoint into a phase-2 checkpoint: read, convert, verify, write."""
import os
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

import torch

from .checkpoint import Checkpoint, Spec, named_tensors
from .construction import HeadOptions
from .convert import ConversionReport, convert_with, verify
from .errors import CheckpointError, VerificationError
from .files import PathLike, check_destination, local_path
from .images import NUM_NOISE_IMAGES, choose_images
from .models import CmhsaConv

MAX_ERROR = 1e-4  # of the logits and of a layer, relative to the largest value
MAX_REAL_IMAGES = 64


def convert_checkpoint(
        src: PathLike,
        dst: PathLike,
        *,
        architecture: Optional[str] = None,
        use_ema: bool = True,
        images: Optional[PathLike] = None,
        tolerance: float = MAX_ERROR,
        force: bool = False,
        model_kwargs: Optional[Mapping[str, Any]] = None,
        **options: Any,
) -> ConversionReport:
    """Rewrite a phase-1 checkpoint as a phase-2 checkpoint, verify that both compute the same, and write it.

    Checkpoints in half precision are converted, and saved, in float32.

    Args:
        src: See `load_model`.
        dst: Folder for `timm.create_model('local-dir:DST', pretrained=True)`, or a `.safetensors` or `.pth` file.
        architecture: See `convert_model`.
        use_ema: See `load_model`.
        images: Folder of images to verify on besides random ones; at most 64 are taken.
        tolerance: Largest accepted error of the logits and of any layer's output, relative to the largest value.
        force: Replace the file, or the folder of a model of this package, at the destination.
        model_kwargs: Arguments of the phase-1 model that the checkpoint lacks, such as `global_pool`.
        **options: Those of `HeadOptions`; all others are taken as `model_kwargs`.

    Raises:
        CheckpointError: If the input is bad or the output cannot be written. Nothing was written.
        ValueError: If there is no exact rewrite with these heads. Nothing was written.
        HubError: If the input cannot be downloaded. Nothing was written.
        VerificationError: If the error is above the tolerance. Nothing was written.
    """
    dst = check_destination(dst, force)
    source = Path(os.path.realpath(local_path(src)))
    if source.is_relative_to(dst) or (dst.parent == source and dst.is_file()):
        raise CheckpointError(f'{dst} is the source, or one holds the other: choose another destination.')
    checkpoint = Checkpoint.read(src, use_ema)
    model, heads = _phase1_model(checkpoint, options, model_kwargs or {})
    model = model.to(torch.promote_types(next(model.parameters()).dtype, torch.float32))
    converted, heads = convert_with(model, architecture, heads)

    pixels, *_ = choose_images(None, converted, NUM_NOISE_IMAGES)
    if images is not None:
        pixels = torch.cat([pixels, choose_images(images, converted, MAX_REAL_IMAGES)[0]])
    report = verify(model, converted, pixels)
    kind = f'hard, sharpness {heads.sharpness:.3g}' if heads.peak is None else f'soft, peak {heads.peak:g}'
    report.about = {
        'Model': f'{converted.pretrained_cfg["architecture"]}, images of {converted.patch_embed.img_size} pixels',
        'Rewrite': 'Theorem 1 of arXiv 2111.01353',
        'Heads': f'{heads.num_heads} of width {heads.head_dim}, queries and keys of {heads.qk_dim}, {kind}',
        'Images': f'{NUM_NOISE_IMAGES} random ones and {len(pixels) - NUM_NOISE_IMAGES} real ones',
        **({'Notes': '; '.join(checkpoint.spec.notes)} if checkpoint.spec.notes else {}),
    }
    if not report.max_error <= tolerance:
        raise VerificationError(
            f'{report}\nthe error of {report.max_error:.1e} is above tolerance={tolerance:.1e}: nothing was written.')
    Checkpoint.of(converted).write(dst, force)
    return report


def convert_state_dict(
        state_dict: Mapping[str, torch.Tensor], architecture: Optional[str] = None, **options: Any,
) -> Dict[str, torch.Tensor]:
    """Rewrite the tensors of a phase-1 model as those of a phase-2 model that computes the same.

    Args:
        state_dict: Tensors of a phase-1 model; prefixes of wrappers are stripped.
        architecture: See `convert_model`, also for errors.
        **options: Those of `HeadOptions`; all others are arguments of the phase-1 model that tensors do not determine,
            such as `img_size` (by default that of the registered model with such patches) and `in_chans`.

    Raises:
        CheckpointError: If these are not the tensors of a phase-1 model.
    """
    checkpoint = Checkpoint(Spec(), named_tensors(state_dict, 'state_dict'), 'state_dict')
    model, heads = _phase1_model(checkpoint, options, {})
    return convert_with(model, architecture, heads)[0].state_dict()


def _phase1_model(
        checkpoint: Checkpoint, options: Dict[str, Any], model_kwargs: Mapping[str, Any]
) -> Tuple[CmhsaConv, HeadOptions]:
    """Return the model of a checkpoint, and the options of heads; all others are arguments of the model."""
    heads = HeadOptions(**{key: options.pop(key) for key in HeadOptions._fields if key in options})
    model = checkpoint.model(**{**options, **model_kwargs})
    if not isinstance(model, CmhsaConv):
        raise CheckpointError(
            f'{checkpoint.source} holds a {type(model).__name__}, not a phase-1 model (cmhsa_conv_*).')
    return model, heads
