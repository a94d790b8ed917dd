"""Relative position encodings: the bias of an attention score by where the key is, seen from the query.

One family with one interface. An encoding gives every head a bias for each offset, key patch minus query patch
(`offset_bias`), and lays these out for all queries and keys (`get_bias`):

- `RelPosTable`: one free number per head and offset (arXiv 2111.01353).
- `QuadraticRelPos`: a centre and a width per head (arXiv 1911.03584, Equation 9).
- `GeneralQuadraticRelPos`: a centre and a covariance per head (the same, Appendix E).
- `LearnedRelPos`: learned embeddings of row and column offsets, and a vector per head (the same, Section 4.3).
- `LearnedContentRelPos`: such embeddings, multiplied by the queries (the same; arXiv 1906.05909).

All can have one more key: the zero key, which is nowhere, has a learned bias per head of its own.
"""
import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

MAX_CACHED_ENTRIES = 2 ** 24  # of a layer: 64 MB in float32; beyond, memory is worth more than the time to gather


class RelPos(nn.Module):
    """What all encodings share: their layout for queries and keys, the zero key, and a cache."""
    name: str
    depends_on_queries = False
    window_size: Tuple[int, int]
    offsets: torch.Tensor
    position: torch.Tensor
    zero_key_bias: Optional[nn.Parameter]
    __jit_ignored_attributes__ = ('_cached',)

    def __init__(
            self,
            window_size: Tuple[int, int],
            num_heads: int,
            head_dim: int = 0,
            zero_key: bool = True,
            device: Any = None,
            dtype: Any = None,
    ) -> None:
        """
        Args:
            window_size: Patches per image side, (h, w).
            num_heads: Number of heads.
            head_dim: Width of the learned embeddings; the other encodings have no use for it.
            zero_key: Have a bias for the zero key.
        """
        super().__init__()
        self.window_size, self.num_heads = window_size, num_heads
        for name, shape in self.parameter_shapes(head_dim).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        # last, as ever: the state of an optimizer knows parameters by their order
        zero_key_bias = torch.empty(num_heads, device=device, dtype=dtype)
        self.zero_key_bias = nn.Parameter(zero_key_bias) if zero_key else None
        self._register_offsets(device)
        self._cached: Optional[CachedBias] = None
        self.reset_parameters()

    def parameter_shapes(self, head_dim: int) -> Dict[str, Tuple[int, ...]]:
        """Names and shapes of the parameters, but for the zero key's."""
        raise NotImplementedError

    def _register_offsets(self, device: Any) -> None:
        """Every offset, key minus query, from (h - 1, w - 1) down to (1 - h, 1 - w), and where to find it.

        Offset number `position[query] - position[key] + middle` leads from a query to a key. That number for all pairs
        is not kept: of a map of thousands of pixels, it would be larger than the model.
        """
        height, width = self.window_size
        rows, cols = torch.arange(1 - height, height, device=device), torch.arange(1 - width, width, device=device)
        offsets = torch.stack(torch.meshgrid(-rows, -cols, indexing='ij'), dim=-1).flatten(0, 1)
        position = (rows[height - 1:, None] * (2 * width - 1) + cols[width - 1:]).flatten()
        self.register_buffer('offsets', offsets, persistent=False)
        self.register_buffer('position', position, persistent=False)

    def reset_parameters(self) -> None:
        if self.zero_key_bias is not None:
            nn.init.zeros_(self.zero_key_bias)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Fill what no checkpoint holds, after a model was made without memory (timm's protocol)."""
        self._register_offsets(self.position.device)

    def set_window_size(self, window_size: Tuple[int, int]) -> None:
        """Change the grid. An offset means the same at any grid size: what both grids know of it is kept."""
        self.window_size = window_size
        self._register_offsets(self.position.device)
        self._cached = None

    def offset_bias(self) -> torch.Tensor:
        """Bias of every offset: shape ((2h - 1) * (2w - 1), num_heads), in the order of `offsets`."""
        raise NotImplementedError

    def get_bias(self, q: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Bias of every query and key, the zero key last.

        Args:
            q: Queries of shape (B, num_heads, N, head_dim), where `depends_on_queries`.

        Returns:
            Shape (1, num_heads, N, N + 1), or (1, num_heads, N, N) without zero key; with B in place of 1 where it
            depends on the queries.
        """
        return self.gather_bias() if torch.jit.is_scripting() else self.cached_bias()

    def gather_bias(self, start: int = 0, stop: Optional[int] = None) -> torch.Tensor:
        """The bias of the queries from start to stop, by default of all."""
        # by rows of one head each: several times as fast as by offsets, backward above all
        middle = self.window_size[0] * (2 * self.window_size[1] - 1) - self.window_size[1]
        bias, index = self.offset_bias(), (self.position[start:stop] + middle).unsqueeze(1) - self.position
        zero_key_bias = self.zero_key_bias
        if zero_key_bias is not None:
            bias, index = torch.cat([zero_key_bias.unsqueeze(0), bias]), F.pad(index + 1, [0, 1])
        bias = bias.t()
        return bias.index_select(1, index.flatten()).view(1, bias.shape[0], index.shape[0], index.shape[1])

    @torch.jit.unused
    def cached_bias(self) -> torch.Tensor:
        """The bias, which in eval mode without gradients, on a CPU, is gathered anew only from other values.

        Values are compared, since PyTorch's counts of changes miss some (`.data`, averages of weights). To ask a GPU
        whether two tensors are equal would take longer than to let it gather.
        """
        parameters = [getattr(self, name) for name, _ in self.named_parameters()]  # what fx traces shows by attribute
        if self.training or torch.is_grad_enabled() or not self._can_cache(parameters):
            return self.gather_bias()
        if self._cached is None or not all(
                a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(self._cached.parameters, parameters)):
            copies = [parameter.detach().clone() for parameter in parameters]
            self._cached = CachedBias(copies, self.gather_bias())
        return self._cached.bias

    def _can_cache(self, parameters: List[nn.Parameter]) -> bool:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or self.num_entries() > MAX_CACHED_ENTRIES:
            return False
        return all(type(p) is nn.Parameter and p.device.type == 'cpu' for p in parameters)  # not traced, sharded, ...

    def num_entries(self) -> int:
        """Size of the bias without the zero key."""
        return self.num_heads * (self.window_size[0] * self.window_size[1]) ** 2

    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        """Make a head look at one offset, or at the zero key where that is outside the image.

        Args:
            head: Number of the head.
            offsets: The offset, and with circular padding those that lead to the same patch the other way round.
            sharpness: How much larger the bias of the offset is than that of all else; the zero key lies between.

        Raises:
            ValueError: If the encoding is not made for this.
        """
        raise ValueError(f"A convolution cannot be rewritten with rel_pos='{self.name}': use {_names(POINTED)}.")

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, '_cached': None}


class CachedBias(NamedTuple):
    """A bias, and copies of what it was gathered from."""
    parameters: List[torch.Tensor]
    bias: torch.Tensor


class RelPosTable(RelPos):
    """One free bias per head and offset, timm's `RelPosBias`. A change of grid pads the table with zeros or crops it.

    Offsets that a smaller grid does not have are forgotten.
    """
    name = 'table'
    relative_position_bias_table: nn.Parameter

    def parameter_shapes(self, head_dim: int) -> Dict[str, Tuple[int, ...]]:
        height, width = self.window_size
        return {'relative_position_bias_table': ((2 * height - 1) * (2 * width - 1), self.num_heads)}

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.trunc_normal_(self.relative_position_bias_table, std=.02)

    def set_window_size(self, window_size: Tuple[int, int]) -> None:
        if window_size != self.window_size:
            table = self.relative_position_bias_table
            resized = resize_bias_table(table.detach(), self.window_size, window_size)
            self.relative_position_bias_table = nn.Parameter(resized, requires_grad=table.requires_grad)
            super().set_window_size(window_size)

    def offset_bias(self) -> torch.Tensor:
        return self.relative_position_bias_table

    @torch.no_grad()
    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        assert self.zero_key_bias is not None
        numbers = torch.tensor(offsets, device=self.offsets.device)
        wanted = (self.offsets.unsqueeze(1) == numbers).all(dim=-1).any(dim=1)
        self.relative_position_bias_table[:, head] = wanted * sharpness
        self.zero_key_bias[head] = sharpness / 2


class QuadraticRelPos(RelPos):
    """A round Gaussian of the offset for every head: bias -alpha * |offset - center|^2, alpha = inv_std^2 / 2.

    Equation 9 of arXiv 1911.03584, up to what is the same for all keys. Centres start at N(0, 2 I), in patches, as in
    its Section 4.2, and widths at one patch, with noise of 1 %. Nothing in it depends on the size of the grid.
    """
    name = 'quadratic'
    center: nn.Parameter
    inv_std: nn.Parameter

    def parameter_shapes(self, head_dim: int) -> Dict[str, Tuple[int, ...]]:
        return {'center': (self.num_heads, 2), 'inv_std': (self.num_heads, *self._unit_inv_std().shape)}

    def _unit_inv_std(self) -> torch.Tensor:
        return torch.ones((), device='cpu')

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.center, std=math.sqrt(2))
        nn.init.normal_(self.inv_std, std=.01).add_(self._unit_inv_std().to(self.inv_std))

    def inv_covariance(self) -> torch.Tensor:
        """Inverse covariance of every head's Gaussian, in patches^-2: shape (num_heads, 2, 2)."""
        return torch.diag_embed(self.inv_std.square().unsqueeze(1).expand(-1, 2))

    def offset_bias(self) -> torch.Tensor:
        distance = self.offsets.unsqueeze(1).to(self.center.dtype) - self.center
        products = distance.unsqueeze(-1) * distance.unsqueeze(-2)  # element by element: never in half precision by AMP
        return -(products * self.inv_covariance()).sum(dim=[-2, -1]) / 2

    @torch.no_grad()
    def point_head(self, head: int, offsets: List[Tuple[int, int]], sharpness: float) -> None:
        """See `RelPos.point_head`. Lemma 2 of arXiv 1911.03584: the offset has bias 0, its neighbours -sharpness."""
        if len(offsets) != 1:
            raise ValueError(f'A head has one centre, not {len(offsets)}.')
        assert self.zero_key_bias is not None
        self.center[head] = torch.tensor(offsets[0], device='cpu').to(self.center)
        self.inv_std[head] = self._unit_inv_std() * math.sqrt(2 * sharpness)
        self.zero_key_bias[head] = -sharpness / 2

    def keep_heads(self, heads: List[int]) -> None:
        """Forget all other heads."""
        self.num_heads = len(heads)
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(parameter.detach()[heads], requires_grad=parameter.requires_grad))


class GeneralQuadraticRelPos(QuadraticRelPos):
    """A Gaussian of any shape: bias -(offset - center)^T Sigma^-1 (offset - center) / 2, Sigma^-1 = inv_std inv_std^T.

    Equation 19 of arXiv 1911.03584 (Appendix E), up to what is the same for all keys.
    """
    name = 'quadratic_gen'

    def _unit_inv_std(self) -> torch.Tensor:
        return torch.eye(2, device='cpu')

    def inv_covariance(self) -> torch.Tensor:
        # element by element: never in half precision by AMP
        return (self.inv_std.unsqueeze(-2) * self.inv_std.unsqueeze(-3)).sum(dim=-1)


class LearnedRelPos(RelPos):
    """Learned embeddings r of row and column offsets, the same for all heads, and a vector v per head: bias v^T r.

    The last term of Equation 8 of arXiv 1911.03584, as in its Section 4.3: half of r is the row's, half the column's.
    A change of grid pads the embeddings with zeros or crops them.
    """
    name = 'learned'
    row_embed: nn.Parameter
    col_embed: nn.Parameter
    head_vector: nn.Parameter

    def parameter_shapes(self, head_dim: int) -> Dict[str, Tuple[int, ...]]:
        return {**self.embed_shapes(head_dim), 'head_vector': (self.num_heads, head_dim)}

    def embed_shapes(self, head_dim: int) -> Dict[str, Tuple[int, ...]]:
        height, width = self.window_size
        half = head_dim // 2
        return {'row_embed': (2 * height - 1, half), 'col_embed': (2 * width - 1, head_dim - half)}

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.row_embed)
        nn.init.normal_(self.col_embed)
        if not self.depends_on_queries:
            nn.init.normal_(self.head_vector, std=self.head_vector.shape[1] ** -0.5)  # biases of about 1

    def set_window_size(self, window_size: Tuple[int, int]) -> None:
        for name, size in (('row_embed', window_size[0]), ('col_embed', window_size[1])):
            embed = getattr(self, name)
            resized = resize_offset_embed(embed.detach(), size)
            setattr(self, name, nn.Parameter(resized, requires_grad=embed.requires_grad))
        super().set_window_size(window_size)

    def offset_bias(self) -> torch.Tensor:
        half = self.row_embed.shape[1]
        # element by element: never in half precision by AMP
        row = (self.row_embed.unsqueeze(1) * self.head_vector[:, :half]).sum(dim=-1)
        col = (self.col_embed.unsqueeze(1) * self.head_vector[:, half:]).sum(dim=-1)
        return (row.unsqueeze(1) + col).flatten(0, 1)


