"""The models of a run: made by their names, or started from weights, for the images and classes at hand."""
from argparse import Namespace
from typing import Any, Dict, Mapping, Optional

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple, to_ntuple
from timm.models import parse_model_name
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from timm.utils import random_seed
from timm.utils.model import freeze_batch_norm_2d
from torch import nn

from ..attended import create_sized
from ..checkpoint import LABEL_KEYS, Checkpoint, build_model
from ..errors import CheckpointError, HubError, one_line
from ..files import PathLike

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
    """Create a model of timm for square images of this size, by default the model's own.

    Without weights, images are normalized alike for all models, and the seed alone decides. With them (timm's for the
    name, those of 'hf-hub:USER/NAME' or 'local-dir:FOLDER', or a checkpoint of this model), images are prepared as the
    model is used to, and the classifier is new if there is another number of classes. ValueError is raised if weights
    are missing, cannot be downloaded, or are of another model.
    """
    random_seed(seed)
    has_weights = pretrained or checkpoint is not None or name.startswith(SOURCES)
    model = _attended(name, img_size, kwargs) if name.startswith(SOURCES) else None
    if model is None:
        overlay: Dict[str, Any] = _as_pretrained(name, checkpoint) if checkpoint else {} if has_weights else dict(
            crop_pct=1., mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
        try:
            model = create_sized(
                name, img_size=img_size, pretrained=has_weights, pretrained_cfg_overlay=overlay, **kwargs)
        except Exception as e:  # timm and the Hub have many kinds
            source = f'{checkpoint} is not of {name}' if checkpoint else (
                f'{name} cannot be created{" with weights" * has_weights}')
            raise ValueError(f'{source}: {one_line(e)}') from e
        if checkpoint is not None:
            _check_names(model, overlay['state_dict'], checkpoint)
        source, model_id = parse_model_name(name)
        load = {'local-dir': load_model_config_from_path, 'hf-hub': load_model_config_from_hf}.get(source)
        args = {**((load(model_id)[2] if load else None) or {}), **kwargs}  # what timm creates it with
        model.base_args = {key: value for key, value in args.items() if key not in ('img_size', 'num_classes')}
    cfg: Dict[str, Any] = {key: value for key, value in model.pretrained_cfg.items() if key != 'state_dict'}
    if has_weights and model.num_classes != cfg['num_classes']:
        for weight in _classifiers(model).parameters():
            if weight.dim() > 1:
                nn.init.trunc_normal_(weight, std=0.01)  # some of timm are so large that features suffer
    if crop_mode not in (None, cfg.get('crop_mode')):
        cfg.update(crop_mode=crop_mode, crop_pct=1.)  # all of the image is asked for
    if img_size is not None:
        in_chans = kwargs.get('in_chans', cfg.get('input_size', (3,))[0])  # people's own models may lack it
        cfg.update(input_size=(in_chans, img_size, img_size), test_input_size=None)
    model.pretrained_cfg = model.default_cfg = cfg
    return model


def _attended(name: str, img_size: Optional[int], kwargs: Dict[str, Any]) -> Any:
    """Return a CNN with attention, which timm cannot create, or None."""
    try:
        checkpoint = Checkpoint.read(name)
    except (CheckpointError, HubError):
        return None  # timm says what is wrong
    if not checkpoint.spec.attend:
        return None
    model = build_model(checkpoint)
    in_chans, size, _ = model.pretrained_cfg['input_size']
    others = kwargs.keys() - {'num_classes', 'in_chans'}
    if img_size not in (None, size) or kwargs.get('in_chans', in_chans) != in_chans or others:
        raise ValueError(f'{name} has attention for {size} x {size} pixels: leave out --img-size and --model-kwargs.')
    model.pretrained_cfg['num_classes'] = model.num_classes  # of the weights
    if kwargs.get('num_classes', model.num_classes) != model.num_classes:
        model.reset_classifier(kwargs['num_classes'])
    return model


def _as_pretrained(name: str, file: PathLike) -> Dict[str, Any]:
    """Return a checkpoint or state dict as a pretrained configuration that timm loads, for any number of classes."""
    checkpoint, cfg = Checkpoint.read(file), timm.get_pretrained_cfg(name)
    tensors, told = checkpoint.tensors, checkpoint.spec.pretrained_cfg

    def length(layers: Any, axis: int, default: int) -> int:
        weights = [tensors[f'{layer}.weight'] for layer in to_ntuple(1)(layers) if f'{layer}.weight' in tensors]
        return weights[0].shape[axis] if weights else default

    in_chans = length(cfg.first_conv, 1, cfg.input_size[0])
    if in_chans > 16:  # of pixels side by side, which the first layer takes as channels
        in_chans = cfg.input_size[0]
    size = to_2tuple(checkpoint.spec.model_args.get('img_size', cfg.input_size[1:]))
    return dict(
        {key: value for key, value in told.items() if key not in LABEL_KEYS}, state_dict=tensors, custom_load=False,
        num_classes=length(cfg.classifier, 0, 0), input_size=(in_chans, *size))


def _check_names(model: Any, tensors: Mapping[str, Any], file: PathLike) -> None:
    """Raise ValueError if a file lacks a tensor of a model, or has further weights, but for its classifier."""
    classifiers = tuple(f'{name}.' for name in to_ntuple(1)(model.pretrained_cfg['classifier']))
    own, told = ({name for name in each if not name.startswith(classifiers)} for each in (model.state_dict(), tensors))
    lacking = [name for name in sorted(own - told) if not name.endswith('num_batches_tracked')]
    further = [name for name in sorted(told - own) if name.endswith('.weight')]
    for name in (*lacking, *further)[:1]:
        raise ValueError(f'{file} is not of this model, as one of them lacks {name}: give the --model that it is of.')


def freeze_features(model: Any) -> None:
    """Leave nothing but the classifier to learn; batch norm keeps its statistics. timm's `unfreeze` ends it."""
    model.requires_grad_(False)
    freeze_batch_norm_2d(model)
    _classifiers(model).requires_grad_(True)


def _classifiers(model: Any) -> nn.ModuleList:
    names = to_ntuple(1)(model.pretrained_cfg['classifier'])  # distilled models have two
    return nn.ModuleList([model.get_submodule(name) for name in names])
