"""Models go to a Hub and come back, over real HTTP to a small server."""
import io
import json
import logging
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers import images_for, phase1
from huggingface_hub import ModelCard, constants
from timm.utils import ModelEmaV3
from torch import nn

import timm_cmhsa
from timm_cmhsa import CheckpointError, HubError, load_model, push_to_hub, save_for_hub
from timm_cmhsa.cli import convert_main

CONV, ATTN = 'test_cmhsa_conv_k3', 'test_cmhsa_attn'
LABELS = ['cat', 'dog', 'horse']


def create(name=ATTN, **kwargs):
    """Return a model of three classes, with weights as after some training."""
    return phase1(name, **{'num_classes': 3, **kwargs})


def load(name):
    return timm.create_model(name, pretrained=True).eval()


@torch.no_grad()
def assert_same_function(expected, actual, tolerance=0):
    images = images_for(expected)
    torch.testing.assert_close(actual(images), expected(images), atol=tolerance, rtol=tolerance)


def test_weights_of_both_kinds_are_downloaded_once(hub):
    model = create()
    push_to_hub(model, 'alice/net')
    repository, files = hub.repositories['alice/net'], hub.files('alice/net')
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    repository.commit('main', {**files, 'pytorch_model.bin': content.getvalue()}, 'the same, pickled')
    assert_same_function(model, load_model('hf-hub:alice/net'))
    assert not any(path.endswith('.bin') for path in hub.requests)
    pickled = {name: file for name, file in hub.files('alice/net').items() if 'safetensors' not in name}
    repository.commit('main', pickled, 'pickled alone')
    assert_same_function(model, load_model('hf-hub:alice/net'))


@pytest.mark.parametrize('wrap', [torch.compile, nn.DataParallel, ModelEmaV3])
def test_label_names_stay_with_their_classes(wrap, tmp_path):
    save_for_hub(wrap(create()), tmp_path / 'net', label_names=np.array(LABELS))
    model = load(f'local-dir:{tmp_path}/net')
    assert_same_function(create(), model)
    save_for_hub(model, tmp_path / 'again')
    assert list(load(f'local-dir:{tmp_path}/again').pretrained_cfg['label_names']) == LABELS
    model.reset_classifier(2)
    save_for_hub(model, tmp_path / 'other')
    assert 'horse' not in (tmp_path / 'other' / 'config.json').read_text()


def test_a_license_is_only_that_of_the_user(tmp_path):
    save_for_hub(create(), tmp_path / 'net', license='mit')
    model = load(f'local-dir:{tmp_path}/net')
    assert model.pretrained_cfg['license'] == ModelCard.load(tmp_path / 'net' / 'README.md').data.license == 'mit'
    save_for_hub(model, tmp_path / 'again')
    assert load(f'local-dir:{tmp_path}/again').pretrained_cfg.get('license') is None
    assert 'license' not in (tmp_path / 'again' / 'README.md').read_text()


def test_a_conversion_from_the_hub_to_the_hub(hub, tmp_path, capsys):
    model = create(CONV, in_chans=1, pretrained_cfg_overlay=dict(mean=[0.25], std=[0.5]))
    push_to_hub(model, 'alice/phase1', label_names=LABELS)
    assert convert_main(['hf-hub:alice/phase1', str(tmp_path / 'net'), '--push-to-hub', 'alice/phase2']) == 0
    assert f'{hub.url}/alice/phase2' in capsys.readouterr().out
    loaded = load('hf-hub:alice/phase2')
    assert_same_function(model, loaded, 1e-5)
    assert list(loaded.pretrained_cfg['label_names']) == LABELS
    assert (loaded.pretrained_cfg['mean'], loaded.pretrained_cfg['std']) == ([0.25], [0.5])
    assert 'Theorem 1 of arXiv 2111.01353' in hub.files('alice/phase2')['README.md'].decode()


