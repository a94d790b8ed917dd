"""Computes the heads of a model that are shifts as such, for inference, and reports how sure that is."""
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from .analysis import AttentionMaps, attention_layers, attention_maps, eval_mode
from .certificates import MAX_LEAK, bias_winners, max_output_error, proved_leaks
from .cmhsa import CmhsaBlock
from .shiftable import ShiftableAttention
from .shifts import Shift, ShiftedAttention


class ShiftReport(NamedTuple):
    """What became of one attention layer.

    Attributes:
        name: Of the layer in the model.
        num_heads: All heads.
        num_proved: Heads that are shifts for any image.
        num_measured: Heads that are shifts for the given images.
        leak: Largest share of its attention that a shift gave to other patches; proved where there is a proof, else
            measured.
        bound: Of the error of an output token, as a vector; inf if any head was measured only, or there is no norm.
        error: Largest of an output token, as a vector, for the given images; None where there were none.
        rel_error: The same relative to the largest output token.
    """
    name: str
    num_heads: int
    num_proved: int
    num_measured: int
    leak: float
    bound: float
    error: Optional[float]
    rel_error: Optional[float]


class ShiftReports(List[ShiftReport]):
    """What became of the attention layers of a model; prints as a table."""

    def __str__(self) -> str:
        head = ('layer', 'heads', 'shifts: proved', 'measured', 'leak', 'bound', 'error', 'relative')
        rows: List[Sequence[str]] = [head]
        for layer in self:
            numbers = [layer.leak, layer.bound, layer.error, layer.rel_error]
            rows.append([
                layer.name, *map(str, layer[1:4]), *('-' if number is None else f'{number:.1e}' for number in numbers)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in rows)


@torch.no_grad()
def fuse_shifts(
        model: nn.Module,
        images: Optional[torch.Tensor] = None,
        tolerance: float = MAX_LEAK,
) -> ShiftReports:
    """Compute heads that are shifts as such, in place, for inference.

    `timm.utils.reparameterize_model` does the same for shifts that are proved at the default tolerance, and reports
    nothing. A proof takes the biases, the query and key projections, and the LayerNorm before the attention; without
    one (as in CNNs after `attend_convs`), only heads without queries or keys are proved. Layers with hooks, adapters or
    another forward stay as they are.

    Args:
        model: A model of this package, or one with convolutions replaced by `attend_convs`.
        images: Shape (B, C, H, W). Heads without a proof are shifts if they are for these images, in layers that are
            called once. Also measures errors.
        tolerance: Largest share of its attention that a shift may give to other patches.

    Returns:
        A report for every layer. Bounds hold in exact arithmetic, rounding comes on top.

    Raises:
        ValueError: If the model has no attention layer of this package or is one itself, there are no images, or the
            tolerance is not between 0 and 1.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f'{tolerance=} must be between 0 and 1.')
    layers = attention_layers(model)
    if '' in layers:
        raise ValueError(f'{type(model).__name__} is an attention layer itself: call its fuse(), or give its model.')
    if images is not None and not len(images):
        raise ValueError('There are no images to measure with.')
    norms, seen = _norms(model), {} if images is None else _look(model, images, layers)
    reports = ShiftReports()
    for name, layer in layers.items():
        norm, calls = norms.get(id(layer)), seen.get(name)
        found = find_shifts(layer, norm, None if calls is None else calls.maps, tolerance)
        fused = layer.with_shifts(found.shifts) if any(found.shifts) else None
        reports.append(_report(name, layer, found, fused, norm, calls))
        if fused is not None:
            model.set_submodule(name, fused)
    return reports


def _norms(model: nn.Module) -> Dict[int, Optional[nn.Module]]:
    """Return what normalizes the input of attention layers, by their id."""
    norms: Dict[int, Optional[nn.Module]] = {}
    for block in model.modules():
        if isinstance(block, CmhsaBlock):  # a layer that several blocks share has no norm of its own
            norms[id(block.attn)] = None if id(block.attn) in norms else block.attn_norm()
    return norms


class FoundShifts(NamedTuple):
    """The heads of a layer that are shifts."""
    shifts: List[Optional[Shift]]  # None for a head that is none
    leaks: torch.Tensor  # largest share of its attention that a head gives to other keys: (num_heads,)
    is_proved: torch.Tensor  # whether the leak is: (num_heads,)


def find_shifts(
        layer: ShiftableAttention,
        norm: Optional[nn.Module],
        maps: Optional[AttentionMaps],
        tolerance: float,
) -> FoundShifts:
    """Find the heads that are shifts, by proof or else by the attention on some images, if it was measured."""
    winners = bias_winners(layer)
    proved = proved_leaks(layer, winners, norm)
    is_proved = proved <= tolerance
    measured = torch.ones_like(proved) if maps is None else measured_leaks(maps, winners.shifts)
    leaks = torch.where(is_proved, proved, measured)
    shifts = [shift if leak <= tolerance and layer.is_replaceable() else None
              for shift, leak in zip(winners.shifts, leaks)]
    return FoundShifts(shifts, leaks, is_proved)


def measured_leaks(maps: AttentionMaps, shifts: Sequence[Optional[Shift]]) -> torch.Tensor:
    """Return the largest share of its attention that every head gives to other keys than its shift's: (num_heads,)."""
    weights = maps.weights if maps.zero_key is None else torch.cat([maps.weights, maps.zero_key.unsqueeze(-1)], -1)
    leaks = torch.ones(weights.shape[1], dtype=torch.double, device='cpu')
    for head, shift in enumerate(shifts):
        if shift is not None:
            keys = shift.keys(maps.grid_size).to(weights.device).expand(len(weights), -1).unsqueeze(-1)
            leaks[head] = weights[:, head].scatter(-1, keys, 0.).sum(dim=-1).max().item()
    return leaks


class Calls(NamedTuple):
    """What a layer did with some images."""
    inputs_and_outputs: List[Tuple[torch.Tensor, torch.Tensor]]  # of every call
    maps: Optional[AttentionMaps]  # None if there were several calls: these are the last one's


def _look(model: nn.Module, images: torch.Tensor, layers: Dict[str, Any]) -> Dict[str, Calls]:
    """Return what every layer does with these images."""
    calls: Dict[str, List[Tuple[torch.Tensor, torch.Tensor]]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda layer, inputs, output: calls.setdefault(name, []).append((inputs[0], output))

    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    try:
        with eval_mode(model):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    maps = attention_maps(model, images)
    return {name: Calls(each, maps[name] if len(each) == 1 else None) for name, each in calls.items()}


def _report(
        name: str,
        layer: ShiftableAttention,
        found: FoundShifts,
        fused: Optional[ShiftedAttention],
        norm: Optional[nn.Module],
        calls: Optional[Calls],
) -> ShiftReport:
    is_shift = torch.tensor([shift is not None for shift in found.shifts], dtype=torch.bool, device='cpu')
    bound, error, rel_error = 0., None, None
    for head in is_shift.nonzero().flatten().tolist():
        alone = [shift if i == head else None for i, shift in enumerate(found.shifts)]
        factors, = layer.shift_factors(alone).values()
        is_proved = bool(found.is_proved[head])
        bound += max_output_error(factors, found.leaks[head].item(), norm) if is_proved else math.inf
    if fused is not None and calls is not None:
        with eval_mode(fused):
            error = max((fused(x) - y).norm(dim=-1).max().item() for x, y in calls.inputs_and_outputs)
        largest = max(y.norm(dim=-1).max().item() for _, y in calls.inputs_and_outputs)
        rel_error = error / max(largest, torch.finfo(calls.inputs_and_outputs[0][1].dtype).tiny)
    return ShiftReport(
        name=name,
        num_heads=layer.num_heads,
        num_proved=int((is_shift & found.is_proved).sum()),
        num_measured=int((is_shift & ~found.is_proved).sum()),
        leak=found.leaks[is_shift].max().item() if is_shift.any() else 0.,
        bound=bound,
        error=error,
        rel_error=rel_error,
    )
