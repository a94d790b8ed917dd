"""What a conversion did and how exact it is: as text, for the model card, and for the metadata of the file."""
import json
import shlex
from dataclasses import dataclass
from typing import Any, Dict, Optional

import timm
import torch
from timm.layers import to_2tuple

from .convert import Verification
from .version import __version__

CONSTRUCTION = 'Theorem 1 of arXiv 2111.01353, with a zero key'
APPROXIMATION = f'approximate; {CONSTRUCTION}, and the singular vectors that the heads have room for'

TRAIN_OPTIONS = {'num_classes': '--num-classes', 'in_chans': '--in-chans', 'global_pool': '--gp'}


@dataclass
class ConversionReport(Verification):
    """What a conversion did and how exact it is.

    Attributes:
        architecture: Registered model that it was converted to.
        model_args: Its arguments for `timm.create_model`.
        img_size_source: Where the image size is from.
        assumed: Arguments of the source that tensors do not tell, and nothing else did.
        rounding_error: By which the type asked for changes the source, relative to its largest logit.
        sharpness: Bias of the wanted offset in a one-hot head.
        peak: Weight of its own offset in a soft head.
        approximate: Whether it is, for want of heads.
        num_random_images: Random images that it was verified on.
        num_real_images: Images of the user's, likewise.
        source: What was converted, for the model card.
        training: How that had been trained, as far as it tells.
    """
    architecture: str
    model_args: Dict[str, Any]
    img_size_source: str
    assumed: Dict[str, Any]
    rounding_error: Optional[float]
    sharpness: float
    peak: Optional[float]
    approximate: bool
    num_random_images: int
    num_real_images: int
    source: Dict[str, str]
    training: Dict[str, str]

    @property
    def construction(self) -> str:
        return APPROXIMATION if self.approximate else CONSTRUCTION

    @property
    def start(self) -> str:
        """How much of its weight a head gives to its own offset."""
        sharpness = f'sharpness {self.sharpness:.3g}'
        return sharpness if self.peak is None else f'peak {self.peak:g} ({sharpness} where one-hot)'

    @property
    def train_options(self) -> str:
        """What timm's `train.py` has to be told of the model. It does not hand on the size of its images."""
        default = timm.create_model(self.architecture, device=torch.device('meta')).model_args()
        values = {key: value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
                  for key, value in self.model_args.items() if value != default[key]}
        options = [f'--model {self.architecture}']
        options += [f'{flag} {values.pop(key)}' for key, flag in TRAIN_OPTIONS.items() if key in values]
        if 'img_size' in values:
            height, width = self.model_args['img_size']
            options.append(f'--img-size {height}' if height == width else
                           f"--input-size {self.model_args['in_chans']} {height} {width}")
        if values:
            kwargs = (f'{key}={value}'.replace(' ', '') for key, value in values.items())
            options += ['--model-kwargs', *map(shlex.quote, kwargs)]
        return ' '.join(options)

    @property
    def agreement(self) -> str:
        return f'{self.top1_agreement:.2%} on {self.num_random_images} random and {self.num_real_images} real images'

    @property
    def assumptions(self) -> str:
        return ', '.join(f'{key}={value}' for key, value in self.assumed.items())

    @property
    def rounding(self) -> str:
        return f'{self.rounding_error:.1e} of the largest logit'

    @property
    def details(self) -> Dict[str, Any]:
        """How the model was made, by heading, for its model card."""
        details = {
            'Phase 1': {**self.source, **({'Assumed': self.assumptions} if self.assumed else {})},
            'Construction': {
                'Rewrite': self.construction,
                'Heads used': ', '.join(f'{layer.heads_used} of {layer.num_heads}' for layer in self.layers),
                'Sharpness': f'{self.sharpness:.3g}',
                **({} if self.peak is None else {'Peak': f'{self.peak:g}'}),
                'Largest error of a layer': f'{max(layer.error for layer in self.layers):.1e} of its largest value',
                'Error of the logits': f'{self.logits_error:.1e} of the largest logit, {self.logits_rms_error:.1e} of '
                                       'their root mean square',
                **({} if self.rounding_error is None else {'Rounding of Phase 1': self.rounding}),
                'Top-1 agreement': self.agreement,
            },
        }
        return {**details, 'Training of Phase 1': self.training} if self.training else details

    @property
    def metadata(self) -> Dict[str, str]:
        """What is written into a safetensors file."""
        return {
            'format': 'pt',
            'architecture': self.architecture,
            'model_args': json.dumps(self.model_args),
            'construction': self.construction,
            'source_sha256': self.source['SHA-256'],
            'sharpness': str(self.sharpness),
            **({} if self.peak is None else {'peak': str(self.peak)}),
            'heads_used': ', '.join(str(layer.heads_used) for layer in self.layers),
            'max_error': str(self.max_error),
            'logits_error': str(self.logits_error),
            'timm_cmhsa_version': __version__,
            'timm_version': timm.__version__,
            'torch_version': str(torch.__version__),
        }

    def __str__(self) -> str:
        height, width = self.model_args['img_size']
        patch_h, patch_w = to_2tuple(self.model_args['patch_size'])
        shape = (f"{self.model_args['in_chans']}-channel images of {height} x {width} pixels ({self.img_size_source}), "
                 f'patches of {patch_h} x {patch_w}')
        rows = [(layer.name, f'{layer.heads_used} of {layer.num_heads}', layer.error, layer.rms_error)
                for layer in self.layers]
        rows.append(('logits', '', self.logits_error, self.logits_rms_error))
        approximate = ', approximate' if self.approximate else ''
        return '\n'.join([
            f'{self.architecture}: {shape}, {self.start}{approximate}',
            *(['its heads are one-hot: only with a peak, such as 0.75, can they learn where to look']
              if self.peak is None and self.model_args['rel_pos'] == 'padded_table' else []),
            'layer          heads used   largest error   rms error',
            *(f'{name:<14} {heads:<12} {error:>13.1e} {rms_error:>11.1e}' for name, heads, error, rms_error in rows),
            f'top-1 agreement {self.agreement}',
            *([] if self.rounding_error is None else [f'rounding to its type adds an error of {self.rounding}']),
            *([f'assumed, as tensors alone do not tell: {self.assumptions}\n'
               'The errors are those against a model of the same assumptions: where it was another, tell what it had.']
              if self.assumed else []),
        ])
