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
from timm.models import register_notrace_function
from torch import nn

Grid = Tuple[int, int]  # patches per image side, (h, w)
Mask = Optional[torch.Tensor]  # (..., N, N): whether a query may attend to a key, or what is added to the score


@torch.fx.wrap  # keep as a leaf for FX: it branches on traced values
@register_notrace_function
def add_attn_mask(attn_bias: torch.Tensor, attn_mask: Mask = None, is_causal: bool = False) -> torch.Tensor:
    """Add a mask over N keys to a bias over N or N + 1 keys. The zero key, which comes last, is never masked."""
    if is_causal:
        num_tokens = attn_bias.shape[-2]
        attn_mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=attn_bias.device).tril()
    if attn_mask is None:
        return attn_bias
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=attn_bias.dtype).masked_fill(~attn_mask, float('-inf'))
    return attn_bias + F.pad(attn_mask, [0, attn_bias.shape[-1] - attn_mask.shape[-1]])


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
        """Change the grid. An offset means the same at any grid size, so it keeps its bias."""
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
        larger by the sharpness than that of all others; the zero key's lies between.
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
    __constants__ = ('bias_scale',)
    bias_scale = 1.  # what entries of the table are multiplied by

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
        nn.init.trunc_normal_(self.relative_position_bias_table, std=.02 / self.bias_scale, generator=generator)

    def set_grid_size(self, grid_size: Grid) -> None:
        table = self.relative_position_bias_table
        resized = self.resize_table(table.detach(), self.grid_size, grid_size)
        super().set_grid_size(grid_size)
        self.relative_position_bias_table = nn.Parameter(resized, requires_grad=table.requires_grad)

    def resize_table(self, table: torch.Tensor, grid_size: Grid, new_grid_size: Grid) -> torch.Tensor:
        """Return the table of another grid: shape (offsets, num_heads). Interpolation would smear one-hot entries."""
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
        self.relative_position_bias_table[:, head] = is_wanted * (sharpness / self.bias_scale)
        self.zero_key_bias[head] = sharpness / 2


class PaddedRelPosTable(RelPosTable):
    """A table of biases in which the zero key stands for a ring of zero padding around the grid.

    Every query then sees the same number of keys, so a head with bias M at one offset and 0 at all others gives its
    offset the same weight everywhere, at the borders too. That makes the rewrite of a convolution exact at any M (see
    docs/theory.md). The bias of the zero key is the logsumexp of the biases over the ring, plus a learned number.
    """
    name = 'padded_table'
    bias_scale = 10.  # Biases have to change much more than weights, and Adam's steps are the same for both.

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

    def resize_table(self, table: torch.Tensor, grid_size: Grid, new_grid_size: Grid) -> torch.Tensor:
        """Return the table of another grid, in which a head gives its offsets the same weight as before."""
        growth = self.num_keys(new_grid_size) / self.num_keys(grid_size)
        bias = table.double() * self.bias_scale
        # log(1 + growth * (exp(bias) - 1)), without overflow
        grown = bias + (growth + (1 - growth) * (-bias).exp()).log()
        table = torch.where(bias > 0, grown / self.bias_scale, table.double()).to(table.dtype)
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
        outside = gather_pairs(bias, self.offset_index(queries, self.padding_position))
        return torch.cat([inside, outside.logsumexp(dim=-1, keepdim=True) + zero_key_bias.view(-1, 1, 1)], dim=-1)

    @torch.no_grad()
    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        super().point_head(head, offsets, sharpness)
        assert self.zero_key_bias is not None
        self.zero_key_bias[head] = 0


