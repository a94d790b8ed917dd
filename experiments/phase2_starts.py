"""Where should phase 2 start: sharpness, spare heads, zero key? python experiments/phase2_starts.py

Phase 2 of CMHSA-3 and CMHSA-5 as in table1.py, on 300 digits with 5 seeds, from the same phase-1 models. Every start
has its own best learning rate of the same few, by the validation images of one more seed; attention alone has that of
table1.py, with and without a zero key. The runs that table1.py has done are not done again.
"""
import argparse
from typing import Dict, List, NamedTuple, Optional

from common.report import markdown_table, spread, write_whole
from common.rows import (
    ATTENTION_ALONE,
    CMHSA3,
    CMHSA5,
    ROWS,
    TUNING_SEEDS,
    TUNING_SIZE,
    Rates,
    Row,
    choose_rates,
    make_row_parser,
    parse_row_args,
    plan,
)
from common.runs import Result, Run, best_rates, run_all, top1

TWO_PHASES = (CMHSA3, CMHSA5)


class Start(NamedTuple):
    """What the conversion makes of phase 1's model; the default is exact, with a zero key, and no head to spare."""
    title: str
    num_heads: int = 9
    sharpness: Optional[float] = None
    zero_key: bool = True


STARTS = (
    Start('exact'),
    Start('exact, 3 spare heads', num_heads=12),
    Start('sharpness 8', sharpness=8.),
    Start('sharpness 8, 3 spare heads', sharpness=8., num_heads=12),
    Start('exact but at the borders: no zero key', zero_key=False),
)


def main() -> None:
    args = parse_row_args(make_row_parser(__doc__))
    rates = choose_rates(ROWS, args.learning_rates, args.images_per_phase, args.output / 'runs')
    table = '\n'.join([
        compare_starts(rates, args),
        compare_zero_keys(rates[ATTENTION_ALONE.title], args),
        f'Top-1, mean ± standard deviation over {args.seeds} seeds, %.\n',
    ])
    write_whole(args.output / 'phase2_starts.md', table)
    print(table)


def compare_starts(rates: Dict[str, Rates], args: argparse.Namespace) -> str:
    """Train phase 2 of both kernels from every start, each at its own best learning rate; returns the table."""
    def plan_start(start: Start, row: Row, rate: float, seed: int) -> Run:
        run = plan(row, (rates[row.title][0], rate), TUNING_SIZE, seed, args.images_per_phase)
        if start.num_heads != 9:
            model_args = {**run.stage.model_args, 'num_heads': start.num_heads}
            run = run._replace(stage=run.stage._replace(model_args=model_args))
        return run._replace(sharpness=start.sharpness, zero_key=start.zero_key)

    best = best_rates({start.title: {rate: [plan_start(start, row, rate, TUNING_SEEDS[0]) for row in TWO_PHASES]
                                     for rate in args.learning_rates} for start in STARTS}, args.output / 'runs')
    runs = {(start.title, row.title): [plan_start(start, row, best[start.title], seed) for seed in range(args.seeds)]
            for start in STARTS for row in TWO_PHASES}
    results = run_all(runs, args.output / 'runs', 'starts')
    head = [f'{row.title}, {when}' for row in TWO_PHASES for when in ('start', 'end')]
    rows = [[start.title, f'{best[start.title]:g}',
             *(cell for row in TWO_PHASES for cell in start_and_end(results[start.title, row.title]))]
            for start in STARTS]
    return markdown_table(['start of phase 2', 'learning rate', *head], rows)


def compare_zero_keys(rates: Rates, args: argparse.Namespace) -> str:
    """Train attention alone with and without a zero key; returns the table."""
    alone = [plan(ATTENTION_ALONE, rates, TUNING_SIZE, seed, args.images_per_phase) for seed in range(args.seeds)]
    runs = {'zero key': alone, 'no zero key': [run._replace(zero_key=False) for run in alone]}
    results = run_all(runs, args.output / 'runs', 'attention alone')
    return markdown_table(
        ['attention alone', 'learning rate', 'start', 'end'],
        [[title, f'{rates[0]:g}', *start_and_end(each)] for title, each in results.items()])


def start_and_end(results: List[Result]) -> List[str]:
    return [spread(top1(results, when)) for when in ('before', 'test')]


if __name__ == '__main__':
    main()
