"""Any CNN: its convolutions as attention that computes the same function."""
import logging
import math
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, to_2tuple
from timm.models import register_notrace_function
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .analysis import eval_mode
from .attention import RelPosAttention
from .construction import HeadOptions, keeps_size, plan_heads, rewrite
from .efficient import is_watched, multiplications
from .patches import Size2d, patchify, unpatchify

_logger = logging.getLogger(__name__)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SOFTMAX_MACS = 16  # multiply-accumulates that take as long as one exponential, about: only to choose the width of heads


class AttendedLayer(NamedTuple):
    """What took the place of one convolution, and what that costs."""
    name: str
    convolution: str
    grid_size: Tuple[int, int]  # tokens, (h, w)
    num_heads: int
    head_dim: int
    params: Tuple[int, int]  # of the convolution, of the attention
    macs: Tuple[int, int]  # multiply-accumulates for one image, of the convolution, of the attention


class AttentionSummary(List[AttendedLayer]):
    """The convolutions of a model that are attention now; printed, a table."""

    def __str__(self) -> str:
        header = ('layer', 'convolution', 'tokens', 'heads', 'params, M', 'multiply-accumulates, M')
        rows = [header, *(
            (layer.name, layer.convolution, f'{layer.grid_size[0]} x {layer.grid_size[1]}',
             f'{layer.num_heads} of {layer.head_dim}', _change(layer.params), _change(layer.macs)) for layer in self)]
        params = sum(layer.params[0] for layer in self), sum(layer.params[1] for layer in self)
        macs = sum(layer.macs[0] for layer in self), sum(layer.macs[1] for layer in self)
        rows.append((f'{len(self)} in all', '', '', '', _change(params), _change(macs)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _change(before_after: Tuple[int, int]) -> str:
    before, after = before_after
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


torch.fx.wrap('unpatchify')


class AttendedConv2d(nn.Module):
    """Self-attention in place of a convolution: (B, C_in, H, W) to (B, C_out, H_out, W_out).

    Tokens are patches of the feature map, flattened. What a convolution tells of itself, its kernel size and the like,
    is told as before.
    """

    def __init__(
            self,
            conv: nn.Conv2d,
            map_size: Tuple[int, ...],
            out_size: Tuple[int, ...],
            patch_size: Size2d = 1,
            rel_pos: str = 'table',
    ) -> None:
        """
        Args:
            conv: The convolution: any kernel, stride, dilation, groups, with zero padding, or circular padding that
                keeps the size.
            map_size: Size of the maps it gets, (H, W).
            out_size: Size of the maps it gives.
            patch_size: Side of a patch that becomes a token; made a multiple of the stride, and no larger than the map.
            rel_pos: Relative position encoding, see `conv2d_to_attention`.

        Raises:
            TypeError: If the convolution computes something else (weight standardisation, ...).
            ValueError: If there is no attention that computes the same.
        """
        super().__init__()
        self.map_size, self.out_size = (map_size[0], map_size[1]), (out_size[0], out_size[1])
        self.patch_size, self.grid_size = _tokens(conv, map_size, out_size, patch_size)
        self.out_patch_size = self.patch_size[0] // conv.stride[0], self.patch_size[1] // conv.stride[1]
        head_dim = _cheapest_head_dim(conv, self.patch_size, self.grid_size)
        options = HeadOptions(head_dim=head_dim, rel_pos=rel_pos)
        self.attn = rewrite(conv, self.patch_size, self.grid_size, options)
        self.attn.requires_grad_(conv.weight.requires_grad).train(conv.training)
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

    def extra_repr(self) -> str:
        return f'{conv_name(self)}, map_size={self.map_size}, patch_size={self.patch_size}'


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
) -> nn.Module:
    """Replace convolutions of a CNN, in place, by self-attention that computes the same function.

    What was replaced and what that costs is logged; `attention_summary(model)` tells it later. Convolutions that no
    attention can express are kept, with a warning that says why. The model is from then on for inputs of this size.
    Code of the model that reads the weight of a convolution finds none: leave these out, and call timm's
    `reparameterize_model` before.

    Attention over all pixels of a large map is expensive: its cost grows with the square of their number. Larger
    patches, smaller inputs, or only the later stages keep it low.

    Args:
        model: Any model with `nn.Conv2d` or `nn.Conv1d` modules.
        names: Which convolutions: patterns of module names as the shell has them (`layer4.*`, `*.conv_dw`), one or
            several. Kernels of one pixel are no matter of attention and stay.
        input_size: Shape of the model's input, (C, H, W), or (C, L) for sequences; by default the model's own.
        patch_size: Side of the patch of a feature map that is a token, pixels; where a convolution has a stride, the
            next multiple of it.
        rel_pos: Relative position encoding, see `conv2d_to_attention`.

    Returns:
        The model.

    Raises:
        ValueError: If there is nothing to replace, or the model does not run with such an input; the model is left as
            it was.
    """
    convs = _select(model, [names] if isinstance(names, str) else names)
    input_size = _input_size(model, input_size)
    sizes = _map_sizes(model, list(convs.values()), input_size)

    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    attended: Dict[nn.Module, AttendedConv2d] = {}
    kept: Dict[str, str] = {}
    for name, conv in convs.items():
        try:
            if owners[id(conv._parameters.get('weight'))] > 1:
                raise ValueError('It shares its weight with another module.')
            if conv not in attended:
                attended[conv] = _attend(conv, sizes[conv], patch_size, rel_pos)
        except (ValueError, TypeError) as e:
            kept[name] = str(e)
    if not attended:
        raise ValueError(f'None of {len(kept)} convolutions can be replaced by attention. {next(iter(kept.values()))}')
    for name, conv in convs.items():
        if name not in kept:
            parent, _, child = name.rpartition('.')
            setattr(model.get_submodule(parent), child, attended[conv])
    cfg: Any = getattr(model, 'pretrained_cfg', None)
    if cfg:  # timm reads from it how images have to be prepared
        cfg = {**cfg, 'input_size': input_size}
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
                convolution=conv_name(module),
                grid_size=module.grid_size,
                num_heads=attn.num_heads,
                head_dim=attn.head_dim,
                params=(module.conv_params, sum(parameter.numel() for parameter in attn.parameters())),
                macs=(module.conv_macs, num_patches * attn.num_heads * min(attn.multiplications())),
            ))
    return layers


