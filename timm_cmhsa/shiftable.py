"""What attention layers have in common whose heads can be computed as shifts."""
from typing import TYPE_CHECKING, Dict, Optional, Sequence

import torch
from torch import nn

from .certificates import proved_shifts
from .efficient import is_watched
from .rel_pos import OnGrid
from .shifts import Factors, Shift, ShiftedAttention


class ShiftableAttention(OnGrid):
    """Mixin of the attention layers, which define all that raises `NotImplementedError` here."""
    if TYPE_CHECKING:  # TorchScript knows no such annotations
        num_heads: int
        attn_drop: nn.Dropout
        proj_drop: nn.Dropout

    def is_plain(self) -> bool:
        """Return whether the projections are their weights and nothing else."""
        raise NotImplementedError

    def max_content_score(self, norm: Optional[nn.Module] = None) -> torch.Tensor:
        """Return how much content can add to a score of every head, in float64 on the CPU: (num_heads,).

        Args:
            norm: What normalizes the input.
        """
        raise NotImplementedError

    def shift_factors(self, shifts: Sequence[Optional[Shift]]) -> Dict[Shift, Factors]:
        """Return what the heads with each shift do; they have None if they are none."""
        raise NotImplementedError

    def with_shifts(self, shifts: Sequence[Optional[Shift]]) -> ShiftedAttention:
        """Return the form for inference in which some heads are these shifts."""
        raise NotImplementedError

    def without_shifts(self) -> nn.Module:
        """Return the form for inference in which no head is a shift."""
        raise NotImplementedError

    def is_replaceable(self) -> bool:
        """Return whether a layer with the same weights computes the same: nothing was added to this one."""
        assert isinstance(self, nn.Module)
        drops = self.attn_drop, self.proj_drop
        if is_watched(self) or any(type(drop) not in (nn.Dropout, nn.Identity) or is_watched(drop) for drop in drops):
            return False
        return self.is_plain()

    def fuse(self, norm: Optional[nn.Module] = None) -> nn.Module:
        """Return the form for inference, which `timm.utils.reparameterize_model` asks for.

        It is a new layer, in which heads that are shifts, by proof, are computed as such, and others with absorbed
        weights; or this one where neither would be cheaper, or something was added to it.

        Args:
            norm: What normalizes the input. A LayerNorm bounds what content adds to the scores.
        """
        assert isinstance(self, nn.Module)
        if not self.is_replaceable():
            return self
        shifts = proved_shifts(self, norm)
        return self.with_shifts(shifts) if any(shifts) else self.without_shifts()
