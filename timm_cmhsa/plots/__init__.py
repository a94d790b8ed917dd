"""Pictures of attention. Needs matplotlib: pip install 'timm_cmhsa[plots]'."""
from ..analysis import PlotError as PlotError, mean_attention as mean_attention
from .draw import (
    attention_figure as attention_figure,
    attention_from as attention_from,
    in_order_of_training as in_order_of_training,
    plot_attention as plot_attention,
    statistics_figure as statistics_figure,
)
from .explorer import explorer_html as explorer_html
