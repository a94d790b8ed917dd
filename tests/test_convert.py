"""A phase-1 model in memory becomes the phase-2 model that computes the same, and the difference is measured."""
import copy
import random

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, strategies as st
from timm.utils import ModelEmaV3, reparameterize_model
from torch import nn

from timm_cmhsa import (
    CmhsaAttn,
    CmhsaConv,
    attend_convs,
    conv2d_to_attention,
    convert_model,
    convert_state_dict,
    verify,
)

SMALL = dict(img_size=16, patch_size=4, depth=2, num_classes=5)


def create(name='cmhsa_conv_k3', **kwargs):
    model = timm.create_model(name, **{**SMALL, **kwargs})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@torch.no_grad()
def error(model, converted, dtype=torch.float32):
    x = torch.randn(2, model.in_chans, *model.patch_embed.img_size, dtype=dtype)
    expected = model(x)
    return ((converted(x) - expected).abs().max() / expected.abs().max()).item()


@given(
    kernel=st.sampled_from([1, 3, 5, (3, 7)]), patch=st.sampled_from([2, 4, (2, 3)]),
    grid=st.sampled_from([1, 2, (3, 2)]), chans=st.sampled_from([(1, 1), (3, 3), (1, 4)]),
    head_dim=st.sampled_from([None, 3, 7]), fc_norm=st.booleans(), pool=st.sampled_from(['avg', 'max', '']),
    seed=st.integers(0, 2 ** 16))
def test_any_model_is_rewritten_exactly(kernel, patch, grid, chans, head_dim, fc_norm, pool, seed):
    torch.manual_seed(seed)
    patch_2d, grid_2d = ((x, x) if isinstance(x, int) else x for x in (patch, grid))
    model = create(
        kernel_size=kernel, patch_size=patch, img_size=(patch_2d[0] * grid_2d[0], patch_2d[1] * grid_2d[1]),
        in_chans=chans[0], hidden_chans=chans[1], fc_norm=fc_norm, global_pool=pool, dtype=torch.float64)
    converted = convert_model(model, head_dim=head_dim)
    assert isinstance(converted, CmhsaAttn)
    assert error(model, converted, torch.float64) <= 1e-12


def test_all_that_the_model_knows_goes_along():
    model = create(
        in_chans=1, drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3, drop_path_rate=0.4, norm_layer='rmsnorm',
        act_layer='silu', init_values=0.5,
        pretrained_cfg_overlay=dict(mean=(0.5,), std=(0.25,), label_names=list('abcde')))
    model.set_input_size((12, 20))
    converted = convert_model(model.train())
    assert converted.training
    assert (converted.head_drop.p, converted.blocks[0].attn.proj_drop.p, converted.blocks[0].attn.attn_drop.p) == (
        0.1, 0.2, 0.3)
    assert converted.blocks[-1].drop_path1.drop_prob == pytest.approx(0.4)
    assert torch.equal(converted.blocks[-1].ls1.gamma, model.blocks[-1].ls1.gamma)
    assert tuple(converted.pretrained_cfg['input_size']) == (1, 12, 20)
    assert [converted.pretrained_cfg[key] for key in ('mean', 'std', 'label_names')] == [
        (0.5,), (0.25,), list('abcde')]
    assert error(model.eval(), converted.eval()) <= 2e-6
    half = convert_model(create(dtype=torch.bfloat16))
    assert reparameterize_model(half).blocks[0].attn.rest is None, 'as sharp as in float32'
    assert {tensor.dtype for tensor in half.state_dict().values()} == {torch.bfloat16}
    again = timm.create_model('cmhsa_attn', **converted.model_args())
    again.load_state_dict(converted.state_dict())
    assert error(model, again.eval()) <= 2e-6


@pytest.mark.parametrize('wrap', [
    lambda model: model, lambda model: torch.compile(model, backend='eager'), lambda model: ModelEmaV3(model)])
