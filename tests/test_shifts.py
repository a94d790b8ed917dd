"""Heads that are shifts: certificates, the form for inference and for training, and back to convolutions."""
import copy
import math
import warnings

import pytest
import timm
import torch
from hypothesis import assume, given, strategies as st
from timm.models import save_for_hf
from timm.utils import reparameterize_model
from torch import nn

import timm_cmhsa
from timm_cmhsa import attention_to_conv2d, certificates, conv2d_to_attention, fuse_shifts, patchify
from timm_cmhsa.analysis import attention_layers, attention_maps
from timm_cmhsa.attention import RelPosAttention
from timm_cmhsa.certificates import bias_winners, proved_leaks, proved_shifts
from timm_cmhsa.cmhsa import CmhsaBlock
from timm_cmhsa.shifts import BORDERS, Shift, ShiftedAttention, TokenShift

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def converted(depth=4, **kwargs):
    """A phase-2 model, just rewritten."""
    return timm_cmhsa.convert_model(timm.create_model('test_cmhsa_conv_k3', depth=depth).eval(), **kwargs)


def train_a_little(model, steps=3, lr=1e-3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    model.train()
    for _ in range(steps):
        logits = model(torch.randn(4, 3, 32, 32))
        nn.functional.cross_entropy(logits, torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@given(st.sampled_from(BORDERS), st.integers(1, 5), st.integers(1, 5), st.integers(-5, 5), st.integers(-5, 5))
def test_a_shift_of_tokens_is_that_of_its_keys(border, height, width, row, col):
    shift = Shift((row, col), border)
    x = torch.randn(2, height * width, 3)
    padded = torch.cat([x, torch.zeros(2, 1, 3)], dim=1)
    assert torch.equal(TokenShift(shift, (height, width))(x), padded[:, shift.keys((height, width))])


@st.composite
def convolutions(draw):
    """A convolution that keeps the size (divided by its stride), patches and grid."""
    kernel = draw(st.sampled_from([1, 3, 5]))
    stride, dilation = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    groups = draw(st.sampled_from([1, 2]))
    circular = draw(st.booleans())
    patch = draw(st.sampled_from([2, 4])), 2 * draw(st.integers(1, 2))
    grid = draw(st.tuples(*[st.integers(1, 4)] * 2))
    padding = dilation * (kernel - 1) // 2
    assume(not circular or all(padding <= p * g for p, g in zip(patch, grid)))
    torch.manual_seed(draw(st.integers(0, 100)))
    conv = nn.Conv2d(
        2, 4, kernel, stride, padding, dilation, groups, draw(st.booleans()),
        padding_mode='circular' if circular else 'zeros').double()
    return conv, patch, grid, draw(st.sampled_from([None, 3]))


@given(convolutions())
def test_a_rewritten_convolution_is_shifts_and_the_same_convolution_again(case):
    conv, patch, grid, head_dim = case
    attn = conv2d_to_attention(conv, patch, grid, head_dim=head_dim).eval()
    images = torch.randn(2, 2, patch[0] * grid[0], patch[1] * grid[1]).double()
    tokens = patchify(images, patch)
    fused = attn.fuse()
    assert isinstance(fused, ShiftedAttention)
    assert fused.rest is None
    torch.testing.assert_close(fused(tokens), attn(tokens), atol=1e-12, rtol=0)
    back, residual = attention_to_conv2d(attn, patch, conv.stride)
    assert residual < 1e-12
    if conv.padding_mode == 'zeros':  # around a single patch there is a larger one that does the same
        assert back.kernel_size <= tuple(d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size))
    torch.testing.assert_close(back(images), conv(images), atol=1e-12, rtol=0)


def test_attention_that_is_no_convolution_becomes_the_closest_one():
    conv = nn.Conv2d(2, 3, 3, padding=1)
    attn = conv2d_to_attention(conv, 4, (3, 3))
    noise = 0.01 * torch.randn_like(attn.proj.weight)
    attn.proj.weight.data += noise
    back, residual = attention_to_conv2d(attn, 4)
    weights = torch.cat([conv.weight.flatten().repeat(16), conv.bias.repeat(16)]).norm()
    assert residual == pytest.approx((noise.norm() / weights).item(), rel=0.1)
    margin = back.kernel_size[0] // 2 - 1  # noise has a larger reach
    torch.testing.assert_close(
        back.weight[..., margin:-margin, margin:-margin], conv.weight, atol=0.01, rtol=0)


def test_a_bias_of_values_is_part_of_the_residual():
    attn = conv2d_to_attention(nn.Conv2d(2, 3, 3, padding=1), 4, (3, 3))
    assert attention_to_conv2d(attn, 4).residual == 0
    attn.qkv.bias.data[-attn.attn_dim:] = 0.1  # it ends at the border, a convolution's does not
    assert attention_to_conv2d(attn, 4).residual > 0.01


@pytest.mark.parametrize(('change', 'message'), [
    (lambda attn: attn.reset_parameters(), 'Head 1 is no shift by proof'),
    (lambda attn: attn.rel_pos.point_head(0, [(1, 0)], 5.), 'Head 1 is no shift by proof'),
])
def test_what_is_no_convolution_is_refused(change, message):
    attn = conv2d_to_attention(nn.Conv2d(2, 3, 3, padding=1), 4, (3, 3))
    change(attn)
    with pytest.raises(ValueError, match=message):
        attention_to_conv2d(attn, 4)


def test_widths_that_do_not_fit_are_refused():
    attn = conv2d_to_attention(nn.Conv2d(2, 3, 3, padding=1), 4, (3, 3))
    with pytest.raises(ValueError, match=r'patch_size=5 and stride=1 do not fit tokens of width 32'):
        attention_to_conv2d(attn, 5)
    with pytest.raises(ValueError, match='stride=3 do not fit'):
        attention_to_conv2d(attn, 4, 3)


@st.composite
def layers(draw):
    """A layer with heads from one-hot to soft, queries from zero to large, and the norm before it."""
    torch.manual_seed(draw(st.integers(0, 10 ** 6)))
    dim, grid = 8, draw(st.sampled_from([(2, 3), (4, 4)]))
    rel_pos = draw(st.sampled_from(['table', 'padded_table', 'quadratic', 'quadratic_gen', 'learned']))
    attn = RelPosAttention(dim, grid, num_heads=3, head_dim=draw(st.sampled_from([4, 8])), rel_pos=rel_pos).double()
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=draw(st.sampled_from([0., 0.1, 1.])))
    if hasattr(attn.rel_pos, 'center'):
        attn.rel_pos.center.data.round_()
        attn.rel_pos.inv_std.data *= 10
    elif hasattr(attn.rel_pos, 'relative_position_bias_table'):
        for head in range(3):
            attn.rel_pos.point_head(head, [(draw(st.integers(-1, 1)), draw(st.integers(-1, 1)))],
                                    draw(st.sampled_from([2., 8., 20., 60.])))
    attn.qkv.weight.data[:attn.attn_dim] *= draw(st.sampled_from([0., 1e-3, 0.1, 1.]))
    norm = nn.LayerNorm(dim).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return attn.eval(), norm


