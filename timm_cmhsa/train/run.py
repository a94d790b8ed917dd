"""A run: what it trains, one after the other, and what it writes down of that."""
import copy
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from timm.optim import create_optimizer_v2
from timm.utils import init_distributed_device, random_seed
from torch import nn

from ..checkpoint import Checkpoint
from ..cnn import attend_convs
from ..convert import DEFAULT_PEAK, convert_model
from ..errors import one_line
from ..files import PathLike
from ..images import data_config
from ..models import Cmhsa, CmhsaConv
from ..start import start_as_convolution
from .data import open_images
from .model import create_model, freeze_features, starts_from_weights
from .options import CROP_MODES, add_options, check_options, choose_options, fingerprint, note_options, options_before
from .trainer import NUM_POINTS, Judged, Trainer

Rewrite = Callable[[nn.Module], nn.Module]


def train_two_phases(
        data_dir: Optional[PathLike] = None, rewrite: Optional[Rewrite] = None, **options: Any) -> Dict[str, Any]:
    """Train a model in two phases, or go on where that was stopped. Write models, tables and pictures.

    Args:
        data_dir: Folder with `train/CLASS/*` and `validation/CLASS/*`, or with `CLASS/*` alone; by default the digits
            that scikit-learn ships.
        rewrite: Function that returns phase 2's model, given that of phase 1; it needs a `switch`. By default
            `convert_model`, with the options `architecture` and `phase2_kwargs`.
        **options: Those of the command `python -m timm_cmhsa.train`, such as `output='out'` or `img_size=64`.

    Returns:
        Content of `results.json`: `phase1_top1` and `converted_top1`, right before and after the rewrite, `top1` at the
        end, in percent on the validation images, and more.

    Raises:
        ValueError: If options or images are bad, and nothing was trained; or if the training diverges.
        OSError: If the output cannot be written. The same call goes on from the last checkpoint.
    """
    parser = ArgumentParser()
    add_options(parser)
    args = parser.parse_args([])
    unknown = ', '.join(sorted(options.keys() - vars(args).keys()))
    if unknown:
        raise ValueError(f'{unknown}: not an option. Choose from {", ".join(sorted(vars(args)))}.')
    vars(args).update(options, data_dir=data_dir)
    if isinstance(args.compare, str):  # a single name
        args.compare = [args.compare]
    return run(args, rewrite)


def run(args: Namespace, rewrite: Optional[Rewrite] = None) -> Dict[str, Any]:
    """Do what `train_two_phases` does, for the options of the command."""
    from ..evaluation import class_accuracies  # fails before the training if matplotlib is missing
    from .report import paired_interval, save_models, write_report

    def to_phase2(model: nn.Module) -> nn.Module:
        random_seed(args.seed)
        if rewrite:
            return rewrite(copy.deepcopy(model))
        options = {'peak': None if args.architecture else DEFAULT_PEAK, **args.phase2_kwargs}
        if args.attend:
            return attend_convs(copy.deepcopy(model), args.attend, data_config(model)['input_size'], **options)
        return convert_model(model, args.architecture, **options)

    try:
        chosen, model, rivals, trainer = _prepare(args, to_phase2)
    except (AssertionError, RuntimeError) as e:  # of timm's and torch's checks
        raise ValueError(one_line(e)) from e
    images = trainer.images
    say = print if args.rank == 0 else (lambda *_, **__: None)
    if args.minutes is not None:
        seconds, judging = trainer.seconds_per_epoch('phase1', model)
        if args.switch < 1:
            seconds2, judging2 = trainer.seconds_per_epoch('phase2', to_phase2(model))
            seconds += (1 - args.switch) * (seconds2 - seconds)
            judging += (1 - args.switch) * (judging2 - judging)
        epochs = max(  # many are not all validated
            60 * args.minutes / (seconds + judging), (60 * args.minutes - 2 * NUM_POINTS * judging) / seconds)
        args.epochs = max(round(epochs), 1 + (args.switch < 1))
        chosen.append(f'--epochs {args.epochs}: of {seconds:.1f} seconds each, and {judging:.1f} to validate, as a few '
                      'steps take')
    say(*chosen, sep='\n')
    switch = min(max(round(args.switch * args.epochs), 1), args.epochs - (args.switch < 1))
    trained = trainer.fit('phase1', model, range(switch))
    phase1 = final = trainer.judge('phase 1', trained.judged, trained.history)
    judged, saved, drawn = [phase1], {'model': phase1}, {'after training': phase1.model}
    converted = None
    if switch < args.epochs or isinstance(model, CmhsaConv):
        converted = trainer.judge('converted', to_phase2(trained.judged))
        judged.append(converted)
        saved['converted'], drawn['after training'] = converted, converted.model
        say(f'top-1 before the rewrite {phase1.top1():.2f} %, after it {converted.top1():.2f} %')
        if switch < args.epochs:
            trained = trainer.fit(
                'phase2', to_phase2(trained.model), range(switch, args.epochs), trained, converted.model)
            final = trainer.judge('phase 2', trained.judged, trained.history)
            judged.append(final)
            saved = {'model': final, 'phase1': phase1}
            drawn = {'before phase 2': converted.model, 'after phase 2': final.model}
    if args.rank == 0:
        save_models(saved, args, images)
    seconds = trained.history[-1]['seconds']
    others = [_rival(name, rival, trainer, seconds) for name, rival in rivals.items()]
    if args.rank == 0:
        save_models({f'compare/{_file_name(each.title)}': each for each in others}, args, images)
    judged += others
    by_class = class_accuracies(*final.predicted['validation'])
    results: Dict[str, Any] = dict(
        phase1_top1=phase1.top1(), converted_top1=converted and converted.top1(), top1=final.top1(),
        seconds=seconds, parameters=sum(each.numel() for each in final.model.parameters()),
        compare={each.title: each.top1() for each in others},
        classes=[[name, *each] for name, each in zip(images.class_names, by_class)],
        lead={split: {each.title: paired_interval(final.right(split), each.right(split)) for each in others}
              for split in final.predicted},
        **{f'num_{split}': len(samples) for split, samples in images.splits.items()},
        curves={each.title: each.history for each in judged if each.history}, chosen=chosen, options=fingerprint(args))
    if 'test' in images.splits:
        results['test'] = {each.title: each.top1('test') for each in judged}
    if args.rank == 0:
        write_report(args.output, results, images, final, drawn, trainer.loaders.drawn[0])
        say((args.output / 'results.md').read_text(encoding='utf-8'))
    return results


