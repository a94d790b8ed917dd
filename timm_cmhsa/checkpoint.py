"""Checkpoints: tensors, and which model they are of, in a file, a folder, or on the Hugging Face Hub.

No code of a file is run: tensors are read by safetensors or `torch.load(weights_only=True)`, and only the model
arguments below, within their bounds, reach timm.
"""
import argparse
import json
import logging
import math
import os
import reprlib
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np
import safetensors.torch
import timm
import torch
from huggingface_hub import snapshot_download
from timm.layers import to_2tuple
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.models._pretrained import filter_pretrained_cfg
from torch import nn

from .attended import check_attended, create_attended
from .convert import DATA_KEYS
from .errors import CheckpointError, HubError, one_line
from .files import MODEL_SUFFIXES, PathLike, check_destination, is_ours, local_path, read_json, replacing
from .infer import infer_model
from .models import registered_variant

_logger = logging.getLogger(__name__)

HUB_PREFIXES = ('hf-hub:', 'hf_hub:')
EMA_KEYS = ('state_dict_ema', 'model_ema')
WEIGHT_NAMES = 'model.safetensors', 'pytorch_model.bin'
LABEL_KEYS = ('label_names', 'label_descriptions')
MAX_TOKENS = 2 ** 14  # of an image: the attention of one head takes 1 GB then

# Model arguments that a file or the Hub may set: their types, or their largest values, as floats if they may be floats.
MODEL_ARGS: Dict[str, Any] = {
    'img_size': 4096, 'patch_size': 1024, 'kernel_size': 255, 'padding': 255, 'in_chans': 1000, 'hidden_chans': 10_000,
    'num_classes': 10 ** 6, 'depth': 200, 'num_heads': 10_000, 'head_dim': 100_000, 'qk_dim': 100_000,
    'mlp_ratio': 1000., 'init_values': 1000., 'drop_rate': 1., 'proj_drop_rate': 1., 'attn_drop_rate': 1.,
    'drop_path_rate': 1., 'qkv_bias': bool, 'fc_norm': bool, 'hard_attn': bool, 'global_pool': str, 'rel_pos': str,
    'norm_layer': str, 'act_layer': str, 'mlp_layer': str, 'stem': str}
# Types without code of their own, which training loops save beside weights, by the names that pickle has for them.
SAFE_TYPES: List[Any] = [
    argparse.Namespace, np.ndarray, np.dtype,
    *((value.__reduce__()[0], f'numpy.{core}.multiarray.{name}') for core in ('core', '_core')
      for name, value in (('scalar', np.float64()), ('_reconstruct', np.empty(0)))),
    *(each for each in vars(np.dtypes).values() if isinstance(each, type) and each is not type(np.dtype(object))),
    *((PurePath, f'{module}.{kind}Path') for module in ('pathlib', 'pathlib._local') for kind in ('Posix', 'Windows'))]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_model(source: PathLike, architecture: Optional[str] = None, use_ema: bool = True, **model_kwargs: Any) -> Any:
    """Load a model of this package, or a CNN that was saved after `attend_convs`, in eval mode, on the CPU.

    Args:
        source: Checkpoint of timm's `train.py`, state dict (pickled or safetensors), `local-dir:` folder, or model on
            the Hugging Face Hub, `hf-hub:USER/NAME[@REVISION]`.
        architecture: timm's name of the model; by default what the checkpoint says, or what fits its tensors.
        use_ema: Take the averaged weights of a training checkpoint if it has them, as timm does.
        **model_kwargs: Arguments of `timm.create_model` that the checkpoint lacks.

    Raises:
        CheckpointError: If the checkpoint cannot be read, or is not of this model.
        HubError: If it cannot be downloaded.
    """
    return build_model(Checkpoint.read(source, use_ema), architecture, **model_kwargs)


