"""A model from a file or folder, and broken or hostile ones refused in one line: no code of a file runs."""
import argparse
import json
import os
import pickle
import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from helpers import images_for, max_error, phase1, run_forked
from hypothesis import given, strategies as st
from timm.models import save_for_hf
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, ModelEmaV3

from timm_cmhsa import CheckpointError, convert_checkpoint, convert_model, load_model
from timm_cmhsa.checkpoint import Checkpoint
from timm_cmhsa.infer import infer_model

TINY = dict(img_size=8, patch_size=4, depth=1, num_classes=3, mlp_ratio=1.)


@torch.no_grad()
def assert_same(expected, actual):
    assert not actual.training
    images = images_for(expected)
    assert max_error(expected.eval()(images), actual(images)) <= 1e-6


def tiny():
    return phase1(**TINY)


def write_folder(folder, config, model=None):
    """Write a model's weights beside a configuration, which is text or goes into JSON."""
    safetensors.torch.save_file((model or tiny()).state_dict(), folder / 'model.safetensors')
    (folder / 'config.json').write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())


@given(
    kernel=st.sampled_from([1, 3, 5, (1, 7)]), patch=st.sampled_from([2, 4]), grid=st.integers(1, 3),
    hidden_chans=st.integers(1, 5), mlp_ratio=st.sampled_from([1., 1.5, 15.01 / 64]), depth=st.integers(1, 3),
    num_classes=st.sampled_from([0, 5]), init_values=st.sampled_from([None, 0.1]), fc_norm=st.booleans(),
    stem=st.sampled_from(['', '', '6p', '4-3p-5p']), mlp_layer=st.sampled_from(['mlp', 'depthwise']),
    heads=st.sampled_from([None, {}, {'head_dim': 3, 'qk_dim': 2}, {'peak': 0.75}, {'rel_pos': 'table'}]))
def test_tensors_alone_give_the_shape(
        tmp_path_factory, kernel, patch, grid, hidden_chans, heads, num_classes, stem, **kwargs):
    in_chans = min(hidden_chans, 3)
    if stem:
        patch, hidden_chans = 2 ** stem.count('p'), int(stem[-2])
    model = phase1(
        stem=stem, kernel_size=kernel, patch_size=patch, img_size=patch * grid, hidden_chans=hidden_chans,
        in_chans=in_chans, num_classes=num_classes, **kwargs)
    args = {'img_size': patch * grid}
    if heads is not None:
        model, args = convert_model(model, **heads), {}
    path = tmp_path_factory.mktemp('model') / 'a.pth'
    torch.save(model.state_dict(), path)
    assert_same(model, load_model(path, **args))


def test_what_was_assumed_is_a_warning(tmp_path, caplog):
    model = convert_model(phase1(kernel_size=11, patch_size=4, img_size=32), peak=0.75)
    torch.save(model.state_dict(), tmp_path / 'a.pth')
    load_model(tmp_path / 'a.pth')
    assert 'assumed img_size=(32, 32), global_pool=avg, act_layer=None' in caplog.text
    caplog.clear()
    args = dict(act_layer='gelu', global_pool='avg')
    assert_same(model, load_model(tmp_path / 'a.pth', **args))
    assert 'assumed img_size=(32, 32)\n' in caplog.text
    caplog.clear()
    load_model(tmp_path / 'a.pth', img_size=32, **args)
    assert not caplog.text


def test_the_ring_of_padding_is_found_in_the_tensors(tmp_path):
    """timm's train.py tells only the name of a folder, which need not be there any more.

    A table of another ring can have the same length.
    """
    model = convert_model(phase1('cmhsa_hybrid_conv_32', kernel_size=5, depth=1))
    assert model.blocks[0].attn.rel_pos.padding == (2, 2)
    averaged = save_training(model, tmp_path, model=f'local-dir:{tmp_path}/phase2')
    loaded = load_model(tmp_path / 'last.pth.tar')
    assert loaded.patch_embed.img_size == (32, 32)
    assert_same(averaged, loaded)
    other = timm.create_model('cmhsa_hybrid_attn_32', depth=1, img_size=40)
    with pytest.raises(ValueError, match=r'The table has padding=\(2, 2\), and the model \(1, 1\)'):
        other.load_state_dict(model.state_dict())


