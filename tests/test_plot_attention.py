"""The plot_attention command, and its call in Python, on real files."""
import argparse
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform
from timm.models import save_for_hf

import timm_cmhsa
from timm_cmhsa import images
from timm_cmhsa.cli import plot_main as main
from timm_cmhsa.files import CheckpointError
from timm_cmhsa.images import choose_images, data_config, read_folder
from timm_cmhsa.plots import PlotError, in_order_of_training, load_model, plot_attention

KWARGS = dict(rel_pos='quadratic_gen', depth=2, num_heads=3)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Checkpoints of a training, other files that models come in, and images."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('files')
    for epoch in range(3):
        model = timm.create_model('test_pixel_attn', **KWARGS, num_classes=7)
        args = argparse.Namespace(
            model='test_pixel_attn', model_kwargs=KWARGS, num_classes=7, img_size=None, mean=[0.5] * 3, std=[0.25] * 3)
        torch.save(
            {'epoch': epoch, 'arch': 'test_pixel_attn', 'state_dict': model.state_dict(), 'args': args},
            folder / f'checkpoint-{epoch}.pth.tar')
    torch.save(model.state_dict(), folder / 'plain.pth')
    save_file(model.state_dict(), folder / 'plain.safetensors')
    save_for_hf(model, str(folder / 'local'), model_args=KWARGS, safe_serialization=True)
    torch.save(timm.create_model('test_pixel_attn', **dict(KWARGS, num_heads=2)).state_dict(), folder / 'two_heads.pth')
    torch.save(timm.create_model('test_cmhsa_conv_k3').state_dict(), folder / 'phase1.pth')
    torch.save({**model.state_dict(), 'head.bias': torch.full((7,), float('nan'))}, folder / 'nan.pth')
    (folder / 'text.pth').write_text('no checkpoint')
    for name in 'abcde':
        (folder / 'images' / name).mkdir(parents=True)
        pixels = torch.randint(256, (40, 48, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(folder / 'images' / name / f'{name}.png')
    (folder / 'no_images').mkdir()
    (folder / 'broken').mkdir()
    for name in 'ab':
        (folder / 'broken' / f'{name}.png').write_text('no image')
    return folder


def is_drawn(path):
    return len(Image.open(path).convert('RGB').getcolors(1 << 24)) > 50


def test_checkpoints_of_a_training_become_pictures_of_its_movement(folder, tmp_path, capsys):
    checkpoints = [str(folder / f'checkpoint-{epoch}.pth.tar') for epoch in range(2)]
    assert main([*checkpoints, '--output', str(tmp_path / 'out'), '--images', str(folder / 'images'), '--html']) == 0
    names = [
        'attention.png', 'attention_image.png', 'statistics.png', 'centers.png', 'movement_blocks.0.attn.png',
        'movement_blocks.1.attn.png', 'statistics_movement.png', 'center_paths.png', 'attention.html']
    assert sorted(capsys.readouterr().out.split()) == sorted(str(tmp_path / 'out' / name) for name in names)
    assert {path.name for path in (tmp_path / 'out').iterdir()} == set(names)
    assert all(is_drawn(tmp_path / 'out' / name) for name in names[:-1])


def test_the_installed_command_draws_a_checkpoint(folder, tmp_path):
    command = [Path(sys.executable).with_name('plot_attention'), folder / 'local', '--output', tmp_path]
    subprocess.run([*command, '--layer', 'blocks.0.attn'], check=True)
    assert is_drawn(tmp_path / 'attention.png')


def test_a_model_on_the_hub(hub, tmp_path, capsys):
    timm_cmhsa.push_to_hub(timm.create_model('test_cmhsa_attn', num_classes=3), 'alice/net')
    options = ['--output', str(tmp_path / 'out'), '--layer', 'blocks.0.attn']
    assert main(['hf-hub:alice/net', *options]) == 0
    assert is_drawn(tmp_path / 'out' / 'attention.png')
    capsys.readouterr()
    assert main(['hf-hub:alice/none', *options]) == 2
    assert capsys.readouterr().err.count('\n') == 1


def test_one_layer_of_one_checkpoint_seen_on_noise(folder, tmp_path):
    paths = plot_attention(folder / 'checkpoint-0.pth.tar', tmp_path, layer='blocks.1.attn', html=True)
    assert {path.name for path in paths} == {'attention.png', 'statistics.png', 'centers.png', 'attention.html'}
    page = (tmp_path / 'attention.html').read_text()
    assert 'blocks.1.attn' in page
    assert 'blocks.0.attn' not in page
    assert [i for i in range(1, 9) if f'"title": "noise {i}"' in page] == [1, 3, 5, 7]
    assert Image.open(tmp_path / 'attention.png').size[1] < 300  # one row of heads


@pytest.mark.parametrize('name', ['plain.pth', 'plain.safetensors'])
def test_a_state_dict_needs_the_name_of_its_model(name, folder):
    with pytest.raises(CheckpointError, match='does not tell which model it is of'):
        load_model(folder / name)
    assert load_model(folder / name, 'test_pixel_attn', KWARGS).num_classes == 7


def test_options_of_the_command_name_the_model(folder, tmp_path):
    assert main([
        str(folder / 'plain.pth'), '--output', str(tmp_path), '--model', 'test_pixel_attn', '--model-kwargs',
        'rel_pos=quadratic_gen', 'depth=2', 'num_heads=3', '--layer', 'blocks.0.attn']) == 0
    assert (tmp_path / 'centers.png').exists()


def test_models_are_those_of_their_files(folder):
    expected = torch.load(folder / 'plain.pth', weights_only=True)
    for name in ('checkpoint-2.pth.tar', 'local'):
        model = load_model(folder / name)
        assert not model.training
        assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    assert load_model(folder / 'checkpoint-2.pth.tar').pretrained_cfg['mean'] == [0.5] * 3


@pytest.mark.parametrize(('arguments', 'message'), [
    (['nowhere.pth'], 'nowhere.pth does not exist'),
    (['text.pth'], 'is truncated, corrupt or not a checkpoint'),
    (['nan.pth', '--model', 'test_pixel_attn'], 'holds NaN or Inf'),
    (['plain.pth', '--model', 'pixel'], "'pixel' is no model that timm knows"),
    (['plain.pth', '--model', 'x' * 10 ** 4], "xxx...xxx"),
    (['plain.pth', '--model', 'test_pixel_attn.tag'], "'test_pixel_attn.tag' is no model that timm knows"),
    (['plain.pth', '--model', 'test_pixel_attn', '--model-kwargs', 'depth=1000000000'], 'a whole number from'),
    (['plain.pth', '--model', 'test_pixel_attn'], 'cannot be loaded as test_pixel_attn'),
    (['plain.pth', '--model', 'test_pixel_attn', '--model-kwargs', 'nonsense=1'], 'nonsense'),
    (['phase1.pth', '--model', 'test_cmhsa_conv_k3'], 'has no attention layer of timm_cmhsa'),
    (['checkpoint-0.pth.tar', '--layer', 'blocks.9.attn'], 'choose one of blocks.0.attn, blocks.1.attn'),
    (['checkpoint-0.pth.tar', '--query', '2', '0'], 'the query 2 0 is outside the image'),
    (['nowhere.pth', '--query', '2', '0'], 'the query 2 0 is outside the image'),  # before any work
    (['checkpoint-0.pth.tar', '--images', 'no_images'], 'holds no images that can be read: no file ends in .png, .jpg'),
    (['checkpoint-0.pth.tar', '--images', 'broken'], 'holds no images that can be read: a.png: cannot identify'),
    (['checkpoint-0.pth.tar', '--images', 'plain.pth'], 'is not a folder of images'),
    (['checkpoint-0.pth.tar', 'checkpoint-0.pth.tar'], 'a checkpoint is given twice'),
    (['checkpoint-0.pth.tar', 'two_heads.pth', '--model', 'test_pixel_attn', '--model-kwargs', 'depth=2',
      'rel_pos=quadratic_gen', 'num_heads=2'], 'cannot be loaded as test_pixel_attn'),
])
def test_bad_input_is_one_line_and_exit_2(arguments, message, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main([*arguments, '--output', str(tmp_path / 'out')]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith('plot_attention: error: ')
    assert message in err
    assert err.count('\n') == 1
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('arguments', [
    ['--num-images', '0'], ['--query', '1'], ['--query', 'a', 'b'], ['--model-kwargs', 'depth']])
def test_bad_options_are_exit_2(arguments, folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        main([str(folder / 'checkpoint-0.pth.tar'), '--output', str(tmp_path / 'out'), *arguments])
    assert e.value.code == 2
    assert 'plot_attention: error: argument --' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_checkpoints_of_different_models_do_not_move(folder, tmp_path, capsys):
    save_for_hf(timm.create_model('test_pixel_attn', depth=2), str(tmp_path / 'other'), model_args=dict(depth=2))
    assert main([str(folder / 'local'), str(tmp_path / 'other'), '--output', str(tmp_path / 'out')]) == 2
    assert 'local and other are not of one model' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_no_checkpoints_are_refused(tmp_path):
    with pytest.raises(PlotError, match='no checkpoint is given'):
        plot_attention(sorted(tmp_path.glob('*.pth.tar')), tmp_path)


def test_output_that_is_no_folder(folder, tmp_path):
    (tmp_path / 'file').touch()
    for output in ('file', 'file/in/it'):
        with pytest.raises(PlotError, match='file is not a folder that can be written to: choose another output'):
            plot_attention(folder / 'nowhere.pth', tmp_path / output)


def test_files_that_cannot_be_written_leave_nothing_partial(folder, tmp_path):
    (tmp_path / 'attention.png').mkdir()
    with pytest.raises(PlotError, match='cannot be written'):
        plot_attention(folder / 'local', tmp_path, layer='blocks.0.attn')
    assert [path.name for path in tmp_path.iterdir()] == ['attention.png']


def test_images_are_evenly_spaced_and_told_from_noise(folder):
    model = load_model(folder / 'local')
    pixels, names, title = choose_images(folder / 'images', model, 3)
    assert pixels.shape == (3, 3, 32, 32)
    assert (names, title) == (['a/a.png', 'b/b.png', 'd/d.png'], '3 images')
    assert choose_images(folder / 'images', model, 1)[1:] == (['a/a.png'], '1 image')
    assert choose_images(None, model, 3)[1:] == ([f'noise {i + 1}' for i in range(8)], '8 images of random noise')


def png(width, height, *chunks):
    header = b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    content = b'\x89PNG\r\n\x1a\n'
    for kind, data in (header, *chunks, (b'IDAT', zlib.compress(bytes(100))), (b'IEND', b'')):
        content += struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    return content


@pytest.fixture
def odd_images(folder, tmp_path):
    """Images that can be read, with what is none before, between and after them."""
    images = tmp_path / 'images'
    (images / '4.png').mkdir(parents=True)
    good = Image.open(folder / 'images/a/a.png')
    for i, name in enumerate(['1', '3', '4.png/in', '6$\\frac{$', os.fsdecode(b'7\xff'), '8\n']):
        good.rotate(90 * i).save(images / f'{name}.png')
    good.save(images / '2.jpg')
    os.truncate(images / '2.jpg', 400)
    Image.new('RGB', (1, 10 ** 5)).save(images / '5narrow.png')
    (images / '0.png').write_text('text')
    (images / '1.jpg').touch()
    (images / '5bomb.png').write_bytes(png(50_000, 50_000))
    (images / '5text.png').write_bytes(png(8, 8, (b'zTXt', b'key\0\0' + zlib.compress(bytes(2 ** 25)))))
    (images / '5eps.png').write_bytes(b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n')
    os.mkfifo(images / '5pipe.png')
    (images / '5self.png').symlink_to('5self.png')
    for name in ('5loop', '5other_loop'):
        (images / name).symlink_to('.')
    return images


def test_what_is_no_image_is_left_out_by_name_and_no_other_takes_its_place(folder, odd_images, caplog):
    model = load_model(folder / 'local')
    images, names = read_folder(odd_images, model, 100)
    files = ['1.png', '3.png', '4.png/in.png', '6$\\frac{$.png', os.fsdecode(b'7\xff.png'), '8\n.png']
    assert names == [*files[:4], '7\\udcff.png', '8\\n.png']
    transform = create_transform(**data_config(model))
    for image, file in zip(images, files, strict=True):
        torch.testing.assert_close(image, transform(Image.open(odd_images / file)))
    assert [record.args[0] for record in caplog.records] == [
        '0.png', '1.jpg', '2.jpg', *(f'5{name}.png' for name in ('bomb', 'eps', 'narrow', 'pipe', 'self', 'text'))]
    assert not any('\n' in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_the_command_draws_them_under_their_names(folder, odd_images, tmp_path):
    (odd_images / '1.png').unlink()
    model = (folder / 'local').rename(tmp_path / '$\\frac{$ \n')
    command = [Path(sys.executable).with_name('plot_attention'), model, '--output', tmp_path / 'out', '--html']
    result = subprocess.run([*command, '--images', odd_images], capture_output=True, text=True)
    model.rename(folder / 'local')
    assert result.returncode == 0
    lines = result.stderr.splitlines()
    assert sum('is left out, it cannot be read' in line for line in lines) == 9
    assert 'Traceback' not in result.stderr
    assert '"title": "3.png"' in (tmp_path / 'out' / 'attention.html').read_text()


def test_more_images_than_memory_are_refused_before_they_are_read(folder, monkeypatch):
    model = load_model(folder / 'local')
    monkeypatch.setattr(images, 'MAX_VALUES', 4 * 3 * 32 * 32)
    assert len(read_folder(folder / 'images', model, 4)[0]) == 4
    with pytest.raises(CheckpointError, match=r'5 images of \(3, 32, 32\) do not fit into memory: take fewer'):
        read_folder(folder / 'images', model, 10 ** 9)


def test_without_matplotlib_one_line_says_what_to_install(folder, tmp_path, capsys, monkeypatch):
    for name in list(sys.modules):
        if name.startswith('timm_cmhsa.plots'):
            monkeypatch.delitem(sys.modules, name)
        elif name.startswith('matplotlib'):
            monkeypatch.setitem(sys.modules, name, None)
    assert main([str(folder / 'local'), '--output', str(tmp_path / 'out')]) == 2
    assert capsys.readouterr().err == (
        "plot_attention: error: matplotlib is missing: pip install 'timm_cmhsa[plots]'\n")
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(('given', 'expected'), [
    (['a/checkpoint-10.pth.tar', 'a/checkpoint-9.pth.tar'], ['a/checkpoint-9.pth.tar', 'a/checkpoint-10.pth.tar']),
    (['a/last.pth.tar', 'a/checkpoint-9.pth.tar'], ['a/last.pth.tar', 'a/checkpoint-9.pth.tar']),
    (['b/checkpoint-1.pth.tar', 'a/checkpoint-1.pth.tar'], ['b/checkpoint-1.pth.tar', 'a/checkpoint-1.pth.tar']),
])
def test_checkpoints_of_train_py_are_put_in_the_order_of_their_epochs(given, expected):
    assert in_order_of_training([Path(path) for path in given]) == [Path(path) for path in expected]
