"""Figure 2 of the paper, phase 2 with and without warm-up: python experiments/figure2.py

Validation loss of the attention model on 300 digits, from the converted phase 1 and from a random start, with and
without a warm-up of the learning rate, which is otherwise that of CMHSA-5 in table1.py for all four; mean and range of
5 seeds. Phase 1 is that of table1.py. The output folder gets the table and the plot.
"""
from common.options import make_run_parser
from common.report import make_figure, markdown_table, plot_mean_and_range, show, spread, top1
from common.runs import replicate, run_all
from table1 import ATTN, CMHSA5, plan

CONVERTED = plan(CMHSA5, 300)
RANDOM = CONVERTED._replace(
    options=dict(CONVERTED.options, model=ATTN[0], model_kwargs=ATTN[1]), after=None, rewrite=None)
ROWS = {}
for start, run in (('converted', CONVERTED), ('random', RANDOM)):
    for warmup, changes in (('with', {}), ('without', {'warmup_epochs': 0})):
        title = f'{start}, {warmup} warm-up'
        ROWS[title] = run._replace(title=title, options={**run.options, **changes})


def main() -> None:
    args = make_run_parser(__doc__, 'figure2', seeds=5).parse_args()
    results = run_all(replicate(ROWS, args), args)
    show(markdown_table(['start', 'top-1 on the test images, %'], [
        [title, spread(top1(seeds))] for title, seeds in results.items()]), args.output / 'figure2.md')
    figure, (axis,) = make_figure((7, 5))
    styles = (('C0', '-'), ('C0', '--'), ('C1', '-'), ('C1', '--'))
    for (title, seeds), (color, linestyle) in zip(results.items(), styles):
        losses = [result['curves']['loss'] for result in seeds]
        plot_mean_and_range(axis, seeds[0]['curves']['epoch'], losses, color=color, linestyle=linestyle, label=title)
    axis.set(xlabel='epoch', ylabel='validation loss')
    axis.legend()
    figure.savefig(args.output / 'figure2.png')


if __name__ == '__main__':
    main()