@given(layers(), st.integers(0, 10 ** 6))
def test_no_certificate_is_violated(case, seed):
    """Also by tokens that are the worst for the scores: along the singular vectors of queries and keys."""
    attn, norm = case
    torch.manual_seed(seed)
    num_tokens = math.prod(attn.grid_size)
    tokens = torch.randn(4, num_tokens, 8).double()
    query, key, _ = (norm.weight * attn.qkv.weight.view(3, attn.num_heads, -1, 8)).detach()
    left, _, right = torch.linalg.svd(query.transpose(-2, -1) @ key)
    worst = torch.cat([left[..., 0], right[:, 0], -left[..., 0], -right[:, 0]])
    tokens = torch.cat([tokens, worst[torch.randint(len(worst), (8, num_tokens))]])
    winners = bias_winners(attn)
    leaks = proved_leaks(attn, winners, norm)
    maps = attention_maps(attn, norm(tokens))['']
    weights = torch.cat([maps.weights, maps.zero_key.unsqueeze(-1)], dim=-1)
    for head, shift in enumerate(winners.shifts):
        if shift is not None:
            at_shift = weights[:, head].gather(-1, shift.keys(attn.grid_size).expand(len(tokens), -1).unsqueeze(-1))
            assert (1 - at_shift).max() <= leaks[head] + 1e-6  # maps are in float32
    block = CmhsaBlock(8, num_heads=2).double().train()
    block.norm1, block.attn = norm, attn
    expected = attn(norm(tokens))
    for tolerance in (1e-6, 0.3):
        fused = copy.deepcopy(block)
        report, = fuse_shifts(fused, tokens, tolerance)
        assert report.leak <= tolerance
        assert report.error is None or report.error <= report.bound + 1e-12
        error = (fused.attn.eval()(norm(tokens)) - expected).norm(dim=-1).max()
        assert error <= report.bound + 1e-12