def test_a_stem_can_be_left_out_or_added(tmp_path):
    """Models with other first convolutions than those of their names load for images of one channel."""
    for name, args, tokens in (
            ('cmhsa_hybrid_attn_32', dict(stem='', hidden_chans=3), 16),
            ('cmhsa_attn_patch4_32', dict(stem='6p-8p', hidden_chans=8), 64)):
        Checkpoint.of(timm.create_model(name, depth=1, **args)).write(tmp_path / name)
        loaded = timm.create_model(f'local-dir:{tmp_path}/{name}', pretrained=True, in_chans=1)
        assert loaded.patch_embed(torch.zeros(1, 1, 32, 32)).shape[1] == tokens


@pytest.mark.parametrize(('embed_dim', 'hidden_dim'), [(7, 61), (11, 15), (49, 196)])
def test_the_width_of_the_mlp_gives_its_ratio(embed_dim, hidden_dim):
    """Also if a division and a multiplication of floats round it down."""
    shapes = {'blocks.0.mlp.fc1.weight': (hidden_dim, embed_dim), 'blocks.0.attn.conv.weight': (1, 1, 3, 3)}
    _, args, _ = infer_model({name: torch.empty(shape, device='meta') for name, shape in shapes.items()})
    assert int(embed_dim * args['mlp_ratio']) == hidden_dim


def save_training(trained, folder, **args):
    """Write what timm's train.py writes, by timm's own saver; return the averaged model."""
    args = {'model': 'test_cmhsa_conv_k3', 'img_size': None, 'in_chans': None, 'gp': None, **args}
    optimizer = create_optimizer_v2(trained, 'adamw', lr=1e-3)
    ema = ModelEmaV3(trained)
    for parameter in ema.module.parameters():
        parameter.data += 0.1
    saver = CheckpointSaver(
        trained, optimizer, args=argparse.Namespace(**args), model_ema=ema, checkpoint_dir=str(folder), max_history=2)
    saver.save_checkpoint(0, 50.)
    return ema.module


@pytest.mark.parametrize(('img_size', 'args'), [
    (16, {'img_size': 16, 'in_chans': 1}), (16, {'img_size': 16, 'in_chans': 1, 'attend': False}),
    ((16, 24), {'input_size': [1, 16, 24]}), ((16, 24), {'model_kwargs': {'in_chans': 1, 'img_size': [16, 24]}})])
def test_training_checkpoints(img_size, args, tmp_path):
    model = phase1(depth=2, img_size=img_size, in_chans=1, global_pool='max')
    averaged = save_training(model, tmp_path, gp='max', mean=[0.5], std=[0.2], **args)
    for name in ('checkpoint-0.pth.tar', 'model_best.pth.tar', 'last.pth.tar'):
        loaded = load_model(tmp_path / name)
        assert_same(averaged, loaded)
        assert (loaded.pretrained_cfg['mean'], loaded.pretrained_cfg['std']) == ([0.5], [0.2])
        assert_same(model, load_model(tmp_path / name, use_ema=False))


@pytest.mark.parametrize('prefix', [
    'module.', '_orig_mod.', 'module._orig_mod.', '_orig_mod.module.', 'net.', 'model.student.'])
def test_prefixes_of_wrappers(prefix, tmp_path):
    model = tiny()
    torch.save({prefix + name: tensor for name, tensor in model.state_dict().items()}, tmp_path / 'a.pth')
    assert_same(model, load_model(tmp_path / 'a.pth', img_size=8))


