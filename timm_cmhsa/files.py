"""Checkpoint files, read without running their code. Parsers raise anything: all are called within `reading`."""
import argparse
import contextlib
import hashlib
import io
import json
import pickletools
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import safetensors
import torch
from timm.layers import to_2tuple
from timm.models import clean_state_dict

from .messages import one_line, shorten
from .untrusted import CFG, TEXT, as_dict, checked_args, checked_cfg, checked_tensors, dict_in, plain_items

WEIGHT_NAMES = ('model.safetensors', 'pytorch_model.bin', 'pytorch_model.pth', 'model.pth')
MAX_TEXT = 2 ** 24  # bytes of a config.json or the like; parsed, JSON takes up to 30 times as much
# What pickles may name. torch.load(weights_only=True) allows more, such as bytearray, which can fill the memory.
PICKLED_NAMES = re.compile(
    r'collections (OrderedDict|Counter)|(builtins|__builtin__) set|argparse Namespace|torch (Size|device)|'
    r'torch (bool|u?int\d+|b?float\d+|(Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage)|'
    r'torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch\.nn\.parameter Parameter')


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


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn whatever is raised while a file is parsed into a `CheckpointError`, which says that it should be `what`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    except CheckpointError:
        raise
    except OSError as e:
        raise CheckpointError(f'{path} cannot be read: {one_line(e)}.') from e
    except Exception as e:
        raise CheckpointError(f'{path} is truncated, corrupt or not {what} ({one_line(e)}).') from e


def read_text(path: Path) -> bytes:
    """Return the content of a short file. Refuse pipes and devices, which might never end."""
    with reading(path, 'a file'):
        if not path.is_file():
            raise CheckpointError(f'{path} does not exist or is not a file.')
        with path.open('rb') as file:
            content = file.read(MAX_TEXT + 1)
    if len(content) > MAX_TEXT:
        raise CheckpointError(f'{path} has more than {MAX_TEXT} bytes: it is not what it should be.')
    return content


def read_json(path: Path, what: str) -> Dict[str, Any]:
    """Return the dictionary in a JSON file, which should be `what`."""
    content = read_text(path)
    with reading(path, what):
        told = json.loads(content)
        if not isinstance(told, dict):
            raise TypeError(f'it holds a {type(told).__name__}')
    return told


def read_checkpoint(path: Path, use_ema: bool = False) -> Checkpoint:
    """Read tensors, and what the file tells of their model. Prefixes of wrappers are stripped.

    The path is that of a checkpoint of timm's `train.py`, a state dict (pickled or safetensors), or a folder in timm's
    `local-dir:` layout. The tensors are copies in memory, and no larger than the file.
    """
    with reading(path, 'a checkpoint'):
        config, path = _find(path)
        sha256 = _sha256(path)
        content, metadata = _load(path)
        if not isinstance(content, dict):
            raise CheckpointError(
                f'{path} holds a {type(content).__name__}, not a state dict: save model.state_dict().')
        content = as_dict(content)
        state_dict = _select_state_dict(content, path, use_ema)
        if _sha256(path) != sha256:
            raise CheckpointError(f'{path} changed while it was read: try again when nothing writes to it.')
    args = content.get('args')
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    args = as_dict(args) if isinstance(args, dict) else {}
    try:
        if not config and 'model_args' in metadata:
            config = {'architecture': metadata.get('architecture'), 'model_args': json.loads(metadata['model_args'])}
        elif not config:
            config = _train_config(content.get('arch'), args)
        return Checkpoint(state_dict, *_read_model(config), plain_items(args), sha256)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f'{path} has a malformed model configuration: {one_line(e)}.') from e


def _find(path: Path) -> Tuple[Dict[str, Any], Path]:
    """Return the configuration and the weights file of a folder, or a file itself."""
    if not path.is_dir():
        if not path.is_file():
            raise CheckpointError(
                f'{path} does not exist or is not a file: give a checkpoint file, a local-dir: folder or '
                'hf-hub:USER/NAME.')
        return {}, path
    config = path / 'config.json'
    if not config.exists():
        raise CheckpointError(
            f"{path} has no config.json: it is not a folder in timm's local-dir: layout. Of a folder of train.py's, "
            'give a file, such as model_best.pth.tar.')
    told = read_json(config, "a model configuration of timm's")
    weights = next((path / name for name in WEIGHT_NAMES if (path / name).is_file()), None)
    if weights is None:
        raise CheckpointError(f'{path} is a folder without weights: expected one of {", ".join(WEIGHT_NAMES)}.')
    return told, weights


