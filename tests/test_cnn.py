import copy
import logging

import pytest
import timm
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from timm.layers import Conv2dSame, StdConv2d
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from timm_cmhsa import attend_convs, attention_summary, cnn, efficient
from timm_cmhsa.cnn import AttendedConv1d, AttendedConv2d


def resnet(**kwargs):
    """A resnet18 of few channels."""
    return timm.create_model('resnet18', channels=(8, 16, 16, 32), **kwargs)


def natural(model):
    """Give a model statistics and scales as after training, where each layer matters."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2.)
            nn.init.normal_(module.running_mean, std=0.3)
        if hasattr(module, 'gamma'):
            nn.init.uniform_(module.gamma, 0.5, 1.)
    return model.eval()


def logits_error(model, expected, x):
    with torch.no_grad():
        y, z = expected(x), model(x)
    assert y.abs().max() > 1e-2
    return ((z - y).abs().max() / y.abs().max()).item()


slow = pytest.mark.slow


@pytest.mark.parametrize(('name', 'names', 'size', 'num_replaced'), [
    ('resnet18', '*', (3, 25, 35), 17),  # maps that strides do not divide
    ('convnext_atto', '*', (3, 32, 32), 16),
    ('tf_mobilenetv3_small_minimal_100', 'blocks.1.*', (3, 32, 32), 2),  # TensorFlow's padding
    pytest.param('tf_mobilenetv3_small_minimal_100', '*', (3, 64, 64), 12, marks=slow),
    pytest.param('resnet50', 'layer4.*', (3, 224, 224), 3, marks=slow),
    pytest.param('convnext_atto', '*conv_dw', (3, 64, 64), 12, marks=slow),
    pytest.param('inception_v3', '*_7a.*', (3, 128, 128), 4, marks=slow),  # no padding
    pytest.param('densenet121', ['features.conv0', 'features.denseblock4.*'], (3, 64, 64), 17, marks=slow),
])
def test_logits_are_equal_to_rounding(name, names, size, num_replaced):
    model = natural(timm.create_model(name, num_classes=10))
    expected, x = copy.deepcopy(model), torch.randn(2, *size)
    assert attend_convs(model, names, size) is model
    assert len(attention_summary(model)) == num_replaced
    for use_test_size in (False, True):
        assert timm.data.resolve_model_data_config(model, use_test_size=use_test_size)['input_size'] == size
    assert sum(isinstance(module, AttendedConv2d) for module in model.modules()) == num_replaced
    assert logits_error(model, expected, x) <= 5e-6


@st.composite
def convolutions(draw):
    """Any convolution, of one or two dimensions, and the size of a map for it."""
    dims = draw(st.integers(1, 2))
    size, kernel, stride, dilation, padding = (
        draw(st.tuples(*[st.integers(low, high)] * dims)) for low, high in ((3, 9), (1, 5), (1, 3), (1, 2), (0, 3)))
    assume(max(kernel) > 1)
    assume(all(s + 2 * p >= d * (k - 1) + 1 for s, p, d, k in zip(size, padding, dilation, kernel)))
    groups = draw(st.integers(1, 2))
    conv_class = draw(st.sampled_from([nn.Conv2d, Conv2dSame])) if dims == 2 else nn.Conv1d
    kwargs = {} if conv_class is Conv2dSame else dict(padding=padding)
    torch.manual_seed(draw(st.integers(0, 2 ** 16)))
    conv = conv_class(
        groups * draw(st.integers(1, 2)), groups * 2, kernel, stride=stride, dilation=dilation, groups=groups,
        bias=draw(st.booleans()), **kwargs)
    return conv, size, draw(st.integers(1, 4)), draw(st.sampled_from(['table', 'quadratic']))


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(convolutions())
def test_every_convolution_is_replaced_exactly(case):
    """Sizes that no patch or stride divides, padding that keeps the size or not: the maps are what they were."""
    conv, size, patch_size, rel_pos = case
    x = torch.randn(2, conv.in_channels, *size)
    expected = conv(x)
    model = attend_convs(nn.Sequential(conv), '*', x.shape[1:], patch_size, rel_pos)
    assert model[0].attn.rel_pos.name == rel_pos
    assert isinstance(model[0], AttendedConv1d if isinstance(conv, nn.Conv1d) else AttendedConv2d)
    actual = model(x)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 2e-6 * expected.abs().max().clamp(min=1e-3)


class Scaled(nn.Conv1d):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize(('conv', 'size'), [(Scaled(2, 2, 3), (2, 8)), (nn.Conv3d(2, 2, 3), (2, 4, 4, 4))])
def test_other_convolutions_are_refused(conv, size):
    model = nn.Sequential(nn.Flatten(), nn.Unflatten(1, size), conv)
    with pytest.raises(ValueError, match=rf'Expected an nn\.Conv2d or a plain nn\.Conv1d, got {type(conv).__name__}'):
        attend_convs(model, input_size=(1, torch.Size(size).numel()))


def test_circular_padding_is_replaced_where_patches_fit():
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode='circular')
    x = torch.randn(1, 2, 6, 8)
    model = attend_convs(nn.Sequential(conv), '*', (2, 6, 8), patch_size=2)
    torch.testing.assert_close(model(x), conv(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match='Circular padding has to keep the size of the map, in whole patches'):
        attend_convs(nn.Sequential(conv), '*', (2, 6, 8), patch_size=4)


def test_model_trains_saves_and_loads(tmp_path):
    """All parameters of the attention get gradients, and a state dict fits a model that was rewritten alike."""
    model = attend_convs(resnet(num_classes=4), 'layer[34].*', (3, 32, 32))
    assert model.training
    x, targets = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    torch.save(model.state_dict(), tmp_path / 'model.pth')
    other = attend_convs(resnet(num_classes=4), 'layer[34].*', (3, 32, 32))
    other.load_state_dict(torch.load(tmp_path / 'model.pth', weights_only=True))
    torch.testing.assert_close(other.eval()(x), model.eval()(x))
    torch.save(model, tmp_path / 'whole.pt')
    torch.testing.assert_close(torch.load(tmp_path / 'whole.pt', weights_only=False)(x), model(x))


def test_biases_of_the_attention_pattern_can_be_spared_from_weight_decay():
    model = attend_convs(resnet(), 'layer4.*', (3, 32, 32))
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=['*.rel_pos.*'])
    decay = {id(p): group['weight_decay'] for group in groups for p in group['params']}
    tables = [p for name, p in model.named_parameters() if name.endswith('relative_position_bias_table')]
    assert len(tables) == 4
    assert all(decay[id(table)] == 0 for table in tables)
    assert decay[id(model.layer4[0].conv1.attn.qkv.weight)] == 0.05


def test_gradients_reach_the_rest_of_the_model_as_before():
    model = natural(resnet(num_classes=4)).double()
    attended, x = copy.deepcopy(model), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    attend_convs(attended, 'layer2.*', (3, 32, 32))
    gradients = []
    for each in (model, attended):
        each(x).square().sum().backward()
        gradients.append({name: p.grad for name, p in each.named_parameters() if 'layer2' not in name})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-9, rtol=1e-7)


def test_report_tells_what_was_replaced_and_what_it_costs(caplog):
    model = resnet()
    with caplog.at_level(logging.INFO, 'timm_cmhsa'):
        attend_convs(model, ['conv1', 'layer4.1.conv2'], (3, 32, 32))
    stem, last = attention_summary(model)
    assert (stem.name, stem.convolution, stem.grid_size) == ('conv1', '7x7, stride 2', (16, 16))
    assert (last.num_heads, last.head_dim, last.convolution) == (1, 32, '3x3')
    assert last.params == (9 * 32 ** 2, sum(p.numel() for p in model.layer4[1].conv2.parameters()))
    assert last.macs[0] == 9 * 32 ** 2
    assert stem.macs[0] == 7 * 7 * 3 * 64 * 16 * 16
    assert stem.macs[1] > 2 * 16 ** 4 * stem.num_heads * stem.head_dim
    header, *rows, total = str(attention_summary(model)).splitlines()
    assert header.split()[:4] == ['layer', 'convolution', 'tokens', 'heads']
    assert [row.split()[0] for row in rows] == ['conv1', 'layer4.1.conv2']
    assert total.startswith('2 in all')
    assert f'{(stem.params[0] + last.params[0]) / 1e6:.3g} -> ' in total
    assert str(attention_summary(model)) in caplog.text
    assert attention_summary(resnet()) == []


@pytest.mark.parametrize('num_patches', [4, 64])
def test_multiply_accumulates_are_those_of_the_layer(num_patches):
    """The count of the report is what PyTorch counts in inference, up to the zero key and the padding of keys."""
    side = int(num_patches ** 0.5)
    model = attend_convs(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1)), '*', (32, side, side), peak=0.75)
    layer, = attention_summary(model)
    model = timm.utils.reparameterize_model(model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 32, side, side))
    assert layer.macs[1] == pytest.approx(counter.get_total_flops() / 2, rel=0.35)


def test_modes_stay_as_they_are():
    model = resnet().train()
    model.layer4.eval()
    attend_convs(model, 'layer[34].*', (3, 32, 32))
    assert model.layer3[0].conv1.attn.attn_drop.training
    assert not model.layer4[0].conv1.attn.attn_drop.training


def test_code_that_asks_a_convolution_for_its_shape_gets_an_answer():
    """DaViT's position encoding pads by the kernel size that it reads off its convolution."""
    model = natural(timm.create_model(
        'davit_tiny', num_classes=3, depths=(1, 1), embed_dims=(32, 64), num_heads=(1, 2)))
    expected = copy.deepcopy(model)
    attend_convs(model, '*cpe*', (3, 32, 32))
    assert attention_summary(model)
    assert logits_error(model, expected, torch.randn(1, 3, 32, 32)) <= 5e-6


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.reflect = nn.Conv2d(3, 3, 3, padding=1, padding_mode='reflect')
        self.standardized = StdConv2d(3, 3, 3, padding=1)
        self.unused = nn.Conv2d(3, 3, 3)
        self.shared = nn.Conv2d(3, 3, 3, padding=1)
        self.pixelwise = nn.Conv2d(3, 3, 1)
        self.plain = nn.Conv2d(3, 3, 3, padding=1)
        self.twin = self.plain
        self.hooked = nn.Conv2d(3, 3, 3, padding=1)
        self.hooked.register_forward_hook(lambda module, args, output: 2 * output)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3, padding=1))
        self.tied, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.tied.weight = self.other.weight
        self.single = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        x = self.pixelwise(self.standardized(self.reflect(input=x)))
        x = self.hooked(self.normed(self.tied(self.other(x))))
        x = torch.stack([self.single(image) for image in x])
        return self.twin(self.plain(self.shared(x))) + self.shared(x[..., ::2, ::2]).mean()


