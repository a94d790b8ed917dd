"""Load a model from a file, a folder or the Hugging Face Hub.

No code of a file is run: tensors are read by safetensors or `torch.load(weights_only=True)`, and only the model
arguments below, within their bounds, reach timm.
"""
import argparse
import json
import logging
import math
import os
import reprlib
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import safetensors
import timm
import torch
from huggingface_hub import snapshot_download
from timm.layers import to_2tuple
from timm.models import clean_state_dict

from .convert import DATA_KEYS
from .errors import CheckpointError, HubError, one_line
from .models import Cmhsa
from .rel_pos import Grid, PaddedRelPosTable
from .variants import registered_variant

_logger = logging.getLogger(__name__)

PathLike = Union[str, Path]

HUB_PREFIXES = ('hf-hub:', 'hf_hub:')
EMA_KEYS = ('state_dict_ema', 'model_ema')
WEIGHT_NAMES = ('model.safetensors', 'pytorch_model.bin')
USUAL_GRID = 14  # tokens per image side, of models for 224 pixels
MAX_WORD = 100  # letters
MAX_TOKENS = 2 ** 14  # of an image: the attention of one head takes 1 GB then

# Model arguments that a file or the Hub may set. Largest values of whole numbers, and, as floats, of other numbers.
LIMITS = {
    'img_size': 4096, 'patch_size': 1024, 'kernel_size': 255, 'padding': 255, 'in_chans': 1000, 'hidden_chans': 10_000,
    'num_classes': 10 ** 6, 'depth': 200, 'num_heads': 10_000, 'head_dim': 100_000, 'qk_dim': 100_000,
    'mlp_ratio': 1000., 'init_values': 1000., 'drop_rate': 1., 'proj_drop_rate': 1., 'attn_drop_rate': 1.,
    'drop_path_rate': 1.}
FLAGS = ('qkv_bias', 'fc_norm', 'hard_attn')
WORDS = ('global_pool', 'rel_pos', 'norm_layer', 'act_layer', 'mlp_layer', 'stem')
MODEL_ARGS = (*LIMITS, *FLAGS, *WORDS)
NOT_IN_TENSORS = 'img_size', 'global_pool', 'act_layer'
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Checkpoint(NamedTuple):
    """Tensors, and what the file says about their model."""
    state_dict: Dict[str, torch.Tensor]
    architecture: Optional[str]
    model_args: Dict[str, Any]  # of `timm.create_model`
    pretrained_cfg: Dict[str, Any]  # preprocessing and label names
    notes: List[str]  # for the report


