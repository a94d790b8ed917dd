"""The table of examples/two_phase.py over several seeds: python benchmarks/two_phase.py

Every seed has its own training images, positions, weights and order; the options are those of the example. It resumes.
"""
import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

EXAMPLE = Path(__file__).parents[1] / 'examples' / 'two_phase.py'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--output', type=Path, default=Path('output/seeds'))
    args, options = parser.parse_known_args()
    results = []
    for seed in args.seeds:
        folder = args.output / f'seed{seed}'
        subprocess.run([sys.executable, EXAMPLE, '--seed', str(seed), '--output', folder, *options], check=True)
        results.append(json.loads((folder / 'results.json').read_text()))
    table = results_table(results)
    print(table)
    (args.output / 'results.md').write_text(table)


def results_table(results: List[List[Dict[str, float]]]) -> str:
    lines = ['| training | epochs | top-1, % | top-5, % | time, s |', '|---|---:|---:|---:|---:|']
    for rows in zip(*results):
        columns = [f"{statistics.mean(row[key] for row in rows):.{digits}f} ± "
                   f"{statistics.stdev(row[key] for row in rows) if len(rows) > 1 else 0:.{digits}f}"
                   for key, digits in (('top1', 2), ('top5', 2), ('seconds', 0))]
        lines.append(f"| {rows[0]['training']} | {rows[0]['epochs']} | {' | '.join(columns)} |")
    seeds = len(results)
    return '\n'.join(lines) + f'\n\nMean ± standard deviation over {seeds} seeds.\n'


if __name__ == '__main__':
    main()