def open_model(source: PathLike) -> nn.Module:
    """Load a model as `load_model` does, or one of timm: from a folder, from the Hub, or pretrained by its name."""
    path, name = local_path(source), str(source)
    if os.path.exists(path) or not timm.is_model_pretrained(name):
        checkpoint = Checkpoint.read(source)
        spec = checkpoint.spec
        if os.path.isfile(path) or spec.attend or spec.architecture is None or is_ours(spec.architecture):
            return build_model(checkpoint)
        name = name if name.startswith(HUB_PREFIXES) else f'local-dir:{path}'
    try:
        return timm.create_model(name, pretrained=True).eval()
    except Exception as e:  # timm and its layers raise many kinds
        error = CheckpointError if name.startswith('local-dir:') else HubError
        raise error(f'{source} cannot be loaded by timm.create_model: {one_line(e, 300)}') from e


def build_model(checkpoint: 'Checkpoint', architecture: Optional[str] = None, **model_kwargs: Any) -> Any:
    """Build the model of a checkpoint, and warn of what was assumed. See `load_model`."""
    if checkpoint.spec.attend:
        check_tensors(checkpoint.tensors, checkpoint.source)
        return create_attended(checkpoint, **model_kwargs)
    model = checkpoint.model(architecture, **model_kwargs)
    for note in checkpoint.spec.notes:
        _logger.warning('%s: %s', checkpoint.source, note)
    return model


@dataclass
class Spec:
    """Which model tensors are of, in the terms of timm's config.json."""
    architecture: Optional[str] = None  # timm's name
    model_args: Dict[str, Any] = field(default_factory=dict)  # of `timm.create_model`
    pretrained_cfg: Dict[str, Any] = field(default_factory=dict)  # preprocessing and label names
    notes: List[str] = field(default_factory=list)  # what was chosen or assumed, for a report
    attend: Any = field(default_factory=list)  # calls of `attend_convs`, if it is a CNN of timm


