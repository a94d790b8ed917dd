"""Publishes models on the Hugging Face Hub, with a model card."""
import logging
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

import timm
import torch
from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.utils import validate_repo_id
from timm.models._hub import generate_readme
from timm.utils import unwrap_model
from torch import nn

from .checkpoint import LABEL_KEYS, Checkpoint, check_tensors
from .errors import CheckpointError, HubError, one_line
from .files import MODEL_SUFFIXES, PathLike
from .images import data_config
from .models import Cmhsa, default_cfgs
from .version import __version__

_logger = logging.getLogger(__name__)

REPOSITORY = 'https://github.com/OWNER/timm_cmhsa'
DESCRIPTIONS = {
    'CmhsaConv': 'Phase 1: a Vision Transformer with convolutions over the whole image in place of attention.',
    'CmhsaAttn': 'Phase 2: a Vision Transformer with relative position bias, which can express convolutions exactly.',
    'attended': 'A convolutional network of timm in which timm_cmhsa has replaced convolutions by self-attention.',
    'PixelAttn': 'A Vision Transformer on single pixels or small patches, with heads that attend by relative position.',
}
AUTHORS = {  # of the papers, and the year
    '2111.01353': ('Li, Shanda and Chen, Xiangning and He, Di and Hsieh, Cho-Jui', 2021),
    '1911.03584': ('Cordonnier, Jean-Baptiste and Loukas, Andreas and Jaggi, Martin', 2019),
}
USAGE = '''```bash
pip install git+{repository}
```

```python
import timm
import timm_cmhsa{purpose}

model = {create}
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
```

[Documentation of timm_cmhsa]({repository})'''


