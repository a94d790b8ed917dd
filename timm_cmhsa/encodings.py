"""All relative position encodings by name: bias tables, and those of arXiv 1911.03584, Gaussians and embeddings."""
import math
from typing import Any, List, Mapping, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import nn

from .rel_pos import Grid, OffsetRelPos, PaddedRelPosTable, RelPos, RelPosTable


class QuadraticRelPos(OffsetRelPos):
    """A round Gaussian of the offset for every head: bias -alpha * |offset - center|^2, alpha = inv_std^2 / 2.

    Equation 9 of arXiv 1911.03584, up to a term that is the same for all keys. Centres start at N(0, 2 I), in patches,
    as in its Section 4.2, and widths at one patch, with noise of standard deviation 0.01. Nothing depends on the size
    of the grid.
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
        inv_variance = self.inv_std.square()
        zero = torch.zeros_like(inv_variance)
        return torch.stack([inv_variance, zero, zero, inv_variance], dim=-1).view(-1, 2, 2)  # ONNX has no diag_embed

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

    Equation 19 of arXiv 1911.03584 (Appendix E).
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
        ValueError: If there is no such encoding, or it has no such padding.
    """
    if name not in ENCODINGS:
        raise ValueError(f'rel_pos={name!r} is not a relative position encoding: use {", ".join(ENCODINGS)}.')
    if padding is None:
        return ENCODINGS[name](grid_size, num_heads, head_dim, zero_key, **dd)
    if name != PaddedRelPosTable.name:
        raise ValueError(f"{padding=} is for rel_pos='padded_table', not {name!r}.")
    sides = to_2tuple(padding)
    if len(sides) != 2 or not all(isinstance(side, int) and side >= 0 for side in sides):
        raise ValueError(f'{padding=} must be one or two whole numbers of patches, 0 or more.')
    return PaddedRelPosTable(grid_size, num_heads, head_dim, zero_key, padding, **dd)


def resize_offset_embed(embed: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the offset embeddings of one axis with zeros, or crop them: (2h - 1, dim) to (2h' - 1, dim)."""
    grow = size - (len(embed) + 1) // 2
    return F.pad(embed, (0, 0, grow, grow))


def _resize_embed_parameter(embed: nn.Parameter, size: int) -> nn.Parameter:
    return nn.Parameter(resize_offset_embed(embed.detach(), size), requires_grad=embed.requires_grad)
