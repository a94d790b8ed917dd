"""Vision Transformers that start as convolutional networks: importing this package registers them with timm."""
from .analysis import attention_maps as attention_maps, head_statistics as head_statistics
from .attention import RelPosAttention as RelPosAttention
from .checkpoint import (
    VerificationError as VerificationError,
    convert_checkpoint as convert_checkpoint,
    convert_state_dict as convert_state_dict,
)
from .cnn import attend_convs as attend_convs
from .construction import conv2d_to_attention as conv2d_to_attention
from .convert import convert_model as convert_model, verify as verify
from .errors import CheckpointError as CheckpointError, HubError as HubError
from .hub import push_to_hub as push_to_hub, save_for_hub as save_for_hub
from .load import load_model as load_model
from .models import CmhsaAttn as CmhsaAttn, CmhsaConv as CmhsaConv
from .patches import patchify as patchify, unpatchify as unpatchify
from .pixel import models as _pixel_models  # noqa: F401  registers the models on pixels
from .start import start_as_convolution as start_as_convolution
from .version import __version__ as __version__
