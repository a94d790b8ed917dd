"""Vision Transformers that start as convolutional networks: importing this package registers them with timm."""
from .cmhsa import Cmhsa, CmhsaAttn, CmhsaConv
from .token_mixers import PatchConv2d, RelPosAttention, patchify, unpatchify