def strip_prefixes(state_dict: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Return tensors by their names without the prefixes of DistributedDataParallel and torch.compile."""
    stripped: Dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        plain, = clean_state_dict(clean_state_dict({name: tensor}))  # twice: older timm knows one order only
        if plain in stripped:
            raise CheckpointError(
                f'{shorten(plain)} is there twice, once with the prefix of a wrapper (module., _orig_mod.): save the '
                'state_dict() of one model.')
        stripped[plain] = tensor
    return stripped


def _load(path: Path) -> Tuple[Any, Dict[str, str]]:
    """Return what a file holds, and its metadata. The file is mapped: nothing is larger than what is in it."""
    if path.suffix == '.safetensors':
        with reading(path, 'a safetensors file'), safetensors.safe_open(path, framework='pt') as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    with reading(path, 'a checkpoint'):
        torch.serialization.add_safe_globals([argparse.Namespace])  # of the arguments of timm's train.py
        is_zip = _check_pickles(path)
        # Without mmap, older torch reads beyond the end of a tensor that claims to be larger than it is.
        return torch.load(path, map_location='cpu', mmap=is_zip, weights_only=True), {}


def _check_pickles(path: Path) -> bool:
    """Refuse pickles that name what no checkpoint needs; return whether they are in a zip file (torch 1.6 or later)."""
    with path.open('rb') as file:
        is_zip = file.read(4) == b'PK\3\4'
        file.seek(0)
        if is_zip:
            archive = zipfile.ZipFile(file)
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise CheckpointError(f'{path} is compressed, which torch.save never does: load and save it again.')
            # as torch finds it, which takes DATA.PKL as well, and another directory where there are two
            pickles: List[Any] = [io.BytesIO(torch._C.PyTorchFileReader(str(path)).get_record('data.pkl'))]
        else:
            pickles = [file] * 5  # magic number, version, system, content, names of storages: one after the other
        for stream in pickles:
            for opcode, arg, _ in pickletools.genops(stream):
                if 'GLOBAL' in opcode.name and not PICKLED_NAMES.fullmatch(arg or ''):
                    raise CheckpointError(
                        f'{path} needs code to load, which is never executed ({shorten(arg)}): save its state_dict() '
                        'alone.')
    return is_zip


def _select_state_dict(content: Dict[Any, Any], path: Path, use_ema: bool) -> Dict[str, torch.Tensor]:
    """Return what timm's `load_state_dict` would take, but averaged weights only where asked for."""
    ema = [key for key in ('state_dict_ema', 'model_ema') if content.get(key) is not None]
    if use_ema and not ema:
        raise CheckpointError(f'{path} holds no EMA weights: leave out use_ema=True.')
    key = ema[0] if use_ema else next((key for key in ('state_dict', 'model') if key in content), None)
    state_dict = content if key is None else content[key]
    if not isinstance(state_dict, dict) or not state_dict:
        raise CheckpointError(f'{path} holds no state dict{"" if key is None else f" in {key!r}"}.')
    try:
        tensors = checked_tensors(as_dict(state_dict), path.stat().st_size)
    except ValueError as e:
        raise CheckpointError(f'{path} is not a state dict: {e}.') from e
    return strip_prefixes(tensors)


def _train_config(architecture: Any, args: Dict[str, Any]) -> Dict[str, Any]:
    """Return the arguments of timm's `train.py` in the form of timm's config.json."""
    model_args = dict_in(args, 'model_kwargs')
    args = plain_items(args)
    for name, key in (('img_size', 'img_size'), ('in_chans', 'in_chans'), ('gp', 'global_pool')):
        if args.get(name) is not None:
            model_args.setdefault(key, args[name])
    return {
        'architecture': args.get('model') if architecture is None else architecture,
        'model_args': model_args,
        'pretrained_cfg': {key: args[key] for key in ('input_size', *CFG) if args.get(key)},
    }


def _read_model(config: Dict[str, Any]) -> Tuple[Optional[str], Dict[str, Any], Dict[str, Any]]:
    """Return architecture, model arguments and the rest of a config.json; its root overrules the inside, as in timm."""
    architecture, pretrained_cfg = config.get('architecture'), dict_in(config, 'pretrained_cfg')
    pretrained_cfg.update((key, config[key]) for key in ('label_names', 'label_descriptions') if key in config)
    if architecture is not None and not TEXT.accepts(architecture):
        raise ValueError(f'architecture is {shorten(architecture)}, where {TEXT.expected} was expected')
    model_args, input_size = dict_in(config, 'model_args'), pretrained_cfg.get('input_size')
    if input_size is not None:
        if not isinstance(input_size, (tuple, list)) or len(input_size) != 3:
            raise ValueError(f'input_size is {shorten(input_size)}, where three whole numbers were expected')
        model_args = {'in_chans': input_size[0], 'img_size': input_size[1:], **model_args}
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
        {path.name: read_text(path) for path in folder.iterdir() if path.name != 'model.safetensors'}
        for folder in (one, other))
    return (
        texts == other_texts and metadata == other_metadata and tensors.keys() == other_tensors.keys()
        and all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items()))
