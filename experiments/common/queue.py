"""Runs side by side, each done once: a line of a CSV file for each, so that a queue can be stopped and started."""
import csv
from argparse import Namespace
from concurrent.futures import as_completed
from typing import Any, Callable, List, Sequence, Tuple

from tqdm import tqdm

from .images import photos
from .pool import make_pool


def run_queue(
        args: Namespace,
        runs: Sequence[Tuple[Any, ...]],
        do: Callable[..., List[Any]],
        columns: Tuple[str, ...],
        held_out: int,
) -> None:
    """Do the runs that have no line in `args.results` yet.

    Args:
        args: Options of `add_queue`, with output, images and seeds.
        runs: Arguments of every run, which its line begins with.
        do: Does a run, given its arguments, data_dir and output, and returns its line.
        columns: Names of the columns.
        held_out: Number of images that judge.
    """
    done = {tuple(line[:len(runs[0])]) for line in csv.reader(args.results.open())} if args.results.exists() else set()
    todo = [run for run in runs if tuple(map(str, run)) not in done]
    for seed in range(args.seeds):
        photos(args.output, args.images, seed, args.data_dir, held_out)  # here, as runs share their images
    with make_pool(args.workers) as pool:
        futures = [pool.submit(do, *run, args.data_dir, args.output) for run in todo]
        for future in tqdm(as_completed(futures), 'runs', total=len(futures)):
            lines = [future.result()] if args.results.exists() else [columns, future.result()]
            with args.results.open('a', newline='') as file:
                csv.writer(file, lineterminator='\n').writerows(lines)
