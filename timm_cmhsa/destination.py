"""Where results are written: whole or not at all, and nothing that was there is lost."""
import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Iterator, Optional, Union

import safetensors

from .files import CheckpointError
from .messages import one_line

with contextlib.suppress(ImportError):  # Windows: there, what a killed run left stays
    import fcntl

PICKLE_SUFFIXES = ('.pth', '.pt', '.tar', '.bin')
FILE_SUFFIXES = ('.safetensors', *PICKLE_SUFFIXES)
MODEL_FILES = ('model.safetensors', 'config.json', 'README.md', 'modeling_timm_cmhsa.py')
PREFIX = '.timm_cmhsa-'  # of temporary folders


def check_destination(dst: Union[str, Path], src: Optional[Path], force: bool) -> Path:
    """Resolve the links of a destination; refuse one that cannot be written, or where something would be lost.

    What killed runs left beside it is removed.
    """
    try:
        dst = Path(os.path.realpath(dst))
        remove_leftovers(dst.parent)
        if src is not None and _overlap(dst, src):
            raise CheckpointError(f'{dst} is the source or one lies in the other: choose another destination.')
        if not dst.is_dir() and dst.suffix[1:].isalpha() and dst.suffix not in FILE_SUFFIXES:
            raise CheckpointError(f'{dst.name} has an unknown suffix: use .safetensors or .pth, or none for a folder.')
        _check_replaceable(dst, dst, dst.suffix not in FILE_SUFFIXES, force)
        if not dst.parent.is_dir():
            raise CheckpointError(f'{dst.parent} is not a folder: create it first.')
        if not os.access(dst.parent, os.W_OK):
            raise CheckpointError(f'{dst.parent} is not writable: choose another destination.')
    except OSError as e:
        raise CheckpointError(f'{dst} cannot be written: {one_line(e)}.') from e
    return dst


def _overlap(dst: Path, src: Path) -> bool:
    """Return whether writing would touch the source: the files of a folder can be links, as in the Hub's cache."""
    sources = [src, *(Path(os.path.realpath(path)) for path in src.iterdir())] if os.path.isdir(src) else [src]
    return src in dst.parents or any(
        dst == path or dst in path.parents or (os.path.exists(path) and dst.exists() and dst.samefile(path))
        for path in sources)


def _check_replaceable(found: Path, dst: Path, by_folder: bool, force: bool) -> None:
    """Refuse to replace what is found at a destination, but for an empty folder or, by force, what is of its kind."""
    if not os.path.lexists(found):
        return
    if found.is_symlink() or not (found.is_dir() if by_folder else found.is_file()):
        raise CheckpointError(f'{dst} is not a {"folder" if by_folder else "file"}: choose another destination.')
    if by_folder:
        names = {path.name for path in found.iterdir()}
        if not names:
            return
        strangers = {name for name in names if name not in MODEL_FILES or (found / name).is_dir()}
        if strangers or 'model.safetensors' not in names:
            raise CheckpointError(
                f'{dst} is a folder that holds {min(strangers or names)}, not a converted model: choose a new folder.')
    if not force:
        raise CheckpointError(f'{dst} exists already: choose another destination, or overwrite it with force=True.')


@contextlib.contextmanager
def whole_or_nothing(dst: Path, force: bool) -> Iterator[Path]:
    """Give a path to write a file or folder to, which takes the destination's place when all of it is written.

    Without force, nothing but an empty folder is replaced, even if it appeared during the work. A file is replaced in
    one step; a folder is set aside first, so for a moment there is none. If anything fails or stops the work, the old
    one stays or comes back; after SIGKILL, when the next run writes there.
    """
    try:
        with temporary_folder(dst.parent) as folder:
            new = folder / dst.name
            yield new
            for path in [*new.glob('*')] or [new]:
                with path.open('r+b') as file:
                    os.fsync(file.fileno())
                path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
            _put(new, dst, force)
    except (OSError, safetensors.SafetensorError) as e:
        raise CheckpointError(f'{dst} cannot be written: {one_line(e)}. Nothing was written.') from e


def _put(new: Path, dst: Path, force: bool) -> None:
    """Move what is written to its destination, after another look at what is there."""
    _check_replaceable(dst, dst, new.is_dir(), force)
    if new.is_dir():
        if dst.is_dir() and any(dst.iterdir()):
            old = new.parent.with_name('old') / dst.name
            old.parent.mkdir()
            dst.rename(old)
            _check_replaceable(old, dst, True, force)  # now nobody adds to it
        new.rename(dst)  # The system refuses to replace anything but an empty folder.
    elif force:
        new.replace(dst)
    else:
        try:
            os.link(new, dst)  # refused if there is anything, in one step
        except OSError:  # or the filesystem has no links: an empty file keeps the place for a moment
            dst.touch(exist_ok=False)
            try:
                new.replace(dst)
            except BaseException:
                dst.unlink()
                raise


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Give an empty folder on the same filesystem, and remove it, or say where it keeps what it cannot put back.

    It is `.timm_cmhsa-*/new`. A lock on `.timm_cmhsa-*`, which ends with the process, tells others that it is in use.
    """
    temporary = parent / f'{PREFIX}{secrets.token_hex(8)}'
    lock = None
    try:
        while not temporary.is_dir():  # again, if another run took it for a leftover before it was locked
            temporary.mkdir()
            lock = _lock(temporary, wait=True)
        (temporary / 'new').mkdir()
        yield temporary / 'new'
    finally:
        try:
            _remove(temporary)
        finally:
            _remove(temporary)  # what a Ctrl-C in the midst of the first leaves
            if lock is not None:
                os.close(lock)
            for old in temporary.glob('old/*') if (temporary / 'new').exists() else ():
                raise CheckpointError(
                    f'{parent / old.name} appeared while it was replaced: it stays, what was there is kept in {old}.')


def remove_leftovers(parent: Path) -> None:
    """Remove the temporary folders of runs that were killed, but not those of runs that are alive."""
    for temporary in parent.glob(PREFIX + 16 * '[0-9a-f]'):
        lock = None if temporary.is_symlink() or not temporary.is_dir() else _lock(temporary, wait=False)
        if lock is not None:
            _remove(temporary)
            os.close(lock)


def _lock(folder: Path, wait: bool) -> Optional[int]:
    """Lock a folder until this process ends; return None where others have it or the filesystem has no locks."""
    lock = None
    try:
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if lock is not None:
            os.close(lock)
        return None
    return lock


def _remove(temporary: Path) -> None:
    """Remove a temporary folder, and put a model that was set aside and not replaced back to its place, if possible."""
    with contextlib.suppress(OSError):
        for old in temporary.glob('old/*'):
            if old.is_symlink() or old.parent.is_symlink() or not old.is_dir():
                return  # It is not ours: a folder of strangers can hold one of such a name.
            if (temporary / 'new' / old.name).exists():
                old.rename(temporary.parent / old.name)
                continue
            for name in MODEL_FILES:  # nothing else
                (old / name).unlink(missing_ok=True)
            old.rmdir()
        shutil.rmtree(temporary / 'new', ignore_errors=True)
        for folder in (*temporary.glob('old'), temporary):
            folder.rmdir()