def test_what_no_attention_can_express_is_kept_and_told(caplog):
    model, x = Odd(), torch.randn(1, 3, 8, 8)
    expected = model(x)
    with caplog.at_level(logging.WARNING, 'timm_cmhsa'):
        attend_convs(model, input_size=(3, 8, 8))
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert isinstance(model.plain, AttendedConv2d)
    assert model.twin is model.plain, 'one convolution under two names is one attention under both'
    warnings = {record.args[0]: record.args[1] for record in caplog.records}
    assert "padding_mode='reflect'" in warnings['reflect']
    assert 'got StdConv2d' in warnings['standardized']
    assert warnings['unused'] == 'It is not called.'
    assert warnings['shared'] == 'It is called with maps of 2 sizes.'
    assert warnings['single'] == 'It is called without a batch.'
    assert warnings['tied'] == warnings['other'] == 'It shares its weight or bias with another module.'
    for name in ('hooked', 'normed'):
        assert warnings[name] == 'It has hooks or a parametrization, which attention would drop.'
    assert set(warnings) == {
        'reflect', 'standardized', 'unused', 'shared', 'single', 'tied', 'other', 'hooked', 'normed'}


@pytest.mark.parametrize(('model', 'kwargs', 'message'), [
    ('resnet18', dict(names='layer9.*'), r"ResNet has no convolution larger than one pixel named 'layer9\.\*'"),
    ('resnet18', dict(names='*downsample*'), 'no convolution larger than one pixel'),
    ('resnet18', dict(names=[]), "no convolution larger than one pixel named '': names are like 'conv1'"),
    ('resnet18', dict(names=['layer3.*', 'leyer4.*']), r"named 'leyer4\.\*': names are like 'conv1'"),
    ('resnet18', dict(input_size=64), r'ResNet needs input_size=\(C, H, W\), or \(C, L\) for sequences, not 64'),
    ('resnet18', dict(input_size=(3, 32, 32), rel_pos='learned'), "rel_pos='learned' cannot express a conv"),
    ('resnet18', dict(input_size=(3, 32, 32), peak=1.5), r'^peak=1\.5 must be a number between 0 and 1'),
    ('resnet18', dict(input_size=(3, 32, 32), patch_size=0), 'patch_size=0 must be positive'),
    (None, {}, r'Sequential needs input_size=\(C, H, W\), or \(C, L\) for sequences, not None'),
])
def test_bad_input_gets_one_line_and_changes_nothing(model, kwargs, message):
    model = nn.Sequential(nn.Conv2d(3, 3, 3)) if model is None else resnet()
    before = list(model.named_modules())
    with pytest.raises(ValueError, match=message) as error:
        attend_convs(model, **kwargs)
    assert len(str(error.value).splitlines()) == 1
    assert list(model.named_modules()) == before
    assert not any(module._forward_hooks for module in model.modules())
    assert all(module.training for module in model.modules())


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match='Expected a model with convolutions to replace, got str'):
        attend_convs('resnet18')