def save_for_hub(
        model: nn.Module,
        folder: PathLike,
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
    """Write config.json, model.safetensors and README.md, for `timm.create_model('local-dir:FOLDER', pretrained=True)`.

    Args:
        model: Model of this package, a CNN of timm after `attend_convs`, which `load_model` reads, or a wrapper of
            one, such as DistributedDataParallel.
        folder: New folder.
        repo_id: Name on the Hub that the model card refers to.
        force: Replace an earlier model in the folder.
        label_names: Names of the classes; by default those of the pretrained configuration, if their number fits.
        license: Identifier of a license on the Hub; by default none is given.
        datasets: Names of the training data on the Hub, such as uoft-cs/cifar100.
        base_model: Name on the Hub of the model that this one was made from.
        results: Accuracies in percent by name, such as Top-1.
        details: More about the model, by heading; for example `ConversionReport.details`.

    Raises:
        CheckpointError: If the model cannot be saved, an argument is bad, or the folder cannot be written.
        ValueError: If the name on the Hub is not valid.
    """
    model = unwrap_model(model)
    is_ours = isinstance(model, Cmhsa) or hasattr(model, 'attended')
    if not is_ours or not getattr(model, 'pretrained_cfg', None):
        raise CheckpointError(
            f'A {type(model).__name__} cannot be published: take a model, or an attended CNN, of timm.create_model.')
    if Path(folder).suffix in MODEL_SUFFIXES:
        raise CheckpointError(f'{folder} is the name of a file: give the name of a folder.')
    check_tensors(model.state_dict(), 'The model')
    checkpoint = Checkpoint.of(model)
    cfg = checkpoint.spec.pretrained_cfg
    cfg.update(data_config(model), license=license)
    if label_names is not None:
        cfg.update(dict.fromkeys(LABEL_KEYS), label_names=_checked_names('label_names', label_names))
        if len(label_names) != model.num_classes:
            raise CheckpointError(f'{len(label_names)} label names were given for {model.num_classes} classes.')
    elif len(cfg.get('label_names') or ()) != model.num_classes:  # those of an earlier head
        cfg.update(dict.fromkeys(LABEL_KEYS))
    checkpoint.write(folder, force, _model_card(model, repo_id, license, datasets, base_model, results, details))


def push_to_hub(
        model: nn.Module,
        repo_id: str,
        *,
        private: bool = False,
        revision: Optional[str] = None,
        create_pr: bool = False,
        commit_message: str = 'Add model',
        **kwargs: Any,
) -> str:
    """Publish a model, for `timm.create_model('hf-hub:USER/NAME', pretrained=True)`. Return its address.

    All files are sent in one commit. A README.md on the Hub is kept.

    Args:
        model: Model of this package, or a wrapper of one.
        repo_id: Name on the Hub, USER/NAME; created if it does not exist.
        private: Create a private repository.
        revision: Branch to push to, by default main; created if it does not exist.
        create_pr: Open a pull request instead.
        commit_message: First line of the commit.
        **kwargs: Arguments of `save_for_hub`.

    Raises:
        CheckpointError, ValueError: If the model cannot be saved, or an argument is bad. Nothing was sent.
        HubError: If the Hub was not reached or refused.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, 'model')
        save_for_hub(model, folder, repo_id, **kwargs)
        paths = sorted(folder.iterdir())
        token = get_token()
        if not token:
            raise HubError(f'{repo_id}: there is no token. Run `hf auth login`, or set HF_TOKEN.')
        api = HfApi(token=token, library_name='timm_cmhsa', library_version=__version__)
        try:
            # private=False would overrule an organization whose repositories are private by default
            url = api.create_repo(repo_id, private=private or None, exist_ok=True)
            if private and not api.model_info(repo_id).private:
                raise RuntimeError('it exists and is public. Make it private in its settings, or choose another name')
            if revision is not None and not create_pr and not api.revision_exists(repo_id, revision):
                api.create_branch(repo_id, branch=revision)
            if api.file_exists(repo_id, 'README.md', revision=revision):
                _logger.warning('The README.md of %s is kept. Delete it there to get a new model card.', repo_id)
                paths.remove(folder / 'README.md')
            # upload_folder may make several commits
            commit = api.create_commit(
                repo_id, [CommitOperationAdd(path.name, path) for path in paths], commit_message=commit_message,
                revision=revision, create_pr=create_pr)
        except Exception as e:  # huggingface_hub, its HTTP client and hf_xet have no common base
            reason = one_line(e, 1000).replace(token, '***')
            raise HubError(
                f'{repo_id}: {reason} Check the connection and the rights of the token: `hf auth login`.') from e
    return commit.pr_url or (f'{url}/tree/{revision}' if revision else str(url))


def check_repo_id(repo_id: str) -> None:
    validate_repo_id(repo_id)
    if '/' not in repo_id:
        raise ValueError(f'{repo_id!r} is not the name of a repository: expected USER/NAME.')


def _checked_names(argument: str, names: Sequence[str]) -> List[str]:
    if isinstance(names, (str, Mapping)):
        raise CheckpointError(f'{argument}={names!r} is a {type(names).__name__}: give a list of names.')
    return [str(name) for name in names]


def _model_card(
        model: Any, repo_id: str, license: Optional[str], datasets: Sequence[str], base_model: Optional[str],
        results: Optional[Mapping[str, float]], details: Optional[Mapping[str, Any]]) -> str:
    """Return the text of README.md: metadata that the Hub reads, then what people read. See `save_for_hub`."""
    check_repo_id(repo_id)
    datasets = _checked_names('datasets', datasets)
    results = {metric: float(value) for metric, value in (results or {}).items()}
    name, config = repo_id.split('/')[1], data_config(model)
    stats = {
        'Architecture': model.pretrained_cfg['architecture'],
        'Params (M)': f'{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}',
        'Image size': '{1} x {2}, {0} channels'.format(*config['input_size']),
    }
    if isinstance(model, Cmhsa):
        kind = next(each.__name__ for each in type(model).__mro__ if each.__name__ in DESCRIPTIONS)
        source, purpose = model.pretrained_cfg, '  # registers the architecture'
        create = f"timm.create_model('hf-hub:{repo_id}', pretrained=True).eval()"
    else:
        source, purpose, kind = default_cfgs['cmhsa_attn'].default.to_dict(), '', 'attended'
        create = f"timm_cmhsa.load_model('hf-hub:{repo_id}')"
        stats['Attention'] = ', '.join(name for call in model.attended for name in call['names'])
    paper, paper_id = source['paper_name'], source['paper_ids'].removeprefix('arXiv:')
    authors, year = AUTHORS[paper_id]
    card = ModelCard(generate_readme(model_name=name, model_card={
        'description': DESCRIPTIONS[kind],
        'details': {
            'Model Stats': stats,
            'Preprocessing': 'mean {mean}, std {std}, {interpolation}, {crop_mode} crop of {crop_pct}'.format(**config),
            **({'Dataset': datasets} if datasets else {}),
            **({'Results': {metric: f'{value:g} %' for metric, value in results.items()}} if results else {}),
            **(details or {}),
            'Paper': f'[{paper}](https://arxiv.org/abs/{paper_id})',
            'Made with': f'timm_cmhsa {__version__}, timm {timm.__version__}, torch {torch.__version__}',
        },
        'usage': USAGE.format(create=create, purpose=purpose, repository=REPOSITORY),
        'citation': (
            f'@article{{arxiv{paper_id},\n  title={{{paper}}},\n  author={{{authors}}},\n'
            f'  journal={{arXiv preprint arXiv:{paper_id}}},\n  year={{{year}}}\n}}'),
    }))
    task = 'image-classification' if model.num_classes else 'image-feature-extraction'
    dataset = datasets[0] if datasets else 'imagefolder'
    subject: Dict[str, Any] = dict(task_type=task, dataset_type=dataset, dataset_name=dataset, metric_type='accuracy')
    evaluations = [EvalResult(metric_name=f'{metric} accuracy', metric_value=value, **subject)
                   for metric, value in results.items()]
    card.data = ModelCardData(
        license=license, library_name='timm', pipeline_tag=task, tags=['timm', 'cmhsa', 'vision-transformer'],
        datasets=datasets or None, base_model=base_model, model_name=name if results else None,
        eval_results=evaluations or None)
    return str(card)
