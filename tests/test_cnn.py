import copy
import logging
import math
import re
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from helpers import max_error, train
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from timm.layers import Conv2dSame, StdConv2d
from torch import nn

from timm_cmhsa import attend_convs, attention_maps
from timm_cmhsa.cnn import AttendedConv2d, attention_summary
from timm_cmhsa.grouped import GroupedAttention


def resnet(**kwargs):
    """A resnet18 of few channels."""
    return timm.create_model('resnet18', channels=(8, 16, 16, 32), **kwargs)


def conv3(**kwargs):
    return nn.Conv2d(3, 3, 3, padding=1, **kwargs)


def natural(model):
    """Give a model statistics and scales as after training, where each layer matters."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2.)
            nn.init.normal_(module.running_mean, std=0.3)
        if hasattr(module, 'gamma'):
            nn.init.uniform_(module.gamma, 0.5, 1.)
    return model.eval()


def attended(model):
    """Return the names of the convolutions that are attention now."""
    return [name for name, module in model.named_modules() if isinstance(module, AttendedConv2d)]


slow = pytest.mark.slow


@pytest.mark.parametrize(('name', 'names', 'size', 'num_replaced'), [
    ('resnet18', '*', (3, 25, 35), 17),  # maps that strides do not divide
    ('convnext_atto', '*', (3, 32, 32), 16),
    ('tf_mobilenetv3_small_minimal_100', 'blocks.1.*', (3, 32, 32), 2),  # TensorFlow's padding
    pytest.param('tf_mobilenetv3_small_minimal_100', '*', (3, 64, 64), 12, marks=slow),
    pytest.param('resnet50', 'layer4.*', (3, 224, 224), 3, marks=slow),
    pytest.param('davit_tiny', '*cpe*', (3, 32, 32), 24, marks=slow),  # reads the size of kernels
    pytest.param('inception_v3', '*_7a.*', (3, 128, 128), 4, marks=slow),  # no padding
    pytest.param('densenet121', ['features.conv0', 'features.denseblock4.*'], (3, 64, 64), 17, marks=slow),
])
def test_logits_are_equal_to_rounding(name, names, size, num_replaced):
    model = natural(timm.create_model(name, num_classes=10))
    expected, x = copy.deepcopy(model), torch.randn(2, *size)
    assert attend_convs(model, names, size) is model
    assert len(attended(model)) == num_replaced
    for use_test_size in (False, True):
        assert timm.data.resolve_model_data_config(model, use_test_size=use_test_size)['input_size'] == size
    with torch.no_grad():
        assert max_error(expected(x), model(x)) <= 5e-6


@st.composite
def convolutions(draw, kind, groups):
    """A convolution, the size of a map for it, and how it is replaced."""
    size, kernel, stride, dilation, padding = (
        draw(st.tuples(*[st.integers(low, high)] * 2)) for low, high in ((3, 9), (1, 5), (1, 3), (1, 2), (0, 3)))
    patch_size, kwargs = draw(st.integers(1, 4)), dict(padding=padding)
    if kind == 'circular':  # keeps the size, in whole patches
        size, kernel, stride = tuple(patch_size * s for s in size), tuple(k // 2 * 2 + 1 for k in kernel), 1
        padding = tuple(d * (k // 2) for d, k in zip(dilation, kernel))
        assume(all(p <= s for s, p in zip(size, padding)))
        kwargs = dict(padding=padding, padding_mode='circular')
    assume(max(kernel) > 1)
    assume(all(s + 2 * p >= d * (k - 1) + 1 for s, p, d, k in zip(size, padding, dilation, kernel)))
    conv_class = Conv2dSame if kind == 'same' else nn.Conv2d
    torch.manual_seed(draw(st.integers(0, 2 ** 16)))
    conv = conv_class(
        groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3)), kernel, stride=stride, dilation=dilation,
        groups=groups, bias=draw(st.booleans()), **({} if kind == 'same' else kwargs))
    return conv, size, patch_size, draw(st.sampled_from([None, 0.6, 0.9]))


@pytest.mark.parametrize('groups', [1, 3])
@pytest.mark.parametrize('kind', ['zeros', 'circular', 'same'])
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_every_convolution_is_replaced_exactly(kind, groups, data):
    """As attention, and if heads look at one offset also as shifts."""
    conv, size, patch_size, peak = data.draw(convolutions(kind, groups))
    x = torch.randn(2, conv.in_channels, *size)
    expected = conv(x)
    model = attend_convs(nn.Sequential(conv), '*', x.shape[1:], patch_size, peak)
    layer, attn = model[0], model[0].attn
    if groups > 1:  # they stay apart
        assert isinstance(attn, GroupedAttention)
        pixels = math.prod(layer.patch_size) * math.prod(layer.out_patch_size)
        assert attn.proj.weight.numel() == attn.num_heads * pixels * conv.weight.flatten(2)[..., 0].numel()
    outputs = [model(x)]
    if peak is None and kind != 'circular':
        outputs.append(timm.utils.reparameterize_model(model)(x))
    for actual in outputs:
        assert actual.shape == expected.shape
        assert (actual - expected).abs().max() <= 2e-6 * expected.abs().max().clamp(min=1e-3)


def depthwise(peak=None):
    """A depthwise convolution between others, as attention."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.Conv2d(6, 12, 3, padding=1, groups=6), nn.Flatten(), nn.Linear(12 * 49, 5))
    return attend_convs(model.eval(), '1', (3, 7, 7), peak=peak)


