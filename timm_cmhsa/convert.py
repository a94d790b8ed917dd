"""A phase-1 model in, the phase-2 model that computes the same out; and a measurement of whether it does."""
import contextlib
import copy
import math
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import timm
import torch
from timm.utils import unwrap_model
from torch import nn
from tqdm import tqdm

from .analysis import eval_mode
from .attention import RelPosAttention
from .cmhsa import CmhsaAttn, CmhsaConv, init_patch_identity
from .construction import HeadOptions, plan_heads, rewrite
from .efficient import is_watched
from .files import strip_prefixes
from .patch_conv import PatchConv2d
from .patches import PatchReshape, Size2d
from .phase1 import build_phase1, default_img_size, matching_model, told_by_user
from .rel_pos import exact_sharpness, padding_of, precise_dtype
from .untrusted import CFG

BATCH_SIZE = 8


@torch.no_grad()
def convert_model(
        model: nn.Module,
        architecture: Optional[str] = None,
        num_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        sharpness: Optional[float] = None,
        approximate: bool = False,
        rel_pos: str = 'table',
        peak: Optional[float] = None,
) -> CmhsaAttn:
    """Rewrite a phase-1 model as the phase-2 model that computes the same.

    Everything else is copied: other layers, image size, classes, preprocessing, device and type. The same model always
    gives the same result: the random start of keys and spare heads has a fixed seed.

    Args:
        model: A `CmhsaConv`, or a wrapper of one (EMA, DistributedDataParallel, torch.compile).
        architecture: Registered phase-2 model to convert to; by default the one with tokens of this shape and wide
            heads, or else `cmhsa_attn`.
        num_heads: Number of heads; by default the architecture's, or as many as needed if `head_dim` is given or these
            are more (the architecture's all the same where `approximate` without a `head_dim`).
        head_dim: Width of a head; by default the architecture's.
        sharpness, approximate, rel_pos, peak: See `conv2d_to_attention`.

    Returns:
        A new model, in the mode of the given one, with nothing frozen.

    Raises:
        TypeError: If it is not a phase-1 model, or a subclass, which may compute something else.
        ValueError: If there is no such architecture or no exact rewrite with these heads, or the rewrite would drop
            hooks or parameters of the model.
    """
    model = unwrap_model(model)
    if type(model) is not CmhsaConv:
        hint = ', which is converted already' if isinstance(model, CmhsaAttn) else ''
        raise TypeError(f'Expected a phase-1 model (CmhsaConv) to convert, got {type(model).__name__}{hint}.')
    _check_plain(model)
    architecture = architecture or matching_architecture(model, peak)
    heads = fit_heads(model, architecture, HeadOptions(num_heads, head_dim, sharpness, approximate, rel_pos, peak))
    args = {key: value for key, value in model.model_args().items() if key != 'kernel_size'}
    generator = torch.Generator().manual_seed(0)
    layers = [rewrite(mixer.conv, mixer.patch_size, mixer.grid_size, heads, generator)
              for mixer in (block.attn for block in model.blocks)]
    converted = timm.create_model(  # with all arguments, as timm notes them
        architecture,
        **args,
        **model.drop_rates,
        num_heads=heads.num_heads,
        head_dim=heads.head_dim,
        rel_pos=layers[0].rel_pos.name,
        padding=padding_of(layers[0].rel_pos),
        pretrained_cfg_overlay=_pretrained_cfg(model),
        device=torch.device('meta'),
    )
    for name, child in model.named_children():
        if name not in ('patch_embed', 'blocks'):
            setattr(converted, name, copy.deepcopy(child))
    for i, (source, attn) in enumerate(zip(model.blocks, layers)):
        attn.attn_drop, attn.proj_drop = converted.blocks[i].attn.attn_drop, copy.deepcopy(source.attn.proj_drop)
        converted.blocks[i] = copy.deepcopy(source)
        converted.blocks[i].attn = attn
    proj, weight = converted.patch_embed.proj, next(model.parameters())
    converted.patch_embed = copy.deepcopy(model.patch_embed)
    converted.patch_embed.proj = proj.to_empty(device=weight.device).to(weight.dtype)
    init_patch_identity(proj)
    for name in model.state_dict().keys() ^ converted.state_dict().keys():
        if '.attn.' not in name and not name.startswith('patch_embed.proj.'):
            raise ValueError(f'{name} is in one of {type(model).__name__} and {architecture} only.')
    converted.set_grad_checkpointing(model.grad_checkpointing)
    return converted.requires_grad_(True).train(model.training)


