"""Checkpoint files in, verified checkpoint files out, by the function and by the command."""
import argparse
import hashlib
import itertools
import json
import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from hypothesis import given, strategies as st
from PIL import Image
from timm.layers import to_2tuple
from timm.models import generate_default_cfgs, load_checkpoint, register_model
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, ModelEmaV3, ParseKwargs
from torch import nn

from timm_cmhsa import CheckpointError, CmhsaConv, VerificationError, convert_checkpoint, convert_state_dict
from timm_cmhsa.cli import convert_main as main
from timm_cmhsa.cmhsa import cfg, create_cmhsa
from timm_cmhsa.phase1 import mlp_ratio

CONV, ATTN = 'cmhsa_conv_k3', 'cmhsa_attn'
SMALL = dict(img_size=32, patch_size=4, depth=2, num_classes=10)


def create(name=CONV, **kwargs):
    model = timm.create_model(name, **{**SMALL, **kwargs})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture(scope='module')
def conv_model():
    torch.manual_seed(0)
    return create()


@pytest.fixture
def src(conv_model, tmp_path):
    path = tmp_path / 'phase1.pth'
    torch.save(conv_model.state_dict(), path)
    return path


def assert_same_function(expected, actual, in_chans=3, size=(32, 32), tolerance=1e-5):
    x = torch.randn(2, in_chans, *size)
    with torch.no_grad():
        error = (actual.eval()(x) - expected.eval()(x)).abs().max() / expected(x).abs().max()
    assert error <= tolerance


# What comes in


def save_training_checkpoint(model, folder, **args):
    """What timm's train.py writes, by timm's own saver."""
    args = argparse.Namespace(**{'model': 'test_cmhsa_conv_k3', 'img_size': None, 'in_chans': None, 'gp': None, **args})
    optimizer = create_optimizer_v2(model, 'adamw', lr=1e-3)
    model(torch.randn(2, model.in_chans, *model.patch_embed.img_size)).mean().backward()
    optimizer.step()
    ema = ModelEmaV3(model)
    for parameter in ema.module.parameters():
        parameter.data += 0.1
    saver = CheckpointSaver(model, optimizer, args=args, model_ema=ema, checkpoint_dir=str(folder), max_history=2)
    saver.save_checkpoint(0, 50.)
    return ema.module


@pytest.mark.parametrize('name', ['checkpoint-0.pth.tar', 'model_best.pth.tar', 'last.pth.tar'])
def test_training_checkpoints(name, tmp_path):
    model = create(img_size=(16, 24), in_chans=1)
    ema = save_training_checkpoint(
        model, tmp_path, model_kwargs={'in_chans': 1, 'img_size': [16, 24]}, mean=[0.5], std=[0.2])
    report = convert_checkpoint(tmp_path / name, tmp_path / 'out')
    assert report.img_size_source == 'from the checkpoint'
    converted = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True)
    assert_same_function(model, converted, 1, (16, 24))
    assert (converted.pretrained_cfg['mean'], converted.pretrained_cfg['std']) == ([0.5], [0.2])

    convert_checkpoint(tmp_path / name, tmp_path / 'ema', use_ema=True)
    assert_same_function(ema, timm.create_model(f'local-dir:{tmp_path / "ema"}', pretrained=True), 1, (16, 24))


def test_train_py_options_tell_the_image_size(tmp_path):
    for kwargs, size in ((dict(img_size=48), (48, 48)), (dict(input_size=[3, 16, 40]), (16, 40)), ({}, (32, 32))):
        save_training_checkpoint(create(img_size=size), tmp_path, **kwargs)
        report = convert_checkpoint(tmp_path / 'last.pth.tar', tmp_path / 'out.pth', force=True)
        assert report.model_args['img_size'] == size
        assert report.img_size_source == ('from the checkpoint' if kwargs else 'default of test_cmhsa_conv_k3')


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.', '_orig_mod.module.'])
def test_wrapper_prefixes_are_stripped(prefix, conv_model, tmp_path):
    torch.save({prefix + key: value for key, value in conv_model.state_dict().items()}, tmp_path / 'a.pth')
    convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'out')
    assert_same_function(conv_model, timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True))


def test_safetensors_and_local_dir(conv_model, tmp_path):
    safetensors.torch.save_file(conv_model.state_dict(), tmp_path / 'a.safetensors')
    convert_checkpoint(tmp_path / 'a.safetensors', tmp_path / 'from_file')
    timm.models.save_for_hf(conv_model, str(tmp_path / 'folder'), safe_serialization=True, model_args=SMALL)
    report = convert_checkpoint(f'local-dir:{tmp_path / "folder"}', tmp_path / 'from_folder')
    assert report.img_size_source == 'from the checkpoint'
    for name in ('from_file', 'from_folder'):
        assert_same_function(conv_model, timm.create_model(f'local-dir:{tmp_path / name}', pretrained=True))


@pytest.mark.parametrize('kwargs', [
    dict(kernel_size=7),
    dict(kernel_size=(1, 5)),
    dict(kernel_size=11),  # reaches beyond the neighbouring patch: 25 heads
    dict(patch_size=8, hidden_chans=2, in_chans=2),
    dict(depth=2, mlp_ratio=1.5, num_classes=0),
    dict(init_values=0.1),
    dict(patch_size=4, hidden_chans=4, mlp_ratio=15.01 / 64),
])
def test_shape_is_read_from_the_tensors(kwargs, tmp_path):
    model = create(**kwargs)
    torch.save(model.state_dict(), tmp_path / 'a.pth')
    report = convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'out', img_size=32)
    assert report.img_size_source == 'as asked for'
    converted = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True)
    assert len(converted.blocks) == len(model.blocks)
    assert converted.blocks[0].attn.num_heads == (25 if kwargs.get('kernel_size') == 11 else 9)
    assert_same_function(model, converted, model.in_chans)


