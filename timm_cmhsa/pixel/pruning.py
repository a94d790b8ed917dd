"""Pruning of degenerate heads of the generalized quadratic encoding (Appendix E of arXiv 1911.03584)."""
from typing import Any, Dict, List

import torch
from timm.utils import unwrap_model

from .encodings import GeneralQuadraticRelPos, replace_parameter
from .models import PositionalAttention

# Of the eigenvalues of a head's inverse covariance:
MIN_EIGENVALUE = 1e-5  # patches^-2; if the larger one is below, the head attends to all patches alike
MAX_CONDITION = 1e5  # if the ratio of the two is above, it attends to a thin stripe


def degenerate_heads(rel_pos: GeneralQuadraticRelPos) -> List[int]:
    """Return the heads that attend to all patches alike, or to a thin stripe."""
    smallest, largest = torch.linalg.eigvalsh(rel_pos.inv_covariance().detach().cpu().double()).unbind(dim=-1)
    degenerate = (largest < MIN_EIGENVALUE) | (largest > MAX_CONDITION * smallest)
    return degenerate.nonzero().flatten().tolist()


def prune_degenerate_heads(model: Any) -> Dict[str, List[int]]:
    """Remove degenerate heads from a model with `rel_pos='quadratic_gen'`, in place. Return their indices by layer.

    Their contribution is lost. Appendix E then trains for a few more epochs, at a tenth of the learning rate. Create
    the optimizer and DistributedDataParallel afterwards, since the parameters are new. `model.model_args()` has the new
    numbers of heads.

    Raises:
        ValueError: If no layer has this encoding.
    """
    model = unwrap_model(model)
    layers: Dict[str, Any] = {
        name: module for name, module in model.named_modules()
        if isinstance(module, PositionalAttention) and isinstance(module.rel_pos, GeneralQuadraticRelPos)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layer with rel_pos='quadratic_gen': there is none to prune.")
    pruned = {name: degenerate_heads(layer.rel_pos) for name, layer in layers.items()}
    for name, layer in layers.items():
        heads = [head for head in range(layer.num_heads) if head not in pruned[name]]
        weight = layer.value.weight.unflatten(1, (layer.num_heads, layer.proj.in_features))
        replace_parameter(layer.value, 'weight', weight[:, heads].flatten(1))
        for parameter in ('center', 'inv_std'):
            replace_parameter(layer.rel_pos, parameter, layer.rel_pos.get_parameter(parameter)[heads])
        layer.num_heads = layer.rel_pos.num_heads = len(heads)
        layer.value.in_features = layer.value.weight.shape[1]
    if hasattr(model, '_model_args'):  # what newer versions of timm save with the model
        model._model_args = {**model._model_args, 'num_heads': model.model_args()['num_heads']}
    return pruned