def test_branch_and_message(hub):
    model = create()
    for _ in range(2):
        url = push_to_hub(model, 'alice/net', revision='v2', commit_message='Second version')
        assert url == f'{hub.url}/alice/net/tree/v2'
    assert hub.files('alice/net').keys() == {'.gitattributes'}
    assert hub.files('alice/net', 'v2').keys() == {'.gitattributes', 'README.md', 'config.json', 'model.safetensors'}
    assert hub.repositories['alice/net'].messages[1:] == 2 * ['Second version']
    for loaded in (load('hf-hub:alice/net@v2'), load_model('hf-hub:alice/net@v2')):
        assert_same_function(model, loaded)


def test_pull_request_to_the_repository_of_someone_else(hub, monkeypatch):
    push_to_hub(create(), 'alice/net')
    before = hub.files('alice/net')
    monkeypatch.setenv('HF_TOKEN', 'hf_bob')
    assert push_to_hub(create(CONV), 'alice/net', create_pr=True) == f'{hub.url}/alice/net/discussions/1'
    assert hub.files('alice/net') == before
    assert json.loads(hub.files('alice/net', 'refs/pr/1')['config.json'])['architecture'] == CONV


def test_private_weights_stay_private(hub, monkeypatch):
    push_to_hub(create(), 'alice/net', private=True)
    assert hub.repositories['alice/net'].private
    push_to_hub(create(), 'alice/public')
    before = hub.files('alice/public')
    with pytest.raises(HubError, match='alice/public: it exists and is public'):
        push_to_hub(create(CONV), 'alice/public', private=True)
    assert hub.files('alice/public') == before
    monkeypatch.setenv('HF_TOKEN', 'hf_bob')
    with pytest.raises(HubError, match='alice/net'):
        load_model('hf-hub:alice/net')


def test_a_readme_on_the_hub_is_kept(hub, caplog):
    push_to_hub(create(), 'alice/net')
    assert not caplog.records
    hub.files('alice/net')['README.md'] = b'written by hand'
    model = create(CONV)
    with caplog.at_level(logging.WARNING, 'timm_cmhsa'):
        push_to_hub(model, 'alice/net')
    assert 'README.md of alice/net is kept' in caplog.text
    assert hub.files('alice/net')['README.md'] == b'written by hand'
    assert_same_function(model, load('hf-hub:alice/net'))


def test_model_card(hub):
    push_to_hub(
        create(in_chans=1, img_size=(16, 40)), 'alice/net', license='mit', datasets=['uoft-cs/cifar100', 'alice/more'],
        base_model='alice/phase1', results={'Top-1': np.float64(92.25), 'Top-5': 99},
        details={'Training': {'Phase 1': '200 epochs'}})
    text = hub.files('alice/net')['README.md'].decode()
    data = ModelCard(text, ignore_metadata_errors=False).data
    assert (data.library_name, data.pipeline_tag, data.license) == ('timm', 'image-classification', 'mit')
    assert (data.datasets, data.base_model) == (['uoft-cs/cifar100', 'alice/more'], 'alice/phase1')
    assert [(r.metric_name, r.metric_value, r.dataset_type) for r in data.eval_results] == [
        ('Top-1 accuracy', 92.25, 'uoft-cs/cifar100'), ('Top-5 accuracy', 99, 'uoft-cs/cifar100')]
    project = Path(__file__).parents[1].joinpath('pyproject.toml').read_text()
    repository = re.search(r'^Repository = "(.*)"$', project, re.M)[1]
    for said in ('Phase 2', '16 x 40, 1 channels', 'mean (0.449', '200 epochs',
                 'arxiv.org/abs/2111.01353', 'hf-hub:alice/net', f'pip install git+{repository}\n',
                 f'[Documentation of timm_cmhsa]({repository})'):
        assert said in text
    names = {}
    exec(re.search(r'```python\n(.*?)```', text, re.DOTALL).group(1), names)  # the lines that load it
    assert names['model'].num_classes == 3


@pytest.mark.parametrize(('name', 'kwargs', 'task', 'said'), [
    (CONV, {}, 'image-classification', ('Phase 1', '2111.01353', 'Li, Shanda')),
    (ATTN, dict(num_classes=0), 'image-feature-extraction', ('Phase 2',)),
    ('test_pixel_attn', {}, 'image-classification', ('single pixels', '1911.03584', 'Cordonnier')),
])
def test_what_a_card_says_of_each_kind(name, kwargs, task, said, tmp_path):
    save_for_hub(create(name, **kwargs), tmp_path / 'net')
    card = ModelCard.load(tmp_path / 'net' / 'README.md', ignore_metadata_errors=False)
    assert card.data.pipeline_tag == task
    assert all(each in card.text for each in said)