@st.composite
def models(draw):
    """A phase-2 model, sharp or soft, thin or wide heads, trained or not, with queries from zero to large."""
    torch.manual_seed(draw(st.integers(0, 10 ** 6)))
    start = draw(st.sampled_from([dict(sharpness=8.), dict(sharpness=20.), dict(), dict(peak=0.75), dict(peak=0.99)]))
    model = converted(depth=2, **start, head_dim=draw(st.sampled_from([None, 16])))
    model = train_a_little(model, draw(st.integers(0, 3)), draw(st.sampled_from([1e-3, 0.1])))
    query_std = draw(st.sampled_from([0., 1e-3, 0.1]))
    for block in model.blocks:
        query = block.attn.qkv.weight[:block.attn.attn_dim]
        query.data += query_std * torch.randn_like(query)
    return model.double()


@given(models(), st.sampled_from([1e-6, 1e-4, 0.3]))
def test_no_certificate_of_a_model_is_violated(model, tolerance):
    fused = copy.deepcopy(model)
    report = fuse_shifts(fused, tolerance=tolerance)
    seen = {}
    for name, layer in attention_layers(model).items():
        layer.register_forward_hook(lambda layer, inputs, output, name=name: seen.update({name: (*inputs, output)}))
    model(10 * torch.randn(4, 3, 32, 32).double())
    for layer in report:
        tokens, expected = seen[layer.name]
        assert layer.leak <= tolerance
        assert (fused.get_submodule(layer.name)(tokens) - expected).norm(dim=-1).max() <= layer.bound + 1e-12


@pytest.mark.parametrize('zero_key_wins', [False, True])
def test_the_leak_is_attained(zero_key_wins):
    """Two patches, and tokens and weights that make the scores as large as can be: the proof is not too large."""
    attn = RelPosAttention(2, (1, 2), num_heads=1, head_dim=1).double().eval()
    attn.rel_pos.point_head(0, [(0, 5)] if zero_key_wins else [(0, 1), (0, -1)], 20.)
    attn.rel_pos.zero_key_bias.data.fill_(10. if zero_key_wins else -100.)
    direction = torch.tensor([1., -1.]).double() / 2 ** 0.5
    for linear in attn.qkv.weight.data[:2]:
        linear.copy_(3 ** 0.5 * direction)
    norm = nn.LayerNorm(2, eps=0.).double()
    tokens = torch.tensor([[[1., -1.], [1., -1.] if zero_key_wins else [-1., 1.]]]).double()
    maps = attention_maps(attn, norm(tokens))['']
    zero_key = maps.zero_key.min().double() if zero_key_wins else maps.weights[0, 0, 0, 1].double()
    leak, = proved_leaks(attn, bias_winners(attn), norm).tolist()
    assert leak == pytest.approx(1 - zero_key.item(), rel=1e-3)


def test_the_bound_of_the_output_is_attained():
    """Values that are opposite to each other."""
    attn = RelPosAttention(2, (1, 2), num_heads=1, head_dim=2).double().eval()
    attn.rel_pos.point_head(0, [(0, 1), (0, -1)], 2.)
    attn.rel_pos.zero_key_bias.data.fill_(-100.)
    attn.qkv.weight.data[:2] = 0
    attn.qkv.weight.data[4:] = attn.proj.weight.data[:] = torch.tensor([[1., -1.], [-1., 1.]]).double() / 2
    block = CmhsaBlock(2, num_heads=1).double().eval()
    block.norm1, block.attn = nn.LayerNorm(2, eps=0.).double(), attn
    report, = fuse_shifts(block, torch.tensor([[[1., -1.], [-1., 1.]]]).double(), tolerance=0.5)
    assert report.error == pytest.approx(report.bound, rel=1e-6)


