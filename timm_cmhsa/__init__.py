"""Vision Transformers that start as convolutional networks: importing this package registers them with timm."""
from .analysis import (
    attention_maps as attention_maps,
    expresses_convolutions as expresses_convolutions,
    head_statistics as head_statistics,
    offset_profile as offset_profile,
    spans_receptive_field as spans_receptive_field,
)
from .attention import RelPosAttention as RelPosAttention
from .checkpoints import VerificationError as VerificationError, convert_checkpoint as convert_checkpoint
from .cmhsa import Cmhsa as Cmhsa, CmhsaAttn as CmhsaAttn, CmhsaConv as CmhsaConv
from .cnn import attend_convs as attend_convs, attention_summary as attention_summary
from .construction import conv2d_to_attention as conv2d_to_attention
from .convert import convert_model as convert_model, convert_state_dict as convert_state_dict, verify as verify
from .files import CheckpointError as CheckpointError
from .fuse import fuse_shifts as fuse_shifts
from .hub.errors import HubError as HubError
from .hub.publish import (
    push_folder_to_hub as push_folder_to_hub,
    push_to_hub as push_to_hub,
    save_for_hub as save_for_hub,
)
from .inverse import attention_to_conv2d as attention_to_conv2d
from .patch_conv import PatchConv2d as PatchConv2d
from .patches import patchify as patchify, unpatchify as unpatchify
from .pixel import PixelAttn as PixelAttn
from .pruning import prune_degenerate_heads as prune_degenerate_heads
from .report import ConversionReport as ConversionReport
from .version import __version__ as __version__
