"""The promises of exactness on a GPU, in every precision that is trained in."""
import pytest
import timm
import torch
from timm.layers import set_fused_attn
from torch import nn

from timm_cmhsa import conv2d_to_attention, convert_state_dict, patchify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA GPU')

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, 'allow_tf32', False)
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)


@pytest.fixture(params=[True, False], ids=['fused', 'unfused'])
def fused(request):
    set_fused_attn(request.param)
    return request.param


def relative_error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('head_dim', [None, 96])
def test_rewrite_is_exact(dtype, head_dim, fused):
    conv = nn.Conv2d(3, 3, 5, padding=2, device='cuda', dtype=dtype)
    images = torch.randn(2, 3, 112, 80, device='cuda', dtype=dtype)
    attn = conv2d_to_attention(conv, 16, (7, 5), head_dim=head_dim)
    assert attn.fused_attn == fused
    with torch.no_grad():
        error = relative_error(attn(patchify(images, 16)), patchify(conv(images), 16))
    assert error <= TOLERANCE[dtype]


@pytest.fixture
def models(fused):
    conv_model = timm.create_model('cmhsa_conv_k5', num_classes=10).cuda().eval()
    attn_model = timm.create_model('cmhsa_attn', num_classes=10).cuda().eval()
    attn_model.load_state_dict(convert_state_dict(conv_model.state_dict()))
    return conv_model, attn_model


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_converted_model_agrees(models, dtype):
    x = torch.randn(4, 3, 224, 224, device='cuda')
    with torch.no_grad(), torch.autocast('cuda', dtype=dtype, enabled=dtype != torch.float32):
        conv_logits, attn_logits = (model(x).float() for model in models)
    assert relative_error(attn_logits, conv_logits) <= {torch.float32: 1e-5}.get(dtype, 3 * TOLERANCE[dtype])


def test_amp_training_step(models):
    model = models[1].train()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler('cuda')
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    x, targets = torch.randn(4, 3, 224, 224, device='cuda'), torch.arange(4, device='cuda')
    with torch.autocast('cuda', dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, start[name])]
    assert loss.isfinite()
    assert any('attn.proj' in name for name in changed)


def test_compile(models):
    x = torch.randn(2, 3, 224, 224, device='cuda')
    with torch.no_grad():
        for model in models:
            assert relative_error(torch.compile(model, fullgraph=True)(x), model(x)) <= 1e-4
