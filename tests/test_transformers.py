"""What is published also loads in transformers, and computes there what it computes in timm."""
import numpy as np
import pytest
import timm
import torch
from helpers import images_for, phase1
from PIL import Image

from timm_cmhsa import push_to_hub, save_for_hub

transformers = pytest.importorskip('transformers')
LABELS = ['cat', 'dog', 'horse']


@pytest.mark.parametrize(('name', 'kwargs'), [
    ('test_cmhsa_conv_k3', dict(img_size=(16, 24), in_chans=1)), ('test_cmhsa_attn', dict(num_heads=4, head_dim=16)),
    ('cmhsa_attn_soft_patch4_32', dict(depth=1)), ('cmhsa_hybrid_attn_32', dict(depth=1)),
    ('test_pixel_attn', dict(num_heads=4))])
@torch.no_grad()
def test_models_of_the_hub(name, kwargs, hub):
    model = phase1(name, num_classes=3, **kwargs)
    push_to_hub(model, 'alice/net', label_names=LABELS)
    loaded = transformers.AutoModelForImageClassification.from_pretrained('alice/net').eval()
    assert loaded.config.id2label == dict(enumerate(LABELS))
    images = images_for(model)
    torch.testing.assert_close(loaded(images).logits, model(images), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_a_model_without_classifier(tmp_path):
    model = phase1('test_cmhsa_attn', num_classes=0)
    save_for_hub(model, tmp_path / 'net')
    loaded, images = transformers.AutoModel.from_pretrained(tmp_path / 'net').eval(), images_for(model)
    torch.testing.assert_close(loaded(images).pooler_output, model(images), atol=1e-6, rtol=1e-6)


def test_pipeline(tmp_path):
    save_for_hub(phase1('test_cmhsa_attn', num_classes=3), tmp_path / 'net', label_names=LABELS)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8))
    model = timm.create_model(f'local-dir:{tmp_path}/net', pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    with torch.no_grad():
        expected = model(transform(image).unsqueeze(0)).softmax(dim=-1)[0]
    classify = transformers.pipeline('image-classification', str(tmp_path / 'net'))
    scores = {answer['label']: answer['score'] for answer in classify(image)}
    assert scores == pytest.approx(dict(zip(LABELS, expected.tolist())), abs=1e-6)
