"""Figure 2 of the paper, phase 2 with and without warm-up: python examples/figure2.py

Validation loss of the attention model on 300 digits, from the converted phase 1 and from a random start, with and
without a warm-up of the learning rate, which is otherwise that of CMHSA-5 in table1.py for all four; mean and range of
5 seeds. Phase 1 and the choice of the rate are those of table1.py, and not done again.
"""
import argparse
from pathlib import Path
from typing import Any, Dict, List

import matplotlib
import numpy as np
from runs import Run, run_all
from table1 import ROWS, TUNING_SIZE, add_options, check_options, choose_rates, plan, spread

matplotlib.use('Agg')
from matplotlib import pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    args = parser.parse_args()
    check_options(parser, args)
    curves = plan_curves(choose_rates(args), args)
    results = iter(run_all([run for runs in curves.values() for run in runs], args.output / 'runs', 'figure 2'))
    histories = {title: [next(results) for _ in runs] for title, runs in curves.items()}
    lines = ['| start | top-1 on the test images, % |', '|---|---:|']
    lines += [f"| {title} | {spread([result['test']['top1'] for result in seeds])} |"
              for title, seeds in histories.items()]
    table = '\n'.join(lines) + '\n'
    (args.output / 'figure2.md').write_text(table)
    print(table)
    plot(histories, args.output / 'figure2.png')


def plan_curves(rates: Dict[str, float], args: argparse.Namespace) -> Dict[str, List[Run]]:
    row = next(row for row in ROWS if row.title == 'CMHSA-5')
    curves: Dict[str, List[Run]] = {}
    for start in ('converted', 'random'):
        for warmup in ('with', 'without'):
            curves[f'{start}, {warmup} warm-up'] = runs = []
            for seed in range(args.seeds):
                run = plan(row, rates, TUNING_SIZE, seed, args.images_per_phase)
                stage = run.stage._replace(eval_every=1)
                if warmup == 'without':
                    stage = stage._replace(warmup_epochs=0)
                runs.append(run._replace(stage=stage, phase1=run.phase1 if start == 'converted' else None))
    return curves


def plot(histories: Dict[str, List[Dict[str, Any]]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 5), layout='constrained')
    for (title, seeds), style in zip(histories.items(), ('C0-', 'C0--', 'C1-', 'C1--')):
        epochs = [row['epoch'] for row in seeds[0]['history']]
        losses = np.array([[row['loss'] for row in result['history']] for result in seeds])
        axis.plot(epochs, losses.mean(axis=0), style, label=title)
        axis.fill_between(epochs, losses.min(axis=0), losses.max(axis=0), color=style[:2], alpha=0.15)
    axis.set(xlabel='epoch', ylabel='validation loss')
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == '__main__':
    main()
