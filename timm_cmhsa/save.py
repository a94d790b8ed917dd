"""Save a model to a file or a folder: whole or not at all, and nothing is replaced unasked."""
import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

import safetensors
import safetensors.torch
import torch
from timm.models._hub import save_config_for_hf
from timm.models._pretrained import filter_pretrained_cfg
from torch import nn

from .errors import CheckpointError, one_line
from .load import WEIGHT_NAMES, PathLike, is_ours, read_json
from .models import Cmhsa

PICKLE_SUFFIXES = ('.pth', '.pt', '.tar', '.bin')


def save_model(
        model: Cmhsa,
        dst: PathLike,
        force: bool = False,
        model_config: Optional[Dict[str, Any]] = None,
        card: Optional[str] = None,
) -> None:
    """Write a model, whole or not at all, to a file by its suffix, or else to a folder for timm's `local-dir:`.

    Args:
        model: Model of this package.
        dst: `.safetensors` or `.pth` file, or folder.
        force: Replace a file, or a folder with a model of this package.
        model_config: More configuration for config.json of a folder, as for timm's `push_to_hf_hub`.
        card: Text of README.md in a folder.

    Raises:
        CheckpointError: If the destination cannot be written. Nothing was written.
    """
    args = json_args(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    with replacing(check_destination(dst, force), force) as new:
        if new.suffix == '.safetensors':
            metadata = {'format': 'pt', 'architecture': model.pretrained_cfg['architecture']}
            safetensors.torch.save_file(tensors, new, {**metadata, 'model_args': json.dumps(args)})
        elif new.suffix in PICKLE_SUFFIXES:
            torch.save(tensors, new)
        else:
            new.mkdir()
            safetensors.torch.save_file(tensors, new / WEIGHT_NAMES[0], {'format': 'pt'})
            _write_config(model, new / 'config.json', args, model_config or {})
            if card is not None:
                (new / 'README.md').write_text(card, encoding='utf-8')


def _write_config(model: Cmhsa, path: Path, model_args: Dict[str, Any], model_config: Dict[str, Any]) -> None:
    # timm 1.0.26 would write the image size and classes of the registered model
    pretrained_cfg = {
        **filter_pretrained_cfg(model.pretrained_cfg, remove_source=True),
        'input_size': (model.in_chans, *model.patch_embed.img_size), 'num_classes': model.num_classes,
        **model_config.get('pretrained_cfg', {})}
    save_config_for_hf(model, path, {**model_config, 'pretrained_cfg': pretrained_cfg}, model_args)
    config = read_json(path)
    config['model_args'].pop('num_classes', None)  # transformers passes it as well
    config['model_args'].pop('hard_attn', None)  # of the time when the model was created
    path.write_text(json.dumps(config, indent=2), encoding='utf-8')


def json_args(model: Cmhsa) -> Dict[str, Any]:
    """Return the arguments of `timm.create_model` for a model like this, as config.json can hold them.

    Raises:
        CheckpointError: If an argument is a class or a function, or the final norm was pruned.
    """
    if isinstance(model.norm, nn.Identity) and isinstance(model.fc_norm, nn.Identity):
        raise CheckpointError('The final norm was pruned, and no arguments give such a model: use prune_norm=False.')
    args = {key: value for key, value in model.model_args().items() if value is not None and key != 'num_classes'}
    for key, value in args.items():
        if not isinstance(value, (bool, int, float, str, tuple, list)):
            raise CheckpointError(f'{key}={value} does not go into config.json: create the model with its timm name.')
    return args


def check_destination(dst: PathLike, force: bool) -> Path:
    """Return the destination, or refuse one where something would be lost.

    Raises:
        CheckpointError: If it exists and `force` is not set, or it is not a model of this package.
    """
    dst = Path(os.path.realpath(dst))
    is_file = dst.suffix == '.safetensors' or dst.suffix in PICKLE_SUFFIXES
    if not os.path.isdir(dst.parent):
        raise CheckpointError(f'{dst.parent} is not a folder: create it first.')
    if not os.path.lexists(dst) or (dst.is_dir() and not is_file and not any(dst.iterdir())):
        return dst
    if not (dst.is_file() if is_file else _holds_our_model(dst)):
        raise CheckpointError(f'{dst} already exists and is not a model of timm_cmhsa: choose another destination.')
    if not force:
        raise CheckpointError(
            f'{dst} already exists: choose another destination, or replace it with force=True (--force).')
    return dst


def _holds_our_model(folder: Path) -> bool:
    try:
        name = read_json(folder / 'config.json').get('architecture')
    except CheckpointError:
        return False
    return isinstance(name, str) and is_ours(name)


@contextlib.contextmanager
def replacing(dst: Path, force: bool) -> Iterator[Path]:
    """Give a temporary path beside a destination. What is written there takes its place when the block ends.

    What appeared at the destination meanwhile stays, and an error is raised.
    """
    token = secrets.token_hex(4)
    new, old = (dst.with_name(f'.timm_cmhsa-{token}-{which}{dst.suffix}') for which in ('new', 'old'))
    try:
        yield new
        check_destination(dst, force)
        if force and dst.is_dir():
            try:
                dst.rename(old)
                new.rename(dst)
            except BaseException:
                if not os.path.lexists(dst):
                    old.rename(dst)
                raise
            shutil.rmtree(old)
        elif new.is_dir():
            new.rename(dst)  # The system refuses to replace anything but an empty folder.
        else:
            new.replace(dst)
    except (OSError, RuntimeError, safetensors.SafetensorError) as e:  # torch.save raises RuntimeError on a full disk
        kept = f' The old model is at {old}.' if old.is_dir() else ''
        raise CheckpointError(f'{dst} cannot be written: {one_line(e)}{kept}') from e
    finally:
        shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)
