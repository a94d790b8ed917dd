"""Files of models: a model is written whole or not at all, and nothing is replaced unasked."""
import contextlib
import csv
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Sequence, Union

import safetensors
import timm

from .errors import CheckpointError, one_line

MODEL_SUFFIXES = ('.safetensors', '.pth', '.pt', '.tar', '.bin')  # a model of another suffix is a folder
FILE_SUFFIXES = (*MODEL_SUFFIXES, '.csv', '.onnx', '.png')

PathLike = Union[str, Path]


def read_json(path: Path) -> Dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(
            f'{path} cannot be read: {one_line(e)} Give a file, or a folder with config.json, like OUT/model.') from e
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} is not a model configuration.')
    return content


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write rows in UTF-8. Names of files keep bytes that are none."""
    with open(path, 'w', newline='', encoding='utf-8', errors='surrogateescape') as file:
        csv.writer(file).writerows(rows)


def local_path(source: PathLike) -> Path:
    return Path(str(source).removeprefix('local-dir:'))


def is_ours(name: str) -> bool:
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith('timm_cmhsa.')


def check_destination(dst: PathLike, force: bool) -> Path:
    """Return the destination; raise CheckpointError if it is there without `force`, or is no model of this package."""
    dst = Path(os.path.realpath(dst))
    is_file = dst.suffix in FILE_SUFFIXES
    if not os.path.isdir(dst.parent):
        raise CheckpointError(f'{dst.parent} is not a folder: create it first.')
    if not os.path.lexists(dst) or (dst.is_dir() and not is_file and not any(dst.iterdir())):
        return dst
    if not (dst.is_file() if is_file else _holds_our_model(dst)):
        raise CheckpointError(f'{dst} already exists and is not a model of timm_cmhsa: choose another destination.')
    if not force:
        raise CheckpointError(
            f'{dst} already exists: choose another destination, or replace it with force=True (--force).')
    return dst


def _holds_our_model(folder: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        config = read_json(folder / 'config.json')
        return bool(config.get('attend')) or is_ours(str(config.get('architecture')))
    return False


@contextlib.contextmanager
def replacing(dst: Path, force: bool) -> Iterator[Path]:
    """Give a temporary path. What is written there takes the place of `dst` in the end, if nothing else did."""
    token = secrets.token_hex(4)
    new, old = (dst.with_name(f'.timm_cmhsa-{token}-{which}{dst.suffix}') for which in ('new', 'old'))
    try:
        new.touch()
        mode = new.stat().st_mode  # by the user's umask, which safetensors does not heed
        new.unlink()
        yield new
        for path in new.iterdir() if new.is_dir() else [new]:
            path.chmod(mode)
        check_destination(dst, force)
        if force and dst.is_dir():
            try:
                dst.rename(old)
                new.rename(dst)
            except BaseException:
                if not os.path.lexists(dst):
                    old.rename(dst)
                raise
            shutil.rmtree(old)
        else:
            new.replace(dst)  # By the system's rules, a folder takes the place of nothing but an empty one.
    except (OSError, RuntimeError, safetensors.SafetensorError) as e:  # torch.save raises RuntimeError on a full disk
        kept = f' The old model is at {old}.' if old.is_dir() else ''
        raise CheckpointError(f'{dst} cannot be written: {one_line(e)}{kept}') from e
    finally:
        shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)
