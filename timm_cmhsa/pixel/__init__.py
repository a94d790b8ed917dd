"""Attention on pixels: the models of arXiv 1911.03584, their position encodings, and pruning."""
from .encodings import prune_degenerate_heads as prune_degenerate_heads
from .models import PixelAttn as PixelAttn, PositionalAttention as PositionalAttention
