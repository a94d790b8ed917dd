"""What follows training: both phases, with soft or hard heads, go wherever timm's models go."""
import copy

import pytest
import timm
import torch
from helpers import images_for, make_hard, max_error
from timm.layers import set_fused_attn
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

HYBRID = dict(stem='16p-32p', hidden_chans=32, mlp_layer='depthwise')
FORMS = {
    'phase 1': ('test_cmhsa_conv_k3', {}),
    'wide': ('test_cmhsa_attn', dict(qk_dim=16)),
    'soft': ('test_cmhsa_attn', dict(num_heads=10, head_dim=24, qk_dim=8, rel_pos='padded_table')),
    'hybrid, phase 1': ('test_cmhsa_conv_k3', HYBRID),
    'hybrid': ('test_cmhsa_attn', dict(HYBRID, qk_dim=8, rel_pos='padded_table')),
    'hard': ('test_cmhsa_attn', {}),
}
all_forms = pytest.mark.parametrize('form', FORMS)
both = pytest.mark.parametrize('fused', [True, False], ids=['fused', 'unfused'])


def create(form, fused=True, depth=2, **kwargs):
    """A model in eval mode whose every parameter is random, but for those that make heads hard."""
    set_fused_attn(fused)
    name, args = FORMS[form]
    model = timm.create_model(name, num_classes=10, depth=depth, **args, **kwargs).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return make_hard(model) if form == 'hard' else model


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')  # checks of shapes become constants
@all_forms
@both
def test_torchscript_and_fx(form, fused):
    model = create(form, fused)
    images = images_for(model, 3)
    expected = model(images)
    for scripted in (torch.jit.script(model), torch.jit.trace(model, images[:2])):
        torch.testing.assert_close(scripted(images), expected, atol=1e-5, rtol=1e-5)
    outputs = create_feature_extractor(model, {'blocks.1': 'block', 'head': 'logits'})(images)
    torch.testing.assert_close(outputs['logits'], expected)
    torch.testing.assert_close(outputs['block'], model.blocks(model.patch_embed(images)))


@pytest.mark.parametrize(('form', 'backend'), [
    *((form, 'aot_eager') for form in FORMS),
    *(pytest.param(form, 'inductor', marks=pytest.mark.slow) for form in ('phase 1', 'soft', 'hard'))])
def test_compile_without_graph_breaks(form, backend):
    model = create(form, depth=1)
    images = images_for(model)
    torch.compiler.reset()  # other models count against the limit of compilations too
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images), atol=1e-4, rtol=1e-4)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    actual, expected = (
        torch.autograd.grad(each.train()(images).square().mean(), learned) for each in (compiled, model))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)


@all_forms
def test_export_for_any_number_of_images(form):
    model = create(form)
    images = images_for(model, 9)
    batch = torch.export.Dim('batch', min=1, max=64)
    exported = torch.export.export(model, (images[:2],), dynamic_shapes=({0: batch},)).module()  # strict in torch 2.6
    torch.testing.assert_close(exported(images), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings('ignore')  # the exporter warns about itself
@pytest.mark.parametrize('exportable', [False, True])
@all_forms
def test_onnx_for_any_number_of_images(form, exportable, tmp_path):
    """By the older exporter; also as timm creates models for export."""
    onnxruntime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnx')
    model, path = create(form, exportable=exportable), str(tmp_path / 'model.onnx')
    images = images_for(model, 5)
    torch.onnx.export(
        model, (images[:2],), path, input_names=['images'], dynamic_axes={'images': {0: 'batch'}}, dynamo=False)
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    actual = torch.from_numpy(session.run(None, {'images': images.numpy()})[0])
    torch.testing.assert_close(actual, model(images), atol=1e-4, rtol=1e-4)


@all_forms
@both
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_amp(form, dtype, fused):
    model = create(form, fused)
    images = images_for(model)
    with torch.autocast('cpu', dtype=dtype):
        logits = model(images)
    assert logits.dtype == dtype
    assert max_error(model(images), logits) < 8 * torch.finfo(dtype).eps
    logits.float().mean().backward()
    for parameter in model.parameters():
        assert not parameter.requires_grad or parameter.grad.isfinite().all()


@all_forms
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_other_types(form, dtype):
    model = create(form)
    images = images_for(model)
    expected = model(images)
    assert max_error(expected, model.to(dtype)(images.to(dtype))) < 8 * max(torch.finfo(dtype).eps, 1e-7)
    logits = create(form, dtype=dtype)(images.to(dtype))
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@all_forms
def test_copies_pickles_checkpointing_and_channels_last(form, tmp_path):
    model = create(form)
    images = images_for(model)
    expected = model(images)
    torch.save(model, tmp_path / 'model.pt')
    for other in (copy.deepcopy(model), torch.load(tmp_path / 'model.pt', weights_only=False)):
        assert torch.equal(other(images), expected)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(images), expected)
    actual = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
