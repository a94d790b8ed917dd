"""Models to and from the Hugging Face Hub: a folder that timm loads, with a model card, in one commit."""
import contextlib
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple, Union

import timm
import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    validate_repo_id,
)
from timm.models._hub import save_config_for_hf
from timm.utils import unwrap_model
from torch import nn

from .checkpoints import PICKLE_SUFFIXES, WEIGHT_NAMES, CheckpointError, check_destination, write_checkpoint
from .cmhsa import Cmhsa
from .model_card import model_card
from .version import __version__

PREFIXES = ('hf-hub:', 'hf_hub:')
WEIGHT_SUFFIXES = ('.safetensors', '.bin', '.pth', '.pt', '.ckpt', '.onnx', '.h5', '.msgpack', '.gguf')

_logger = logging.getLogger(__name__)


class HubError(RuntimeError):
    """The Hub was not reached or refused; the message says why and what to do, in one line, without the token."""


def download(source: str) -> Path:
    """Fetch a model of the Hub into huggingface_hub's cache.

    Args:
        source: `hf-hub:USER/NAME` or `hf-hub:USER/NAME@revision`.

    Returns:
        Folder that holds its config.json and its weights.

    Raises:
        HubError: If it cannot be had.
    """
    repo_id, _, revision = source[len(PREFIXES[0]):].partition('@')
    with _explained(repo_id):
        _download_first(repo_id, ['config.json'], revision or None)
        return _download_first(repo_id, WEIGHT_NAMES, revision or None).parent


def _download_first(repo_id: str, names: Sequence[str], revision: Optional[str]) -> Path:
    for name in names:
        try:
            return Path(hf_hub_download(
                repo_id, name, revision=revision, library_name='timm_cmhsa', library_version=__version__))
        except LocalEntryNotFoundError:  # that is: no connection
            raise
        except EntryNotFoundError:
            continue
    raise HubError(f'{repo_id} has no {" or ".join(names)}: it is not a model of timm.')


def save_for_hub(
        model: nn.Module,
        folder: Union[str, Path],
        repo_id: str = 'USER/NAME',
        *,
        force: bool = False,
        **about: Any,
) -> None:
    """Write what is published of a model: model.safetensors, config.json and README.md.

    `timm.create_model('local-dir:FOLDER', pretrained=True)` loads it, and so does `hf-hub:USER/NAME` once it is there.

    Args:
        model: A model of this package, phase 1 or 2; wrappers such as DistributedDataParallel's are taken off.
        folder: New folder.
        repo_id: Name on the Hub that the model card speaks of.
        force: Overwrite an earlier model in the folder.
        **about: Label names, license and the like, see `timm_cmhsa.hub.describe`.

    Raises:
        CheckpointError: If timm could not make this model again, or the folder cannot be written. Nothing was written.
    """
    folder, model = Path(folder).resolve(), _unwrap(model)
    if folder.suffix in ('.safetensors', *PICKLE_SUFFIXES):
        raise CheckpointError(f'{folder} is the name of a file: give the name of a folder.')
    check_destination(folder, None, force)
    state_dict = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {
        'format': 'pt', 'architecture': model.pretrained_cfg['architecture'],
        'model_args': json.dumps(_json_args(model)), 'timm_cmhsa_version': __version__}
    write_checkpoint(folder, state_dict, metadata, lambda partial: describe(model, partial, repo_id, **about))


def describe(
        model: Cmhsa,
        folder: Path,
        repo_id: str,
        *,
        label_names: Optional[Sequence[str]] = None,
        license: Optional[str] = None,
        datasets: Sequence[str] = (),
        base_model: Optional[str] = None,
        results: Optional[Mapping[str, float]] = None,
        details: Optional[Mapping[str, Any]] = None,
) -> None:
    """Write config.json and README.md beside a model's weights.

    Args:
        model: The model; its weights are not looked at.
        folder: Where its weights are.
        repo_id: `USER/NAME` on the Hub.
        label_names: Names of the classes, in their order; by default those of its pretrained configuration.
        license: Identifier that the Hub knows; by default that of its pretrained configuration.
        datasets: The training data's names on the Hub, such as uoft-cs/cifar100.
        base_model: Model on the Hub that this one was made from.
        results: Accuracies in percent by name, such as Top-1.
        details: How it was made, by heading; `ConversionReport.details`, for one.

    Raises:
        CheckpointError: If the names are not as many as the classes.
    """
    config = {key: value for key, value in model.pretrained_cfg.items() if value is not None}
    if label_names is None and len(config.get('label_names', ())) == model.num_classes:  # else of an earlier head
        label_names = config.get('label_names')
    check_label_names(label_names, model.num_classes)
    license = license or config.get('license') or 'apache-2.0'
    for key in ('architecture', 'label_names', 'source', 'file', 'hf_hub_id', 'hf_hub_filename', 'url', 'tag'):
        config.pop(key, None)
    config.update(
        input_size=(model.in_chans, *model.patch_embed.img_size), num_classes=model.num_classes, license=license)
    save_config_for_hf(
        model, folder / 'config.json', model_args=_json_args(model),
        model_config={'label_names': label_names, 'pretrained_cfg': config})
    (folder / 'README.md').write_text(
        model_card(model, repo_id, license, datasets, base_model, results, details), encoding='utf-8')