def test_checkpoints_of_ordinary_loops(tmp_path):
    """What they save beside the weights, under what names, averaged by torch, and in what formats."""
    model = tiny()
    beside = dict(
        best=np.float32(0.5), loss=np.float64(1.5), epoch=np.int64(3), losses=np.arange(3.), dtype=np.dtype('float16'),
        folder=Path('runs') / 'a', python=random.getstate(), numpy=np.random.get_state(), torch=torch.get_rng_state(),
        optimizer=create_optimizer_v2(model, 'adamw', lr=1e-3).state_dict(), names=['a', 'b'], amp=torch.float16)
    averaged = torch.optim.swa_utils.AveragedModel(model).state_dict()
    for name, weights in dict(state_dict=model.state_dict(), network=model.state_dict(), weights=averaged).items():
        torch.save({'model': 'a name', name: weights, **beside}, tmp_path / f'{name}.pt')
        assert_same(model, load_model(tmp_path / f'{name}.pt', img_size=8))
    torch.save(averaged, tmp_path / 'old.pt', _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(averaged, tmp_path / 'averaged.safetensors')
    for name in ('old.pt', 'averaged.safetensors'):
        assert_same(model, load_model(tmp_path / name, img_size=8))


def assert_refused(path, message='.', **kwargs):
    with pytest.raises(CheckpointError, match=message) as error:
        load_model(path, **kwargs)
    assert str(error.value).isprintable(), 'one line, which moves no cursor'
    assert len(str(error.value)) < 1000


def refusal(path):
    """Return the message if a model is refused."""
    try:
        load_model(path)
    except CheckpointError as error:
        return str(error)
    return ''


class Executed:
    """Is pickled as a call."""
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize('content', [
    lambda code: code, lambda code: {'state_dict': code}, lambda code: {**tiny().state_dict(), 'head.bias': code},
    lambda code: {'state_dict': tiny().state_dict(), 'args': argparse.Namespace(model_kwargs=code)}])
@pytest.mark.parametrize('dump', [
    torch.save, lambda *args: torch.save(*args, _use_new_zipfile_serialization=False),
    lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2))])
def test_no_code_of_a_file_runs(content, dump, tmp_path):
    code = Executed(tmp_path / 'executed')
    for name in ('model.pth', 'model.safetensors', 'pytorch_model.bin'):
        dump(content(code), tmp_path / name)
    (tmp_path / 'config.json').write_text('{}')
    for path in (tmp_path / 'model.pth', tmp_path / 'model.safetensors', tmp_path):
        assert_refused(path, 'cannot|without running code')
    assert not (tmp_path / 'executed').exists()


def test_arguments_that_open_other_files_are_left_out(tmp_path):
    """From the metadata of a file, config.json, and the arguments of train.py."""
    (tmp_path / 'weights.pth').write_bytes(pickle.dumps(Executed(tmp_path / 'executed')))
    weights = str(tmp_path / 'weights.pth')
    hostile = {
        'pretrained': True, 'checkpoint_path': weights, 'cache_dir': str(tmp_path / 'cache'),
        'pretrained_cfg': {'file': weights}, 'pretrained_cfg_overlay': {'file': weights, 'url': f'file://{weights}'}}
    model, folder = tiny(), tmp_path / 'model'
    folder.mkdir()
    name, model_args, tensors = 'test_cmhsa_conv_k3', {**TINY, **hostile}, model.state_dict()
    metadata = {'architecture': name, 'model_args': json.dumps(model_args)}
    safetensors.torch.save_file(tensors, folder / 'a.safetensors', metadata)
    write_folder(folder, {**metadata, 'model_args': model_args, 'pretrained_cfg': hostile['pretrained_cfg']}, model)
    args = {'model': name, 'model_kwargs': model_args, **hostile}
    torch.save({'state_dict': tensors, 'args': args}, folder / 'last.pth.tar')
    for source in (folder / 'a.safetensors', folder, folder / 'last.pth.tar'):
        assert_same(model, load_model(source))
        convert_checkpoint(source, tmp_path / 'out', force=True)
    assert {entry.name for entry in tmp_path.iterdir()} == {'model', 'weights.pth', 'out'}


def test_models_of_other_libraries_are_refused(tmp_path):
    for name in ('test_vit', 'test_resnet'):
        other = timm.create_model(name)
        torch.save(other.state_dict(), tmp_path / 'a.pth')
        assert_refused(tmp_path / 'a.pth', 'not the tensors of a phase-1')
        save_for_hf(other, str(tmp_path / name))
        message = f"is of '{name}', which is not a model of timm_cmhsa: load it by timm.create_model"
        assert_refused(tmp_path / name, message)
    for name in (f'{tmp_path}/x', 'https://example.org/x', '\x1b[2J', 'x' * 10 ** 6, ['cmhsa_attn']):
        (tmp_path / 'test_vit' / 'config.json').write_text(json.dumps({'architecture': name}))
        assert_refused(tmp_path / 'test_vit', 'is of |malformed')