@dataclass
class Checkpoint:
    """Tensors, and which model they are of."""
    spec: Spec
    tensors: Dict[str, torch.Tensor]
    source: str = 'The model'  # where they are from, for errors

    @classmethod
    def read(cls, source: PathLike, use_ema: bool = True) -> 'Checkpoint':
        """Read a file, a folder or a model on the Hub, see `load_model`."""
        path = _download(str(source)) if str(source).startswith(HUB_PREFIXES) else local_path(source)
        config: Dict[str, Any] = {}
        if os.path.isdir(path):
            config = read_json(path / 'config.json')
            weights = [path / name for name in WEIGHT_NAMES if (path / name).is_file()]
            if not weights:
                raise CheckpointError(f'{path} is a folder without weights: expected {" or ".join(WEIGHT_NAMES)}.')
            path = weights[0]
        elif not os.path.isfile(path):
            raise CheckpointError(
                f'{path} does not exist: give a checkpoint file, a local-dir: folder or hf-hub:USER/NAME.')
        content, told = _read_file(path)
        spec = _checked_spec(config or told, str(path))
        keys = (*EMA_KEYS, 'state_dict', 'model') if use_ema else ('state_dict', 'model')
        found = [name for name, each in content.items() if _is_state_dict(each)]
        only = found[0] if len(found) == 1 else None
        key = next((key for key in keys if key in found), only)
        if key in EMA_KEYS:
            spec.notes.append(f'averaged (EMA) weights, {key}, which validate.py reads from this file with --use-ema')
        return cls(spec, named_tensors(content if key is None else content[key], str(path)), str(source))

    @classmethod
    def of(cls, model: Any) -> 'Checkpoint':
        """Return the checkpoint of a model, see `load_model`, if its arguments (`base_args` of a CNN) give it anew."""
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        cfg = dict(filter_pretrained_cfg(model.pretrained_cfg, remove_source=True), num_classes=model.num_classes)
        architecture = cfg.pop('architecture')
        if hasattr(model, 'attended'):
            size = dict(num_classes=model.num_classes, in_chans=cfg['input_size'][0], img_size=cfg['input_size'][1:])
            args = checked_args({**getattr(model, 'base_args', {}), **size}, 'base_args')
            checkpoint = cls(Spec(architecture, args, cfg, attend=model.attended), tensors)
            check_attended(checkpoint, args)
            return checkpoint
        if isinstance(model.norm, nn.Identity) and isinstance(model.fc_norm, nn.Identity):
            raise CheckpointError('The final norm was pruned, which no arguments give: use prune_norm=False.')
        args = checked_args({**model.model_args(), 'num_classes': None}, 'The model')
        cfg.update(input_size=(model.in_chans, *model.patch_embed.img_size))
        return cls(Spec(architecture, args, cfg), tensors)

    def model(self, architecture: Optional[str] = None, **model_kwargs: Any) -> Any:
        """Build a model of this package around the tensors, in eval mode. See `load_model`."""
        name, args, assumed = self._model_args(architecture, checked_args(model_kwargs, 'model_kwargs'))
        try:
            if not args.get('stem') and args.get('in_chans', 0) > args.get('hidden_chans', math.inf):
                raise ValueError(
                    f'its tokens carry {args["hidden_chans"]} channels per pixel, and in_chans can be no more')
            model = timm.create_model(
                name, **args, pretrained_cfg_overlay=self.spec.pretrained_cfg, device=torch.device('meta'))
            if model.patch_embed.num_patches > MAX_TOKENS:
                raise ValueError(f'images of {model.patch_embed.num_patches} patches exceed the limit of {MAX_TOKENS}')
            model.load_state_dict(self.tensors, assign=True)
        except Exception as e:  # timm's layers raise many kinds
            raise CheckpointError(
                f'{self.source} does not fit {name} with {reprlib.repr(args)}: {one_line(e, 300)}') from e
        check_tensors(model.state_dict(), self.source)
        reinit_non_persistent_buffers(model)
        if assumed:
            values = model.model_args()
            self.spec.notes.append(f'assumed {", ".join(f"{key}={values[key]}" for key in assumed)}')
        return model.eval()

    def _model_args(self, architecture: Optional[str], given: Dict[str, Any]) -> Tuple[str, Dict[str, Any], List[str]]:
        """Return name and arguments of the model, and which of them nothing determines."""
        head = self.tensors.get('head.weight', torch.empty(0))  # none without a classifier
        told = {**self.spec.model_args, 'num_classes': len(head) if head.dim() else 0}
        for key in told.keys() & given.keys():
            if to_2tuple(told[key]) != to_2tuple(given[key]):
                later = ', and call set_input_size afterwards' if key == 'img_size' else ''
                raise CheckpointError(
                    f'{self.source} was trained with {key}={told[key]}, but {key}={given[key]} was given: leave it '
                    f'out{later}.')
        args, name = {**told, **given}, architecture or self.spec.architecture or ''
        if name.startswith(('local-dir:', *HUB_PREFIXES)):
            name = ''  # train.py calls a model by the folder that it started from
        if name and not is_ours(name):
            raise CheckpointError(
                f'{self.source} is of {reprlib.repr(name)}, which is not a model of timm_cmhsa: load it by '
                f'{"timm_cmhsa.load_model" if self.spec.attend else "timm.create_model"}.')
        if name and 'cmhsa' not in name:  # on pixels
            return name, args, []
        try:
            kind, inferred, assumed = infer_model(self.tensors)
        except Exception as e:  # of tensors that are missing, or have other shapes
            names = ', '.join(map(reprlib.repr, sorted(self.tensors)[:5]))
            raise CheckpointError(
                f'{self.source} holds {names}, ...: these are not the tensors of a phase-1 or phase-2 model.') from e
        if name and ('attn' in name) != ('attn' in kind):
            raise CheckpointError(
                f'{self.source} is like {kind}, and not of {name}: `convert_checkpoint` makes phase 2 of phase 1.')
        assumed = [key for key in assumed if key not in args]
        args = {**checked_args(inferred, self.source), **args}
        if name:
            return name, args, []
        patch_size = to_2tuple(args['patch_size'])
        img_size = args.get('img_size', 14 * patch_size[0])  # as for 224 pixels
        return registered_variant(kind, patch_size, args['hidden_chans'], args.get('stem', ''), img_size), args, assumed

    def write(self, dst: PathLike, force: bool = False, card: Optional[str] = None) -> None:
        """Write a `.safetensors` or `.pth` file, by the suffix, or a folder for timm's `local-dir:`, with a card."""
        spec, metadata, cfg = self.spec, {'format': 'pt'}, filter_pretrained_cfg(self.spec.pretrained_cfg)
        with replacing(check_destination(dst, force), force) as new:
            if new.suffix == '.safetensors':
                metadata.update(architecture=spec.architecture or '', model_args=json.dumps(spec.model_args))
                safetensors.torch.save_file(self.tensors, new, metadata)
            elif new.suffix in MODEL_SUFFIXES:
                torch.save(self.tensors, new)
            else:
                new.mkdir()
                safetensors.torch.save_file(self.tensors, new / WEIGHT_NAMES[0], metadata)
                config = {  # as timm and transformers read it
                    'architecture': spec.architecture, 'num_classes': cfg['num_classes'],
                    **{key: cfg.pop(key) for key in LABEL_KEYS if cfg.get(key)}, 'model_args': spec.model_args,
                    'pretrained_cfg': cfg, **({'attend': spec.attend} if spec.attend else {})}
                (new / 'config.json').write_text(json.dumps(config, indent=2), encoding='utf-8')
                if card is not None:
                    (new / 'README.md').write_text(card, encoding='utf-8')


