"""Vision Transformers that start as convolutional networks: importing this package registers them with timm."""
from .analysis import attention_maps, expresses_convolutions, head_statistics, offset_profile, spans_receptive_field
from .checkpoints import CheckpointError
from .cmhsa import Cmhsa, CmhsaAttn, CmhsaConv
from .cnn import attend_convs, attended_convs
from .construction import conv2d_to_attention
from .convert import ConversionReport, VerificationError, convert_checkpoint, convert_state_dict
from .hub import push_to_hub, save_for_hub
from .hub_errors import HubError
from .patches import patchify, unpatchify
from .pixel import PixelAttn
from .pruning import prune_degenerate_heads
from .token_mixers import PatchConv2d, RelPosAttention
from .version import __version__

__all__ = [
    'CheckpointError',
    'Cmhsa',
    'CmhsaAttn',
    'CmhsaConv',
    'ConversionReport',
    'HubError',
    'PatchConv2d',
    'PixelAttn',
    'RelPosAttention',
    'VerificationError',
    '__version__',
    'attend_convs',
    'attended_convs',
    'attention_maps',
    'conv2d_to_attention',
    'convert_checkpoint',
    'convert_state_dict',
    'expresses_convolutions',
    'head_statistics',
    'offset_profile',
    'patchify',
    'prune_degenerate_heads',
    'push_to_hub',
    'save_for_hub',
    'spans_receptive_field',
    'unpatchify',
]