class QuadraticRelPos(OffsetRelPos):
    """A round Gaussian of the offset for every head: bias -alpha * |offset - center|^2, alpha = inv_std^2 / 2.

    Equation 9 of arXiv 1911.03584, up to a term that is the same for all keys. Centres start at N(0, 2 I), in patches,
    as in its Section 4.2, and widths at one patch, with noise of 1 %. Nothing depends on the size of the grid.
    """
    name = 'quadratic'
    head_axis: Mapping[str, int] = {'center': 0, 'inv_std': 0, 'zero_key_bias': 0}

    def __init__(self, grid_size: Grid, num_heads: int, head_dim: int = 0, zero_key: bool = True, **dd: Any) -> None:
        super().__init__(grid_size, num_heads, dd.get('device'))
        self.center = nn.Parameter(torch.empty(num_heads, 2, **dd))
        self.inv_std = nn.Parameter(torch.empty(num_heads, *self.unit_inv_std().shape, **dd))
        self.zero_key_bias = nn.Parameter(torch.empty(num_heads, **dd)) if zero_key else None
        self.reset_parameters()

    def unit_inv_std(self) -> torch.Tensor:
        """Return the `inv_std` of a Gaussian that is one patch wide."""
        return torch.ones((), device='cpu')

    @torch.no_grad()
    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        super().reset_parameters()
        nn.init.normal_(self.center, std=math.sqrt(2), generator=generator)
        nn.init.normal_(self.inv_std, std=.01, generator=generator)  # returns nothing where transformers 4 skips it
        self.inv_std.add_(self.unit_inv_std().to(self.inv_std))

    def inv_covariance(self) -> torch.Tensor:
        """Return the inverse covariance of every head's Gaussian, in patches^-2: shape (num_heads, 2, 2)."""
        return torch.diag_embed(self.inv_std.square().unsqueeze(1).expand(-1, 2))

    def offset_bias(self) -> torch.Tensor:
        # In float32 at least: half precision does not hold offsets beyond 256. No matmul, which AMP would round to it.
        distance = self.offsets.unsqueeze(1).float() - self.center
        products = distance.unsqueeze(-1) * distance.unsqueeze(-2)
        return -((products * self.inv_covariance()).sum(dim=[-2, -1]) / 2).to(self.center.dtype)

    @torch.no_grad()
    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        """See `OffsetRelPos.point_head`. The only offset has bias 0, its neighbours -sharpness (Lemma 2)."""
        assert self.zero_key_bias is not None
        offset, = offsets
        self.center[head] = torch.tensor(offset, device='cpu').to(self.center)
        if self.center[head].tolist() != list(offset):
            raise ValueError(f'{self.center.dtype} does not hold the offset {offset}: use float32.')
        self.inv_std[head] = self.unit_inv_std() * math.sqrt(2 * sharpness)
        self.zero_key_bias[head] = -sharpness / 2


class GeneralQuadraticRelPos(QuadraticRelPos):
    """A Gaussian of any shape: bias -(offset - center)^T Sigma^-1 (offset - center) / 2, Sigma^-1 = inv_std inv_std^T.

    Equation 19 of arXiv 1911.03584 (Appendix E), up to a term that is the same for all keys.
    """
    name = 'quadratic_gen'

    def unit_inv_std(self) -> torch.Tensor:
        return torch.eye(2, device='cpu')

    def inv_covariance(self) -> torch.Tensor:
        return (self.inv_std.unsqueeze(-2) * self.inv_std.unsqueeze(-3)).sum(dim=-1)  # no matmul, as above


