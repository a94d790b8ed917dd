"""Rewrite a phase-1 model in memory as the phase-2 model that computes the same, and measures how exact that is."""
import contextlib
import copy
import math
from dataclasses import dataclass, field
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import timm
import torch
from timm.utils import unwrap_model
from torch import nn
from tqdm import tqdm

from .analysis import eval_mode
from .attention import THIN_QK_DIM, WIDE_QK_DIM, default_qk_dim
from .construction import Head, HeadOptions, plan_heads, rewrite
from .errors import text_table
from .layers import PatchConv2d, init_patch_identity
from .models import HEADS, CmhsaAttn, CmhsaConv, registered_variant
from .rel_pos import PaddedRelPosTable, RelPosTable, exact_sharpness

BATCH_SIZE = 8
DEFAULT_PEAK = 0.75
DATA_KEYS = ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode', 'label_names', 'label_descriptions')


def convert_model(model: nn.Module, architecture: Optional[str] = None, **heads: Any) -> CmhsaAttn:
    """Rewrite a phase-1 model as a new phase-2 model that computes the same, in the same mode, with nothing frozen.

    Everything else is copied: other layers, image size, classes, preprocessing, device and type. (Soft heads are in
    float32 at least, and so is their model, since half precision would round what they add and subtract.) The same
    model always gives the same result: the random start of keys and spare heads has a fixed seed.

    A change of the image size afterwards keeps the function as well, unless the grid was smaller than the kernel's
    reach, whose offsets it did not need: then change the size before.

    Args:
        model: A `CmhsaConv`, or a wrapper of one (EMA, DistributedDataParallel, torch.compile).
        architecture: Registered phase-2 model to convert to, such as 'cmhsa_attn_soft'. By default `cmhsa_attn`, with
            a peak `cmhsa_attn_soft`, in the variant with patches of this size. With a stem it is a
            `cmhsa_hybrid_attn_*`, which has soft heads.
        **heads: See `HeadOptions`. Heads of `cmhsa_attn`, and of any architecture with rel_pos='table', are hard.

    Raises:
        TypeError: If the model is not a `CmhsaConv`. Subclasses are refused too, as they may compute something else.
        ValueError: If the architecture is unknown, no rewrite with these heads is exact, or token mixers were replaced.
    """
    return convert_with(model, architecture, HeadOptions(**heads))[0]


@torch.no_grad()
def convert_with(model: nn.Module, architecture: Optional[str], options: HeadOptions) -> Tuple[CmhsaAttn, HeadOptions]:
    """Rewrite a phase-1 model, see `convert_model`; return it with the options without gaps."""
    source = unwrap_model(model)
    if type(source) is not CmhsaConv:
        hint = ', which is converted already' if isinstance(source, CmhsaAttn) else ''
        raise TypeError(f'Expected a phase-1 model (CmhsaConv) to convert, got {type(source).__name__}{hint}.')
    if any(type(getattr(block, 'attn', None)) is not PatchConv2d for block in source.blocks):
        raise ValueError('Token mixers were replaced: convert the model as timm.create_model makes it.')
    source = copy.deepcopy(source)
    architecture, options, heads = _complete(source, architecture, options)
    if options.peak is not None:
        source.to(torch.promote_types(next(source.parameters()).dtype, torch.float32))
    generator = torch.Generator().manual_seed(0)
    layers = [rewrite(mixer.conv, mixer.patch_size, mixer.grid_size, options, generator, heads)
              for mixer in (block.attn for block in source.blocks)]
    args, cfg = source.model_args(), getattr(source, 'pretrained_cfg', None) or {}
    del args['kernel_size']
    overlay = {key: cfg[key] for key in DATA_KEYS if cfg.get(key) is not None}
    overlay.update(input_size=(source.in_chans, *source.patch_embed.img_size), num_classes=source.num_classes)
    converted: CmhsaAttn = timm.create_model(
        architecture, **args, **source.drop_rates, **layers[0].args(), pretrained_cfg_overlay=overlay,
        device=torch.device('meta'))
    proj, weight = converted.patch_embed.proj, next(source.parameters())
    for name, child in source.named_children():
        setattr(converted, name, child)
    for block, attn in zip(converted.blocks, layers):
        attn.attn_drop, attn.proj_drop = nn.Dropout(source.drop_rates['attn_drop_rate']), block.attn.proj_drop
        block.attn = attn
    if not source.stem:
        converted.patch_embed.proj = proj.to_empty(device=weight.device).to(weight.dtype)
        init_patch_identity(proj)
    converted.set_grad_checkpointing(source.grad_checkpointing)
    return converted.requires_grad_(True).train(source.training), options


