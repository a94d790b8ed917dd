"""Attention on pixels: the models of arXiv 1911.03584 and their position encodings."""
from .models import PixelAttn as PixelAttn, PositionalAttention as PositionalAttention
