"""The options of a training, and what is chosen where they are left out."""
import json
import math
import os
from argparse import ArgumentParser, Namespace
from collections import Counter
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Mapping, Optional, Tuple

import timm
import torch
from timm.utils import ParseKwargs

from ..models import CmhsaConv, registered_hybrid
from .data import Images
from .model import SOURCES, create_model, starts_from_weights

SIZES = 32, 64, 96, 128, 224  # pixels
STEPS, MIN_EPOCHS, MAX_EPOCHS = 4000, 30, 300  # of both phases, if the epochs are left out
PRETRAINED_STEPS, PRETRAINED_MIN_EPOCHS = 600, 5
PRETRAINED_LR, PRETRAINED_LAYER_DECAY = 2e-3, 0.9
FAST_SIZE = 160  # pixels, from weights
LR = 1e-3  # of AdamW
MUON = 'muon', 'nmuon'  # the latter with Nesterov momentum
MUON_LR, MUON_LOW_LR = 0.05, 0.01
LR_BATCH = 64  # images in a step, from which on these are right
POSITIVE = {'img_size', 'epochs', 'minutes', 'layer_decay', 'batch_size', 'lr', 'phase2_lr', 'compare_lr',
            'switch', 'scale'}
CROP_MODES = dict(crop='center', pad='border', squash='squash')  # timm's names, by ours
CHOICES = dict(start=['convolution'], fit=[*CROP_MODES], class_weights=['balanced'])
SHARES = {'switch', 'layer_decay', 'scale', 'ema', 'mixup_prob', 'reprob', 'smoothing'}
WITHOUT_EFFECT = {  # on training
    'compare', 'compare_lr', 'compile', 'data_dir', 'device', 'distributed', 'local_rank',
    'output', 'rank', 'rivals'}
