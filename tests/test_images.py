"""Images of a folder: which are found, and how they are read."""
import pytest
import timm
from PIL import Image

import timm_cmhsa
from timm_cmhsa.images import find_images, read_folder

NAMES = ['a.png', 'b/c.JPG', 'b/d.png']
HIDDEN = ['._a.png', '.ipynb_checkpoints/a-checkpoint.png', '__MACOSX/._a.png', 'b/.cache/e.png']


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


@pytest.mark.parametrize('count', [0, -1])
def test_no_images_cannot_be_asked_for(count, folder, model):
    with pytest.raises(timm_cmhsa.CheckpointError, match=f'^{count} images of .* were asked for: ask for 1 or more.$'):
        read_folder(folder, model, count)