def _prepare(args: Namespace, to_phase2: Rewrite) -> Tuple[List[str], nn.Module, Dict[str, nn.Module], Trainer]:
    """Find the images, choose what was left out, and make all that can fail before the training."""
    args.output = Path(args.output or Path('output', Path(args.data_dir).resolve().name if args.data_dir else 'digits'))
    init_distributed_device(args)
    check_options(args)
    images = open_images(args)
    create: Any = partial(create_model, seed=args.seed, pretrained=args.pretrained)
    own: Dict[str, Any] = {}
    if starts_from_weights(args):
        own = data_config(
            create(args.model, img_size=None, checkpoint=args.initial_checkpoint, **(args.model_kwargs or {})))
    chosen = [*images.notes, *choose_options(args, images, options_before(args.output), own)]
    create = partial(create, img_size=args.img_size, num_classes=len(args.classes), crop_mode=CROP_MODES[args.fit])
    model = create(args.model, checkpoint=args.initial_checkpoint, **args.model_kwargs)
    if own and model.num_classes != model.pretrained_cfg['num_classes']:
        chosen.append(f'new classifier of {model.num_classes} classes: the weights of {args.model} are for '
                      f"{model.pretrained_cfg['num_classes']}")
    rivals = {name: create(name, in_chans=data_config(model)['input_size'][0]) for name in args.compare}
    if args.freeze:
        freeze_features(model)
    if args.attend and isinstance(model, Cmhsa):
        raise ValueError(f'--attend is for CNNs of timm: {args.model} has a rewrite of its own. Leave it out.')
    if args.switch < 1 or isinstance(model, CmhsaConv):
        try:
            phase2 = to_phase2(model)
            if args.attend:
                Checkpoint.of(phase2)  # raises if it could not be saved
        except TypeError as e:
            raise ValueError(f'{one_line(e)} --switch 1 trains {args.model} alone.') from e
    create_optimizer_v2(model.to(args.device), args.opt, lr=args.lr, **args.opt_kwargs)
    trainer = Trainer(args, images, model)
    if args.start:
        if isinstance(model, Cmhsa):
            raise ValueError(f'--start {args.start} is for a ViT of timm: add --model vit_tiny_patch16_224 --switch 1.')
        start_as_convolution(model, trainer.loaders.drawn[0], seed=args.seed)
    for rival in rivals.values():  # one may need larger images
        with torch.inference_mode():
            rival.to(args.device).eval()(trainer.loaders.drawn[0][:2])
    note_options(args)
    return chosen, model, rivals, trainer


def _rival(name: str, model: nn.Module, trainer: Trainer, duration: float) -> Judged:
    """Train another model for as many seconds, on the same images and by the same schedule."""
    args = Namespace(**{**vars(trainer.args), **trainer.args.rivals[name]})
    if args.opt != trainer.args.opt:
        args.opt_kwargs = {}
    trainer = Trainer(args, trainer.images, model)
    title = f'{_file_name(name)}-{args.lr:g}'  # at another rate it is another training
    args.epochs = max(round(duration / trainer.seconds_per_epoch(title, model)[0]), 1)
    trained = trainer.fit(title, model, range(args.epochs))
    return trainer.judge(name, trained.judged, trained.history)


def _file_name(name: str) -> str:
    return name.replace(':', '_').replace('/', '_')