@pytest.mark.parametrize('norm', [
    'other class', 'hook', 'of two layers', 'of other shapes', 'elsewhere', 'before a hook', 'none'])
def test_only_a_plain_norm_before_the_attention_is_trusted(norm):
    model = converted()
    for block in model.blocks:
        nn.init.normal_(block.attn.qkv.weight.data[:block.attn.attn_dim], std=1e-4)
    block = model.blocks[0]
    if norm == 'other class':
        louder = {'forward': lambda self, x: 50 * nn.LayerNorm.forward(self, x)}
        block.norm1 = type('Louder', (nn.LayerNorm,), louder)(48)
    elif norm == 'hook':
        block.norm1.register_forward_hook(lambda norm, inputs, output: 50 * output)
    elif norm == 'of two layers':
        model.blocks[1].attn = block.attn
    elif norm == 'of other shapes':
        block.norm1 = nn.LayerNorm((64, 48))
    elif norm == 'elsewhere':
        block.__class__ = type('PostNorm', (CmhsaBlock,), {'forward': lambda self, x: self.norm1(x + self.attn(x))})
    elif norm == 'before a hook':
        block.attn.register_forward_pre_hook(lambda attn, inputs: 50 * inputs[0])
    else:
        block.norm1 = nn.Identity()
    expected = model(IMAGES)
    assert norm == 'of two layers' or not any(proved_shifts(block.attn, block.attn_norm()))
    torch.testing.assert_close(reparameterize_model(model)(IMAGES), expected)
    proved = [report.num_proved for report in fuse_shifts(model)]
    assert proved == ([0, 9, 9] if norm == 'of two layers' else [0, 9, 9, 9])


