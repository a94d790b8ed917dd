"""The models of a run: made by their names, or started from weights, for the images and classes at hand."""
from argparse import Namespace
from functools import partial
from typing import Any, Dict, Optional, Tuple

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.utils import random_seed
from timm.utils.model import freeze_batch_norm_2d
from torch import nn

from ..attended import create_sized
from ..checkpoint import LABEL_KEYS, Checkpoint, build_model
from ..errors import CheckpointError, HubError, one_line
from ..files import PathLike
from ..models import Cmhsa, checkpoint_filter_fn

CLASSIFIER_STD = 0.01
SOURCES = 'hf-hub:', 'local-dir:'  # of models with weights, before their names


def starts_from_weights(args: Namespace) -> bool:
    return args.pretrained or args.initial_checkpoint is not None or (args.model or '').startswith(SOURCES)


def create_model(
        name: str,
        img_size: Optional[int],
        seed: int,
        crop_mode: Optional[str] = None,
        pretrained: bool = False,
        checkpoint: Optional[PathLike] = None,
        **kwargs: Any,
) -> Any:
    """Create a model of timm for square images of this size.

    Without weights, images are normalized alike for all models, and the seed alone decides. With them, images are
    prepared as the model is used to, and the classifier is new if there is another number of classes.

    Args:
        name: Name in timm, with a tag or not; 'hf-hub:USER/NAME' or 'local-dir:FOLDER', which have weights.
        img_size: Pixels of a side; None for the model's own.
        seed: Of new weights.
        crop_mode: How oblong images become square, in timm's terms; None for the model's own way.
        pretrained: Start from timm's weights of that name.
        checkpoint: File to start from, see `load_weights`.
        **kwargs: Arguments of `timm.create_model`.

    Raises:
        ValueError: If there are no such weights, or they cannot be downloaded, or are of another model.
    """
    random_seed(seed)
    if name.startswith(SOURCES) and (attended := _attended(name)) is not None:
        if kwargs.get('num_classes', attended.num_classes) != attended.num_classes:
            attended.reset_classifier(kwargs['num_classes'])
            _start_classifier(attended)
        return attended
    has_weights = pretrained or name.startswith(SOURCES)
    overlay: Dict[str, Any] = {}
    if not has_weights and checkpoint is None:
        overlay = dict(crop_pct=1., mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    create = timm.create_model if img_size is None else partial(create_sized, img_size=img_size)
    try:
        model = create(name, pretrained=has_weights, pretrained_cfg_overlay=overlay, **kwargs)
    except TypeError:  # an unknown argument
        raise
    except Exception as e:  # timm and the Hub have many kinds
        raise ValueError(f'{name} cannot be created{" with weights" * has_weights}: {one_line(e)}') from e
    cfg: Dict[str, Any] = dict(model.pretrained_cfg)
    if has_weights and model.num_classes != cfg['num_classes']:
        _start_classifier(model)
    if checkpoint is not None:
        cfg.update(load_weights(model, checkpoint))
    if crop_mode is not None:
        cfg['crop_mode'] = crop_mode
    if img_size is not None:
        in_chans = kwargs.get('in_chans', cfg.get('input_size', (3,))[0])  # people's own models may lack it
        cfg.update(input_size=(in_chans, img_size, img_size), test_input_size=None)
    model.pretrained_cfg = model.default_cfg = cfg
    return model


def _attended(name: str) -> Any:
    """Return a CNN with attention, which timm cannot create, or None."""
    try:
        checkpoint = Checkpoint.read(name)
    except (CheckpointError, HubError):
        return None  # timm says what is wrong
    return build_model(checkpoint) if checkpoint.spec.attend else None


def load_weights(model: Any, file: PathLike) -> Dict[str, Any]:
    """Load a checkpoint or state dict, without a classifier of another number of classes.

    Returns:
        How images are prepared for it, as far as the file says.

    Raises:
        ValueError: If it is of another model.
    """
    checkpoint, own = Checkpoint.read(file), model.state_dict()
    tensors = checkpoint.tensors
    if isinstance(model, Cmhsa):
        tensors = checkpoint_filter_fn(tensors, model)
    names = model.pretrained_cfg['classifier']
    heads = tuple(f'{name}.' for name in ((names,) if isinstance(names, str) else names))
    fitting = {name: tensor for name, tensor in tensors.items()
               if name in own and own[name].shape == tensor.shape}
    others = [name for name in own if name not in fitting and not name.startswith(heads)
              and not name.endswith('num_batches_tracked')]
    if others:
        found = f'has it as {tuple(tensors[others[0]].shape)}' if others[0] in tensors else 'lacks it'
        raise ValueError(
            f'{file} is not of this model, whose {others[0]} is {tuple(own[others[0]].shape)}: the file {found}. Give '
            'the --model that it is of, with its arguments.')
    if any(name not in fitting for name in own if name.startswith(heads)):
        _start_classifier(model)
    model.load_state_dict(fitting, strict=False)
    return {key: value for key, value in checkpoint.spec.pretrained_cfg.items() if key not in LABEL_KEYS}


def freeze_features(model: Any) -> None:
    """Leave nothing but the classifier to learn; batch norm keeps its statistics. timm's `unfreeze` ends it."""
    model.requires_grad_(False)
    freeze_batch_norm_2d(model)
    for layer in _classifiers(model):
        layer.requires_grad_(True)


def _start_classifier(model: Any) -> None:
    """Make the weights of a new classifier small: those of some models of timm are so large that features suffer."""
    for layer in _classifiers(model):
        for linear in (each for each in layer.modules() if isinstance(each, nn.Linear)):
            nn.init.trunc_normal_(linear.weight, std=CLASSIFIER_STD)
            nn.init.zeros_(linear.bias)


def _classifiers(model: Any) -> Tuple[nn.Module, ...]:
    head = model.get_classifier()  # distilled models have two
    return head if isinstance(head, tuple) else (head,)
