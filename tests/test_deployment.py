"""Both phases, and phase 2 with absorbed weights, go wherever timm's models go: compilers, exporters, other types."""
import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.utils import reparameterize_model
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

from timm_cmhsa.cmhsa import point_at_nearest

CONV, ATTN, ABSORBED = 'test_cmhsa_conv_k3', 'test_cmhsa_attn', 'test_cmhsa_attn, absorbed'
SHIFTS, SOME_SHIFTS = 'test_cmhsa_attn, trained as shifts', 'test_cmhsa_attn, some heads fused as shifts'
SOFT = 'test_cmhsa_attn, soft heads'
both_phases = pytest.mark.parametrize('name', [CONV, ATTN])
all_forms = pytest.mark.parametrize('name', [CONV, ATTN, SOFT, ABSORBED, SHIFTS, SOME_SHIFTS])


@pytest.fixture
def x():
    return torch.randn(2, 3, 32, 32)


def create(name, depth=2):
    if name == ABSORBED:
        return reparameterize_model(create(ATTN, depth))
    kwargs = {'rel_pos': 'padded_table'} if name == SOFT else {}
    model = timm.create_model(name.split(',')[0], num_classes=10, depth=depth, **kwargs)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    if name in (SHIFTS, SOME_SHIFTS):
        for attn in (block.attn for block in model.blocks):
            point_at_nearest(attn.rel_pos)
            queries = attn.num_heads if name == SHIFTS else 5
            for linear in (attn.qkv.weight, attn.qkv.bias):
                nn.init.zeros_(linear.data[:queries * attn.head_dim])
    if name == SHIFTS:
        model.set_hard_attn()
    return reparameterize_model(model.eval()) if name == SOME_SHIFTS else model.eval()


@all_forms
@pytest.mark.parametrize('fused', [False, True])
def test_torchscript(name, fused, x):
    set_fused_attn(fused)
    model = create(name)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')  # checks of shapes become constants
@all_forms
@pytest.mark.parametrize('fused', [False, True])
def test_trace(name, fused, x):
    set_fused_attn(fused)
    model, images = create(name), torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(torch.jit.trace(model, x)(images), model(images), atol=1e-5, rtol=1e-5)


@all_forms
@pytest.mark.parametrize('fused', [False, True])
def test_fx(name, fused, x):
    set_fused_attn(fused)
    model = create(name)
    traced = create_feature_extractor(model, {'blocks.1': 'block', 'head': 'logits'})
    outputs = traced(x)
    torch.testing.assert_close(outputs['logits'], model(x))
    torch.testing.assert_close(outputs['block'], model.blocks[:2](model.patch_embed(x)))


@all_forms
@pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])
def test_compile_without_graph_breaks(name, backend, x):
    model = create(name, depth=1)
    torch.compiler.reset()  # other models count against the limit of compilations too
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
    model.train()
    compiled(x).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@all_forms