def test_adapters_stay():
    class Adapter(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Wrapper(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return 2 * self.linear(x)

    def adapted(linear):
        adapter = Adapter(linear.in_features, linear.out_features)
        adapter.load_state_dict(linear.state_dict())
        return adapter

    for model, name in ((converted(), 'proj'), (converted(), 'qkv'), (sharp_pixel_model(), 'value')):
        for wrap in (adapted, Wrapper):
            other = copy.deepcopy(model)
            for block in other.blocks:
                setattr(block.attn, name, wrap(getattr(block.attn, name)))
            check_left_as_it_is(other)


def sharp_pixel_model():
    model = timm.create_model('test_pixel_attn').eval()
    for block in model.blocks:
        block.attn.rel_pos.inv_std.data.fill_(9.)
        block.attn.rel_pos.center.data.round_()
    return model


def check_left_as_it_is(model):
    """Check that no head of the first layer becomes a shift, and that the model computes what it did."""
    expected = model(IMAGES)
    torch.testing.assert_close(reparameterize_model(model)(IMAGES), expected)
    if hasattr(model, 'set_hard_attn') and not model.blocks[0].attn.is_plain():
        with pytest.raises(ValueError, match='hooks or adapters of qkv and proj'):
            model.set_hard_attn()
    report = fuse_shifts(model, IMAGES)[0]
    assert (report.num_proved, report.num_measured) == (0, 0)
    torch.testing.assert_close(model(IMAGES), expected)


@pytest.mark.parametrize('create', [converted, sharp_pixel_model])
@pytest.mark.parametrize('change', ['hook', 'pre-hook', 'forward', 'subclass', 'proj_drop', 'hook of proj_drop'])
def test_layers_that_something_was_added_to_stay(create, change):
    model = create()
    for attn in (block.attn for block in model.blocks):
        if change == 'hook':
            attn.register_forward_hook(lambda attn, inputs, output: 2 * output)
        elif change == 'pre-hook':
            attn.register_forward_pre_hook(lambda attn, inputs: 2 * inputs[0])
        elif change == 'forward':
            attn.forward = lambda x, forward=attn.forward, **kwargs: 2 * forward(x)
        elif change == 'subclass':
            attn.__class__ = type('Doubled', (type(attn),), {'forward': doubled(type(attn).forward)})
        elif change == 'proj_drop':
            attn.proj_drop = nn.LayerNorm(attn.proj.out_features)
        else:
            attn.proj_drop.register_forward_hook(lambda drop, inputs, output: 2 * output)
    if isinstance(model.blocks[0].attn, RelPosAttention):
        with pytest.raises(TypeError, match=r'plain RelPosAttention|got Doubled'):
            attention_to_conv2d(model.blocks[0].attn, 4)
    check_left_as_it_is(model)


def doubled(forward):
    return lambda self, *args, **kwargs: 2 * forward(self, *args, **kwargs)


def test_a_hooked_convolution_is_no_convolution():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    conv.register_forward_hook(lambda conv, inputs, output: 2 * output)
    with pytest.raises(TypeError, match='would drop its hooks'):
        conv2d_to_attention(conv, 4, 4)


def test_quantized_layers_stay():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that there is a newer way to quantize
        model = torch.ao.quantization.quantize_dynamic(converted(), {nn.Linear}, torch.qint8)
    check_left_as_it_is(model)
    source = timm.create_model('test_cmhsa_conv_k3').eval()
    assert timm_cmhsa.verify(source, model, IMAGES).layers[0].heads_used == 9


def test_adapters_added_to_shifts_take_part():
    model = converted()
    model.set_hard_attn()
    expected = model(IMAGES)
    handle = model.blocks[0].attn.qkv.register_forward_hook(lambda linear, inputs, output: 2 * output)
    assert not torch.allclose(model(IMAGES), expected, atol=1e-5)
    handle.remove()
    torch.testing.assert_close(model(IMAGES), expected)


def test_infinite_biases_are_no_shift():
    model = converted()
    bias = model.blocks[0].attn.rel_pos.relative_position_bias_table.data[:, 2]
    bias[bias.argmax()] = math.inf
    assert [layer.num_proved for layer in fuse_shifts(model)] == [8, 9, 9, 9]


def test_a_layer_that_is_called_twice_needs_a_proof():
    """The content is large in the first call only."""
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = timm_cmhsa.attend_convs(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1)), input_size=(3, 8, 8))[0]

        def forward(self, x):
            return self.conv(1e-3 * self.conv(100 * x))

    model, images = Twice(), torch.randn(2, 3, 8, 8)
    attn, = attention_layers(model).values()
    nn.init.normal_(attn.qkv.weight.data[:attn.attn_dim], std=0.5)
    expected = model(images)
    report, = fuse_shifts(model, images)
    assert report.num_measured == 0
    torch.testing.assert_close(model(images), expected)


def test_other_heads_stay_attention_at_the_callers_tolerance():
    model = converted()
    for block in model.blocks:
        block.attn.rel_pos.point_head(0, [(-1, -1)], 25.)
        block.attn.rel_pos.point_head(1, [(-1, 0)], 90.)
    report = fuse_shifts(model, tolerance=1e-9)
    assert [layer.num_proved for layer in report] == [1] * 4
    assert not isinstance(model.blocks[0].attn.rest, ShiftedAttention)


def test_pixel_models_and_their_borders():
    """Without a zero key a sharp Gaussian sees the nearest patch where its centre is outside the image."""
    model = timm.create_model('test_pixel_attn').eval()
    for block in model.blocks:
        block.attn.rel_pos.center.data.uniform_(-2, 2).round_()
        nn.init.constant_(block.attn.rel_pos.inv_std, 9.)
    model.blocks[1].attn.rel_pos.inv_std.data[:4] = 0.5  # wide: these stay attention
    expected = model(IMAGES)
    fused = reparameterize_model(model)
    torch.testing.assert_close(fused(IMAGES), expected, atol=1e-6, rtol=0)
    assert {shift.border for shift in fused.blocks[0].attn.heads.shifts if shift.offset != (0, 0)} == {'replicate'}
    assert fused.blocks[1].attn.rest.num_heads == 4
    assert [report.num_proved for report in fuse_shifts(model)] == [9, 5, 9, 9]


