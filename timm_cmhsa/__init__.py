"""Vision Transformers that start as convolutional networks: importing this package registers them with timm."""
from .analysis import attention_maps as attention_maps, head_statistics as head_statistics
from .attention import RelPosAttention as RelPosAttention
from .checkpoint import load_model as load_model
from .cnn import attend_convs as attend_convs
from .construction import HeadOptions as HeadOptions, conv2d_to_attention as conv2d_to_attention
from .conversion import convert_checkpoint as convert_checkpoint, convert_state_dict as convert_state_dict
from .convert import convert_model as convert_model, verify as verify
from .errors import CheckpointError as CheckpointError, HubError as HubError, VerificationError as VerificationError
from .hub import push_to_hub as push_to_hub, save_for_hub as save_for_hub
from .layers import patchify as patchify, unpatchify as unpatchify
from .models import CmhsaAttn as CmhsaAttn, CmhsaConv as CmhsaConv
from .pixel import models as _pixel_models  # noqa: F401  registers the models on pixels
from .start import start_as_convolution as start_as_convolution
from .version import __version__ as __version__
