"""Which heads are shifts: proved by the weights alone, or measured on images.

A head has a bias for every query and key, and scores by content that add to it. Where no content can outweigh what the
bias of one key is ahead of all others, the head looks at that key, whatever the image is. What a LayerNorm puts out is
bounded: gamma * z + beta with |z| <= sqrt(dim). That bounds the content, |q^T k| for all queries and keys, by the norms
of the projections.
"""
import itertools
import math
from typing import TYPE_CHECKING, List, NamedTuple, Optional, Tuple

import torch
from timm.layers import LayerNorm, LayerNormFp32
from torch import nn

from .efficient import is_watched
from .encodings import ENCODINGS
from .rel_pos import Grid, OffsetRelPos
from .shifts import BORDERS, Factors, Shift

if TYPE_CHECKING:
    from .shiftable import ShiftableAttention

MAX_LEAK = 1e-4  # largest share of its attention that a shift may give to other patches
MAX_BIAS_ENTRIES = 2 ** 24  # that are looked at together: 128 MB in float64


class BiasWinners(NamedTuple):
    """What the biases of a layer say."""
    shifts: List[Optional[Shift]]  # of every head, None where the keys with the largest biases are no shift
    # log of how much weight all other keys get, relative to that key, at most: (num_heads,)
    odds: torch.Tensor  # where that key is a patch
    zero_key_odds: torch.Tensor  # where it is the zero key


