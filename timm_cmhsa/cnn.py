"""Replace the convolutions of any CNN by attention that computes the same function."""
import contextlib
import logging
import math
from collections import Counter
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, get_same_padding
from timm.utils import unwrap_model
from torch import nn
from torch.utils._pytree import tree_leaves

from .analysis import eval_mode
from .attention import RelPosAttention, default_qk_dim
from .construction import HeadOptions, keeps_size, plan_heads, rewrite
from .errors import one_line, text_table
from .layers import patchify, unpatchify

_logger = logging.getLogger(__name__)

Pair = Tuple[int, int]  # height and width
Shapes = Set[Tuple[torch.Size, torch.Size]]  # of a convolution's input and output, without the batch
SOFTMAX_MACS = 16  # multiply-accumulates that take about as long as one exponential, to choose the width of heads
MAX_BIAS_ENTRIES = 2 ** 31  # of a layer: 8 GiB in float32
TF32_EPS = 2 ** -10  # cuDNN's convolutions round to TF32 by default


# Keep these functions as leaves for FX: they branch on traced values.
@torch.fx.wrap
def map_to_tokens(x: torch.Tensor, map_size: Pair, patch_size: Pair, grid_size: Pair) -> torch.Tensor:
    """Flatten a feature map's patches; zeros fill up the last ones."""
    height, width = x.shape[-2:]
    if height != map_size[0] or width != map_size[1]:
        raise ValueError(
            f'Attention expects a map of {map_size[0]} x {map_size[1]}, this one has {height} x {width}: pass the '
            'input_size of the model to attend_convs.')
    grow_h, grow_w = grid_size[0] * patch_size[0] - height, grid_size[1] * patch_size[1] - width
    return patchify(F.pad(x, [0, grow_w, 0, grow_h]), patch_size)


@torch.fx.wrap
def tokens_to_map(
        tokens: torch.Tensor, like: torch.Tensor, map_size: Pair, patch_size: Pair, grid_size: Pair) -> torch.Tensor:
    """Put patches together as a feature map, in the memory format of another map, as convolutions do."""
    x = unpatchify(tokens, patch_size, grid_size)[..., :map_size[0], :map_size[1]]
    if like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous()