def test_a_model_that_does_not_run_with_this_input_is_left_as_it_was():
    model = resnet()
    with pytest.raises(ValueError, match=r'ResNet does not run with input_size=\(1, 32, 32\): .*expected input'):
        attend_convs(model, input_size=(1, 32, 32))
    assert not attention_summary(model)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(module.training for module in model.modules())


class CalledOtherwise(nn.Conv2d):
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_what_attention_would_drop_stays_a_convolution(caplog):
    convs = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)] + [CalledOtherwise(3, 3, 3, padding=1)]
    convs[1]._conv_forward = lambda input, weight, bias: 3 * nn.Conv2d._conv_forward(convs[1], input, weight, bias)
    convs[2].bias = convs[3].bias
    convs[0].bias.requires_grad_(False)
    model = nn.Sequential(*convs).eval()
    expected, x = copy.deepcopy(model), torch.randn(1, 3, 6, 6)
    attend_convs(model, input_size=(3, 6, 6))
    assert [layer.name for layer in attention_summary(model)] == ['0']
    for name, reason in (('1', 'computes something else'), ('2', 'shares its weight or bias'), ('3', 'shares its')):
        assert f'{name} stays a convolution: It {reason}' in caplog.text
    assert not model[0].attn.proj.bias.requires_grad
    assert model[0].attn.qkv.weight.requires_grad
    torch.testing.assert_close(model(x), expected(x), atol=1e-5, rtol=1e-5)


