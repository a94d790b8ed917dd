"""Train a model on a folder of images.

Phase 1 trains a convolutional model. With a switch below 1, its convolutions are then rewritten exactly as attention,
and phase 2 trains it on, in the same schedule.
"""
import argparse
import copy
import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, List, Optional, Tuple

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from timm.utils import accuracy, init_distributed_device, random_seed
from torch import nn

from ..checkpoint import PathLike, replacing
from ..convert import convert_model
from ..errors import CheckpointError, one_line
from ..hub import save_for_hub
from ..images import data_config
from ..models import Cmhsa, CmhsaConv
from ..start import start_as_convolution
from .data import DECODED, Data, Photos, load_photo, open_dataset, open_digits, open_folder
from .options import add_options, check_options, choose_options, fingerprint
from .trainer import Trained, Trainer

PEAK = 0.75  # weight of a soft head on its own offset

Rewrite = Callable[[nn.Module], nn.Module]
Models = Dict[str, nn.Module]


def train_two_phases(
        data_dir: Optional[PathLike] = None,
        rewrite: Optional[Rewrite] = None,
        **options: Any,
) -> Dict[str, Any]:
    """Train a model in two phases, or go on where that was stopped. Write models, tables and pictures.

    Args:
        data_dir: Folder with `train/CLASS/*` and `validation/CLASS/*`, or with `CLASS/*` alone; by default the digits
            that scikit-learn ships.
        rewrite: Function that returns phase 2's model, given that of phase 1. By default `convert_model`, with the
            options `architecture` and `phase2_kwargs`.
        **options: Those of the command `python -m timm_cmhsa.train`, such as `output='out'` or `img_size=64`.

    Returns:
        Content of `results.json`: `phase1_top1` and `converted_top1`, right before and after the rewrite, `top1` at the
        end, in percent on the validation images, and more.

    Raises:
        ValueError: If options or images are bad, and nothing was trained; or if the training diverges.
        OSError: If the output cannot be written. The same call goes on from the last checkpoint.
    """
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args([])
    unknown = ', '.join(sorted(options.keys() - vars(args).keys()))
    if unknown:
        raise ValueError(f'{unknown}: not an option. Choose from {", ".join(sorted(vars(args)))}.')
    vars(args).update(options, data_dir=data_dir)
    return run(args, rewrite)


