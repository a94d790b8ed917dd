"""The plot_attention command on real files, and the images that it reads."""
import argparse
import os
import sys

import pytest
import timm
import torch
from helpers import command_error, is_picture, write_image
from PIL import Image
from timm.data import create_transform

from timm_cmhsa import CheckpointError, load_model
from timm_cmhsa.checkpoint import Checkpoint
from timm_cmhsa.cli import plot_main as main
from timm_cmhsa.images import choose_images, data_config, read_folder
from timm_cmhsa.plots import in_order_of_training, plot_attention

KWARGS = dict(depth=2, num_heads=3)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Checkpoints of a training, other forms of a model, and images."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('files')
    for epoch in range(2):
        model = timm.create_model('test_cmhsa_attn', **KWARGS, num_classes=7)
        args = argparse.Namespace(model='test_cmhsa_attn', model_kwargs=KWARGS, num_classes=7, img_size=None)
        torch.save(
            {'epoch': epoch, 'arch': 'test_cmhsa_attn', 'state_dict': model.state_dict(), 'args': args},
            folder / f'checkpoint-{epoch}.pth.tar')
    torch.save(model.state_dict(), folder / 'plain.pth')
    Checkpoint.of(model).write(folder / 'local')
    Checkpoint.of(timm.create_model('test_cmhsa_attn', depth=2, num_heads=2)).write(folder / 'two_heads')
    Checkpoint.of(timm.create_model('test_cmhsa_attn', depth=2, num_heads=3, img_size=64)).write(folder / 'large')
    Checkpoint.of(timm.create_model('test_cmhsa_conv_k3')).write(folder / 'phase1')
    for seed, name in enumerate('abcde'):
        write_image(folder / 'images' / name / f'{name}.png', seed, size=(48, 40))
    (folder / 'no_images').mkdir()
    (folder / 'broken').mkdir()
    (folder / 'broken' / 'a.png').write_text('no image')
    return folder


def test_checkpoints_of_a_training_become_pictures_of_its_movement(folder, tmp_path, capsys):
    checkpoints = [str(folder / f'checkpoint-{epoch}.pth.tar') for epoch in range(2)]
    out = tmp_path / 'new' / 'folder'
    assert main([*checkpoints, '--output', str(out), '--images', str(folder / 'images'), '--html']) == 0
    pictures = {
        'attention.png', 'attention_image.png', 'statistics.png', 'movement_blocks.0.attn.png',
        'movement_blocks.1.attn.png', 'statistics_movement.png'}
    files = {str(out / name) for name in (*pictures, 'attention.html')}
    assert set(capsys.readouterr().out.split()) == files
    assert {str(path) for path in out.iterdir()} == files
    assert all(is_picture(out / name) for name in pictures)


def test_a_stock_vit_is_drawn_from_its_folder(tmp_path):
    timm.models.save_for_hf(timm.create_model('test_vit'), str(tmp_path / 'vit'), safe_serialization=True)
    assert main([str(tmp_path / 'vit'), '--output', str(tmp_path / 'out')]) == 0
    assert is_picture(tmp_path / 'out' / 'attention.png')


def test_options_give_what_a_state_dict_lacks(folder, tmp_path):
    torch.save(timm.create_model('test_pixel_attn', rel_pos='learned', depth=1).state_dict(), tmp_path / 'pixel.pth')
    options = ['--architecture', 'test_pixel_attn', '--model-kwargs', 'rel_pos=learned', 'depth=1']
    assert main([str(tmp_path / 'pixel.pth'), '--output', str(tmp_path / 'out'), *options]) == 0
    assert is_picture(tmp_path / 'out' / 'attention.png')


def test_one_layer_seen_on_noise(folder, tmp_path):
    (tmp_path / 'attention.png').write_text('an older picture')
    paths = plot_attention(folder / 'plain.pth', tmp_path, layer='blocks.1.attn', html=True)
    assert {path.name for path in paths} == {'attention.png', 'statistics.png', 'attention.html'}
    page = (tmp_path / 'attention.html').read_text()
    assert 'blocks.1.attn' in page
    assert 'blocks.0.attn' not in page
    assert [i for i in range(1, 9) if f'"title": "noise {i}"' in page] == [1, 3, 5, 7]
    assert is_picture(tmp_path / 'attention.png')
    assert Image.open(tmp_path / 'attention.png').size[1] < 300  # one row of heads


