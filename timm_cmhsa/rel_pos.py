"""Relative position biases: what a head adds to the score of an offset between key and query, and of the zero key."""
import math
from typing import Any, List, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import nn

from .layers import Size2d

Grid = Tuple[int, int]  # patches per image side, (h, w)

BIAS_SCALE = 30.  # of a padded table, see there


class OffsetRelPos(nn.Module):
    """Base of the encodings that give every offset a bias.

    Keys are the patches, then those of a ring of padding around the grid: (h + 2 pad_h) * (w + 2 pad_w) in all.
    """
    depends_on_queries = False
    offsets: torch.Tensor  # all of them, key minus query, from (h + pad_h - 1, w + pad_w - 1) down to the opposite
    position: torch.Tensor  # of every key; position[query] - position[key] + a constant numbers the offset

    def __init__(self, grid_size: Grid, num_heads: int, padding: Grid = (0, 0), device: Any = None) -> None:
        super().__init__()
        self.grid_size, self.num_heads, self.padding = grid_size, num_heads, padding
        self._register_offsets(device)

    def _register_offsets(self, device: Any) -> None:
        (height, width), (pad_h, pad_w) = self.grid_size, self.padding
        rows = torch.arange(height + pad_h - 1, -height - pad_h, -1, device=device)
        cols = torch.arange(width + pad_w - 1, -width - pad_w, -1, device=device)
        self.register_buffer('offsets', torch.cartesian_prod(rows, cols), persistent=False)
        rows, cols = (torch.arange(-pad, size + pad, device=device) for pad, size in zip(self.padding, self.grid_size))
        position = rows[:, None] * (2 * (width + pad_w) - 1) + cols
        above, middle, below = position.split([pad_h, height, pad_h])
        left, patches, right = middle.split([pad_w, width, pad_w], dim=1)
        # An index of all pairs would be larger than the model for feature maps of thousands of pixels.
        position = torch.cat([part.flatten() for part in (patches, above, below, left, right)])
        self.register_buffer('position', position, persistent=False)

    def init_non_persistent_buffers(self) -> None:
        """Fill the buffers that no checkpoint holds, after creation on the meta device (timm's protocol)."""
        # transformers 4 creates parameters alone on that device: the buffers are right then, and must stay
        tensor = next(self.parameters()) if self.position.is_meta else self.position
        self._register_offsets(tensor.device)

    def set_grid_size(self, grid_size: Grid) -> None:
        """Change the grid. An offset means the same at any grid size, so its bias is kept."""
        self.grid_size = grid_size
        self._register_offsets(self.position.device)

    def offset_bias(self) -> torch.Tensor:
        """Return the bias of every offset, in the order of `offsets`: shape (num_offsets, num_heads)."""
        raise NotImplementedError

    def pair_bias(self) -> torch.Tensor:
        """Return the bias of every query and key: shape (1, num_heads, N, number of keys)."""
        reach_h, reach_w = self.grid_size[0] + self.padding[0], self.grid_size[1] + self.padding[1]
        query_position = self.position[:self.grid_size[0] * self.grid_size[1]]
        index = (query_position + reach_h * (2 * reach_w - 1) - reach_w).unsqueeze(1) - self.position
        # Gathering from rows of one head each is several times as fast as from rows of one offset each.
        bias = self.offset_bias().t()
        return bias.index_select(1, index.flatten()).view(1, bias.shape[0], index.shape[0], index.shape[1])

    def get_bias(self, q: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Return what is added to the scores: (B or 1, num_heads, N, N), or N + 1 keys with the zero key last.

        Queries, (B, num_heads, N, qk_dim), are for encodings that depend on them.
        """
        return self.pair_bias()


class RelPosTable(OffsetRelPos):
    """One free bias per head and offset (arXiv 2111.01353), as timm's `RelPosBias`, and a zero key.

    A change of the grid pads the table with zeros or crops it, since interpolation would smear single entries. Offsets
    that a smaller grid lacks are forgotten.
    """
    name = 'table'

    def __init__(self, grid_size: Grid, num_heads: int, padding: Grid = (0, 0), **dd: Any) -> None:
        super().__init__(grid_size, num_heads, padding, dd.get('device'))
        self.relative_position_bias_table = nn.Parameter(torch.empty(len(self.offsets), num_heads, **dd))
        self.zero_key_bias = nn.Parameter(torch.empty(num_heads, **dd))
        self.reset_parameters()

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        self.init_non_persistent_buffers()
        nn.init.trunc_normal_(self.relative_position_bias_table, std=.02, generator=generator)
        nn.init.zeros_(self.zero_key_bias)

    def set_grid_size(self, grid_size: Grid) -> None:
        table = self.relative_position_bias_table
        resized = self.resize_table(table.detach(), self.grid_size, grid_size)
        super().set_grid_size(grid_size)
        self.relative_position_bias_table = nn.Parameter(resized, requires_grad=table.requires_grad)

    def resize_table(self, table: torch.Tensor, grid_size: Grid, new_size: Grid, scale: Any = None) -> torch.Tensor:
        """Return the table, (num_offsets, num_heads), for another grid. A padded one may have another model's scale."""
        (pad_h, pad_w), (height, width) = self.padding, grid_size
        table_2d = table.reshape(2 * (height + pad_h) - 1, 2 * (width + pad_w) - 1, -1)
        grow_h, grow_w = (new - old for new, old in zip(new_size, grid_size))
        return F.pad(table_2d, (0, 0, grow_w, grow_w, grow_h, grow_h)).flatten(0, 1)

    def offset_bias(self) -> torch.Tensor:
        return self.relative_position_bias_table

    def get_bias(self, q: Optional[torch.Tensor] = None) -> torch.Tensor:
        bias = self.pair_bias()
        zero_key_bias = self.zero_key_bias.view(1, -1, 1, 1).expand(-1, -1, bias.shape[2], -1)
        return torch.cat([bias, zero_key_bias], dim=-1)

    @torch.no_grad()
    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        """Point a head at an offset (or all that lead to the same patch), and outside the image at the zero key."""
        wanted = torch.tensor(offsets, device=self.offsets.device)
        is_wanted = (self.offsets.unsqueeze(1) == wanted).all(dim=-1).any(dim=1)
        self.relative_position_bias_table[:, head] = is_wanted * sharpness
        self.zero_key_bias[head] = sharpness / 2


class PaddedRelPosTable(RelPosTable):
    """A table of biases whose zero key stands for a ring of zero padding around the grid.

    The bias of the zero key is the logsumexp of the biases over the ring, plus a learned number. Every query then sees
    as many keys, which makes the rewrite of a convolution exact at any bias (see docs/theory.md).

    Biases have to change much more than weights, and Adam's steps are the same for both. So the bias is the table times
    `bias_scale`. Checkpoints hold that, and the size of the ring, which the length of the table alone does not tell.
    """
    name = 'padded_table'
    bias_scale: torch.Tensor
    padding_size: torch.Tensor

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        super().reset_parameters(generator)
        table = self.relative_position_bias_table
        self.register_buffer('bias_scale', torch.tensor(BIAS_SCALE, dtype=table.dtype, device=table.device))
        table.data /= BIAS_SCALE
        self.register_buffer('padding_size', torch.tensor(self.padding, dtype=table.dtype, device=table.device))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        loaded = state_dict.get(f'{prefix}padding_size')
        if loaded is not None and tuple(loaded.tolist()) != self.padding:
            raise ValueError(f'The table has padding={tuple(map(int, loaded))}, and the model {self.padding}.')
        super()._load_from_state_dict(state_dict, prefix, *args)

    def resize_table(self, table: torch.Tensor, grid_size: Grid, new_size: Grid, scale: Any = None) -> torch.Tensor:
        """Return the table for another grid, in which an offset with a bias above the median keeps its weight.

        A number added to all biases of a head changes no softmax, so biases are taken relative to the head's median,
        which is 0 after a rewrite. What exp(bias) has above 1 grows with the number of keys (see docs/theory.md).
        """
        device = table.device if table.is_meta else torch.device('cpu')  # not every device has float64
        scale = (self.bias_scale if scale is None else scale).to(device)
        growth = self.num_keys(new_size) / self.num_keys(grid_size)
        centered = table.to(device, torch.float64)
        if len(table) > 1:  # most offsets have the bias of the median, unless there is only the one of a single patch
            centered = centered - centered.median(dim=0).values
        bias = centered * scale
        grown = bias + (growth + (1 - growth) * (-bias).exp()).log()  # log(1 + growth * (exp(bias) - 1)), no overflow
        return super().resize_table(torch.where(bias > 0, grown / scale, centered).to(table), grid_size, new_size)

    def num_keys(self, grid_size: Grid) -> int:
        """Return the number of keys of every query, those of the padding included."""
        return (grid_size[0] + 2 * self.padding[0]) * (grid_size[1] + 2 * self.padding[1])

    def offset_bias(self) -> torch.Tensor:
        return self.relative_position_bias_table * self.bias_scale

    def get_bias(self, q: Optional[torch.Tensor] = None) -> torch.Tensor:
        bias = self.pair_bias()
        inside, outside = bias[..., :bias.shape[2]], bias[..., bias.shape[2]:]
        if self.padding == (0, 0):  # ONNX has no logsumexp of nothing
            zero_key = torch.full_like(inside[..., :1], -math.inf)
        else:
            zero_key = outside.logsumexp(dim=-1, keepdim=True)
        return torch.cat([inside, zero_key + self.zero_key_bias.view(-1, 1, 1)], dim=-1)

    @torch.no_grad()
    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        """Point a head at an offset; the padding takes the weight of an offset outside the image."""
        super().point_head(head, offsets, sharpness)
        self.relative_position_bias_table[:, head] /= self.bias_scale
        self.zero_key_bias[head] = 0


def create_rel_pos(
        name: str, grid_size: Grid, num_heads: int, padding: Optional[Size2d] = None, **dd: Any) -> RelPosTable:
    """Create a relative position bias, 'table' or 'padded_table', the latter with one patch of padding by default."""
    if name == RelPosTable.name and padding is None:
        return RelPosTable(grid_size, num_heads, **dd)
    if name != PaddedRelPosTable.name:
        raise ValueError(f"rel_pos={name!r} with {padding=}: use 'table' without padding, or 'padded_table'.")
    return PaddedRelPosTable(grid_size, num_heads, to_2tuple(1 if padding is None else padding), **dd)


def exact_sharpness(num_tokens: int, dtype: torch.dtype) -> float:
    """Return the sharpness at which a hard head's leak to other patches is a rounding error, of float32 at least.

    At a border a head puts exp(M / 2) on the zero key and 1 on each of the N patches: M = 2 ln(N / eps).
    """
    return 2 * math.log(num_tokens / torch.finfo(torch.promote_types(dtype, torch.float32)).eps)