def load_model(
        source: PathLike,
        architecture: Optional[str] = None,
        use_ema: bool = True,
        **model_kwargs: Any,
) -> Cmhsa:
    """Load a model of this package, in eval mode, on the CPU.

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
    checkpoint = read_checkpoint(source, use_ema)
    model = build_model(checkpoint, source, architecture, model_kwargs)
    for note in checkpoint.notes:
        _logger.warning('%s: %s', source, note)
    return model


def read_checkpoint(source: PathLike, use_ema: bool = True) -> Checkpoint:
    """Read the tensors of a file, folder or model on the Hub, and what it says about their model."""
    path = download(str(source)) if str(source).startswith(HUB_PREFIXES) else local_path(source)
    config: Dict[str, Any] = {}
    if os.path.isdir(path):
        config = read_json(path / 'config.json')
        names = [name for name in WEIGHT_NAMES if (path / name).is_file()]
        if not names:
            raise CheckpointError(f'{path} is a folder without weights: expected one of {", ".join(WEIGHT_NAMES)}.')
        path = path / names[0]
    elif not os.path.isfile(path):
        raise CheckpointError(
            f'{path} does not exist: give a checkpoint file, a local-dir: folder or hf-hub:USER/NAME.')
    try:
        if path.suffix == '.safetensors':
            with safetensors.safe_open(path, framework='pt') as file:
                content: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
            if not config and 'model_args' in metadata:
                config = {**metadata, 'model_args': json.loads(metadata['model_args'])}
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments of timm's train.py
                content = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as e:  # parsers of broken files raise many kinds
        raise CheckpointError(
            f'{path} is not a checkpoint that can be read without running code. It is damaged, or holds more than '
            'tensors: save model.state_dict().') from e
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} holds a {type(content).__name__}, not a state dict: save model.state_dict().')
    if not config and 'args' in content:
        config = _train_config(content)
    keys = (*EMA_KEYS, 'state_dict', 'model') if use_ema else ('state_dict', 'model')
    key = next((key for key in keys if content.get(key) is not None), None)
    notes = [f'averaged (EMA) weights, {key}: validate.py needs --use-ema for the same'] if key in EMA_KEYS else []
    state_dict = named_tensors(content if key is None else content[key], str(path))
    return Checkpoint(state_dict, *_checked_config(config, str(path)), notes)


def build_model(
        checkpoint: Checkpoint,
        source: PathLike,
        architecture: Optional[str],
        model_kwargs: Mapping[str, Any],
) -> Cmhsa:
    """Build the model of a checkpoint around its tensors; see `load_model`."""
    unknown = ', '.join(sorted(model_kwargs.keys() - set(MODEL_ARGS)))
    if unknown:
        raise CheckpointError(f'{unknown}: not an argument of these models. Choose from {", ".join(MODEL_ARGS)}.')
    given = checked_args(model_kwargs, 'model_kwargs')
    told = {**checkpoint.model_args, 'num_classes': _num_classes(checkpoint.state_dict)}
    for key in told.keys() & given.keys():
        if to_2tuple(told[key]) != to_2tuple(given[key]):
            later = ', and call set_input_size afterwards' if key == 'img_size' else ''
            raise CheckpointError(
                f'{source} was trained with {key}={told[key]}, but {key}={given[key]} was given: leave it out{later}.')
    args, assumed = {**told, **given}, []
    name = architecture or checkpoint.architecture
    if name is not None and name.startswith(('local-dir:', *HUB_PREFIXES)):
        name = None  # train.py calls a model by the folder that it started from
    if name is not None and not is_ours(name):
        raise CheckpointError(
            f'{source} is of {reprlib.repr(name)}, which is not a model of timm_cmhsa: load it by timm.create_model.')
    if name is None or name in timm.list_models('*cmhsa*'):
        kind, inferred = infer_model(checkpoint.state_dict, source, to_2tuple(args.get('padding', 1)))
        if name is None:
            more = ('patch_size', 'in_chans') if kind.startswith('cmhsa_conv') and 'stem' not in inferred else (
                ('padding',) if inferred.get('rel_pos') == PaddedRelPosTable.name else ())
            assumed = [key for key in (*NOT_IN_TENSORS, *more) if key not in args]
        args = {**checked_args(inferred, str(source)), **args}
        patch_size = to_2tuple(args['patch_size'])
        img_size = args.get('img_size', USUAL_GRID * patch_size[0])
        name = name or registered_variant(kind, patch_size, args['hidden_chans'], args.get('stem', ''), img_size)
    try:
        if not args.get('stem') and args.get('in_chans', 0) > args.get('hidden_chans', math.inf):
            raise ValueError(f'its tokens carry {args["hidden_chans"]} channels per pixel, and in_chans can be no more')
        model = timm.create_model(
            name, **args, pretrained_cfg_overlay=checkpoint.pretrained_cfg, device=torch.device('meta'))
        if model.patch_embed.num_patches > MAX_TOKENS:
            raise ValueError(f'images of {model.patch_embed.num_patches} patches exceed the limit of {MAX_TOKENS}')
        model.load_state_dict(checkpoint.state_dict, assign=True)
    except Exception as e:  # timm's layers raise many kinds
        raise CheckpointError(
            f'{source} does not fit {name} with {reprlib.repr(args)}: {one_line(e, 300)}') from e
    check_tensors(model.state_dict(), str(source))
    for module in model.modules():
        if hasattr(module, 'init_non_persistent_buffers'):
            module.init_non_persistent_buffers()
    if assumed:
        values = model.model_args()
        checkpoint.notes.append(f'assumed {", ".join(f"{key}={values[key]}" for key in assumed)}')
    return model.eval()


def _num_classes(state_dict: Mapping[str, torch.Tensor]) -> int:
    weight = state_dict.get('head.weight')
    return 0 if weight is None or weight.dim() == 0 else len(weight)


def _infer_stem(state_dict: Mapping[str, torch.Tensor]) -> Dict[str, Any]:
    """Return the arguments of a model's stem, if it has one. A pooling has no tensors, only a place in the order."""
    convs = {int(name.split('.')[2]): tensor.shape for name, tensor in state_dict.items()
             if name.startswith('patch_embed.proj.') and name.endswith('.conv.weight')}
    if not convs:
        return {}
    stem = '-'.join(f'{shape[0]}{"" if i + 1 in convs else "p"}' for i, shape in sorted(convs.items()))
    return dict(stem=stem, patch_size=2 ** stem.count('p'), in_chans=convs[0][1])


