"""Both phases go wherever timm's models go: compilers, exporters, reduced precision."""
import pytest
import timm
import torch
from timm.layers import set_fused_attn
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

import timm_cmhsa  # noqa: F401

CONV, ATTN = 'test_cmhsa_conv_k3', 'test_cmhsa_attn'
both_phases = pytest.mark.parametrize('name', [CONV, ATTN])


@pytest.fixture
def x():
    return torch.randn(2, 3, 32, 32)


def create(name):
    model = timm.create_model(name, num_classes=10)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


@both_phases
@pytest.mark.parametrize('fused', [False, True])
def test_torchscript(name, fused, x):
    set_fused_attn(fused)
    model = create(name)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x), atol=1e-5, rtol=1e-5)


@both_phases
@pytest.mark.parametrize('fused', [False, True])
def test_fx(name, fused, x):
    set_fused_attn(fused)
    model = create(name)
    traced = create_feature_extractor(model, {'blocks.1': 'block', 'head': 'logits'})
    outputs = traced(x)
    torch.testing.assert_close(outputs['logits'], model(x))
    torch.testing.assert_close(outputs['block'], model.blocks[:2](model.patch_embed(x)))


@both_phases
def test_compile_without_graph_breaks(name, x):
    model = create(name)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
    model.train()
    compiled(x).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@both_phases
def test_export(name, x):
    model = create(name)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@both_phases
@pytest.mark.filterwarnings('ignore')  # both exporters warn about themselves
def test_onnx(name, x, tmp_path):
    onnxruntime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnx')
    model, path = create(name), tmp_path / 'model.onnx'
    torch.onnx.export(model, (x,), str(path), input_names=['images'])
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    actual = torch.from_numpy(session.run(None, {'images': x.numpy()})[0])
    torch.testing.assert_close(actual, model(x), atol=1e-4, rtol=1e-4)


@both_phases
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
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@both_phases
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_other_types(name, dtype, x):
    model = create(name)
    expected = model(x)
    error = (model.to(dtype)(x.to(dtype)).float() - expected).abs().max() / expected.abs().max()
    assert error < 8 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert timm.create_model(name, dtype=dtype)(x.to(dtype)).dtype == dtype


@both_phases
def test_channels_last(name, x):
    model = create(name)
    torch.testing.assert_close(model.to(memory_format=torch.channels_last)(
        x.to(memory_format=torch.channels_last)), model(x), atol=1e-5, rtol=1e-5)


def test_fused_and_unfused_models_agree(x):
    fused = create(ATTN)
    set_fused_attn(False)
    unfused = timm.create_model(ATTN, num_classes=10).eval()
    unfused.load_state_dict(fused.state_dict())
    assert [m.blocks[0].attn.fused_attn for m in (fused, unfused)] == [True, False]
    torch.testing.assert_close(unfused(x), fused(x), atol=1e-5, rtol=1e-5)
