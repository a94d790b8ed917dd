"""Errors that are shown in one line, and tables on the screen."""
from typing import Any, Iterable, Sequence


class CheckpointError(ValueError):
    """A file cannot be read, converted or written. The message gives the reason and the remedy, in one line."""


class HubError(RuntimeError):
    """The Hub was not reached or refused. The message gives the reason and the remedy, in one line."""


class VerificationError(RuntimeError):
    """The converted model differs from its source; nothing was written."""


def one_line(error: BaseException, length: int = 200) -> str:
    """Return an error's message in one line, with a full stop."""
    text = getattr(error, 'strerror', None) or str(error) or type(error).__name__
    line = ' '.join(printable(text, ' ').split()).rstrip('.')
    return f'{line[:length]}...' if len(line) > length else f'{line}.'


def printable(text: Any, instead: str = '?') -> str:
    """Return text in one line, as names of files may hold anything."""
    return ''.join(char if char.isprintable() else instead for char in str(text))


def text_table(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as text with aligned columns."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in cells)
