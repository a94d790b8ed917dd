import math

import pytest
import timm
import torch
from hypothesis import given, settings, strategies as st
from timm.layers import set_fused_attn
from timm.utils import AttentionExtract
from torch import nn

from timm_cmhsa import (
    attend_convs,
    attention_maps,
    conv2d_to_attention,
    expresses_convolutions,
    head_statistics,
    offset_profile,
    spans_receptive_field,
)
from timm_cmhsa.analysis import AttentionMaps
from timm_cmhsa.pixel import PositionalAttention


@pytest.mark.parametrize('name', ['test_cmhsa_attn', 'test_pixel_attn'])
@pytest.mark.parametrize('rel_pos', ['quadratic', 'learned_content'])
def test_maps_are_those_that_timm_extracts(name, rel_pos):
    model, images = timm.create_model(name, rel_pos=rel_pos).train(), torch.randn(2, 3, 32, 32)
    fused = [getattr(block.attn, 'fused_attn', None) for block in model.blocks]
    maps = attention_maps(model, images)
    assert model.training
    assert model.blocks[0].attn.training
    assert [getattr(block.attn, 'fused_attn', None) for block in model.blocks] == fused
    assert not any(block.attn.attn_drop._forward_hooks for block in model.blocks)
    set_fused_attn(False)
    unfused = timm.create_model(name, rel_pos=rel_pos)
    unfused.load_state_dict(model.state_dict())
    expected = AttentionExtract(unfused.eval(), method='hook')(images)
    for (layer, actual), attention in zip(maps.items(), expected.values(), strict=True):
        assert layer.endswith('.attn')
        whole = actual.weights
        if name == 'test_cmhsa_attn':
            whole = torch.cat([whole, actual.zero_key.unsqueeze(-1)], dim=-1)
        else:
            assert actual.zero_key is None
        torch.testing.assert_close(whole, attention.expand_as(whole))
        assert actual.grid_size == (8, 8)


@pytest.mark.parametrize('in_place', [False, True])
def test_maps_of_a_compiled_model(in_place):
    model, images = timm.create_model('test_pixel_attn').eval(), torch.randn(2, 3, 32, 32)
    expected = attention_maps(model, images)
    compiled = torch.compile(model, backend='eager')
    if in_place:
        model.compile(backend='eager')
        compiled = model
    with torch.no_grad():
        compiled(images)
    actual = attention_maps(compiled, images)
    assert len(actual) == len(expected)
    for maps, others in zip(actual.values(), expected.values()):
        assert torch.equal(maps.weights, others.weights)


def test_maps_of_a_cnn_and_of_a_layer():
    model = timm.create_model('resnet18', num_classes=3).eval()
    attend_convs(model, ['layer3.0.conv1', 'layer4.1.*'], (3, 64, 64))
    maps = attention_maps(model, torch.randn(2, 3, 64, 64))
    assert {name: attention.grid_size for name, attention in maps.items()} == {
        'layer3.0.conv1.attn': (4, 4), 'layer4.1.conv1.attn': (2, 2), 'layer4.1.conv2.attn': (2, 2)}
    layer = model.layer4[1].conv1.attn
    assert attention_maps(layer, torch.randn(3, 4, 512))[''].weights.shape == (3, 9, 4, 4)
    with pytest.raises(ValueError, match='has no attention layer of timm_cmhsa'):
        attention_maps(timm.create_model('test_cmhsa_conv_k3'), torch.randn(1, 3, 32, 32))


@given(
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)), zero_key=st.booleans(), seed=st.integers(0, 2 ** 16))
@settings(max_examples=30)
def test_measures_by_their_definitions(grid, zero_key, seed):
    torch.manual_seed(seed)
    height, width = grid
    num = height * width
    attn = (3 * torch.randn(2, 2, num, num + zero_key)).softmax(dim=-1)
    maps = AttentionMaps(attn[..., :num], attn[..., -1] if zero_key else None, grid)
    positions = [(row, col) for row in range(height) for col in range(width)]
    profile, statistics = offset_profile(maps), head_statistics(maps)
    for head in range(2):
        by_offset = {}
        for i, (row, col) in enumerate(positions):
            for j, (key_row, key_col) in enumerate(positions):
                weight = attn[:, head, i, j].mean().item()
                by_offset.setdefault((key_row - row, key_col - col), []).append(weight)
        for (row, col), weights in by_offset.items():
            mean = sum(weights) / len(weights)
            assert profile[head, height - 1 + row, width - 1 + col].item() == pytest.approx(mean, abs=1e-6)
        actual = statistics[head]
        best = max(by_offset, key=lambda offset: sum(by_offset[offset]))
        assert actual.best_offset == best
        assert actual.best_weight == pytest.approx(sum(by_offset[best]) / len(by_offset[best]), abs=1e-6)
        mass = sum(map(sum, by_offset.values()))
        center = [sum(offset[axis] * sum(weights) for offset, weights in by_offset.items()) / mass for axis in (0, 1)]
        assert actual.center == pytest.approx(center, abs=1e-5)
        assert actual.distance == pytest.approx(math.hypot(*center), abs=1e-5)
        entropy = -(attn[:, head] * attn[:, head].log()).sum(dim=-1).mean().item()
        assert actual.entropy == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize('rel_pos', ['table', 'quadratic'])