@given(embed_dim=st.integers(1, 1024), hidden_dim=st.integers(1, 4096))
def test_mlp_ratio_gives_the_hidden_width_back(embed_dim, hidden_dim):
    assert int(embed_dim * mlp_ratio(hidden_dim, embed_dim)) == hidden_dim


def test_patches_that_are_not_square(tmp_path):
    model = create(patch_size=(2, 8))
    torch.save(model.state_dict(), tmp_path / 'a.pth')
    report = convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'out', img_size=32, patch_size=(2, 8))
    assert 'patches of 2 x 8' in str(report)
    assert_same_function(model, timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True))
    model = create(patch_size=(2, 4))
    torch.save(model.state_dict(), tmp_path / 'a.pth')
    with pytest.raises(CheckpointError, match=r'give patch_size=HxW with H \* W = 8'):
        convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'no')
    assert main([str(tmp_path / 'a.pth'), str(tmp_path / 'b'), '--img-size', '32', '--patch-size', '2x4']) == 0
    assert_same_function(model, timm.create_model(f'local-dir:{tmp_path / "b"}', pretrained=True))


@pytest.mark.parametrize('kwargs', [
    dict(norm_layer='rmsnorm', act_layer='silu'), dict(global_pool='map'), dict(global_pool='max', fc_norm=True),
    dict(global_pool='')])
def test_layers_and_pooling_of_a_configuration_are_kept(kwargs, tmp_path):
    model = create(**kwargs)
    timm.models.save_for_hf(model, str(tmp_path / 'in'), safe_serialization=True, model_args={**SMALL, **kwargs})
    convert_checkpoint(tmp_path / 'in', tmp_path / 'out')
    assert_same_function(model, timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True))


def test_image_size_of_a_plain_state_dict_is_that_of_the_model_with_such_patches(tmp_path):
    for hidden_chans, architecture in ((3, 'cmhsa_attn'), (12, 'cmhsa_attn_patch4_32')):
        torch.save(create(hidden_chans=hidden_chans).state_dict(), tmp_path / 'a.pth')
        report = convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'out.pth', force=True)
        assert report.architecture == architecture, 'never a model that is there for tests'
        assert report.model_args['img_size'] == (32, 32)
        assert report.img_size_source == 'default of cmhsa_conv_k3_patch4_32'
    torch.save(create(patch_size=8).state_dict(), tmp_path / 'a.pth')
    with pytest.raises(CheckpointError, match='give img_size=N'):
        convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'no.pth')


def test_convert_state_dict_is_deterministic_and_leaves_the_generator_alone(conv_model):
    state = torch.get_rng_state()
    first, second = (convert_state_dict(conv_model.state_dict(), num_heads=11) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    wrapped = convert_state_dict({f'module.{k}': v for k, v in conv_model.state_dict().items()}, num_heads=11)
    assert all(torch.equal(first[name], wrapped[name]) for name in first)
    attn_model = timm.create_model(ATTN, **SMALL, num_heads=11)
    attn_model.load_state_dict(first)
    assert_same_function(conv_model, attn_model)


# What comes out


@pytest.mark.parametrize('suffix', ['.safetensors', '.pth'])
def test_written_file_loads_strictly_and_trains_on(suffix, src, conv_model, tmp_path):
    dst = tmp_path / f'out{suffix}'
    convert_checkpoint(src, dst, num_heads=11)
    model = timm.create_model(ATTN, **SMALL, num_heads=11)
    load_checkpoint(model, str(dst), strict=True)
    assert_same_function(conv_model, model)
    model = timm.create_model(ATTN, **SMALL, num_heads=11, checkpoint_path=str(dst))  # --initial-checkpoint

    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = create_optimizer_v2(model.train(), 'adamw', lr=1e-2, weight_decay=0.05)
    x, targets = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    nn.functional.cross_entropy(model(x), targets).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        changed = parameter != start[name]
        if name.endswith('attn.qkv.bias'):
            query, _, value = changed.view(3, 11, -1).unbind(0)  # keys' biases follow once the queries are not zero
            assert query[:9].any(dim=-1).all(), name
            assert value[:9].any(dim=-1).all(), name
        elif name.endswith('attn.qkv.weight'):
            query, key, value = changed.view(3, 11, -1).unbind(0)
            assert query[:9].any(dim=-1).all(), name
            assert key.any(dim=-1).all(), name
            assert value.any(dim=-1).all(), name
        elif '.rel_pos.' in name:
            assert changed[..., :9].any(), name  # of the spare heads once their output projection is not zero
        else:
            assert changed.any(), name


def test_safetensors_metadata(src, tmp_path):
    report = convert_checkpoint(src, tmp_path / 'out.safetensors')
    with safetensors.safe_open(tmp_path / 'out.safetensors', 'pt') as file:
        metadata = file.metadata()
    assert metadata['architecture'] == ATTN
    assert json.loads(metadata['model_args'])['num_heads'] == 9
    assert 'Theorem 1' in metadata['construction']
    assert float(metadata['logits_error']) == report.logits_error
    assert float(metadata['sharpness']) == report.sharpness
    assert metadata['torch_version'] == str(torch.__version__)
    assert len(metadata['source_sha256']) == 64


def test_local_dir_takes_timms_overrides(src, tmp_path):
    convert_checkpoint(src, tmp_path / 'out')
    name = f'local-dir:{tmp_path / "out"}'
    assert timm.create_model(name, pretrained=True, num_classes=3)(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    assert timm.create_model(name, pretrained=True, in_chans=1)(torch.randn(1, 1, 32, 32)).shape == (1, 10)
    larger = timm.create_model(name, pretrained=True, img_size=(32, 48))
    assert larger(torch.randn(1, 3, 32, 48)).shape == (1, 10)


def test_resolution_change_keeps_the_function(src, conv_model, tmp_path):
    convert_checkpoint(src, tmp_path / 'out')
    larger = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True, img_size=(16, 48))
    expected = create(img_size=(16, 48))
    expected.load_state_dict(conv_model.state_dict())
    assert_same_function(expected, larger, size=(16, 48))


def test_rounding_a_model_that_answers_zero(tmp_path):
    model = create()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    torch.save(model.state_dict(), tmp_path / 'a.pth')
    assert convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'out', dtype='bfloat16').rounding_error == 0


