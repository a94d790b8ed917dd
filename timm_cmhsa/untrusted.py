"""Checks of what files tell of their models. Only known names, types and ranges go through.

Some arguments of `timm.create_model` load other files, run code or write anywhere (`pretrained`, `pretrained_cfg`,
`checkpoint_path`, `cache_dir`), and a large number can exhaust the memory. So whatever reaches timm goes through
`checked_args` and `checked_cfg` first, and `build_model` allocates no memory before it knows that the tensors fit.
"""
import math
from typing import Any, Callable, Dict, Mapping, NamedTuple

import timm
import torch
from timm.layers import to_2tuple
from torch import nn

from .construction import MAX_HEAD_DIM, MAX_HEADS
from .encodings import ENCODINGS
from .messages import shorten
from .rel_pos import RelPosTable

MAX_TOKENS = 2 ** 14  # of an image: one head's attention takes 1 GB then
MAX_VALUES = 2 ** 26  # of an image
REAL = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool)
NORM_LAYERS = ('layernorm', 'layernormfp32', 'rmsnorm', 'rmsnormfp32', 'simplenorm', 'simplenormfp32')
ACT_LAYERS = (
    'silu', 'swish', 'mish', 'relu', 'relu6', 'leaky_relu', 'elu', 'prelu', 'celu', 'selu', 'gelu', 'gelu_tanh',
    'quick_gelu', 'sigmoid', 'tanh', 'hard_sigmoid', 'hard_swish', 'hard_mish', 'hardsigmoid', 'hardswish',
    'identity')


class Rule(NamedTuple):
    """What a value may be."""
    accepts: Callable[[Any], bool]
    expected: str


def _int(low: int, high: int) -> Rule:
    return Rule(lambda value: type(value) is int and low <= value <= high, f'a whole number from {low} to {high}')


def _number(low: float, high: float) -> Rule:
    return Rule(
        lambda value: type(value) in (int, float) and low <= value <= high, f'a number from {low:g} to {high:g}')


def _size(high: int, low: int = 1) -> Rule:
    def accepts(value: Any) -> bool:
        sides = value if isinstance(value, (tuple, list)) and len(value) == 2 else [value]
        return all(type(side) is int and low <= side <= high for side in sides)
    return Rule(accepts, f'one or two whole numbers from {low} to {high}')


def _list_of(rule: Rule, most: int) -> Rule:
    return Rule(
        lambda value: isinstance(value, (tuple, list)) and 0 < len(value) <= most and all(map(rule.accepts, value)),
        f'a list of 1 to {most}, each {rule.expected}')


def _one_of(*choices: Any) -> Rule:
    return Rule(
        lambda value: isinstance(value, (str, bool)) and value in choices, f'one of {", ".join(map(repr, choices))}')


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 1000 and not any('\ud800' <= char <= '\udfff' for char in value)


def _either(one: Rule, other: Rule) -> Rule:
    return Rule(lambda value: one.accepts(value) or other.accepts(value), f'{one.expected} or {other.expected}')


TEXT = Rule(_is_text, 'a text of at most 1000 characters')
_HEADS = _int(0, MAX_HEADS)
_RATE = _number(0, 1)

ARGS: Dict[str, Rule] = {
    'img_size': _size(2 ** 12), 'patch_size': _size(2 ** 10), 'kernel_size': _size(255),
    'in_chans': _int(1, 1000), 'hidden_chans': _int(1, 10_000), 'num_classes': _int(0, 10 ** 6),
    'depth': _int(1, 200), 'mlp_ratio': _number(0, 1000), 'init_values': _number(-1000, 1000),
    'num_heads': _either(_HEADS, _list_of(_HEADS, 1000)), 'head_dim': _int(1, MAX_HEAD_DIM),
    'qkv_bias': _one_of(True, False), 'rel_pos': _one_of(*ENCODINGS), 'padding': _size(2 ** 12, low=0),
    'global_pool': _one_of('', 'avg', 'avgmax', 'max', 'map', 'prr'),
    'fc_norm': _one_of(True, False), 'norm_layer': _one_of(*NORM_LAYERS), 'act_layer': _one_of(*ACT_LAYERS),
    'drop_rate': _RATE, 'proj_drop_rate': _RATE, 'attn_drop_rate': _RATE, 'drop_path_rate': _RATE,
}
CFG: Dict[str, Rule] = {
    'mean': _list_of(_number(-1e3, 1e3), 1000), 'std': _list_of(_number(1e-6, 1e3), 1000),
    'interpolation': _one_of('bicubic', 'bilinear', 'nearest', 'lanczos', 'hamming', 'box'),
    'crop_pct': _number(0.1, 10), 'crop_mode': _one_of('center', 'squash', 'border'),
    'label_names': _list_of(TEXT, 10 ** 6), 'license': TEXT,
    'label_descriptions': Rule(
        lambda value: isinstance(value, dict) and all(TEXT.accepts(x) for item in value.items() for x in item),
        'a text for every name'),
}


