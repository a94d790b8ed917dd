"""CNNs with attention in place of convolutions live: they are saved, read, published, started from and exported."""
import json

import pytest
import timm
import torch
from timm.utils import reparameterize_model

import timm_cmhsa
from timm_cmhsa import CheckpointError, attend_convs, load_model
from timm_cmhsa.analysis import attention_maps
from timm_cmhsa.checkpoint import Checkpoint

SIZE = 3, 64, 64


@pytest.fixture
def model():
    model = timm.create_model('test_efficientnet', num_classes=3).eval()
    model.pretrained_cfg = dict(model.pretrained_cfg, label_names=['cat', 'dog', 'owl'])
    return attend_convs(attend_convs(model, 'blocks.2.*', SIZE, peak=0.75), 'blocks.1.0.conv_exp', SIZE)


@pytest.fixture
def folder(model, tmp_path):
    Checkpoint.of(model).write(tmp_path / 'model')
    return tmp_path / 'model'


def images():
    return torch.randn(2, *SIZE)


@torch.no_grad()
def assert_same(expected, actual):
    x = images()
    torch.testing.assert_close(actual(x), expected(x), rtol=0, atol=0)


def test_config_json_says_what_to_build(model, folder):
    config = json.loads((folder / 'config.json').read_text())
    assert config['architecture'] == 'test_efficientnet'
    assert [call['peak'] for call in config['attend']] == [0.75, None]
    loaded = load_model(folder)
    assert_same(model, loaded)
    assert loaded.pretrained_cfg['label_names'] == ['cat', 'dog', 'owl']
    assert loaded.pretrained_cfg['input_size'] == SIZE
    Checkpoint.of(loaded).write(folder.parent / 'again')
    assert_same(model, load_model(folder.parent / 'again'))


def test_arguments_of_the_cnn(tmp_path):
    args = dict(num_classes=3, in_chans=1, drop_rate=0.5, act_layer='relu')
    model = attend_convs(timm.create_model('test_resnet', **args), '*.conv2', (1, 64, 64)).eval()
    model.base_args = dict(drop_rate=0.5, act_layer='relu')
    Checkpoint.of(model).write(tmp_path / 'model')
    loaded = load_model(tmp_path / 'model')
    x = torch.randn(2, 1, 64, 64)
    assert torch.equal(loaded(x), model(x))
    assert loaded.drop_rate == 0.5


def test_what_cannot_be_built_anew_is_not_saved(model, tmp_path):
    other = attend_convs(timm.create_model('test_resnet', stem_width=24), '*.conv2', SIZE)
    with pytest.raises(CheckpointError, match=r'differs: set model\.base_args to the arguments'):
        Checkpoint.of(other)
    with pytest.raises(CheckpointError, match='needs a folder'):
        Checkpoint.of(model).write(tmp_path / 'model.safetensors')
    with pytest.raises(CheckpointError, match='was reparameterized for inference'):
        Checkpoint.of(reparameterize_model(model))


def test_it_goes_to_the_hub_and_back(model, hub):
    timm_cmhsa.push_to_hub(model, 'alice/attended')
    assert_same(model, load_model('hf-hub:alice/attended'))
    card = hub.files('alice/attended')['README.md'].decode()
    assert "timm_cmhsa.load_model('hf-hub:alice/attended')" in card
    assert model.attended[0]['names'][0] in card


def test_it_has_attention_maps(folder):
    maps = attention_maps(load_model(folder), images())
    assert len(maps) == sum(len(call['names']) for call in json.loads((folder / 'config.json').read_text())['attend'])


@pytest.mark.parametrize(('change', 'message'), [
    (dict(architecture='nonsense'), "'nonsense' is not a CNN of timm"),
    (dict(architecture='test_cmhsa_attn'), "'test_cmhsa_attn' is not a CNN of timm"),
    (dict(architecture='vit_giant_patch14_224'), 'is not vit_giant_patch14_224'),
    (dict(attend=[dict(names=['conv_stem'], patch_size=1, peak=None)]), 'differs'),
    (dict(attend=[dict(names=['nonsense'], patch_size=1, peak=None)]), 'differs'),
    (dict(attend='layer'), "attend='layer' is not what attend_convs takes"),
    (dict(attend=[dict(names='layer', patch_size=1, peak=None)]), 'is not what attend_convs takes'),
    (dict(attend=[dict(names=['a'], patch_size=10 ** 9, peak=None)]), 'is not what attend_convs takes'),
    (dict(attend=[dict(names=['a'], patch_size=1, peak=2.)]), 'is not what attend_convs takes'),
    (dict(attend=[dict(names=['a'], patch_size=1, peak=None, model='b')]), 'is not what attend_convs takes'),
    (dict(model_args=dict(num_classes=10 ** 7)), 'num_classes=10000000 is not what a model can have'),
])
def test_other_configurations_are_refused(change, message, folder):
    config = {**json.loads((folder / 'config.json').read_text()), **change}
    (folder / 'config.json').write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_arguments_that_open_other_files_do_not_reach_timm(folder):
    config = json.loads((folder / 'config.json').read_text())
    config['model_args']['checkpoint_path'] = str(folder / 'other.pth')
    (folder / 'config.json').write_text(json.dumps(config))
    load_model(folder)