def test_bad_models(hub, tmp_path):
    diverged, pruned = create(), create()
    nn.init.constant_(diverged.blocks[0].norm1.weight, float('nan'))
    pruned.prune_intermediate_layers([0], prune_norm=True)
    for model, said in (
            (timm.create_model('test_resnet'), 'ResNet'), (diverged, 'NaN or Inf'),
            (timm_cmhsa.CmhsaAttn(img_size=32, patch_size=4, depth=1), 'create_model'),
            (create(norm_layer=nn.LayerNorm), r'norm_layer=.*LayerNorm.* is not what a model can have'),
            (pruned, 'The final norm was pruned')):
        with pytest.raises(CheckpointError, match=said):
            push_to_hub(model, 'alice/net')
        with pytest.raises(CheckpointError, match=said):
            save_for_hub(model, tmp_path / 'net')
    with pytest.raises(CheckpointError, match=r'net\.pth is the name of a file'):
        save_for_hub(create(), tmp_path / 'net.pth')
    assert not hub.repositories
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(('about', 'said'), [
    (dict(label_names=['a', 'b']), '2 label names were given for 3 classes'),
    (dict(label_names='abc'), "label_names='abc' is a str: give a list"),
    (dict(datasets='uoft-cs/cifar100'), 'is a str: give a list'),
    (dict(results={'Top-1': 'good'}), "could not convert string to float: 'good'"),
    (dict(repo_id='net'), 'expected USER/NAME'), (dict(repo_id='alice/a b'), 'alice/a b'),
])
def test_bad_arguments(about, said, hub, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        push_to_hub(create(), **{'repo_id': 'alice/net', **about})
    with pytest.raises(ValueError, match=re.escape(said)):
        save_for_hub(create(), tmp_path / 'net', **about)
    assert not hub.repositories
    assert not list(tmp_path.iterdir())


def refusal(repo_id='alice/net', **kwargs):
    """Return the message of a push that is refused."""
    with pytest.raises(HubError) as error:
        push_to_hub(create(), repo_id, **kwargs)
    message = str(error.value)
    assert message.startswith(f'{repo_id}: ')
    assert '\n' not in message
    assert not re.search('hf_[a-z]', message)
    return message


def test_tokens_that_give_no_access(hub, monkeypatch):
    push_to_hub(create(), 'alice/net')
    before = hub.files('alice/net')
    for token in ('', 'hf_caf\xe9', 'hf_mallory'):
        monkeypatch.setenv('HF_TOKEN', token)
        assert 'hf auth login' in refusal()
    monkeypatch.setenv('HF_TOKEN', 'hf_bob')
    assert '403' in refusal()
    assert '403' in refusal('alice/new')
    assert hub.files('alice/net') == before


@pytest.mark.parametrize('path', ['/api/repos/create', '/preupload/', '/commit/'])
def test_what_the_hub_answers_is_reported_without_the_token(path, hub):
    hub.failures[path] = 418
    assert 'made to fail, with Bearer ***' in refusal()
    assert not hub.repositories or hub.files('alice/net').keys() == {'.gitattributes'}


def test_no_connection(hub, monkeypatch):
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        monkeypatch.setattr(constants, 'ENDPOINT', f'http://127.0.0.1:{unused.getsockname()[1]}')
        assert 'Check the connection' in refusal()


def test_sources_on_the_hub_that_cannot_be_read(hub):
    for name in ('net', 'empty', 'light', 'broken'):
        push_to_hub(create(), f'alice/{name}')
    del hub.files('alice/empty')['config.json']
    del hub.files('alice/light')['model.safetensors']
    hub.files('alice/broken')['model.safetensors'] = b'broken'
    for name in ('alice/none', 'alice/net@none', 'alice/empty', 'alice/light', 'alice/broken', 'a b/c'):
        with pytest.raises((HubError, CheckpointError)) as error:
            load_model(f'hf-hub:{name}')
        assert '\n' not in str(error.value)
