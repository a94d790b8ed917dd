"""Processes to train in, side by side."""
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_all_start_methods, get_context, parent_process
from typing import Iterator

from tqdm import tqdm


@contextmanager
def make_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes without progress bars, which end with this one, or at once on an error or Ctrl-C.

    Where there is a fork server, it imports everything once for all of them, and for later pools too.
    """
    os.environ['TQDM_DISABLE'] = '1'  # read when tqdm is imported
    method = 'forkserver' if 'forkserver' in get_all_start_methods() else 'spawn'
    pool = ProcessPoolExecutor(workers, get_context(method), end_with_parent)
    try:
        yield pool
    except KeyboardInterrupt:
        stop(pool)
        raise SystemExit('\nStopped. The same command goes on from here.') from None
    except BaseException:
        stop(pool)
        raise
    pool.shutdown()


def stop(pool: ProcessPoolExecutor) -> None:
    """End all processes of a pool; what they were training has its checkpoints."""
    pool.shutdown(wait=False, cancel_futures=True)
    for process in active_children():
        process.terminate()


def end_with_parent() -> None:
    """End this process when the one that started it is killed: two of a kind would write to the same checkpoints."""
    def wait() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends the others
    tqdm.set_lock(threading.RLock())  # its own, between processes, would be left behind
    threading.Thread(target=wait, daemon=True).start()
