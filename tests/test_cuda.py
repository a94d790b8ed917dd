"""What only a GPU can tell: exactness in every precision, fused kernels, compiled code, several processes.

`TORCH_DEVICE=cpu` runs them on a CPU, where they say less and take longer. Other tests' fixtures are not used, so that
pytest and the package are all that is needed.
"""
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import set_fused_attn
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from timm_cmhsa import (
    RelPosAttention,
    attend_convs,
    conv2d_to_attention,
    convert_model,
    convert_state_dict,
    patchify,
    verify,
)
from timm_cmhsa.efficient import AbsorbedRelPosAttention
from timm_cmhsa.shifts import ShiftedAttention

DEVICE = os.environ.get('TORCH_DEVICE', 'cuda')
pytestmark = pytest.mark.skipif(DEVICE == 'cuda' and not torch.cuda.is_available(), reason='needs a CUDA GPU')

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
HALF = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _setup():
    torch.manual_seed(0)
    torch.compiler.reset()  # other models count against the limit of compilations too
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # products are in float32 by default
        yield
    set_fused_attn(True)


@pytest.fixture(params=[True, False], ids=['fused', 'unfused'])
def fused(request):
    set_fused_attn(request.param)
    return request.param


def relative_error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def gradient(module, x, dtype=torch.float32):
    """Return the gradient of all parameters as one vector, by AMP in another type than float32."""
    with torch.autocast(DEVICE, dtype, enabled=dtype in HALF):
        y = module(x)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(y.double().square().sum(), parameters)])


def distance(actual, expected):
    """Return the relative difference of two gradients, in which single elements may be rounding errors alone."""
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('head_dim', [None, 96])
def test_rewrite_is_exact(dtype, head_dim, fused):
    conv = nn.Conv2d(3, 3, 5, padding=2, device=DEVICE, dtype=dtype)
    images = torch.randn(2, 3, 112, 80, device=DEVICE, dtype=dtype)
    attn = conv2d_to_attention(conv, 16, (7, 5), head_dim=head_dim)
    assert attn.fused_attn == fused
    expected = patchify(conv(images), 16)
    for training in (True, False):
        with torch.no_grad():
            assert relative_error(attn.train(training)(patchify(images, 16)), expected) <= TOLERANCE[dtype]


@pytest.fixture(params=['wide', 'absorbed', 'thin', 'trained as shifts', 'fused as shifts'])
def models(fused, request):
    """Return a phase-1 model and what it is converted to."""
    if request.param not in ('wide', 'thin'):
        conv_model = timm.create_model('cmhsa_conv_k5', num_classes=10, depth=3).to(DEVICE).eval()
        attn_model = convert_model(conv_model, peak=0.75 if request.param == 'absorbed' else None)
        if request.param == 'trained as shifts':
            attn_model.set_hard_attn()
            return conv_model, attn_model
        return conv_model, reparameterize_model(attn_model)
    name = 'cmhsa_attn_16x96' if request.param == 'thin' else 'cmhsa_attn'
    heads = dict(num_heads=16, head_dim=96) if request.param == 'thin' else {}
    conv_model, attn_model = (
        timm.create_model(name, num_classes=10, depth=3).to(DEVICE).eval() for name in ('cmhsa_conv_k5', name))
    attn_model.load_state_dict(convert_state_dict(conv_model.state_dict(), **heads))
    return conv_model, attn_model


@pytest.mark.parametrize('dtype', [torch.float32, *HALF])
def test_converted_model_agrees(models, dtype):
    x = torch.randn(4, 3, 224, 224, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, dtype, enabled=dtype in HALF):
        conv_logits, attn_logits = (model(x).float() for model in models)
    assert relative_error(attn_logits, conv_logits) <= {torch.float32: 1e-5}.get(dtype, 3 * TOLERANCE[dtype])
    if dtype == torch.float32:
        assert verify(*models, x).max_error <= 1e-5


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_absorbed_weights_have_the_same_output_and_gradients(dtype):
    attn = RelPosAttention(64, 4, num_heads=3, device=DEVICE, dtype=dtype)
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.1)
    tokens, results = torch.randn(16, 16, 64, device=DEVICE, dtype=dtype), []
    assert attn.absorb
    for absorb in (True, False):
        attn.absorb = absorb
        y = attn(tokens)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(attn.parameters()))])
    for actual, expected in zip(*results):
        assert relative_error(actual, expected) <= {torch.float64: 1e-11, torch.float32: 1e-4}[dtype]