def run(args: argparse.Namespace, rewrite: Optional[Rewrite] = None) -> Dict[str, Any]:
    """Do what `train_two_phases` does, for the options of the command."""
    from .report import paired_interval, write_report  # fails before the training if matplotlib is missing

    def to_phase2(model: nn.Module) -> nn.Module:
        random_seed(args.seed)
        if rewrite is None:
            peak = None if args.architecture else PEAK
            return convert_model(model, args.architecture, **{'peak': peak, **args.phase2_kwargs})
        return rewrite(copy.deepcopy(model))

    try:
        data, model, others, trainer, chosen = _prepare(args, to_phase2)
    except (AssertionError, RuntimeError) as e:  # of timm's and torch's checks
        raise ValueError(one_line(e)) from e
    say = print if args.rank == 0 else (lambda *_, **__: None)
    say(*chosen, sep='\n')
    switch = min(max(round(args.switch * args.epochs), 1), args.epochs - (args.switch < 1))
    epochs1, epochs2 = range(switch), range(switch, args.epochs)
    schedules = (epochs1, epochs2) if args.separate_schedules else 2 * (range(args.epochs),)
    phase1 = final = trainer.fit('phase1', model, epochs1, schedules[0])
    trained, converted = {'phase 1': phase1}, None
    results: Dict[str, Any] = {'phase1_top1': trainer.validate(phase1.judged)['top1'], 'converted_top1': None}
    if epochs2 or isinstance(model, CmhsaConv):
        converted = to_phase2(phase1.judged)
        results['converted_top1'] = trainer.validate(converted)['top1']
        say('top-1 before the rewrite {phase1_top1:.2f} %, after it {converted_top1:.2f} %'.format(**results))
    if epochs2:
        final = trainer.fit('phase2', to_phase2(phase1.model), epochs2, schedules[1], phase1, converted)
        trained['phase 2'] = final
    logits, targets = trainer.predict(final.judged)
    results['top1'] = accuracy(logits, targets)[0].item()
    attention: Dict[str, Any] = {'after training': final.judged if converted is None else converted}
    saved: Dict[str, Any] = {'model': final.judged, 'converted': converted}
    if epochs2:
        attention = {'before phase 2': converted, 'after phase 2': final.judged}
        saved = {'model': final.judged, 'phase1': phase1.judged}
    if args.rank == 0:
        _save(saved, args, data, results)
    trained.update((name, _compare(name, other, trainer, final)) for name, other in others.items())
    if args.rank:
        return results
    right = {split: {title: trainer.is_right(each.judged, split) for title, each in trained.items()}
             for split in trainer.loaders}
    results['lead'] = {split: {name: paired_interval(each['phase 2' if epochs2 else 'phase 1'], each[name])
                               for name in others} for split, each in right.items()}
    if 'test' in right:
        results['num_test'] = len(data.test)
        results['test'] = {title: 100 * each.mean().item() for title, each in right['test'].items()}
        if converted is not None:
            results['test']['converted'] = 100 * trainer.is_right(converted, 'test').mean().item()
    results.update(
        seconds=final.seconds, num_train=len(data.train),
        num_validation=len(targets), parameters=sum(each.numel() for each in final.model.parameters()),
        compare={name: 100 * right['validation'][name].mean().item() for name in others},
        curves={name: each.history for name, each in trained.items()}, chosen=chosen, options=fingerprint(args))
    write_report(args.output, results, data.class_names, logits, targets, attention, trainer.images())
    say((args.output / 'results.md').read_text(encoding='utf-8'))
    return results


def _prepare(args: argparse.Namespace, to_phase2: Rewrite) -> Tuple[Data, nn.Module, Models, Trainer, List[str]]:
    """Open the images, choose what was left out, and make all that can fail before the training."""
    source = args.dataset or (Path(args.data_dir).resolve().name if args.data_dir else 'digits')
    args.output = Path(args.output or Path('output', source.replace('/', '_')))
    init_distributed_device(args)
    check_options(args)
    if args.dataset:
        data = open_dataset(args)
    else:
        data = open_folder(Path(args.data_dir)) if args.data_dir else open_digits(args)
        root, output = Path(data.train.root).resolve(), args.output.resolve()
        if root in (output, *output.parents):
            raise ValueError(f'{args.output} would become a class of {root}: give an --output elsewhere.')
    chosen = [*data.notes, *choose_options(args, data, _options_before(args.output))]
    for part in (data.train, data.validation, data.test):
        if isinstance(part, Photos):
            part.loader = partial(load_photo, side=max(DECODED, 2 * args.img_size))  # small crops stay sharp
    common = dict(img_size=args.img_size, seed=args.seed, num_classes=len(data.class_names))
    model = create_model(args.model, **common, **args.model_kwargs)
    others = {name: create_model(name, **common, in_chans=args.model_kwargs.get('in_chans', 3))
              for name in args.compare}
    if args.switch < 1 or isinstance(model, CmhsaConv):
        try:
            to_phase2(model)
        except TypeError as e:
            raise ValueError(f'{one_line(e)} --switch 1 trains {args.model} alone.') from e
    create_optimizer_v2(model.to(args.device), args.opt, lr=args.lr)
    trainer = Trainer(args, data, data_config(model))
    if args.start:
        if isinstance(model, Cmhsa):
            raise ValueError(f'--start {args.start} is for a ViT of timm: add --model vit_tiny_patch16_224 --switch 1.')
        start_as_convolution(model, trainer.images(), seed=args.seed)
    for other in others.values():  # one may need larger images
        with torch.inference_mode():
            other.to(args.device).eval()(trainer.images()[:2])
    _note_options(args)
    return data, model, others, trainer, chosen


