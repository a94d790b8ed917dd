"""A model to the Hugging Face Hub: a folder that timm loads, with a model card, in one commit."""
import json
import logging
import shutil
import tempfile
import unicodedata
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

import timm
import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import HFValidationError, RevisionNotFoundError, validate_repo_id
from timm.utils import unwrap_model
from torch import nn
from torch.func import functional_call

from ..analysis import eval_mode
from ..checkpoints import json_args, write_folder
from ..cmhsa import Cmhsa, CmhsaAttn
from ..destination import FILE_SUFFIXES, MODEL_FILES, check_destination, whole_or_nothing
from ..files import CheckpointError, read_text
from ..images import data_config
from ..messages import one_line, shorten
from ..untrusted import checked_cfg
from ..version import __version__
from .card import model_card
from .errors import HubError, find_token, hub_errors, without_credentials

WEIGHT_SUFFIXES = ('.safetensors', '.bin', '.pth', '.pt', '.tar', '.ckpt', '.onnx', '.h5', '.msgpack', '.gguf')
CODE = 'modeling_timm_cmhsa.py'
AUTO_MAP = {  # which classes of it transformers takes, with trust_remote_code=True
    'AutoImageProcessor': 'modeling_timm_cmhsa.TimmWrapperImageProcessor',
    'AutoModel': 'modeling_timm_cmhsa.TimmWrapperModel',
    'AutoModelForImageClassification': 'modeling_timm_cmhsa.TimmWrapperForImageClassification',
}

_logger = logging.getLogger(__name__)


def save_for_hub(
        model: nn.Module,
        folder: Union[str, Path],
        repo_id: str = 'USER/NAME',
        *,
        force: bool = False,
        label_names: Optional[Sequence[str]] = None,
        license: Optional[str] = None,
        datasets: Sequence[str] = (),
        base_model: Optional[str] = None,
        results: Optional[Mapping[str, float]] = None,
        details: Optional[Mapping[str, Any]] = None,
) -> None:
    """Write what is published of a model: model.safetensors, config.json, README.md, and code for transformers.

    `timm.create_model('local-dir:FOLDER', pretrained=True)` loads it, and so does `hf-hub:USER/NAME` once it is there.
    In transformers it is `AutoModelForImageClassification.from_pretrained(FOLDER, trust_remote_code=True)`.
    What it loads is compared with the model, which is in eval mode meanwhile, with other weights: no other thread
    should use it.

    Args:
        model: A model of this package, phase 1 or 2, or a wrapper of one, such as DistributedDataParallel.
        folder: New folder.
        repo_id: Name on the Hub that the model card speaks of.
        force: Overwrite an earlier model in the folder.
        label_names: Names of the classes, in their order; by default those of its pretrained configuration.
        license: Identifier that the Hub knows; by default that of its pretrained configuration.
        datasets: The training data's names on the Hub, such as uoft-cs/cifar100.
        base_model: Model on the Hub that this one was made from; by default the one that it was loaded from.
        results: Accuracies in percent by name, such as Top-1.
        details: How it was made, by heading; `ConversionReport.details`, for one.

    Raises:
        CheckpointError: If timm could not make this model again, an argument is bad, or the folder cannot be written.
            Nothing was written.
    """
    model = _unwrap(model)
    check_repo_id(repo_id)
    folder = check_destination(folder, None, force)
    if folder.suffix in FILE_SUFFIXES:
        raise CheckpointError(f'{folder} is the name of a file: give the name of a folder.')
    source = model.pretrained_cfg
    labels: Dict[str, Any] = {}
    if label_names is not None:
        labels = {'label_names': check_label_names(label_names, model.num_classes)}
    elif len(source.get('label_names') or ()) == model.num_classes:  # otherwise they are of an earlier head
        labels = {key: source[key] for key in ('label_names', 'label_descriptions') if source.get(key)}
    config = _pretrained_cfg(model, license or source.get('license') or 'apache-2.0')
    if base_model is not None and not _is_repo_id(base_model):
        raise CheckpointError(f'base_model={base_model!r} is not the name of a model on the Hub, such as USER/NAME.')
    base_model = base_model or source.get('hf_hub_id')
    base_model = None if base_model == repo_id else base_model
    card = model_card(
        model, repo_id, config['license'], check_datasets(datasets), base_model, results, details)
    metadata = {
        'format': 'pt', 'architecture': source['architecture'], 'model_args': json.dumps(json_args(model)),
        'timm_cmhsa_version': __version__}
    with whole_or_nothing(folder, force) as partial:
        write_folder(model, partial, metadata, {**labels, 'pretrained_cfg': config, 'auto_map': AUTO_MAP})
        shutil.copyfile(Path(__file__).with_name(CODE), partial / CODE)
        (partial / 'README.md').write_text(card, encoding='utf-8')
        _check_loads_alike(model, partial)