def _complete(
        model: CmhsaConv, architecture: Optional[str], options: HeadOptions) -> Tuple[str, HeadOptions, List[Head]]:
    """Return the architecture, the options without gaps, and the plan of the heads of every layer."""
    if architecture is None:
        kind = 'cmhsa_attn' if options.peak is None else 'cmhsa_attn_soft'
        architecture = registered_variant(
            kind, model.patch_embed.patch_size, model.hidden_chans, model.stem, model.patch_embed.img_size)
    if architecture not in HEADS:
        raise ValueError(f'{architecture} is not a phase-2 model: choose one of {", ".join(HEADS)}.')
    defaults, mixer, dim = HeadOptions(**HEADS[architecture]), model.blocks[0].attn, model.embed_dim
    if options.peak is None and options.rel_pos != RelPosTable.name and defaults.rel_pos == PaddedRelPosTable.name:
        options = options._replace(peak=DEFAULT_PEAK)
    options.check()
    num_heads, head_dim, qk_dim, sharpness, rel_pos, peak = options
    if head_dim is None:  # thin heads are 96 wide for tokens of 768, 48 for 192
        head_dim = dim if defaults.head_dim is None else max(dim // 8, min(48, dim))
    heads = plan_heads(mixer.conv, mixer.patch_size, mixer.grid_size, head_dim, peak)
    if num_heads is None:
        is_default = options.head_dim is None and defaults.head_dim in (None, head_dim)
        num_heads = max(len(heads), defaults.num_heads or 0) if is_default else len(heads)
    if qk_dim is None:
        usual = defaults.qk_dim or (WIDE_QK_DIM if defaults.head_dim is None else THIN_QK_DIM)
        qk_dim = min(usual, head_dim) if options.head_dim is None else default_qk_dim(dim, head_dim)
    if sharpness is None:
        sharpness = exact_sharpness(math.prod(mixer.grid_size), mixer.conv.weight.dtype)
    if rel_pos is None:
        rel_pos = RelPosTable.name if peak is None else PaddedRelPosTable.name
    if not any(head.is_soft for head in heads):
        peak = None
    return architecture, HeadOptions(num_heads, head_dim, qk_dim, sharpness, rel_pos, peak), heads


class LayerReport(NamedTuple):
    """How exactly one attention layer replaces its convolution."""
    name: str
    heads_used: int  # those with an output
    num_heads: int
    error: float  # the largest, relative to the convolution's largest output


@dataclass
class ConversionReport:
    """How exactly a phase-2 model replaces its phase-1 source; prints as text."""
    layers: List[LayerReport]
    logits_error: float  # the largest, relative to the source's largest logit
    top1_agreement: float  # share of the images with the same predicted class
    about: Dict[str, str] = field(default_factory=dict)  # what `convert_checkpoint` did, by heading

    @property
    def max_error(self) -> float:
        """Return the largest error of layers and logits; NaN if one of them is NaN."""
        errors = [self.logits_error, *(layer.error for layer in self.layers)]
        return torch.tensor(errors, dtype=torch.double).max().item()

    @property
    def details(self) -> Dict[str, Dict[str, str]]:
        """Return how the model was made and how exact it is, by heading, for its model card."""
        return {'Conversion': {
            **self.about,
            'Largest error of a layer': f'{max(layer.error for layer in self.layers):.1e} of its largest value',
            'Error of the logits': f'{self.logits_error:.1e} of the largest logit',
            'Top-1 agreement': f'{self.top1_agreement:.2%}',
        }}

    def __str__(self) -> str:
        rows = [(layer.name, f'{layer.heads_used} of {layer.num_heads}', f'{layer.error:.1e}') for layer in self.layers]
        table = text_table([('layer', 'heads used', 'error'), *rows])
        return '\n'.join([table, *(f'{key.lower()}: {value}' for key, value in self.details['Conversion'].items())])


@torch.inference_mode()
def verify(model: nn.Module, converted: nn.Module, images: torch.Tensor) -> ConversionReport:
    """Compare a phase-1 model with its rewrite in eval mode, layer by layer and at the end.

    The models run in their own types, and errors are computed in float64. Every layer gets the input of its
    convolution, so that its error is its own.

    Args:
        model, converted: Models to compare, or wrappers of them.
        images: Shape (B, C, H, W).

    Raises:
        ValueError: If these are no model and its rewrite, by blocks, classes and image size, or there are no images.
    """
    source: Any = unwrap_model(model)
    target: Any = unwrap_model(converted)
    if not isinstance(source, CmhsaConv) or not isinstance(target, CmhsaAttn):
        raise ValueError(
            f'Expected a phase-1 model and its rewrite, got {type(source).__name__} and {type(target).__name__}.')
    shapes = [(len(each.blocks), each.num_classes, each.patch_embed.img_size) for each in (source, target)]
    if shapes[0] != shapes[1] or not len(images):
        raise ValueError(
            f'Models of (blocks, classes, image size) {shapes[0]} and {shapes[1]} cannot be compared on {len(images)} '
            'images: give a model and its rewrite, and one image or more.')
    largest = torch.zeros(2, len(source.blocks) + 1, dtype=torch.double)  # of errors and of values
    same_class = []

    def compare(i: int, expected: torch.Tensor, actual: torch.Tensor) -> None:
        expected, actual = expected.cpu().double(), actual.cpu().double()
        for j, values in enumerate((actual - expected, expected)):
            largest[j, i] = torch.maximum(largest[j, i], values.abs().max())

    weight = next(target.parameters())
    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(source))
        stack.enter_context(eval_mode(target))
        for i, block in enumerate(source.blocks):
            stack.enter_context(block.attn.register_forward_hook(
                lambda _, inputs, output, i=i: compare(i, output, target.blocks[i].attn(inputs[0].to(weight)))))
        for batch in tqdm(images.split(BATCH_SIZE), 'verifying', leave=False, disable=None):  # None: in a terminal
            expected, actual = source(batch.to(next(source.parameters()))), target(batch.to(weight))
            compare(-1, expected, actual)
            same_class.append(expected.argmax(dim=-1).cpu() == actual.argmax(dim=-1).cpu())
    tiny = torch.finfo(torch.double).tiny  # for models whose outputs are all zero
    errors = (largest[0] / largest[1].clamp(min=tiny)).tolist()
    layers = [LayerReport(f'blocks.{i}.attn', int(block.attn.used_heads().sum()), block.attn.num_heads, errors[i])
              for i, block in enumerate(target.blocks)]
    return ConversionReport(layers, errors[-1], torch.cat(same_class).double().mean().item())
