import contextlib
import math
from functools import partial

import pytest
import timm
import torch
from hypothesis import given, strategies as st
from timm.layers import set_fused_attn
from timm.utils import AttentionExtract, ModelEmaV3

from timm_cmhsa import attend_convs, attention_maps, head_statistics
from timm_cmhsa.analysis import AttentionMaps
from timm_cmhsa.plots import PlotError, explorer_html, mean_attention, plot_attention


@pytest.mark.parametrize(('name', 'kwargs'), [
    ('test_cmhsa_attn', {}), ('test_cmhsa_attn', dict(rel_pos='padded_table')),
    ('test_pixel_attn', {}),
    ('test_pixel_attn', dict(rel_pos='learned_content')), ('test_vit', dict(reg_tokens=2)),
])
def test_maps_are_those_that_timm_extracts(name, kwargs):
    model = timm.create_model(name, **kwargs).train()
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    maps = attention_maps(model, images)
    assert list(attention_maps(ModelEmaV3(model), images)) == list(maps)
    assert list(mean_attention(ModelEmaV3(model), images)[0]) == list(maps)
    set_fused_attn(False)
    unfused = timm.create_model(name, **kwargs)
    unfused.load_state_dict(model.state_dict())
    expected = AttentionExtract(unfused.eval(), method='hook')(images)
    for (layer, actual), attention in zip(maps.items(), expected.values(), strict=True):
        assert layer.endswith('.attn')
        num = math.prod(model.patch_embed.grid_size)
        prefix = attention.shape[-2] - num  # class tokens come first, a zero key last
        to_others, to_patches, to_zero_key = attention[:, :, prefix:].tensor_split((prefix, prefix + num), dim=-1)
        torch.testing.assert_close(actual.weights, to_patches.expand_as(actual.weights))
        others = torch.cat([to_others, to_zero_key], dim=-1)
        assert (actual.zero_key is None) == (others.shape[-1] == 0)
        if actual.zero_key is not None:
            torch.testing.assert_close(actual.zero_key, others.sum(dim=-1).expand_as(actual.zero_key))


def test_the_model_stays_as_it_was():
    model = timm.create_model('test_cmhsa_attn').train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    fused = [block.attn.fused_attn for block in model.blocks]
    for channels in (3, 1):
        with contextlib.nullcontext() if channels == 3 else pytest.raises(RuntimeError):
            attention_maps(model, torch.randn(1, channels, 32, 32))
        assert [module.training for module in model.modules()] == modes
        assert [block.attn.fused_attn for block in model.blocks] == fused
        assert not any(module._forward_hooks for module in model.modules())


def test_maps_of_a_compiled_model():
    set_fused_attn(False)  # else the switch to unfused attention compiles the model anew, with hooks
    model, images = timm.create_model('test_cmhsa_attn').eval(), torch.randn(2, 3, 32, 32)
    expected = attention_maps(model, images)
    model.compile(backend='eager')
    with torch.no_grad():
        model(images)
    for maps, others in zip(attention_maps(model, images).values(), expected.values(), strict=True):
        assert torch.equal(maps.weights, others.weights)


def test_maps_of_a_cnn():
    model = timm.create_model('resnet18', num_classes=3).eval()
    attend_convs(model, ['layer3.0.conv1', 'layer4.1.*'], (3, 64, 64))
    maps = attention_maps(model, torch.randn(2, 3, 64, 64))
    assert {name: attention.grid_size for name, attention in maps.items()} == {
        'layer3.0.conv1.attn': (4, 4), 'layer4.1.conv1.attn': (2, 2), 'layer4.1.conv2.attn': (2, 2)}


@pytest.mark.parametrize(('name', 'found'), [
    ('test_cmhsa_conv_k3', 'CmhsaConv has no attention that can be drawn (found: none)'),
    ('cait_xxs24_224', 'Cait has no attention that can be drawn (found: ClassAttn, TalkingHeadAttn)'),
    ('swin_tiny_patch4_window7_224', 'SwinTransformer has no attention that can be drawn (found: WindowAttention)'),
])
def test_attention_that_cannot_be_drawn_is_refused_by_name(name, found):
    model = timm.create_model(name, pretrained=False)
    for function in (attention_maps, mean_attention, explorer_html, partial(plot_attention, output='none')):
        with pytest.raises(PlotError) as error:
            function(model, images=torch.randn(1, 3, *model.pretrained_cfg['input_size'][1:]))
        assert str(error.value).startswith(found)
        assert str(error.value).endswith('or a VisionTransformer of timm.')


@given(
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)), zero_key=st.booleans(), seed=st.integers(0, 2 ** 16))
def test_statistics_by_their_definitions(grid, zero_key, seed):
    torch.manual_seed(seed)
    num = math.prod(grid)
    attn = (3 * torch.randn(2, 2, num, num + zero_key)).softmax(dim=-1)
    maps = AttentionMaps(attn[..., :num], attn[..., -1] if zero_key else None, grid)
    positions = [(row, col) for row in range(grid[0]) for col in range(grid[1])]
    for head, actual in enumerate(head_statistics(maps)):
        by_offset = {}
        for i, (row, col) in enumerate(positions):
            for j, (key_row, key_col) in enumerate(positions):
                weight = attn[:, head, i, j].mean().item()
                by_offset.setdefault((key_row - row, key_col - col), []).append(weight)
        best = max(by_offset, key=lambda offset: sum(by_offset[offset]))
        assert actual.best_offset == best
        assert actual.best_weight == pytest.approx(sum(by_offset[best]) / len(by_offset[best]), abs=1e-6)
        mass = sum(map(sum, by_offset.values()))
        center = [sum(offset[axis] * sum(weights) for offset, weights in by_offset.items()) / mass for axis in (0, 1)]
        assert actual.center == pytest.approx(center, abs=1e-5)
        assert actual.distance == pytest.approx(math.hypot(*center), abs=1e-5)
        entropy = -(attn[:, head] * attn[:, head].log()).sum(dim=-1).mean().item()
        assert actual.entropy == pytest.approx(entropy, abs=1e-5)
