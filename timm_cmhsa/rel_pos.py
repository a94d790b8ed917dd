"""The bias of an attention score by where the key is, seen from the query, and of the key that is nowhere."""
import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from timm.layers import RelPosBias
from torch import nn

MAX_CACHED_ENTRIES = 2 ** 24  # of a layer: 64 MB in float32; beyond, memory is worth more than the time to gather


class ZeroKeyRelPosBias(RelPosBias):
    """timm's relative position bias table, and a learned bias per head for one more key: the zero key.

    An offset means the same at any grid size, so that a change of grid pads the table with zeros or crops it. Offsets
    that a smaller grid does not have are forgotten.
    """
    window_size: Tuple[int, int]
    bias_shape: Tuple[int, int, int]
    relative_position_bias_table: nn.Parameter
    relative_position_index: torch.Tensor
    __jit_ignored_attributes__ = ('_cached',)

    def __init__(self, window_size: Tuple[int, int], num_heads: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(window_size, num_heads, device=device, dtype=dtype)
        self.zero_key_bias = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))
        self._cached: Optional[CachedBias] = None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, 'zero_key_bias'):  # timm's constructor calls this before ours is done
            nn.init.zeros_(self.zero_key_bias)

    def set_window_size(self, window_size: Tuple[int, int]) -> None:
        """Change the grid. The bias of every offset that both grids know is kept."""
        if window_size == self.window_size:
            return
        table = resize_bias_table(self.relative_position_bias_table.detach(), self.window_size, window_size)
        self.window_size = window_size
        self.window_area = window_size[0] * window_size[1]
        self.bias_shape = (self.window_area, self.window_area, table.shape[1])
        self.relative_position_bias_table = nn.Parameter(
            table, requires_grad=self.relative_position_bias_table.requires_grad)
        self.relative_position_index = self.relative_position_index.new_empty(self.window_area ** 2)
        self._init_buffers()
        self._cached = None

    def get_bias(self) -> torch.Tensor:
        """Bias of every query and key, the zero key last: shape (1, num_heads, N, N + 1)."""
        return self.gather_bias() if torch.jit.is_scripting() else self.cached_bias()

    def gather_bias(self) -> torch.Tensor:
        # by rows of one head each: several times as fast as by offsets, backward above all
        table = torch.cat([self.zero_key_bias.unsqueeze(0), self.relative_position_bias_table]).t()
        index = F.pad(self.relative_position_index.view(-1, self.window_area) + 1, [0, 1])
        return table.index_select(1, index.flatten()).view(1, table.shape[0], -1, self.window_area + 1)

    @torch.jit.unused
    def cached_bias(self) -> torch.Tensor:
        """The bias, which in eval mode without gradients, on a CPU, is gathered anew only from other values.

        Values are compared, since PyTorch's counts of changes miss some (`.data`, averages of weights). To ask a GPU
        whether two tensors are equal would take longer than to let it gather.
        """
        parameters = self.relative_position_bias_table, self.zero_key_bias
        if self.training or torch.is_grad_enabled() or not self._can_cache(parameters):
            return self.gather_bias()
        if self._cached is None or not all(
                a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(self._cached.parameters, parameters)):
            self._cached = CachedBias([parameter.detach().clone() for parameter in parameters], self.gather_bias())
        return self._cached.bias

    def _can_cache(self, parameters: Tuple[nn.Parameter, ...]) -> bool:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or math.prod(self.bias_shape) > MAX_CACHED_ENTRIES:
            return False
        return all(type(p) is nn.Parameter and p.device.type == 'cpu' for p in parameters)  # not traced, sharded, ...

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, '_cached': None}


class CachedBias(NamedTuple):
    """A bias, and copies of what it was gathered from."""
    parameters: List[torch.Tensor]
    bias: torch.Tensor


def resize_bias_table(table: torch.Tensor, grid_size: Tuple[int, int], new_grid_size: Tuple[int, int]) -> torch.Tensor:
    """Pad with zeros, or crop, a bias table for another grid. Interpolation would smear its one-hot entries.

    Args:
        table: Shape ((2h - 1) * (2w - 1), num_heads), offsets row by row.
        grid_size: Patches per image side, (h, w), that the table is for.
        new_grid_size: Patches per image side, (h', w'), that it shall be for.

    Returns:
        Table of shape ((2h' - 1) * (2w' - 1), num_heads).
    """
    table_2d = table.reshape(2 * grid_size[0] - 1, 2 * grid_size[1] - 1, -1)
    grow_h, grow_w = (new - old for new, old in zip(new_grid_size, grid_size))
    return F.pad(table_2d, (0, 0, grow_w, grow_w, grow_h, grow_h)).flatten(0, 1)