def test_a_converted_layer_is_all_convolution(rel_pos):
    attn = conv2d_to_attention(nn.Conv2d(2, 2, 3, padding=1), 1, (4, 5), rel_pos=rel_pos)
    statistics = head_statistics(attention_maps(attn, torch.randn(2, 20, 2))[''])
    assert [head.best_offset for head in statistics] == [(row, col) for row in (-1, 0, 1) for col in (-1, 0, 1)]
    for head in statistics:
        assert head.best_weight == pytest.approx(1)
        assert head.distance == pytest.approx(math.hypot(*head.best_offset), abs=1e-5)
        assert head.entropy < 1e-5


@pytest.mark.parametrize('rel_pos', ['table', 'quadratic', 'quadratic_gen'])
def test_a_converted_layer_spans_its_kernel(rel_pos):
    attn = conv2d_to_attention(nn.Conv2d(2, 2, 3, padding=1), 1, (4, 5), rel_pos=rel_pos)
    for condition in (spans_receptive_field, expresses_convolutions):
        assert condition(attn, 3)
        assert condition(attn, (3, 1))
        assert not condition(attn, 5)
        assert condition(attn, 3, torch.randn(2, 20, 2))


def positional(center, inv_std, grid=(5, 5)):
    attn = PositionalAttention(2, grid, len(center), 'quadratic', dtype=torch.float64)
    with torch.no_grad():
        attn.rel_pos.center.copy_(torch.tensor(center))
        attn.rel_pos.inv_std.fill_(inv_std)
    return attn


TAPS = [(row, col) for row in (-1., 0., 1.) for col in (-1., 0., 1.)]


def test_lemma_3_does_not_suffice_at_the_borders():
    """Nine heads on the nine taps span the kernel everywhere, and yet the layer can be no convolution with zeros.

    A softmax without zero key sums to one where a head points outside the image too, and values and output projection
    are the same for all queries: the lemma lets the combination of heads depend on the query, which a layer cannot.
    """
    attn = positional(TAPS, 10.)
    assert spans_receptive_field(attn, 3)
    assert not expresses_convolutions(attn, 3)


def test_soft_patterns_can_span_and_twins_cannot():
    """The point of Lemma 3: attention need not be hard, but patterns have to differ."""
    one_row = [(0., col) for col in (-1., 0., 1.)]
    soft = [*one_row, (0., 0.3), (0., 2.), (0., -2.)]
    assert spans_receptive_field(positional(soft, 1., grid=(1, 6)), (1, 3))
    assert not spans_receptive_field(positional(one_row, 1., grid=(1, 6)), (1, 3))
    assert spans_receptive_field(positional(one_row, 10., grid=(1, 6)), (1, 3))
    assert not spans_receptive_field(positional([(0., 0.)] * 9, 10., grid=(1, 6)), (1, 3))


def test_removing_a_head_breaks_the_condition():
    attn = conv2d_to_attention(nn.Conv2d(2, 2, 3, padding=1), 1, 4, rel_pos='quadratic_gen')
    attn.keep_heads([0, 1, 2, 3, 5, 6, 7, 8])
    assert not spans_receptive_field(attn, 3)
    assert not expresses_convolutions(attn, 3)


def test_conditions_say_what_they_expect():
    message = r'Expected an attention layer of timm_cmhsa \(of an AttendedConv2d, its attn\), got Linear'
    with pytest.raises(TypeError, match=message):
        spans_receptive_field(nn.Linear(2, 2), 3)
    with pytest.raises(ValueError, match='kernel_size=2 has no centre'):
        expresses_convolutions(positional(TAPS, 1.), 2)
