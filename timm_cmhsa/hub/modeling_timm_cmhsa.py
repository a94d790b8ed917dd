"""Models of timm_cmhsa in transformers: its own wrapper of timm's models, and what that lacks.

Published beside the weights, for `trust_remote_code=True`. Needs transformers and timm_cmhsa: pip install timm_cmhsa
The classes are called as in transformers, whose pipelines know classes by name.
"""
from typing import Any, Dict, Optional, Tuple, Union

import torch
import transformers
from torchvision.transforms import Grayscale

from timm_cmhsa import attention_maps

Outputs = Union[transformers.utils.ModelOutput, Tuple[Any, ...]]


class _Wrapper(transformers.PreTrainedModel):
    """What both models add: attention maps, and tensors saved by timm's names."""

    def _with_attentions(self, outputs: Outputs, pixel_values: torch.Tensor, wanted: Optional[bool]) -> Outputs:
        """Add the attention of every layer, (B, num_heads, N, N), where it is wanted.

        A row sums to one less what the zero key takes. The maps are of a pass of their own, in eval mode and without
        gradients.
        """
        if not (self.config.output_attentions if wanted is None else wanted):
            return outputs
        maps = attention_maps(self.timm_model, pixel_values.to(self.device, self.dtype))
        attentions = tuple(layer.weights for layer in maps.values())
        if isinstance(outputs, tuple):
            return (*outputs, attentions)
        outputs['attentions'] = attentions
        return outputs

    def save_pretrained(
            self, *args: Any, state_dict: Optional[Dict[str, torch.Tensor]] = None, **kwargs: Any) -> None:
        """Save a folder that timm loads as well: of code like this, transformers 5 would save the wrapper's names."""
        state_dict = {
            name.replace('timm_model.', '', 1): tensor for name, tensor in (state_dict or self.state_dict()).items()}
        super().save_pretrained(*args, state_dict=state_dict, **kwargs)


class TimmWrapperModel(_Wrapper, transformers.TimmWrapperModel):
    """A model without its classifier."""

    def forward(self, pixel_values: torch.Tensor, output_attentions: Optional[bool] = None, **kwargs: Any) -> Outputs:
        outputs = super().forward(pixel_values, output_attentions=False, **kwargs)
        return self._with_attentions(outputs, pixel_values, output_attentions)


class TimmWrapperForImageClassification(_Wrapper, transformers.TimmWrapperForImageClassification):
    """A classifier."""

    def forward(
            self,
            pixel_values: torch.Tensor,
            labels: Optional[torch.Tensor] = None,
            output_attentions: Optional[bool] = None,
            **kwargs: Any,
    ) -> Outputs:
        outputs = super().forward(pixel_values, labels=labels, output_attentions=False, **kwargs)
        return self._with_attentions(outputs, pixel_values, output_attentions)


class TimmWrapperImageProcessor(transformers.TimmWrapperImageProcessor):
    """Prepares images as timm does, those in colour also for models of gray ones: pipelines read all in colour."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.data_config['input_size'][0] == 1:
            for transform in (self.val_transforms, self.train_transforms):
                transform.transforms.insert(0, Grayscale())


# transformers 4 saves this code with a model only if told so
TimmWrapperModel.register_for_auto_class('AutoModel')
TimmWrapperForImageClassification.register_for_auto_class('AutoModelForImageClassification')
