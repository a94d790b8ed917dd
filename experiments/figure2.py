"""Figure 2 of the paper, phase 2 with and without warm-up: python experiments/figure2.py

Validation loss of the attention model on 300 digits, from the converted phase 1 and from a random start, with and
without a warm-up of the learning rate, which is otherwise that of CMHSA-5 in table1.py for all four; mean and range of
5 seeds. Phase 1 and the choice of the rate are those of table1.py, and not done again.
"""
from pathlib import Path
from typing import Dict, List

from common.report import make_figure, markdown_table, plot_mean_and_range, spread, write_whole
from common.rows import ATTN, CMHSA5, ROWS, TUNING_SIZE, choose_rates, make_row_parser, parse_row_args, plan
from common.runs import Result, Run, run_all, top1


def main() -> None:
    args = parse_row_args(make_row_parser(__doc__))
    rates = choose_rates(ROWS, args.learning_rates, args.images_per_phase, args.output / 'runs')
    runs = [plan(CMHSA5, rates[CMHSA5.title], TUNING_SIZE, seed, args.images_per_phase) for seed in range(args.seeds)]
    results = run_all(plan_curves(runs), args.output / 'runs', 'figure 2')
    table = markdown_table(
        ['start', 'top-1 on the test images, %'], [[title, spread(top1(seeds))] for title, seeds in results.items()])
    write_whole(args.output / 'figure2.md', table)
    print(table)
    plot(results, args.output / 'figure2.png')


def plan_curves(runs: List[Run]) -> Dict[str, List[Run]]:
    """Plan the four curves from the runs of the table's row."""
    curves = {}
    model, model_kwargs = ATTN
    for start in ('converted', 'random'):
        for warmup, changes in (('with', {}), ('without', {'warmup_epochs': 0})):
            title = f'{start}, {warmup} warm-up'
            curves[title] = [run._replace(title=title, options={**run.options, **changes}, curves=('loss',))
                             for run in runs]
            if start == 'random':
                curves[title] = [
                    run._replace(options=dict(run.options, model=model, model_kwargs=model_kwargs), after=None,
                                 rewrite=None) for run in curves[title]]
    return curves


def plot(results: Dict[str, List[Result]], path: Path) -> None:
    figure, (axis,) = make_figure((7, 5))
    styles = (('C0', '-'), ('C0', '--'), ('C1', '-'), ('C1', '--'))
    for (title, seeds), (color, linestyle) in zip(results.items(), styles):
        losses = [result['curves']['loss'] for result in seeds]
        plot_mean_and_range(axis, seeds[0]['curves']['epoch'], losses, color=color, linestyle=linestyle, label=title)
    axis.set(xlabel='epoch', ylabel='validation loss')
    axis.legend()
    figure.savefig(path)


if __name__ == '__main__':
    main()