STEP = 'batch_size', 'world_size'  # their product is the number of images of a step


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument_group('images').add_argument
    add('--data-dir', metavar='DIR', type=Path,
        help='train/CLASS/* and validation/CLASS/*, or CLASS/* alone (default: digits of scikit-learn)')
    add('--img-size', metavar='S', type=int, help='pixels of a side')
    add('--fit', choices=CHOICES['fit'], help='how oblong images become square; squash and pad keep all of them')
    add('--output', metavar='OUT', type=Path, help='folder (default: output/ and the name of DIR)')
    add = parser.add_argument_group('models').add_argument
    add('--model', metavar='NAME', help='phase-1 model, registered in timm; any model with --switch 1; '
        'hf-hub:USER/NAME and local-dir:FOLDER have weights')
    add('--model-kwargs', metavar='NAME=VALUE', nargs='*', action=ParseKwargs, help='its arguments')
    add('--pretrained', action='store_true', help="start from timm's weights of --model, and of --compare")
    add('--initial-checkpoint', metavar='FILE', type=Path, help='start from the weights of a file')
    add('--freeze', action='store_true', help='train the classifier alone')
    add('--attend', metavar='PATTERN', nargs='+', help='convolutions of a CNN that phase 2 has as attention: layer4.*')
    add('--start', choices=CHOICES['start'], help='point heads of an untrained ViT at nearby patches, with --switch 1')
    add('--architecture', metavar='NAME', help='phase-2 model (default: one with soft heads)')
    add('--phase2-kwargs', metavar='NAME=VALUE', nargs='*', default={}, action=ParseKwargs,
        help='arguments of convert_model, such as peak=0.5')
    add('--compare', metavar='MODEL', nargs='+', default=[], help='also train these models of timm, for the same time')
    schedule = parser.add_argument_group('schedule')
    add = schedule.add_mutually_exclusive_group().add_argument
    add('--epochs', metavar='N', type=int,
        help=f'of both phases (default: about {STEPS} steps, {PRETRAINED_STEPS} from weights)')
    add('--minutes', metavar='M', type=float, help='as many epochs as take so long, instead')
    add('--quick', dest='epochs', action='store_const', const=4, help='four epochs, to try it')
    add = schedule.add_argument
    add('--switch', metavar='F', type=float, help='share of phase 1 (default: 0.4 for cmhsa_conv_*, else 1)')
    add('--separate-schedules', action='store_true', help='start the learning rate again in phase 2, as in the paper')
    add('--batch-size', metavar='N', type=int, help='images of a step, for each process (default: 64 or less)')
    add('--lr', type=float,
        help=f'learning rate (default: with Muon {MUON_LR}, or {MUON_LOW_LR} for one that attends; with AdamW {LR}, '
        f'or {PRETRAINED_LR} from weights; less for small batches)')
    add('--phase2-lr', metavar='LR', type=float, help='of phase 2 (default: as --lr)')
    add('--compare-lr', metavar='LR', type=float, help='of --compare (default: as --lr, or else by their kind)')
    add('--warmup-epochs', metavar='N', type=int, default=5, help='at most a quarter of all (default: %(default)s)')
    add('--opt', metavar='NAME', help="timm's name of the optimizer (default: muon, from weights adamw)")
    add('--opt-kwargs', metavar='NAME=VALUE', nargs='*', default={}, action=ParseKwargs, help='its arguments')
    add('--layer-decay', metavar='F', type=float, help='learning rate of a layer, relative to the next')
    add('--weight-decay', metavar='W', type=float, default=0.05, help='(default: %(default)s)')
    add('--class-weights', choices=CHOICES['class_weights'], help='weigh all classes alike, whatever their sizes')
    add('--ema', metavar='DECAY', type=float, default=0., help='average the weights, for example with 0.999')
    add('--tta', action='store_true', default=None, help='judge by the mean of each image and its mirror image')
    add('--seed', metavar='N', type=int, default=0, help='(default: %(default)s)')
    add = parser.add_argument_group('augmentation').add_argument
    add('--no-flip', action='store_true', default=None, help='never mirror images, for example of letters')
    add('--aa', metavar='POLICY', default='', help="timm's RandAugment, such as rand-m9-mstd0.5-inc1 (default: none)")
    add('--scale', metavar='F', type=float, help='smallest part of an image to crop; 1 shifts images instead')
    add('--shift', metavar='N', type=int, help='pixels to shift by at most, with --scale 1')
    add('--mixup', metavar='A', type=float, default=0.8, help='(default: %(default)s)')
    add('--cutmix', metavar='A', type=float, default=1., help='(default: %(default)s)')
    add('--mixup-prob', metavar='P', type=float, help='of Mixup or CutMix in a batch (default: 0.5)')
    add('--reprob', metavar='P', type=float, default=0., help='probability of random erasing (default: %(default)s)')
    add('--smoothing', metavar='F', type=float, default=0.1, help='label smoothing (default: %(default)s)')
    add = parser.add_argument_group('running').add_argument
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='(default: %(default)s)')
    add('--no-amp', action='store_true', help='train in float32')
    add('--compile', action='store_true', help='torch.compile')
    add('--workers', metavar='N', type=int, help='processes that read images')