def _checked(told: Mapping[str, Any], rules: Mapping[str, Rule]) -> Dict[str, Any]:
    known = {name: told[name] for name in rules if told.get(name) is not None}
    for name, value in known.items():
        if not rules[name].accepts(value):
            raise ValueError(f'{name} is {shorten(value)}, where {rules[name].expected} was expected')
    return known


def checked_args(told: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the arguments of models of this package, without all others; raise ValueError for a bad value."""
    args = _checked(told, ARGS)
    if math.prod(to_2tuple(args.get('img_size', 1))) * args.get('in_chans', 1) > MAX_VALUES:
        raise ValueError(f"an image of {args['img_size']} with {args.get('in_chans', 1)} channels is too large")
    return args


def checked_cfg(told: Mapping[str, Any]) -> Dict[str, Any]:
    """Return preprocessing, classes and license, without all else; raise ValueError for a bad value."""
    return _checked(told, CFG)


def check_num_patches(model: nn.Module) -> None:
    """Refuse a model with too many patches, or with too wide a padding around them, before it takes any memory.

    Raises:
        ValueError: If it has.
    """
    for module in model.modules():
        grid_size = getattr(module, 'grid_size', None) or ()
        padding = getattr(module, 'padding', (0, 0)) if isinstance(module, RelPosTable) else (0, 0)
        num_keys = math.prod(side + 2 * pad for side, pad in zip(grid_size, padding))
        if math.prod(grid_size) > MAX_TOKENS or math.prod(grid_size) * num_keys > 2 * MAX_TOKENS ** 2:
            raise ValueError(
                f'images of {shorten(tuple(grid_size))} patches, and {shorten(tuple(padding))} of padding, have too '
                f'many: {MAX_TOKENS} are the most')


def checked_tensors(told: Mapping[Any, Any], most_bytes: int) -> Dict[str, torch.Tensor]:
    """Return copies of all tensors of a file in memory.

    Raises:
        ValueError: If one is not a dense, real tensor on the CPU, or all together take more than `most_bytes`.
    """
    for name, tensor in told.items():
        if type(name) is not str or not isinstance(tensor, torch.Tensor):
            raise ValueError(f'{shorten(name)} is a {type(tensor).__name__}')
        if tensor.layout is not torch.strided or tensor.device.type != 'cpu' or tensor.dtype not in REAL:
            raise ValueError(
                f'{shorten(name)} is of {tensor.layout} and {tensor.dtype} on {tensor.device}, where a dense tensor of '
                'real numbers in memory was expected')
    total = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in told.values())
    if total > most_bytes:  # expanded, or several views of the same
        raise ValueError(f'its tensors take {total} bytes, the file {most_bytes}')
    return {
        name: tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        for name, tensor in told.items()}


def build_model(
        name: str,
        args: Mapping[str, Any],
        pretrained_cfg: Mapping[str, Any],
        state_dict: Mapping[str, torch.Tensor],
) -> nn.Module:
    """Build a registered model from checked arguments. It holds these tensors themselves, and not as copies.

    Raises:
        RuntimeError: If the tensors are not those of this model. No memory was allocated for it.
        ValueError: If it has too many patches.
    """
    model = timm.create_model(name, **args, pretrained_cfg_overlay=dict(pretrained_cfg), device=torch.device('meta'))
    check_num_patches(model)
    model.load_state_dict(state_dict, assign=True)
    for module in model.modules():
        if hasattr(module, 'init_non_persistent_buffers'):
            module.init_non_persistent_buffers()
    return model.eval()


def as_dict(told: Dict[Any, Any]) -> Dict[Any, Any]:
    """Return a plain dictionary: an OrderedDict of a pickle can have attributes in place of its methods."""
    return dict(dict.items(told))


def dict_in(told: Mapping[str, Any], name: str) -> Dict[str, Any]:
    """Return a copy of the dictionary of this name, empty where there is none; raise ValueError for anything else."""
    value = told.get(name)
    if value is not None and type(value) is not dict:
        raise ValueError(f'{name} is {shorten(value)}, where a dictionary was expected')
    return dict(value or {})


def plain_items(told: Mapping[Any, Any]) -> Dict[str, Any]:
    """Return the items whose values are numbers, texts, or short lists of these."""
    def is_plain(value: Any) -> bool:
        return value is None or type(value) in (bool, int, float) or TEXT.accepts(value)
    return {
        name: value for name, value in told.items() if type(name) is str and (
            is_plain(value) or (type(value) in (list, tuple) and len(value) <= 1000 and all(map(is_plain, value))))}
