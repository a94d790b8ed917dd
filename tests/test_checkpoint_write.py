"""A model in a file or folder: whole or not at all, and nothing is replaced unasked."""
import itertools
import json
import os
import resource
import signal

import pytest
import timm
import torch
from helpers import assert_equal, images_for, max_error, phase1, run_forked
from torch import nn

from timm_cmhsa import CheckpointError, convert_model, load_model
from timm_cmhsa.checkpoint import Checkpoint

every_form = pytest.mark.parametrize('name', ['out.safetensors', 'out.pth', 'out'])
with_and_without_force = pytest.mark.parametrize('force', [False, True])


def write(dst, value, force=True):
    """Save a tiny model that answers one number."""
    model = timm.create_model('test_cmhsa_attn', img_size=8, depth=1, num_classes=1)
    nn.init.zeros_(model.head.weight)
    nn.init.constant_(model.head.bias, value)
    Checkpoint.of(model).write(dst, force)


def answer(dst):
    model = load_model(dst, img_size=8)
    return model(images_for(model, 1)).item()


def content(path):
    """Return what a file or folder holds."""
    return {file.name: content(file) for file in path.iterdir()} if path.is_dir() else path.read_bytes()


def before_call(event, number, action):
    """Return an audit hook that acts right before one of the system calls of a kind."""
    count = itertools.count()
    return lambda name, args: action() if name == event and next(count) == number else None


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize('kwargs', [
    dict(), dict(in_chans=5, hidden_chans=5), dict(img_size=(8, 16), patch_size=(2, 4)), dict(kernel_size=11),
    dict(norm_layer='rmsnorm', act_layer='silu', init_values=0.1, fc_norm=True, global_pool='max', mlp_ratio=1.5),
    dict(num_classes=0, global_pool=''), dict(stem='8p-8-16p', hidden_chans=16, mlp_layer='depthwise'),
    dict(dtype=torch.bfloat16)])
@pytest.mark.parametrize('options', [None, {}, {'peak': 0.75}])
def test_a_model_is_loaded_as_it_was(kwargs, options, tmp_path):
    model = phase1(**{'img_size': 16, 'depth': 2, 'num_classes': 5, **kwargs})
    model = model if options is None else convert_model(model, **options)
    untold = ('img_size', 'patch_size', 'in_chans', 'norm_layer', 'act_layer', 'global_pool', 'padding')
    args = {name: value for name, value in model.model_args().items() if name in untold}
    Checkpoint.of(model).write(tmp_path / 'a.pth')
    Checkpoint.of(model).write(tmp_path / 'a.safetensors')
    Checkpoint.of(model).write(tmp_path / 'folder')
    images = images_for(model)
    by_timm = timm.create_model(f'local-dir:{tmp_path}/folder', pretrained=True, dtype=images.dtype).eval()
    loaded_models = [load_model(f'local-dir:{tmp_path / name}') for name in ('a.safetensors', 'folder')]
    for loaded in loaded_models:
        assert loaded.pretrained_cfg['architecture'] == model.pretrained_cfg['architecture']
    for loaded in (load_model(tmp_path / 'a.pth', **args), *loaded_models, by_timm):
        assert type(loaded) is type(model)
        assert_equal(model.state_dict(), loaded.state_dict())
        assert max_error(model(images), loaded(images)) <= 1e-6


def test_a_model_that_was_changed_is_loaded_as_it_is(tmp_path):
    model = convert_model(phase1(depth=2, img_size=16, num_classes=5))
    model.set_input_size((8, 24))
    model.reset_classifier(3, 'max')
    checkpoint = Checkpoint.of(model)
    checkpoint.spec.pretrained_cfg['label_names'] = list('abc')
    checkpoint.write(tmp_path / 'out', card='# A model')
    assert (tmp_path / 'out' / 'README.md').read_text() == '# A model'
    loaded = load_model(tmp_path / 'out')
    assert loaded.patch_embed.img_size == (8, 24)
    assert loaded.pretrained_cfg['label_names'] == list('abc')
    assert max_error(model(images_for(model)), loaded(images_for(model))) <= 1e-6
    assert timm.create_model(f'local-dir:{tmp_path}/out', pretrained=True, num_classes=7).num_classes == 7


@every_form
def test_files_have_the_permissions_of_the_umask(name, tmp_path):
    write(tmp_path / name, 1)
    (tmp_path / 'plain').touch()
    files = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert len(files) > 1
    assert len({path.stat().st_mode for path in files}) == 1


@pytest.mark.parametrize('name', ['out.safetensors', 'out', pytest.param('x' * 251 + '.pth', id='longest')])
def test_nothing_is_replaced_without_force(name, tmp_path):
    dst = tmp_path / name
    write(dst, 1, force=False)
    with pytest.raises(CheckpointError, match='already exists: choose another destination, or replace it'):
        write(dst, 2, force=False)
    assert answer(dst) == 1
    write(dst, 2)
    assert answer(dst) == 2
    assert os.listdir(tmp_path) == [name]