def _read_file(path: Path) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Return what a file holds, and what it says about its model, in the form of config.json."""
    config: Dict[str, Any] = {}
    try:
        if path.suffix == '.safetensors':
            with safetensors.safe_open(path, framework='pt') as file:
                content: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
            if 'model_args' in metadata:
                config = {**metadata, 'model_args': json.loads(metadata['model_args'])}
        else:
            with torch.serialization.safe_globals(SAFE_TYPES):
                content = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as e:  # parsers of broken files raise many kinds
        raise CheckpointError(
            f'{path} is not a checkpoint that loads without running code, or damaged: save model.state_dict().') from e
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} holds a {type(content).__name__}, not a state dict: save model.state_dict().')
    return content, _config_of_training(content) if 'args' in content else config


def checked_args(args: Mapping[str, Any], source: str, ignore_others: bool = False) -> Dict[str, Any]:
    """Return the model arguments that are not None; raise CheckpointError for a bad one, or an unknown one."""
    others = sorted(map(str, args.keys() - MODEL_ARGS.keys()))
    if others and not ignore_others:
        raise CheckpointError(
            f'{source}: {", ".join(others)}: not an argument of these models. Choose from {", ".join(MODEL_ARGS)}.')
    known = {name: tuple(args[name]) if isinstance(args[name], list) else args[name]
             for name in MODEL_ARGS if args.get(name) is not None}
    for name, value in known.items():
        limit, values = MODEL_ARGS[name], value if isinstance(value, tuple) else (value,)  # one for each side or block
        if isinstance(limit, type):
            is_good = isinstance(value, limit) and len(str(value)) <= 100
        else:
            is_good = len(values) <= MODEL_ARGS['depth'] and all(
                type(x) in (int, type(limit)) and 0 <= x <= limit for x in values)
        if not is_good:
            raise CheckpointError(f'{source}: {name}={reprlib.repr(value)} is not what a model can have.')
    return known


def _checked_spec(config: Mapping[str, Any], source: str) -> Spec:
    """Return what a config.json like timm's says, without what no model of this package can have."""
    architecture, told = config.get('architecture'), config.get('pretrained_cfg') or {}
    model_args, attend = config.get('model_args') or {}, config.get('attend') or []
    if not (isinstance(model_args, dict) and isinstance(told, dict) and isinstance(architecture, (str, type(None)))):
        raise CheckpointError(f'{source} has a malformed model configuration.')
    if not isinstance(attend, list) or not all(
            isinstance(call, dict) and {*call} == {'names', 'patch_size', 'peak'} and isinstance(call['names'], list)
            for call in attend):
        raise CheckpointError(f'{source}: attend={reprlib.repr(attend)} is not what attend_convs takes.')
    told = {**told, **{key: config[key] for key in LABEL_KEYS if key in config}}
    input_size = told.get('input_size')
    if isinstance(input_size, (tuple, list)) and len(input_size) == 3:
        model_args = {'in_chans': input_size[0], 'img_size': list(input_size[1:]), **model_args}
    kinds: Dict[str, Any] = {
        'crop_pct': (int, float), 'interpolation': str, 'crop_mode': str, 'label_descriptions': dict}
    cfg = {key: told[key] for key in DATA_KEYS if told.get(key) is not None}
    for key, value in cfg.items():
        if not isinstance(value, kinds.get(key, (tuple, list))):
            raise CheckpointError(f'{source}: {key}={reprlib.repr(value)} is not what timm expects.')
    # with attention, another argument would give another function
    return Spec(architecture, checked_args(model_args, source, ignore_others=not attend), cfg, attend=attend)


