"""Vision Transformers that start as convolutional networks: importing this package registers them with timm."""
from .analysis import attention_maps, expresses_convolutions, head_statistics, offset_profile, spans_receptive_field
from .attention import RelPosAttention
from .checkpoints import VerificationError, convert_checkpoint
from .cmhsa import Cmhsa, CmhsaAttn, CmhsaConv
from .cnn import attend_convs, attention_summary
from .construction import conv2d_to_attention
from .convert import convert_model, convert_state_dict, verify
from .files import CheckpointError
from .hub.errors import HubError
from .hub.publish import push_folder_to_hub, push_to_hub, save_for_hub
from .patch_conv import PatchConv2d
from .patches import patchify, unpatchify
from .pixel import PixelAttn
from .pruning import prune_degenerate_heads
from .report import ConversionReport
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
    'attention_maps',
    'attention_summary',
    'conv2d_to_attention',
    'convert_checkpoint',
    'convert_model',
    'convert_state_dict',
    'expresses_convolutions',
    'head_statistics',
    'offset_profile',
    'patchify',
    'prune_degenerate_heads',
    'push_folder_to_hub',
    'push_to_hub',
    'save_for_hub',
    'spans_receptive_field',
    'unpatchify',
    'verify',
]