def conv_name(conv: Union[nn.Conv2d, AttendedConv2d]) -> str:
    """Return a convolution in a few words: 3x3, stride 2, 64 groups."""
    words = ['x'.join(map(str, conv.kernel_size))]
    words += [f'{what} {"x".join(map(str, dict.fromkeys(value)))}'
              for what, value in (('stride', conv.stride), ('dilation', conv.dilation)) if max(value) > 1]
    return ', '.join(words + ([f'{conv.groups} groups'] if conv.groups > 1 else []))


class MapSizes(NamedTuple):
    """Of what a convolution gets, and of what it gives: (H, W) or (L,), or nothing where it is called otherwise."""
    map_size: Tuple[int, ...]
    out_size: Tuple[int, ...]


def _select(model: nn.Module, patterns: Sequence[str]) -> Dict[str, nn.Module]:
    """Convolutions larger than one pixel, by name."""
    convs = {name: module for name, module in model.named_modules(remove_duplicate=False)
             if name and isinstance(module, CONVOLUTIONS) and max(module.kernel_size) > 1}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in convs):
            raise ValueError(
                f'{type(model).__name__} has no convolution larger than one pixel named {pattern!r}: names are like '
                f"{next(iter(convs), 'none')!r}, and 'layer4.*' is all in layer4.")
    return {name: conv for name, conv in convs.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _input_size(model: nn.Module, input_size: Optional[Sequence[int]]) -> Tuple[int, ...]:
    if input_size is None:
        input_size = (getattr(model, 'pretrained_cfg', None) or {}).get('input_size')
        if not input_size:
            raise ValueError(f'{type(model).__name__} does not tell its input size: give input_size=(C, H, W).')
    if isinstance(input_size, int) or len(input_size) not in (2, 3):
        raise ValueError(f'input_size={input_size} is neither (C, H, W) nor, for sequences, (C, L).')
    return tuple(input_size)


@torch.no_grad()
def _map_sizes(
        model: nn.Module,
        convs: List[nn.Module],
        input_size: Tuple[int, ...],
) -> Dict[nn.Module, List[MapSizes]]:
    """Run the model once, and see what sizes pass through the convolutions."""
    sizes: Dict[nn.Module, List[MapSizes]] = {conv: [] for conv in convs}

    def see(conv: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: torch.Tensor) -> None:
        input = args[0] if args else kwargs['input']
        batched = input.ndim == 2 + len(conv.kernel_size)
        seen = MapSizes(tuple(input.shape[2:]), tuple(output.shape[2:])) if batched else MapSizes((), ())
        if seen not in sizes[conv]:
            sizes[conv].append(seen)

    handles = [conv.register_forward_hook(see, with_kwargs=True) for conv in sizes]
    weight = next(model.parameters())
    try:
        if weight.is_meta:
            raise RuntimeError('it is on the meta device, and has no weights')
        with eval_mode(model):
            model(torch.zeros(1, *input_size, device=weight.device, dtype=weight.dtype))
    except Exception as e:  # whatever it is, the model does not run with this
        reason = (str(e) or type(e).__name__).splitlines()[0]
        raise ValueError(f'{type(model).__name__} does not run with input_size={input_size}: {reason}') from e
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def _attend(conv: nn.Module, sizes: List[MapSizes], patch_size: int, rel_pos: str) -> AttendedConv2d:
    if len(sizes) != 1:
        raise ValueError('It is not called.' if not sizes else f'It is called with maps of {len(sizes)} sizes.')
    map_size, out_size = sizes[0]
    if not map_size:
        raise ValueError('It is called without a batch.')
    if is_watched(conv) or is_parametrized(conv):
        raise ValueError('It has hooks or a parametrization, which attention would drop.')
    if isinstance(conv, nn.Conv1d):
        map_size, out_size = (1, *map_size), (1, *out_size)
        return AttendedConv1d(_conv1d_as_conv2d(conv), map_size, out_size, (1, patch_size), rel_pos)
    if not isinstance(conv, nn.Conv2d):
        raise TypeError(f'Expected an nn.Conv2d or nn.Conv1d to rewrite as attention, got {type(conv).__name__}.')
    if type(conv) is Conv2dSame:
        conv = _same_as_conv2d(conv, map_size)
    return AttendedConv2d(conv, map_size, out_size, patch_size, rel_pos)


def _conv1d_as_conv2d(conv: nn.Conv1d) -> nn.Conv2d:
    if type(conv).forward is not nn.Conv1d.forward or type(conv)._conv_forward is not nn.Conv1d._conv_forward:
        raise TypeError(f'Expected a plain nn.Conv1d to rewrite as attention, got {type(conv).__name__}.')
    padding = conv.padding if isinstance(conv.padding, str) else (0, *conv.padding)
    return _conv2d_with(
        conv, conv.weight.unsqueeze(2), stride=(1, *conv.stride), padding=padding, dilation=(1, *conv.dilation),
        padding_mode=conv.padding_mode)


def _same_as_conv2d(conv: nn.Conv2d, map_size: Tuple[int, ...]) -> nn.Conv2d:
    """TensorFlow's padding, for maps of this size; what it adds at the far side follows from the size of the output."""
    spans = [d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size)]
    totals = [max((-(-size // stride) - 1) * stride + span - size, 0)
              for size, stride, span in zip(map_size, conv.stride, spans)]
    return _conv2d_with(
        conv, conv.weight, stride=conv.stride, padding=tuple(total // 2 for total in totals), dilation=conv.dilation)


def _conv2d_with(conv: Union[nn.Conv1d, nn.Conv2d], weight: torch.Tensor, **kwargs: Any) -> nn.Conv2d:
    """A plain convolution with this weight, and the bias and groups of another."""
    kernel_h, kernel_w = weight.shape[2:]
    plain = nn.Conv2d(
        conv.in_channels, conv.out_channels, (kernel_h, kernel_w), groups=conv.groups, bias=conv.bias is not None,
        device='meta', **kwargs)
    plain.weight = nn.Parameter(weight.detach(), requires_grad=conv.weight.requires_grad)
    plain.bias = conv.bias
    return plain.train(conv.training)


def _tokens(
        conv: nn.Conv2d,
        map_size: Tuple[int, ...],
        out_size: Tuple[int, ...],
        patch_size: Size2d,
) -> Tuple[Tuple[int, int], Tuple[int, int]]:
    """Patch and grid size, such that the patches cover what is read, and what is written."""
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


def _cheapest_head_dim(conv: nn.Conv2d, patch_size: Tuple[int, int], grid_size: Tuple[int, int]) -> int:
    """Whether heads shall be as wide as a pixel or as a patch: many thin ones, or few wide ones."""
    num_patches, dim = math.prod(grid_size), math.prod(patch_size) * conv.in_channels
    dim_out = math.prod(patch_size) * conv.out_channels // math.prod(conv.stride)

    def cost(head_dim: int) -> int:
        num_heads = len(plan_heads(conv, patch_size, grid_size, head_dim=head_dim))
        plain, _ = multiplications(dim, dim_out, head_dim, num_patches)
        return num_heads * (plain + SOFTMAX_MACS * num_patches)

    return min(conv.in_channels, dim, key=cost)
