"""Relative position encodings: the bias of an attention score by where the key is, seen from the query.

Most encodings give every head a bias for each offset, key patch minus query patch (`OffsetRelPos`); that of
`LearnedContentRelPos` depends on the queries as well. All can have one more key, the zero key. It has no position; its
bias is a learned number per head. Only that of a `PaddedRelPosTable` has positions: it stands for a ring of padding.
"""
import math
from typing import TYPE_CHECKING, Any, List, Mapping, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from timm.layers.attention import resolve_self_attn_mask
from timm.models import register_notrace_function
from torch import nn

Grid = Tuple[int, int]  # patches per image side, (h, w)
Mask = Optional[torch.Tensor]  # (..., N, N): whether a query may attend to a key, or what is added to the score

BIAS_SCALE = 30.  # of a padded table, see there


@torch.fx.wrap  # keep as a leaf for FX: it branches on traced values
@register_notrace_function
def add_attn_mask(attn_bias: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
    """Add a mask over N keys to a bias over N or N + 1 keys. The zero key, which comes last, is never masked."""
    mask = resolve_self_attn_mask(attn_bias.shape[-2], attn_bias, attn_mask, is_causal)
    if mask is None:
        return attn_bias
    return attn_bias + F.pad(mask, [0, attn_bias.shape[-1] - mask.shape[-1]])


@torch.fx.wrap  # a leaf too
@register_notrace_function
def reject_attn_mask(x: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
    """Return the tokens x of a mixer that cannot use a mask, if there is no mask."""
    if attn_mask is not None or is_causal:
        raise ValueError(
            'Convolutions and shifts have no attention to mask: call the model without attn_mask and is_causal.')
    return x


class RelPos(nn.Module):
    """Base of all encodings: the grid, and the bias of the zero key.

    Subclasses define `zero_key_bias` last: optimizer states know parameters by their order.
    """
    name: str
    depends_on_queries = False
    head_axis: Mapping[str, int] = {'zero_key_bias': 0}  # of the parameters that every head has its own of
    grid_size: Grid
    zero_key_bias: Optional[nn.Parameter]

    def __init__(self, grid_size: Grid, num_heads: int) -> None:
        super().__init__()
        self.grid_size, self.num_heads = grid_size, num_heads

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        if self.zero_key_bias is not None:
            nn.init.zeros_(self.zero_key_bias)

    def set_grid_size(self, grid_size: Grid) -> None:
        """Change the grid. An offset means the same at any grid size, so what is known of it is kept."""
        self.grid_size = grid_size

    def keep_heads(self, heads: List[int]) -> None:
        """Remove all other heads."""
        self.num_heads = len(heads)
        for name, axis in self.head_axis.items():
            parameter = getattr(self, name)
            if parameter is not None:
                kept = parameter.detach().index_select(axis, torch.tensor(heads, device=parameter.device).long())
                setattr(self, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))

    def get_bias(self, q: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return the bias of every query and key, the zero key last: (1, num_heads, N, N + 1), or N without zero key.

        Where it `depends_on_queries`, these are needed, (B, num_heads, N, head_dim), and B takes the place of 1.
        """
        raise NotImplementedError


class OffsetRelPos(RelPos):
    """Base of the encodings that give every offset a bias, whatever the queries are.

    Padding adds patches around the grid: (h + 2 pad_h, w + 2 pad_w) in all. Queries are those inside.
    """
    offsets: torch.Tensor  # every offset, key minus query, from (h + pad_h - 1, w + pad_w - 1) down to the opposite
    position: torch.Tensor  # of every patch; position[query] - position[key] numbers the offset between them
    padding_position: torch.Tensor  # the same of every patch of the padding

    def __init__(self, grid_size: Grid, num_heads: int, device: Any = None, padding: Grid = (0, 0)) -> None:
        super().__init__(grid_size, num_heads)
        self.padding = padding
        self._register_offsets(grid_size, device)

    def _register_offsets(self, grid_size: Grid, device: Any) -> None:
        pad_h, pad_w = self.padding
        reach_h, reach_w = grid_size[0] + pad_h, grid_size[1] + pad_w
        rows = torch.arange(1 - reach_h, reach_h, device=device)
        cols = torch.arange(1 - reach_w, reach_w, device=device)
        offsets = torch.stack(torch.meshgrid(-rows, -cols, indexing='ij'), dim=-1).flatten(0, 1)
        position = rows[reach_h - 1 - pad_h:, None] * (2 * reach_w - 1) + cols[reach_w - 1 - pad_w:]
        middle = position[pad_h:reach_h]
        ring = position[:pad_h], position[reach_h:], middle[:, :pad_w], middle[:, reach_w:]
        # An index of all pairs would be larger than the model for feature maps of thousands of pixels.
        self.register_buffer('offsets', offsets, persistent=False)
        self.register_buffer('position', middle[:, pad_w:reach_w].flatten(), persistent=False)
        self.register_buffer('padding_position', torch.cat([part.flatten() for part in ring]), persistent=False)

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        super().reset_parameters()
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Fill the buffers that no checkpoint holds, after creation on the meta device (timm's protocol)."""
        # transformers 4 creates parameters alone on that device: the buffers are right then, and must stay
        tensor = next(self.parameters()) if self.position.is_meta else self.position
        self._register_offsets(self.grid_size, tensor.device)

    def set_grid_size(self, grid_size: Grid) -> None:
        self._register_offsets(grid_size, self.position.device)  # first, as memory may not suffice
        super().set_grid_size(grid_size)

    def offset_bias(self) -> torch.Tensor:
        """Return the bias of every offset, in the order of `offsets`: shape (offsets, num_heads)."""
        raise NotImplementedError

    def get_bias(self, q: Optional[torch.Tensor] = None) -> torch.Tensor:
        return self.gather_bias()

    def gather_bias(self, start: int = 0, stop: Optional[int] = None) -> torch.Tensor:
        """Return the bias of the queries from start to stop, by default of all: (1, num_heads, queries, keys)."""
        bias, index = self.offset_bias(), self.offset_index(self.position[start:stop], self.position)
        zero_key_bias = self.zero_key_bias
        if zero_key_bias is not None:
            bias, index = torch.cat([zero_key_bias.unsqueeze(0), bias]), F.pad(index + 1, [0, 1])
        return gather_pairs(bias, index)

    def offset_index(self, query_position: torch.Tensor, key_position: torch.Tensor) -> torch.Tensor:
        """Return the number of the offset of every query and key: shape (queries, keys)."""
        reach_h, reach_w = self.grid_size[0] + self.padding[0], self.grid_size[1] + self.padding[1]
        return (query_position + reach_h * (2 * reach_w - 1) - reach_w).unsqueeze(1) - key_position

    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        """Make a head attend to one offset, or to the zero key where that offset is outside the image.

        The bias of the offset (with circular padding, of all offsets that lead to the same patch around the image) is
        larger by the sharpness than that of all others. The zero key's lies between, if it does not stand for padding.
        """
        raise NotImplementedError


def gather_pairs(bias: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the bias, of shape (offsets, num_heads), of every pair (queries, keys): (1, num_heads, queries, keys)."""
    # Gathering from rows of one head each is several times as fast as from rows of one offset each.
    bias = bias.t()
    return bias.index_select(1, index.flatten()).view(1, bias.shape[0], index.shape[0], index.shape[1])


class RelPosTable(OffsetRelPos):
    """One free bias per head and offset (arXiv 2111.01353), as timm's `RelPosBias`.

    A change of the grid pads the table with zeros or crops it. Offsets that a smaller grid lacks are forgotten.
    """
    name = 'table'
    head_axis: Mapping[str, int] = {'relative_position_bias_table': 1, 'zero_key_bias': 0}

    def __init__(
            self,
            grid_size: Grid,
            num_heads: int,
            head_dim: int = 0,
            zero_key: bool = True,
            padding: Grid = (0, 0),
            **dd: Any,
    ) -> None:
        super().__init__(grid_size, num_heads, dd.get('device'), padding)
        self.relative_position_bias_table = nn.Parameter(torch.empty(len(self.offsets), num_heads, **dd))
        self.zero_key_bias = nn.Parameter(torch.empty(num_heads, **dd)) if zero_key else None
        self.reset_parameters()

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        super().reset_parameters()
        nn.init.trunc_normal_(self.relative_position_bias_table, std=.02, generator=generator)

    def set_grid_size(self, grid_size: Grid) -> None:
        table = self.relative_position_bias_table
        resized = self.resize_table(table.detach(), self.grid_size, grid_size)
        super().set_grid_size(grid_size)
        self.relative_position_bias_table = nn.Parameter(resized, requires_grad=table.requires_grad)

    def resize_table(
            self,
            table: torch.Tensor,
            grid_size: Grid,
            new_grid_size: Grid,
            bias_scale: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return the table of another grid: shape (offsets, num_heads). Interpolation would smear one-hot entries.

        Args:
            table: Biases of all offsets: shape (offsets, num_heads).
            grid_size, new_grid_size: Grid that it is of, and the other one.
            bias_scale: What a padded table is multiplied by, if it is of another module.
        """
        (pad_h, pad_w), (height, width) = self.padding, grid_size
        table_2d = table.reshape(2 * (height + pad_h) - 1, 2 * (width + pad_w) - 1, -1)
        grow_h, grow_w = (new - old for new, old in zip(new_grid_size, grid_size))
        return F.pad(table_2d, (0, 0, grow_w, grow_w, grow_h, grow_h)).flatten(0, 1)

    def offset_bias(self) -> torch.Tensor:
        return self.relative_position_bias_table

    @torch.no_grad()
    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        assert self.zero_key_bias is not None
        wanted = torch.tensor(offsets, device=self.offsets.device)
        is_wanted = (self.offsets.unsqueeze(1) == wanted).all(dim=-1).any(dim=1)
        self.relative_position_bias_table[:, head] = is_wanted * sharpness
        self.zero_key_bias[head] = sharpness / 2


class PaddedRelPosTable(RelPosTable):
    """A table of biases in which the zero key stands for a ring of zero padding around the grid.

    Every query then sees the same number of keys, so a head with bias M at one offset and 0 at all others gives its
    offset the same weight everywhere, at the borders too. That makes the rewrite of a convolution exact at any M (see
    docs/theory.md). The bias of the zero key is the logsumexp of the biases over the ring, plus a learned number.

    Biases have to change much more than weights, and Adam's steps are the same for both: so biases are the table times
    a number, which checkpoints hold.
    """
    name = 'padded_table'
    bias_scale: torch.Tensor

    def __init__(
            self,
            grid_size: Grid,
            num_heads: int,
            head_dim: int = 0,
            zero_key: bool = True,
            padding: Union[int, Grid] = 1,
            **dd: Any,
    ) -> None:
        if not zero_key:
            raise ValueError(f'rel_pos={self.name!r} needs a zero key, which these layers do not have.')
        super().__init__(grid_size, num_heads, head_dim, padding=to_2tuple(padding), **dd)

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        super().reset_parameters(generator)
        table = self.relative_position_bias_table
        self.register_buffer('bias_scale', torch.tensor(BIAS_SCALE, dtype=table.dtype, device=table.device))
        table.data /= BIAS_SCALE

    def resize_table(
            self,
            table: torch.Tensor,
            grid_size: Grid,
            new_grid_size: Grid,
            bias_scale: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Return the table of another grid, in which an offset with a bias above the median has the same weight.

        Biases are taken relative to a head's median, which is 0 after a rewrite: a number added to all of them changes
        no softmax. (What exp(bias) has above 1 grows with the number of keys, see docs/theory.md.)
        """
        scale = (self.bias_scale if bias_scale is None else bias_scale).to(table.device)
        growth = self.num_keys(new_grid_size) / self.num_keys(grid_size)
        centered = table.double() - table.double().median(dim=0).values
        bias = centered * scale
        # log(1 + growth * (exp(bias) - 1)), without overflow
        grown = bias + (growth + (1 - growth) * (-bias).exp()).log()
        table = torch.where(bias > 0, grown / scale, centered).to(table.dtype)
        return super().resize_table(table, grid_size, new_grid_size)

    def num_keys(self, grid_size: Grid) -> int:
        """Return how many keys every query sees, those of the padding included."""
        return (grid_size[0] + 2 * self.padding[0]) * (grid_size[1] + 2 * self.padding[1])

    def offset_bias(self) -> torch.Tensor:
        return self.relative_position_bias_table * self.bias_scale

    def gather_bias(self, start: int = 0, stop: Optional[int] = None) -> torch.Tensor:
        bias, queries, zero_key_bias = self.offset_bias(), self.position[start:stop], self.zero_key_bias
        assert zero_key_bias is not None
        inside = gather_pairs(bias, self.offset_index(queries, self.position))
        if self.padding == (0, 0):  # ONNX has no logsumexp of nothing
            outside = torch.full_like(inside[..., :1], -math.inf)
        else:
            outside = gather_pairs(bias, self.offset_index(queries, self.padding_position))
            outside = outside.logsumexp(dim=-1, keepdim=True)
        return torch.cat([inside, outside + zero_key_bias.view(-1, 1, 1)], dim=-1)

    @torch.no_grad()
    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        super().point_head(head, offsets, sharpness)
        self.relative_position_bias_table[:, head] /= self.bias_scale
        assert self.zero_key_bias is not None
        self.zero_key_bias[head] = 0


def padding_of(rel_pos: RelPos) -> Optional[Grid]:
    """Return the padding that the zero key stands for, as an argument of `create_model`: None where it has none."""
    return rel_pos.padding if isinstance(rel_pos, PaddedRelPosTable) else None


def exact_sharpness(num_tokens: int, dtype: torch.dtype) -> float:
    """Return the sharpness at which all that a head leaks to other patches is a rounding error.

    At a border a head puts exp(M / 2) on the zero key and 1 on each of the N patches: M = 2 ln(N / eps), which is 42
    for float32 and 83 for float64 at 14 x 14 patches.
    """
    return 2 * math.log(num_tokens / torch.finfo(dtype).eps)


def precise_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a type that is at least as precise, and float32 at least: a model in half precision may leave it later."""
    return torch.promote_types(dtype, torch.float32)


class OnGrid:
    """Mixin of the attention layers: their grid is that of their encoding."""
    if TYPE_CHECKING:
        rel_pos: RelPos  # TorchScript knows no such annotation

    @property
    def grid_size(self) -> Grid:
        return self.rel_pos.grid_size

    def set_grid_size(self, grid_size: Grid) -> None:
        """Change the grid; what is known of every offset is kept."""
        if grid_size != self.grid_size:
            self.rel_pos.set_grid_size(grid_size)