def create_model(name: str, img_size: int, seed: int, **kwargs: Any) -> nn.Module:
    """Create a model of timm for images of this size, normalized alike for all, with weights by the seed alone."""
    random_seed(seed)
    kwargs['pretrained_cfg_overlay'] = dict(
        crop_pct=1., input_size=(kwargs.get('in_chans', 3), img_size, img_size), mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD)
    try:
        return timm.create_model(name, **{'img_size': img_size, **kwargs})
    except TypeError:  # convolutional networks take any size
        return timm.create_model(name, **kwargs)


def _options_before(output: Path) -> Dict[str, str]:
    """Return the options of the run that a folder has a checkpoint of, if any."""
    path = output / 'options.json'
    has_begun = path.exists() and any(output.glob('checkpoints/*.tar'))
    return json.loads(path.read_text(encoding='utf-8')) if has_begun else {}


def _note_options(args: argparse.Namespace) -> None:
    """Refuse an output folder with another run, and write down the options of this one."""
    path, options = args.output / 'options.json', fingerprint(args)
    before = _options_before(args.output) or options
    changed = ', '.join(f'{key}={before.get(key)}' for key in options if before.get(key, 'None') != options[key])
    if changed:
        raise ValueError(f'{args.output} holds a run with {changed}: give another --output.')
    if not path.exists() and (args.output / 'results.md').exists():
        raise ValueError(f'{args.output} holds a results.md that is not of a training: give another --output.')
    if args.rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        path.with_suffix('.part').write_text(json.dumps(options, indent=2), encoding='utf-8')
        path.with_suffix('.part').replace(path)


def _save(models: Models, args: argparse.Namespace, data: Data, results: Dict[str, Any]) -> None:
    """Write the folders of models: ours with a card, others as timm does."""
    for name, model in models.items():
        if isinstance(model, Cmhsa):
            save_for_hub(
                model, args.output / name, force=True, label_names=data.class_names,
                results={'Top-1': round(results['top1' if name == 'model' else f'{name}_top1'], 2)},
                details={'Training': f'{len(data.train)} images, validated on {len(data.validation)} others'})
    if not isinstance(models['model'], Cmhsa):
        _save_for_timm(models['model'], args.output / 'model', args.model_kwargs, data.class_names)


def _save_for_timm(model: Any, folder: Path, model_args: Dict[str, Any], label_names: List[str]) -> None:
    """Write a stock model for `timm.create_model('local-dir:FOLDER', pretrained=True)`, if that gives it back."""
    if folder.exists():  # of a run that was finished before
        return
    try:
        with replacing(folder, force=False) as new:
            config = {'label_names': label_names, 'pretrained_cfg': data_config(model)}
            if hasattr(getattr(model, 'patch_embed', None), 'img_size'):  # timm 1.0.26 takes that of the name
                model_args = {**model_args, 'img_size': model.patch_embed.img_size}
            save_for_hf(model, str(new), config, model_args, safe_serialization=True)
            loaded = timm.create_model(f'local-dir:{new}', pretrained=True).state_dict()
            if any(not tensor.cpu().equal(loaded[name]) for name, tensor in model.state_dict().items()):
                raise CheckpointError('The weights are others.')
    except Exception as e:  # timm raises anything, for a model that has another form than its name
        print(f'The model is only in checkpoints, as timm cannot load it by its name: {one_line(e)}')


def _compare(name: str, model: nn.Module, trainer: Trainer, final: Trained) -> Trained:
    """Train another model for as much time, on the same images and by the same schedule."""
    lr = trainer.args.compare_lr
    title = f'{name}-{lr:g}'  # at another rate it is another training
    timed = trainer.fit(f'{title}-timing', copy.deepcopy(model), range(4), range(4), lr=lr).history
    # without the first epoch, which may compile
    seconds = median(after['seconds'] - before['seconds'] for before, after in pairwise(timed))
    epochs = range(max(round(final.seconds / seconds), 1))
    return trainer.fit(title, model, epochs, epochs, lr=lr)
