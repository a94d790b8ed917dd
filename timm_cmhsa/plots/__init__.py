"""Pictures of attention. Needs matplotlib: pip install 'timm_cmhsa[plots]'."""
from .data import PlotError, attention_from, gaussians, in_order_of_training, load_model, mean_attention
from .draw import plot_attention
from .explorer import explorer_html
from .figures import attention_figure, center_figure, statistics_figure, statistics_movement_figure

__all__ = [
    'PlotError',
    'attention_figure',
    'attention_from',
    'center_figure',
    'explorer_html',
    'gaussians',
    'in_order_of_training',
    'load_model',
    'mean_attention',
    'plot_attention',
    'statistics_figure',
    'statistics_movement_figure',
]