@torch.no_grad()
def bias_winners(layer: 'ShiftableAttention') -> BiasWinners:
    """Return for every head of an attention layer where its biases alone make it look, and how surely."""
    rel_pos, grid_size, num_heads = layer.rel_pos, layer.grid_size, layer.num_heads
    if not isinstance(rel_pos, OffsetRelPos) or type(rel_pos) not in ENCODINGS.values() or not num_heads \
            or not layer.is_plain():
        nothing = torch.zeros(num_heads, dtype=torch.double, device='cpu')
        return BiasWinners([None] * num_heads, nothing, nothing)
    num_patches = grid_size[0] * grid_size[1]
    step = max(MAX_BIAS_ENTRIES // (num_heads * num_patches), 1)
    winners, odds = [], []
    for start in range(0, num_patches, step):
        bias = rel_pos.gather_bias(start, min(start + step, num_patches))[0].double().cpu()
        largest, winner = bias.max(dim=-1, keepdim=True)
        winners.append(winner.squeeze(-1))
        largest = largest.squeeze(-1)
        others = bias.scatter(-1, winner, -math.inf).logsumexp(dim=-1)
        odds.append((others - largest).masked_fill(~largest.isfinite(), math.inf))  # infinite ones are no shift
    keys, log_odds = torch.cat(winners, dim=1), torch.cat(odds, dim=1)
    is_patch = keys < num_patches
    of_patches, of_zero_key = (log_odds.masked_fill(~where, -math.inf).amax(dim=1) for where in (is_patch, ~is_patch))
    return BiasWinners([_as_shift(each, grid_size) for each in keys], of_patches, of_zero_key)


def _as_shift(keys: torch.Tensor, grid_size: Grid) -> Optional[Shift]:
    """Return the shift that has these keys, one for each query."""
    width, queries = grid_size[1], torch.arange(len(keys), device='cpu')
    inside = keys < len(keys)
    if not inside.any():
        return Shift(grid_size, 'zeros')  # outside the image for all queries
    rows, cols = ((axis(keys) - axis(queries))[inside] for axis in (lambda x: x // width, lambda x: x % width))
    ends = ({axis.min().item(), axis.max().item()} for axis in (rows, cols))  # the border changes one of them
    for offset, border in itertools.product(itertools.product(*ends), BORDERS):
        shift = Shift(offset, border)
        if torch.equal(keys, shift.keys(grid_size)):
            return shift
    return None


def is_layer_norm(norm: Optional[nn.Module], dim: int) -> bool:
    """Return whether this is a plain LayerNorm of tokens (..., dim): subclasses can do more, as hooks can."""
    if norm is None or type(norm) not in (nn.LayerNorm, LayerNorm, LayerNormFp32) or is_watched(norm):
        return False
    return norm.normalized_shape == (dim,)


@torch.no_grad()
def max_content_score(
        qkv: nn.Linear,
        num_heads: int,
        scale: float,
        norm: Optional[nn.Module] = None,
) -> torch.Tensor:
    """Return a bound of |scale * q^T k| of every head, for all tokens that the norm can put out: (num_heads,).

    Without a LayerNorm there is no bound, unless queries or keys are zero.
    """
    weight = qkv.weight.double().cpu().view(3, num_heads, -1, qkv.in_features)
    bias = weight.new_zeros(weight.shape[:3]) if qkv.bias is None else qkv.bias.double().cpu().view(weight.shape[:3])
    (query, key, _), (query_bias, key_bias, _) = weight, bias
    nothing = [~(w.flatten(1).any(dim=1) | b.any(dim=1)) for w, b in ((query, query_bias), (key, key_bias))]
    if not is_layer_norm(norm, qkv.in_features):
        return torch.zeros_like(weight[0, :, 0, 0]).masked_fill(~(nothing[0] | nothing[1]), math.inf)
    assert isinstance(norm, nn.LayerNorm)
    radius = qkv.in_features ** 0.5
    (query, query_bias), (key, key_bias) = (_after_norm(w, b, norm) for w, b in ((query, query_bias), (key, key_bias)))
    both = radius ** 2 * (query.transpose(-2, -1) @ key).norm(dim=[-2, -1])
    one = radius * (_norm_of(query, key_bias) + _norm_of(key, query_bias))
    return scale * (both + one + (query_bias * key_bias).sum(dim=-1).abs())


def _after_norm(weight: torch.Tensor, bias: torch.Tensor, norm: nn.LayerNorm) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return a projection (..., width, dim) of gamma * z + beta as one of z."""
    if norm.bias is not None:
        bias = bias + weight @ norm.bias.double().cpu()
    if norm.weight is not None:
        weight = weight * norm.weight.double().cpu()
    return weight, bias


def _norm_of(weight: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return (vector.unsqueeze(-2) @ weight).squeeze(-2).norm(dim=-1)


def proved_leaks(layer: 'ShiftableAttention', winners: BiasWinners, norm: Optional[nn.Module] = None) -> torch.Tensor:
    """Return a bound of the share of its attention that a head can give to other keys, whatever the image is."""
    if not any(winners.shifts):
        return torch.ones(layer.num_heads, dtype=torch.double, device='cpu')
    content = layer.max_content_score(norm)  # the zero key has none
    return torch.maximum(
        torch.sigmoid(winners.odds + 2 * content), torch.sigmoid(winners.zero_key_odds + content)).nan_to_num(1.)


def proved_shifts(
        layer: 'ShiftableAttention',
        norm: Optional[nn.Module] = None,
        tolerance: float = MAX_LEAK,
) -> List[Optional[Shift]]:
    """Return the shift of every head that is one by proof, None for the others.

    Args:
        layer: An attention layer of this package.
        norm: What normalizes its input.
        tolerance: Largest share of its attention that a shift may give to other keys.
    """
    winners = bias_winners(layer)
    leaks = proved_leaks(layer, winners, norm)
    return [shift if leak <= tolerance else None for shift, leak in zip(winners.shifts, leaks)]


@torch.no_grad()
def max_output_error(factors: Factors, leak: float, norm: Optional[nn.Module]) -> float:
    """Return how far, as a vector, the output of such heads can be from that of the shift, for any token of the norm.

    A head that gives a share of its attention to other keys is off by that share of the largest difference of values.
    """
    if leak == 0:
        return 0.
    value, bias, output = factors.to(torch.device('cpu'), torch.double)
    if not is_layer_norm(norm, value.shape[1]):
        return math.inf
    bias = value.new_zeros(len(value)) if bias is None else bias
    assert isinstance(norm, nn.LayerNorm)
    value, bias = _after_norm(value, bias, norm)
    radius = value.shape[1] ** 0.5 * (output @ value).norm().item()
    return leak * max(2 * radius, radius + (output @ bias).norm().item())