@pytest.mark.parametrize('kwargs', [
    dict(), dict(head_dim=16), dict(num_heads=12), dict(rel_pos='quadratic'), dict(architecture='cmhsa_attn_soft')])
def test_reparameterized_models_compute_the_same(kwargs):
    """Also where other heads have learned, and for any number of images."""
    model = converted(**kwargs)
    nn.init.trunc_normal_(model.blocks[0].attn.proj.weight, std=0.02)  # spare heads as well
    model = train_a_little(model)
    fused = reparameterize_model(model)
    assert all(isinstance(block.attn, ShiftedAttention) for block in fused.blocks)
    has_spare_heads = 'num_heads' in kwargs or 'architecture' in kwargs
    assert (fused.blocks[0].attn.rest is not None) == has_spare_heads
    for images in (IMAGES, IMAGES[:1], IMAGES[:0]):
        torch.testing.assert_close(fused(images), model(images), atol=2e-6, rtol=0)
    with pytest.raises(ValueError, match='on a grid of 8 x 8 patches: set the input size before'):
        fused.set_input_size((40, 24))
    torch.testing.assert_close(fused(IMAGES), model(IMAGES), atol=2e-6, rtol=0)
    model.set_input_size((40, 24))
    images = torch.randn(2, 3, 40, 24)
    torch.testing.assert_close(reparameterize_model(model)(images), model(images), atol=2e-6, rtol=0)


def test_soft_heads_are_no_shifts():
    model = converted(peak=0.75)
    assert not any(isinstance(module, ShiftedAttention) for module in reparameterize_model(model).modules())
    report = fuse_shifts(model, IMAGES)
    assert [layer.num_proved + layer.num_measured for layer in report] == [0] * 4
    assert isinstance(model.blocks[0].attn, RelPosAttention)


def test_without_a_norm_shifts_are_measured():
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    timm_cmhsa.attend_convs(cnn, input_size=(3, 8, 8))
    for layer in (cnn[0], cnn[2]):
        nn.init.normal_(layer.attn.qkv.weight[:layer.attn.attn_dim].data, std=0.02)  # queries that have learned
    nn.init.normal_(cnn[2].attn.qkv.weight.data, std=3.)  # no shifts any more
    images = torch.randn(2, 3, 8, 8)
    expected = cnn(images)
    assert [layer.num_proved + layer.num_measured for layer in fuse_shifts(copy.deepcopy(cnn))] == [0, 0]
    report = fuse_shifts(cnn, images)
    assert [(layer.num_proved, layer.num_measured) for layer in report] == [(0, 9), (0, 0)]
    assert report[0].bound == math.inf
    assert 0 < report[0].leak <= 1e-4
    assert 0 < report[0].rel_error < 1e-4
    torch.testing.assert_close(cnn(images), expected, atol=1e-4, rtol=1e-4)
    lines = str(report).splitlines()
    assert lines[0].split()[:5] == ['layer', 'heads', 'shifts:', 'proved', 'measured']
    assert lines[2].split()[1:] == ['9', '0', '0', '0.0e+00', '0.0e+00', '-', '-']


def test_the_tolerance_is_the_callers():
    model = converted(sharpness=12.)
    assert fuse_shifts(copy.deepcopy(model))[0].num_proved == 0
    assert fuse_shifts(model, tolerance=0.5)[0].num_proved == 9
    for tolerance in (0, 1, math.nan):
        with pytest.raises(ValueError, match='must be between 0 and 1'):
            fuse_shifts(model, tolerance=tolerance)


def test_a_layer_alone_cannot_be_replaced_in_place():
    with pytest.raises(ValueError, match='is an attention layer itself'):
        fuse_shifts(converted().blocks[0].attn)


def test_shifts_cannot_be_masked():
    fused = reparameterize_model(converted())
    with pytest.raises(ValueError, match='no attention to mask'):
        fused.blocks[0].attn(torch.randn(1, 64, 48), is_causal=True)


def test_shifts_take_few_parameters():
    """What a head does not read of its patch is left out: k3 reads a row or column of pixels, and one pixel."""
    attn = conv2d_to_attention(nn.Conv2d(3, 3, 3, padding=1), 4, (4, 4))
    fused = attn.fuse()
    assert len(fused.value) == 4 * 12 + 4 * 3  # four sides, four corners; the patch itself is projected directly
    assert sum(map(torch.Tensor.numel, fused.parameters())) < attn.qkv.weight.numel() / 7


