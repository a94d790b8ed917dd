"""Heads that give their own offset a part of their weight: as exact as one-hot ones, and able to learn."""
import copy
import math
from functools import partial

import pytest
import safetensors.torch
import timm
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from timm.models import save_for_hf
from torch import nn

from timm_cmhsa import (
    attend_convs,
    attention_maps,
    conv2d_to_attention,
    convert_checkpoint,
    convert_model,
    head_statistics,
    patchify,
)
from timm_cmhsa.cli import convert_main
from timm_cmhsa.cmhsa import checkpoint_filter_fn
from timm_cmhsa.construction import peak_sharpness, plan_heads
from timm_cmhsa.plots import load_model

PEAKS = (0.3, 0.75, 0.97, 1 - 1e-6)


def relative_error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def rewrite_error(conv, patch_size, grid_size, **kwargs):
    images = torch.randn(2, conv.in_channels, *(p * g for p, g in zip(patch_size, grid_size)), dtype=conv.weight.dtype)
    attn = conv2d_to_attention(conv, patch_size, grid_size, **kwargs)
    expected = patchify(conv(images), tuple(p // s for p, s in zip(patch_size, conv.stride)))
    return relative_error(attn(patchify(images, patch_size)), expected)


@st.composite
def cases(draw):
    """A convolution, patch and grid, the width of heads, and a sharpness."""
    torch.manual_seed(draw(st.integers(0, 2 ** 16)))
    stride, dilation = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    kernel = draw(st.sampled_from([3, 5, 7]))
    patch = draw(st.sampled_from([(1, 1), (2, 3), (4, 4)] if stride == 1 else [(2, 2), (4, 2)]))
    grid = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    groups = draw(st.sampled_from([1, 2]))
    mode = draw(st.sampled_from(['zeros', 'circular']))
    padding = dilation * (kernel // 2)
    if mode == 'circular':
        padding = min(padding, min(p * g for p, g in zip(patch, grid)))
        kernel, dilation = (kernel, dilation) if padding == dilation * (kernel // 2) else (3, 1)
        padding = dilation * (kernel // 2)
    conv = nn.Conv2d(
        2, 4, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=mode,
        bias=draw(st.booleans()))
    head_dim = draw(st.sampled_from([None, 2, 3]))
    return conv, patch, grid, head_dim, draw(st.floats(0.1, 36))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(cases())
def test_rewrite_is_exact_at_any_sharpness(case):
    """The less a head looks at its own offset, the more of its output is taken away again, and the more that rounds."""
    conv, patch, grid, head_dim, sharpness = case
    num_keys = conv2d_to_attention(conv, patch, grid, head_dim=head_dim, rel_pos='padded_table').rel_pos.num_keys(grid)
    assume(num_keys > 1)
    peak = math.exp(sharpness) / (math.exp(sharpness) + num_keys - 1)
    leak = 1 + num_keys / math.expm1(sharpness)
    assert rewrite_error(conv, patch, grid, head_dim=head_dim, peak=peak) <= max(2e-6, 1e-6 * leak)
    assert rewrite_error(conv.double(), patch, grid, head_dim=head_dim, peak=peak) <= 1e-12


@pytest.mark.parametrize('head_dim', [None, 8])
@pytest.mark.parametrize('peak', PEAKS)
def test_peak_is_what_the_maps_show(peak, head_dim):
    attn = conv2d_to_attention(nn.Conv2d(2, 2, 3, padding=1), 4, (3, 4), head_dim=head_dim, peak=peak)
    heads = plan_heads(nn.Conv2d(2, 2, 3, padding=1), 4, (3, 4), head_dim, peak=peak)
    maps = attention_maps(attn, torch.randn(2, 12, 32))['']
    for head, statistics in zip(heads, head_statistics(maps)):
        if head.offset is None:  # all 5 x 6 patches alike, those of the padding in the zero key
            weights = maps.weights[:, len(heads) - 1]
            torch.testing.assert_close(weights, torch.full_like(weights, 1 / 30))
        else:
            assert statistics.best_offset == head.offset
            assert statistics.best_weight == pytest.approx(peak if head.is_soft else 1, abs=1e-5)


@pytest.mark.parametrize('peak', [0.5, 0.97])
def test_gradients_reach_all_that_decides_where_heads_look(peak):
    conv, tokens, target = nn.Conv2d(2, 2, 3, padding=1), torch.randn(4, 16, 32), torch.randn(4, 16, 32)

    def gradients(attn):
        attn.train().zero_grad()
        (attn(tokens) - target).square().mean().backward()
        query, key, value = attn.qkv.weight.grad.chunk(3)
        return {'bias': attn.rel_pos.relative_position_bias_table.grad, 'zero key': attn.rel_pos.zero_key_bias.grad,
                'query': query, 'key': key, 'value': value}

    soft, one_hot = conv2d_to_attention(conv, 4, 4, peak=peak), conv2d_to_attention(conv, 4, 4)
    before, hard = ({name: grad.abs().max().item() for name, grad in gradients(attn).items()}
                    for attn in (soft, one_hot))
    assert hard['bias'] <= 1e-8 * hard['value']
    assert hard['zero key'] <= 1e-6 * hard['value']
    assert hard['query'] <= 1e-6 * hard['value']
    assert before['bias'] / 30 >= 0.1 * before['value']  # of a bias itself: the table is scaled
    assert before['zero key'] >= 0.1 * before['value']
    assert before['query'] >= 0.005 * before['value']
    torch.optim.AdamW(soft.parameters(), lr=0.01).step()  # keys count as soon as queries are not zero
    assert gradients(soft)['key'].abs().max() >= 1e-6


@pytest.mark.parametrize('peak', [None, 0.75])
def test_one_hot_heads_stay_where_they_are(peak):
    """In a model that Adam trains, biases, queries and keys move as far as values, or hardly at all."""
    model, images, labels = phase1(), torch.randn(8, 3, 16, 16), torch.arange(8) % 3
    model = convert_model(model.train(), peak=peak)
    start = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    for block, before in zip(model.blocks, start.blocks):
        query, key, value = (block.attn.qkv.weight - before.attn.qkv.weight).abs().view(3, -1).amax(dim=1).tolist()
        biases = [(after - parameter).abs().max().item() for after, parameter in zip(
            block.attn.rel_pos.parameters(), before.attn.rel_pos.parameters())]
        for moved in (query, key, *biases):
            assert moved >= 0.5 * value if peak else moved <= 0.1 * value


@pytest.mark.parametrize(('optimizer', 'factor'), [(partial(torch.optim.Adam, eps=1e-30), 30), (torch.optim.SGD, 900)])
def test_biases_move_faster_than_weights(optimizer, factor):
    """As fast as in an optimizer of the biases themselves with so many times the learning rate."""
    conv, tokens = nn.Conv2d(2, 2, 3, padding=1).double(), torch.randn(4, 16, 32).double()
    rel_pos = (attn := conv2d_to_attention(conv, 4, 4, peak=0.5)).rel_pos
    attn(tokens).square().mean().backward()
    bias = rel_pos.offset_bias().detach().clone().requires_grad_()
    bias.grad = rel_pos.relative_position_bias_table.grad / 30
    optimizer([bias], lr=factor * 1e-3).step()
    optimizer([rel_pos.relative_position_bias_table], lr=1e-3).step()
    torch.testing.assert_close(rel_pos.offset_bias(), bias, atol=1e-6, rtol=0)


@pytest.mark.parametrize(('kernel_size', 'head_dim', 'num_heads', 'center_is_soft'), [
    (3, None, 10, True), (5, None, 10, True),  # one head takes all means away
    (3, 96, 18, False), (5, 96, 20, False),  # 180 and 336 of 768 inputs are near a border
    (1, None, 1, False),
])
def test_how_many_heads_it_takes(kernel_size, head_dim, num_heads, center_is_soft):
    conv = nn.Conv2d(3, 3, kernel_size, padding=kernel_size // 2)
    heads = plan_heads(conv, 16, 14, head_dim, peak=0.75)
    assert len(heads) == num_heads
    assert {head.is_soft for head in heads if head.offset == (0, 0)} == {center_is_soft}
    if num_heads > 1:
        with pytest.raises(ValueError, match=f'it takes {num_heads} heads of {head_dim or 768}.*without a peak'):
            conv2d_to_attention(conv, 16, 14, num_heads - 1, head_dim, peak=0.75, approximate=True)
        with pytest.raises(ValueError, match=r'heads of \d+\.$'):  # no word of approximate=True, which is for others
            conv2d_to_attention(conv, 16, 14, num_heads - 1, head_dim, peak=0.75)


@pytest.mark.parametrize(('kwargs', 'message'), [
    ({'peak': 1.}, 'peak=1.0 must be a number between 0 and 1'),
    ({'peak': 0.04}, 'above 1 / 25'),
    ({'peak': math.nextafter(0.04, 1)}, 'too close to 1 / 25'),  # rounding would be 1e9 times the output
    ({'peak': 0.04 * (1 + 1e-7)}, 'too close to 1 / 25'),
    ({'peak': float('nan')}, 'peak=nan'),
    ({'peak': 0.5, 'rel_pos': 'quadratic'}, "peak=0.5 is for rel_pos='table'"),
])
def test_impossible_peaks_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        conv2d_to_attention(nn.Conv2d(2, 2, 3, padding=1), 4, 3, **kwargs)


@pytest.mark.parametrize('kwargs', [{'peak': 0.5}, {'rel_pos': 'padded_table'}])
def test_a_convolution_that_reads_nothing_but_padding(kwargs):
    conv = nn.Conv2d(2, 2, (1, 2), dilation=(1, 2), padding='same')
    assert rewrite_error(conv, (1, 1), (3, 1), **kwargs) <= 1e-7


def phase1(**kwargs):
    """A model with patches of 4 x 4 pixels and convolutions that matter."""
    model = timm.create_model('cmhsa_conv_k5', img_size=16, patch_size=4, depth=2, num_classes=3, **kwargs).eval()
    for block in model.blocks:
        nn.init.normal_(block.attn.conv.weight, std=0.2)
    return model


@pytest.mark.parametrize('head_dim', [None, 24])
def test_a_whole_model(head_dim):
    model, images = phase1(), torch.randn(4, 3, 16, 16)
    converted = convert_model(model, head_dim=head_dim, peak=0.75)
    assert converted.pretrained_cfg['architecture'] == 'cmhsa_attn_soft'
    assert converted.model_args()['rel_pos'] == 'padded_table'
    assert converted.model_args()['padding'] == (1, 1)
    assert relative_error(converted(images), model(images)) <= 2e-6
    again = timm.create_model('cmhsa_attn_soft', **converted.model_args()).eval()
    again.load_state_dict(converted.state_dict())
    assert torch.equal(again(images), converted(images))


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('head_dim', [None, 24])
def test_soft_heads_of_a_checkpoint_in_half_precision_are_not_rounded(dtype, head_dim, tmp_path):
    torch.save(phase1().state_dict(), tmp_path / 'phase1.pth')
    options = dict(img_size=16, peak=0.5, head_dim=head_dim, dtype=dtype)
    assert convert_checkpoint(tmp_path / 'phase1.pth', tmp_path / 'phase2.safetensors', **options).max_error <= 2e-6
    weights = safetensors.torch.load_file(tmp_path / 'phase2.safetensors')
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if '.attn.' in name else getattr(torch, dtype)), name


def test_a_checkpoint_in_half_precision_is_drawn_as_exact(tmp_path):
    model, images = phase1(), torch.randn(2, 3, 16, 16)
    torch.save(model.state_dict(), tmp_path / 'phase1.pth')
    convert_checkpoint(tmp_path / 'phase1.pth', tmp_path / 'phase2', img_size=16, peak=0.5, dtype='bfloat16')
    assert relative_error(load_model(tmp_path / 'phase2').eval()(images), model(images)) <= 0.02  # of rounding the rest


def test_peaks_that_half_precision_would_round_are_refused():
    conv = nn.Conv2d(2, 2, 3, padding=1).half()
    conv2d_to_attention(conv, 4, 4, peak=0.5)
    with pytest.raises(ValueError, match=r'peak=0\.05 is too close to 1 / 36, .* for torch\.float16'):
        conv2d_to_attention(conv, 4, 4, peak=0.05)


def test_a_checkpoint_knows_how_its_biases_are_scaled(tmp_path):
    """Whatever the default: a model that loads it computes the same, one of another encoding refuses it."""
    model, images = phase1(), torch.randn(2, 3, 16, 16)
    converted = convert_model(model, peak=0.6)
    for attn in (block.attn for block in converted.blocks):
        attn.rel_pos.relative_position_bias_table.data *= 3
        attn.rel_pos.bias_scale /= 3
    torch.save(converted.state_dict(), tmp_path / 'model.pth')
    file = dict(file=str(tmp_path / 'model.pth'), num_classes=3)
    args = dict(converted.model_args(), pretrained=True, pretrained_cfg_overlay=file)
    loaded = timm.create_model('cmhsa_attn_soft', **args).eval()
    assert relative_error(loaded(images), model(images)) <= 2e-6
    model.set_input_size(24)
    images = torch.randn(2, 3, 24, 24)
    loaded = timm.create_model('cmhsa_attn_soft', **{**args, 'img_size': 24}).eval()
    assert relative_error(loaded(images), model(images)) <= 2e-6
    other = {**args, 'rel_pos': 'table', 'padding': None}
    for changes in ({}, dict(num_classes=7), dict(features_only=True)):  # timm loads the last two non-strictly
        with pytest.raises(ValueError, match=r'has bias_scale, .*: create the model with the rel_pos'):
            timm.create_model('cmhsa_attn', **{**other, **changes})


def test_a_table_that_may_have_another_padding_is_refused(tmp_path):
    model, images = phase1(kernel_size=11), torch.randn(2, 3, 16, 16)
    converted = convert_model(model, peak=0.6)
    torch.save(converted.state_dict(), tmp_path / 'model.pth')
    args = dict(
        converted.model_args(), pretrained=True,
        pretrained_cfg_overlay=dict(file=str(tmp_path / 'model.pth'), num_classes=3))
    assert args['padding'] == (2, 2)
    loaded = timm.create_model('cmhsa_attn_soft', **args).eval()
    assert relative_error(loaded(images), model(images)) <= 2e-6
    with pytest.raises(ValueError, match='121 offsets may have padding=2 or be of an image of another size'):
        timm.create_model('cmhsa_attn_soft', **{**args, 'padding': None})


def test_a_scale_of_another_shape_is_refused_without_filling_the_memory():
    weights = {name: torch.ones(()).expand(10 ** 9, 1, 1) if name.endswith('bias_scale') else tensor
               for name, tensor in convert_model(phase1(), peak=0.6).state_dict().items()}
    model = timm.create_model('cmhsa_attn_soft_patch4_32', img_size=24, hidden_chans=3, depth=2, num_classes=3)
    with pytest.raises(RuntimeError, match=r'size mismatch for .*bias_scale'):
        model.load_state_dict(checkpoint_filter_fn(weights, model))


@pytest.mark.skipif(not hasattr(timm.models, 'get_model_args'), reason='this timm notes no arguments')
@pytest.mark.parametrize('kernel_size', [3, 11])
def test_timm_saves_and_loads_a_converted_model(kernel_size, tmp_path):
    model, images = phase1(kernel_size=kernel_size), torch.randn(2, 3, 16, 16)
    save_for_hf(convert_model(model, 'cmhsa_attn', peak=0.75), tmp_path)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert relative_error(loaded(images), model(images)) <= 2e-6


def test_a_peak_that_no_head_has_is_not_reported(tmp_path):
    torch.save(phase1(kernel_size=1).state_dict(), tmp_path / 'phase1.pth')
    report = convert_checkpoint(tmp_path / 'phase1.pth', tmp_path / 'phase2', img_size=16, peak=0.75)
    assert report.peak is None
    assert report.max_error <= 1e-6


@pytest.mark.parametrize('img_size', [(8, 24), (24, 32)])
def test_a_model_computes_its_convolutions_at_any_image_size(img_size, tmp_path):
    model = phase1()
    converted = convert_model(model, peak=0.6)
    torch.save(converted.state_dict(), tmp_path / 'model.pth')
    file = dict(file=str(tmp_path / 'model.pth'), num_classes=3)
    loaded = timm.create_model(
        'cmhsa_attn_soft', pretrained=True, pretrained_cfg_overlay=file,
        **{**converted.model_args(), 'img_size': img_size}).eval()
    converted.set_input_size(img_size)
    model.set_input_size(img_size)
    images = torch.randn(2, 3, *img_size)
    assert relative_error(converted(images), model(images)) <= 2e-6
    assert relative_error(loaded(images), model(images)) <= 2e-6


def test_every_form_of_a_layer_computes_the_same():
    attn, tokens = conv2d_to_attention(nn.Conv2d(2, 2, 3, padding=1), 4, 4, peak=0.5).eval(), torch.randn(2, 16, 32)
    expected = attn(tokens)
    assert attn.absorb
    for form in (attn.fuse(), attn.train()):
        torch.testing.assert_close(form(tokens), expected, atol=1e-5, rtol=1e-5)
    attn.chunk_size = 5
    torch.testing.assert_close(attn(tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings('ignore')  # the exporter warns about itself
def test_onnx_without_a_ring(tmp_path):
    """With circular padding every offset leads to a patch: the zero key has nothing to stand for."""
    onnxruntime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnx')
    conv, tokens = nn.Conv2d(2, 2, 3, padding=1, padding_mode='circular'), torch.randn(2, 16, 32)
    attn, path = conv2d_to_attention(conv, 4, 4, peak=0.5).eval(), tmp_path / 'attn.onnx'
    torch.onnx.export(attn, (tokens,), str(path), input_names=['tokens'], dynamo=False)
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    actual = torch.from_numpy(session.run(None, {'tokens': tokens.numpy()})[0])
    torch.testing.assert_close(actual, attn(tokens), atol=1e-5, rtol=1e-5)


def test_an_architecture_with_a_padded_table_keeps_it():
    converted = convert_model(phase1(), 'cmhsa_attn_soft')
    assert converted.model_args()['rel_pos'] == 'padded_table'
    assert converted.blocks[0].attn.num_heads == 10  # the tenth looks at everything, and adds nothing yet


def test_convolutions_of_a_cnn_become_soft_attention():
    model, images = timm.create_model('resnet18', num_classes=3, zero_init_last=False).eval(), torch.randn(2, 3, 64, 64)
    expected = model(images)
    attend_convs(model, ('layer3.*', 'layer4.*'), input_size=(3, 64, 64), peak=0.8)
    assert relative_error(model(images), expected) <= 1e-5
    model(images).square().sum().backward()
    tables = [param for name, param in model.named_parameters() if name.endswith('relative_position_bias_table')]
    assert tables
    assert all(table.grad.abs().max() > 0 for table in tables)


def test_peak_sharpness():
    bias = torch.zeros(256, dtype=torch.float64)
    bias[7] = peak_sharpness(0.75, 256)
    assert bias.softmax(dim=0)[7].item() == pytest.approx(0.75, abs=1e-12)


def test_a_checkpoint_is_converted_with_a_peak(tmp_path, capsys):
    model, images = phase1(), torch.randn(2, 3, 16, 16)
    torch.save(model.state_dict(), tmp_path / 'phase1.pth')
    arguments = [str(tmp_path / 'phase1.pth'), str(tmp_path / 'phase2'), '--img-size', '16', '--peak', '0.75']
    assert convert_main(arguments) == 0
    output = capsys.readouterr().out
    assert 'cmhsa_attn_soft: ' in output
    assert 'peak 0.75' in output
    assert '10 of 10' in output
    loaded = timm.create_model(f'local-dir:{tmp_path}/phase2', pretrained=True).eval()
    assert relative_error(loaded(images), model(images)) <= 2e-6
    assert convert_main([*arguments[:-1], '1.5', '--force']) == 2
    assert '--peak 1.5 must be a number between 0 and 1' in capsys.readouterr().err
    hint = 'its heads are one-hot: only with a peak'
    assert hint not in output
    assert convert_main([*arguments[:-2], '--model', 'cmhsa_attn_soft', '--force']) == 0
    assert hint in capsys.readouterr().out