def test_wrappers_are_taken_off_and_the_source_stays_as_it_was(wrap):
    model = create()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    converted = convert_model(wrap(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert error(model, converted) <= 2e-6
    again = convert_model(model).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in converted.state_dict().items())
    assert all(parameter.requires_grad for parameter in converted.parameters())
    for parameter in converted.parameters():
        nn.init.zeros_(parameter)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_architectures_and_heads():
    model = create(patch_size=4, hidden_chans=12, img_size=32)
    assert convert_model(model).pretrained_cfg['architecture'] == 'cmhsa_attn_patch4_32'
    thin = convert_model(model, 'cmhsa_attn_16x48_patch4_32')
    assert (thin.blocks[0].attn.num_heads, thin.blocks[0].attn.head_dim) == (16, 48)
    assert error(model, thin) <= 2e-6
    assert convert_model(create()).pretrained_cfg['architecture'] == 'cmhsa_attn', 'never a model for tests'
    few = convert_model(model, num_heads=4, approximate=True)
    assert few.blocks[0].attn.num_heads == 4
    assert error(model, few) > 1e-3
    assert error(model, convert_model(model, rel_pos='quadratic')) <= 2e-6


def test_what_cannot_be_converted_is_told():
    with pytest.raises(TypeError, match=r'Expected a phase-1 model \(CmhsaConv\) to convert, got CmhsaAttn'):
        convert_model(create('cmhsa_attn'))
    with pytest.raises(ValueError, match='resnet18 is not a phase-2 model: choose one of cmhsa_attn'):
        convert_model(create(), 'resnet18')
    with pytest.raises(ValueError, match=r'num_heads=8 of head_dim=48 cannot express .* it takes 9 heads of 48'):
        convert_model(create(), num_heads=8)
    with pytest.raises(ValueError, match="rel_pos='learned' cannot express a convolution"):
        convert_model(create(), rel_pos='learned')


def test_a_model_that_timm_did_not_make():
    model = CmhsaConv(**SMALL).eval()
    assert error(model, convert_model(model)) <= 2e-6


def test_state_dicts_are_a_thin_wrapper():
    model = create()
    converted = convert_state_dict(model.state_dict(), img_size=16)
    expected = convert_model(model, 'cmhsa_attn').state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in converted.items())


def test_verification_finds_what_differs():
    model, images = create(), torch.randn(12, 3, 16, 16)
    converted = convert_model(model)
    exact = verify(model, converted, images)
    assert [layer.name for layer in exact.layers] == ['blocks.0.attn', 'blocks.1.attn']
    assert {(layer.heads_used, layer.num_heads) for layer in exact.layers} == {(9, 9)}
    assert max(exact.logits_error, *(layer.error for layer in exact.layers)) <= 2e-6
    assert exact.top1_agreement == 1
    nn.init.zeros_(converted.blocks[1].attn.proj.weight)
    changed = verify(model, converted, images)
    assert changed.layers[0] == exact.layers[0], 'every layer has the input of its convolution'
    assert changed.layers[1].error > 0.1
    assert changed.layers[1].heads_used == 0
    assert changed.logits_error > 0.01
    nn.init.constant_(converted.blocks[0].attn.proj.bias, float('nan'))
    broken = verify(model, converted, images)
    assert not broken.layers[0].error <= 1
    assert not broken.max_error <= 1


def test_verification_takes_models_as_they_are_and_leaves_them_so():
    model = create(drop_path_rate=0.5, drop_rate=0.5).train()
    converted = convert_model(model)
    assert verify(nn.DataParallel(model), converted, torch.randn(4, 3, 16, 16)).max_error <= 2e-6
    assert model.training
    assert converted.training
    with pytest.raises(AssertionError):
        verify(model, converted, torch.randn(4, 3, 20, 20))
    assert not any(block.attn._forward_hooks for block in model.blocks)


def test_verification_of_a_model_for_inference():
    model, images = create(), torch.randn(4, 3, 16, 16)
    report = verify(model, reparameterize_model(convert_model(model)), images)
    assert report.max_error <= 2e-6
    assert {(layer.heads_used, layer.num_heads) for layer in report.layers} == {(None, None)}


