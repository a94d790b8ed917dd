"""Pictures of attention. Needs matplotlib: pip install 'timm_cmhsa[plots]'."""
from .data import (
    PlotError as PlotError,
    attention_from as attention_from,
    in_order_of_training as in_order_of_training,
    mean_attention as mean_attention,
)
from .draw import plot_attention as plot_attention
from .explorer import explorer_html as explorer_html
from .figures import (
    attention_figure as attention_figure,
    statistics_figure as statistics_figure,
    statistics_movement_figure as statistics_movement_figure,
)