@pytest.mark.parametrize('kwargs', [dict(), dict(num_heads=12), dict(num_heads=11, head_dim=16)])
def test_training_as_shifts_is_training_of_the_same_function(kwargs):
    source = converted(**kwargs)
    model = timm.create_model('test_cmhsa_attn', hard_attn=True, **kwargs)
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(model(IMAGES), source(IMAGES), atol=1e-6, rtol=0)
    model(IMAGES).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)  # as DistributedDataParallel needs
    model.zero_grad()
    queries = model.blocks[0].attn.qkv.weight[:model.blocks[0].attn.attn_dim]
    torch.manual_seed(2)
    train_a_little(model)
    assert torch.equal(queries.any(dim=1), source.blocks[0].attn.qkv.weight[:len(queries)].any(dim=1))
    torch.manual_seed(2)
    if kwargs != dict(num_heads=12):  # spare heads learn as attention only
        train_a_little(source)
        torch.testing.assert_close(model(IMAGES), source(IMAGES), atol=1e-4, rtol=0)
    after = timm.create_model('test_cmhsa_attn', **kwargs).eval()
    after.load_state_dict(model.state_dict())
    torch.testing.assert_close(after(IMAGES), model(IMAGES), atol=1e-6, rtol=0)
    model.set_input_size(40)
    after.set_input_size(40)
    images = torch.randn(1, 3, 40, 40)
    torch.testing.assert_close(after(images), model(images), atol=1e-6, rtol=0)
    model.set_hard_attn(False)
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(after(images), model(images), atol=1e-6, rtol=0)


def test_a_random_start_as_shifts_is_attention_as_well():
    model = timm.create_model('test_cmhsa_attn', hard_attn=True).eval()
    assert model.blocks[0].attn.shifted.shifts[0].offset == (0, 0)
    maps = attention_maps(model, IMAGES)  # of the attention
    assert maps['blocks.0.attn'].weights.max() > 0.999
    expected = model(IMAGES)
    model.set_hard_attn(False)
    torch.testing.assert_close(model(IMAGES), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize('name', ['cmhsa_attn', 'cmhsa_attn_16x96', 'cmhsa_attn_soft_patch4_32'])
def test_registered_models_as_shifts(name):
    model = timm.create_model(name, hard_attn=True, depth=1, num_classes=0).eval()
    images = torch.randn(1, *model.pretrained_cfg['input_size'])
    expected = model(images)
    model.set_hard_attn(False)
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)


def test_what_is_refused_leaves_the_model_as_it_was():
    model = converted()
    model.blocks[2].attn.rel_pos.point_head(0, [(0, 0)], 1.)
    with pytest.raises(ValueError, match='1 of 9 heads do not'):
        model.set_hard_attn()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [block.attn.shifted for block in model.blocks] == [None] * 4
    hard = timm.create_model('test_cmhsa_attn', hard_attn=True)
    with pytest.raises(ValueError, match='1 of 9 heads do not'):
        hard.load_state_dict(model.state_dict())
    assert not hard.hard_attn
    torch.testing.assert_close(hard.eval()(IMAGES), model(IMAGES))


def test_a_grid_on_which_heads_leak_too_much_is_refused():
    model = converted(sharpness=28.)
    model.set_hard_attn()
    expected, learned = model(IMAGES), [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ValueError, match='8 of 9 heads do not'):
        model.set_input_size(64)
    assert model.hard_attn
    assert [parameter.requires_grad for parameter in model.parameters()] == learned
    assert model.patch_embed.img_size == (32, 32)
    assert torch.equal(model(IMAGES), expected)
    model.set_hard_attn(False)
    model.set_input_size(64)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_is_frozen_stays_frozen():
    model = converted().requires_grad_(False)
    model.get_classifier().requires_grad_(True)
    model.blocks[0].attn.rel_pos.zero_key_bias.requires_grad_(True)
    learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for _ in range(2):
        model.set_hard_attn()
    model.set_input_size(48)
    assert not model.blocks[0].attn.rel_pos.zero_key_bias.requires_grad
    model.set_hard_attn(False)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == learned


