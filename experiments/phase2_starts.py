"""Where should phase 2 start: sharpness, spare heads, zero key? python examples/phase2_starts.py

Phase 2 of CMHSA-3 and CMHSA-5 as in table1.py, on 300 digits with 5 seeds, from the same phase-1 models. Every start
has its own best learning rate of the same few, by the validation images of one more seed; attention alone has that of
table1.py, with and without a zero key. The runs that table1.py has done are not done again.
"""
import argparse
import statistics
from typing import Dict, NamedTuple, Optional

from runs import Run, run_all
from table1 import (
    ATTN,
    ROWS,
    TUNING_SEEDS,
    TUNING_SIZE,
    Row,
    add_options,
    check_options,
    choose_rates,
    plan,
    spread,
)


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
TWO_PHASES = [row for row in ROWS if len(row.phases) == 2]
ATTENTION_ALONE = next(row for row in ROWS if row.phases == (ATTN,))


def main() -> None:
    args = parse_args()
    rates = choose_rates(args)
    tuned = tune(rates, args)
    runs = [plan_start(start, row, {**rates, row.title: tuned[start]}, seed, args)
            for start in STARTS for row in TWO_PHASES for seed in range(args.seeds)]
    alone = [plan(ATTENTION_ALONE, rates, TUNING_SIZE, seed, args.images_per_phase) for seed in range(args.seeds)]
    runs += alone + [run._replace(zero_key=False) for run in alone]
    results = iter(run_all(runs, args.output / 'runs', 'starts'))

    def cell() -> str:
        values = [next(results) for _ in range(args.seeds)]
        return ' | '.join(spread([value[when]['top1'] for value in values]) for when in ('before', 'test'))

    titles = [row.title for row in TWO_PHASES]
    lines = ['| start of phase 2 | learning rate | ' + ' | '.join(
        f'{title}, {when}' for title in titles for when in ('start', 'end')) + ' |', '|---|---:|---:|---:|---:|---:|']
    lines += [f'| {start.title} | {tuned[start]:g} | {cell()} | {cell()} |' for start in STARTS]
    lines += ['', '| attention alone | learning rate | start | end |', '|---|---:|---:|---:|']
    lines += [f'| {title} | {rates[ATTENTION_ALONE.title]:g} | {cell()} |' for title in ('zero key', 'no zero key')]
    table = '\n'.join(lines) + f'\n\nTop-1, mean ± standard deviation over {args.seeds} seeds, %.\n'
    (args.output / 'phase2_starts.md').write_text(table)
    print(table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    args = parser.parse_args()
    check_options(parser, args)
    return args


def tune(rates: Dict[str, float], args: argparse.Namespace) -> Dict[Start, float]:
    """Every start's best learning rate, over both kernels."""
    runs = {(start, rate): [plan_start(start, row, {**rates, row.title: rate}, TUNING_SEEDS[0], args)
                            for row in TWO_PHASES] for start in STARTS for rate in args.learning_rates}
    results = iter(run_all([run for pair in runs.values() for run in pair], args.output / 'runs', 'learning rates'))
    top1 = {key: statistics.mean(next(results)['validation']['top1'] for _ in pair) for key, pair in runs.items()}
    return {start: max(args.learning_rates, key=lambda rate: top1[start, rate]) for start in STARTS}


def plan_start(start: Start, row: Row, rates: Dict[str, float], seed: int, args: argparse.Namespace) -> Run:
    run = plan(row, rates, TUNING_SIZE, seed, args.images_per_phase)
    if start.num_heads != 9:
        run = run._replace(stage=run.stage._replace(model_args={**run.stage.model_args, 'num_heads': start.num_heads}))
    return run._replace(sharpness=start.sharpness, zero_key=start.zero_key)


if __name__ == '__main__':
    main()