@pytest.mark.parametrize(('dtype', 'rounding'), [('float64', 1e-6), ('bfloat16', 3e-2), ('float16', 4e-3)])
def test_dtype(dtype, rounding, src, conv_model, tmp_path):
    report = convert_checkpoint(src, tmp_path / 'out', dtype=dtype)
    assert report.rounding_error < rounding
    assert (report.rounding_error > 1e-4) == (dtype != 'float64')
    assert f'an error of {report.rounding_error:.1e}' in str(report)
    assert report.max_error < (1e-12 if dtype == 'float64' else 2e-6)
    weights = safetensors.torch.load_file(tmp_path / 'out' / 'model.safetensors')
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    converted = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True)
    assert_same_function(conv_model, converted, tolerance=rounding)


def test_heads(src, conv_model, tmp_path):
    report = convert_checkpoint(src, tmp_path / 'thin', head_dim=12)
    assert {(layer.heads_used, layer.num_heads) for layer in report.layers} == {(12, 12)}
    report = convert_checkpoint(src, tmp_path / 'spare', num_heads=14, head_dim=12)
    assert {(layer.heads_used, layer.num_heads) for layer in report.layers} == {(12, 14)}
    for name in ('thin', 'spare'):
        assert_same_function(conv_model, timm.create_model(f'local-dir:{tmp_path / name}', pretrained=True))
    with pytest.raises(CheckpointError, match='it takes 12 heads of 12 or 9 heads of 48'):
        convert_checkpoint(src, tmp_path / 'few', num_heads=9, head_dim=12)
    assert not (tmp_path / 'few').exists()


@pytest.mark.parametrize(('kernel', 'used'), [('k3', (9, 12)), ('k5', (9, 16))])
def test_registered_thin_heads(kernel, used, tmp_path):
    """They are as exact as wide ones; the plain model stays the default."""
    model = create(f'cmhsa_conv_{kernel}_patch4_32', depth=2)
    torch.save(model.state_dict(), tmp_path / 'a.pth')
    names = 'cmhsa_attn_patch4_32', 'cmhsa_attn_16x48_patch4_32'
    for name, num_heads, num_used in zip(names, (9, 16), used):
        report = convert_checkpoint(tmp_path / 'a.pth', tmp_path / name, model=None if num_heads == 9 else name)
        assert report.architecture == name
        assert {(layer.heads_used, layer.num_heads) for layer in report.layers} == {(num_used, num_heads)}
        assert report.max_error < 2e-6
        plain = timm.create_model(name, num_classes=10, depth=2)
        plain.load_state_dict(safetensors.torch.load_file(tmp_path / name / 'model.safetensors'))
        assert_same_function(model, plain)


@pytest.mark.parametrize('rel_pos', ['quadratic', 'quadratic_gen'])
def test_quadratic_encodings(rel_pos, src, conv_model, tmp_path):
    report = convert_checkpoint(src, tmp_path / 'converted', rel_pos=rel_pos)
    assert report.max_error < 1e-5
    model = timm.create_model(f"local-dir:{tmp_path / 'converted'}", pretrained=True)
    assert {block.attn.rel_pos.name for block in model.blocks} == {rel_pos}
    assert_same_function(conv_model, model)
    assert main([str(src), str(tmp_path / 'other.pth'), '--rel-pos', rel_pos]) == 0
    state_dict = convert_state_dict(conv_model.state_dict(), img_size=32, rel_pos=rel_pos)
    written = torch.load(tmp_path / 'other.pth', weights_only=True)
    assert written.keys() == state_dict.keys()
    assert all(torch.equal(tensor, state_dict[name]) for name, tensor in written.items())


@pytest.mark.parametrize('rel_pos', ['learned', 'cubic'])
def test_encodings_that_cannot_express_a_convolution_are_refused(rel_pos, src, conv_model, tmp_path):
    message = f"rel_pos='{rel_pos}' cannot express a convolution: use table, padded_table, quadratic, quadratic_gen"
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(src, tmp_path / 'converted', rel_pos=rel_pos)
    with pytest.raises(ValueError, match=message):
        convert_state_dict(conv_model.state_dict(), rel_pos=rel_pos)
    assert not (tmp_path / 'converted').exists()


