"""A phase-1 checkpoint in, a verified phase-2 checkpoint out, by the function and by the command."""
import os
import signal

import pytest
import timm
import torch
from helpers import command_error, images_for, max_error, phase1, run_forked, write_image

from timm_cmhsa import CheckpointError, convert_checkpoint, convert_state_dict, load_model
from timm_cmhsa.checkpoint import Checkpoint
from timm_cmhsa.cli import convert_main as main

SMALL = dict(img_size=16, depth=2, num_classes=5)


def assert_same(expected, folder, tolerance=1e-5):
    """Check that timm loads from a folder what computes the same as a model, and return it."""
    actual, images = timm.create_model(f'local-dir:{folder}', pretrained=True).eval(), images_for(expected)
    with torch.no_grad():
        assert max_error(expected(images), actual(images)) <= tolerance
    return actual


def run(*args):
    """Run the command and return its exit code."""
    return main([str(arg) for arg in args])


@pytest.fixture(scope='module')
def model():
    return phase1(**SMALL)


@pytest.fixture
def src(model, tmp_path):
    path = tmp_path / 'phase1.safetensors'
    Checkpoint.of(model).write(path)
    return path


@pytest.mark.parametrize('kwargs', [
    dict(), dict(img_size=(8, 24), patch_size=(2, 4)), dict(in_chans=5, hidden_chans=5), dict(kernel_size=11),
    dict(norm_layer='rmsnorm', act_layer='silu', global_pool='max', fc_norm=True), dict(global_pool='', num_classes=0),
    dict(global_pool='', in_chans=5, hidden_chans=6), dict(dtype=torch.bfloat16)])
@pytest.mark.parametrize('options', [{}, {'peak': 0.6}, {'num_heads': 50, 'head_dim': 20, 'qk_dim': 4}])
def test_any_checkpoint_is_converted(kwargs, options, tmp_path):
    model = phase1(**{**SMALL, **kwargs})
    Checkpoint.of(model).write(tmp_path / 'phase1')
    report = convert_checkpoint(tmp_path / 'phase1', tmp_path / 'phase2', **options)
    assert report.max_error <= 1e-5
    converted = assert_same(model.float(), tmp_path / 'phase2')
    attn = converted.blocks[0].attn
    about = report.details['Conversion']
    assert about['Heads'].startswith(f'{attn.num_heads} of width {attn.head_dim}, queries and keys of {attn.qk_dim}, ')
    assert about['Model'].startswith(f'{converted.pretrained_cfg["architecture"]}, images of ')
    assert {(layer.heads_used, layer.num_heads) for layer in report.layers} == {
        (int(attn.used_heads().sum()), attn.num_heads)}


def test_what_the_checkpoint_lacks_can_be_given(tmp_path, capsys):
    args = dict(SMALL, patch_size=(2, 8), in_chans=2, global_pool='', act_layer='relu')
    model = phase1(**args)
    torch.save(model.state_dict(), tmp_path / 'a.pth')
    args = {name: args[name] for name in ('patch_size', 'in_chans', 'img_size', 'global_pool', 'act_layer')}
    convert_checkpoint(tmp_path / 'a.pth', tmp_path / 'out', **args)
    assert_same(model, tmp_path / 'out')
    command = [tmp_path / 'a.pth', tmp_path / 'by_command', '--img-size', '16x16', '--patch-size', '2x8',
               '--model-kwargs', 'act_layer=relu', "global_pool=''", '--in-chans']
    assert 'carry 3 channels' in command_error(main, [*command, 5], capsys)
    assert run(*command, 2) == 0
    assert_same(model, tmp_path / 'by_command')


def test_averaged_weights_are_taken_and_the_report_says_so(model, tmp_path, capsys):
    """It also says what was assumed."""
    averaged = phase1(**SMALL, seed=1)
    content = {'state_dict': model.state_dict(), 'state_dict_ema': averaged.state_dict(), 'args': {'img_size': 16}}
    torch.save(content, tmp_path / 'last.pth.tar')
    assert run(tmp_path / 'last.pth.tar', tmp_path / 'averaged') == 0
    note = ('averaged (EMA) weights, state_dict_ema, which validate.py reads from this file with --use-ema; assumed '
            'global_pool=avg, act_layer=None, patch_size=(4, 4), in_chans=3')
    assert note in capsys.readouterr().out
    assert_same(averaged, tmp_path / 'averaged')
    assert run(tmp_path / 'last.pth.tar', tmp_path / 'raw', '--no-ema') == 0
    assert 'EMA' not in capsys.readouterr().out
    assert_same(model, tmp_path / 'raw')


def test_real_images(src, tmp_path):
    for i in range(3):
        write_image(tmp_path / 'images' / f'{i}.png', seed=i, size=(40, 36))
    report = convert_checkpoint(src, tmp_path / 'out', images=tmp_path / 'images')
    assert report.top1_agreement == 1
    assert '8 random ones and 3 real ones' in str(report)


