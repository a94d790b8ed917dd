"""CNNs of timm with attention in place of convolutions: what a config.json says about one, and the model made of it."""
import reprlib
from typing import Any, Mapping

import timm
import torch
from timm.layers import to_2tuple

from .cnn import attend_convs
from .errors import CheckpointError, one_line
from .files import is_ours


def create_sized(name: str, img_size: Any, **kwargs: Any) -> Any:
    """Create a model of timm for images of this size, which most convolutional networks do not ask for."""
    try:
        return timm.create_model(name, img_size=img_size, **kwargs)
    except TypeError:
        return timm.create_model(name, **kwargs)


def create_attended(checkpoint: Any, **model_kwargs: Any) -> Any:
    """Create a CNN of timm, attend its convolutions, call by call, and load tensors, in eval mode."""
    spec = checkpoint.spec
    args = {**spec.model_args, **model_kwargs}
    check_attended(checkpoint, args)
    model = create_sized(spec.architecture, **args)
    try:
        for call in spec.attend:
            attend_convs(model, input_size=(args['in_chans'], *to_2tuple(args['img_size'])), **call)
        model.load_state_dict(checkpoint.tensors)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as e:
        raise CheckpointError(
            f'{checkpoint.source} does not fit {spec.architecture} with attention: {one_line(e, 300)}') from e
    model.base_args = args
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **spec.pretrained_cfg}
    return model.eval()


def check_attended(checkpoint: Any, args: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless tensors fit a CNN but for its attention. This takes no memory."""
    spec, tensors, source = checkpoint.spec, checkpoint.tensors, checkpoint.source
    if not timm.is_model(spec.architecture or '') or is_ours(spec.architecture):
        raise CheckpointError(f'{source}: {reprlib.repr(spec.architecture)} is not a CNN of timm.')
    about = f'{spec.architecture} with {reprlib.repr(dict(args))}'
    try:
        with torch.device('meta'):
            bare = create_sized(spec.architecture, **args).state_dict()
    except Exception as e:  # timm's layers raise many kinds
        raise CheckpointError(f'{source}: {about} is no model: {one_line(e)}') from e
    attended = tuple(f'{name}.' for call in spec.attend for name in call['names'])
    for name, tensor in bare.items():
        if name.startswith(attended) or name.endswith('.num_batches_tracked'):  # which frozen batch norm lacks
            continue
        if name not in tensors or tensors[name].shape != tensor.shape:
            raise CheckpointError(
                f'{source} is not {about}, as {name} differs: set model.base_args to the arguments of its creation.')