class AttendedConv2d(nn.Module):
    """Self-attention in place of a convolution: (B, C_in, H, W) to (B, C_out, H_out, W_out).

    Tokens are flattened patches of the feature map, their sides rounded up to multiples of the stride. Attributes of
    the convolution, such as `kernel_size`, are kept.
    """

    def __init__(
            self, conv: nn.Conv2d, map_size: Pair, out_size: Pair, patch_size: int, peak: Optional[float],
            generator: torch.Generator) -> None:
        super().__init__()
        self.map_size, self.out_size = map_size, out_size
        self.patch_size, self.grid_size = _tokens(conv, map_size, out_size, patch_size)
        self.out_patch_size = self.patch_size[0] // conv.stride[0], self.patch_size[1] // conv.stride[1]
        self.attn = _cheapest_rewrite(conv, self.patch_size, self.grid_size, peak, generator)
        self.attn.requires_grad_(conv.weight.requires_grad)
        if conv.bias is not None:
            self.attn.proj.bias.requires_grad_(conv.bias.requires_grad)
        self.in_channels, self.out_channels, self.groups = conv.in_channels, conv.out_channels, conv.groups
        self.kernel_size, self.stride, self.dilation = conv.kernel_size, conv.stride, conv.dilation
        self.padding, self.padding_mode = conv.padding, conv.padding_mode
        self.num_params = sum(parameter.numel() for parameter in conv.parameters())  # of the convolution
        self.train(conv.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tokens = self.attn(map_to_tokens(input, self.map_size, self.patch_size, self.grid_size))
        return tokens_to_map(tokens, input, self.out_size, self.out_patch_size, self.grid_size)


def attend_convs(
        model: nn.Module,
        names: Union[str, Sequence[str]] = '*',
        input_size: Optional[Sequence[int]] = None,
        patch_size: int = 1,
        peak: Optional[float] = None,
) -> nn.Module:
    """Replace convolutions of a CNN, in place, by self-attention that computes the same function. Return the model.

    Runs the model before and after on the same random input. If the outputs differ by more than rounding, nothing is
    changed. Convolutions that cannot be replaced stay, with a warning that says why. The others are logged, see
    `attention_summary`. Costs grow with the square of the number of tokens: take larger patches, or later stages only.

    Afterwards the model takes inputs of this size only. Make optimizers and DistributedDataParallel afterwards, and
    call timm's `reparameterize_model` before, as it reads the weights of convolutions.

    Args:
        model: Any model with `nn.Conv2d` modules, compiled or not.
        names: Which convolutions: one or several patterns of module names, as in the shell (`layer4.*`, `*.conv_dw`).
            Kernels of one pixel are not replaced.
        input_size: Shape of the model's input, (C, H, W); by default the model's own.
        patch_size: Side of the patch of a feature map that is a token; rounded up to a multiple of the stride.
        peak: Weight that a head gives to its own offset, see `conv2d_to_attention`. By default heads are hard.

    Raises:
        ValueError: If there is nothing to replace, or the model does not run with such an input, or computes something
            else with attention. It is left as it was.
    """
    HeadOptions(peak=peak).check()
    if patch_size < 1:
        raise ValueError(f'{patch_size=} must be positive.')
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError('DistributedDataParallel would not see the new parameters: call attend_convs before it.')
    given, model = model, unwrap_model(model)
    convs = _select(model, [names] if isinstance(names, str) else names)
    cfg: Any = getattr(model, 'pretrained_cfg', None) or {}
    input_size = cfg.get('input_size') if input_size is None else input_size
    if not isinstance(input_size, Sequence) or len(input_size) != 3:
        raise ValueError(f'{type(model).__name__} needs input_size=(C, H, W), not {input_size}.')
    input_size = tuple(input_size)
    output, shapes = _run(model, input_size, convs.values())

    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    attended: Dict[nn.Module, nn.Module] = {}
    generator = torch.Generator().manual_seed(0)
    kept: Dict[str, str] = {}
    for name, conv in convs.items():
        try:
            if _is_changed(conv) or any(owners[id(parameter)] > 1 for parameter in conv.parameters()):
                raise ValueError('It has hooks, a parametrization, another forward, or weights that others share.')
            if conv not in attended:
                attended[conv] = _attend(conv, shapes[conv], patch_size, peak, generator)
        except (ValueError, TypeError, RuntimeError) as e:  # the last for weights without data, as on meta
            kept[name] = one_line(e)
    called = _replace(model, convs, attended, input_size, output) if attended else []
    kept.update((name, 'The model calls it from outside its modules, such as from a list.')
                for name, conv in convs.items() if conv in called)
    names = [name for name in convs if name not in kept]
    if not names:
        raise ValueError(f'None of {len(kept)} convolutions can be replaced by attention. {next(iter(kept.values()))}')
    call = dict(names=names, patch_size=patch_size, peak=peak)
    kept_whole: Any = getattr(model, 'no_weight_decay', set)()
    tables = {name for name, _ in model.named_parameters() if '.rel_pos.' in name}
    model.__dict__['no_weight_decay'] = partial(frozenset, {*kept_whole, *tables})  # decay moves heads to other places
    model.__dict__['attended'] = [*getattr(model, 'attended', []), call]  # what a checkpoint says of it
    if cfg:  # timm reads from it how images have to be prepared
        cfg = {**cfg, 'input_size': input_size, 'test_input_size': None, 'fixed_input_size': True}
        model.__dict__.update(pretrained_cfg=cfg, default_cfg=cfg)
    for name, reason in kept.items():
        _logger.warning('%s stays a convolution: %s', name, reason)
    _logger.info('Attention in place of convolutions:\n%s', attention_summary(model))
    return given


def attention_summary(model: nn.Module) -> str:
    """Return a table of the convolutions that `attend_convs` replaced, with their parameters before and after."""
    rows = [('layer', 'convolution', 'tokens', 'heads', 'params, M')]
    for name, module in unwrap_model(model).named_modules():
        if isinstance(module, AttendedConv2d):
            attn, num_params = module.attn, sum(parameter.numel() for parameter in module.attn.parameters())
            rows.append((
                name, '{} x {}, stride {}'.format(*module.kernel_size, module.stride[0]),
                '{} x {}'.format(*module.grid_size), f'{attn.num_heads} of {attn.head_dim}',
                f'{module.num_params / 1e6:.3g} -> {num_params / 1e6:.3g}'))
    return text_table(rows)


def _select(model: nn.Module, patterns: Sequence[str]) -> Dict[str, Any]:
    """Return the convolutions larger than one pixel, by name."""
    convs = {name: module for name, module in model.named_modules(remove_duplicate=False)
             if name and isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1}
    for pattern in patterns or ['']:
        if not any(fnmatchcase(name, pattern) for name in convs):
            raise ValueError(
                f'{type(model).__name__} has no convolution larger than one pixel named {pattern!r}: names are like '
                f'{next(iter(convs), "none")!r}, or layer4.* for all in layer4.')
    chosen = {conv for name, conv in convs.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return {name: conv for name, conv in convs.items() if conv in chosen}  # under all its names


def _replace(
        model: nn.Module, convs: Mapping[str, nn.Module], attended: Mapping[nn.Module, nn.Module],
        input_size: Tuple[int, ...], expected: Any) -> List[nn.Module]:
    """Put attention in place of convolutions; put back, and return, those that the model still calls."""
    called = list(attended)
    try:
        for name, conv in convs.items():
            model.set_submodule(name, attended.get(conv, conv))
        output, shapes = _run(model, input_size, attended)
        if not _agree(output, expected, model):
            raise ValueError(
                f'The output of {type(model).__name__} changed with attention, which was undone: pass fewer names.')
        called = [conv for conv in attended if shapes[conv]]
    finally:
        for name, conv in convs.items():
            if conv in called:
                model.set_submodule(name, conv)
    return called


@torch.no_grad()
def _run(model: nn.Module, input_size: Tuple[int, ...], convs: Iterable[nn.Module]) -> Tuple[Any, Dict[Any, Shapes]]:
    """Run the model on a random input, the same every time; return its output and the shapes that convolutions see."""
    shapes: Dict[nn.Module, Shapes] = {conv: set() for conv in convs}

    def see(conv: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: torch.Tensor) -> None:
        input = args[0] if args else kwargs['input']
        shapes[conv].add((input.shape[1:], output.shape[1:]))

    like = next(model.parameters(), torch.empty(0))  # a model can be frozen into buffers
    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.enter_context(torch.random.fork_rng([like.device] if like.is_cuda else []))
        for conv in shapes:
            stack.enter_context(conv.register_forward_hook(see, with_kwargs=True))
        try:
            return model(torch.randn(1, *input_size).to(like)), shapes
        except Exception as e:  # any error means that the model does not run with this input
            raise ValueError(f'{type(model).__name__} does not run with {input_size=}: {one_line(e)}') from e


def _agree(output: Any, expected: Any, model: nn.Module) -> bool:
    """Return whether two outputs are equal to rounding, which a deep model accumulates."""
    outputs, targets = (
        [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf) and leaf.is_floating_point() and leaf.numel()]
        for tree in (output, expected))
    eps = max((torch.finfo(tensor.dtype).eps for tensor in (*targets, *model.parameters())
               if tensor.is_floating_point()), default=0.)
    if any(tensor.is_cuda for tensor in targets):
        eps = max(eps, TF32_EPS)
    return [tensor.shape for tensor in outputs] == [tensor.shape for tensor in targets] and all(
        torch.allclose(actual, target, rtol=0., atol=eps ** 0.5 * target.nan_to_num(0, 0, 0).abs().amax().item())
        for actual, target in zip(outputs, targets))


def _is_changed(conv: nn.Module) -> bool:
    """Return whether a convolution does more than its class: by hooks, a parametrization or another forward."""
    hooks = (conv._forward_hooks, conv._forward_pre_hooks, conv._backward_hooks, conv._backward_pre_hooks)
    return any((*hooks, conv._modules)) or not vars(conv).keys().isdisjoint(['forward', '_conv_forward'])


def _attend(
        conv: Any, shapes: Shapes, patch_size: int, peak: Optional[float], generator: torch.Generator) -> nn.Module:
    if len(shapes) != 1:
        raise ValueError('It is not called.' if not shapes else f'It is called with maps of {len(shapes)} sizes.')
    (in_shape, out_shape), = shapes
    if len(in_shape) != 3:
        raise ValueError('It is called without a batch.')
    if type(conv) is Conv2dSame:  # the size of the output implies what TensorFlow's padding adds at the far side
        axes = zip(in_shape[1:], conv.kernel_size, conv.stride, conv.dilation)
        same, conv = conv, nn.Conv2d.__new__(nn.Conv2d)
        vars(conv).update(vars(same), padding=tuple(get_same_padding(*axis) // 2 for axis in axes))
    map_size, out_size = (in_shape[1], in_shape[2]), (out_shape[1], out_shape[2])
    return AttendedConv2d(conv, map_size, out_size, patch_size, peak, generator)


def _tokens(conv: nn.Conv2d, map_size: Pair, out_size: Pair, patch_size: int) -> Tuple[Pair, Pair]:
    """Return patch and grid size, such that the patches cover what is read and what is written."""
    covered = [max(size, out * stride) for size, out, stride in zip(map_size, out_size, conv.stride)]
    patch_h, patch_w = (
        math.ceil(min(patch_size, size) / stride) * stride for size, stride in zip(covered, conv.stride))
    grid_h, grid_w = math.ceil(covered[0] / patch_h), math.ceil(covered[1] / patch_w)
    is_whole = map_size == (grid_h * patch_h, grid_w * patch_w)
    if conv.padding_mode == 'circular' and not (is_whole and keeps_size(conv, (patch_h, patch_w), (grid_h, grid_w))):
        raise ValueError('Circular padding has to keep the size of the map, in whole patches.')
    return (patch_h, patch_w), (grid_h, grid_w)


def _cheapest_rewrite(
        conv: nn.Conv2d, patch_size: Pair, grid_size: Pair, peak: Optional[float],
        generator: torch.Generator) -> RelPosAttention:
    """Rewrite a convolution with heads as wide as a pixel or as a patch: many thin ones, or few wide ones."""
    num_patches, dim = math.prod(grid_size), math.prod(patch_size) * conv.in_channels
    dim_out = math.prod(patch_size) * conv.out_channels // math.prod(conv.stride)
    widths = (conv.in_channels, dim) if conv.groups == 1 else (dim,)  # heads that keep groups apart carry patches
    plans = {width: plan_heads(conv, patch_size, grid_size, width, peak, conv.groups) for width in widths}

    def cost(head_dim: int) -> int:
        qk_dim = default_qk_dim(dim, head_dim)
        num_weights = 2 * dim * qk_dim + head_dim * (dim + dim_out)
        return len(plans[head_dim]) * (num_weights + (qk_dim + head_dim + SOFTMAX_MACS) * num_patches)

    head_dim = min(plans, key=cost)
    num_heads = len(plans[head_dim])
    if num_heads * num_patches * (num_patches + 1) > MAX_BIAS_ENTRIES:
        raise ValueError(
            f'Its {num_heads} heads on a map of {grid_size[0]} x {grid_size[1]} tokens would need more than '
            f'{MAX_BIAS_ENTRIES / 2 ** 28:g} GiB for their biases: use larger patches or a smaller input.')
    options = HeadOptions(head_dim=head_dim, peak=peak)
    return rewrite(conv, patch_size, grid_size, options, generator, plans[head_dim], conv.groups)