def check_options(args: Namespace) -> None:
    """Raise ValueError for options that fit no images."""
    for name, choices in CHOICES.items():
        if getattr(args, name) not in (None, *choices):
            raise ValueError(f'{name}={getattr(args, name)!r} must be one of {", ".join(choices)}.')
    numbers = {name: value for name, value in vars(args).items() if isinstance(value, (int, float))}
    for name, value in numbers.items():
        is_good = value > 0 if name in POSITIVE else value >= 0
        if not is_good or (name in SHARES and value > 1):
            limits = ('above' if name in POSITIVE else 'at least') + (' 0 and at most 1' if name in SHARES else ' 0')
            raise ValueError(f'--{name.replace("_", "-")} {value} must be {limits}.')
    for name in filter(None, (args.model, *args.compare)):
        if not name.startswith(SOURCES) and not timm.is_model(name):
            raise ValueError(f'{name} is not a model of timm: see timm.list_models(), or give local-dir:FOLDER.')
    if args.epochs and args.minutes:
        raise ValueError('--epochs and --minutes are two lengths of one training: give one.')
    if args.initial_checkpoint and (args.model is None or args.pretrained or args.model.startswith(SOURCES)):
        raise ValueError(f'--initial-checkpoint {args.initial_checkpoint} needs the name of the --model that it is of.')
    if args.pretrained and args.model is None:
        raise ValueError('--pretrained needs a --model that timm has weights of, such as resnet18.a1_in1k.')
    if args.attend and (args.switch == 1 or args.architecture):
        raise ValueError('--attend is what phase 2 has: use a --switch below 1, and no --architecture.')
    if args.compare_lr is not None and not args.compare:
        raise ValueError(f'--compare-lr {args.compare_lr:g} is for other models: name them by --compare, or use --lr.')
    if args.start and starts_from_weights(args):
        raise ValueError('--start is for an untrained ViT: leave it out, or the weights.')
    if args.freeze and (args.attend or (args.switch or 1.) < 1 or not starts_from_weights(args)):
        raise ValueError(
            '--freeze trains the classifier of a model with weights: add --pretrained, without --attend and --switch.')
    for name in sorted({*(args.model_kwargs or {})} & {*signature(create_model).parameters}):
        raise ValueError(
            f'--model-kwargs {name}: leave it out. It is given by the folders, --img-size, --fit, --seed, --pretrained '
            'or --initial-checkpoint.')


