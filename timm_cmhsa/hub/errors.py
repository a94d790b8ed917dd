"""Failures of the Hugging Face Hub, explained in one line and without the token or a password."""
import contextlib
import errno
import re
import traceback
from typing import Iterator, Optional, Sequence

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENAMETOOLONG)

REASONS = {
    GatedRepoError: 'it is gated: ask for access on its page, and log in.',
    RevisionNotFoundError: 'it has no such revision.',
    RepositoryNotFoundError: 'there is no such repository, or it is private and the token gives no right to it.',
}


_CREDENTIALS = re.compile(r'(?<=:/)(/?)[^/\s]+@')  # also in https:/me:secret@host, an address as Path writes it


class HubError(RuntimeError):
    """The Hub was not reached or refused; the message says why and what to do, in one line, without the token."""


def find_token() -> Optional[str]:
    """Return the token that huggingface_hub finds, if any."""
    try:
        token = get_token()
        token_is_text = token is None or (token.isascii() and token.isprintable())
    except (OSError, ValueError):  # of a file that cannot be read, or is no text
        token_is_text = False
    if not token_is_text:
        raise HubError('the token has characters that no token has: run `hf auth login`, or set HF_TOKEN.')
    return token


def without_credentials(text: str) -> str:
    """Return a text without the user names and passwords of its addresses, https://me:secret@host."""
    return _CREDENTIALS.sub(r'\1', text)


@contextlib.contextmanager
def hub_errors(repo_id: str, right: str) -> Iterator[None]:
    """Turn what huggingface_hub, its HTTP client and hf_xet raise, which has no common base, into a `HubError`.

    To be used around calls of huggingface_hub alone, which need the right to read or to write the repository.
    """
    try:
        yield
    except (OSError, HTTPError, ValueError, RuntimeError) as e:  # hf_xet raises RuntimeError
        token = get_token()
        trace = ''.join(traceback.format_exception(e))
        leaks = without_credentials(trace) != trace or (token is not None and token in trace)  # a server may echo it
        raise HubError(f'{repo_id}: {_explain(e, right)}') from (None if leaks else e)


def _explain(error: BaseException, right: str) -> str:
    causes = [error]
    while (cause := causes[-1].__cause__ or (None if causes[-1].__suppress_context__ else causes[-1].__context__)):
        causes.append(cause)
    text = ' '.join(str(causes[-1] if isinstance(error, RuntimeError) else error).split()).rstrip('.')
    token = get_token()
    text = without_credentials(text.replace(token, '***') if token else text)
    status = _status(causes, text)
    disk = next((e for e in causes if isinstance(e, OSError) and e.errno in DISK_ERRORS), None)
    if any(isinstance(e, OfflineModeIsEnabled) for e in causes):
        return 'HF_HUB_OFFLINE is set, so that the Hub is not asked: unset it.'
    if disk is not None:
        return f'a file of huggingface_hub cannot be written or read ({disk.strerror}): make room, or set HF_HOME.'
    for kind, reason in REASONS.items():
        if isinstance(error, kind):
            return reason
    if status == 401:
        return 'the Hub does not accept the token (401): run `hf auth login`, or set HF_TOKEN.'
    if status == 403:
        return f'the token gives no right to do this (403): it needs the right to {right} this repository.'
    if status == 429 or status >= 500:
        return f'the Hub answers with error {status}: try again later.'
    if status:
        return f'the Hub refuses with error {status}: {text}.'
    if isinstance(error, (OSError, HTTPError)):
        endpoint = without_credentials(constants.ENDPOINT)
        return f'no connection to the Hub at {endpoint} ({text}): check the network, and try again.'
    return f'{text}.'


def _status(causes: Sequence[BaseException], text: str) -> int:
    """Return the HTTP status of the answer, 0 if there was none."""
    for error in causes:
        if (response := getattr(error, 'response', None)) is not None:
            return response.status_code
    told = re.search(r'HTTP status \w+ error \((\d{3}) ', text)  # hf_xet has it in the text only
    return int(told.group(1)) if told else 0