def _check_plain(model: CmhsaConv) -> None:
    """Refuse what the rewrite would drop of the modules that it makes anew."""
    made_anew: Dict[str, Tuple[nn.Module, type]] = {
        'the model': (model, CmhsaConv),
        'blocks': (model.blocks, nn.Sequential),
        'patch_embed.proj': (model.patch_embed.proj, PatchReshape),
    }
    for i, block in enumerate(model.blocks):
        made_anew[f'blocks.{i}.attn'] = block.attn, PatchConv2d
        made_anew[f'blocks.{i}.attn.conv'] = block.attn.conv, nn.Conv2d
    for name, (module, kind) in made_anew.items():
        if type(module) is not kind or is_watched(module):
            raise ValueError(f'{name} has hooks or another forward, which the rewrite would drop.')


def fit_heads(model: CmhsaConv, architecture: str, options: HeadOptions) -> HeadOptions:
    """Fill in the options that were left open, from the architecture: number, width and sharpness of the heads."""
    options.check()
    check_architecture(architecture)
    target = timm.create_model(architecture, depth=1, device=torch.device('meta'))
    default, mixer = target.blocks[0].attn, model.blocks[0].attn
    num_heads, head_dim = options.num_heads, options.head_dim
    if default.rel_pos.name == 'padded_table' and options.rel_pos == 'table':
        options = options._replace(rel_pos='padded_table')
    if head_dim is None:
        is_thin = default.head_dim != target.embed_dim
        if is_thin and target.embed_dim != model.embed_dim:
            others = [name for name, each in _architectures() if each.embed_dim == model.embed_dim]
            raise ValueError(
                f'{architecture} has tokens of width {target.embed_dim}, the phase-1 model of {model.embed_dim}: '
                f'choose {" or ".join(others) or f"{matching_architecture(model, options.peak)} with head_dim=N"}.')
        head_dim = default.head_dim if is_thin else model.embed_dim
    heads = plan_heads(mixer.conv, mixer.patch_size, mixer.grid_size, head_dim, options.rel_pos, options.peak)
    needed = len(heads)
    if num_heads is None:
        num_heads = default.num_heads if options.head_dim is None else needed
        num_heads = num_heads if options.approximate else max(needed, num_heads)
    return options._replace(
        num_heads=num_heads, head_dim=head_dim,
        sharpness=options.sharpness or exact_sharpness(
            math.prod(mixer.grid_size), precise_dtype(mixer.conv.weight.dtype)),
        approximate=options.approximate and needed > num_heads,
        peak=options.peak if any(head.is_soft for head in heads) else None)


def check_architecture(name: str) -> None:
    """Refuse what is not the name of a registered phase-2 model."""
    choices = timm.list_models('*cmhsa_attn*')
    if name not in choices:
        shown = ', '.join(choice for choice in choices if not choice.startswith('test_'))
        raise ValueError(f'{name} is not a phase-2 model: choose one of {shown}.')


def matching_architecture(model: CmhsaConv, peak: Optional[float] = None) -> str:
    """Return the registered phase-2 model with tokens of this shape and heads as wide, or else `cmhsa_attn(_soft)`."""
    encoding = 'table' if peak is None else 'padded_table'
    for name, target in _architectures():
        attn = target.blocks[0].attn
        shape = target.patch_embed.patch_size, target.hidden_chans, attn.head_dim, attn.rel_pos.name
        if shape == (model.patch_embed.patch_size, model.hidden_chans, target.embed_dim, encoding):
            return name
    return 'cmhsa_attn' if peak is None else 'cmhsa_attn_soft'


def _architectures() -> Iterator[Tuple[str, CmhsaAttn]]:
    """Return all registered phase-2 models but those of tests, with one block each."""
    for name in timm.list_models('cmhsa_attn*'):
        yield name, timm.create_model(name, depth=1, device=torch.device('meta'))


def _pretrained_cfg(model: CmhsaConv) -> Dict[str, Any]:
    """Return what a phase-1 model knows of its images and classes, to hand on."""
    source = getattr(model, 'pretrained_cfg', None) or {}
    known = {key: source[key] for key in CFG if source.get(key) is not None}
    return {**known, 'input_size': (model.in_chans, *model.patch_embed.img_size), 'num_classes': model.num_classes}


def convert_state_dict(
        state_dict: Dict[str, torch.Tensor],
        img_size: Optional[Size2d] = None,
        patch_size: Optional[Size2d] = None,
        in_chans: Optional[int] = None,
        num_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        sharpness: Optional[float] = None,
        approximate: bool = False,
        rel_pos: str = 'table',
        peak: Optional[float] = None,
        model_kwargs: Optional[Mapping[str, Any]] = None,
) -> Dict[str, torch.Tensor]:
    """Rewrite the tensors of a phase-1 model as those of a phase-2 model that computes the same.

    See `convert_checkpoint` for what tensors do not tell, and `convert_model` for the others. The result is for a
    `cmhsa_attn`, with soft heads for a `cmhsa_attn_soft`, with the same layers and pooling.

    Raises:
        CheckpointError: If these are not the tensors of a phase-1 model, or the image size is not known.
        ValueError: If there is no exact rewrite with these heads.
    """
    state_dict = strip_prefixes(state_dict)
    known = told_by_user(model_kwargs, img_size=img_size, patch_size=patch_size, in_chans=in_chans)
    if 'img_size' not in known:
        known['img_size'] = default_img_size(matching_model(state_dict, known))
    model = build_phase1(state_dict, **known)
    heads = HeadOptions(num_heads, head_dim, sharpness, approximate, rel_pos, peak)
    converted = convert_model(model, 'cmhsa_attn', **heads._asdict())
    return converted.state_dict()