@pytest.mark.parametrize(('arguments', 'message'), [
    ('nowhere.pth', 'nowhere.pth does not exist'), ('phase1', 'CmhsaConv has no attention that can be drawn'),
    ('local --layer blocks.9.attn', 'choose one of blocks.0.attn, blocks.1.attn'),
    ('local --query 2 0', 'The query 2 0 is outside the image'),
    ('local --images no_images', 'no_images has no images (.jpg, .jpeg'),
    ('local --images broken', 'broken has no readable images: a.png cannot be read: cannot identify'),
    ('local --images plain.pth', 'is not a folder of images'),
    ('local two_heads', 'The models have different image sizes, attention layers, heads'),
    ('local large', 'The models have different image sizes'),
    ('local --query 1', 'error: argument --query: expected 2 arguments'),
    ('local --output plain.pth', 'plain.pth: File exists.'),
])
def test_bad_input_is_one_line_and_exit_2(arguments, message, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    error = command_error(main, ['--output', tmp_path / 'out', *arguments.split()], capsys)
    assert message in error
    assert not (tmp_path / 'out').exists()


def test_images_are_evenly_spaced_and_told_from_noise(folder):
    model = load_model(folder / 'local')
    pixels, names, title = choose_images(folder / 'images', model, 3)
    assert pixels.shape == (3, 3, 32, 32)
    assert (names, title) == (['a/a.png', 'b/b.png', 'd/d.png'], '3 images')
    assert choose_images(folder / 'images', model, 1)[1:] == (['a/a.png'], '1 image')
    assert choose_images(None, model, 3)[1:] == ([f'noise {i + 1}' for i in range(8)], '8 images of random noise')


def test_unreadable_images_are_left_out_with_a_warning(folder, tmp_path, caplog):
    good = Image.open(folder / 'images/a/a.png')
    for i, name in enumerate(('1', '3', '6')):
        good.rotate(90 * i).save(tmp_path / f'{name}.png')
    (tmp_path / '4.png').mkdir()
    good.save(tmp_path / '4.png' / 'in.PNG')
    good.save(tmp_path / '7.webp', lossless=True)
    good.save(tmp_path / '2.jpg')
    os.truncate(tmp_path / '2.jpg', 400)
    (tmp_path / '0.png').write_text('text')
    Image.new('1', (14_000, 14_000)).save(tmp_path / '5huge.png')
    good.save(tmp_path / '5other.png', 'PCX')  # not among the formats that are read
    os.mkfifo(tmp_path / '5pipe.png')
    (tmp_path / '8link.png').symlink_to(folder / 'images' / 'a' / 'a.png')
    (tmp_path / '8loop.png').symlink_to('8loop.png')
    model = load_model(folder / 'local')
    images, names = read_folder(tmp_path, model, 100)
    assert names == ['1.png', '3.png', '4.png/in.PNG', '6.png', '7.webp', '8link.png']
    transform = create_transform(**data_config(model))
    for image, name in zip(images, names):
        torch.testing.assert_close(image, transform(Image.open(tmp_path / name)))
    warned = [record.getMessage().split()[0] for record in caplog.records]
    assert warned == ['0.png', '2.jpg', '5huge.png', '5other.png', '8loop.png']


def test_models_with_other_channels_see_noise_alone(folder):
    many = timm.create_model('test_cmhsa_attn', in_chans=5, hidden_chans=5)
    assert choose_images(None, many, 1)[0].shape == (8, 5, 32, 32)
    with pytest.raises(CheckpointError, match='the model takes 5: leave them out'):
        read_folder(folder / 'images', many, 2)


def test_without_matplotlib_one_line_says_what_to_install(folder, tmp_path, capsys, monkeypatch):
    for name in list(sys.modules):
        if name.startswith('timm_cmhsa.plots'):
            monkeypatch.delitem(sys.modules, name)
        elif name.startswith('matplotlib'):
            monkeypatch.setitem(sys.modules, name, None)
    error = command_error(main, [folder / 'local', '--output', tmp_path / 'out'], capsys)
    assert "pip install 'timm_cmhsa[train]'" in error


def test_checkpoints_of_train_py_are_put_in_the_order_of_their_epochs():
    given = 'b/checkpoint-10.pth.tar b/checkpoint-9.pth.tar b/last.pth.tar a/checkpoint-1.pth.tar first last'
    expected = 'b/checkpoint-9.pth.tar b/checkpoint-10.pth.tar b/last.pth.tar a/checkpoint-1.pth.tar first last'
    assert in_order_of_training(given.split()) == expected.split()