def check_label_names(label_names: Optional[Sequence[str]], num_classes: int) -> None:
    if label_names is not None and len(label_names) != num_classes:
        raise CheckpointError(f'{len(label_names)} label names were given for {num_classes} classes.')
    if label_names is not None and len(set(label_names)) < len(label_names):
        twice = next(name for name in label_names if list(label_names).count(name) > 1)
        raise CheckpointError(f'the label name {twice!r} was given more than once.')


def push_to_hub(
        model: nn.Module,
        repo_id: str,
        *,
        private: bool = False,
        revision: Optional[str] = None,
        create_pr: bool = False,
        commit_message: str = 'Add model',
        overwrite_readme: bool = False,
        overwrite_model: bool = False,
        **about: Any,
) -> str:
    """Publish a model, so that `timm.create_model('hf-hub:USER/NAME', pretrained=True)` loads it.

    The token is the one that huggingface_hub finds: of `hf auth login`, or in HF_TOKEN.

    Args:
        model: A model of this package, phase 1 or 2, before or after more training.
        repo_id: `USER/NAME`; made if it does not exist.
        private: Make a private repository.
        revision: Branch to push to, by default main; made if it does not exist.
        create_pr: Open a pull request instead of a commit.
        commit_message: First line of the commit.
        overwrite_readme: Replace a README.md that is there; by default it is left alone.
        overwrite_model: Replace another model (of another architecture, shape or number of classes) that is there.
        **about: Label names, license and the like, see `timm_cmhsa.hub.describe`.

    Returns:
        Address of the model, or of the pull request.

    Raises:
        CheckpointError: If timm could not make this model again, or an argument is bad. Nothing was sent.
        HubError: If the Hub was not reached or refused. Nothing or all was changed there: it is one commit.
    """
    check_push(repo_id, revision, create_pr)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / 'model'
        save_for_hub(model, folder, repo_id, **about)
        return upload(
            folder, repo_id, private=private, revision=revision, create_pr=create_pr, commit_message=commit_message,
            overwrite_readme=overwrite_readme, overwrite_model=overwrite_model)


def check_push(repo_id: str, revision: Optional[str], create_pr: bool) -> None:
    """Refuse what could not be pushed, before any work is done."""
    try:
        validate_repo_id(repo_id)
        if repo_id.count('/') != 1:
            raise HFValidationError
    except HFValidationError as e:
        raise CheckpointError(f'{repo_id!r} is not the name of a repository: expected USER/NAME.') from e
    if create_pr and revision not in (None, constants.DEFAULT_REVISION):
        raise CheckpointError(f'a pull request is always to the main branch: leave out the revision {revision}.')


def upload(
        folder: Path,
        repo_id: str,
        *,
        private: bool,
        revision: Optional[str],
        create_pr: bool,
        commit_message: str,
        overwrite_readme: bool,
        overwrite_model: bool,
) -> str:
    """Send the folder that `save_for_hub` wrote; see `push_to_hub` for all else."""
    token = get_token()
    if token is None:
        raise HubError(f'{repo_id}: there is no token: run `hf auth login`, or set HF_TOKEN.')
    if not (token.isascii() and token.isprintable()):
        raise HubError(f'{repo_id}: the token has characters that no token has: run `hf auth login`, or set HF_TOKEN.')
    api = HfApi(library_name='timm_cmhsa', library_version=__version__)
    with _explained(repo_id):
        # not private=False, which would make it public where an organisation's repositories are private
        url = api.create_repo(repo_id, private=True, exist_ok=True) if private else api.create_repo(
            repo_id, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise HubError(f'{repo_id} exists already and is public: make it private in its settings, or take another.')
        names, sha = _list_branch(api, repo_id, revision)
        _check_same_model(folder, repo_id, names, sha, overwrite_model)
        keep_readme = 'README.md' in names and not overwrite_readme
        if keep_readme:
            _logger.warning(f'{repo_id} has a README.md, which is left as it is: overwrite_readme would replace it.')
        sent = [path for path in sorted(folder.iterdir()) if not (keep_readme and path.name == 'README.md')]
        stale = names - {path.name for path in sent} if overwrite_model else set()
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(path.name, path) for path in sent),
                *(CommitOperationDelete(name) for name in sorted(stale) if name.endswith(WEIGHT_SUFFIXES)),
            ],
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
    return commit.pr_url or (f'{url}/tree/{revision}' if revision else str(url))


