"""Convert a phase-1 checkpoint into a phase-2 checkpoint: load, convert, verify, save."""
import os
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

import torch

from .construction import HeadOptions
from .convert import ConversionReport, convert_with, verify
from .errors import CheckpointError
from .images import read_folder
from .load import Checkpoint, PathLike, build_model, local_path, named_tensors, read_checkpoint
from .models import CmhsaConv
from .patches import Size2d
from .rel_pos import precise_dtype
from .save import check_destination, save_model

MAX_ERROR = 1e-4  # of the logits and of a layer, relative to the largest value
NUM_RANDOM_IMAGES, MAX_REAL_IMAGES = 8, 64


class VerificationError(RuntimeError):
    """The converted model differs from its source; nothing was written."""


def convert_checkpoint(
        src: PathLike,
        dst: PathLike,
        *,
        architecture: Optional[str] = None,
        num_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        qk_dim: Optional[int] = None,
        sharpness: Optional[float] = None,
        rel_pos: Optional[str] = None,
        peak: Optional[float] = None,
        use_ema: bool = True,
        images: Optional[PathLike] = None,
        tolerance: float = MAX_ERROR,
        force: bool = False,
        **model_kwargs: Any,
) -> ConversionReport:
    """Rewrite a phase-1 checkpoint as a phase-2 checkpoint, verify that both compute the same, and write it.

    Checkpoints in half precision are converted, and saved, in float32.

    Args:
        src: Checkpoint of timm's `train.py`, state dict (pickled or safetensors), `local-dir:` folder, or model on the
            Hugging Face Hub, `hf-hub:USER/NAME[@REVISION]`.
        dst: Folder for `timm.create_model('local-dir:DST', pretrained=True)`, or a `.safetensors` or `.pth` file.
        architecture, num_heads, head_dim, qk_dim, sharpness, rel_pos, peak: See `convert_model`.
        use_ema: Convert the averaged weights of a training checkpoint if it has them, as timm does.
        images: Folder of images to verify on besides random ones; at most 64 are taken.
        tolerance: Largest accepted error of the logits and of any layer's output, relative to the largest value.
        force: Replace the file, or the folder of a model of this package, at the destination.
        **model_kwargs: Arguments of the phase-1 model that the checkpoint lacks, such as `img_size`.

    Raises:
        CheckpointError: If the input is bad or the output cannot be written. Nothing was written.
        ValueError: If there is no exact rewrite with these heads. Nothing was written.
        HubError: If the input cannot be downloaded. Nothing was written.
        VerificationError: If the error is above the tolerance. Nothing was written.
    """
    options = HeadOptions(num_heads, head_dim, qk_dim, sharpness, rel_pos, peak)
    options.check()
    dst = check_destination(dst, force)
    source = Path(os.path.realpath(local_path(src)))
    if dst in (source, *source.parents) or (dst.parent == source and dst.is_file()):
        raise CheckpointError(f'{dst} is the source, or one holds the other: choose another destination.')
    checkpoint = read_checkpoint(src, use_ema)
    model = build_model(checkpoint, src, None, model_kwargs)
    if not isinstance(model, CmhsaConv):
        raise CheckpointError(f'{src} holds a {type(model).__name__}, not a phase-1 model (cmhsa_conv_*).')
    model = model.to(precise_dtype(next(model.parameters()).dtype))
    converted, options = convert_with(model, architecture, options)

    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(NUM_RANDOM_IMAGES, model.in_chans, *model.patch_embed.img_size, generator=generator)
    if images is not None:
        pixels = torch.cat([pixels, read_folder(Path(images), converted, MAX_REAL_IMAGES)[0]])
    report = ConversionReport(
        **vars(verify(model, converted, pixels)),
        architecture=converted.pretrained_cfg['architecture'],
        model_args=converted.model_args(),
        options=options,
        num_images=(NUM_RANDOM_IMAGES, len(pixels) - NUM_RANDOM_IMAGES),
        notes=checkpoint.notes,
    )
    if not report.max_error <= tolerance:
        raise VerificationError(
            f'{report}\nthe error of {report.max_error:.1e} is above the tolerance of {tolerance:.1e}: nothing was '
            'written.')
    save_model(converted, dst, force)
    return report


def convert_state_dict(
        state_dict: Mapping[str, torch.Tensor],
        img_size: Optional[Size2d] = None,
        architecture: Optional[str] = None,
        num_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        sharpness: Optional[float] = None,
        rel_pos: Optional[str] = None,
        peak: Optional[float] = None,
        qk_dim: Optional[int] = None,
        **model_kwargs: Any,
) -> Dict[str, torch.Tensor]:
    """Rewrite the tensors of a phase-1 model as those of a phase-2 model that computes the same.

    Args:
        state_dict: Tensors of a phase-1 model; prefixes of wrappers are stripped.
        img_size: Size of the images, pixels; by default that of the registered model with such patches.
        architecture, num_heads, head_dim, sharpness, rel_pos, peak, qk_dim: See `convert_model`, also for errors.
        **model_kwargs: Other arguments of the phase-1 model that tensors do not determine, such as `in_chans`.

    Raises:
        CheckpointError: If these are not the tensors of a phase-1 model.
    """
    checkpoint = Checkpoint(named_tensors(state_dict, 'state_dict'), None, {}, {}, [])
    if img_size is not None:
        model_kwargs['img_size'] = img_size
    model = build_model(checkpoint, 'state_dict', None, model_kwargs)
    if not isinstance(model, CmhsaConv):
        raise CheckpointError(f'The tensors are those of a {type(model).__name__}, not of a phase-1 model.')
    options = HeadOptions(num_heads, head_dim, qk_dim, sharpness, rel_pos, peak)
    return convert_with(model, architecture, options)[0].state_dict()