def changed(tensor, name='norm.weight'):
    return lambda state_dict: {**state_dict, name: tensor}


@pytest.mark.parametrize(('change', 'message'), [
    (lambda state_dict: torch.ones(3), 'holds a Tensor, not a state dict'),
    (lambda state_dict: {}, 'holds no state dict'),
    (lambda state_dict: {'state_dict': 5}, 'holds no state dict'),
    (changed([1]), 'holds no state dict'),
    (changed(torch.ones(1), 3), 'holds no state dict'),
    (changed(torch.full((48,), float('nan'))), 'norm.weight.* holds NaN'),
    (changed(torch.ones(47)), 'size mismatch for norm.weight'),
    (changed(torch.ones([1] * 3000)), 'does not fit'),
    (changed(torch.ones(1), 'x' * 10 ** 6), 'Unexpected key'),
    (changed(torch.ones(1), 'a\n\x1b[2J\u202e'), 'Unexpected key'),
    (changed(torch.ones(()), 'blocks.0.attn.conv.weight'), 'not the tensors of a phase-1'),
    (changed(torch.ones(()), 'head.weight'), 'does not fit'),
    (changed(torch.ones(3, 0), 'blocks.0.mlp.fc1.weight'), 'not the tensors of a phase-1'),
    *((changed(torch.ones(shape), 'patch_embed.proj.0.weight'), 'phase-1|does not fit') for shape in ((), (3,))),
    (lambda state_dict: dict(list(state_dict.items())[1:]), 'Missing key.* "blocks.0.norm1.weight"'),
    (lambda state_dict: {**state_dict, **{f'blocks.{i}.x': torch.ones(1) for i in range(300)}}, 'depth=300'),
    *((changed(tensor), 'not a plain tensor of floating point') for tensor in (
        torch.ones(48, dtype=torch.complex64), torch.ones(48, device='meta'), torch.ones(48).to(torch.float8_e4m3fn),
        torch.ones(48).to_sparse(), torch.ones(1).expand(48))),
    (changed(torch.ones(48, dtype=torch.int)), 'Only Tensors of floating point'),
    (changed(torch.zeros(1).expand(10 ** 12)), 'size mismatch for norm.weight'),  # claims 4 TB
])
@pytest.mark.filterwarnings('ignore:Validating sparse tensor')
def test_tensors_that_are_not_the_models_are_refused(change, message, tmp_path):
    torch.save(change(tiny().state_dict()), tmp_path / 'a.pth')
    assert_refused(tmp_path / 'a.pth', message, img_size=8)


@pytest.mark.parametrize(('name', 'value'), [
    ('depth', 10 ** 9), ('depth', 201), ('depth', True), ('depth', '4'), ('depth', 0), ('img_size', 10 ** 9),
    ('img_size', [32]), ('img_size', [8, 0]), ('img_size', [[8], 8]), ('img_size', float('nan')), ('patch_size', -1),
    ('patch_size', 0), ('in_chans', 10 ** 30), ('num_heads', [1] * 2000), ('mlp_ratio', float('inf')),
    ('mlp_ratio', 10 ** 300), ('mlp_ratio', 'x' * 10 ** 6), ('drop_rate', 2), ('norm_layer', 'os.system'),
    ('stem', '1p' + 1000 * '-1p'), ('stem', '٣p'), ('stem', 5), ('mlp_layer', 'Mlp'),
    ('act_layer', '__class__'), ('norm_layer', 'nope'), ('global_pool', ['avg']), ('global_pool', {}),
    ('fc_norm', 1),
])
def test_configurations_that_no_model_has_are_refused(name, value, tmp_path):
    write_folder(tmp_path, {'architecture': 'test_cmhsa_conv_k3', 'model_args': {**TINY, name: value}})
    assert_refused(tmp_path)


