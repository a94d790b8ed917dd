"""Attention on pixels: the models of arXiv 1911.03584, their position encodings, and pruning."""
from .models import PixelAttn as PixelAttn, PositionalAttention as PositionalAttention
from .pruning import prune_degenerate_heads as prune_degenerate_heads