class LearnedContentRelPos(LearnedRelPos):
    """Learned embeddings r of row and column offsets, multiplied by the queries: bias q^T r / sqrt(head_dim).

    With the content term q^T k of the attention itself, these are the scores of Section 4.3 of arXiv 1911.03584.
    """
    name = 'learned_content'
    depends_on_queries = True

    def parameter_shapes(self, head_dim: int) -> Dict[str, Tuple[int, ...]]:
        return self.embed_shapes(head_dim)

    def get_bias(self, q: Optional[torch.Tensor] = None) -> torch.Tensor:
        assert q is not None
        B, H, N, D = q.shape
        height, width = self.window_size
        half = self.row_embed.shape[1]
        q = q * D ** -0.5
        # the embeddings of all keys' rows and columns, for every row and column that a query can be in
        row_embed = self.row_embed.unfold(0, height, 1).flip(-1)
        col_embed = self.col_embed.unfold(0, width, 1).flip(-1)
        row = torch.einsum('bnhwd,hdk->bnhwk', q[..., :half].reshape(B, H, height, width, -1), row_embed)
        col = torch.einsum('bnhwd,wdk->bnhwk', q[..., half:].reshape(B, H, height, width, -1), col_embed)
        bias = (row.unsqueeze(-1) + col.unsqueeze(-2)).reshape(B, H, N, N)
        zero_key_bias = self.zero_key_bias
        if zero_key_bias is not None:
            bias = torch.cat([bias, zero_key_bias.view(1, H, 1, 1).expand(B, H, N, 1)], dim=-1)
        return bias

    def offset_bias(self) -> torch.Tensor:
        raise ValueError("The bias of rel_pos='learned_content' depends on the queries: call get_bias(q).")


ENCODINGS = {cls.name: cls for cls in (
    RelPosTable, QuadraticRelPos, GeneralQuadraticRelPos, LearnedRelPos, LearnedContentRelPos)}
POINTED = ('table', 'quadratic', 'quadratic_gen')  # those that `conv2d_to_attention` can make


def create_rel_pos(name: str, *args: Any, **kwargs: Any) -> RelPos:
    """Make the encoding of this name; further arguments are those of `RelPos`.

    Raises:
        ValueError: If there is none.
    """
    if name not in ENCODINGS:
        raise ValueError(f'rel_pos={name!r} is no relative position encoding: use {_names(ENCODINGS)}.')
    return ENCODINGS[name](*args, **kwargs)


def _names(names: Any) -> str:
    *rest, last = [repr(name) for name in names]
    return f'{", ".join(rest)} or {last}'


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


def resize_offset_embed(embed: torch.Tensor, size: int) -> torch.Tensor:
    """Pad with zeros, or crop, the embeddings of one axis, (2h - 1, dim), for another grid: (2h' - 1, dim)."""
    grow = size - (len(embed) + 1) // 2
    return F.pad(embed, (0, 0, grow, grow))
