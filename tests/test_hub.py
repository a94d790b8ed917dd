"""Models go to a Hub and come back from it: real HTTP, to a small server that says no when it is told to."""
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import HfApi, ModelCard, metadata_load
from huggingface_hub.utils import HfHubHTTPError
from PIL import Image
from torch import nn

from timm_cmhsa import (
    CheckpointError,
    HubError,
    convert_checkpoint,
    push_folder_to_hub,
    push_to_hub,
    save_for_hub,
)
from timm_cmhsa.cli import convert_main as main

CONV, ATTN = 'cmhsa_conv_k3', 'cmhsa_attn'
SMALL = dict(img_size=32, patch_size=4, depth=2, num_classes=3)
PUSHED = {'.gitattributes', 'README.md', 'config.json', 'model.safetensors', 'modeling_timm_cmhsa.py'}
UPLOAD = r'^/lfs/|^/v1/xorbs/'  # whichever huggingface_hub takes


def create(name=CONV, **kwargs):
    model = timm.create_model(name, **{**SMALL, **kwargs})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a phase-1 checkpoint and label names."""
    monkeypatch.chdir(tmp_path)
    torch.save(create().state_dict(), 'phase1.pth')
    (tmp_path / 'labels.txt').write_text('cat\ndog\nhorse\n', encoding='utf-8-sig')  # as Windows writes it
    return tmp_path


def load_source():
    model = timm.create_model(CONV, **SMALL)
    model.load_state_dict(torch.load('phase1.pth'))
    return model


def assert_same_function(expected, actual, tolerance=1e-5):
    x = torch.randn(2, expected.in_chans, *expected.patch_embed.img_size)
    with torch.no_grad():
        torch.testing.assert_close(actual.eval()(x), expected.eval()(x), atol=tolerance, rtol=tolerance)


def load(name):
    return timm.create_model(name, pretrained=True)


def command(*arguments, **env):
    """The installed command, in a process of its own."""
    script = os.path.join(os.path.dirname(sys.executable), 'convert_checkpoint')
    return subprocess.run([script, *arguments], capture_output=True, text=True, env={**os.environ, **env})


def push(*arguments, src='phase1.pth', repo_id='alice/net'):
    return main([src, '--push-to-hub', repo_id, *arguments])


# There and back


@pytest.mark.parametrize('env', [
    pytest.param({}, id='default'), pytest.param({'HF_HUB_DISABLE_XET': '1'}, id='lfs', marks=pytest.mark.slow)])
def test_round_trip(env, hub, folder):
    done = command('phase1.pth', '--push-to-hub', 'alice/net', '--label-names', 'labels.txt', **env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f'written to net\npushed to {hub.url}/alice/net\n')
    assert 'hf_alice' not in done.stdout + done.stderr
    assert hub.files('alice/net').keys() == PUSHED
    loaded = load('hf-hub:alice/net')
    assert_same_function(load_source(), loaded)
    assert_same_function(load('local-dir:net'), loaded, 0)
    assert list(loaded.pretrained_cfg['label_names']) == ['cat', 'dog', 'horse']
    assert any(re.search(r'^/lfs/' if env or not has_xet() else r'^/v1/xorbs/', path) for _, path in hub.requests)


def has_xet():
    try:
        import hf_xet  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize(('name', 'kwargs'), [
    (CONV, dict(kernel_size=5, img_size=(16, 24), in_chans=1, drop_path_rate=0.1)),
    (CONV, dict(hidden_chans=5, patch_size=(2, 4), depth=2, mlp_ratio=1.5, fc_norm=True)),
    (CONV, dict(num_classes=0)),
    (ATTN, dict(num_heads=4, head_dim=24, qkv_bias=False, attn_drop_rate=0.1)),
    (ATTN, dict(norm_layer='rmsnorm', act_layer='silu', global_pool='max', init_values=0.1)),
])
def test_models_of_any_shape(name, kwargs, hub):
    model = create(name, **kwargs)
    assert push_to_hub(model, 'alice/net') == f'{hub.url}/alice/net'
    assert_same_function(model, load('hf-hub:alice/net'), 0)


def test_a_model_that_was_changed_and_trained_since_its_creation(hub):
    model = create(ATTN, num_classes=10)
    model.set_input_size(img_size=(16, 40))
    model.reset_classifier(3, 'avg')
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 16, 40)).square().mean().backward()
    optimizer.step()
    push_to_hub(torch.compile(model.to(memory_format=torch.channels_last)), 'alice/net')
    loaded = load('hf-hub:alice/net')
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert_same_function(model, loaded)  # up to rounding: another memory format takes other sums
    assert tuple(loaded.pretrained_cfg['input_size']) == (3, 16, 40)


def test_save_for_hub(hub, folder):
    model = create(dtype=torch.bfloat16)
    save_for_hub(model, 'saved', label_names=['a', 'b', 'c'], license='mit')
    assert {path.name for path in (folder / 'saved').iterdir()} == PUSHED - {'.gitattributes'}
    tensors = safetensors.torch.load_file('saved/model.safetensors')
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in tensors.items())
    loaded = load('local-dir:saved')
    assert (loaded.pretrained_cfg['label_names'], loaded.pretrained_cfg['license']) == (['a', 'b', 'c'], 'mit')
    with pytest.raises(CheckpointError, match='exists already'):
        save_for_hub(model, 'saved')
    save_for_hub(create(num_classes=5), 'saved', force=True)
    assert load('local-dir:saved').num_classes == 5


def test_a_folder_is_published_as_it_is(hub, folder, capsys):
    convert_checkpoint('phase1.pth', 'out')
    (folder / 'out' / 'notes.txt').write_text('not published')
    assert push_folder_to_hub('out', 'alice/net') == f'{hub.url}/alice/net'
    assert hub.files('alice/net').keys() == PUSHED - {'README.md', 'modeling_timm_cmhsa.py'}
    assert_same_function(load_source(), load('hf-hub:alice/net'))
    (folder / 'out' / 'README.md').write_text('---\nlicense: mit\n---\nby hand')
    assert push(src='out', repo_id='alice/other') == 0
    assert capsys.readouterr().out == f'pushed to {hub.url}/alice/other\n'
    assert hub.files('alice/other')['README.md'].endswith(b'by hand')
    for arguments in (['--license', 'mit'], ['--num-heads', '3'], ['--label-names', 'labels.txt']):
        assert push(*arguments, src='out', repo_id='alice/other') == 2
        assert 'out is converted already and published as it is: leave out' in capsys.readouterr().err
    (folder / 'bad').mkdir()
    (folder / 'bad' / 'model.safetensors').write_bytes(b'')
    (folder / 'bad' / 'config.json').write_text('[]')
    with pytest.raises(CheckpointError, match=r'config\.json does not describe a model'):
        push_folder_to_hub('bad', 'alice/net')
    with pytest.raises(CheckpointError, match=r'none has no config\.json: give a folder that holds a model'):
        push_folder_to_hub('none', 'alice/net')


def test_a_source_on_the_hub(hub, folder):
    model = create(in_chans=1, pretrained_cfg_overlay=dict(mean=[0.25], std=[0.5]))
    push_to_hub(model, 'alice/phase1', label_names=['a', 'b', 'c'], license='mit')
    push_to_hub(create(in_chans=1), 'alice/phase1', revision='other', label_names=['a', 'b', 'c'])
    assert push(src='hf-hub:alice/phase1', repo_id='alice/phase2') == 0
    loaded = load('hf-hub:alice/phase2')
    assert_same_function(model, loaded)
    config = loaded.pretrained_cfg
    assert (config['mean'], config['std'], config['license']) == ([0.25], [0.5], 'mit')
    assert list(config['label_names']) == ['a', 'b', 'c']
    card = ModelCard(hub.files('alice/phase2')['README.md'].decode())
    assert (card.data.base_model, card.data.license) == ('alice/phase1', 'mit')
    assert 'hf-hub:alice/phase1' in card.text

    convert_checkpoint('hf-hub:alice/phase1@other', 'other')
    assert_same_function(load('hf-hub:alice/phase1@other'), load('local-dir:other'))


@pytest.mark.slow
def test_a_pickled_source_on_the_hub(hub, folder):
    push_to_hub(create(), 'alice/net')
    files = hub.files('alice/net')
    del files['model.safetensors']
    files['pytorch_model.bin'] = (folder / 'phase1.pth').read_bytes()
    convert_checkpoint('hf-hub:alice/net', 'out')
    assert_same_function(load_source(), load('local-dir:out'))
    assert command('hf-hub:alice/net', 'offline', HF_HUB_OFFLINE='1').returncode == 0


# Where to


def test_branch_and_message(hub, folder, capsys):
    assert push('--revision', 'v2', '--commit-message', 'Second version') == 0
    assert capsys.readouterr().out.endswith(f'pushed to {hub.url}/alice/net/tree/v2\n')
    assert push('--revision', 'v2') == 0
    assert hub.files('alice/net').keys() == {'.gitattributes'}
    assert hub.files('alice/net', 'v2').keys() == PUSHED
    assert hub.repositories['alice/net'].messages[1] == 'Second version'
    assert_same_function(load_source(), load('hf-hub:alice/net@v2'))


def test_pull_request_to_the_repository_of_someone_else(hub, folder, monkeypatch, capsys):
    push_to_hub(create(ATTN), 'alice/net')
    before = hub.files('alice/net')
    monkeypatch.setenv('HF_TOKEN', 'hf_bob')
    assert push('--create-pr') == 0
    assert capsys.readouterr().out.endswith(f'pushed to {hub.url}/alice/net/discussions/1\n')
    assert hub.files('alice/net') == before
    assert hub.files('alice/net', 'refs/pr/1')['model.safetensors'] == (folder / 'net/model.safetensors').read_bytes()


def test_private(hub, folder, monkeypatch):
    assert push('--private') == 0
    assert hub.repositories['alice/net'].private
    monkeypatch.setenv('HF_TOKEN', 'hf_bob')
    with pytest.raises(HubError, match='no such repository, or it is private'):
        convert_checkpoint('hf-hub:alice/net', 'out')


def test_private_is_not_what_a_public_repository_becomes(hub, folder, capsys):
    push_to_hub(create(ATTN), 'alice/net')
    before = hub.files('alice/net')
    assert push('--private') == 3
    assert 'alice/net exists already and is public' in capsys.readouterr().err
    assert hub.files('alice/net') == before


def test_readme_is_left_alone_unless_asked(hub, folder, caplog):
    assert push() == 0
    assert push() == 0
    assert not caplog.text
    hub.files('alice/net')['README.md'] = b'written by hand'
    assert push() == 0
    assert 'has another README.md, which is left as it is' in caplog.text
    assert hub.files('alice/net')['README.md'] == b'written by hand'
    assert push('--overwrite-readme') == 0
    assert b'library_name: timm' in hub.files('alice/net')['README.md']


@pytest.mark.parametrize(
    'other', ['classes', 'architecture', 'weights', 'config', 'resnet'])
def test_another_model_is_not_replaced_unless_asked(other, hub, folder, capsys):
    push_to_hub(create(ATTN, num_classes=7) if other == 'classes' else create(), 'alice/net')
    files = hub.files('alice/net')
    files['pytorch_model.bin'] = b'of some other model'
    if other == 'weights':
        del files['config.json']
    if other == 'config':
        files['config.json'] = b'{"model_type": "vit"'
    if other == 'resnet':
        files['config.json'] = b'{"architecture": "resnet18", "num_classes": 3}'
        del files['model.safetensors'], files['pytorch_model.bin']
    before = dict(files)
    assert push('--label-names', 'labels.txt') == 3
    assert 'alice/net holds another model' in one_line(capsys)
    assert hub.files('alice/net') == before
    assert push('--overwrite-model', '--label-names', 'labels.txt') == 0
    assert hub.files('alice/net').keys() == PUSHED
    assert_same_function(load_source(), load('hf-hub:alice/net'))


def test_label_names_of_an_earlier_head_are_not_published(hub):
    push_to_hub(create(), 'alice/net', label_names=['a', 'b', 'c'])
    model = timm.create_model('hf-hub:alice/net', pretrained=True, num_classes=2)
    push_to_hub(model, 'alice/other')
    assert not load('hf-hub:alice/other').pretrained_cfg.get('label_names')
    assert '"c"' not in hub.files('alice/other')['config.json'].decode()
    assert ModelCard(hub.files('alice/other')['README.md'].decode()).data.base_model == 'alice/net'
    push_to_hub(load('hf-hub:alice/net'), 'alice/more', label_names=np.array(['d', 'e', 'f']))
    assert list(load('hf-hub:alice/more').pretrained_cfg['label_names']) == ['d', 'e', 'f']
    assert '"c"' not in hub.files('alice/more')['config.json'].decode()


def test_more_training_of_the_same_model_replaces_it(hub):
    for _ in range(2):
        model = create(ATTN)
        push_to_hub(model, 'alice/net')
    assert_same_function(model, load('hf-hub:alice/net'), 0)


# The model card


def test_model_card(hub, folder):
    (folder / 'results.json').write_text(json.dumps({'model': 'cmhsa_attn', 'top1': 92.25, 'top5': '99.5'}))
    training = dict(
        model=CONV, img_size=32, epochs=80, lr=1e-3, opt='adamw', mixup=0.8, cutmix=0., data_dir='/home/alice/secret')
    torch.save({'state_dict': create().state_dict(), 'arch': CONV, 'args': training}, 'last.pth.tar')
    assert push('--dataset', 'uoft-cs/cifar100', '--dataset', 'alice/more', '--license', 'mit', '--results',
                'results.json', src='last.pth.tar') == 0
    text = hub.files('alice/net')['README.md'].decode()
    card = ModelCard(text, ignore_metadata_errors=False)
    data = card.data
    assert (data.library_name, data.pipeline_tag, data.license) == ('timm', 'image-classification', 'mit')
    assert {'timm', 'cmhsa'} <= set(data.tags)
    assert data.datasets == ['uoft-cs/cifar100', 'alice/more']
    assert data.base_model is None
    assert [(r.metric_name, r.metric_value, r.dataset_type) for r in data.eval_results] == [
        ('Top-1 accuracy', 92.25, 'uoft-cs/cifar100'), ('Top-5 accuracy', 99.5, 'uoft-cs/cifar100')]
    for said in ('9 of 9', 'Theorem 1', 'last.pth.tar', '3 x 3 convolution', 'epochs: 80', 'mixup: 0.8', 'opt: adamw',
                 'largest logit', 'Mean: 0.485, 0.456, 0.406', '@article{li2021can'):
        assert said in card.text
    assert 'cutmix' not in text
    assert 'secret' not in text
    assert json.loads(hub.files('alice/net')['config.json'])['pretrained_cfg']['license'] == 'mit'

    # what it says of loading is so
    Image.new('RGB', (48, 48)).save('image.png')
    names = {}
    exec(re.search(r'```python\n(.*?)```', text, re.DOTALL).group(1), names)
    assert names['probabilities'].sum().item() == pytest.approx(1)


@pytest.mark.parametrize(('name', 'kwargs', 'tag'), [
    (CONV, {}, 'image-classification'), (ATTN, dict(num_classes=0), 'image-feature-extraction')])
def test_model_cards_pass_the_validation_of_huggingface_hub(name, kwargs, tag, hub, tmp_path):
    save_for_hub(create(name, **kwargs), tmp_path / 'saved', 'alice/net')
    card = ModelCard.load(tmp_path / 'saved' / 'README.md', ignore_metadata_errors=False)
    assert card.data.pipeline_tag == tag
    assert 'hf-hub:alice/net' in card.text
    assert metadata_load(tmp_path / 'saved' / 'README.md') == card.data.to_dict()
    push_to_hub(create(name, **kwargs), 'alice/net')
    assert ('POST', '/api/validate-yaml') in hub.requests


def test_a_card_that_the_hub_does_not_accept(hub, folder, capsys):
    assert push('--license', 'none-such') == 3
    assert 'license' in one_line(capsys)
    assert hub.files('alice/net').keys() == {'.gitattributes'}


# What goes wrong


def one_line(capsys):
    error = [line for line in re.split('[\r\n]', capsys.readouterr().err) if line.startswith('convert_checkpoint: ')]
    assert len(error) == 1
    assert not re.search('hf_[a-z]', error[0])
    return error[0]


def assert_kept(hub, error=None):
    """The converted model is on disk, where the message says, and a second run puts it on the Hub."""
    assert error is None or error.endswith('The converted model is kept in net.')
    assert_same_function(load_source(), load('local-dir:net'))
    os.environ['HF_TOKEN'] = 'hf_alice'
    assert push() == 0
    assert_same_function(load_source(), load('hf-hub:alice/net'))


def test_no_token(hub, folder, monkeypatch, capsys):
    monkeypatch.delenv('HF_TOKEN')
    assert push() == 3
    error = one_line(capsys)
    assert 'no token' in error
    assert 'HF_TOKEN' in error
    assert_kept(hub, error)


@pytest.mark.parametrize('token', ['hf_mallory', 'hf_caf\xe9', 'hf_a b\x07'])
def test_wrong_token(token, hub, folder, monkeypatch, capsys):
    monkeypatch.setenv('HF_TOKEN', token)
    assert push() == 3
    error = one_line(capsys)
    assert ('(401)' if token == 'hf_mallory' else 'characters that no token has') in error
    assert token[3:] not in error
    assert_kept(hub, error)


def test_no_right_to_the_repository(hub, folder, monkeypatch, capsys):
    push_to_hub(create(ATTN), 'alice/net')
    before = hub.files('alice/net')
    monkeypatch.setenv('HF_TOKEN', 'hf_bob')
    assert push() == 3
    error = one_line(capsys)
    assert '(403)' in error
    assert 'the right to write' in error
    assert hub.files('alice/net') == before
    assert_kept(hub, error)


def test_server_error(hub, folder, capsys):
    hub.fail('POST', '/api/repos/create', 503)
    assert push() == 3
    error = one_line(capsys)
    assert 'error 503: try again later' in error
    assert_kept(hub, error)


@pytest.mark.skipif(not has_xet(), reason='this huggingface_hub does not upload by Xet')
@pytest.mark.parametrize(('path', 'status', 'said'), [
    ('xet-write-token', 403, 'the right to write'), ('^/v1/xorbs/', 401, 'does not accept the token')])
def test_refusals_in_mid_upload(path, status, said, hub, folder, capsys):
    hub.fail('GET', path, status, times=100)
    hub.fail('POST', path, status, times=100)
    assert push() == 3
    error = one_line(capsys)
    assert said in error
    hub.failures.clear()
    assert_kept(hub, error)


@pytest.mark.slow
@pytest.mark.parametrize('status', [503, 'cut'])
def test_failed_uploads_are_retried_as_huggingface_hub_does(status, hub, folder):
    hub.fail('PUT', '^/lfs/', status)
    assert command('phase1.pth', '--push-to-hub', 'alice/net', HF_HUB_DISABLE_XET='1').returncode == 0
    assert len([path for method, path in hub.requests if method == 'PUT']) == 2
    assert hub.files('alice/net').keys() == PUSHED


@pytest.mark.slow
def test_no_network(hub, folder):
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{unused.getsockname()[1]}'
        done = command('phase1.pth', '--push-to-hub', 'alice/net', HF_ENDPOINT=f'http://me:secret@{address}')
    assert done.returncode == 3
    assert done.stderr.count('\n') == 1
    assert f'no connection to the Hub at http://{address}' in done.stderr
    assert 'secret' not in done.stderr
    assert_kept(hub, done.stderr.rstrip())


@pytest.mark.slow
def test_offline(hub, folder):
    done = command('phase1.pth', '--push-to-hub', 'alice/net', HF_HUB_OFFLINE='1')
    assert done.returncode == 3
    assert 'HF_HUB_OFFLINE is set' in done.stderr
    assert_kept(hub, done.stderr.rstrip())


def test_commit_cut_off(hub, folder, capsys):
    hub.fail('POST', '/commit/', 'cut')
    assert push() == 3
    assert hub.files('alice/net').keys() == {'.gitattributes'}
    assert_kept(hub, one_line(capsys))


@pytest.mark.parametrize('signum', [
    signal.SIGKILL, *(pytest.param(signum, marks=pytest.mark.slow) for signum in (signal.SIGINT, signal.SIGTERM))])
def test_stopped_in_mid_upload_a_second_run_completes_it(signum, hub, folder):
    hub.fail('POST', UPLOAD, 'hold')
    hub.fail('PUT', UPLOAD, 'hold')
    script = os.path.join(os.path.dirname(sys.executable), 'convert_checkpoint')
    process = subprocess.Popen(
        [script, 'phase1.pth', '--push-to-hub', 'alice/net'], text=True, stderr=subprocess.PIPE,
        # a shell's background jobs ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert hub.held.wait(600)
    process.send_signal(signum)
    error = process.communicate()[1]
    assert 'Traceback' not in error
    if signum != signal.SIGKILL:
        assert '\nconvert_checkpoint: interrupted.\n' in error
        assert process.returncode == 128 + signum
    hub.release.set()
    hub.failures.clear()
    assert hub.files('alice/net').keys() == {'.gitattributes'}
    assert_kept(hub)


@pytest.mark.parametrize('what', ['source', 'heads', 'license', 'readme'])
def test_a_folder_that_holds_something_else_is_not_overwritten(what, hub, folder, capsys):
    assert push() == 0
    torch.save(create().state_dict(), 'other.pth')
    if what == 'readme':
        (folder / 'net' / 'README.md').write_text('by hand')
    arguments = {'heads': ['--num-heads', '12'], 'license': ['--license', 'mit']}.get(what, [])
    src = 'other.pth' if what == 'source' else 'phase1.pth'
    before = {path: path.read_bytes() for path in (folder / 'net').iterdir()}
    assert push(*arguments, src=src) == 2
    assert 'net exists already' in one_line(capsys)
    assert {path: path.read_bytes() for path in (folder / 'net').iterdir()} == before
    assert push('--force', '--overwrite-model', *arguments, src=src) == 0
    assert {path.name for path in folder.iterdir()} == {'phase1.pth', 'other.pth', 'labels.txt', 'net'}


def test_a_commit_in_mid_upload_is_not_overwritten(hub, folder, capsys):
    push_to_hub(create(ATTN), 'alice/net')
    hub.before_commit = lambda: hub.repositories['alice/net'].commit('main', {'README.md': b'by hand'}, 'by hand')
    assert push() == 3
    assert 'error 412' in one_line(capsys)
    assert hub.files('alice/net') == {'README.md': b'by hand'}


@pytest.mark.slow
def test_full_disk(hub, folder):
    done = subprocess.run(
        [sys.executable, '-c', 'import resource, signal, sys; from timm_cmhsa.cli import convert_main as main;'
         'signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));'
         'sys.exit(main(sys.argv[1:]))', 'phase1.pth', '--push-to-hub', 'alice/net'], capture_output=True, text=True)
    assert done.returncode == 2
    assert 'cannot be written' in done.stderr
    assert {path.name for path in folder.iterdir()} == {'phase1.pth', 'labels.txt'}


@pytest.mark.parametrize('path', ['/api/repos/create', '/preupload/', '/commit/'])
def test_the_token_is_never_printed(path, hub, caplog):
    hub.fail('POST', path, 418)
    with pytest.raises(HubError, match=r'error 418: .*made to fail') as error:
        push_to_hub(create(), 'alice/net')
    assert 'hf_alice' not in ''.join(traceback.format_exception(error.value)) + caplog.text


def test_the_cause_of_a_failure_is_kept_and_a_bug_shows_as_one(hub, monkeypatch):
    monkeypatch.setenv('HF_TOKEN', 'hf_mallory')
    with pytest.raises(HubError) as error:
        push_to_hub(create(), 'alice/net')
    assert isinstance(error.value.__cause__, HfHubHTTPError)
    model = create()
    model.patch_embed.grid_size = None
    with pytest.raises(TypeError, match='NoneType'):
        push_to_hub(model, 'alice/net')


@pytest.mark.skipif(
    inspect.signature(HfApi.create_repo).parameters['private'].default is not None,
    reason='this huggingface_hub has no default of the owner')
def test_repositories_are_as_private_as_their_owner_wants_by_default(hub):
    hub.private_by_default = True
    push_to_hub(create(), 'alice/net')
    assert hub.repositories['alice/net'].private


@pytest.mark.parametrize(('arguments', 'said'), [
    (['--push-to-hub', 'net'], 'expected USER/NAME'),
    (['--push-to-hub', 'alice/../net'], 'is not the name of a repository'),
    (['--push-to-hub', 'alice/net', '--create-pr', '--revision', 'v2'], 'a pull request is always to the main branch'),
    (['--push-to-hub', 'alice/net', '--commit-message', ''], 'must not be empty'),
    (['--push-to-hub', 'alice/net', '--label-names', 'empty.txt'], 'is empty'),
    (['--push-to-hub', 'alice/net', '--label-names', 'none.txt'], 'does not exist or is not a file'),
    (['--push-to-hub', 'alice/net', '--label-names', 'two.txt'], '2 label names were given for 3 classes'),
    (['--push-to-hub', 'alice/net', '--label-names', 'gap.txt'], 'an empty line'),
    (['--push-to-hub', 'alice/net', '--label-names', 'labels.txt', '--num-classes', '5'], '3 classes, where 5'),
    (['--push-to-hub', 'alice/net', '--results', 'labels.txt'], 'corrupt or not JSON'),
    (['--push-to-hub', 'alice/net', '--results', 'none.json'], 'not between 0 and 100'),
    (['out.pth', '--push-to-hub', 'alice/net'], 'is the name of a file'),
])
def test_bad_input_writes_and_sends_nothing(arguments, said, hub, folder, capsys):
    (folder / 'two.txt').write_text('a\nb\n\n')
    (folder / 'empty.txt').write_text('\n')
    (folder / 'gap.txt').write_text('a\n\nb\n')
    (folder / 'none.json').write_text('{"top1": 920}')
    before = set(folder.iterdir())
    assert main(['phase1.pth', *arguments]) == 2
    assert said in one_line(capsys)
    assert set(folder.iterdir()) == before
    assert not hub.requests


@pytest.mark.parametrize('arguments', [['out', '--private'], ['out', '--dataset', 'x'], []])
def test_options_of_the_hub_need_it(arguments, folder, capsys):
    with pytest.raises(SystemExit):
        main(['phase1.pth', *arguments])
    assert '--push-to-hub' in capsys.readouterr().err


@pytest.mark.parametrize(('source', 'said'), [
    ('hf-hub:alice/none', 'no such repository'),
    ('hf-hub:alice/net@none', 'no such revision'),
    ('hf-hub:alice/empty', 'has no config.json'),
    ('hf-hub:alice/light', 'has no model.safetensors or'),
    ('hf-hub:a b/c', "a b/c: Repo id"),
    ('hf-hub:alice', 'expected hf-hub:USER/NAME'),
    ('hf-hub:alice/broken', 'is truncated, corrupt or not a safetensors file'),
])
def test_sources_on_the_hub_that_cannot_be_read(source, said, hub, folder, capsys):
    for name in ('net', 'empty', 'light', 'broken'):
        push_to_hub(create(), f'alice/{name}')
    del hub.files('alice/empty')['config.json']
    del hub.files('alice/light')['model.safetensors']
    hub.files('alice/broken')['model.safetensors'] = b'broken'
    assert main([source, 'out']) in (2, 3)
    assert said in one_line(capsys)
    assert not (folder / 'out').exists()


@pytest.mark.slow
def test_a_source_without_network(folder):
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        url = f'http://127.0.0.1:{unused.getsockname()[1]}'
        done = command('hf-hub:alice/never-fetched', 'out', HF_ENDPOINT=url)
    assert done.returncode == 3
    assert 'no connection to the Hub' in done.stderr.splitlines()[-1]


def test_models_that_timm_could_not_make_again(hub):
    with pytest.raises(CheckpointError, match='a ResNet is not a model of timm_cmhsa'):
        push_to_hub(timm.create_model('test_resnet'), 'alice/net')
    model = create()
    model.blocks[0].mlp.act = nn.Tanh()
    with pytest.raises(CheckpointError, match='with other outputs: change a model by reset_classifier'):
        push_to_hub(model, 'alice/net')
    model = create()
    model.blocks[0].norm1.weight.data[0] = float('nan')
    with pytest.raises(CheckpointError, match='the model holds NaN or Inf'):
        push_to_hub(model, 'alice/net')
    model = create()
    model.head.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError('a bug in a hook')))
    with pytest.raises(RuntimeError, match=r'^a bug in a hook$'):
        push_to_hub(model, 'alice/net')
    with pytest.raises(CheckpointError, match='the name that timm has for it'):
        push_to_hub(create(norm_layer=nn.LayerNorm), 'alice/net')
    model = create()
    model.head = nn.Linear(48, 5)
    with pytest.raises(CheckpointError, match=r'cannot make this model again \(.*\): change a model by reset_'):
        push_to_hub(model, 'alice/net')
    assert not hub.requests


def change_hook(model):
    model.norm.register_forward_hook(lambda module, args, output: output * 1.001)


def change_forward(model):
    forward = model.forward
    model.forward = lambda x: forward(x) + 0.001


CHANGES = {
    'eps': lambda model: setattr(model.blocks[0].norm1, 'eps', 2e-6),
    'activation': lambda model: setattr(model.blocks[1].mlp, 'act', nn.GELU(approximate='tanh')),
    'scale': lambda model: setattr(model.blocks[0].attn, 'scale', 0.3),
    'block': lambda model: setattr(model.blocks[0], 'mlp', nn.Sequential(model.blocks[0].mlp, nn.Hardtanh(-3, 3))),
    'grid': lambda model: model.blocks[0].attn.set_grid_size((4, 16)),
    'hook': change_hook,
    'forward': change_forward,
}


@pytest.mark.parametrize(('name', 'dtype', 'change'), [
    *((CONV, torch.bfloat16, change) for change in CHANGES if change != 'scale'),
    *((ATTN, torch.float16, change) for change in CHANGES),
    *(('test_pixel_attn', torch.bfloat16, change) for change in ('eps', 'grid'))])
def test_no_change_is_too_small_to_be_seen(name, dtype, change, tmp_path):
    model = create(name, dtype=dtype)
    if name == ATTN:
        nn.init.zeros_(model.blocks[0].attn.qkv.weight[:model.blocks[0].attn.attn_dim])  # as just converted
    save_for_hub(model, tmp_path / 'same')
    CHANGES[change](model)
    with pytest.raises(CheckpointError, match=r'timm (would|cannot) make this model again'):
        save_for_hub(model, tmp_path / 'changed')
    assert [path.name for path in tmp_path.iterdir()] == ['same']


HOSTILE = '<img src=x onerror=alert(1)> | [a](http://b) `c` **d**\n---\n# e\n\x1b[2J &lt; $f$ \\'


def test_text_of_others_stays_text(tmp_path):
    model = create(pretrained_cfg_overlay=dict(license='mit\n---\n# f'))
    save_for_hub(
        model, tmp_path / 'saved', 'alice/net', results={HOSTILE: 5},
        details={HOSTILE: {HOSTILE: HOSTILE, 'list': [HOSTILE]}, 'plain': HOSTILE}, label_names=[HOSTILE[:5], 'b', 'c'])
    card = ModelCard.load(tmp_path / 'saved' / 'README.md', ignore_metadata_errors=True)
    assert card.data.license == 'mit\n---\n# f'
    assert card.text.startswith('# Model card for net\n')
    plain = create()
    save_for_hub(plain, tmp_path / 'plain', 'alice/net')
    headings = [line for line in card.text.splitlines() if line.startswith(('#', '---'))]
    assert headings == [
        line for line in ModelCard.load(tmp_path / 'plain' / 'README.md').text.splitlines()
        if line.startswith(('#', '---'))]
    assert not re.search(r'(?<!\\)(<img|`c`|\[a|\]\(http://b|\*\*d|\||&lt|\$f)|\x1b', card.text)
    assert r'\<img src=x onerror=alert(1)\> \| \[a\](http://b) \`c\` \*\*d\*\* --- # e' in card.text


def test_the_name_of_a_file_stays_a_name(hub, folder):
    name = '<b>a|`b`](c).pth'
    (folder / 'phase1.pth').rename(folder / name)
    assert push(src=name) == 0
    assert r'Checkpoint: \<b\>a\|\`b\`\](c).pth' in hub.files('alice/net')['README.md'].decode()


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'env'), [
    ('phase1.pth', dict(PYTHONUTF8='0', PYTHONCOERCECLOCALE='0', LC_ALL='C')),  # where torch opens no other names
    pytest.param('模型é.pth', dict(PYTHONIOENCODING='ascii'), marks=pytest.mark.slow)])
def test_names_in_any_locale(name, env, hub, folder):
    (folder / 'labels.txt').write_text('Käse\n犬\nñandú\n', encoding='utf-8')
    (folder / 'phase1.pth').rename(folder / name)
    done = command(name, '--push-to-hub', 'alice/net', '--label-names', 'labels.txt', **env)
    assert done.returncode == 0, done.stderr
    assert load('hf-hub:alice/net').pretrained_cfg['label_names'] == ['Käse', '犬', 'ñandú']
    assert f'Checkpoint: {name}' in hub.files('alice/net')['README.md'].decode()
    done = command(name, 'ausgäbe→', **env)
    assert done.returncode == 0, done.stderr
    assert load('local-dir:ausgäbe→').num_classes == 3


@pytest.mark.slow
def test_a_token_file_that_is_no_text(hub, folder):
    (folder / 'token').write_bytes(b'\xff\xfe\x00token')
    done = command('phase1.pth', '--push-to-hub', 'alice/net', HF_TOKEN='', HF_TOKEN_PATH='token')
    assert done.returncode == 3, done.stderr
    assert 'characters that no token has' in done.stderr.splitlines()[-1]
    assert 'Traceback' not in done.stderr


@pytest.mark.parametrize('config', [
    b'{"architecture": ["a"], "num_classes": 3}', b'{"architecture": "a", "num_classes": {}}', b'[]', b'null',
    b'[' * 100_000, b'\xff', b'{"architecture": "a\\nb", "num_classes": 3}'])
def test_a_configuration_on_the_hub_of_wrong_types(config, hub, folder, capsys):
    push_to_hub(create(), 'alice/net')
    hub.files('alice/net')['config.json'] = config
    assert push() == 3
    assert 'alice/net holds another model' in one_line(capsys)
    assert main(['hf-hub:alice/net', 'out']) == (2 if b': "a' not in config else 0)
    capsys.readouterr()
    (folder / 'folder').mkdir()
    (folder / 'folder' / 'config.json').write_bytes(config)
    assert push(src='folder', repo_id='alice/other') == 2
    assert one_line(capsys)


@pytest.mark.parametrize('key', ['crop_pct', 'mean', 'license'])
def test_a_bad_configuration_is_not_published(key, tmp_path):
    model = create()
    model.pretrained_cfg[key] = (float('nan'),) * 3 if key == 'mean' else float('nan')
    with pytest.raises(CheckpointError, match=f'configuration of the model is bad: {key} is'):
        save_for_hub(model, tmp_path / 'saved')


@pytest.mark.parametrize(('about', 'said'), [
    (dict(label_names=['a', 'b', 'c\x00']), r"label_names has the name 'c\x00': give text in one line"),
    (dict(label_names=['a', 'b', 'c\nd']), "has the name 'c\\nd'"),
    (dict(label_names=['a', 'b', ' ']), "has the name ' '"),
    (dict(label_names=['a', 'b', 'c\udc80']), 'give text in one line'),
    (dict(label_names=[]), '0 label names were given for 3 classes'),
    (dict(datasets=['a](b)']), "'a](b)' is not the name of a dataset on the Hub"),
    (dict(repo_id="a'); evil('"), 'is not the name of a repository'),
    (dict(label_names=['a', 'b']), '2 label names were given for 3 classes'),
    (dict(label_names='abc'), "label_names='abc' is a str: give a list"),
    (dict(label_names={'a': 0, 'b': 1, 'c': 2}), 'is a dict: give a list'),
    (dict(datasets='uoft-cs/cifar100'), "is a str: give a list"),
    (dict(results={'Top-1': 'good'}), "Top-1='good' is not a number"),
    (dict(results={'Top-1': 920}), 'not between 0 and 100'),
    (dict(results=[92.5]), 'results=[92.5] has no names'),
    (dict(details='trained for long'), "details='trained for long' has no headings"),
    (dict(base_model='a b'), "base_model='a b' is not the name of a model"),
])
def test_bad_arguments_in_python(about, said, hub, tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        push_to_hub(create(), **{'repo_id': 'alice/net', **about})
    with pytest.raises(CheckpointError, match=re.escape(said)):
        save_for_hub(create(), tmp_path / 'saved', **about)
    assert not hub.requests
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('in_chans', [1, 2, 4])
def test_what_the_card_says_of_images_is_what_the_configuration_says(in_chans, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = create(in_chans=in_chans, hidden_chans=4)
    model.set_input_size(img_size=(16, 40))
    push_to_hub(model, 'alice/net', results={'Top-1': np.float64(92.5)})
    text = hub.files('alice/net')['README.md'].decode()
    assert 'Image size: 16 x 40' in text
    config = json.loads(hub.files('alice/net')['config.json'])['pretrained_cfg']
    assert len(config['mean']) == in_chans
    assert f"Mean: {', '.join(f'{value:g}' for value in config['mean'])}\n" in text
    assert ModelCard(text).data.eval_results[0].metric_value == 92.5
    Image.new('RGB', (48, 48)).save('image.png')
    exec(re.search(r'```python\n(.*?)```', text, re.DOTALL).group(1), {})
