"""Vision Transformers that start as convolutional networks: importing this package registers them with timm."""
from .checkpoints import CheckpointError
from .cmhsa import Cmhsa, CmhsaAttn, CmhsaConv
from .construction import conv2d_to_attention
from .convert import ConversionReport, VerificationError, convert_checkpoint, convert_state_dict
from .hub import push_to_hub, save_for_hub
from .hub_errors import HubError
from .patches import patchify, unpatchify
from .pixel import PixelAttn
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
    'conv2d_to_attention',
    'convert_checkpoint',
    'convert_state_dict',
    'patchify',
    'push_to_hub',
    'save_for_hub',
    'unpatchify',
]
