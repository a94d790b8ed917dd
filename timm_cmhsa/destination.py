"""Where results are written: whole or not at all."""
import contextlib
import os
import shutil
from pathlib import Path
from typing import Iterator, Optional

import safetensors

from .files import CheckpointError, one_line

PICKLE_SUFFIXES = ('.pth', '.pt', '.tar', '.bin')


def check_destination(dst: Path, src: Optional[Path], force: bool) -> None:
    """Refuse a destination that cannot be written or would lose something, before any work is done."""
    if src is not None and (dst == src or dst in src.parents or src in dst.parents):
        raise CheckpointError(f'{dst} is the source or one lies in the other: choose another destination.')
    if dst.is_dir():
        names = {entry.name for entry in dst.iterdir()}
        if names and not {'model.safetensors'} <= names <= {'model.safetensors', 'config.json', 'README.md'}:
            raise CheckpointError(
                f'{dst} is a folder that holds {min(names)}, not a converted model: choose a new folder.')
    elif dst.suffix[1:].isalpha() and dst.suffix not in ('.safetensors', *PICKLE_SUFFIXES):
        raise CheckpointError(f'{dst.name} has an unknown suffix: use .safetensors or .pth, or none for a folder.')
    if dst.exists() and not force and not (dst.is_dir() and not names):
        raise CheckpointError(f'{dst} exists already: choose another destination, or overwrite it with force=True.')
    if not dst.parent.is_dir():
        raise CheckpointError(f'{dst.parent} is not a folder: create it first.')
    if not os.access(dst.parent, os.W_OK):
        raise CheckpointError(f'{dst.parent} is not writable: choose another destination.')


@contextlib.contextmanager
def whole_or_nothing(dst: Path) -> Iterator[Path]:
    """Give a path to write a file or folder to, which replaces the destination when all of it is written.

    Killed at any moment, it leaves the old destination or none.
    """
    partial = dst.with_name(f'.{dst.name}.partial')
    try:
        _remove(partial)  # what a killed run left
        yield partial
        for path in [*partial.glob('*')] or [partial]:
            with path.open('rb') as file:
                os.fsync(file.fileno())
        replace(partial, dst)
    except (OSError, safetensors.SafetensorError) as e:
        raise CheckpointError(f'{dst} cannot be written: {one_line(e)}. Nothing was written.') from e
    finally:
        with contextlib.suppress(OSError):
            _remove(partial)


def replace(partial: Path, dst: Path) -> None:
    """Move a finished file or folder into the place of another."""
    old = dst.with_name(f'.{dst.name}.old')
    if dst.is_dir():  # It cannot be replaced in one step: there is a moment without it.
        _remove(old)
        dst.rename(old)
    try:
        partial.replace(dst)
    except OSError:
        if old.exists() and not dst.exists():
            old.rename(dst)
        raise
    with contextlib.suppress(OSError):
        _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