@pytest.mark.parametrize('peak', [None, 0.75])
def test_depthwise_attention_learns(peak):
    """Hard heads by their output projections alone; keys of soft heads from the second step on, as queries are zero."""
    model, x, targets = depthwise(peak), torch.randn(8, 3, 7, 7), torch.arange(8) % 5
    attn = model[1].attn
    for step in range(2):
        train(model, x, targets, 1, torch.optim.SGD, lr=0.5)
        query, key = (grad.abs().max() for grad in attn.qkv.weight.grad.chunk(2))
        assert min(parameter.grad.abs().max() for parameter in attn.proj.parameters()) > 2e-4
        assert step > 0 or key == 0
        if peak is not None:
            assert min(query, *(parameter.grad.abs().max() for parameter in attn.rel_pos.parameters())) > 2e-6
            assert step == 0 or key > 2e-9


@pytest.mark.skipif(torch.__version__ < '2.7', reason='torch.export of 2.6 takes the batch for a constant')
@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')
@pytest.mark.parametrize('form', ['soft', 'shifts'])
def test_depthwise_attention_goes_wherever_models_go(form, tmp_path):
    model = depthwise(0.75 if form == 'soft' else None)
    x = torch.randn(2, 3, 7, 7)
    expected = model(x)
    maps = attention_maps(model, x)['1.attn']
    assert maps.weights.shape == (2, model[1].attn.num_heads, 49, 49)
    torch.testing.assert_close(maps.weights.sum(dim=-1) + maps.zero_key, torch.ones_like(maps.zero_key))
    if form == 'shifts':
        model = timm.utils.reparameterize_model(model)
        assert model[1].attn.shifts is not None
    torch.compiler.reset()
    torch.save(model, tmp_path / 'model.pt')
    others = [
        torch.jit.script(model), torch.jit.trace(model, x), torch.fx.symbolic_trace(model),
        torch.compile(model, fullgraph=True, backend='aot_eager'),
        torch.load(tmp_path / 'model.pt', weights_only=False),
        torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim('batch', min=1)},)).module()]
    for other in others:
        torch.testing.assert_close(other(x), expected, atol=1e-5, rtol=1e-5)
    assert model[:2](x).is_contiguous()
    last = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model.to(memory_format=torch.channels_last)(last), expected, atol=1e-5, rtol=1e-5)
    assert model[:2](last).is_contiguous(memory_format=torch.channels_last)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast('cpu', dtype=dtype):
            assert max_error(expected, model(x)) <= 8 * torch.finfo(dtype).eps
    assert max_error(expected, model.double()(x.double())) <= 1e-5
    assert max_error(expected, model.bfloat16()(x.bfloat16())) <= 0.05


