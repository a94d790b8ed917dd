"""Processes to train in, side by side."""
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context, parent_process


def make_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of processes without progress bars, which end with this one.

    Where there is a fork server, it imports everything once for all of them, and for later pools too.
    """
    os.environ['TQDM_DISABLE'] = '1'  # read when tqdm is imported
    method = 'forkserver' if 'forkserver' in get_all_start_methods() else 'spawn'
    return ProcessPoolExecutor(workers, get_context(method), end_with_parent)


def end_with_parent() -> None:
    """End this process when the one that started it is killed: two of a kind would write to the same checkpoints."""
    def wait() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)
    threading.Thread(target=wait, daemon=True).start()
