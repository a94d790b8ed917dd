"""What only a GPU can show: fused kernels in every precision, training by AMP, compiled code.

`TORCH_DEVICE=cpu` runs these tests on a CPU, where they show less and take longer. They need pytest and the package.
"""
import copy
import os

import pytest
import timm
import torch
from helpers import make_hard
from timm.layers import set_fused_attn
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from timm_cmhsa import RelPosAttention, attend_convs, conv2d_to_attention, convert_model, patchify, start_as_convolution

DEVICE = os.environ.get('TORCH_DEVICE', 'cuda')
pytestmark = pytest.mark.skipif(DEVICE == 'cuda' and not torch.cuda.is_available(), reason='needs a CUDA GPU')

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
HALF = torch.bfloat16, torch.float16
FORMS = {
    'phase 1': ('cmhsa_conv_k5', dict(img_size=112)),
    'wide': ('cmhsa_attn', dict(img_size=112)),
    'soft': ('cmhsa_attn_soft', dict(img_size=112)),
    'hard': ('cmhsa_attn', dict(img_size=112)),
    'hybrid, phase 1': ('cmhsa_hybrid_conv_64', {}),
    'hybrid': ('cmhsa_hybrid_attn_64', {}),
    'pixels': ('pixel_attn_quadratic', {}),
    'pixels by content': ('pixel_attn_learned_content', {}),
}
all_forms = pytest.mark.parametrize('form', FORMS)


@pytest.fixture(autouse=True)
def _setup():
    torch.manual_seed(0)
    torch.compiler.reset()  # other models count against the limit of compilations too
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # products are in float32 by default
        yield
    set_fused_attn(True)


def create(form):
    """A model in training mode, and images."""
    name, kwargs = FORMS[form]
    model = timm.create_model(name, num_classes=10, depth=2, **kwargs).to(DEVICE)
    model = make_hard(model) if form == 'hard' else model
    return model, torch.randn(4, 3, *model.patch_embed.img_size, device=DEVICE)


def autocast(dtype):
    return torch.autocast(DEVICE, dtype, enabled=dtype in HALF)


def gradient(module, x, dtype=torch.float32):
    """Return the gradient of all parameters as one vector, by AMP in half precision."""
    with autocast(dtype):
        y = module(x)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(y.double().square().sum(), parameters)])


