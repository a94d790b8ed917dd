"""Nothing that a file tells of its model runs code, opens other files or exhausts the memory."""
import argparse
import contextlib
import json
import os
import pickle

import pytest
import safetensors.torch
import timm
import torch
from hypothesis import given, strategies as st

from timm_cmhsa import CheckpointError, convert_checkpoint
from timm_cmhsa.cli import convert_main
from timm_cmhsa.plots import load_model
from timm_cmhsa.untrusted import ARGS, CFG, build_model, check_num_patches, checked_args, checked_cfg

SMALL = dict(img_size=16, patch_size=4, depth=1, num_classes=3)


class Executed:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def hostile(tmp_path):
    """Arguments of `timm.create_model` that load a pickle which makes a folder, or write to one."""
    (tmp_path / 'weights.pth').write_bytes(pickle.dumps({'state_dict': Executed(tmp_path / 'executed')}, protocol=2))
    weights = str(tmp_path / 'weights.pth')
    return {
        'pretrained': True,
        'pretrained_cfg': {'file': weights, 'url': f'file://{weights}', 'custom_load': False},
        'pretrained_cfg_overlay': {'file': weights, 'url': f'file://{weights}'},
        'checkpoint_path': weights,
        'cache_dir': str(tmp_path / 'cache'),
    }


@pytest.mark.parametrize('names', [
    ['pretrained', 'pretrained_cfg'], ['pretrained', 'pretrained_cfg_overlay'], ['checkpoint_path'],
    ['pretrained', 'pretrained_cfg', 'cache_dir']])
@pytest.mark.parametrize('kind', ['metadata', 'config.json', 'train.py'])
def test_arguments_that_load_files_are_left_out(kind, names, hostile, tmp_path):
    model = timm.create_model('cmhsa_attn', **SMALL)
    args = {**SMALL, **{name: hostile[name] for name in names}}
    folder = tmp_path / 'model'
    folder.mkdir()
    path = folder / 'model.safetensors'
    if kind == 'metadata':
        metadata = {'architecture': 'cmhsa_attn', 'model_args': json.dumps(args)}
        safetensors.torch.save_file(model.state_dict(), path, metadata)
    elif kind == 'config.json':
        safetensors.torch.save_file(model.state_dict(), path)
        config = {'architecture': 'cmhsa_attn', 'model_args': args, 'pretrained_cfg': hostile['pretrained_cfg']}
        (folder / 'config.json').write_text(json.dumps(config))
        path = folder
    else:
        path = folder / 'last.pth.tar'
        torch.save({
            'state_dict': model.state_dict(), 'arch': 'cmhsa_attn',
            'args': {'model': 'cmhsa_attn', 'model_kwargs': args, **hostile}}, path)
    loaded = load_model(path)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert {entry.name for entry in tmp_path.iterdir()} == {'model', 'weights.pth'}


def test_conversion_leaves_them_out_too(hostile, tmp_path):
    model = timm.create_model('cmhsa_conv_k3', **SMALL)
    metadata = {'architecture': 'cmhsa_conv_k3', 'model_args': json.dumps({**SMALL, **hostile})}
    safetensors.torch.save_file(model.state_dict(), tmp_path / 'model.safetensors', metadata)
    convert_checkpoint(tmp_path / 'model.safetensors', tmp_path / 'out')
    assert {entry.name for entry in tmp_path.iterdir()} == {'model.safetensors', 'weights.pth', 'out'}


@pytest.mark.parametrize(('name', 'value'), [
    ('depth', 10 ** 9), ('depth', True), ('depth', '4'), ('img_size', 10 ** 9), ('img_size', [32]),
    ('img_size', [8, 0]), ('num_heads', [4, -1]), ('num_heads', [1] * 2000), ('head_dim', 1e3),
    ('mlp_ratio', float('inf')),
    ('mlp_ratio', float('nan')), ('drop_rate', 2), ('norm_layer', 'os.system'), ('act_layer', '__class__'),
    ('global_pool', ['avg']), ('rel_pos', 'cubic'), ('fc_norm', 1),
])
def test_absurd_values_are_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=f'^{name} is .* was expected$'):
        checked_args({name: value})
    model = timm.create_model('cmhsa_attn', **SMALL)
    metadata = {'architecture': 'cmhsa_attn', 'model_args': json.dumps({**SMALL, name: value})}
    safetensors.torch.save_file(model.state_dict(), tmp_path / 'model.safetensors', metadata)
    with pytest.raises(CheckpointError, match=f'malformed model configuration: {name} is'):
        load_model(tmp_path / 'model.safetensors')


@pytest.mark.parametrize(('name', 'args', 'accepted'), [
    ('test_cmhsa_conv_k3', dict(img_size=128), True),
    ('test_cmhsa_conv_k3', dict(img_size=[4096, 8]), False),
    ('test_cmhsa_attn', dict(img_size=128, rel_pos='padded_table'), True),
    ('test_cmhsa_attn', dict(img_size=128, rel_pos='padded_table', padding=500), False),
])
def test_too_many_patches_are_refused(name, args, accepted):
    model = timm.create_model(name, depth=1, patch_size=1, device='meta', **args)
    with contextlib.nullcontext() if accepted else pytest.raises(ValueError, match='have too many: 16384 are the most'):
        check_num_patches(model)


def test_a_small_file_of_a_large_image_is_refused(tmp_path, capsys):
    model = timm.create_model('test_cmhsa_conv_k3', depth=1, patch_size=1, img_size=8, num_classes=3)
    args = argparse.Namespace(model='test_cmhsa_conv_k3', img_size=4096)
    torch.save({'state_dict': model.state_dict(), 'args': args}, tmp_path / 'model.pth')
    assert convert_main([str(tmp_path / 'model.pth'), str(tmp_path / 'out')]) == 2
    assert 'images of (4096, 4096) patches' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4))


@given(st.dictionaries(st.sampled_from([*ARGS, *CFG, 'pretrained', 'cache_dir']), json_values))
def test_whatever_is_told_is_checked_or_refused(told):
    for check, rules in ((checked_args, ARGS), (checked_cfg, CFG)):
        try:
            checked = check(told)
        except ValueError:
            continue
        assert checked.keys() <= rules.keys()
        assert all(rules[name].accepts(value) for name, value in checked.items())


@pytest.mark.slow
def test_a_model_is_allocated_only_if_the_tensors_are_its():
    tensors = timm.create_model('cmhsa_attn', **SMALL).state_dict()
    args = dict(SMALL, depth=500, num_heads=10_000, head_dim=10 ** 5)  # 100 TB
    with pytest.raises(RuntimeError, match=r'Missing key|size mismatch'):
        build_model('cmhsa_attn', args, {}, tensors)
    model = build_model('cmhsa_attn', SMALL, {}, tensors)
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 3)
    assert model.head.weight.data_ptr() == tensors['head.weight'].data_ptr()
