"""Models to and from the Hugging Face Hub: a folder that timm loads, with a model card, in one commit."""
import json
import logging
import tempfile
from numbers import Integral
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import timm
import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, hf_hub_download
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
    validate_repo_id,
)
from timm.data import resolve_data_config
from timm.layers import DropPath
from timm.models._hub import save_config_for_hf
from timm.utils import unwrap_model
from torch import nn

from .checkpoints import PICKLE_SUFFIXES, WEIGHT_NAMES, CheckpointError, check_destination, write_checkpoint
from .cmhsa import Cmhsa
from .hub_errors import HubError, explained, find_token
from .model_card import model_card
from .version import __version__

PREFIXES = ('hf-hub:', 'hf_hub:')
WEIGHT_SUFFIXES = ('.safetensors', '.bin', '.pth', '.pt', '.tar', '.ckpt', '.onnx', '.h5', '.msgpack', '.gguf')
IDLE = (nn.Dropout, nn.Identity, DropPath)  # in eval mode

_logger = logging.getLogger(__name__)


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
    if repo_id.count('/') != 1:
        raise HubError(f'{source} is not the name of a model on the Hub: expected hf-hub:USER/NAME.')
    find_token()
    with explained(repo_id, 'read'):
        _download_first(repo_id, ['config.json'], revision or None)
        return _download_first(repo_id, WEIGHT_NAMES, revision or None).parent


def _download_first(repo_id: str, names: Sequence[str], revision: Optional[str]) -> Path:
    no_connection = None
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
        base_model: Model on the Hub that this one was made from; by default the one that it was loaded from.
        results: Accuracies in percent by name, such as Top-1.
        details: How it was made, by heading; `ConversionReport.details`, for one.

    Raises:
        CheckpointError: If the names are not as many as the classes, or results are no percentages.
    """
    source = model.pretrained_cfg
    labels: Dict[str, Any] = {}
    if label_names is not None:
        labels = {'label_names': check_label_names(label_names, model.num_classes)}
    elif len(source.get('label_names') or ()) == model.num_classes:  # otherwise they are of an earlier head
        labels = {key: source[key] for key in ('label_names', 'label_descriptions') if source.get(key)}
    config = _pretrained_cfg(model, license or source.get('license') or 'apache-2.0')
    base_model = base_model or source.get('hf_hub_id')
    save_config_for_hf(
        model, folder / 'config.json', model_args=_json_args(model), model_config={**labels, 'pretrained_cfg': config})
    card = model_card(
        model, repo_id, config['license'], resolve_data_config(pretrained_cfg=config),
        check_names('datasets', datasets), None if base_model == repo_id else base_model, results, details)
    (folder / 'README.md').write_text(card, encoding='utf-8')


def _pretrained_cfg(model: Cmhsa, license: str) -> Dict[str, Any]:
    """The model's pretrained configuration, brought up to what the model is now."""
    config = {key: value for key, value in model.pretrained_cfg.items() if value is not None}
    for key in ('architecture', 'source', 'file', 'hf_hub_id', 'hf_hub_filename', 'url', 'tag'):
        config.pop(key, None)
    for key in ('mean', 'std'):
        if len(config[key]) not in (1, model.in_chans):
            config[key] = (sum(config[key]) / len(config[key]),) * model.in_chans
    config.update(
        input_size=(model.in_chans, *model.patch_embed.img_size), num_classes=model.num_classes, license=license,
        label_names=None, label_descriptions=None)  # which timm reads outside of it
    return config


def check_label_names(label_names: Sequence[str], num_classes: int) -> List[str]:
    names = check_names('label_names', label_names)
    if len(names) != num_classes:
        raise CheckpointError(f'{len(names)} label names were given for {num_classes} classes.')
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f'the label name {twice!r} was given more than once.')
    return names