def distance(actual, expected):
    """Return the relative difference of two tensors, in which single elements may be rounding errors alone."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'unfused'])
@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('kwargs', [dict(), dict(head_dim=96), dict(peak=0.75)], ids=str)
def test_rewrite_is_exact(dtype, kwargs, fused):
    if dtype in HALF and 'peak' in kwargs:
        pytest.skip('soft heads are rewritten in float32')
    set_fused_attn(fused)
    conv = nn.Conv2d(3, 3, 5, padding=2, device=DEVICE, dtype=dtype)
    images = torch.randn(2, 3, 112, 80, device=DEVICE, dtype=dtype)
    attn = conv2d_to_attention(conv, 16, (7, 5), **kwargs)
    expected = patchify(conv(images), 16)
    for training in (True, False):
        with torch.no_grad():
            assert distance(attn.train(training)(patchify(images, 16)), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize('dtype', [torch.float32, *HALF])
@pytest.mark.parametrize('form', ['wide', 'soft', 'hard'])
def test_a_converted_model_agrees(form, dtype):
    model = timm.create_model('cmhsa_conv_k5', num_classes=10, depth=3).to(DEVICE).eval()
    converted = convert_model(model, 'cmhsa_attn_soft' if form == 'soft' else 'cmhsa_attn')
    if form == 'hard':
        converted = reparameterize_model(converted)
    images = torch.randn(4, 3, 224, 224, device=DEVICE)
    with torch.no_grad(), autocast(dtype):
        assert distance(converted(images), model(images)) <= 3 * TOLERANCE[dtype]


def test_a_stock_vit_starts_as_on_a_cpu():
    model = timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=4, depth=2)
    images = torch.randn(4, 3, 32, 32)
    expected = start_as_convolution(copy.deepcopy(model), images).state_dict()
    for key, tensor in start_as_convolution(model.to(DEVICE), images.to(DEVICE)).state_dict().items():
        torch.testing.assert_close(tensor.cpu(), expected[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('dtype', [torch.float32, *HALF])
@pytest.mark.parametrize('rel_pos', ['table', 'padded_table'])
@pytest.mark.parametrize(('qk_dim', 'head_dim'), [(32, 96), (64, 768), (64, 8), (96, 96), (5, 20)])
def test_kernels_take_queries_of_another_width(qk_dim, head_dim, rel_pos, dtype):
    """The memory-efficient one where both are multiples of 8, and any other elsewhere: output and gradients."""
    attn = RelPosAttention(128, (9, 8), num_heads=3, head_dim=head_dim, qk_dim=qk_dim, rel_pos=rel_pos, device=DEVICE)
    for linear in (attn.qkv, attn.proj):
        nn.init.normal_(linear.weight, std=0.1)
    tokens, results = torch.randn(2, 72, 128, device=DEVICE), []
    backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    efficient = DEVICE == 'cuda' and qk_dim % 8 == head_dim % 8 == 0
    for kernels in (backends[-1:] if efficient else backends, [SDPBackend.MATH]):
        with sdpa_kernel(kernels):
            with torch.no_grad(), autocast(dtype):
                output = attn(tokens)
            results.append((output, gradient(attn, tokens, dtype)))
    for actual, expected in zip(*results):
        assert actual.isfinite().all()
        assert distance(actual, expected) <= 3 * TOLERANCE[dtype]


@pytest.mark.parametrize('dtype', HALF)
@pytest.mark.parametrize('masked', ['bias', 'mask'])
@pytest.mark.parametrize('grid_size', [(7, 9), (8, 8), (1, 191), (12, 16)])
def test_gradients_where_most_is_masked(grid_size, masked, dtype):
    """On Hopper, queries have had NaN gradients where lengths were 64 modulo 128, and the mask strongly negative."""
    attn = RelPosAttention(64, grid_size, num_heads=3, device=DEVICE)
    num_tokens, mask = grid_size[0] * grid_size[1], None
    if masked == 'bias':
        table = attn.rel_pos.relative_position_bias_table
        table.data.masked_fill_(torch.rand_like(table) < 0.9, -1e4)
    else:
        mask = torch.rand(num_tokens, num_tokens, device=DEVICE) < 0.1
    for linear in (attn.qkv, attn.proj):
        nn.init.normal_(linear.weight, std=0.1)  # for larger gradients than rounding errors

    attn.register_forward_pre_hook(lambda module, args: (*args, mask))
    tokens = torch.randn(2, num_tokens, 64, device=DEVICE)
    actual = gradient(attn, tokens, dtype)
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradient(attn, tokens, dtype)
    assert actual.isfinite().all()
    assert distance(actual, expected) <= 3 * TOLERANCE[dtype]


@pytest.mark.parametrize('dtype', HALF)
@pytest.mark.parametrize('form', [*FORMS, 'converted'])
def test_every_parameter_learns_by_amp(form, dtype):
    model, images = create('phase 1' if form == 'converted' else form)
    if form == 'converted':
        model = convert_model(model, peak=0.75)
    start = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.)
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)
    for _ in range(10):  # a scaler skips the first ones
        with autocast(dtype):
            loss = nn.functional.cross_entropy(model(images), torch.arange(len(images), device=DEVICE))
        assert loss.isfinite()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    for (name, parameter), before in zip(model.named_parameters(), start.parameters()):
        assert parameter.isfinite().all(), name
        assert torch.equal(parameter, before) != parameter.requires_grad, name


# Last, since compiling takes long.
@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
@pytest.mark.parametrize('form', [*FORMS, 'CNN'])
def test_compile(form, training):
    if form == 'CNN':
        model, images = timm.create_model('test_resnet', num_classes=10), torch.randn(4, 3, 32, 32, device=DEVICE)
        attend_convs(model.to(DEVICE), ['*'], (3, 32, 32))
    else:
        model, images = create(form)
    model.train(training)
    compiled = torch.compile(model, fullgraph=True)
    if training:
        assert distance(gradient(compiled, images), gradient(model, images)) <= 1e-4
    else:
        with torch.no_grad():
            assert distance(compiled(images), model(images)) <= 1e-4
