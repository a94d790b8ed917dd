"""Errors that are shown in one line, and tables on the screen."""
from typing import Sequence


class CheckpointError(ValueError):
    """A file cannot be read, converted or written. The message gives the reason and the remedy, in one line."""


class HubError(RuntimeError):
    """The Hub was not reached or refused. The message gives the reason and the remedy, in one line."""


class VerificationError(RuntimeError):
    """The converted model differs from its source; nothing was written."""


def one_line(error: BaseException, length: int = 200) -> str:
    """Return an error's message in one line, with a full stop."""
    text = getattr(error, 'strerror', None) or str(error) or type(error).__name__
    line = ' '.join(''.join(char if char.isprintable() else ' ' for char in text).split()).rstrip('.')
    return f'{line[:length]}...' if len(line) > length else f'{line}.'


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in rows)
