"""The promises of exactness on a GPU, in every precision that is trained in."""
import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.utils import reparameterize_model
from torch import nn

from timm_cmhsa import RelPosAttention, conv2d_to_attention, convert_state_dict, patchify
from timm_cmhsa.efficient import AbsorbedRelPosAttention

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


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_folding_is_the_same_function_with_the_same_gradients(dtype):
    attn = RelPosAttention(64, 4, num_heads=3, device='cuda', dtype=dtype)
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.1)
    tokens, results = torch.randn(16, 16, 64, device='cuda', dtype=dtype), []
    for folded in (True, False):
        if not folded:
            attn.qkv.register_forward_hook(lambda *_: None)
        assert attn.folding_pays(tokens) == folded
        y = attn(tokens)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(attn.parameters()))])
    for actual, expected in zip(*results):
        assert relative_error(actual, expected) <= {torch.float64: 1e-11, torch.float32: 1e-4}[dtype]


@pytest.fixture(params=[
    ('cmhsa_attn', {}, False),
    ('cmhsa_attn', {}, True),
    ('cmhsa_attn_16x96', dict(num_heads=16, head_dim=96), False),
], ids=['wide', 'folded', 'thin'])
def models(fused, request):
    name, heads, folded = request.param
    conv_model = timm.create_model('cmhsa_conv_k5', num_classes=10).cuda().eval()
    attn_model = timm.create_model(name, num_classes=10).cuda().eval()
    attn_model.load_state_dict(convert_state_dict(conv_model.state_dict(), **heads))
    return conv_model, reparameterize_model(attn_model) if folded else attn_model


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_converted_model_agrees(models, dtype):
    x = torch.randn(4, 3, 224, 224, device='cuda')
    with torch.no_grad(), torch.autocast('cuda', dtype=dtype, enabled=dtype != torch.float32):
        conv_logits, attn_logits = (model(x).float() for model in models)
    assert relative_error(attn_logits, conv_logits) <= {torch.float32: 1e-5}.get(dtype, 3 * TOLERANCE[dtype])


def test_amp_training_step(models):
    model = models[1].train()
    if isinstance(model.blocks[0].attn, AbsorbedRelPosAttention):
        pytest.skip('has nothing to train')
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