def conv3(**kwargs):
    return nn.Conv2d(3, 3, 3, padding=1, **kwargs)


@pytest.mark.parametrize(('dtype', 'device', 'value'), [
    (torch.complex64, 'cpu', 1), (torch.float32, 'meta', 1), (torch.float32, 'cpu', float('nan')),
    (torch.float64, 'cpu', float('inf'))])
def test_weights_that_are_no_real_numbers_are_refused(dtype, device, value):
    conv = conv3(dtype=dtype, device=device)
    conv.weight.data[0, 0, 0, 0] = value
    with pytest.raises(ValueError, match='Its weight is on the meta device, complex, NaN or Inf'):
        attend_convs(nn.Sequential(conv), input_size=(3, 8, 8))


def test_what_holds_parameters_is_refused(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(conv3()))
        with pytest.raises(ValueError, match='DistributedDataParallel would not see the new parameters'):
            attend_convs(model, input_size=(3, 8, 8))
        assert isinstance(model.module[0], nn.Conv2d)
    finally:
        torch.distributed.destroy_process_group()


def test_a_shared_convolution_stays_shared():
    conv = conv3()
    model = attend_convs(nn.Sequential(nn.Sequential(conv), nn.Sequential(conv)), '0.*', (3, 8, 8))
    assert isinstance(model[0][0], AttendedConv2d)
    assert model[1][0] is model[0][0]


class Merging(nn.Module):
    """Adds what was learned to its weight in eval mode, as adapters do, and returns something other than a tensor."""

    def __init__(self):
        super().__init__()
        self.weight, self.learned, self.conv = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3)), conv3()
        self.norm, self.drop = nn.BatchNorm2d(3), nn.Dropout(0.5)

    def train(self, mode=True):
        self.weight.data += (-1 if mode else 1) * self.learned.data
        return super().train(mode)

    def forward(self, x):
        return {'features': self.drop(self.norm(self.conv(input=x))), 'weight': (self.weight, None)}


def test_the_probe_leaves_no_trace():
    model = Merging()
    model.register_forward_hook(lambda module, args, output: output['features'])
    model.norm.register_forward_pre_hook(lambda module, args: None)
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    random_state = torch.get_rng_state()
    with pytest.raises(ValueError, match='cannot express a convolution'):
        attend_convs(model, input_size=(3, 8, 8), rel_pos='learned')
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks
    attend_convs(model, input_size=(3, 8, 8))
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in state.items() if 'conv' not in name)


