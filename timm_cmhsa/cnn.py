"""Turn the convolutions of any CNN into attention that computes the same function."""
import contextlib
import logging
import math
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, get_same_padding, to_2tuple
from timm.models import register_notrace_function
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .analysis import eval_mode
from .attention import RelPosAttention
from .construction import HeadOptions, keeps_size, plan_heads, rewrite
from .efficient import is_watched, multiplications
from .messages import one_line
from .patches import Size2d, patchify, unpatchify

_logger = logging.getLogger(__name__)

torch.fx.wrap('unpatchify')  # keep as a leaf for FX: it branches on traced values
Shapes = Set[Tuple[torch.Size, torch.Size]]  # of a convolution's input and output, without the batch
SOFTMAX_MACS = 16  # multiply-accumulates that take about as long as one exponential, to choose the width of heads


class AttendedLayer(NamedTuple):
    """What took the place of one convolution, and what that costs."""
    name: str
    convolution: str
    grid_size: Tuple[int, int]  # tokens, (h, w)
    num_heads: int
    head_dim: int
    params: Tuple[int, int]  # of the convolution, of the attention
    macs: Tuple[int, int]  # multiply-accumulates for one image: the convolution's, those of heads that attend


class AttentionSummary(List[AttendedLayer]):
    """The convolutions of a model that are attention now; prints as a table."""

    def __str__(self) -> str:
        rows = [('layer', 'convolution', 'tokens', 'heads', 'params, M', 'multiply-accumulates, M')]
        for layer in self:
            rows.append((
                layer.name, layer.convolution, '{} x {}'.format(*layer.grid_size),
                f'{layer.num_heads} of {layer.head_dim}', _change([layer.params]), _change([layer.macs])))
        params, macs = [layer.params for layer in self], [layer.macs for layer in self]
        rows.append((f'{len(self)} in all', '', '', '', _change(params), _change(macs)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _change(counts: Sequence[Tuple[int, int]]) -> str:
    """Return the sums of counts before and after, in millions."""
    before, after = map(sum, zip(*counts))
    return f'{before / 1e6:.3g} -> {after / 1e6:.3g}'


@torch.fx.wrap  # keep as a leaf for FX: it branches on traced values
@register_notrace_function
def map_to_tokens(
        x: torch.Tensor,
        map_size: Tuple[int, int],
        patch_size: Tuple[int, int],
        grid_size: Tuple[int, int],
) -> torch.Tensor:
    """Flatten a feature map's patches; zeros fill up the last ones."""
    height, width = x.shape[-2:]
    if height != map_size[0] or width != map_size[1]:
        raise ValueError(
            f'Attention in place of a convolution is made for maps of {map_size[0]} x {map_size[1]}, this one has '
            f'{height} x {width}: call attend_convs with the input_size that the model shall have.')
    grow_h, grow_w = grid_size[0] * patch_size[0] - height, grid_size[1] * patch_size[1] - width
    return patchify(F.pad(x, [0, grow_w, 0, grow_h]), patch_size)


class AttendedConv2d(nn.Module):
    """Self-attention in place of a convolution: (B, C_in, H, W) to (B, C_out, H_out, W_out).

    Tokens are flattened patches of the feature map, their sides rounded up to multiples of the stride. The attributes
    of the convolution, such as `kernel_size`, remain.
    """

    def __init__(
            self,
            conv: nn.Conv2d,
            map_size: Tuple[int, ...],
            out_size: Tuple[int, ...],
            patch_size: Size2d,
            heads: HeadOptions,
            generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.map_size, self.out_size = (map_size[0], map_size[1]), (out_size[0], out_size[1])
        self.patch_size, self.grid_size = _tokens(conv, map_size, out_size, patch_size)
        self.out_patch_size = self.patch_size[0] // conv.stride[0], self.patch_size[1] // conv.stride[1]
        heads = heads._replace(head_dim=_cheapest_head_dim(conv, self.patch_size, self.grid_size, heads))
        self.attn = rewrite(conv, self.patch_size, self.grid_size, heads, generator)
        self.attn.requires_grad_(conv.weight.requires_grad).train(conv.training)
        if conv.bias is not None:
            self.attn.proj.bias.requires_grad_(conv.bias.requires_grad)
        self.in_channels, self.out_channels, self.groups = conv.in_channels, conv.out_channels, conv.groups
        self.kernel_size, self.stride, self.dilation = conv.kernel_size, conv.stride, conv.dilation
        self.padding, self.padding_mode = conv.padding, conv.padding_mode
        self.conv_params = sum(parameter.numel() for parameter in conv.parameters())
        self.conv_macs = conv.weight.numel() * math.prod(out_size)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.attend(input)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attn(map_to_tokens(x, self.map_size, self.patch_size, self.grid_size))
        x = unpatchify(x, self.out_patch_size, self.grid_size)
        return x[..., :self.out_size[0], :self.out_size[1]]

    def conv_name(self) -> str:
        """Return the convolution in a few words: 3x3, stride 2, groups 64."""
        words = ['x'.join(map(str, self.kernel_size))]
        for name, values in (('stride', self.stride), ('dilation', self.dilation), ('groups', (self.groups,))):
            if max(values) > 1:
                words.append(f'{name} {"x".join(map(str, dict.fromkeys(values)))}')
        return ', '.join(words)

    def extra_repr(self) -> str:
        return f'{self.conv_name()}, map_size={self.map_size}, patch_size={self.patch_size}'


class AttendedConv1d(AttendedConv2d):
    """The same for sequences, as images of one row: (B, C_in, L) to (B, C_out, L_out)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.attend(input.unsqueeze(-2)).squeeze(-2)


def attend_convs(
        model: nn.Module,
        names: Union[str, Sequence[str]] = '*',
        input_size: Optional[Sequence[int]] = None,
        patch_size: int = 1,
        rel_pos: str = 'table',
        peak: Optional[float] = None,
) -> nn.Module:
    """Replace convolutions of a CNN, in place, by self-attention that computes the same function.

    What was replaced, and what that costs, is logged; `attention_summary(model)` returns it later. Convolutions that no
    attention can express are kept, with a warning that says why. From then on the model takes inputs of this size only,
    and code that reads the weight of a convolution finds none: call timm's `reparameterize_model` before, and make
    optimizers afterwards.

    The cost of attention grows with the square of the number of tokens. Larger patches, smaller inputs, or only the
    later stages keep it low.

    Args:
        model: Any model with `nn.Conv2d` or `nn.Conv1d` modules.
        names: Which convolutions: one or several patterns of module names, as in the shell (`layer4.*`, `*.conv_dw`).
            Kernels of one pixel stay as they are.
        input_size: Shape of the model's input, (C, H, W), or (C, L) for sequences; by default the model's own.
        patch_size: Side of the patch of a feature map that is a token; rounded up to a multiple of the stride.
        rel_pos: Relative position encoding, see `conv2d_to_attention`.
        peak: Weight that a head gives to its own offset, see `conv2d_to_attention`; by default all of it.

    Returns:
        The model.

    Raises:
        TypeError: If it is not a model.
        ValueError: If there is nothing to replace, or the model does not run with such an input. It is left as it was.
    """
    heads = HeadOptions(rel_pos=rel_pos, peak=peak)
    heads.check()
    if not isinstance(model, nn.Module):
        raise TypeError(f'Expected a model with convolutions to replace, got {type(model).__name__}.')
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError('DistributedDataParallel would not see the new parameters: call attend_convs before it.')
    convs = _select(model, [names] if isinstance(names, str) else names)
    if input_size is None:
        input_size = (getattr(model, 'pretrained_cfg', None) or {}).get('input_size')
    if not isinstance(input_size, Sequence) or len(input_size) not in (2, 3):
        raise ValueError(
            f'{type(model).__name__} needs input_size=(C, H, W), or (C, L) for sequences, not {input_size}.')
    input_size = tuple(input_size)
    shapes = _shapes(model, convs, input_size)

    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    attended: Dict[nn.Module, AttendedConv2d] = {}
    generator = torch.Generator().manual_seed(0)
    kept: Dict[str, str] = {}
    for name, conv in convs.items():
        try:
            if any(owners[id(parameter)] > 1 for parameter in conv._parameters.values() if parameter is not None):
                raise ValueError('It shares its weight or bias with another module.')
            if conv not in attended:
                attended[conv] = _attend(conv, shapes[conv], patch_size, heads, generator)
        except (ValueError, TypeError) as e:
            kept[name] = str(e)
    if not attended:
        raise ValueError(f'None of {len(kept)} convolutions can be replaced by attention. {next(iter(kept.values()))}')
    for name, conv in convs.items():
        if conv in attended:
            model.set_submodule(name, attended[conv])
    cfg: Any = getattr(model, 'pretrained_cfg', None)
    if cfg:  # timm reads from it how images have to be prepared
        cfg = {**cfg, 'input_size': input_size, 'test_input_size': None, 'fixed_input_size': True}
        model.__dict__.update(pretrained_cfg=cfg, default_cfg=cfg)
    for name, reason in kept.items():
        _logger.warning('%s stays a convolution: %s', name, reason)
    _logger.info('Attention in place of convolutions:\n%s', attention_summary(model))
    return model


def attention_summary(model: nn.Module) -> AttentionSummary:
    """Return what `attend_convs` has replaced in a model, and what that costs: a list that prints as a table.

    Layers that have been reparameterized since are not in it.
    """
    layers = AttentionSummary()
    for name, module in model.named_modules():
        if isinstance(module, AttendedConv2d) and isinstance(module.attn, RelPosAttention):
            attn, num_patches = module.attn, math.prod(module.grid_size)
            layers.append(AttendedLayer(
                name=name,
                convolution=module.conv_name(),
                grid_size=module.grid_size,
                num_heads=attn.num_heads,
                head_dim=attn.head_dim,
                params=(module.conv_params, sum(parameter.numel() for parameter in attn.parameters())),
                macs=(module.conv_macs, num_patches * attn.num_heads * min(
                    multiplications(attn.qkv.in_features, attn.proj.out_features, attn.head_dim, num_patches))),
            ))
    return layers


def _select(model: nn.Module, patterns: Sequence[str]) -> Dict[str, nn.Module]:
    """Return the convolutions larger than one pixel, by name."""
    convs = {name: module for name, module in model.named_modules(remove_duplicate=False)
             if name and isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and max(module.kernel_size) > 1}
    for pattern in patterns or ['']:
        if not any(fnmatchcase(name, pattern) for name in convs):
            raise ValueError(
                f'{type(model).__name__} has no convolution larger than one pixel named {pattern!r}: names are like '
                f"{next(iter(convs), 'none')!r}, and 'layer4.*' is all in layer4.")
    chosen = {conv for name, conv in convs.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return {name: conv for name, conv in convs.items() if conv in chosen}  # under all its names


@torch.no_grad()
def _shapes(model: nn.Module, convs: Dict[str, nn.Module], input_size: Tuple[int, ...]) -> Dict[nn.Module, Shapes]:
    """Run the model once, and see what passes through the convolutions."""
    shapes: Dict[nn.Module, Shapes] = {conv: set() for conv in convs.values()}

    def see(conv: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: torch.Tensor) -> None:
        input = args[0] if args else kwargs['input']
        shapes[conv].add((input.shape[1:], output.shape[1:]))

    like = next(model.parameters(), torch.empty(0))  # a model can be frozen into buffers
    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        for conv in shapes:
            stack.enter_context(conv.register_forward_hook(see, with_kwargs=True))
        try:
            model(torch.zeros(1, *input_size, device=like.device, dtype=like.dtype))
        except Exception as e:  # any error means that the model does not run with this input
            raise ValueError(f'{type(model).__name__} does not run with {input_size=}: {one_line(e)}.') from e
    return shapes


def _attend(
        conv: Any, shapes: Shapes, patch_size: int, heads: HeadOptions, generator: torch.Generator) -> AttendedConv2d:
    if len(shapes) != 1:
        raise ValueError('It is not called.' if not shapes else f'It is called with maps of {len(shapes)} sizes.')
    (in_shape, out_shape), = shapes
    if len(in_shape) != 1 + len(conv.kernel_size):
        raise ValueError('It is called without a batch.')
    if is_watched(conv) or is_parametrized(conv):
        raise ValueError('It has hooks or a parametrization, which attention would drop.')
    if '_conv_forward' in vars(conv) or type(conv).__call__ is not nn.Module.__call__:
        raise ValueError('It computes something else than its class, which attention would drop.')
    if conv.weight.is_meta or not conv.weight.is_floating_point() or not conv.weight.detach().isfinite().all():
        raise ValueError('Its weight is on the meta device, complex, NaN or Inf: attention needs real numbers.')
    if not isinstance(conv, nn.Conv2d) and type(conv) is not nn.Conv1d:
        raise TypeError(f'Expected an nn.Conv2d or a plain nn.Conv1d, got {type(conv).__name__}.')
    map_size, out_size = in_shape[1:], out_shape[1:]
    if type(conv) is nn.Conv1d:
        padding = conv.padding if isinstance(conv.padding, str) else (0, *conv.padding)
        conv = _conv2d_like(conv, conv.weight.unsqueeze(2), (1, *conv.stride), padding, (1, *conv.dilation))
        return AttendedConv1d(conv, (1, *map_size), (1, *out_size), (1, patch_size), heads, generator)
    if type(conv) is Conv2dSame:  # the size of the output implies what TensorFlow's padding adds at the far side
        axes = zip(map_size, conv.kernel_size, conv.stride, conv.dilation)
        padding = tuple(get_same_padding(*axis) // 2 for axis in axes)
        conv = _conv2d_like(conv, conv.weight, conv.stride, padding, conv.dilation)
    return AttendedConv2d(conv, map_size, out_size, patch_size, heads, generator)


def _conv2d_like(conv: Any, weight: torch.Tensor, stride: Any, padding: Any, dilation: Any) -> nn.Conv2d:
    """Return an `nn.Conv2d` with this weight and geometry, and everything else of another convolution."""
    plain = nn.Conv2d(
        conv.in_channels, conv.out_channels, (weight.shape[2], weight.shape[3]), stride, padding, dilation, conv.groups,
        conv.bias is not None, conv.padding_mode, device='meta')
    plain.weight = nn.Parameter(weight.detach(), requires_grad=conv.weight.requires_grad)
    plain.bias = conv.bias
    return plain.train(conv.training)


def _tokens(
        conv: nn.Conv2d,
        map_size: Tuple[int, ...],
        out_size: Tuple[int, ...],
        patch_size: Size2d,
) -> Tuple[Tuple[int, int], Tuple[int, int]]:
    """Return patch and grid size, such that the patches cover what is read and what is written."""
    patches, grids = [], []
    for size, out, stride, side in zip(map_size, out_size, conv.stride, to_2tuple(patch_size)):
        if side < 1:
            raise ValueError(f'{patch_size=} must be positive.')
        covered = max(size, out * stride)
        patch = math.ceil(min(side, covered) / stride) * stride
        patches.append(patch)
        grids.append(math.ceil(covered / patch))
    patch_size, grid_size = (patches[0], patches[1]), (grids[0], grids[1])
    whole = all(size == grid * patch for size, grid, patch in zip(map_size, grid_size, patch_size))
    if conv.padding_mode == 'circular' and not (whole and keeps_size(conv, patch_size, grid_size)):
        raise ValueError('Circular padding has to keep the size of the map, in whole patches.')
    return patch_size, grid_size


def _cheapest_head_dim(
        conv: nn.Conv2d,
        patch_size: Tuple[int, int],
        grid_size: Tuple[int, int],
        heads: HeadOptions,
) -> int:
    """Return the width of a pixel or of a patch: many thin heads, or few wide ones."""
    num_patches, dim = math.prod(grid_size), math.prod(patch_size) * conv.in_channels
    dim_out = math.prod(patch_size) * conv.out_channels // math.prod(conv.stride)

    def cost(head_dim: int) -> int:
        num_heads = len(plan_heads(conv, patch_size, grid_size, head_dim, heads.rel_pos, heads.peak))
        plain, _ = multiplications(dim, dim_out, head_dim, num_patches)
        return num_heads * (plain + SOFTMAX_MACS * num_patches)

    return min(conv.in_channels, dim, key=cost)