def _unwrap(model: nn.Module) -> Cmhsa:
    model = unwrap_model(model)
    if not isinstance(model, Cmhsa):
        raise CheckpointError(
            f'a {type(model).__name__} is not a model of timm_cmhsa: give a CmhsaConv, CmhsaAttn or PixelAttn.')
    if not timm.is_model((getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or ''):
        raise CheckpointError('the model was not made by timm.create_model: make it so, and load its weights.')
    return model


def _pretrained_cfg(model: Cmhsa, license: str) -> Dict[str, Any]:
    """Return the model's pretrained configuration, brought up to what the model is now."""
    config = {key: value for key, value in model.pretrained_cfg.items() if value is not None}
    for key in ('architecture', 'source', 'file', 'hf_hub_id', 'hf_hub_filename', 'url', 'tag'):
        config.pop(key, None)
    config.update(data_config(model), num_classes=model.num_classes, license=license)
    config.update(label_names=None, label_descriptions=None)  # which timm reads outside of it
    try:
        checked_cfg(config)
    except ValueError as e:
        raise CheckpointError(f'the pretrained configuration of the model is bad: {e}.') from e
    return config


class _Outputs(nn.Module):
    """Return what a model gives out, and the features that this is made of."""

    def __init__(self, model: Cmhsa) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return self.model(images), self.model.forward_features(images)


@torch.no_grad()
def _check_loads_alike(model: Cmhsa, folder: Path) -> None:
    """Refuse a model that timm cannot load from the folder, or loads as one with other outputs.

    Both compute in float64 on the CPU, where nothing hides in rounding, and with other weights as well: with those of a
    model just converted, whose queries are zero, some changes do not show.
    """
    advice = 'change a model by reset_classifier, set_input_size or an argument of timm.create_model only.'
    if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
        raise CheckpointError('the model holds NaN or Inf: the training diverged, take an earlier checkpoint.')
    try:
        loaded = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    except (RuntimeError, TypeError, ValueError) as e:
        raise CheckpointError(f'timm cannot make this model again ({one_line(e)}): {advice}') from e
    if isinstance(model, CmhsaAttn) and model.hard_attn:
        loaded.set_hard_attn()  # published as attention, compared as what the model computes now
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, model.in_chans, *model.patch_embed.img_size, generator=generator, dtype=torch.float64)
    tensors = {name: tensor.cpu().double() for name, tensor in model.state_dict().items()}
    if not all(torch.equal(tensor, tensors[name].to(tensor)) for name, tensor in loaded.state_dict().items()):
        raise CheckpointError(f'timm would make this model again with other weights: {advice}')
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    for scale in (0., 0.1):
        outputs = []
        for each in (model, loaded):
            state = {name: buffer.cpu() for name, buffer in each.named_buffers()}
            state.update((name, tensor + scale * noise[name]) for name, tensor in tensors.items())
            with eval_mode(each):
                outputs.append(functional_call(
                    _Outputs(each), {f'model.{name}': tensor for name, tensor in state.items()}, images))
        for expected, actual in zip(*outputs):
            alike = expected.shape == actual.shape and (actual - expected).abs().max() <= 1e-9 * expected.abs().max()
            if not alike:
                raise CheckpointError(f'timm would make this model again with other outputs: {advice}')