@pytest.mark.parametrize('content', [
    b'', b'{', b'[]', b'null', b'[' * 10 ** 5, b'{"a": 1' + b'0' * 10 ** 4, b'{"a": "\xff\xfe"}',
    b'{"model_args": [1]}', b'{"pretrained_cfg": "x"}', b'{"label_names": "abc"}',
    b'{"pretrained_cfg": {"input_size": [3, 1e999, 8]}}',
    b'{"pretrained_cfg": {"mean": 3}}'])
def test_configurations_that_cannot_be_read_are_refused(content, tmp_path):
    write_folder(tmp_path, content)
    assert_refused(tmp_path)


@pytest.mark.parametrize('args', [
    argparse.Namespace(model_kwargs=5), {'model_kwargs': [1]}, {'mean': torch.ones(3), 'model': torch.ones(2)},
    {'img_size': 'x'}, {'input_size': [3, 8]}, {'gp': {1}}, {'model': 3}, 5])
def test_odd_arguments_of_a_training_do_no_harm(args, tmp_path):
    torch.save({'state_dict': tiny().state_dict(), 'args': args}, tmp_path / 'a.pth')
    assert refusal(tmp_path / 'a.pth').isprintable()


def test_paths_that_are_no_checkpoints_are_refused(tmp_path):
    for name in ('empty', 'weightless'):
        (tmp_path / name).mkdir()
    (tmp_path / 'weightless' / 'config.json').write_text('{}')
    for name, message in (
            ('empty', 'config.json cannot be read'), ('weightless', 'folder without weights')):
        assert_refused(tmp_path / name, message)
    for name in ('text.pth', 'text.safetensors'):
        for content in (b'', b'hello world\n' * 9, bytes(range(256)) * 9):
            (tmp_path / name).write_bytes(content)
            assert_refused(tmp_path / name, 'is not a checkpoint')


def test_a_large_model_in_the_arguments_takes_no_memory(tmp_path):
    """Nothing is allocated before the shapes of the tensors are found to be those of the model."""
    for args, message in (
            ({**TINY, 'num_heads': 10_000, 'head_dim': 1000}, 'size mismatch'),  # 8 GB
            ({'img_size': 4096, 'patch_size': 1}, 'exceed the limit of 16384')):
        write_folder(tmp_path, {'architecture': 'cmhsa_attn', 'model_args': args}, convert_model(tiny()))
        assert run_forked(partial(assert_refused, tmp_path, message), memory=2 ** 29) == 0


def mutated(content, rng):
    """Change, remove, repeat or add some bytes, mostly near the start or the end, where files describe themselves."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 10))):
        near = rng.randrange(min(len(content), 3000))
        place = rng.choice((rng.randrange(len(content)), near, len(content) - 1 - near))
        length = rng.choice((1, 1, 4, 8, 100))
        part = slice(place, place + length)
        content[part] = rng.choice((rng.randbytes(length), b'\xff' * length, bytes(length), 2 * content[part], b''))
    return bytes(content[:rng.randrange(1, len(content))] if rng.random() < 0.2 else content)


@pytest.mark.skipif(sys.platform != 'linux', reason='limits the memory by means of Linux')
def test_mutated_files_are_read_or_refused(tmp_path):
    """Nothing else happens: no other error, no crash, no gigabytes, no other files."""
    model = tiny()
    content = {'state_dict': model.state_dict(), 'args': argparse.Namespace(model='x', model_kwargs=TINY, mean=[0.5])}
    torch.save(content, tmp_path / 'a.pth')
    torch.save(content, tmp_path / 'old.pth', _use_new_zipfile_serialization=False)
    Checkpoint.of(model).write(tmp_path / 'a.safetensors')
    Checkpoint.of(model).write(tmp_path / 'folder')
    files = [tmp_path / 'a.pth', tmp_path / 'old.pth', tmp_path / 'a.safetensors', tmp_path / 'folder' / 'config.json']
    originals = {path: path.read_bytes() for path in files}
    listed = sorted(tmp_path.rglob('*'))

    def fuzz():
        rng = random.Random(0)
        for case in range(400):
            path = files[case % len(files)]
            path.write_bytes(mutated(originals[path], rng))
            assert refusal(path.parent if path.suffix == '.json' else path).isprintable()
        path.write_bytes(originals[path])

    assert run_forked(fuzz, memory=2 ** 30) == 0
    assert sorted(tmp_path.rglob('*')) == listed