@pytest.mark.parametrize('dtype', [torch.float32, *HALF])
def test_queries_attend_in_chunks(dtype):
    attn = RelPosAttention(128, (9, 8), num_heads=4, head_dim=64, device=DEVICE)
    attn.absorb = False
    tokens, results = torch.randn(2, 72, 128, device=DEVICE), []
    for chunk_size in (None, 20):
        attn.chunk_size = chunk_size
        with torch.no_grad(), torch.autocast(DEVICE, dtype, enabled=dtype in HALF):
            output = attn(tokens).double()
        results.append((output, gradient(attn, tokens, dtype)))
    for actual, expected in zip(*results):
        assert distance(actual, expected) <= {torch.float32: 1e-5}.get(dtype, TOLERANCE[dtype])


class AttentionTypes(TorchDispatchMode):
    """Records which types the tensors have that fused attention is called with."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if 'scaled_dot_product' in func.name() and 'backward' not in func.name():
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            self.types.append({tensor.dtype for tensor in tensors})
        return func(*args, **kwargs)


@pytest.mark.parametrize('dtype', HALF)
@pytest.mark.parametrize('form', ['plain', 'absorbed', 'chunked', 'masked'])
def test_mask_has_the_type_of_the_queries(form, dtype):
    """A float32 mask beside queries of half precision has given wrong results on Hopper."""
    attn = RelPosAttention(64, (9, 8), num_heads=3, device=DEVICE)
    attn.absorb, attn.chunk_size = form == 'absorbed', 20 if form == 'chunked' else None
    mask = torch.zeros(72, 72, device=DEVICE) if form == 'masked' else None
    tokens = torch.randn(2, 72, 64, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, dtype), AttentionTypes() as attention:
        attn(tokens, mask)
    assert attention.types
    assert all(types == {dtype} for types in attention.types)


@pytest.mark.parametrize('dtype', HALF)
@pytest.mark.parametrize('absorb', [False, True], ids=['plain', 'absorbed'])
@pytest.mark.parametrize('masked', ['bias', 'mask'])
@pytest.mark.parametrize('grid_size', [(7, 9), (8, 8), (1, 191), (12, 16)])
def test_gradients_where_most_is_masked(grid_size, masked, absorb, dtype):
    """On Hopper, queries have had NaN gradients where lengths were 64 modulo 128, and the mask strongly negative.

    So long are the keys, or the queries, or those of all heads.
    """
    attn = RelPosAttention(64, grid_size, num_heads=3, device=DEVICE)
    attn.absorb = absorb
    num_tokens, mask = attn.rel_pos.position.numel(), None
    if masked == 'bias':
        table = attn.rel_pos.relative_position_bias_table
        table.data.masked_fill_(torch.rand_like(table) < 0.9, -1e4)
    else:
        mask = torch.rand(num_tokens, num_tokens, device=DEVICE) < 0.1
    for linear in (attn.qkv, attn.proj):
        nn.init.normal_(linear.weight, std=0.1)  # of larger gradients than rounding errors

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = attn

        def forward(self, x):
            return self.attn(x, mask)

    tokens = torch.randn(2, num_tokens, 64, device=DEVICE)
    actual = gradient(Masked(), tokens, dtype)
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradient(Masked(), tokens, dtype)
    assert actual.isfinite().all()
    assert distance(actual, expected) <= 3 * TOLERANCE[dtype]


FAMILIES = {
    'cmhsa_conv_k5': dict(img_size=112),
    'cmhsa_attn': dict(img_size=112),
    'cmhsa_attn_16x96': dict(img_size=112),
    **{f'pixel_attn_{rel_pos}': {} for rel_pos in ('quadratic', 'quadratic_gen', 'learned', 'learned_content')},
}


def create(name):
    model = timm.create_model(name, num_classes=10, depth=2, **FAMILIES[name]).to(DEVICE)
    return model, torch.randn(4, *model.pretrained_cfg['input_size'][:1], *model.patch_embed.img_size, device=DEVICE)


@pytest.mark.parametrize('dtype', HALF)
@pytest.mark.parametrize('name', FAMILIES)
def test_every_parameter_learns_by_amp(name, dtype):
    model, x = create(name)
    train_by_amp(model, x, dtype)


@pytest.mark.parametrize('dtype', HALF)
def test_converted_model_learns_by_amp(models, dtype):
    """All but what one-hot attention gives too small a gradient."""
    model = models[1]
    if isinstance(model.blocks[0].attn, (AbsorbedRelPosAttention, ShiftedAttention)):
        pytest.skip('has no weights to train')
    images = torch.randn(4, 3, 224, 224, device=DEVICE)
    train_by_amp(model, images, dtype, but=('rel_pos', 'attn.qkv'))


def train_by_amp(model, x, dtype, but=()):
    start = {name: parameter.clone() for name, parameter in model.train().named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.)
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)
    for _ in range(10):  # a scaler skips the first ones
        with torch.autocast(DEVICE, dtype):
            loss = nn.functional.cross_entropy(model(x), torch.arange(len(x), device=DEVICE))
        assert loss.isfinite()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    parameters = dict(model.named_parameters())
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    stuck = [name for name, parameter in parameters.items() if torch.equal(parameter, start[name])]
    assert [name for name in stuck if not any(part in name for part in but)] == []


def test_gradients_of_several_processes():
    """DDP's gradients are those of all images in one process; one process for each GPU."""
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--local_addr', 'localhost']
    command = [sys.executable, *torchrun, '--nproc_per_node', 'gpu' if DEVICE == 'cuda' else '2', __file__]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get('PYTHONPATH', '')])
    result = subprocess.run(
        command, env={**os.environ, 'PYTHONPATH': path}, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert 'gradients agree' in result.stdout


def check_distributed_gradients():
    """Run in every process of torchrun."""
    dist.init_process_group('nccl' if DEVICE == 'cuda' else 'gloo')
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if DEVICE == 'cuda':
        torch.cuda.set_device(rank)
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    for name, dtype in itertools.product(['cmhsa_conv_k5', 'cmhsa_attn', 'cmhsa_attn_16x96'], [torch.float32, *HALF]):
        model, _ = create(name)
        x = torch.randn(2 * world_size, 3, 112, 112, device=DEVICE)

        def gradients(model, x, dtype=dtype):
            model.zero_grad()
            with torch.autocast(DEVICE, dtype, enabled=dtype in HALF):
                loss = model(x).float().square().mean()
            (4096 * loss).backward()  # above the smallest numbers of float16
            return torch.cat([p.grad.flatten() for p in model.parameters()])

        expected = gradients(model, x)
        actual = gradients(DistributedDataParallel(model), x.chunk(world_size)[rank])
        assert distance(actual, expected) <= {torch.float32: 1e-5}.get(dtype, TOLERANCE[dtype]), (name, dtype)
    if rank == 0:
        print('gradients agree')
    dist.destroy_process_group()


# Last, since compiling takes long.
@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
@pytest.mark.parametrize('name', FAMILIES)
def test_compile(name, training):
    model, x = create(name)
    check_compiled(model, x, training)


def test_compile_absorbed():
    model, x = create('cmhsa_attn')
    check_compiled(reparameterize_model(model), x, training=False)


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
def test_compile_shifts(training):
    model = convert_model(create('cmhsa_conv_k5')[0], 'cmhsa_attn_16x96')
    model.set_hard_attn()
    check_compiled(model if training else reparameterize_model(model.eval()), create('cmhsa_conv_k5')[1], training)


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
def test_compile_attended_cnn(training):
    model = timm.create_model('test_resnet', num_classes=10).to(DEVICE)
    attend_convs(model, ['*'], (3, 32, 32))
    check_compiled(model, torch.randn(4, 3, 32, 32, device=DEVICE), training)


def check_compiled(model, x, training):
    model.train(training)
    compiled = torch.compile(model, fullgraph=True)
    if training:
        assert distance(gradient(compiled, x), gradient(model, x)) <= 1e-4
    else:
        with torch.no_grad():
            assert relative_error(compiled(x), model(x)) <= 1e-4


if __name__ == '__main__':
    check_distributed_gradients()