@pytest.mark.parametrize('backend', ['cold', 'warm'])
def test_compiled_models_run_the_attention(backend):
    model, x = nn.Sequential(conv3(), nn.ReLU(), conv3()).eval(), torch.randn(1, 3, 8, 8)
    expected, compiled = model(x), torch.compile(model, backend='eager')
    if backend == 'warm':
        with torch.no_grad():
            compiled(x)
    attend_convs(compiled, input_size=(3, 8, 8))
    assert len(attention_summary(model)) == 2
    torch.testing.assert_close(compiled(x), expected, atol=1e-5, rtol=1e-5)
    model[2].attn.proj.bias.data += 1
    torch.testing.assert_close(compiled(x), expected + 1, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('change', [
    lambda conv: conv.to(memory_format=torch.channels_last),
    lambda conv: conv.register_parameter('weight', nn.Parameter(torch.randn(3, 3, 3, 3).transpose(0, 1))),
])
def test_layouts_of_weights_do_not_matter(change):
    conv = conv3()
    change(conv)
    x = torch.randn(2, 3, 6, 6)
    model = attend_convs(nn.Sequential(conv), input_size=(3, 6, 6))
    torch.testing.assert_close(model(x), conv(x), atol=1e-5, rtol=1e-5)


def test_weights_frozen_into_buffers_stay_so():
    conv = conv3()
    for name in ('weight', 'bias'):
        value = getattr(conv, name).detach()
        delattr(conv, name)
        conv.register_buffer(name, value)
    x = torch.randn(2, 3, 6, 6)
    model = attend_convs(nn.Sequential(conv), input_size=(3, 6, 6))
    torch.testing.assert_close(model(x), conv(x), atol=1e-5, rtol=1e-5)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_normalized_weights_stay_convolutions(caplog):
    """Of old style too, by hooks; and in training, power iterations do not go on."""
    model = nn.Sequential(
        nn.utils.spectral_norm(conv3()), nn.utils.parametrizations.spectral_norm(conv3()), conv3()).train()
    state = copy.deepcopy(model[:2].state_dict())
    attend_convs(model, input_size=(3, 8, 8))
    assert [layer.name for layer in attention_summary(model)] == ['2']
    assert caplog.text.count('It has hooks or a parametrization') == 2
    assert all(torch.equal(tensor, state[name]) for name, tensor in model[:2].state_dict().items())


def test_another_size_than_it_was_made_for_is_told():
    model = attend_convs(resnet(num_classes=3), 'layer4.*', (3, 64, 64)).eval()
    with pytest.raises(ValueError, match='made for maps of 4 x 4, this one has 5 x 5: call attend_convs'):
        model(torch.randn(1, 3, 80, 80))


def test_frozen_and_half_precision_convolutions_stay_so():
    model = resnet(num_classes=3).eval()
    model.layer4.requires_grad_(False)
    expected = copy.deepcopy(model)
    attend_convs(model, 'layer4.*', (3, 64, 64))
    assert not any(parameter.requires_grad for parameter in model.layer4.parameters())
    half = attend_convs(expected.bfloat16(), 'layer4.1.*', (3, 64, 64))
    assert half.layer4[1].conv1.attn.qkv.weight.dtype == torch.bfloat16
    x = torch.randn(2, 3, 64, 64)
    scale = model(x).abs().max()
    assert (half(x.bfloat16()) - model(x)).abs().max() <= 0.05 * scale


def test_large_maps_attend_in_chunks(monkeypatch):
    model = natural(resnet(num_classes=3))
    expected, x = copy.deepcopy(model), torch.randn(1, 3, 32, 32)
    monkeypatch.setattr(efficient, 'MAX_BIAS_ENTRIES', 2 ** 14)
    attend_convs(model, 'conv1', (3, 32, 32))
    assert model.conv1.attn.can_chunk()
    assert logits_error(model, expected, x) <= 5e-6


def test_attended_model_is_traced_and_fused_like_others():
    model = natural(resnet(num_classes=3))
    x = torch.randn(2, 3, 32, 32)
    attend_convs(model, 'layer4.*', (3, 32, 32))
    expected = model(x)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.jit.script(model)(x), expected, atol=1e-5, rtol=1e-5)
    fused = timm.utils.reparameterize_model(model)
    assert len(attention_summary(fused)) < len(attention_summary(model))
    assert sum(p.numel() for p in fused.parameters()) < sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(fused(x), expected, atol=1e-4, rtol=1e-4)


def test_widths_of_heads_are_chosen_by_their_cost():
    """Few heads as wide as a patch where softmaxes cost most, many as wide as a pixel elsewhere."""
    stem, late = nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.Conv2d(256, 512, 3, stride=2, padding=1)
    assert cnn._cheapest_head_dim(stem, (2, 2), (112, 112), cnn.HeadOptions()) == 12
    assert cnn._cheapest_head_dim(late, (2, 2), (7, 7), cnn.HeadOptions()) == 256
