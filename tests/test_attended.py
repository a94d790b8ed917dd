"""CNNs with attention in place of convolutions live: they are saved, read, published, started from and exported."""
import json

import pytest
import safetensors.torch
import timm
import torch
from helpers import decayed

import timm_cmhsa
from timm_cmhsa import CheckpointError, attend_convs, load_model
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


@torch.no_grad()
def assert_same(expected, actual):
    x = torch.randn(2, *expected.pretrained_cfg['input_size'])
    assert torch.equal(actual(x), expected(x))


def test_config_json_says_what_to_build(model, folder):
    config = json.loads((folder / 'config.json').read_text())
    assert config['architecture'] == 'test_efficientnet'
    assert [call['peak'] for call in config['attend']] == [0.75, None]
    loaded = load_model(folder)
    assert_same(model, loaded)
    assert loaded.pretrained_cfg['label_names'] == ['cat', 'dog', 'owl']
    assert loaded.pretrained_cfg['input_size'] == SIZE
    timm_cmhsa.save_for_hub(loaded, folder, force=True)
    assert_same(model, load_model(folder))


def test_arguments_of_the_cnn(tmp_path):
    args = dict(num_classes=3, in_chans=1, drop_rate=0.5, act_layer='relu')
    model = attend_convs(timm.create_model('test_resnet', **args), '*.conv2', (1, 64, 64)).eval()
    model.base_args = dict(drop_rate=0.5, act_layer='relu')
    Checkpoint.of(model).write(tmp_path / 'model')
    loaded = load_model(tmp_path / 'model')
    assert_same(model, loaded)
    assert loaded.drop_rate == 0.5


def test_what_cannot_be_built_anew_is_not_saved(model):
    other = attend_convs(timm.create_model('test_resnet', stem_width=24), '*.conv2', SIZE)
    with pytest.raises(CheckpointError, match=r'differs: set model\.base_args to the arguments'):
        Checkpoint.of(other)
    model.base_args = dict(output_stride=8)
    with pytest.raises(CheckpointError, match='base_args: output_stride: not an argument of these models'):
        Checkpoint.of(model)


def test_it_goes_to_the_hub_and_back(model, hub):
    timm_cmhsa.push_to_hub(model, 'alice/attended')
    assert_same(model, load_model('hf-hub:alice/attended'))
    card = hub.files('alice/attended')['README.md'].decode()
    assert "timm_cmhsa.load_model('hf-hub:alice/attended')" in card
    assert model.attended[0]['names'][0] in card


@pytest.mark.parametrize(('change', 'message'), [
    (dict(architecture='nonsense'), "'nonsense' is not a CNN of timm"),
    (dict(architecture='test_cmhsa_attn'), "'test_cmhsa_attn' is not a CNN of timm"),
    (dict(model_args=dict(checkpoint_path='other.pth')), 'checkpoint_path: not an argument'),  # it would be opened
    (dict(architecture='vit_giant_patch14_224'), 'is not vit_giant_patch14_224'),
    *((dict(attend=[dict(names=[name], patch_size=1, peak=None)]), 'differs') for name in ('conv_stem', 'nonsense')),
    (dict(attend='layer'), "attend='layer' is not what attend_convs takes"),
    *((dict(attend=[dict(dict(names=['a'], patch_size=1, peak=None), **other)]), 'is not what attend_convs takes')
      for other in (dict(names='layer'), dict(model='b'))),
    (dict(model_args=dict(num_classes=10 ** 7)), 'num_classes=10000000 is not what a model can have'),
])
def test_other_configurations_are_refused(change, message, folder):
    config = {**json.loads((folder / 'config.json').read_text()), **change}
    (folder / 'config.json').write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@pytest.mark.parametrize('change', [dict(patch_size='x'), dict(patch_size=10 ** 9), dict(peak=2.), dict(names=[1])])
def test_other_attention_is_refused(change, folder):
    config = json.loads((folder / 'config.json').read_text())
    config['attend'][0].update(change)
    (folder / 'config.json').write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match='differs' if 'names' in change else 'does not fit'):
        load_model(folder)


def test_weights_that_are_no_numbers_are_refused(folder):
    tensors = safetensors.torch.load_file(folder / 'model.safetensors')
    tensors['conv_stem.weight'][:] = torch.nan
    safetensors.torch.save_file(tensors, folder / 'model.safetensors')
    with pytest.raises(CheckpointError, match=r'conv_stem\.weight'):
        load_model(folder)


def test_biases_of_heads_do_not_decay(model):
    tables = {name for name, _ in model.named_parameters() if name.endswith('bias_table')}
    assert tables
    assert not tables & decayed(model)
