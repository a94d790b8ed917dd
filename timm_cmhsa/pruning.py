"""Find and prune degenerate heads of the generalized quadratic encoding (arXiv 1911.03584, Appendix E)."""
from typing import Any, Dict, List

import torch
from timm.utils import unwrap_model

from .attention import RelPosAttention
from .encodings import GeneralQuadraticRelPos

MIN_EIGENVALUE = 1e-5  # patches^-2; if the largest of a head's inverse covariance is smaller, it attends to all alike
MAX_CONDITION = 1e5  # if the ratio of the two is larger, it attends to a thin stripe


def degenerate_heads(rel_pos: GeneralQuadraticRelPos) -> List[int]:
    """Return the heads that attend to everything alike, or to a thin stripe, by the criterion of Appendix E."""
    smallest, largest = torch.linalg.eigvalsh(rel_pos.inv_covariance().detach().double().cpu()).unbind(dim=-1)
    degenerate = (largest < MIN_EIGENVALUE) | (largest > MAX_CONDITION * smallest)
    return degenerate.nonzero().flatten().tolist()


def prune_degenerate_heads(model: Any) -> Dict[str, List[int]]:
    """Remove degenerate heads from a model with the generalized quadratic encoding, or a wrapper of one, in place.

    What they contributed is lost; Appendix E trains on for a few epochs, at a tenth of the learning rate. To create
    the smaller model again, pass `model.model_args()` to `timm.create_model`: its `num_heads` is a list where blocks
    differ. The parameters are new, so create the optimizer afterwards.

    Returns:
        Indices of the removed heads by name of the layer, an empty list for a layer that has lost none.

    Raises:
        ValueError: If no layer has this encoding, or one that needs a head would lose all; the model is left as it was.
    """
    model = unwrap_model(model)
    layers: Dict[str, Any] = {
        name: module for name, module in model.named_modules()
        if isinstance(getattr(module, 'rel_pos', None), GeneralQuadraticRelPos) and hasattr(module, 'keep_heads')}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer with rel_pos='quadratic_gen': only its heads can be degenerate.")
    pruned = {name: degenerate_heads(layer.rel_pos) for name, layer in layers.items()}
    for name, layer in layers.items():
        if isinstance(layer, RelPosAttention) and len(pruned[name]) == layer.num_heads:
            raise ValueError(
                f'All {layer.num_heads} heads of {name} are degenerate, and it needs one: nothing was pruned.')
    for name, layer in layers.items():
        layer.keep_heads([head for head in range(layer.num_heads) if head not in pruned[name]])
    if hasattr(model, '_model_args'):  # what newer versions of timm make the model anew from
        model._model_args = {**model._model_args, 'num_heads': model.model_args()['num_heads']}
    if getattr(model, 'hard_attn', False):
        model.set_hard_attn()
    return pruned
