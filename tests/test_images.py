"""Images of a folder: which are found, and how they are read."""
import struct
import zlib

import numpy as np
import pytest
import timm
from PIL import Image

import timm_cmhsa
from timm_cmhsa.images import find_images, load_image, read_folder

NAMES = ['a.png', 'b/c.JPG', 'b/d.png']
HIDDEN = ['._a.png', '.ipynb_checkpoints/a-checkpoint.png', '__MACOSX/._a.png', 'b/.cache/e.png',
          '@eaDir/a.png/SYNOFILE_THUMB_M.png', 'b/lost+found/f.png']


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / '.data'  # only names below it count
    for name in (*NAMES, *HIDDEN):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (32, 32)).save(path)
    (root / 'b' / 'notes.txt').write_text('text')
    return root


@pytest.fixture(scope='module')
def model():
    return timm.create_model('test_cmhsa_attn', img_size=32)


def test_hidden_images_are_not_found(folder, model, caplog):
    assert [str(path.relative_to(folder)) for path in find_images(folder)] == NAMES
    assert read_folder(folder, model, 10)[1] == NAMES
    assert not caplog.records


def test_links_to_folders_and_gif_files_are_found(tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    Image.new('RGB', (4, 4)).save(tmp_path / 'elsewhere' / 'a.gif')
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'photos' / 'cat').symlink_to(tmp_path / 'elsewhere')
    assert find_images(tmp_path / 'photos') == [tmp_path / 'photos' / 'cat' / 'a.gif']


@pytest.mark.parametrize('count', [0, -1])
def test_no_images_cannot_be_asked_for(count, folder, model):
    with pytest.raises(timm_cmhsa.CheckpointError, match=f'^{count} images of .* were asked for: ask for 1 or more.$'):
        read_folder(folder, model, count)


def transparent(form):
    """Return a black image, of which all but the upper half is transparent, and how to save it."""
    image = Image.new('RGB', (8, 8), (0, 0, 9)) if form == 'RGB' else Image.new('RGBA', (8, 8))
    image.paste('black', (0, 0, 8, 4))
    if form == 'RGB':
        return image, {'transparency': (0, 0, 9)}
    if form == 'LA':
        return image.convert('LA'), {}
    return image.quantize() if form == 'P' else image, {'lossless': True} if form == 'WEBP' else {}


@pytest.mark.parametrize('form', ['RGBA', 'LA', 'P', 'RGB', 'GIF', 'WEBP'])
@pytest.mark.parametrize('mode', ['RGB', 'L'])
def test_what_is_transparent_is_white(form, mode, tmp_path):
    """As viewers show it; the colour under it is black."""
    image, options = transparent(form)
    path = tmp_path / f'a.{form.lower() if form in ("GIF", "WEBP") else "png"}'
    image.save(path, **options)
    with Image.open(path) as saved:
        assert saved.has_transparency_data
    pixels = np.asarray(load_image(path, mode))
    assert (pixels[:4] == 0).all()
    assert (pixels[4:] == 255).all()


def png_of_16_bits(colour_type, channels):
    rows = (b'\0' + struct.pack('>H', 4095) * channels * 4) * 4
    header = struct.pack('>IIBBBBB', 4, 4, 16, colour_type, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + b''.join(
        struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
        for kind, data in ((b'IHDR', header), (b'IDAT', zlib.compress(rows)), (b'IEND', b'')))


@pytest.mark.parametrize('content', [
    *(png_of_16_bits(*each) for each in ((0, 1), (2, 3), (4, 2), (6, 4))),
    b'P5 4 4 4095\n' + b'\x0f\xff' * 16, b'P6 4 4 4095\n' + b'\x0f\xff' * 48])
def test_more_than_8_bits_are_refused(content, tmp_path):
    """12-bit values in a PNG of 16 bits would become 0 to 15 of 255."""
    (tmp_path / 'a.png').write_bytes(content)
    with pytest.raises(ValueError, match='more than 8 bits per channel'):
        load_image(tmp_path / 'a.png')
