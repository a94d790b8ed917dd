"""Makes text from files and other packages fit to print: escaped, in one line, and short."""
import reprlib
from typing import Any, Iterable

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 100


def shorten(value: Any) -> str:
    """Return the repr of a value, shortened and escaped."""
    text = printable(_repr.repr(value))
    return text if len(text) <= 200 else f'{text[:200]}...'


def shorten_names(names: Iterable[str]) -> str:
    """Return the first five names in one line, shortened and escaped."""
    names = sorted(names)
    shown = ', '.join(shorten(name)[1:-1] for name in names[:5])
    return shown if len(names) <= 5 else f'{shown} and {len(names) - 5} more'


def printable(text: str) -> str:
    """Escape whatever moves the cursor, breaks the line or cannot be encoded."""
    return ''.join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, for use in another one."""
    lines = (getattr(error, 'strerror', None) or str(error)).strip().splitlines() or [type(error).__name__]
    line = lines[0].rstrip('.')
    return printable(line if len(line) <= 500 else f'{line[:500]}...')
