"""A model from the Hugging Face Hub, into huggingface_hub's cache."""
from pathlib import Path
from typing import Optional, Sequence

from huggingface_hub import hf_hub_download
from huggingface_hub.utils import EntryNotFoundError, LocalEntryNotFoundError

from ..files import WEIGHT_NAMES
from ..version import __version__
from .errors import HubError, find_token, hub_errors

PREFIXES = ('hf-hub:', 'hf_hub:')


def download(source: str) -> Path:
    """Fetch a model of the Hub, `hf-hub:USER/NAME[@REVISION]`; return the folder of its config.json and weights."""
    repo_id, _, revision = source[len(PREFIXES[0]):].partition('@')
    if repo_id.count('/') != 1:
        raise HubError(f'{source} is not the name of a model on the Hub: expected hf-hub:USER/NAME.')
    find_token()
    _download_first(repo_id, ['config.json'], revision or None)
    return _download_first(repo_id, WEIGHT_NAMES, revision or None).parent


def _download_first(repo_id: str, names: Sequence[str], revision: Optional[str]) -> Path:
    no_connection = None
    with hub_errors(repo_id, 'read'):
        for name in names:
            try:
                return Path(hf_hub_download(
                    repo_id, name, revision=revision, library_name='timm_cmhsa', library_version=__version__))
            except LocalEntryNotFoundError as e:  # one of the other names may be in the cache
                no_connection = e
            except EntryNotFoundError:
                continue
        if no_connection is not None:
            raise no_connection
    raise HubError(f'{repo_id} has no {" or ".join(names)}: it is not a model of timm.')
