"""What is published also loads in transformers, and computes there what it computes in timm."""
import re
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from timm_cmhsa import attention_maps, push_to_hub, save_for_hub

transformers = pytest.importorskip('transformers')
AutoModelForImageClassification = transformers.AutoModelForImageClassification
SMALL = dict(img_size=32, patch_size=4, depth=2, num_classes=3)
HEADS = dict(num_heads=4, head_dim=16)
LABELS = ['cat', 'dog', 'horse']


def create(name='cmhsa_attn', **kwargs):
    model = timm.create_model(name, **{**SMALL, **kwargs})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture
def published(tmp_path):
    """A model, and the folder of it."""
    model = create(**HEADS)
    save_for_hub(model, tmp_path / 'net', label_names=LABELS)
    return model, tmp_path / 'net'


@torch.no_grad()
def assert_same_function(model, other):
    x = torch.randn(2, model.in_chans, *model.patch_embed.img_size)
    outputs = other.eval()(x)
    torch.testing.assert_close(getattr(outputs, 'logits', outputs), model(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(('name', 'kwargs'), [
    ('cmhsa_conv_k3', dict(img_size=(16, 24), in_chans=1)),
    ('cmhsa_attn', HEADS),
    ('cmhsa_attn', dict(HEADS, rel_pos='padded_table')),
    ('cmhsa_attn', dict(HEADS, rel_pos='quadratic')),
    ('test_pixel_attn', dict(num_heads=4)),
])
def test_models_of_the_hub(name, kwargs, hub):
    model = create(name, **kwargs)
    push_to_hub(model, 'alice/net', label_names=LABELS)
    loaded = AutoModelForImageClassification.from_pretrained('alice/net', trust_remote_code=True)
    assert_same_function(model, loaded)
    buffers = dict(loaded.timm_model.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffers[key], buffer) for key, buffer in model.named_buffers())
    assert loaded.config.id2label == dict(enumerate(LABELS))


def test_attention_maps(published):
    model, folder = published
    loaded = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert loaded(x).attentions is None
        outputs = loaded(x, labels=torch.tensor([0, 2]), output_attentions=True)
        loss, logits, attentions = loaded(
            x, labels=torch.tensor([0, 2]), output_attentions=True, return_dict=False)
    assert outputs.to_tuple()[-1] is outputs.attentions
    assert (outputs.loss, *outputs.logits.flatten()) == (loss, *logits.flatten())
    for maps, ours, again in zip(attention_maps(model, x).values(), outputs.attentions, attentions, strict=True):
        torch.testing.assert_close(ours, maps.weights)
        torch.testing.assert_close(again, maps.weights)


def test_a_model_without_attention_says_so(tmp_path):
    save_for_hub(create('cmhsa_conv_k3'), tmp_path / 'net')
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / 'net', trust_remote_code=True)
    with pytest.raises(ValueError, match='CmhsaConv has no attention layer of timm_cmhsa to look at'):
        loaded(torch.zeros(1, 3, 32, 32), output_attentions=True)


def test_a_model_without_classifier(tmp_path):
    model = create(num_classes=0, **HEADS)
    save_for_hub(model, tmp_path / 'net')
    loaded = transformers.AutoModel.from_pretrained(tmp_path / 'net', trust_remote_code=True)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        outputs = loaded(x, output_attentions=True)
        torch.testing.assert_close(outputs.pooler_output, model(x), atol=1e-6, rtol=1e-6)
    assert [maps.shape for maps in outputs.attentions] == 2 * [(2, 4, 64, 64)]


@pytest.mark.parametrize('in_chans', [1, 3])
def test_pipeline(in_chans, tmp_path, caplog):
    save_for_hub(create(in_chans=in_chans, **HEADS), tmp_path / 'net', label_names=LABELS)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8))
    model = timm.create_model(f'local-dir:{tmp_path}/net', pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    with torch.no_grad():
        expected = model(transform(image.convert('L' if in_chans == 1 else 'RGB')).unsqueeze(0)).softmax(dim=-1)[0]
    classify = transformers.pipeline('image-classification', str(tmp_path / 'net'), trust_remote_code=True)
    scores = {answer['label']: answer['score'] for answer in classify(image)}
    assert scores == pytest.approx(dict(zip(LABELS, expected.tolist())), abs=1e-6)
    assert 'not supported' not in caplog.text


@pytest.mark.parametrize(('num_classes', 'size'), [(3, 3), (0, 48)])
def test_what_the_card_says(num_classes, size, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new('RGB', (48, 48)).save('image.png')
    push_to_hub(create(num_classes=num_classes, **HEADS), 'alice/net')
    names = {}
    exec(re.findall(r'```python\n(.*?)```', hub.files('alice/net')['README.md'].decode(), re.DOTALL)[1], names)
    assert len(names['answer'] if num_classes else names['answer'][0][0]) == size


def test_fine_tuned_and_saved(published, tmp_path):
    model = AutoModelForImageClassification.from_pretrained(
        published[1], trust_remote_code=True, num_labels=5, ignore_mismatched_sizes=True)
    model.train()(torch.randn(2, 3, 32, 32), labels=torch.tensor([4, 0])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path / 'tuned')
    assert_same_function(model.timm_model.eval(), timm.create_model(f'local-dir:{tmp_path}/tuned', pretrained=True))
    assert_same_function(model.timm_model, AutoModelForImageClassification.from_pretrained(
        tmp_path / 'tuned', trust_remote_code=True))


def test_without_remote_code(published):
    model, folder = published
    loaded = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=False)
    assert type(loaded) is transformers.TimmWrapperForImageClassification
    assert_same_function(model, loaded)


HIDDEN = '''
import sys
import timm_cmhsa
assert 'transformers' not in sys.modules  # which is imported only where it is used

class Hidden:
    def find_spec(self, name, *args):
        if name.split('.')[0] == 'timm_cmhsa':
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Hidden())
for name in [name for name in sys.modules if name.split('.')[0] == 'timm_cmhsa']:
    del sys.modules[name]
from transformers import AutoModelForImageClassification
AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
'''


def test_where_timm_cmhsa_is_not_installed(published):
    done = subprocess.run([sys.executable, '-c', HIDDEN, str(published[1])], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith('ImportError: This modeling file requires')
    assert last.endswith('timm_cmhsa. Run `pip install timm_cmhsa`')