def test_circular_padding_needs_whole_patches():
    with pytest.raises(ValueError, match='Circular padding has to keep the size of the map, in whole patches'):
        attend_convs(nn.Sequential(conv3(padding_mode='circular')), '*', (3, 6, 8), patch_size=4)


def test_gradients_reach_the_rest_of_the_model_as_before():
    model = natural(resnet(num_classes=4)).double()
    attended, x = copy.deepcopy(model), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    attend_convs(attended, 'layer2.*', (3, 32, 32))
    gradients = []
    for each in (model, attended):
        each(x).square().sum().backward()
        gradients.append({name: p.grad for name, p in each.named_parameters() if 'layer2' not in name})
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-7)
    assert all(parameter.grad is not None for parameter in attended.parameters())


def test_a_shared_convolution_stays_shared():
    conv = conv3()
    model = attend_convs(nn.Sequential(nn.Sequential(conv), nn.Sequential(conv)), '0.*', (3, 8, 8))
    assert isinstance(model[0][0], AttendedConv2d)
    assert model[1][0] is model[0][0]


def test_summary_lists_layers_and_their_parameters(caplog):
    model = resnet().eval()
    with caplog.at_level(logging.INFO, 'timm_cmhsa'):
        attend_convs(model, ['conv1', 'layer4.1.conv2'], (3, 32, 32))
    _, stem, last = attention_summary(model).splitlines()
    assert re.match('conv1 .*7 x 7, stride 2 .*16 x 16', stem)
    # 9 * 32^2 parameters of a convolution on a map of one pixel
    assert re.match(r'layer4\.1\.conv2 .*1 of 32 .*0\.00922 -> ', last)
    assert attention_summary(model) in caplog.text


def test_widths_of_heads_are_chosen_by_their_cost():
    """Few heads as wide as a patch where softmaxes cost most, more heads as wide as a pixel elsewhere."""
    stem, late = nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.Conv2d(64, 128, 3, stride=2, padding=1)
    assert attend_convs(nn.Sequential(stem), input_size=(3, 64, 64))[0].attn.head_dim == 12
    assert attend_convs(nn.Sequential(late), input_size=(64, 8, 8))[0].attn.head_dim == 64


def test_a_map_that_takes_too_much_memory_stays_a_convolution(caplog):
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.MaxPool2d(32), nn.Conv2d(1, 1, 3, padding=1))
    attend_convs(model, input_size=(1, 256, 256))
    assert attended(model) == ['2']
    assert '0 stays a convolution: Its 9 heads on a map of 256 x 256 tokens would need more than 8 GiB' in caplog.text


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.reflect, self.standardized = conv3(padding_mode='reflect'), StdConv2d(3, 3, 3, padding=1)
        self.unused, self.shared, self.single, self.pixelwise = conv3(), conv3(), conv3(), nn.Conv2d(3, 3, 1)
        self.plain = self.twin = conv3()
        self.listed, self.both = conv3(), conv3()
        self.list = [self.listed, self.both]
        self.hooked, self.patched = conv3(), conv3()
        self.hooked.register_forward_hook(lambda module, args, output: 2 * output)
        self.patched._conv_forward = lambda input, weight, bias: 3 * F.conv2d(input, weight, bias, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(conv3())
        self.old_normed = nn.utils.spectral_norm(conv3())
        self.tied, self.other = conv3(), conv3()
        self.tied.weight = self.other.weight

    def forward(self, x):
        x = self.pixelwise(self.standardized(self.reflect(input=x)))
        x = self.patched(self.hooked(self.old_normed(self.normed(self.tied(self.other(x))))))
        x = self.both(self.list[1](self.list[0](x)))
        x = torch.stack([self.single(image) for image in x])
        return self.twin(self.plain(self.shared(x))) + self.shared(x[..., ::2, ::2]).mean()


def test_what_cannot_be_replaced_stays_with_a_warning(caplog):
    model, x = Odd(), torch.randn(1, 3, 8, 8)
    expected = copy.deepcopy(model).eval()(x)
    state = copy.deepcopy(model.old_normed.state_dict())
    with caplog.at_level(logging.WARNING, 'timm_cmhsa'):
        attend_convs(model, input_size=(3, 8, 8))
    assert attended(model) == ['plain']
    assert model.twin is model.plain, 'one convolution under two names is one attention under both'
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.old_normed.state_dict().items())
    torch.testing.assert_close(model.eval()(x), expected, atol=1e-5, rtol=1e-5)
    reasons = {record.args[0]: record.args[1] for record in caplog.records}
    for names, reason in (
            ('reflect', "padding_mode='reflect'"), ('standardized', 'got StdConv2d'), ('unused', 'It is not called'),
            ('shared', 'maps of 2 sizes'), ('single', 'without a batch'), ('listed both', 'such as from a list'),
            ('hooked patched normed old_normed tied other', 'It has hooks')):
        for name in names.split():
            assert reason in reasons.pop(name)
    assert not reasons


class ReadsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = self.same = conv3()

    def forward(self, x):
        return self.conv(x) * self.conv.weight.norm()


class AsksForType(ReadsWeight):
    def forward(self, x):
        return self.conv(x) if isinstance(self.conv, nn.Conv2d) else 2 * self.conv(x)


@pytest.mark.parametrize(('model_class', 'message'), [
    (ReadsWeight, "ReadsWeight does not run .* no attribute 'weight'"),
    (AsksForType, 'The output of AsksForType changed'),
])
def test_a_model_that_needs_its_convolutions_gets_them_back(model_class, message):
    model = model_class()
    conv = model.conv
    with pytest.raises(ValueError, match=message):
        attend_convs(model, input_size=(3, 6, 6))
    assert model.conv is model.same is conv
    assert not conv._forward_hooks


@pytest.mark.parametrize(('value', 'kwargs', 'message'), [
    (float('nan'), {}, 'changed with attention'),
    (1., dict(dtype=torch.complex64), 'None of 1 convolutions can be replaced'),
    (1., dict(device='meta'), 'None of 1 convolutions can be replaced'),
])
def test_weights_that_are_not_finite_numbers_are_refused(value, kwargs, message):
    conv = conv3(**kwargs)
    conv.weight.data[0, 0, 0, 0] = value
    model = nn.Sequential(conv)
    with pytest.raises(ValueError, match=message):
        attend_convs(model, input_size=(3, 8, 8))
    assert model[0] is conv


@pytest.mark.parametrize(('kwargs', 'message'), [
    (dict(names='layer9.*'), r"ResNet has no convolution larger than one pixel named 'layer9\.\*'"),
    (dict(names='*downsample*'), 'no convolution larger than one pixel'),
    (dict(names=[]), "no convolution larger than one pixel named '': names are like 'conv1'"),
    (dict(names=['layer3.*', 'leyer4.*']), r"named 'leyer4\.\*': names are like 'conv1'"),
    (dict(input_size=64), r'ResNet needs input_size=\(C, H, W\), not 64'),
    (dict(input_size=(1, 32, 32)), r'ResNet does not run with input_size=\(1, 32, 32\): .*expected input'),
    (dict(input_size=(3, 32, 32), peak=1.5), r'^peak=1\.5 must be a number between 0 and 1'),
    (dict(input_size=(3, 32, 32), patch_size=0), 'patch_size=0 must be positive'),
])
def test_bad_input_gets_one_line_and_changes_nothing(kwargs, message):
    model = resnet()
    before = list(model.named_modules())
    with pytest.raises(ValueError, match=message) as error:
        attend_convs(model, **kwargs)
    assert len(str(error.value).splitlines()) == 1
    assert list(model.named_modules()) == before
    assert not any(module._forward_hooks for module in model.modules())
    assert all(module.training for module in model.modules())