class LayerReport(NamedTuple):
    """How well one attention layer replaces its convolution.

    Attributes:
        name: Of the layer in the model.
        heads_used: Heads that express the convolution; None in a layer that was reparameterized.
        num_heads: All heads, likewise.
        error: Largest, relative to the convolution's largest output.
        rms_error: Root mean square, relative to that of the convolution's output.
    """
    name: str
    heads_used: Optional[int]
    num_heads: Optional[int]
    error: float
    rms_error: float


@dataclass
class Verification:
    """How well a phase-2 model replaces its phase-1 source.

    Attributes:
        layers: One report for each.
        logits_error: Largest, relative to the source's largest logit.
        logits_rms_error: Root mean square, relative to that of the source's logits.
        top1_agreement: Share of the images.
    """
    layers: List[LayerReport]
    logits_error: float
    logits_rms_error: float
    top1_agreement: float

    @property
    def max_error(self) -> float:
        return torch.tensor([self.logits_error, *(layer.error for layer in self.layers)]).max().item()  # NaN wins


@torch.inference_mode()
def verify(model: nn.Module, converted: nn.Module, images: torch.Tensor) -> Verification:
    """Compare a phase-1 model with its rewrite in eval mode, layer by layer and at the end.

    Every layer gets the input of its convolution, so that its error is its own. Both models are in eval mode meanwhile.

    Args:
        model, converted: Models to compare, or wrappers of them.
        images: Shape (B, C, H, W).

    Raises:
        ValueError: If these are not a phase-1 and a phase-2 model of as many blocks and classes, or there are no
            images.
    """
    source: Any = unwrap_model(model)
    target: Any = unwrap_model(converted)
    if not isinstance(source, CmhsaConv) or not isinstance(target, CmhsaAttn):
        raise ValueError(
            f'Expected a phase-1 model and its rewrite, got {type(source).__name__} and {type(target).__name__}.')
    if len(source.blocks) != len(target.blocks) or not len(images):
        raise ValueError(
            f'Models of {len(source.blocks)} and {len(target.blocks)} blocks cannot be compared on {len(images)} '
            'images: give as many blocks, and one image or more.')
    if source.num_classes != target.num_classes:
        raise ValueError(
            f'Models of {source.num_classes} and {target.num_classes} classes cannot be compared: give as many.')
    largest, squares = torch.zeros(2, len(source.blocks) + 1), torch.zeros(2, len(source.blocks) + 1)
    same_class = []

    def compare(i: int, expected: torch.Tensor, actual: torch.Tensor) -> None:
        for j, values in enumerate((actual.float() - expected.float(), expected.float())):
            largest[j, i] = torch.maximum(largest[j, i], values.abs().max())
            squares[j, i] += values.square().sum().to(squares.device)

    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(source))
        stack.enter_context(eval_mode(target))
        for i, block in enumerate(source.blocks):
            stack.enter_context(block.attn.register_forward_hook(
                lambda _, inputs, output, i=i: compare(i, output, target.blocks[i].attn(inputs[0]))))
        for batch in tqdm(images.split(BATCH_SIZE), 'verifying', leave=False, disable=None):  # None: in a terminal
            expected, actual = source(batch), target(batch)
            compare(-1, expected, actual)
            same_class.append(expected.argmax(dim=-1) == actual.argmax(dim=-1))
    tiny = torch.finfo(squares.dtype).tiny  # where a model has nothing but zeros
    *layer_errors, logits_errors = zip(
        (largest[0] / largest[1].clamp(min=tiny)).tolist(), (squares[0] / squares[1].clamp(min=tiny)).sqrt().tolist())
    layers = [
        LayerReport(
            name=f'blocks.{i}.attn',
            heads_used=int(block.attn.used_heads().sum()) if isinstance(block.attn, RelPosAttention) else None,
            num_heads=block.attn.num_heads if isinstance(block.attn, RelPosAttention) else None,
            error=error,
            rms_error=rms_error,
        )
        for i, (block, (error, rms_error)) in enumerate(zip(target.blocks, layer_errors))
    ]
    return Verification(
        layers=layers,
        logits_error=logits_errors[0],
        logits_rms_error=logits_errors[1],
        top1_agreement=torch.cat(same_class).float().mean().item(),
    )