@pytest.mark.parametrize('strict', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export_for_any_number_of_images(name, strict, x):
    if strict and name in (ATTN, SOFT) and not hasattr(torch.compiler, 'is_exporting'):
        pytest.skip('before torch 2.7, weights of wide heads must be absorbed first')
    model, images = create(name), torch.randn(9, 3, 32, 32)
    batch = torch.export.Dim('batch', min=1, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict).module()
    torch.testing.assert_close(exported(images), model(images))


@pytest.mark.filterwarnings('ignore')  # both exporters warn about themselves
@pytest.mark.parametrize(('name', 'dynamic_axes'), [
    (ATTN, {'images': {0: 'batch'}}),  # any number of images
    pytest.param(SOFT, {'images': {0: 'batch'}}, marks=pytest.mark.slow),
    pytest.param(SHIFTS, {'images': {0: 'batch'}}, marks=pytest.mark.slow),
    pytest.param(CONV, {'images': {0: 'batch'}}, marks=pytest.mark.slow),
    pytest.param(ABSORBED, {'images': {0: 'batch'}}, marks=pytest.mark.slow),
    pytest.param(CONV, None, marks=pytest.mark.slow),
    pytest.param(ATTN, None, marks=pytest.mark.slow),
    pytest.param(ABSORBED, None, marks=pytest.mark.slow),
    pytest.param(SOME_SHIFTS, {'images': {0: 'batch'}}, marks=pytest.mark.slow),
    pytest.param(SOME_SHIFTS, None, marks=pytest.mark.slow),
])
def test_onnx(name, dynamic_axes, x, tmp_path):
    check_onnx(create(name), x, tmp_path, dynamic_axes=dynamic_axes)


@pytest.mark.filterwarnings('ignore')
@both_phases
def test_onnx_by_the_older_exporter(name, x, tmp_path):
    check_onnx(create(name), x, tmp_path, dynamic_axes={'images': {0: 'batch'}}, dynamo=False)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(('rel_pos', 'options'), [
    pytest.param('learned_content', {}, marks=pytest.mark.slow), pytest.param('quadratic', {}, marks=pytest.mark.slow),
    ('quadratic', dict(dynamo=False)),
])
def test_onnx_of_pixel_models(rel_pos, options, x, tmp_path):
    model = timm.create_model('test_pixel_attn', depth=2, rel_pos=rel_pos).eval()
    check_onnx(model, x, tmp_path, dynamic_axes={'images': {0: 'batch'}}, **options)


def check_onnx(model, x, folder, dynamic_axes, **options):
    """Export a model, and compare what onnxruntime makes of it: for another number of images, if it may differ."""
    onnxruntime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnx')
    path = folder / 'model.onnx'
    torch.onnx.export(model, (x,), str(path), input_names=['images'], dynamic_axes=dynamic_axes, **options)
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    images = torch.randn(5, 3, 32, 32) if dynamic_axes else x
    actual = torch.from_numpy(session.run(None, {'images': images.numpy()})[0])
    torch.testing.assert_close(actual, model(images), atol=1e-4, rtol=1e-4)


@all_forms
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('fused', [False, True])
def test_amp(name, dtype, fused, x):
    set_fused_attn(fused)
    model = create(name)
    with torch.autocast('cpu', dtype=dtype):
        y = model(x)
    assert y.dtype == dtype
    error = (y.float() - model(x)).abs().max() / model(x).abs().max()
    assert error < 8 * torch.finfo(dtype).eps
    y.float().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


@all_forms
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_other_types(name, dtype, x):
    model = create(name)
    expected = model(x)
    error = (model.to(dtype)(x.to(dtype)).float() - expected).abs().max() / expected.abs().max()
    assert error < 8 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


@both_phases
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_created_in_other_types(name, dtype, x):
    assert timm.create_model(name, dtype=dtype)(x.to(dtype)).dtype == dtype


@all_forms
def test_channels_last(name, x):
    model = create(name)
    expected = model(x)
    actual = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_fused_and_unfused_models_agree(x):
    fused = create(ATTN)
    set_fused_attn(False)
    unfused = timm.create_model(ATTN, num_classes=10, depth=2).eval()
    unfused.load_state_dict(fused.state_dict())
    assert [m.blocks[0].attn.fused_attn for m in (fused, unfused)] == [True, False]
    torch.testing.assert_close(unfused(x), fused(x), atol=1e-5, rtol=1e-5)


def test_absorbed_model(x):
    """The same logits at any size, with fewer parameters."""
    model = create(ATTN)
    absorbed = reparameterize_model(model)
    for size in (32, 48, 16):
        images = torch.randn(3, 3, size, size)
        for each in (model, absorbed):
            each.set_input_size(size)
        torch.testing.assert_close(absorbed(images), model(images), atol=1e-5, rtol=1e-5)
    attention, smaller = (sum(p.numel() for p in each.blocks[0].attn.parameters()) for each in (model, absorbed))
    assert smaller < 0.65 * attention
    assert model.blocks[0].attn.qkv.weight.requires_grad, 'the original stays as it was'
