"""The table of examples/two_phase.py over several seeds: python experiments/two_phase_seeds.py

Every seed has its own training images, positions, weights and order; further options are those of the example. What was
stopped goes on where it stopped.
"""
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

from common.options import make_parser
from common.report import markdown_table, seeds_note, spread, write_whole

EXAMPLE = Path(__file__).parents[1] / 'examples' / 'two_phase.py'


def main() -> None:
    args, options = make_parser(__doc__, 'two_phase_seeds', seeds=3).parse_known_args()
    results = []
    for seed in range(args.seeds):
        folder = args.output / f'seed{seed}'
        subprocess.run([sys.executable, EXAMPLE, '--seed', str(seed), '--output', folder, *options], check=True)
        results.append(json.loads((folder / 'results.json').read_text()))
    table = markdown(results)
    write_whole(args.output / 'results.md', table)
    print(table)


def markdown(results: List[List[Dict[str, Any]]]) -> str:
    rows = [[seeds[0]['training'], str(seeds[0]['epochs']), *(
        spread([row[key] for row in seeds], digits) for key, digits in (('top1', 2), ('top5', 2), ('seconds', 0)))]
        for seeds in zip(*results)]
    return markdown_table(['training', 'epochs', 'top-1, %', 'top-5, %', 'time, s'], rows) + seeds_note(len(results))


if __name__ == '__main__':
    main()