def test_what_is_not_phase_1_is_refused(model, src, tmp_path):
    convert_checkpoint(src, tmp_path / 'phase2')
    with pytest.raises(CheckpointError, match='phase2 holds a CmhsaAttn, not a phase-1 model'):
        convert_checkpoint(tmp_path / 'phase2', tmp_path / 'out')
    for tensors in (load_model(tmp_path / 'phase2').state_dict(), timm.create_model('test_vit').state_dict(), {}, None):
        with pytest.raises(CheckpointError, match=r'phase-1|holds no state dict'):
            convert_state_dict(tensors, img_size=16)


def test_the_source_is_never_replaced(model, tmp_path):
    folder = tmp_path / 'phase1'
    Checkpoint.of(model).write(folder)
    (tmp_path / 'link').symlink_to(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    weights = folder / 'model.safetensors'
    for source, dst in ((folder, folder), (folder, tmp_path / 'link'), (weights, weights), (weights, folder),
                        (folder, weights), (tmp_path / 'link', weights)):
        with pytest.raises(CheckpointError, match='is the source, or one holds the other'):
            convert_checkpoint(source, dst, force=True)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_what_the_command_prints(src, tmp_path, capsys):
    assert run(src, tmp_path / 'out', '--model', 'cmhsa_attn_soft') == 0
    out, err = capsys.readouterr()
    assert not err
    for text in ('blocks.1.attn', '10 of 10', 'soft, peak 0.75', f'--model local-dir:{tmp_path}/out --pretrained'):
        assert text in out


def test_an_error_above_the_tolerance_is_exit_1_and_writes_nothing(src, tmp_path, capsys):
    dst = tmp_path / 'out'
    convert_checkpoint(src, dst)
    arguments = [src, dst, '--num-heads', '10']
    assert f'{dst} already exists' in command_error(main, arguments, capsys)
    assert run(*arguments, '--force', '--tolerance', '1e-30') == 1
    out, err = capsys.readouterr()
    assert not out
    assert 'convert_checkpoint: error: the error of ' in err.splitlines()[-1]
    assert 'nothing was written' in err
    assert load_model(dst).blocks[0].attn.num_heads == 9
    assert run(*arguments, '--force') == 0
    assert load_model(dst).blocks[0].attn.num_heads == 10
    assert set(os.listdir(tmp_path)) == {src.name, 'out'}


@pytest.mark.parametrize(('options', 'message'), [
    ('--img-size 30', 'was trained with img_size=(16, 16), but img_size=(30, 30)'), ('--in-chans 5', 'in_chans'),
    ('--num-heads 8', 'use 9 heads of 48'), ('--num-heads 0', 'num_heads=0 must be a whole number from 1 to'),
    (f'--num-heads {"9" * 23}', 'from 1 to 10000'), ('--model resnet18', 'resnet18 is not a phase-2 model'),
    ('--images nowhere', 'nowhere'), ('--model-kwargs rel_pos=padded_table', "unexpected keyword argument 'rel_pos'"),
    ('--model-kwargs peak=0.5', 'peak: not an argument of these models'),
    ('--peak 1.5', 'peak=1.5 must be a number between 0 and 1'),
    ('--model-kwargs pretrained=True', 'pretrained: not an argument'), ('--model-kwargs act_layer=eval', 'eval'),
    ('--model-kwargs num_classes=4', 'was trained with num_classes=5, but num_classes=4 was given'),
    ('--model-kwargs drop_rate=2', 'drop_rate=2 is not what a model can have'),
    ('--peak a', 'argument --peak: invalid float value'), ('--pek 0.5', 'unrecognized arguments: --pek 0.5'),
    ('--img-size a', "'a' is neither N nor HxW"), ('--in-chans a', "invalid int value: 'a'"),
    ('--model-kwargs global_pool', 'expected NAME=VALUE'), ('--license mit', 'are for --push-to-hub'),
    ('--push-to-hub me', 'expected USER/NAME'),
])
def test_bad_options_are_one_line_and_exit_2(options, message, src, tmp_path, capsys):
    error = command_error(main, [src, tmp_path / 'out', *options.split()], capsys)
    assert message in error
    assert error.startswith('convert_checkpoint: error: ')
    assert os.listdir(tmp_path) == [src.name]


@pytest.mark.parametrize('name', ['missing.pth', 'num_heads=9,model=x/last.pth', 'a\n\x1b[2J', 'x' * 300, 'x/' * 2000])
def test_sources_that_are_not_there_are_named_in_one_line(name, tmp_path, capsys):
    error = command_error(main, [tmp_path / name, tmp_path / 'out'], capsys)
    assert error.strip().isprintable()
    if name.isprintable() and len(name) < 500:
        assert f'{tmp_path / name} does not exist' in error


def test_a_terminated_command_leaves_what_was_there(src, tmp_path):
    convert_checkpoint(src, tmp_path / 'out')

    def hook(event, args):
        if event == 'os.rename' and 'old' in str(args[0]) + str(args[1]):
            os.kill(os.getpid(), signal.SIGTERM)

    code = run_forked(lambda: run(src, tmp_path / 'out', '--force', '--num-heads', '10'), hook)
    assert code not in (0, -signal.SIGTERM)
    assert load_model(tmp_path / 'out').blocks[0].attn.num_heads == 9
    assert set(os.listdir(tmp_path)) == {src.name, 'out'}
