"""Tables, plots and files of results."""
import statistics
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

import scipy.stats
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def top1(seeds: Sequence[Dict[str, Any]], when: str = 'test') -> List[float]:
    """Return the top-1 accuracies of runs: on test images, `when` 'before' or after ('test') training, and so on."""
    return [result[when]['top1'] for result in seeds]


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation; a single value is returned alone."""
    mean = f'{statistics.mean(values):.1f}'
    return f'{mean} ± {statistics.stdev(values):.1f}' if len(values) > 1 else mean


def half_interval(differences: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of paired differences, three or more (Student's t)."""
    number = len(differences)
    return scipy.stats.t.ppf(0.975, number - 1) * statistics.stdev(differences) / number ** 0.5


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, its first column aligned to the left and all others to the right."""
    lines = [f'| {" | ".join(head)} |', '|---|' + '---:|' * (len(head) - 1)]
    lines += [f'| {" | ".join(row)} |' for row in rows]
    return '\n'.join(lines) + '\n'


def accuracies(results: Mapping[str, Sequence[Dict[str, Any]]]) -> str:
    """Return a table of runs on photos: sizes, times and accuracies, also right after the rewrite."""
    rows = []
    for title, seeds in results.items():
        first, minutes = seeds[0], statistics.mean(each['seconds'] for each in seeds) / 60
        rewritten = '-' if first['converted']['top1'] is None else spread(top1(seeds, 'converted'))
        rows.append([title, f'{first["params"]:.2f} M', str(first['epochs']), f'{first["lr"]:g}', rewritten,
                     f'{minutes:.0f} min', spread(top1(seeds, 'held_out')), spread(top1(seeds))])
    head = ['', 'parameters', 'epochs', 'learning rate', 'rewritten', 'time', 'held-out images', 'test images']
    return markdown_table(head, rows) + seeds_note(len(seeds))


def seeds_note(num_seeds: int) -> str:
    """Return what stands below a table of several seeds."""
    return f'\nMean ± standard deviation over {num_seeds} seeds, %.\n' if num_seeds > 1 else ''


def make_figure(figsize: Tuple[float, float], num_axes: int = 1, **kwargs: Any) -> Tuple[Figure, List[Axes]]:
    """Return a figure with axes side by side, each with a faint grid; kwargs are those of `Figure.subplots`."""
    figure = Figure(figsize=figsize, dpi=120, layout='constrained')
    axes = list(figure.subplots(1, num_axes, squeeze=False, **kwargs)[0])
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def plot_mean_and_range(axis: Axes, x: Sequence[float], curves: Sequence[Sequence[float]], **kwargs: Any) -> None:
    """Draw the mean of the curves of several seeds as a line, and their range as a band."""
    line, = axis.plot(x, [statistics.mean(values) for values in zip(*curves)], **kwargs)
    lowest, highest = ([choose(values) for values in zip(*curves)] for choose in (min, max))
    axis.fill_between(x, lowest, highest, color=line.get_color(), alpha=0.15)


def show(table: str, path: Path) -> None:
    """Print a table, and write it."""
    path.write_text(table)
    print(table)
