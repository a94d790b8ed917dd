"""Checkpoint files, read without running their code."""
import argparse
import hashlib
import json
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Tuple

import safetensors
import safetensors.torch
import torch
from timm.layers import to_2tuple
from timm.models import clean_state_dict

from .untrusted import CFG, checked_args, checked_cfg

WEIGHT_NAMES = ('model.safetensors', 'pytorch_model.bin', 'pytorch_model.pth', 'model.pth')


class CheckpointError(ValueError):
    """A file cannot be read, converted or written. The message says why and what to do, in one line."""


class Checkpoint(NamedTuple):
    """Tensors, and what the file tells of their model."""
    state_dict: Dict[str, torch.Tensor]
    architecture: Optional[str]  # timm's name of the model, where the checkpoint tells
    model_args: Dict[str, Any]  # of `timm.create_model`, as far as it tells
    pretrained_cfg: Dict[str, Any]  # preprocessing, label names and license, as far as it tells
    training_args: Dict[str, Any]  # of timm's `train.py`, if that wrote it
    sha256: str  # of the file that holds the tensors


def read_checkpoint(path: Path, use_ema: bool = False) -> Checkpoint:
    """Read tensors, and what the file tells of their model. Prefixes of wrappers are stripped.

    A checkpoint of timm's `train.py`, a state dict (pickled or safetensors), or a folder in timm's `local-dir:` layout.
    Pickles are loaded with `weights_only=True`, which executes no code.
    """
    config = _read_config(path / 'config.json') if path.is_dir() else {}
    path = _weights_file(path)
    try:
        content, metadata = _load(path)
        sha256 = _sha256(path)
    except OSError as e:
        raise CheckpointError(f'{path} cannot be read: {e.strerror or e}.') from e
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} holds a {type(content).__name__}, not a state dict: save model.state_dict().')

    state_dict = _select_state_dict(content, path, use_ema)
    state_dict = clean_state_dict(clean_state_dict(state_dict))  # twice: older timm knows one order of wrappers only
    args = content.get('args')
    train_args = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}
    try:
        if not config and 'model_args' in metadata:
            config = {'architecture': metadata.get('architecture'), 'model_args': json.loads(metadata['model_args'])}
        elif not config:
            config = _train_config(content.get('arch'), train_args)
        return Checkpoint(state_dict, *_read_model(config), train_args, sha256)
    except (ValueError, TypeError, AttributeError, IndexError, KeyError) as e:
        raise CheckpointError(f'{path} has a malformed model configuration: {one_line(e)}.') from e


def _weights_file(path: Path) -> Path:
    files = [path / name for name in WEIGHT_NAMES] if path.is_dir() else [path]
    existing = [file for file in files if file.is_file()]
    if not existing and path.is_dir():
        raise CheckpointError(f'{path} is a folder without weights: expected one of {", ".join(WEIGHT_NAMES)}.')
    if not existing:
        raise CheckpointError(
            f'{path} does not exist or is not a file: give a checkpoint file, a local-dir: folder or hf-hub:USER/NAME.')
    return existing[0]


def _load(path: Path) -> Tuple[Any, Dict[str, str]]:
    if path.suffix == '.safetensors':
        try:
            with safetensors.safe_open(path, framework='pt') as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except safetensors.SafetensorError as e:
            raise CheckpointError(f'{path} is truncated or not a safetensors file: {one_line(e)}.') from e
    try:
        # timm's training checkpoints hold their arguments in a Namespace
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter('ignore')  # The error for a file that is not a checkpoint is one line.
            return torch.load(path, map_location='cpu', weights_only=True), {}
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError,
            AttributeError, zipfile.BadZipFile) as e:
        if isinstance(e, pickle.UnpicklingError) and 'GLOBAL' in str(e):
            raise CheckpointError(
                f'{path} needs code to load, which is never executed: save its state_dict() alone.') from e
        raise CheckpointError(f'{path} is truncated, corrupt or not a checkpoint.') from e


def _select_state_dict(content: Dict[str, Any], path: Path, use_ema: bool) -> Dict[str, torch.Tensor]:
    """Return what timm's `load_state_dict` would take, but averaged weights only where asked for."""
    ema = [key for key in ('state_dict_ema', 'model_ema') if content.get(key) is not None]
    if use_ema and not ema:
        raise CheckpointError(f'{path} holds no EMA weights: leave out use_ema=True.')
    key = ema[0] if use_ema else next((key for key in ('state_dict', 'model') if key in content), None)
    state_dict = content if key is None else content[key]
    if not isinstance(state_dict, dict) or not state_dict:
        raise CheckpointError(f'{path} holds no state dict{"" if key is None else f" in {key!r}"}.')
    for name, value in state_dict.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(f'{path} is not a state dict: {name!r} is a {type(value).__name__}.')
    return state_dict


def _read_config(path: Path) -> Dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path.parent} has no config.json: it is not a folder in timm's local-dir: layout.")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise CheckpointError(f'{path} cannot be read: {one_line(e)}.') from e
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a model configuration of timm's.")
    return config


def _train_config(architecture: Optional[str], args: Dict[str, Any]) -> Dict[str, Any]:
    """Return the arguments of timm's `train.py` in the form of timm's config.json."""
    model_args = dict(args.get('model_kwargs') or {})
    for name, key in (('img_size', 'img_size'), ('in_chans', 'in_chans'), ('gp', 'global_pool')):
        if args.get(name) is not None:
            model_args.setdefault(key, args[name])
    return {
        'architecture': architecture or args.get('model'),
        'model_args': model_args,
        'pretrained_cfg': {key: args[key] for key in ('input_size', *CFG) if args.get(key)},
    }


def _read_model(config: Dict[str, Any]) -> Tuple[Optional[str], Dict[str, Any], Dict[str, Any]]:
    """Return architecture, model arguments and the rest of a config.json; its root overrules the inside, as in timm."""
    architecture, pretrained_cfg = config.get('architecture'), dict(config.get('pretrained_cfg') or {})
    pretrained_cfg.update((key, config[key]) for key in ('label_names', 'label_descriptions') if key in config)
    if architecture is not None and not isinstance(architecture, str):
        raise TypeError('the architecture is not a name')
    model_args = dict(config.get('model_args') or {})
    if pretrained_cfg.get('input_size') is not None:
        chans, *size = pretrained_cfg['input_size']
        model_args = {'in_chans': chans, 'img_size': size, **model_args}
    model_args = checked_args(model_args)
    if 'img_size' in model_args:
        model_args['img_size'] = to_2tuple(model_args['img_size'])
    return architecture, model_args, checked_cfg(pretrained_cfg)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open('rb') as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def same_model_folders(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same tensors, and otherwise the same files."""
    (tensors, metadata), (other_tensors, other_metadata) = (  # not byte for byte: metadata has no order
        _load(folder / 'model.safetensors') for folder in (one, other))
    texts, other_texts = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != 'model.safetensors'}
        for folder in (one, other))
    return (
        texts == other_texts and metadata == other_metadata and tensors.keys() == other_tensors.keys()
        and all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items()))


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, for use in another one."""
    text = getattr(error, 'strerror', None) or str(error) or type(error).__name__
    return (text.strip() or type(error).__name__).splitlines()[0].rstrip('.')