def infer_model(
        state_dict: Mapping[str, torch.Tensor], source: PathLike, padding: Grid) -> Tuple[str, Dict[str, Any]]:
    """Return the kind of a model and the arguments that the shapes of its tensors determine, given the padding."""
    try:
        is_depthwise = 'blocks.0.mlp.conv.conv.weight' in state_dict
        hidden_dim, dim, *_ = state_dict[f'blocks.0.mlp.fc1{".conv" if is_depthwise else ""}.weight'].shape
        args: Dict[str, Any] = {
            'mlp_layer': 'depthwise' if is_depthwise else 'mlp',
            'depth': len({name.split('.')[1] for name in state_dict if name.startswith('blocks.')}),
            'mlp_ratio': next(ratio for ratio in (hidden_dim / dim, math.nextafter(hidden_dim / dim, math.inf))
                              if int(dim * ratio) == hidden_dim),  # timm multiplies and rounds down
            'init_values': 1e-5 if 'blocks.0.ls1.gamma' in state_dict else None,
            'fc_norm': 'fc_norm.weight' in state_dict,
        }
        stem = _infer_stem(state_dict)
        if 'blocks.0.attn.conv.weight' in state_dict:
            chans, _, *kernel_size = state_dict['blocks.0.attn.conv.weight'].shape
            args.update(
                hidden_chans=chans, kernel_size=tuple(kernel_size), patch_size=math.isqrt(dim // chans),
                in_chans=min(chans, 3))
            args.update(stem)
            return 'cmhsa_conv_k5' if kernel_size == [5, 5] else 'cmhsa_conv_k3', args
        if stem:
            args.update(stem, hidden_chans=dim)
            patch_size = [stem['patch_size']] * 2
        else:
            _, in_chans, *patch_size = state_dict['patch_embed.proj.weight'].shape
            args.update(patch_size=tuple(patch_size), in_chans=in_chans, hidden_chans=dim // math.prod(patch_size))
        num_heads, = state_dict['blocks.0.attn.rel_pos.zero_key_bias'].shape
        head_dim = state_dict['blocks.0.attn.proj.weight'].shape[1] // num_heads
        qk_dim = (len(state_dict['blocks.0.attn.qkv.weight']) // num_heads - head_dim) // 2
        is_padded = 'blocks.0.attn.rel_pos.bias_scale' in state_dict
        side = (math.isqrt(len(state_dict['blocks.0.attn.rel_pos.relative_position_bias_table'])) + 1) // 2
        args.update(
            img_size=tuple((side - is_padded * pad) * patch for pad, patch in zip(padding, patch_size)),
            num_heads=num_heads, head_dim=head_dim, qk_dim=qk_dim, qkv_bias='blocks.0.attn.qkv.bias' in state_dict,
            rel_pos='padded_table' if is_padded else 'table')
        return 'cmhsa_attn_soft' if is_padded else 'cmhsa_attn', args
    except (KeyError, IndexError, ValueError, ZeroDivisionError, StopIteration) as e:
        names = ', '.join(map(reprlib.repr, sorted(state_dict)[:5]))
        raise CheckpointError(
            f'{source} holds {names}, ...: these are not the tensors of a phase-1 (cmhsa_conv_*) or phase-2 '
            '(cmhsa_attn*) model.') from e


def checked_args(args: Mapping[str, Any], source: str) -> Dict[str, Any]:
    """Return the known model arguments and drop all others.

    Raises:
        CheckpointError: If one has another type or is out of bounds.
    """
    def is_good(name: str, value: Any) -> bool:
        if name not in LIMITS:
            return isinstance(value, bool) if name in FLAGS else isinstance(value, str) and len(value) <= MAX_WORD
        values = value if isinstance(value, tuple) else (value,)  # one for each side or block
        kinds = (int, type(LIMITS[name]))
        return len(values) <= LIMITS['depth'] and all(type(x) in kinds and 0 <= x <= LIMITS[name] for x in values)

    known = {name: tuple(args[name]) if isinstance(args[name], list) else args[name]
             for name in MODEL_ARGS if args.get(name) is not None}
    for name, value in known.items():
        if not is_good(name, value):
            raise CheckpointError(f'{source}: {name}={reprlib.repr(value)} is not what a model can have.')
    return known


def _checked_config(config: Mapping[str, Any], source: str) -> Tuple[Optional[str], Dict[str, Any], Dict[str, Any]]:
    """Return architecture, model arguments, and preprocessing with label names, of a config.json like timm's."""
    architecture, model_args = config.get('architecture'), config.get('model_args') or {}
    told = config.get('pretrained_cfg') or {}
    is_name = architecture is None or isinstance(architecture, str)
    if not is_name or not isinstance(model_args, dict) or not isinstance(told, dict):
        raise CheckpointError(f'{source} has a malformed model configuration.')
    told = {**told, **{key: config[key] for key in ('label_names', 'label_descriptions') if key in config}}
    input_size = told.get('input_size')
    if isinstance(input_size, (tuple, list)) and len(input_size) == 3:
        model_args = {'in_chans': input_size[0], 'img_size': list(input_size[1:]), **model_args}
    kinds: Dict[str, Any] = {
        'crop_pct': (int, float), 'interpolation': str, 'crop_mode': str, 'label_descriptions': dict}
    cfg = {key: told[key] for key in DATA_KEYS if told.get(key) is not None}
    for key, value in cfg.items():
        if not isinstance(value, kinds.get(key, (tuple, list))):
            raise CheckpointError(f'{source}: {key}={reprlib.repr(value)} is not what timm expects.')
    return architecture, checked_args(model_args, source), cfg


def _train_config(content: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the arguments of timm's `train.py`, which a checkpoint holds, in the form of config.json."""
    args = content['args']
    args = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}
    model_args = args.get('model_kwargs')
    model_args = dict(model_args) if isinstance(model_args, dict) else {}
    for name, key in (('img_size', 'img_size'), ('in_chans', 'in_chans'), ('gp', 'global_pool')):
        if args.get(name) is not None:
            model_args.setdefault(key, args[name])
    return {
        'architecture': content.get('arch', args.get('model')), 'model_args': model_args,
        'pretrained_cfg': {key: args[key] for key in ('input_size', *DATA_KEYS) if args.get(key) is not None}}


def named_tensors(state_dict: Any, source: str) -> Dict[str, torch.Tensor]:
    """Return tensors by their names without the prefixes of DistributedDataParallel and torch.compile."""
    if not isinstance(state_dict, Mapping) or not state_dict or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state_dict.items()):
        raise CheckpointError(f'{source} holds no state dict: save model.state_dict().')
    return clean_state_dict(clean_state_dict(state_dict))  # twice, as older timm strips one order of them only


def check_tensors(state_dict: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise CheckpointError unless all tensors are plain, finite floating point tensors."""
    for name, tensor in state_dict.items():
        is_count = tensor.dtype is torch.int64 and name.endswith('.num_batches_tracked')  # of batch norm
        is_plain = (is_count or tensor.dtype in DTYPES) and tensor.layout is torch.strided and not tensor.is_meta
        if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():  # more values than the file has
            raise CheckpointError(f'{source}: {name} is not a plain tensor of floating point numbers.')
        if not tensor.isfinite().all():
            raise CheckpointError(f'{source}: {name} holds NaN or Inf, as the training diverged: take an earlier one.')


def read_json(path: Path) -> Dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(
            f'{path} cannot be read: {one_line(e)} Give a checkpoint file, or a folder with config.json, such as '
            'OUT/model of a training.') from e
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} is not a model configuration.')
    return content


def local_path(source: PathLike) -> Path:
    return Path(str(source).removeprefix('local-dir:'))


def download(source: str) -> Path:
    """Download a model, `hf-hub:USER/NAME[@REVISION]`, into huggingface_hub's cache; return its folder."""
    repo_id, _, revision = source[len(HUB_PREFIXES[0]):].partition('@')
    try:
        return Path(snapshot_download(
            repo_id, revision=revision or None, allow_patterns=['config.json', *WEIGHT_NAMES],
            library_name='timm_cmhsa'))
    except (OSError, ValueError, RuntimeError) as e:  # huggingface_hub and its HTTP client have no common base
        raise HubError(f'{source} cannot be downloaded: {one_line(e)}') from e


def is_ours(name: str) -> bool:
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith('timm_cmhsa.')