def test_approximate(src, conv_model, tmp_path):
    """As exact as the heads allow, and it says how exact that is."""
    errors = []
    for num_heads in (6, 8, 11):
        dst = tmp_path / str(num_heads)
        with pytest.raises(CheckpointError, match='or approximate=True'):
            convert_checkpoint(src, dst, num_heads=num_heads, head_dim=12)
        report = convert_checkpoint(src, dst, num_heads=num_heads, head_dim=12, approximate=True)
        assert report.approximate
        assert ', approximate\n' in str(report)
        assert report.details['Construction']['Rewrite'].startswith('approximate')
        errors.append([error for layer in report.layers for error in (layer.error, layer.rms_error)])
        converted, x = timm.create_model(f'local-dir:{dst}', pretrained=True), torch.randn(200, 3, 32, 32)
        assert (converted.blocks[0].attn.num_heads, converted.blocks[0].attn.head_dim) == (num_heads, 12)
        with torch.no_grad():
            expected, difference = conv_model(x), converted(x) - conv_model(x)
            tokens = conv_model.blocks[0].norm1(conv_model.patch_embed(x))
            mixed = conv_model.blocks[0].attn(tokens)
            layer_difference = converted.blocks[0].attn(tokens) - mixed
        assert report.logits_rms_error == pytest.approx((difference.norm() / expected.norm()).item(), rel=0.3)
        assert report.layers[0].rms_error == pytest.approx((layer_difference.norm() / mixed.norm()).item(), rel=0.1)
    assert all(few > more > 1e-3 for before, after in itertools.pairwise(errors) for few, more in zip(before, after))
    with safetensors.safe_open(tmp_path / '6' / 'model.safetensors', 'pt') as file:
        assert file.metadata()['construction'].startswith('approximate')


def test_approximate_is_exact_where_the_heads_suffice(src, conv_model, tmp_path):
    report = convert_checkpoint(src, tmp_path / 'out', num_heads=12, head_dim=12, approximate=True)
    assert not report.approximate
    assert report.max_error < 2e-6
    exact = convert_state_dict(conv_model.state_dict(), num_heads=12, head_dim=12)
    assert all(torch.equal(tensor, exact[name]) for name, tensor in convert_state_dict(
        conv_model.state_dict(), num_heads=12, head_dim=12, approximate=True).items())


def test_approximate_by_the_command(src, tmp_path, capsys):
    few = [str(src), str(tmp_path / 'out'), '--num-heads', '6', '--head-dim', '12']
    assert main(few) == 2
    assert 'it takes 12 heads of 12 or 9 heads of 48, or --approximate' in capsys.readouterr().err
    assert main([*few, '--approximate', '--tolerance', '1e-3']) == 1
    assert 'above the tolerance of 1.0e-03: nothing was written' in capsys.readouterr().err
    assert main([*few, '--approximate']) == 0
    assert 'sharpness 40.2, approximate' in capsys.readouterr().out


@pytest.mark.parametrize('in_chans', [1, 3])
def test_verification_on_real_images(in_chans, tmp_path):
    for i in range(3):
        pixels = np.random.RandomState(i).randint(256, size=(36, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f'{i}.png')
    (tmp_path / '0broken.png').write_text('not counted, and no other instead of it')
    model = create(in_chans=in_chans)
    torch.save(model.state_dict(), tmp_path / 'a.pth')
    report = convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'out', in_chans=in_chans, images=tmp_path)
    assert (report.num_random_images, report.num_real_images) == (8, 3)
    assert report.top1_agreement == 1
    assert 'on 8 random and 3 real images' in str(report)


def test_error_above_tolerance_writes_nothing(src, tmp_path, capsys):
    with pytest.raises(VerificationError, match='above the tolerance'):
        convert_checkpoint(src, tmp_path / 'out', sharpness=6)
    assert main([str(src), str(tmp_path / 'out'), '--sharpness', '6']) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith('convert_checkpoint: error: the error of ')
    assert 'nothing was written' in err
    assert 'for train.py' not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ['phase1.pth']
    report = convert_checkpoint(src, tmp_path / 'out', sharpness=6, tolerance=1)
    assert 1e-4 < report.max_error < 1


# What is refused


