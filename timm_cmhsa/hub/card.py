"""The model card of a model on the Hugging Face Hub: what it is, how it was made, how to load it."""
import re
from importlib import resources
from typing import Any, Dict, List, Mapping, Optional, Sequence, Type

import timm
import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from timm.models._hub import generate_readme

from ..cmhsa import Cmhsa, CmhsaAttn, CmhsaConv
from ..files import CheckpointError
from ..images import data_config
from ..messages import shorten
from ..pixel import PixelAttn
from ..version import __version__

LI_LINK = '[Can Vision Transformers Perform Convolution?](https://arxiv.org/abs/2111.01353)'
CORDONNIER_LINK = (
    '[On the Relationship between Self-Attention and Convolutional Layers](https://arxiv.org/abs/1911.03584)')
DESCRIPTIONS: Dict[Type[Cmhsa], str] = {
    CmhsaConv: f'The first phase of {LI_LINK}: a Vision Transformer on raw image patches whose attention is replaced '
               'by a convolution over the whole image. timm_cmhsa can rewrite it, exactly, as self-attention.',
    CmhsaAttn: f'The second phase of {LI_LINK}: a Vision Transformer on raw image patches with multi-head '
               'self-attention, relative position bias and a zero key, which can express a convolution exactly, at the '
               'image borders too.',
    PixelAttn: f'A Vision Transformer on single pixels, or small patches of them, after {CORDONNIER_LINK}: every head '
               'is as wide as the output and attends by relative position.',
}


def model_card(
        model: Cmhsa, repo_id: str, license: str, datasets: List[str], base_model: Optional[str],
        results: Optional[Mapping[str, float]], details: Optional[Mapping[str, Any]]) -> str:
    """Return the text of README.md: metadata that the Hub reads, then what people read. See `save_for_hub`."""
    results = check_results(results or {})
    if not isinstance(details or {}, Mapping):
        raise CheckpointError(f'details={shorten(details)} has no headings: give a dict of what they stand over.')
    classifies = model.num_classes > 0
    by_pixel = isinstance(model, PixelAttn)
    task = 'image-classification' if classifies else 'image-feature-extraction'
    content = generate_readme(
        {
            'description': next(text for cls, text in DESCRIPTIONS.items() if isinstance(model, cls)),
            'details': {
                **_as_text({
                    **_model_details(model, data_config(model)),
                    **(details or {}),
                    **({'Dataset': datasets} if datasets else {}),
                    **({'Evaluation': {name: f'{value:g} %' for name, value in results.items()}} if results else {}),
                }),
                'Papers': CORDONNIER_LINK if by_pixel else LI_LINK,
                'Made With': f'timm_cmhsa {__version__}, timm {timm.__version__}, torch {torch.__version__}',
            },
            'usage': _read('usage.md').format(
                repo_id=repo_id,
                task=task,
                mode={1: 'L', 2: 'LA', 3: 'RGB', 4: 'RGBA'}.get(model.in_chans, f'{model.in_chans} channels'),
                output='probabilities' if classifies else 'features',
                function='.softmax(dim=-1)' if classifies else '',
            ),
            'citation': _read('cordonnier2020relationship.bib' if by_pixel else 'li2021can.bib'),
        },
        model_name=repo_id.split('/')[-1],
    )
    card = ModelCard(content)
    card.data = ModelCardData(
        license=license,
        library_name='timm',
        pipeline_tag=task,
        tags=['timm', 'cmhsa', 'vision-transformer'],
        datasets=datasets or None,
        base_model=base_model,
        model_name=repo_id.split('/')[-1] if results else None,
        eval_results=_eval_results(task, datasets, results) if results else None,
    )
    return str(card)


def _as_text(value: Any) -> Any:
    """Escape names and values, nested or not, for Markdown, each in one line."""
    if isinstance(value, Mapping):
        return {_as_text(key): _as_text(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_text(each) for each in value]
    text = ''.join(c if c.isprintable() else ' ' for c in str(value))
    return re.sub(r'([\\`*~$&<>\[\]|])', r'\\\1', ' '.join(text.split()))


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding='utf-8').rstrip()


def _model_details(model: Cmhsa, config: Mapping[str, Any]) -> Dict[str, Any]:
    return {
        'Model Type': 'Image classification / feature backbone' if model.num_classes else 'Feature backbone',
        'Model Stats': {
            'Architecture': model.pretrained_cfg['architecture'],
            'Params (M)': f'{sum(p.numel() for p in model.parameters()) / 1e6:.1f}',
            'Image size': '{} x {}'.format(*config['input_size'][1:]),
            'Image channels': model.in_chans,
            'Tokens': '{} x {} of width {}'.format(*model.patch_embed.grid_size, model.embed_dim),
            'Token mixer': _token_mixer(model),
        },
        'Preprocessing': {
            'Mean': ', '.join(f'{value:g}' for value in config['mean']),
            'Standard deviation': ', '.join(f'{value:g}' for value in config['std']),
            'Interpolation': config['interpolation'],
            'Crop': f"{config['crop_pct']:g}, {config['crop_mode']}",
        },
    }


def _token_mixer(model: Cmhsa) -> str:
    args = model.model_args()
    if isinstance(model, CmhsaConv):
        return '{} x {} convolution'.format(*args['kernel_size'])
    num_heads, head_dim = args['num_heads'], args.get('head_dim', model.embed_dim)
    heads = num_heads if isinstance(num_heads, int) else ', '.join(map(str, num_heads))
    encoding = '' if args['rel_pos'] == 'table' else f", {args['rel_pos']} relative positions"
    return f'self-attention, {heads} heads of {head_dim}{encoding}'


def _eval_results(task: str, datasets: Sequence[str], results: Mapping[str, float]) -> List[EvalResult]:
    dataset = datasets[0] if datasets else 'imagefolder'
    return [
        EvalResult(
            task_type=task, dataset_type=dataset, dataset_name=dataset.split('/')[-1], metric_type='accuracy',
            metric_name=f'{name} accuracy', metric_value=value)
        for name, value in results.items()]


def check_results(results: Mapping[str, Any]) -> Dict[str, float]:
    """Return accuracies as plain numbers, or refuse what is no percentage."""
    if not isinstance(results, Mapping):
        raise CheckpointError(f'results={shorten(results)} has no names: give a dict such as {{"Top-1": 92.5}}.')
    for name, value in results.items():
        try:
            in_range = 0 <= float(value) <= 100
        except (TypeError, ValueError, OverflowError) as e:
            raise CheckpointError(
                f'the result {name}={shorten(value)} is not a number: give accuracies in percent.') from e
        if not in_range:
            raise CheckpointError(f'the result {name}={value} is not between 0 and 100: give accuracies in percent.')
    return {str(name): float(value) for name, value in results.items()}