def check_label_names(label_names: Sequence[str], num_classes: int) -> List[str]:
    """Return the names of all classes as a list, or refuse them."""
    names = check_names('label_names', label_names)
    if len(names) != num_classes:
        raise CheckpointError(f'{len(names)} label names were given for {num_classes} classes.')
    return names


def check_names(argument: str, names: Sequence[str]) -> List[str]:
    """Return names as a list, or refuse what is none, and names that are no text in one line."""
    if isinstance(names, (str, Mapping)):
        raise CheckpointError(f'{argument}={names!r} is a {type(names).__name__}: give a list of names.')
    names = [str(name) for name in names]
    for name in names:
        if not name.strip() or any(unicodedata.category(c) in ('Cc', 'Cs', 'Zl', 'Zp') for c in name):
            raise CheckpointError(f'{argument} has the name {shorten(name)}: give text in one line.')
    return names


def check_datasets(names: Sequence[str]) -> List[str]:
    """Return names of datasets as a list, or refuse what the Hub could not have."""
    names = check_names('datasets', names)
    for name in names:
        if not _is_repo_id(name):
            raise CheckpointError(f'{name!r} is not the name of a dataset on the Hub, such as uoft-cs/cifar100.')
    return names


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
        label_names: Optional[Sequence[str]] = None,
        license: Optional[str] = None,
        datasets: Sequence[str] = (),
        base_model: Optional[str] = None,
        results: Optional[Mapping[str, float]] = None,
        details: Optional[Mapping[str, Any]] = None,
) -> str:
    """Publish a model, so that `timm.create_model('hf-hub:USER/NAME', pretrained=True)` loads it.

    Arguments and errors are those of `save_for_hub`, then `push_folder_to_hub`, which returns the address.
    """
    check_push(repo_id, revision, create_pr, commit_message)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / 'model'
        save_for_hub(
            model, folder, repo_id, label_names=label_names, license=license, datasets=datasets, base_model=base_model,
            results=results, details=details)
        return push_folder_to_hub(
            folder, repo_id, private=private, revision=revision, create_pr=create_pr, commit_message=commit_message,
            overwrite_readme=overwrite_readme, overwrite_model=overwrite_model)


def check_push(repo_id: str, revision: Optional[str], create_pr: bool, commit_message: str) -> None:
    """Refuse what could not be pushed, before any work is done."""
    check_repo_id(repo_id)
    if create_pr and revision not in (None, constants.DEFAULT_REVISION):
        raise CheckpointError(f'a pull request is always to the main branch: leave out the revision {revision}.')
    if revision == '' or not commit_message:
        raise CheckpointError('a revision and a commit message must not be empty: leave them out, or give one.')


def check_repo_id(repo_id: str) -> None:
    if not (_is_repo_id(repo_id) and repo_id.count('/') == 1):
        raise CheckpointError(f'{repo_id!r} is not the name of a repository: expected USER/NAME.')