def test_force_replaces_nothing_but_files_and_our_models(tmp_path):
    for name in ('thesis', 'other', 'unknown', 'list', 'folder.pth'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'README.md').write_text('years of work')
    for name, config in (('other', {'architecture': 'resnet18'}), ('unknown', {'architecture': 'x'}), ('list', [])):
        (tmp_path / name / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'file').write_text('years of work')
    os.mkfifo(tmp_path / 'pipe.pth')
    (tmp_path / 'circle.pth').symlink_to('circle.pth')
    before = sorted(tmp_path.rglob('*'))
    for name in os.listdir(tmp_path):
        with pytest.raises(CheckpointError, match='already exists and is not a model of timm_cmhsa'):
            write(tmp_path / name, 1)
    assert sorted(tmp_path.rglob('*')) == before


def test_links_stay_and_what_they_lead_to_is_written(tmp_path):
    for name in ('out.pth', 'out'):
        (tmp_path / f'link_{name}').symlink_to(tmp_path / name)
        for value in (1, 2):
            write(tmp_path / f'link_{name}', value)
            assert answer(tmp_path / name) == value
        assert (tmp_path / f'link_{name}').is_symlink()
        with pytest.raises(CheckpointError, match=f'{name} already exists'):
            write(tmp_path / f'link_{name}', 3, force=False)


@pytest.mark.parametrize('dst', ['nowhere/out', '/proc/out.pth', '/proc/out', 'x' * 300, 'x' * 300 + '.pth', 'x.pth/o'])
def test_destinations_that_cannot_be_written(dst, tmp_path):
    (tmp_path / 'x.pth').touch()
    with pytest.raises(CheckpointError, match=r'cannot be written|is not a folder') as error:
        write(tmp_path / dst, 1)
    assert '\n' not in str(error.value)
    assert os.listdir(tmp_path) == ['x.pth']


@pytest.fixture
def before(name, force, tmp_path):
    """What is there: a model that is to be replaced, if anything."""
    if force:
        write(tmp_path / name, 1)
    return content(tmp_path)


@every_form
@with_and_without_force
def test_a_full_disk_leaves_what_was_there(name, force, before, tmp_path):
    """A limit on the size of files makes writing fail half-way."""

    def write_too_much():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(CheckpointError, match=f'{name} cannot be written'):
            write(tmp_path / name, 2, force)

    assert run_forked(write_too_much) == 0
    assert content(tmp_path) == before


@every_form
@with_and_without_force
def test_a_kill_leaves_what_was_there(name, force, before, tmp_path):
    hook = before_call('os.rename', 0, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert run_forked(lambda: write(tmp_path / name, 2, force), hook) == -signal.SIGKILL
    assert not force or answer(tmp_path / name) == 1
    assert all(path == name or path.startswith('.') for path in os.listdir(tmp_path))
    write(tmp_path / name, 3, force)
    assert answer(tmp_path / name) == 3


@pytest.mark.parametrize(('name', 'force', 'number'), [
    ('out.pth', False, 0), ('out.pth', True, 0), ('out', False, 0), ('out', True, 0), ('out', True, 1)])
def test_an_interrupt_leaves_what_was_there_and_nothing_else(name, force, number, before, tmp_path):
    """Number 1 is between the two steps of replacing a folder."""
    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / name, 2, force)

    assert run_forked(interrupted, before_call('os.rename', number, interrupt)) == 0
    assert content(tmp_path) == before


@pytest.mark.parametrize(('name', 'force', 'appears', 'moment'), [
    ('out', False, 'out', ('os.rename', 0)),
    ('out', False, 'out/thesis.tex', ('os.rename', 0)), ('empty', False, 'empty/thesis.tex', ('os.rename', 0)),
    ('mine', True, 'mine/config.json', ('os.mkdir', 0)), ('mine', True, 'mine', ('os.rename', 1)),
    ('mine', True, 'mine/thesis.tex', ('os.rename', 1))])
def test_what_appears_meanwhile_stays(name, force, appears, moment, tmp_path):
    (tmp_path / 'empty').mkdir()
    write(tmp_path / 'mine', 1)
    weights = (tmp_path / 'mine' / 'model.safetensors').read_bytes()

    def appear():
        (tmp_path / appears).parent.mkdir(exist_ok=True)
        (tmp_path / appears).write_text('{"architecture": "resnet18"}')

    def refused():
        with pytest.raises(CheckpointError, match=f'{name} cannot be written|{name} already exists and is not a model'):
            write(tmp_path / name, 2, force)

    assert run_forked(refused, before_call(*moment, appear)) == 0
    assert (tmp_path / appears).read_text() == '{"architecture": "resnet18"}'
    assert [path.read_bytes() for path in tmp_path.rglob('model.safetensors')] == [weights], 'there or beside'
