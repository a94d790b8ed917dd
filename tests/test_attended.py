"""CNNs with attention in place of convolutions live: they are saved, read, published, started from and exported."""
import copy
import json

import pytest
import safetensors.torch
import timm
import torch
from timm.optim import create_optimizer_v2
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
    model.base_args = dict(output_stride=8)
    with pytest.raises(CheckpointError, match='base_args: output_stride: not an argument of these models'):
        Checkpoint.of(model)
    model.base_args = {}
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
    with pytest.raises(CheckpointError, match='checkpoint_path: not an argument'):
        load_model(folder)


def test_weights_that_are_no_numbers_are_refused(folder):
    tensors = safetensors.torch.load_file(folder / 'model.safetensors')
    tensors['conv_stem.weight'][:] = torch.nan
    safetensors.torch.save_file(tensors, folder / 'model.safetensors')
    with pytest.raises(CheckpointError, match=r'conv_stem\.weight'):
        load_model(folder)


def test_biases_of_heads_do_not_decay(model):
    optimizer = create_optimizer_v2(copy.deepcopy(model), 'adamw', lr=1., weight_decay=0.1)
    sizes = {p.shape for group in optimizer.param_groups if group['weight_decay'] for p in group['params']}
    tables = {p.shape for name, p in model.named_parameters() if name.endswith('bias_table')}
    assert tables
    assert not tables & sizes


def test_saved_again_with_force(model, folder):
    timm_cmhsa.save_for_hub(model, folder, force=True)
    assert_same(model, load_model(folder))