def choose_options(
        args: Namespace, images: Images, before: Mapping[str, str] = {}, own: Mapping[str, Any] = {}) -> List[str]:
    """Choose what was left out, and return what was chosen and why, a line for each choice.

    A run that was begun on another machine keeps what was chosen there, by its fingerprint `before`. A run that starts
    from weights prepares images as they are used to (`own`, of `data_config`).
    """
    args.num_images, args.classes, args.files = len(images.splits['train']), images.class_names, images.digest
    notes: List[str] = []
    fitting = {name: value for name, value in images.options.items() if name != 'model_kwargs' or args.model is None}
    if own or args.opt not in (None, fitting.get('opt')):
        fitting.pop('lr', None)

    def choose(name: str, value: Any, reason: str) -> None:
        if getattr(args, name) is None:
            value, reason = (fitting[name], 'fits these images') if name in fitting else (value, reason)
            setattr(args, name, value)
            if value != {}:
                notes.append(f'{_in_words(name, str(value))}: {reason}')

    side = round(median(map(min, images.sizes)))
    cropped = 1 - median(min(size) / max(size) for size in images.sizes)
    if own:
        size = own['input_size'][-1]
        is_slow = size > FAST_SIZE and torch.device(args.device).type == 'cpu'
        faster = f'; --img-size {FAST_SIZE} is about twice as fast on a processor' if is_slow else ''
        choose('img_size', size, f'that of the weights{faster}')
        fits = {mode: fit for fit, mode in CROP_MODES.items()}
        choose('fit', fits.get(own['crop_mode'], 'crop'), 'that of the weights')
    fitting_size = max((size for size in SIZES if size <= 1.15 * side), default=SIZES[0])
    choose('img_size', fitting_size, f'the shorter side of the images is {side} pixels')
    choose('fit', 'squash' if cropped > 0.34 else 'crop', 'by the shape of the images')  # beyond 3:2
    if args.fit == 'crop' and cropped > 0.2:
        notes.append(f'{cropped:.0%} of the median image is cropped: --fit squash or --fit pad keeps all of it')
    is_small = args.img_size <= 64
    choose('model', registered_hybrid('conv', args.img_size), 'fits the image size')
    choose('model_kwargs', {}, 'arguments of the model')
    if before and _images_of_step(before) % args.world_size == 0:  # perhaps by another number of processes
        fitting['batch_size'] = _images_of_step(before) // args.world_size
    choose('batch_size', 2 ** min(6, max(1, int(math.log2(args.num_images / 8)))), f'{args.num_images} images')
    steps = args.num_images // (args.batch_size * args.world_size)
    if not steps:
        raise ValueError(f'{args.num_images} training images are fewer than a step needs: use a smaller --batch-size.')
    if (args.mixup or args.cutmix) and args.batch_size % 2:
        raise ValueError(f'--batch-size {args.batch_size} must be even for Mixup: or use --mixup 0 --cutmix 0.')
    sizes = Counter(target for _, target in images.splits['train']).values()
    unequal = max(sizes) / min(sizes)
    if unequal > 5 and not args.class_weights:
        notes.append(f'the largest class has {unequal:.0f} times the images of the smallest: '
                     '--class-weights balanced weighs all classes alike')
    total, least = (PRETRAINED_STEPS, PRETRAINED_MIN_EPOCHS) if own else (STEPS, MIN_EPOCHS)
    if args.minutes is None:
        choose('epochs', min(max(round(total / steps), least), MAX_EPOCHS), f'of {steps} steps each')
    is_hybrid = args.model.startswith('cmhsa_hybrid')
    share, opt = min(args.batch_size * args.world_size / LR_BATCH, 1.), args.opt or fitting.get('opt')
    recipe = _recipe(opt or ('adamw' if args.start else None), args.model, args.model_kwargs, bool(own), share)
    if args.start:
        recipe['opt'] = recipe['opt'][0], 'this start learns less by Muon'
    args.rivals = {}
    for name in args.compare:
        chosen = _recipe(opt, name, {}, args.pretrained or name.startswith(SOURCES), share)
        given = {key for key in chosen if getattr(args, key) is not None or (key in fitting and key != 'lr')}
        if chosen['lr'][0] != recipe['lr'][0]:  # as its rate is another thing
            given -= {'lr'}
        args.rivals[name] = {key: value for key, (value, _) in chosen.items() if key not in given}
        if args.compare_lr is not None:
            args.rivals[name]['lr'] = args.compare_lr
        words = ', '.join(_in_words(key, str(value)) for key, value in args.rivals[name].items())
        notes.append(f'--compare {name}: {words}')
    for key, (value, reason) in recipe.items():
        if value is not None and not (args.freeze and key == 'layer_decay'):
            choose(key, value, reason)
    kind = timm.is_model(args.model) and timm.model_entrypoint(args.model).__annotations__.get('return')
    switch = 0.5 if args.attend else 0.4 if kind is CmhsaConv and not is_hybrid and not own else 1.
    choose('switch', switch, 'of the epochs are phase 1')
    if args.switch == 1 and (args.phase2_lr is not None or args.separate_schedules):
        raise ValueError('--phase2-lr and --separate-schedules are for two phases: use a --switch below 1.')
    choose('no_flip', False, 'images are mirrored at random; add --no-flip for letters, hands and the like')
    if args.tta and args.no_flip:
        raise ValueError('--tta averages mirror images, which --no-flip says are other images: leave one out.')
    if args.switch < 1 and args.epochs == 1:
        raise ValueError('--epochs 1 has no room for two phases: use 2 or more, or --switch 1.')
    choose('scale', 1. if is_small else 0.35,
        'small images are shifted, not cropped' if is_small else 'of an image, or more, is what a crop keeps')
    if args.scale == 1:
        choose('shift', args.img_size // 8, 'pixels at most, an eighth')
    elif args.shift:
        raise ValueError(f'--shift {args.shift} is for whole images, but --scale {args.scale} crops: add --scale 1.')
    args.shift, args.tta = args.shift or 0, args.tta or None
    if args.shift >= args.img_size:
        raise ValueError(f'--shift {args.shift} must be smaller than the image, {args.img_size} pixels.')
    device, args.amp_dtype = torch.device(args.device), None
    is_slow = not is_small or args.num_images * args.img_size > (100_000 if device.type == 'cuda' else 500_000)
    workers = min(os.cpu_count() or 1, 8) if is_slow else 0
    choose('workers', int(before.get('workers', workers)), 'by the sizes and the device')
    if not args.no_amp and device.type == 'cuda':
        args.amp_dtype = 'bfloat16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'float16'
    elif not args.no_amp and device.type == 'cpu' and torch.cpu._is_avx512_bf16_supported():
        args.amp_dtype = 'bfloat16'  # emulation would be slower than float32
    if 'amp_dtype' in before:
        args.amp_dtype = None if before['amp_dtype'] == 'None' else before['amp_dtype']
    return [*notes, f'computing in {args.amp_dtype or "float32"} on {args.device}']


def _recipe(
        opt: Optional[str], name: str, model_kwargs: Mapping[str, Any], has_weights: bool, share: float,
) -> Dict[str, Tuple[Any, str]]:
    """Return what is chosen for a model, and why, by option. Steps have `share` of the images that rates are for."""
    if has_weights:
        opt, reason, kind, lr, muon_lr = opt or 'adamw', 'from weights', 'from weights', PRETRAINED_LR, MUON_LOW_LR
    else:
        opt, reason = opt or 'muon', 'learns faster than AdamW from scratch'
        kind, lr, muon_lr = 'from scratch', LR, MUON_LR
        if opt.lower() in MUON and _attends(name, model_kwargs):
            kind, muon_lr = 'for a model that attends', MUON_LOW_LR
    lr = muon_lr if opt.lower() in MUON else lr
    fewer = f', times the square root of {share:g} as steps are smaller' if share < 1 else ''
    return dict(
        opt=(opt, reason), lr=(float(f'{lr * share ** 0.5:.1e}'), f'{lr:g} with {opt} {kind}{fewer}'),
        layer_decay=(PRETRAINED_LAYER_DECAY if has_weights else None, 'rates of early layers are lower'),
        mixup_prob=(0., 'in few epochs images are not mixed') if has_weights else (
            0.5, 'of the batches get Mixup or CutMix'))


def _attends(name: str, model_kwargs: Mapping[str, Any]) -> bool:
    """Return whether a model of timm has self-attention."""
    try:
        model = timm.create_model(name, **model_kwargs)
    except Exception:  # which is told when it is created for the images
        return False
    return any(getattr(module, 'num_heads', 0) for module in model.modules())


def fingerprint(args: Namespace) -> Dict[str, Any]:
    """Return the options that decide what is trained."""
    return {key: str(value) for key, value in vars(args).items() if key not in WITHOUT_EFFECT}


def options_before(output: Path) -> Dict[str, str]:
    """Return the fingerprint of the run that a folder has a checkpoint of, if any."""
    path = output / 'options.json'
    has_begun = path.exists() and any(output.glob('checkpoints/*.tar'))
    return json.loads(path.read_text(encoding='utf-8')) if has_begun else {}


def note_options(args: Namespace) -> None:
    """Refuse an output folder with another run, and write down the options of this one."""
    path, options = args.output / 'options.json', fingerprint(args)
    before = options_before(args.output) or options
    same_step = _images_of_step(before) == _images_of_step(options)
    changed = [key for key in options if before.get(key, 'None') != options[key] and key != 'workers'
               and not (key in STEP and same_step)]
    if changed:
        words = dict.fromkeys(_in_words(key, before.get(key, 'None')) for key in changed)
        raise ValueError(f'{args.output} holds a run with {", ".join(words)}: give another --output.')
    if not path.exists() and (args.output / 'results.md').exists():
        raise ValueError(f'{args.output} holds a results.md that is not of a training: give another --output.')
    if args.rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        path.with_suffix('.part').write_text(json.dumps(options, indent=2), encoding='utf-8')
        path.with_suffix('.part').replace(path)


def _images_of_step(options: Mapping[str, str]) -> int:
    return math.prod(int(options.get(key, 1)) for key in STEP)


def _in_words(key: str, value: str) -> str:
    """Return an option of the run before as it is given to the command."""
    if key in ('classes', 'files', 'num_images'):
        return 'other images'
    if key == 'world_size':
        return f'{value} processes'
    option = f'--{key.replace("_", "-")}'
    if value in ('False', 'None', '{}', '[]'):
        return f'no {option}'
    return option if value == 'True' else f'{option} {value}'
