"""Relative position encodings of arXiv 1911.03584: Gaussians of the offset, and learned embeddings."""
import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import nn

from ..rel_pos import Grid, OffsetRelPos


class QuadraticRelPos(OffsetRelPos):
    """A round Gaussian per head: bias -alpha * |offset - center|^2, where alpha = inv_std^2 / 2.

    Equation 9 of the paper, without a term that is the same for all keys. Centres start at N(0, 2 I), in patches, as in
    its Section 4.2. Widths start at one patch, with noise of standard deviation 0.01. Nothing depends on the grid.
    """
    name = 'quadratic'
    unit_inv_std = torch.ones(())  # of a Gaussian that is one patch wide

    def __init__(self, grid_size: Grid, num_heads: int, dim: int = 0, **dd: Any) -> None:
        super().__init__(grid_size, num_heads, device=dd.get('device'))
        self.center = nn.Parameter(torch.empty(num_heads, 2, **dd))
        self.inv_std = nn.Parameter(torch.empty(num_heads, *self.unit_inv_std.shape, **dd))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        self.init_non_persistent_buffers()
        nn.init.normal_(self.center, std=math.sqrt(2), generator=generator)
        nn.init.normal_(self.inv_std, std=.01, generator=generator)
        self.inv_std.add_(self.unit_inv_std.to(self.inv_std))

    def inv_root(self) -> torch.Tensor:
        """Return a square root of the inverse covariance of every head's Gaussian, (num_heads, 2, 2), in patches^-1."""
        return self.inv_std.unsqueeze(1).expand(-1, 2).diag_embed()

    def offset_bias(self) -> torch.Tensor:
        # In float32 at least, since half precision cannot represent offsets beyond 256.
        distance = self.offsets.unsqueeze(1).float() - self.center
        scaled = (distance.unsqueeze(-1) * self.inv_root()).sum(dim=-2)  # AMP would round a matmul to half precision
        return -(scaled.square().sum(dim=-1) / 2).to(self.center.dtype)


class GeneralQuadraticRelPos(QuadraticRelPos):
    """A Gaussian of any shape, with Sigma^-1 = inv_std inv_std^T (Equation 19): bias -d^T Sigma^-1 d / 2."""
    name = 'quadratic_gen'
    unit_inv_std = torch.eye(2)

    def inv_root(self) -> torch.Tensor:
        return self.inv_std


class LearnedRelPos(OffsetRelPos):
    """Learned embeddings r of offsets, multiplied by a learned vector v per head: bias v^T r.

    The last term of Equation 8 of the paper. Half of r belongs to the row offset, half to the column offset, and all
    heads share it. A change of the grid pads the embeddings with zeros or crops them.
    """
    name = 'learned'

    def __init__(self, grid_size: Grid, num_heads: int, dim: int, **dd: Any) -> None:
        super().__init__(grid_size, num_heads, device=dd.get('device'))
        self.row_embed = nn.Parameter(torch.empty(2 * grid_size[0] - 1, dim // 2, **dd))
        self.col_embed = nn.Parameter(torch.empty(2 * grid_size[1] - 1, dim - dim // 2, **dd))
        self.head_vector = None if self.depends_on_queries else nn.Parameter(torch.empty(num_heads, dim, **dd))
        self.reset_parameters()

    def reset_parameters(self, generator: Optional[torch.Generator] = None) -> None:
        self.init_non_persistent_buffers()
        nn.init.normal_(self.row_embed, generator=generator)
        nn.init.normal_(self.col_embed, generator=generator)
        if self.head_vector is not None:  # for biases of about 1
            nn.init.normal_(self.head_vector, std=self.head_vector.shape[1] ** -0.5, generator=generator)

    def set_grid_size(self, grid_size: Grid) -> None:
        super().set_grid_size(grid_size)
        for name, size in zip(('row_embed', 'col_embed'), grid_size):
            embed = self.get_parameter(name)
            resized = resize_offset_embed(embed.detach(), 2 * size - 1)
            setattr(self, name, nn.Parameter(resized, requires_grad=embed.requires_grad))

    def offset_bias(self) -> torch.Tensor:
        half, head_vector = self.row_embed.shape[1], self.head_vector
        assert head_vector is not None
        # AMP would round a matmul to half precision
        row = (self.row_embed.unsqueeze(1) * head_vector[:, :half]).sum(dim=-1)
        col = (self.col_embed.unsqueeze(1) * head_vector[:, half:]).sum(dim=-1)
        return (row.unsqueeze(1) + col).flatten(0, 1)


class LearnedContentRelPos(LearnedRelPos):
    """The same embeddings r, multiplied by the queries: bias q^T r / sqrt(dim).

    Together with the content term q^T k, these are the scores of Section 4.3 of the paper (and of arXiv 1906.05909).
    """
    name = 'learned_content'
    depends_on_queries = True

    def get_bias(self, q: Optional[torch.Tensor] = None) -> torch.Tensor:
        assert q is not None
        B, H, N, D = q.shape
        height, width = self.grid_size
        half = self.row_embed.shape[1]
        q = q * D ** -0.5
        # embeddings of the offsets from every query row (column) to every key row (column)
        row_embed = self.row_embed.unfold(0, height, 1).flip(-1)
        col_embed = self.col_embed.unfold(0, width, 1).flip(-1)
        row = torch.einsum('bnhwd,hdk->bnhwk', q[..., :half].reshape(B, H, height, width, half), row_embed)
        col = torch.einsum('bnhwd,wdk->bnhwk', q[..., half:].reshape(B, H, height, width, D - half), col_embed)
        return (row.unsqueeze(-1) + col.unsqueeze(-2)).reshape(B, H, N, N)


def resize_offset_embed(embed: torch.Tensor, length: int) -> torch.Tensor:
    """Pad the offset embeddings of one axis, (2 * h - 1, dim), with zeros on both sides, or crop them."""
    grow = (length - len(embed)) // 2
    return F.pad(embed, (0, 0, grow, grow))


ENCODINGS = {cls.name: cls for cls in (QuadraticRelPos, GeneralQuadraticRelPos, LearnedRelPos, LearnedContentRelPos)}