def test_a_smaller_grid_forgets_offsets():
    model = timm.create_model('test_cmhsa_attn', hard_attn=True, img_size=64, num_heads=30).eval()
    for size in (8, 64):
        model.set_input_size(size)
    images = torch.randn(1, 3, 64, 64)
    attention = timm.create_model('test_cmhsa_attn', img_size=64, num_heads=30).eval()
    attention.load_state_dict(model.state_dict())
    torch.testing.assert_close(attention(images), model(images))


def test_shifts_are_published_as_attention(tmp_path):
    model = timm.create_model('test_cmhsa_attn', hard_attn=True, num_classes=3)
    train_a_little(model.reset_classifier(4) or model)
    timm_cmhsa.save_for_hub(model, tmp_path / 'model')
    loaded = timm.create_model(f'local-dir:{tmp_path / "model"}', pretrained=True).eval()
    assert not loaded.hard_attn
    torch.testing.assert_close(loaded(IMAGES), model(IMAGES), atol=1e-6, rtol=0)


@pytest.mark.skipif(not hasattr(timm.models, 'get_model_args'), reason='this timm notes no arguments')
@pytest.mark.parametrize('enable', [False, True])
def test_timm_saves_what_is_set(enable, tmp_path):
    model = timm.create_model('test_cmhsa_attn', hard_attn=True)
    model.set_hard_attn(False)
    if enable:
        model.set_hard_attn()
    else:
        for block in model.blocks:
            nn.init.zeros_(block.attn.rel_pos.relative_position_bias_table)  # these are no shifts
    save_for_hf(model, tmp_path)
    assert timm.create_model(f'local-dir:{tmp_path}', pretrained=True).hard_attn == enable


def test_shifts_are_proved_chunk_by_chunk(monkeypatch):
    layers = [block.attn for block in converted().blocks]
    layers[0].rel_pos.relative_position_bias_table.data[-1, 0] = 100  # an offset that only the last query has
    expected = [bias_winners(layer) for layer in layers]
    assert [winners.shifts[0] is None for winners in expected][:2] == [True, False]
    monkeypatch.setattr(certificates, 'MAX_BIAS_ENTRIES', 3 * layers[0].num_heads * len(layers[0].rel_pos.position))
    for layer, winners in zip(layers, expected):
        shifts, *odds = bias_winners(layer)
        assert shifts == winners[0]
        assert all(torch.equal(*pair) for pair in zip(odds, winners[1:]))


def test_heads_without_an_output():
    model = timm.create_model('test_cmhsa_attn', hard_attn=True).eval()
    nn.init.zeros_(model.blocks[0].attn.proj.weight)
    model.set_hard_attn()
    expected = model(IMAGES)
    torch.testing.assert_close(reparameterize_model(model)(IMAGES), expected)
    model.blocks[1].attn.keep_heads([0, 1])
    assert model(IMAGES).isfinite().all()
    assert all(parameter.requires_grad for parameter in model.blocks[1].attn.parameters())


def test_heads_that_are_no_shifts_are_refused():
    model = timm.create_model('test_cmhsa_attn', hard_attn=True, num_heads=10, rel_pos='padded_table')
    with pytest.raises(ValueError, match='10 of 10 heads do not: train them as attention'):
        model.load_state_dict(converted(peak=0.75).state_dict())
    with pytest.raises(ValueError, match='use attn_drop_rate=0'):
        timm.create_model('test_cmhsa_attn', hard_attn=True, attn_drop_rate=0.1)
    with pytest.raises(ValueError, match="rel_pos='learned' has none"):
        timm.create_model('test_cmhsa_attn', hard_attn=True, rel_pos='learned')
    model = timm.create_model('test_cmhsa_attn', hard_attn=True)
    with pytest.raises(ValueError, match='use its source'):
        reparameterize_model(model).set_hard_attn()
    with pytest.raises(ValueError, match='no attention to mask'):
        model.blocks[0].attn(torch.randn(1, 64, 48), is_causal=True)