def corrupt(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


class NeedsCode:
    def __reduce__(self):
        return os.mkdir, ('executed',)


def bad_inputs(folder, state_dict):
    """Every kind of bad input: what makes it, and what its message says."""
    def save(content, name='bad.pth'):
        torch.save(content, folder / name)
        return folder / name

    def without(name):
        return {key: value for key, value in state_dict.items() if key != name}

    def written(name, content):
        (folder / name).write_bytes(content)
        return folder / name

    def truncated(name):
        path = folder / name
        if name.endswith('.safetensors'):
            safetensors.torch.save_file(state_dict, path)
        else:
            torch.save(state_dict, path)
        corrupt(path, path.stat().st_size // 2)
        return path

    def metadata(model_args):
        path = folder / f'metadata{len(model_args)}.safetensors'
        safetensors.torch.save_file(state_dict, path, {'model_args': model_args})
        return path

    def configured(config):
        path = folder / f'configured{len(list(folder.iterdir()))}'
        path.mkdir()
        (path / 'config.json').write_text(json.dumps(config))
        safetensors.torch.save_file(state_dict, path / 'model.safetensors')
        return path

    (folder / 'empty').mkdir()
    (folder / 'no_weights').mkdir()
    (folder / 'no_weights' / 'config.json').write_text('{"architecture": "x"}')
    (folder / 'bad_config').mkdir()
    (folder / 'bad_config' / 'config.json').write_text('{')
    kernel, nan = state_dict['blocks.1.attn.conv.weight'], state_dict['blocks.1.norm1.weight'].clone()
    nan[3] = float('nan')
    return {
        'missing file': (folder / 'nothing.pth', 'does not exist'),
        'empty folder': (folder / 'empty', 'has no config.json'),
        'folder without weights': (folder / 'no_weights', 'folder without weights'),
        'corrupt config': (folder / 'bad_config', 'config.json is truncated, corrupt or not a model configuration'),
        'truncated zip': (truncated('cut.pth'), 'truncated, corrupt or not a checkpoint'),
        'truncated safetensors': (truncated('cut.safetensors'), 'truncated, corrupt or not a safetensors file'),
        'empty file': (written('empty.pth', b''), 'truncated, corrupt or not a checkpoint'),
        'empty safetensors': (written('empty.safetensors', b''), 'truncated, corrupt or not a safetensors file'),
        'text': (written('text.pth', b'hello world\n' * 9), 'truncated, corrupt or not a checkpoint'),
        'noise': (written('noise.pth', bytes(range(256)) * 9), 'truncated, corrupt or not a checkpoint'),
        'code': (save({'state_dict': NeedsCode()}), 'needs code to load, which is never executed'),
        'plain pickled code': (written('code.pth', pickle.dumps(NeedsCode(), protocol=2)), 'needs code to load'),
        'a tensor': (save(torch.ones(3), 'tensor.pth'), 'holds a Tensor, not a state dict'),
        'empty state dict': (save({}, 'void.pth'), 'holds no state dict'),
        'no tensors': (save({'a': 1}, 'numbers.pth'), "'a' is a int"),
        'converted already': (save(create(ATTN).state_dict(), 'attn.pth'), 'converted already'),
        'DeiT': (save(timm.create_model('test_vit').state_dict(), 'vit.pth'), 'such as ViT or DeiT'),
        'ResNet': (save(timm.create_model('test_resnet').state_dict(), 'resnet.pth'), 'looks like a ResNet'),
        'something else': (save({'weight': torch.ones(3)}, 'else.pth'), 'it holds weight'),
        'missing key': (save(without('blocks.1.mlp.fc2.bias'), 'missing.pth'), 'missing keys: blocks.1.mlp.fc2.bias'),
        'missing bias': (save(without('blocks.1.attn.conv.bias'), 'bias.pth'), 'keys: blocks.1.attn.conv.bias'),
        'missing needed key': (
            save(without('blocks.0.mlp.fc1.weight'), 'fc1.pth'), 'missing keys: blocks.0.mlp.fc1.weight'),
        'unexpected key': (save({**state_dict, 'extra': torch.ones(1)}, 'extra.pth'), 'unexpected keys: extra'),
        'shapes disagree': (
            save({**state_dict, 'blocks.1.attn.conv.weight': kernel[..., :1]}, 'shape.pth'),
            'blocks.1.attn.conv.weight has shape (3, 3, 3, 1), where the other tensors ask for (3, 3, 3, 3)'),
        'width is no patch': (
            save({**state_dict, 'blocks.0.norm1.weight': torch.ones(50)}, 'width.pth'), 'tokens of width 50'),
        'no dimensions': (
            save({**state_dict, 'blocks.0.attn.conv.weight': torch.ones(())}, 'scalar.pth'), '4 dimensions'),
        'whole numbers': (save({k: v.int() for k, v in state_dict.items()}, 'int.pth'), 'is of type torch.int32'),
        'keys are no names': (save({3: torch.ones(1)}, 'keys.pth'), 'is not a state dict: 3 is a Tensor'),
        'malformed metadata': (metadata('[1]'), 'malformed model configuration'),
        'corrupt metadata': (metadata('{'), 'malformed model configuration'),
        'malformed model_args': (configured({'model_args': 5}), 'malformed model configuration'),
        'malformed image size': (configured({'model_args': {'img_size': 'abc'}}), 'malformed model configuration'),
        'unknown layer': (configured({'model_args': {'norm_layer': 'nope'}}), "norm_layer is 'nope', where one of"),
        'NaN': (save({**state_dict, 'blocks.1.norm1.weight': nan}, 'nan.pth'), 'blocks.1.norm1.weight holds NaN'),
    }


BAD_INPUTS = [
    'missing file', 'empty folder', 'folder without weights', 'corrupt config', 'truncated zip',
    'truncated safetensors', 'empty file', 'empty safetensors', 'text', 'noise', 'code', 'plain pickled code',
    'a tensor', 'empty state dict', 'no tensors', 'converted already', 'DeiT', 'ResNet', 'something else',
    'missing key', 'missing bias', 'missing needed key', 'unexpected key', 'shapes disagree', 'width is no patch',
    'no dimensions', 'whole numbers', 'keys are no names', 'malformed metadata', 'corrupt metadata',
    'malformed model_args', 'malformed image size', 'unknown layer', 'NaN',
]


@pytest.fixture(scope='module')
def made_bad_inputs(conv_model, tmp_path_factory):
    made = bad_inputs(tmp_path_factory.mktemp('bad'), conv_model.state_dict())
    assert list(made) == BAD_INPUTS
    return made


@pytest.mark.parametrize('kind', BAD_INPUTS)
def test_bad_input_is_one_line_and_exit_2(kind, made_bad_inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, message = made_bad_inputs[kind]
    assert main([str(path), 'out.safetensors']) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.count('\n') == 1
    assert err.startswith('convert_checkpoint: ')
    assert not list(tmp_path.iterdir()), 'nothing is written, no code is executed'


@pytest.mark.parametrize(('options', 'message'), [
    (['--num-classes', '5'], 'has 10 classes, where 5 were expected'),
    (['--use-ema'], 'holds no EMA weights'),
    (['--img-size', '30'], '--img-size (30, 30) is not divisible by --patch-size 4'),
    (['--in-chans', '4'], 'set hidden_chans to 4 or more'),
    (['--num-heads', '8'], 'it takes 9 heads of 48'),
    (['--model', 'resnet18'], 'resnet18 is not a phase-2 model: choose one of cmhsa_attn'),
    (['--images', 'nowhere'], 'nowhere is not a folder of images'),
    (['--num-heads', '0'], '--num-heads 0 must be a positive whole number'),
    (['--num-heads', '9' * 23], 'must be a positive whole number, and 10000 at most'),
    (['--head-dim', '9' * 23], 'must be a positive whole number, and 100000 at most'),
    (['--head-dim', '0'], '--head-dim 0 must be a positive'),
    (['--model', 'cmhsa_attn_16x96'], 'tokens of width 768, the phase-1 model of 48: choose cmhsa_attn'),
    (['--model', 'cmhsa_attn_soft_20x96', '--peak', '0.75'], 'choose cmhsa_attn_soft with --head-dim N'),
    (['--head-dim', '-1', '--approximate'], '--head-dim -1 must be a positive'),
    (['--in-chans', '0'], '--in-chans is 0, where a whole number from 1 to 1000 was expected'),
    (['--sharpness', 'nan'], '--sharpness nan must be positive'),
    (['--sharpness', '-3'], '--sharpness -3.0 must be positive'),
    (['--sharpness', '1e30'], 'must be positive, and 10000 at most'),
    (['--tolerance', 'nan'], '--tolerance nan must be 0 or more'),
    (['--num-heads', '10000', '--head-dim', '100000'], '--num-heads 10000 would make a layer of'),
    (['--img-size', '0'], '--img-size is (0, 0), where one or two whole numbers from 1'),
    (['--model-kwargs', 'act_layer=eval'], "act_layer is 'eval', where one of 'silu', 'swish'"),
    (['--model-kwargs', 'global_pool=sum'], "global_pool is 'sum', where one of"),
    (['--model-kwargs', 'pretrained=True'], 'has pretrained, where only img_size, patch_size, in_chans, global_pool'),
    (['--model-kwargs', 'in_chans=1', '--in-chans', '3'], 'in_chans was given twice, 1 and 3'),
    (['--patch-size', '5'], 'are not patches of (5, 5) pixels: give --patch-size HxW with H * W = 16'),
])
def test_bad_options_are_one_line_and_exit_2(options, message, src, tmp_path, capsys):
    assert main([str(src), str(tmp_path / 'out'), *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count('\n') == 1
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(('arguments', 'message'), [
    (['--peak', 'a'], "argument --peak: invalid float value: 'a'"),
    (['--pek', '0.5'], 'unrecognized arguments: --pek 0.5'),
])
def test_options_that_cannot_be_read_are_one_line_and_exit_2(arguments, message, src, tmp_path, capsys):
    with pytest.raises(SystemExit, match='2'):
        main([str(src), str(tmp_path / 'out'), *arguments])
    err = capsys.readouterr().err
    assert err == f'convert_checkpoint: error: {message} (see convert_checkpoint --help)\n'
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('told', ['img_size=32x32', 'act_layer=', "act_layer='a b'", 'global_pool'])
def test_model_kwargs_that_are_no_values(told, src, tmp_path, capsys):
    """Older versions of timm raise a SyntaxError for some."""
    try:
        code = main([str(src), str(tmp_path / 'out'), '--model-kwargs', told])
    except SystemExit as e:
        code = e.code
    assert code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith('convert_checkpoint: error: ')


@pytest.mark.parametrize(('options', 'said'), [
    (dict(tolerance=float('nan')), 'tolerance=nan must be 0 or more'),
    (dict(sharpness=float('nan')), 'sharpness=nan must be positive'),
    (dict(num_heads=2.5), 'num_heads=2.5 must be a positive whole number'),
    (dict(dtype='int8'), 'dtype int8 is none of float64'),
    (dict(dtype=torch.int8), 'dtype torch.int8 is none of float64'),
    (dict(images='nowhere'), 'nowhere is not a folder of images'),
    (dict(model='resnet18'), 'resnet18 is not a phase-2 model'),
    (dict(rel_pos='learned'), "rel_pos='learned' cannot express"),
    (dict(model_kwargs=dict(in_chans=0)), 'in_chans is 0'),
    (dict(img_size=float('nan')), 'img_size is nan'),
])
def test_bad_options_are_refused_before_anything_is_read(options, said, tmp_path):
    for src in (tmp_path / 'missing.pth', 'hf-hub:alice/missing'):
        with pytest.raises(CheckpointError, match=said):
            convert_checkpoint(src, tmp_path / 'out', **options)
    with pytest.raises(CheckpointError, match='unknown suffix'):
        convert_checkpoint('hf-hub:alice/missing', tmp_path / 'out.ckpt')


# What tensors do not tell


@pytest.mark.parametrize('kwargs', [
    dict(global_pool='max'), dict(act_layer='relu'), dict(norm_layer='rmsnorm', fc_norm=True), dict(global_pool='map')])
def test_what_tensors_do_not_tell_can_be_told(kwargs, tmp_path, capsys):
    model = create(**kwargs)
    torch.save(model.state_dict(), tmp_path / 'a.pth')
    told = ['--model-kwargs', *(f'{key}={value}' for key, value in kwargs.items())]
    assert main([str(tmp_path / 'a.pth'), str(tmp_path / 'out'), *told]) == 0
    assumed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith('assumed'))
    assert not any(key in assumed for key in kwargs)
    assert_same_function(model, timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True))
    loaded = timm.create_model(ATTN, **SMALL, **kwargs)
    loaded.load_state_dict(convert_state_dict(model.state_dict(), model_kwargs=kwargs))
    assert_same_function(model, loaded)


def test_what_is_told_must_agree_with_what_the_checkpoint_tells(tmp_path, capsys):
    save_training_checkpoint(create(global_pool='max'), tmp_path, gp='max', img_size=32)
    args = [str(tmp_path / 'last.pth.tar'), str(tmp_path / 'out')]
    assert main([*args, '--model-kwargs', 'global_pool=avg']) == 2
    assert 'was trained with global_pool=max, where avg was asked for' in capsys.readouterr().err
    assert main([*args, '--model-kwargs', 'global_pool=max', 'img_size=32']) == 0
    assert 'assumed' not in capsys.readouterr().out
    with pytest.raises(SystemExit, match='2'):
        main(['--model-kwargs', *args])
    assert '--model-kwargs: expected NAME=VALUE' in capsys.readouterr().err


def test_models_that_others_registered(tmp_path):
    def other_cmhsa_conv(pretrained=False, **kwargs):
        return create_cmhsa(CmhsaConv, 'other_cmhsa_conv', pretrained, kwargs, global_pool='max')

    other_cmhsa_conv.__module__ = __name__
    default_cfgs = {'other_cmhsa_conv': cfg(input_size=(3, 16, 16))}
    sys.modules[__name__].default_cfgs = generate_default_cfgs(default_cfgs)
    register_model(other_cmhsa_conv)
    model = timm.create_model('other_cmhsa_conv', img_size=16, patch_size=4, depth=1, num_classes=3).eval()
    defaults = {'other_cmhsa_conv': 'other_cmhsa_conv', 'unknown': 'cmhsa_conv_k3_patch4_32'}
    for name, default in defaults.items():
        torch.save({'arch': name, 'state_dict': model.state_dict()}, tmp_path / 'a.pth')
        report = convert_checkpoint(tmp_path / 'a.pth', tmp_path / name)
        assert report.img_size_source == f'default of {default}'
        assert ('global_pool' in report.assumed) == (name == 'unknown')
    assert_same_function(
        model, timm.create_model(f'local-dir:{tmp_path / "other_cmhsa_conv"}', pretrained=True), size=(16, 16))
    for asked, default in {'test_cmhsa_attn': 'test_cmhsa_attn', 'cmhsa_attn_soft': 'cmhsa_conv_k3_patch4_32'}.items():
        report = convert_checkpoint(tmp_path / 'a.pth', tmp_path / asked, model=asked)  # 224 is of other patches
        assert report.img_size_source == f'default of {default}'


@pytest.mark.parametrize('wrapped', ['module.', '_orig_mod.', 'module._orig_mod.'])
def test_a_name_that_is_there_twice(wrapped, conv_model, tmp_path, capsys):
    state_dict = conv_model.state_dict()
    both = {**state_dict, f'{wrapped}head.bias': state_dict['head.bias'] + 1}
    torch.save(both, tmp_path / 'a.pth')
    assert main([str(tmp_path / 'a.pth'), str(tmp_path / 'out')]) == 2
    error = capsys.readouterr().err
    assert "'head.bias' is there twice, once with the prefix of a wrapper" in error
    assert error.count('\n') == 1
    with pytest.raises(CheckpointError, match='is there twice'):
        convert_state_dict(both)


@pytest.mark.parametrize('name', ['a.pth', 'a.safetensors'])
def test_the_digest_is_that_of_what_was_read(name, conv_model, tmp_path):
    """Whoever opens the file a second time finds another one, and must not mix the two."""
    path, opened = tmp_path / name, []
    save = safetensors.torch.save_file if name == 'a.safetensors' else torch.save
    save(conv_model.state_dict(), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    def replace(event, args):
        if event == 'open' and str(args[0]) == str(path) and not opened.append(path) and len(opened) == 2:
            path.unlink()
            path.write_bytes(b'another file')

    sys.addaudithook(replace)
    try:
        assert convert_checkpoint(path, tmp_path / 'out').source['SHA-256'] == digest
    except CheckpointError:
        assert not (tmp_path / 'out').exists()


def test_a_size_that_disagrees_with_the_checkpoint_is_refused(tmp_path, capsys):
    save_training_checkpoint(create(img_size=48), tmp_path, img_size=48)
    assert main([str(tmp_path / 'last.pth.tar'), str(tmp_path / 'out'), '--img-size', '32']) == 2
    assert 'was trained with --img-size (48, 48), where (32, 32) was asked for' in capsys.readouterr().err
    assert main([str(tmp_path / 'last.pth.tar'), str(tmp_path / 'out'), '--img-size', '48x48']) == 0


def test_images_that_cannot_be_read(src, tmp_path, capsys):
    (tmp_path / 'images').mkdir()
    for i in range(20):
        (tmp_path / 'images' / f'{i}.png').write_bytes(b'no image')
    assert main([str(src), str(tmp_path / 'out'), '--images', str(tmp_path / 'images')]) == 2
    assert 'holds no images that can be read' in capsys.readouterr().err


def test_every_tensor_keeps_its_type(conv_model, tmp_path):
    mixed = {
        name: tensor.bfloat16() if 'blocks.1.' in name else tensor for name, tensor in conv_model.state_dict().items()}
    torch.save(mixed, tmp_path / 'a.pth')
    assert convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'out.pth').max_error < 2e-6
    for name, tensor in torch.load(tmp_path / 'out.pth').items():
        assert tensor.dtype == (torch.bfloat16 if 'blocks.1.' in name else torch.float32), name


def test_names_of_files_stay_as_they_are(tmp_path, capsys):
    assert main([str(tmp_path / 'num_heads=9,model=x' / 'last.pth.tar'), str(tmp_path / 'out')]) == 2
    assert 'num_heads=9,model=x/last.pth.tar does not exist' in capsys.readouterr().err


def test_values_that_the_type_does_not_hold(conv_model, tmp_path, capsys):
    state_dict, name = conv_model.state_dict(), 'blocks.1.attn.conv.weight'
    for scale in (1e6, 1e-6, 1e-9):  # beyond the range, below all but a few digits, and below all
        torch.save({**state_dict, name: state_dict[name] * scale}, tmp_path / 'a.pth')
        assert main([str(tmp_path / 'a.pth'), str(tmp_path / 'out'), '--dtype', 'float16']) == 2
        assert f'{name} has values that do not fit into torch.float16' in capsys.readouterr().err
    torch.save({**state_dict, name: torch.zeros_like(state_dict[name])}, tmp_path / 'a.pth')
    assert main([str(tmp_path / 'a.pth'), str(tmp_path / 'out'), '--dtype', 'float16']) == 0
    assert 'rounding to its type adds an error of' in capsys.readouterr().out


def test_tensors_that_are_not_contiguous(conv_model, tmp_path):
    state_dict = conv_model.state_dict()
    name = 'blocks.0.mlp.fc1.weight'
    torch.save({**state_dict, name: state_dict[name].T.contiguous().T}, tmp_path / 'a.pth')
    convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'out')
    assert_same_function(conv_model, timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True))


# The command


def test_command_is_installed_and_prints_the_table(src, tmp_path):
    command = Path(sys.executable).with_name('convert_checkpoint')
    result = subprocess.run([command, src, tmp_path / 'out'], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == (
        f'{ATTN}: 3-channel images of 32 x 32 pixels (default of cmhsa_conv_k3_patch4_32), patches of 4 x 4, '
        'sharpness 40.2')
    assert lines[1].split() == ['layer', 'heads', 'used', 'largest', 'error', 'rms', 'error']
    assert [line.split()[:4] for line in lines[2:4]] == [[f'blocks.{i}.attn', '9', 'of', '9'] for i in range(2)]
    assert lines[4].startswith('logits')
    assert lines[5] == 'top-1 agreement 100.00% on 8 random and 0 real images'
    assert lines[6] == (
        'assumed, as tensors alone do not tell: patch_size=(4, 4), in_chans=3, norm_layer=layernorm, act_layer=gelu, '
        'global_pool=avg')
    assert lines[7] == (
        'The errors are those against a model of the same assumptions: where it was another, tell what it had.')
    assert lines[8] == (
        f'options for train.py, if loaded from a file: --model {ATTN} --num-classes 10 --img-size 32 --model-kwargs '
        'patch_size=4 img_size=32 depth=2 head_dim=48')
    assert lines[9] == f'written to {tmp_path / "out"}'


@pytest.mark.parametrize('img_size', [16, (16, 32)])
def test_the_options_it_prints_make_the_model(img_size, tmp_path, capsys):
    """They are read as timm's train.py reads them."""
    src, dst = tmp_path / 'model.pth', tmp_path / 'out.safetensors'
    shape = dict(img_size=img_size, patch_size=8, in_chans=1, hidden_chans=1, num_classes=3, depth=1)
    torch.save(timm.create_model(CONV, global_pool='max', **shape).state_dict(), src)
    size = 'x'.join(map(str, to_2tuple(img_size)))
    told = ['--img-size', size, '--in-chans', '1', '--model-kwargs', 'global_pool=max']
    assert main([str(src), str(dst), '--num-heads', '12', *told]) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    parser = argparse.ArgumentParser()
    for flag in ('--model', '--gp'):
        parser.add_argument(flag)
    for flag in ('--num-classes', '--in-chans', '--img-size'):
        parser.add_argument(flag, type=int)
    parser.add_argument('--input-size', nargs=3, type=int)
    parser.add_argument('--model-kwargs', nargs='*', default={}, action=ParseKwargs)
    options = parser.parse_args(shlex.split(line.removeprefix('options for train.py, if loaded from a file:')))
    assert options.input_size == ([1, 16, 32] if img_size == (16, 32) else None)
    assert options.img_size == (None if img_size == (16, 32) else 16)
    model = timm.create_model(
        options.model, num_classes=options.num_classes, in_chans=options.in_chans, global_pool=options.gp,
        **options.model_kwargs)
    model.load_state_dict(safetensors.torch.load_file(dst))
    assert model.patch_embed.img_size == to_2tuple(img_size)


def test_command_explains_itself(capsys):
    with pytest.raises(SystemExit):
        main(['--help'])
    text = capsys.readouterr().out
    for option in ('--num-heads', '--head-dim', '--sharpness', '--model', '--num-classes', '--force', '--dtype',
                   '--use-ema', '--img-size', '--images'):
        assert option in text