def check_names(argument: str, names: Sequence[str]) -> List[str]:
    if isinstance(names, (str, Mapping)):
        raise CheckpointError(f'{argument}={names!r} is a {type(names).__name__}: give a list of names.')
    return [str(name) for name in names]


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
        HubError: If the Hub was not reached or refused. A new repository or branch may be left, but no half of a model:
            that is one commit.
    """
    check_push(repo_id, revision, create_pr, commit_message)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / 'model'
        save_for_hub(model, folder, repo_id, **about)
        return upload(
            folder, repo_id, private=private, revision=revision, create_pr=create_pr, commit_message=commit_message,
            overwrite_readme=overwrite_readme, overwrite_model=overwrite_model)


def check_push(repo_id: str, revision: Optional[str], create_pr: bool, commit_message: str) -> None:
    """Refuse what could not be pushed, before any work is done."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as e:
        raise CheckpointError(f'{repo_id!r} is not the name of a repository: {e}') from e
    if repo_id.count('/') != 1:
        raise CheckpointError(f'{repo_id!r} is not the name of a repository: expected USER/NAME.')
    if create_pr and revision not in (None, constants.DEFAULT_REVISION):
        raise CheckpointError(f'a pull request is always to the main branch: leave out the revision {revision}.')
    if revision == '' or not commit_message:
        raise CheckpointError('a revision and a commit message must not be empty: leave them out, or give one.')


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
    token = find_token()
    if token is None:
        raise HubError(f'{repo_id}: there is no token: run `hf auth login`, or set HF_TOKEN.')
    api = HfApi(token=token, library_name='timm_cmhsa', library_version=__version__)
    with explained(repo_id, 'write'):
        # not private=False, which would make it public where an organisation's repositories are private
        url = api.create_repo(repo_id, private=True, exist_ok=True) if private else api.create_repo(
            repo_id, exist_ok=True)
        info = api.model_info(repo_id)
        if private and not info.private:
            raise HubError(f'{repo_id} exists already and is public: make it private in its settings, or take another.')
        branch_exists = True
        if revision is not None:
            try:
                info = api.model_info(repo_id, revision=revision)
            except RevisionNotFoundError:
                branch_exists = False  # it will start as main
        names = {file.rfilename for file in info.siblings or []}
        if not overwrite_model:
            _check_same_model(folder, api, info, names)
        if not branch_exists:
            api.create_branch(repo_id, branch=str(revision))
        sent = sorted(folder.iterdir())
        keeps_readme = 'README.md' in names and not overwrite_readme
        if keeps_readme:
            sent = [path for path in sent if path.name != 'README.md']
            readme = Path(api.hf_hub_download(repo_id, 'README.md', revision=info.sha)).read_bytes()
        stale = {name for name in names if overwrite_model and _is_weights(name)} - {path.name for path in sent}
        commit = api.create_commit(  # upload_folder would make several
            repo_id,
            [*(CommitOperationAdd(path.name, path) for path in sent), *map(CommitOperationDelete, sorted(stale))],
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,  # what was checked is what is replaced
        )
    if keeps_readme and readme != (folder / 'README.md').read_bytes():
        _logger.warning(
            f'{repo_id} has another README.md, which is left as it is and may speak of an earlier model: '
            '--overwrite-readme (overwrite_readme=True) replaces it.')
    return commit.pr_url or (f'{url}/tree/{revision}' if revision else str(url))


def _is_weights(name: str) -> bool:
    return '/' not in name and name.endswith(WEIGHT_SUFFIXES)


def _check_same_model(folder: Path, api: HfApi, info: ModelInfo, names: Set[str]) -> None:
    """Refuse to replace another model: of another architecture, shape or number of classes, or of other classes."""
    if 'config.json' not in names and not any(_is_weights(name) for name in names):
        return
    ours, found = _outline(folder / 'config.json'), None
    if 'config.json' in names:
        found = _outline(Path(api.hf_hub_download(info.id, 'config.json', revision=info.sha)))
    if ours is None or found is None or ours.layers != found.layers or (
            found.label_names and list(ours.label_names or ()) != list(found.label_names)):
        what = 'of unknown architecture' if found is None else f'{found.architecture} with {found.num_classes} classes'
        what += f' named {", ".join(map(str, found.label_names[:3]))} ...' if found and found.label_names else ''
        raise HubError(
            f'{info.id} holds another model ({what}): choose another name, or replace it with --overwrite-model '
            '(overwrite_model=True).')


class _Outline(NamedTuple):
    """What tells one model from another, but for its weights."""
    architecture: str
    num_classes: int
    label_names: Optional[Sequence[str]]
    layers: Sequence[Tuple[str, Any]]


def _outline(config_file: Path) -> Optional[_Outline]:
    """Outline of the model that a config.json describes, if it is one of timm's."""
    try:
        config = json.loads(config_file.read_text())
        args = {'num_classes': config['num_classes'], **config.get('model_args', {})}
        model = timm.create_model(config['architecture'], **args, device=torch.device('meta'))
        labels = config.get('label_names') or config.get('pretrained_cfg', {}).get('label_names')
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RuntimeError):
        return None
    return _Outline(config['architecture'], model.num_classes, labels, _layers(model))


def _unwrap(model: nn.Module) -> Cmhsa:
    model = unwrap_model(model)
    if not isinstance(model, Cmhsa):
        raise CheckpointError(
            f'a {type(model).__name__} is not a model of timm_cmhsa: give a CmhsaConv, CmhsaAttn or PixelAttn.')
    try:
        made_again = timm.create_model(
            model.pretrained_cfg['architecture'], **_json_args(model), device=torch.device('meta'))
    except (AttributeError, KeyError, TypeError) as e:
        raise CheckpointError('the model was not made by timm.create_model: make it so, and load its weights.') from e
    ours, again = _layers(model), _layers(made_again)
    if ours != again:
        name = next(layer[0] for layer in (*ours, *again) if layer not in again or layer not in ours)
        raise CheckpointError(
            f'{name} was changed after the creation of the model, so that timm could not make it again: change it by '
            'reset_classifier, set_input_size or an argument of timm.create_model.')
    return model


def _layers(model: nn.Module) -> Sequence[Tuple[str, Any]]:
    """Names, types and shapes of all that computes in eval mode."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    layers = [(name, type(module).__name__) for name, module in model.named_modules() if not isinstance(module, IDLE)]
    return [*shapes, *layers]


def _json_args(model: Cmhsa) -> Dict[str, Any]:
    args = {key: int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
            for key, value in model.model_args().items() if value is not None}
    for key, value in args.items():
        if not isinstance(value, (bool, int, float, str, tuple, list)):
            raise CheckpointError(f'{key}={value} does not go into config.json: give the name that timm has for it.')
    return args