class LearnedRelPos(OffsetRelPos):
    """Learned embeddings r of row and column offsets, shared by all heads, and a vector v per head: bias v^T r.

    The last term of Equation 8 of arXiv 1911.03584, as in its Section 4.3: half of r is the row's, half the column's.
    A change of the grid pads the embeddings with zeros or crops them.
    """
    name = 'learned'
    head_axis: Mapping[str, int] = {'head_vector': 0, 'zero_key_bias': 0}

    def __init__(self, grid_size: Grid, num_heads: int, head_dim: int = 0, zero_key: bool = True, **dd: Any) -> None:
        super().__init__(grid_size, num_heads, dd.get('device'))
        self.row_embed = nn.Parameter(torch.empty(2 * grid_size[0] - 1, head_dim // 2, **dd))
        self.col_embed = nn.Parameter(torch.empty(2 * grid_size[1] - 1, head_dim - head_dim // 2, **dd))
        self.head_vector = nn.Parameter(torch.empty(num_heads, head_dim, **dd))
        self.zero_key_bias = nn.Parameter(torch.empty(num_heads, **dd)) if zero_key else None
        self.reset_parameters()

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        super().reset_parameters()
        nn.init.normal_(self.row_embed, generator=generator)
        nn.init.normal_(self.col_embed, generator=generator)
        nn.init.normal_(  # for biases of about 1
            self.head_vector, std=self.head_vector.shape[1] ** -0.5, generator=generator)

    def set_grid_size(self, grid_size: Grid) -> None:
        row_embed = _resize_embed_parameter(self.row_embed, grid_size[0])
        col_embed = _resize_embed_parameter(self.col_embed, grid_size[1])
        super().set_grid_size(grid_size)
        self.row_embed, self.col_embed = row_embed, col_embed

    def offset_bias(self) -> torch.Tensor:
        half = self.row_embed.shape[1]
        # no matmul, which AMP would round to half precision
        row = (self.row_embed.unsqueeze(1) * self.head_vector[:, :half]).sum(dim=-1)
        col = (self.col_embed.unsqueeze(1) * self.head_vector[:, half:]).sum(dim=-1)
        return (row.unsqueeze(1) + col).flatten(0, 1)


class LearnedContentRelPos(RelPos):
    """Learned embeddings r of row and column offsets, multiplied by the queries: bias q^T r / sqrt(head_dim).

    With the content term q^T k of the attention itself, these are the scores of Section 4.3 of arXiv 1911.03584 (and of
    arXiv 1906.05909).
    """
    name = 'learned_content'
    depends_on_queries = True

    def __init__(self, grid_size: Grid, num_heads: int, head_dim: int = 0, zero_key: bool = True, **dd: Any) -> None:
        super().__init__(grid_size, num_heads)
        self.row_embed = nn.Parameter(torch.empty(2 * grid_size[0] - 1, head_dim // 2, **dd))
        self.col_embed = nn.Parameter(torch.empty(2 * grid_size[1] - 1, head_dim - head_dim // 2, **dd))
        self.zero_key_bias = nn.Parameter(torch.empty(num_heads, **dd)) if zero_key else None
        self.reset_parameters()

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        super().reset_parameters()
        nn.init.normal_(self.row_embed, generator=generator)
        nn.init.normal_(self.col_embed, generator=generator)

    def set_grid_size(self, grid_size: Grid) -> None:
        row_embed = _resize_embed_parameter(self.row_embed, grid_size[0])
        col_embed = _resize_embed_parameter(self.col_embed, grid_size[1])
        super().set_grid_size(grid_size)
        self.row_embed, self.col_embed = row_embed, col_embed

    def get_bias(self, q: Optional[torch.Tensor] = None) -> torch.Tensor:
        assert q is not None
        B, H, N, D = q.shape
        height, width = self.grid_size
        half = self.row_embed.shape[1]
        q = q * D ** -0.5
        # embeddings of all keys' rows and columns, for every row and column of a query
        row_embed = self.row_embed.unfold(0, height, 1).flip(-1)
        col_embed = self.col_embed.unfold(0, width, 1).flip(-1)
        row = torch.einsum('bnhwd,hdk->bnhwk', q[..., :half].reshape(B, H, height, width, half), row_embed)
        col = torch.einsum('bnhwd,wdk->bnhwk', q[..., half:].reshape(B, H, height, width, D - half), col_embed)
        bias = (row.unsqueeze(-1) + col.unsqueeze(-2)).reshape(B, H, N, N)
        zero_key_bias = self.zero_key_bias
        if zero_key_bias is not None:
            bias = torch.cat([bias, zero_key_bias.view(1, H, 1, 1).expand(B, H, N, 1)], dim=-1)
        return bias


def exact_sharpness(num_tokens: int, dtype: torch.dtype) -> float:
    """Return the sharpness at which all that a head leaks to other patches is a rounding error.

    At a border a head puts exp(M / 2) on the zero key and 1 on each of the N patches: M = 2 ln(N / eps), which is 42
    for float32 and 83 for float64 at 14 x 14 patches.
    """
    return 2 * math.log(num_tokens / torch.finfo(dtype).eps)


class OnGrid:
    """Mixin of the attention layers: their grid is that of their encoding."""
    if TYPE_CHECKING:
        rel_pos: RelPos  # TorchScript knows no such annotation

    @property
    def grid_size(self) -> Grid:
        return self.rel_pos.grid_size

    def set_grid_size(self, grid_size: Grid) -> None:
        """Change the grid; every offset keeps its bias."""
        if grid_size != self.grid_size:
            self.rel_pos.set_grid_size(grid_size)


ENCODINGS = {cls.name: cls for cls in (
    RelPosTable, PaddedRelPosTable, QuadraticRelPos, GeneralQuadraticRelPos, LearnedRelPos, LearnedContentRelPos)}
# those with a `point_head`, which can express a convolution
POINTABLE = ('table', 'padded_table', 'quadratic', 'quadratic_gen')
TABLES = ('table', 'padded_table')  # of these, those with a free bias for every offset


def create_rel_pos(
        name: str,
        grid_size: Grid,
        num_heads: int,
        head_dim: int,
        zero_key: bool = True,
        padding: Optional[Union[int, Grid]] = None,
        **dd: Any,
) -> RelPos:
    """Create a relative position encoding.

    Args:
        name: 'table', 'padded_table', 'quadratic', 'quadratic_gen', 'learned' or 'learned_content'.
        grid_size: Patches per image side.
        num_heads: Number of heads.
        head_dim: Width of a head, and of the embeddings of the learned encodings.
        zero_key: Have a zero key.
        padding: Patches of padding that the zero key of a 'padded_table' stands for; by default one on every side.
        **dd: Device and dtype.

    Raises:
        ValueError: If there is no such encoding, or it has no padding.
    """
    if name not in ENCODINGS:
        raise ValueError(f'rel_pos={name!r} is not a relative position encoding: use {", ".join(ENCODINGS)}.')
    if padding is None:
        return ENCODINGS[name](grid_size, num_heads, head_dim, zero_key, **dd)
    if name != PaddedRelPosTable.name or min(to_2tuple(padding)) < 0:
        raise ValueError(f"{padding=} must be 0 or more, and is for rel_pos='padded_table', not {name!r}.")
    return PaddedRelPosTable(grid_size, num_heads, head_dim, zero_key, padding, **dd)


def resize_offset_embed(embed: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the offset embeddings of one axis with zeros, or crop them: (2h - 1, dim) to (2h' - 1, dim)."""
    grow = size - (len(embed) + 1) // 2
    return F.pad(embed, (0, 0, grow, grow))


def _resize_embed_parameter(embed: nn.Parameter, size: int) -> nn.Parameter:
    return nn.Parameter(resize_offset_embed(embed.detach(), size), requires_grad=embed.requires_grad)