def _config_of_training(content: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the arguments of timm's `train.py`, which a checkpoint holds, in the form of config.json."""
    args = content['args']
    args = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}
    options = {'img_size': 'img_size', 'in_chans': 'in_chans', 'gp': 'global_pool'}
    model_args = {key: args[name] for name, key in options.items() if args.get(name) is not None}
    if isinstance(args.get('model_kwargs'), dict):
        model_args.update(args['model_kwargs'])
    return {
        'architecture': content.get('arch', args.get('model')), 'model_args': model_args, 'pretrained_cfg': args,
        'attend': args.get('attend')}


def _is_state_dict(content: Any) -> bool:
    return isinstance(content, Mapping) and len(content) > 0 and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items())


def named_tensors(state_dict: Any, source: str) -> Dict[str, torch.Tensor]:
    """Return tensors by their names without what all names begin with, as those of a wrapper do."""
    if not _is_state_dict(state_dict):
        raise CheckpointError(f'{source} holds no state dict: save model.state_dict().')
    tensors = {name: tensor for name, tensor in state_dict.items() if name != 'n_averaged'}  # of AveragedModel
    while len({name.split('.')[0] for name in tensors}) == 1 and all('.' in name for name in tensors):
        tensors = {name.split('.', 1)[1]: tensor for name, tensor in tensors.items()}
    return tensors


def check_tensors(state_dict: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise CheckpointError unless all tensors are plain, finite floating point tensors."""
    for name, tensor in state_dict.items():
        is_count = tensor.dtype is torch.int64 and name.endswith('.num_batches_tracked')  # of batch norm
        is_plain = (is_count or tensor.dtype in DTYPES) and tensor.layout is torch.strided and not tensor.is_meta
        if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():  # more values than the file has
            raise CheckpointError(f'{source}: {name} is not a plain tensor of floating point numbers.')
        if not tensor.isfinite().all():
            raise CheckpointError(f'{source}: {name} holds NaN or Inf, as the training diverged: take an earlier one.')


def _download(source: str) -> Path:
    """Download a model, `hf-hub:USER/NAME[@REVISION]`, into huggingface_hub's cache; return its folder."""
    repo_id, _, revision = source[len(HUB_PREFIXES[0]):].partition('@')
    try:
        for name in WEIGHT_NAMES:
            folder = Path(snapshot_download(
                repo_id, revision=revision or None, library_name='timm_cmhsa', allow_patterns=['config.json', name]))
            if (folder / name).exists():
                break
        return folder
    except (OSError, ValueError, RuntimeError) as e:  # huggingface_hub and its HTTP client have no common base
        raise HubError(f'{source} cannot be downloaded: {one_line(e)}') from e