def test_distributed_models_are_refused(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(conv3()))
        with pytest.raises(ValueError, match='DistributedDataParallel would not see the new parameters'):
            attend_convs(model, input_size=(3, 8, 8))
        assert isinstance(model.module[0], nn.Conv2d)
    finally:
        torch.distributed.destroy_process_group()


class Merging(nn.Module):
    """Adds what was learned to its weight in eval mode, as adapters do, and has dropout that never stops."""

    def __init__(self):
        super().__init__()
        self.weight, self.learned, self.conv = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3)), conv3()
        self.norm = nn.BatchNorm2d(3)

    def train(self, mode=True):
        self.weight.data += (-1 if mode else 1) * self.learned.data
        return super().train(mode)

    def forward(self, x):
        return {'features': F.dropout(self.norm(self.conv(input=x))), 'weight': (self.weight, None, 'text')}


def test_runs_leave_no_trace():
    model = Merging()
    model.register_forward_hook(lambda module, args, output: output['features'])
    state = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    attend_convs(model, input_size=(3, 8, 8))
    assert attended(model) == ['conv']
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert [len(module._forward_hooks) for module in (model, model.norm)] == [1, 0]
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in state.items() if 'conv' not in name)


def compiled_in_place(model):
    model.compile(backend='eager')
    return model


@pytest.mark.parametrize('is_warm', [False, True])
@pytest.mark.parametrize('wrap', [
    partial(torch.compile, backend='eager'), compiled_in_place, nn.DataParallel, timm.utils.ModelEmaV3])
def test_wrapped_models_run_the_attention(wrap, is_warm):
    """Names are those of the model inside, and compiled code does not keep the convolutions."""
    model, x = nn.Sequential(conv3(), nn.ReLU(), conv3()).eval(), torch.randn(1, 3, 8, 8)
    expected, wrapped = model(x), wrap(model)
    if is_warm:
        with torch.no_grad():
            wrapped(x)
    assert attend_convs(wrapped, '[02]', (3, 8, 8)) is wrapped
    assert len(attended(wrapped)) == 2
    assert len(attention_summary(wrapped).splitlines()) == 3
    torch.testing.assert_close(wrapped(x), expected, atol=1e-5, rtol=1e-5)
    last = [module for module in wrapped.modules() if isinstance(module, AttendedConv2d)][-1]
    last.attn.proj.bias.data += 1
    torch.testing.assert_close(wrapped(x), expected + 1, atol=1e-5, rtol=1e-5)


def test_another_size_gets_a_clear_error():
    model = attend_convs(resnet(num_classes=3), 'layer4.*', (3, 64, 64)).eval()
    with pytest.raises(ValueError, match=r'expects a map of 4 x 4, this one has 5 x 5: .*input_size'):
        model(torch.randn(1, 3, 80, 80))


def test_modes_frozen_and_half_precision_convolutions_stay_so():
    model = resnet(num_classes=3)
    model.layer4.requires_grad_(False).eval()
    model.layer3[0].conv1.bias = nn.Parameter(torch.zeros(16), requires_grad=False)
    expected = copy.deepcopy(model).eval()
    attend_convs(model, 'layer[34].*', (3, 64, 64))
    assert all(module.training for module in model.layer3.modules())
    assert not any(module.training for module in model.layer4.modules())
    assert not any(parameter.requires_grad for parameter in model.layer4.parameters())
    assert not model.layer3[0].conv1.attn.proj.bias.requires_grad
    assert model.layer3[0].conv1.attn.qkv.weight.requires_grad
    half = attend_convs(expected.bfloat16(), 'layer4.1.*', (3, 64, 64))
    assert half.layer4[1].conv1.attn.qkv.weight.dtype == torch.bfloat16
    x = torch.randn(2, 3, 64, 64)
    assert max_error(model.eval()(x), half(x.bfloat16())) <= 0.05