def test_compiled_models_are_compared_layer_by_layer():
    model, images = create(), torch.randn(4, 3, 16, 16)
    converted = convert_model(model)
    nn.init.zeros_(converted.blocks[0].attn.proj.weight)
    expected = verify(model, converted, images)
    assert expected.layers[0].error > 0.1
    for each in (model, converted):
        each.compile(backend='eager')
        with torch.inference_mode():
            each(images)
    assert verify(model, converted, images) == expected


def test_models_that_cannot_be_compared_are_refused():
    model, images = create(), torch.randn(4, 3, 16, 16)
    converted = convert_model(model)
    with pytest.raises(ValueError, match='Expected a phase-1 model and its rewrite, got CmhsaAttn and CmhsaConv'):
        verify(converted, model, images)
    with pytest.raises(ValueError, match='Models of 3 and 2 blocks cannot be compared'):
        verify(create(depth=3), converted, images)
    with pytest.raises(ValueError, match='on 0 images'):
        verify(model, converted, images[:0])
    with pytest.raises(ValueError, match='Models of 1 and 5 classes cannot be compared'):
        verify(create(num_classes=1), converted, images)


def test_what_was_changed_in_the_model_goes_along():
    model, images = create(), torch.randn(2, 3, 16, 16)
    expected = model(images)
    model.blocks[1].norm2.eps = 0.5
    model.blocks[0].mlp.act = nn.Tanh()
    model.head_drop = nn.Hardtanh(-1e-3, 1e-3)
    assert error(model, convert_model(model)) <= 2e-6
    assert not torch.allclose(model(images), expected)


def test_what_attention_would_drop_is_refused():
    model = create()
    model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match='extra is in one of CmhsaConv and cmhsa_attn only'):
        convert_model(model)


@pytest.mark.parametrize('name', ['', 'blocks', 'patch_embed.proj', 'blocks.1.attn', 'blocks.1.attn.conv'])
@pytest.mark.parametrize('how', ['hook', 'forward', 'subclass'])
def test_changes_that_the_rewrite_would_drop_are_refused(name, how):
    model = create()
    module = model.get_submodule(name)
    if how == 'hook':
        module.register_forward_hook(lambda module, args, output: 2 * output)
    elif how == 'forward':
        module.forward = lambda *args: 2 * type(module).forward(module, *args)
    else:
        module.__class__ = type('Doubled', (type(module),), {})
    error = TypeError if how == 'subclass' and not name else ValueError
    with pytest.raises(error, match=name or ('Doubled' if how == 'subclass' else 'the model has hooks')):
        convert_model(model)


def test_models_of_the_width_are_named():
    model = create('cmhsa_conv_k3_patch4_32', img_size=32, depth=1)
    with pytest.raises(ValueError, match='choose cmhsa_attn_16x48_patch4_32 or cmhsa_attn_patch4_32 or cmhsa_'):
        convert_model(model, 'cmhsa_attn_16x96')


def test_changes_elsewhere_are_copied():
    model = create()
    model.patch_embed.norm = nn.LayerNorm(48)
    model.patch_embed.register_forward_hook(lambda module, args, output: 2 * output)
    model.blocks[0].attn.proj_drop = nn.Hardtanh(-1e-3, 1e-3)
    model.blocks[1].register_forward_hook(lambda module, args, output: 2 * output)
    model.set_grad_checkpointing()
    model = model.eval()
    converted = convert_model(model)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(converted(images), model(images), atol=1e-5, rtol=1e-5)
    assert converted.grad_checkpointing


@pytest.mark.parametrize('rewrite', [
    convert_model, lambda model: convert_state_dict(model.state_dict(), img_size=16),
    lambda model: conv2d_to_attention(model.blocks[0].attn.conv, 4, 4, num_heads=12, rel_pos='quadratic'),
    lambda model: attend_convs(nn.Sequential(copy.deepcopy(model.blocks[0].attn.conv)), input_size=(3, 8, 8))])
def test_random_numbers_of_others_are_as_if_nothing_had_been_converted(rewrite):
    model = create()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first, second = rewrite(model), rewrite(model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    first, second = (each if isinstance(each, dict) else each.state_dict() for each in (first, second))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