def _list_branch(api: HfApi, repo_id: str, revision: Optional[str]) -> Tuple[set, str]:
    """Names of the files on a branch, which is made if there is none, and its last commit."""
    try:
        info = api.model_info(repo_id, revision=revision)
    except RevisionNotFoundError:
        if revision is None:
            raise
        api.create_branch(repo_id, branch=revision)
        info = api.model_info(repo_id, revision=revision)
    return {file.rfilename for file in info.siblings or []}, str(info.sha)


def _check_same_model(folder: Path, repo_id: str, names: set, sha: str, overwrite_model: bool) -> None:
    """Refuse to replace another model, unless asked to."""
    if overwrite_model or not any(name.endswith(WEIGHT_SUFFIXES) for name in names):
        return
    found: Any = {}
    if 'config.json' in names:
        with contextlib.suppress(ValueError):
            found = json.loads(Path(hf_hub_download(repo_id, 'config.json', revision=sha)).read_text())
    ours = json.loads((folder / 'config.json').read_text())
    found = found if isinstance(found, dict) else {}
    same = all(found.get(key) == ours[key] for key in ('architecture', 'num_classes'))
    if not same or any((found.get('model_args') or {}).get(k, v) != v for k, v in ours['model_args'].items()):
        raise HubError(
            f"{repo_id} holds another model ({found.get('architecture', 'of unknown architecture')}, "
            f"{found.get('num_classes', 'unknown')} classes): choose another name, or replace it with "
            '--overwrite-model.')


def _unwrap(model: nn.Module) -> Cmhsa:
    model = unwrap_model(model)
    if not isinstance(model, Cmhsa):
        raise CheckpointError(f'a {type(model).__name__} is not a model of timm_cmhsa: give a CmhsaConv or CmhsaAttn.')
    try:
        made_again = timm.create_model(
            model.pretrained_cfg['architecture'], **_json_args(model), device=torch.device('meta'))
    except (AttributeError, KeyError, TypeError) as e:
        raise CheckpointError('the model was not made by timm.create_model: make it so, and load its weights.') from e
    if _layers(made_again) != _layers(model):
        raise CheckpointError('the model was changed after its creation: timm could not make it again from its name.')
    return model


def _layers(model: nn.Module) -> Sequence[Tuple[str, Any]]:
    """Names, types and shapes of all that computes in eval mode."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    layers = [(name, type(module).__name__) for name, module in model.named_modules() if not isinstance(module, _IDLE)]
    return [*shapes, *layers]


_IDLE = (nn.Dropout, nn.Identity, timm.layers.DropPath)


def _json_args(model: Cmhsa) -> Dict[str, Any]:
    args = {key: value for key, value in model.model_args().items() if value is not None}
    for key, value in args.items():
        if not isinstance(value, (bool, int, float, str, tuple, list)):
            raise CheckpointError(f'{key}={value} does not go into config.json: give the name that timm has for it.')
    return args


@contextlib.contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Turn what huggingface_hub, its HTTP client and hf_xet raise, which has no common base, into one line."""
    try:
        yield
    except (HubError, CheckpointError):
        raise
    except Exception as e:
        raise HubError(f'{repo_id}: {_explain(e, repo_id)}') from None  # a header in the cause can hold the token


def _explain(error: BaseException, repo_id: str) -> str:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    text = ' '.join(str(causes[-1] if isinstance(error, RuntimeError) else error).split()).rstrip('.')
    token = get_token()
    text = text.replace(token, '***') if token else text
    status = _status(causes, text)
    if any(isinstance(e, OfflineModeIsEnabled) for e in causes):
        return 'HF_HUB_OFFLINE is set, so that the Hub is not asked: unset it.'
    if isinstance(error, GatedRepoError):
        return 'it is gated: ask for access on its page, and log in.'
    if isinstance(error, RevisionNotFoundError):
        return 'it has no such revision.'
    if isinstance(error, RepositoryNotFoundError):
        return 'there is no such repository, or it is private and the token, if any, gives no right to it.'
    if status == 401:
        return 'the Hub does not accept the token (401): run `hf auth login`, or set HF_TOKEN.'
    if status == 403:
        return f'the token gives no right to do this (403): it needs write access to {repo_id}.'
    if status == 429 or status >= 500:
        return f'the Hub answers with error {status}: try again later.'
    if status:
        return f'the Hub refuses with error {status}: {text}.'
    if isinstance(error, (OSError, HTTPError)) and getattr(error, 'filename', None) is None:
        return f'no connection to the Hub at {constants.ENDPOINT} ({text}): check the network, and try again.'
    return f'{text}.' if isinstance(error, (ValueError, RuntimeError)) else f'{type(error).__name__}: {text}.'


def _status(causes: Sequence[BaseException], text: str) -> int:
    """HTTP status of the answer, 0 if there was none."""
    for error in causes:
        if (response := getattr(error, 'response', None)) is not None:
            return response.status_code
    told = re.search(r'HTTP status \w+ error \((\d{3}) ', text)  # hf_xet tells it in words only
    return int(told.group(1)) if told else 0
