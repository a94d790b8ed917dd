"""Both phases on the digits, and each model alone for as many epochs, over seeds: python experiments/two_phase_seeds.py

Every seed has its own training images, places, weights and order. The output folder gets the table, and a folder for
each run. What was stopped goes on where it stopped.
"""
from typing import Any, Dict, List

from common.options import make_parser
from common.report import markdown_table, seeds_note, show, spread

from timm_cmhsa.train import train_two_phases

ATTENTION = dict(patch_size=8, in_chans=1, hidden_chans=1, depth=4, num_heads=11, head_dim=48)  # those of phase 2
ROWS: Dict[str, Dict[str, Any]] = {
    'two phases': {},
    'phase 1 alone': dict(switch=1),
    'attention alone': dict(switch=1, model='cmhsa_attn_soft', model_kwargs=ATTENTION, lr=1e-3),
}


def main() -> None:
    args = make_parser(__doc__, 'two_phase_seeds', seeds=3).parse_args()
    results = {title: [train_two_phases(output=args.output / f'{title.replace(" ", "_")}{seed}', seed=seed, **options)
                       for seed in range(args.seeds)] for title, options in ROWS.items()}
    show(markdown(results), args.output / 'results.md')


def markdown(results: Dict[str, List[Dict[str, Any]]]) -> str:
    rows = []
    for title, seeds in results.items():
        columns = ['phase1_top1', 'converted_top1', 'top1'] if title == 'two phases' else ['top1']
        cells = [spread([each[name] for each in seeds], 2) for name in columns]
        seconds = sum(each['seconds'] for each in seeds) / len(seeds)
        rows.append([title, *['-'] * (3 - len(cells)), *cells, f'{seconds:.0f} s'])
    head = ['training', 'phase 1', 'converted', 'top-1, %', 'time']
    return markdown_table(head, rows) + seeds_note(len(next(iter(results.values()))))


if __name__ == '__main__':
    main()