def _is_repo_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def push_folder_to_hub(
        folder: Union[str, Path],
        repo_id: str,
        *,
        private: bool = False,
        revision: Optional[str] = None,
        create_pr: bool = False,
        commit_message: str = 'Add model',
        overwrite_readme: bool = False,
        overwrite_model: bool = False,
) -> str:
    """Publish a folder that `save_for_hub` or `convert_checkpoint` wrote, as it is, in one commit.

    The token is the one that huggingface_hub finds: of `hf auth login`, or in HF_TOKEN.

    Args:
        folder: Holds config.json, model.safetensors and, if they are there, README.md and modeling_timm_cmhsa.py.
        repo_id: `USER/NAME`; made if it does not exist.
        private: Make a private repository.
        revision: Branch to push to, by default main; made if it does not exist.
        create_pr: Open a pull request instead of a commit.
        commit_message: First line of the commit.
        overwrite_readme: Replace a README.md that is there; by default it is left alone.
        overwrite_model: Replace another model (of another architecture or number of classes) that is there.

    Returns:
        Address of the model, or of the pull request.

    Raises:
        CheckpointError: If the folder is no model, or an argument is bad. Nothing was sent.
        HubError: If the Hub was not reached or refused. A new repository or branch may be left, but no half of a model:
            that is one commit.
    """
    check_push(repo_id, revision, create_pr, commit_message)
    folder = Path(folder)
    paths = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    missing = {'config.json', 'model.safetensors'} - {path.name for path in paths}
    if missing:
        raise CheckpointError(f'{folder} has no {min(missing)}: give a folder that holds a model.')
    if _architecture_and_classes(read_text(folder / 'config.json')) is None:
        raise CheckpointError(f'{folder}/config.json does not describe a model: give a folder that holds one.')
    token = find_token()
    if token is None:
        raise HubError(f'{repo_id}: there is no token: run `hf auth login`, or set HF_TOKEN.')
    api = HfApi(token=token, library_name='timm_cmhsa', library_version=__version__)
    branch_exists = True
    with hub_errors(repo_id, 'write'):
        # private=False would make it public where an organisation's repositories are private
        url = api.create_repo(repo_id, private=True, exist_ok=True) if private else api.create_repo(
            repo_id, exist_ok=True)
        info = api.model_info(repo_id)
        is_public = not info.private
        if revision is not None:
            try:
                info = api.model_info(repo_id, revision=revision)
            except RevisionNotFoundError:
                branch_exists = False  # it will start as main
    if private and is_public:
        raise HubError(f'{repo_id} exists already and is public: make it private in its settings, or take another.')
    names = {file.rfilename for file in info.siblings or []}
    if not overwrite_model:
        _check_same_model(folder, api, info, names)
    readme = None
    if 'README.md' in names and not overwrite_readme:
        paths = [path for path in paths if path.name != 'README.md']
        readme = _read_remote(api, info, 'README.md')
    stale = {name for name in names if overwrite_model and _is_weights(name)} - {path.name for path in paths}
    operations: List[Any] = [CommitOperationAdd(path.name, path) for path in paths]
    operations += [CommitOperationDelete(name) for name in sorted(stale)]
    with hub_errors(repo_id, 'write'):
        if not branch_exists:
            api.create_branch(repo_id, branch=str(revision))
        commit = api.create_commit(  # upload_folder would make several
            repo_id,
            operations,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,  # what was checked is what is replaced
        )
    if readme is not None and (folder / 'README.md').is_file() and readme != (folder / 'README.md').read_bytes():
        _logger.warning(
            f'{repo_id} has another README.md, which is left as it is and may speak of an earlier model: '
            'overwrite_readme replaces it.')
    return without_credentials(commit.pr_url or (f'{url}/tree/{revision}' if revision else str(url)))


def _read_remote(api: HfApi, info: ModelInfo, name: str) -> bytes:
    with hub_errors(info.id, 'read'):
        return read_text(Path(api.hf_hub_download(info.id, name, revision=info.sha)))


def _is_weights(name: str) -> bool:
    return '/' not in name and name.endswith(WEIGHT_SUFFIXES)


def _check_same_model(folder: Path, api: HfApi, info: ModelInfo, names: Set[str]) -> None:
    """Refuse to replace another model, of another architecture or number of classes."""
    if 'config.json' not in names and not any(_is_weights(name) for name in names):
        return
    ours = _architecture_and_classes(read_text(folder / 'config.json'))
    theirs = _architecture_and_classes(_read_remote(api, info, 'config.json')) if 'config.json' in names else None
    if theirs is None or ours != theirs:
        what = 'of unknown architecture' if theirs is None else (
            f'{shorten(theirs[0])[1:-1]} with {shorten(theirs[1])} classes')
        raise HubError(
            f'{info.id} holds another model ({what}): choose another name, or replace it with overwrite_model=True.')


def _architecture_and_classes(config: bytes) -> Any:
    """Return what a config.json tells of a model, None if it is no configuration of timm's."""
    try:
        content = json.loads(config)
        architecture, num_classes = content['architecture'], content['num_classes']
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (architecture, num_classes) if isinstance(architecture, str) and isinstance(num_classes, int) else None
