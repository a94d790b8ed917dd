"""A phase-1 model in memory becomes the phase-2 model that computes the same, and the difference is measured."""
import copy

import pytest
import timm
import torch
from helpers import assert_converts, assert_equal, images_for, max_error, phase1, train
from hypothesis import given, strategies as st
from timm.layers import to_2tuple
from timm.utils import ModelEmaV3, reparameterize_model
from torch import nn

from timm_cmhsa import CmhsaAttn, CmhsaConv, convert_model, convert_state_dict, verify

SOFT, SOFT_32, WIDE_32 = 'cmhsa_attn_soft', 'cmhsa_attn_soft_patch4_32', 'cmhsa_attn_patch4_32'


@given(
    kernel=st.sampled_from([1, 3, 5, (3, 7), (1, 3)]), patch=st.sampled_from([2, 4, (2, 3)]),
    grid=st.sampled_from([(1, 1), (2, 2), (3, 2), (1, 8)]), chans=st.sampled_from([(1, 1), (3, 3), (1, 4), (5, 5)]),
    stem=st.sampled_from(['', '', '', '6p', '4-8p', '4p-4-8p']), mlp_layer=st.sampled_from(['mlp', 'depthwise']),
    heads=st.sampled_from([
        {}, {'head_dim': 3}, {'peak': 0.6}, {'peak': 0.9, 'head_dim': 7}, {'qk_dim': 5}, {'rel_pos': 'table'}]),
    fc_norm=st.booleans(), pool=st.sampled_from(['avg', 'max', 'map', '']), seed=st.integers(0, 2 ** 16))
def test_any_model_is_rewritten_exactly(kernel, patch, grid, chans, stem, mlp_layer, heads, fc_norm, pool, seed):
    in_chans, hidden_chans = chans
    if stem:
        patch, hidden_chans = 2 ** stem.count('p'), int(stem.split('-')[-1].rstrip('p'))
    patch_h, patch_w = to_2tuple(patch)
    model = phase1(
        seed=seed, kernel_size=kernel, patch_size=patch, img_size=(patch_h * grid[0], patch_w * grid[1]), depth=2,
        in_chans=in_chans, hidden_chans=hidden_chans, stem=stem, mlp_layer=mlp_layer, num_classes=5, fc_norm=fc_norm,
        global_pool=pool, dtype=torch.float64)
    converted = assert_converts(model, tolerance=1e-12, **heads)
    assert isinstance(converted, CmhsaAttn)
    for name in heads.keys() & {'head_dim', 'qk_dim'}:
        assert getattr(converted.blocks[0].attn, name) == heads[name]
    # from tensors alone, with as many heads, in the model that `model_args` describes
    args = {name: model.model_args()[name] for name in ('patch_size', 'in_chans', 'fc_norm', 'global_pool')}
    tensors = convert_state_dict(model.state_dict(), img_size=model.patch_embed.img_size, **args, **heads)
    assert_equal(converted.state_dict(), tensors)
    again = timm.create_model(converted.pretrained_cfg['architecture'], **converted.model_args(), dtype=torch.float64)
    again.load_state_dict(tensors)
    assert verify(model, again, images_for(model)).max_error <= 1e-12


def test_everything_is_copied():
    model = phase1(
        in_chans=1, num_classes=5, drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3, drop_path_rate=0.4,
        norm_layer='rmsnorm', act_layer='silu', init_values=0.5, fc_norm=True,
        pretrained_cfg_overlay=dict(mean=(0.5,), std=(0.25,), label_names=list('abcde')))
    model.set_input_size((12, 20))
    model.set_grad_checkpointing()
    model.blocks[1].norm2.eps = 0.5
    model.blocks[0].mlp.act = nn.Tanh()
    model.head_drop = nn.Hardtanh(-0.1, 0.1)
    converted = convert_model(model.train().requires_grad_(False))
    assert converted.training
    assert converted.grad_checkpointing
    assert all(parameter.requires_grad for parameter in converted.parameters())
    block = converted.blocks[-1]
    assert (block.attn.attn_drop.p, block.attn.proj_drop.p, block.mlp.drop1.p) == (0.3, 0.2, 0.2)
    assert block.drop_path1.drop_prob == pytest.approx(0.4)
    cfg = converted.pretrained_cfg
    assert (tuple(cfg['input_size']), cfg['mean'], cfg['std'], cfg['label_names']) == (
        (1, 12, 20), (0.5,), (0.25,), list('abcde'))
    assert verify(model, converted, images_for(model)).max_error <= 1e-5


@pytest.mark.parametrize('wrap', [
    lambda model: model, lambda model: torch.compile(model, backend='eager'), ModelEmaV3, nn.DataParallel])
def test_wrappers_are_taken_off_and_the_source_stays_as_it_was(wrap):
    model = phase1(depth=2, num_classes=5)
    tensors, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    converted = assert_converts(wrap(model), images_for(model), num_heads=12)
    assert_equal(convert_model(model, num_heads=12).state_dict(), converted.state_dict())
    assert torch.equal(torch.get_rng_state(), random_state)
    for parameter in converted.parameters():
        nn.init.zeros_(parameter)
    assert_equal(tensors, model.state_dict())


@pytest.mark.parametrize(('size', 'grid'), [(32, 4), (64, 8), (224, 14)])
def test_hybrids_become_hybrids(size, grid):
    model = phase1(f'cmhsa_hybrid_conv_{size}', depth=2, num_classes=5, dtype=torch.float64)
    converted = assert_converts(model, tolerance=1e-12)
    assert converted.pretrained_cfg['architecture'] == f'cmhsa_hybrid_attn_{size}'
    attn = converted.blocks[0].attn
    assert (attn.num_heads, attn.head_dim, attn.qk_dim) == (10, model.embed_dim, 16)
    assert (attn.rel_pos.name, attn.rel_pos.grid_size) == ('padded_table', (grid, grid))
    assert_equal(converted.state_dict(), convert_state_dict(model.state_dict(), img_size=size))
    for each in (model, converted):
        each.set_input_size((64, 48))
    assert verify(model, converted, images_for(model)).max_error <= 1e-12


@pytest.mark.parametrize(('hidden_chans', 'options', 'architecture', 'num_heads', 'head_dim', 'rel_pos', 'peak'), [
    (12, {}, WIDE_32, 9, 192, 'table', 1),
    (12, {'peak': 0.6}, SOFT_32, 20, 48, 'padded_table', 0.6),
    (12, {'architecture': SOFT_32}, SOFT_32, 20, 48, 'padded_table', 0.75),
    (12, {'architecture': SOFT_32, 'peak': 0.5}, SOFT_32, 20, 48, 'padded_table', 0.5),
    (12, {'architecture': SOFT_32, 'rel_pos': 'table'}, SOFT_32, 20, 48, 'table', 1),
    (12, {'architecture': WIDE_32, 'rel_pos': 'padded_table'}, WIDE_32, 9, 192, 'padded_table', 1),
    (12, {'architecture': WIDE_32, 'peak': 0.5}, WIDE_32, 10, 192, 'padded_table', 0.5),
    (12, {'num_heads': 30, 'head_dim': 60, 'qk_dim': 8}, WIDE_32, 30, 60, 'table', 1),
    (12, {'head_dim': 96}, WIDE_32, 10, 96, 'table', 1),
    (3, {}, 'cmhsa_attn', 9, 48, 'table', 1),  # never a model for tests
    (3, {'architecture': 'test_cmhsa_attn'}, 'test_cmhsa_attn', 9, 48, 'table', 1),
    (3, {'architecture': SOFT}, SOFT, 10, 48, 'padded_table', 0.75),
])
def test_options_are_completed(hidden_chans, options, architecture, num_heads, head_dim, rel_pos, peak):
    """What is asked for is what one gets, and what is not is as in the architecture."""
    model = phase1(depth=1, hidden_chans=hidden_chans, num_classes=5)
    converted = assert_converts(model, **options)
    assert converted.pretrained_cfg['architecture'] == architecture
    attn = converted.blocks[0].attn
    assert (attn.num_heads, attn.head_dim, attn.rel_pos.name) == (num_heads, head_dim, rel_pos)
    is_thin = 'soft' in architecture or head_dim < model.embed_dim
    assert attn.qk_dim == options.get('qk_dim', min(head_dim, 32 if is_thin else 64))
    weights = attn.rel_pos.get_bias().softmax(dim=-1)[0, 0, :, :-1]  # of the first head, which looks up and left
    assert weights.max().item() == pytest.approx(peak, abs=1e-4)


@pytest.mark.parametrize('options', [{}, {'peak': 0.75}, {'head_dim': 12}])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_converts_as_exactly_as_float32(dtype, options):
    model = phase1(depth=2, num_classes=5, dtype=dtype)
    converted = convert_model(model, **options)
    assert next(converted.parameters()).dtype == (torch.float32 if 'peak' in options else dtype)
    assert verify(model.float(), converted.float(), images_for(model)).max_error <= 2e-6


@pytest.mark.parametrize('peak', [None, 0.75])
def test_hard_heads_stay_where_they_are_and_soft_heads_move(peak):
    """Under Adam, biases, queries and keys of soft heads move as far as values, those of hard heads hardly at all."""
    model = convert_model(phase1(img_size=16, depth=2, num_classes=3).train(), peak=peak)
    start, images, labels = copy.deepcopy(model), torch.randn(8, 3, 16, 16), torch.arange(8) % 3
    train(model, images, labels, 10, lr=1e-3, weight_decay=0)
    moves = {name: (parameter - start.get_parameter(name)).abs() for name, parameter in model.named_parameters()}
    for i, block in enumerate(model.blocks):
        query, key, value = (part.max() for part in moves[f'blocks.{i}.attn.qkv.weight'].split(block.attn.widths))
        biases = [move.max() for name, move in moves.items() if name.startswith(f'blocks.{i}.attn.rel_pos')]
        for moved in (query, key, *biases):
            assert moved >= 0.5 * value if peak else moved <= 0.1 * value


def test_only_phase_1_is_converted():
    subclass = phase1(depth=1)
    subclass.__class__ = type('Doubled', (CmhsaConv,), {})
    for model in (timm.create_model('test_cmhsa_attn', depth=1), nn.Linear(2, 2), subclass):
        with pytest.raises(TypeError, match=rf'a phase-1 model \(CmhsaConv\) .* got {type(model).__name__}'):
            convert_model(model)


def test_other_token_mixers_are_refused():
    model = phase1(depth=2)
    model.blocks[1].attn = nn.Identity()
    with pytest.raises(ValueError, match='Token mixers were replaced'):
        convert_model(model)


def test_verification_finds_what_differs():
    model = phase1(depth=2, num_classes=5, dtype=torch.float64)
    images, converted = images_for(model, 12), convert_model(model)
    exact = verify(model, converted, images)
    assert [layer.name for layer in exact.layers] == ['blocks.0.attn', 'blocks.1.attn']
    assert {(layer.heads_used, layer.num_heads) for layer in exact.layers} == {(9, 9)}
    assert min(exact.logits_error, *(layer.error for layer in exact.layers)) > 0, 'errors are measured in float64'
    assert exact.max_error <= 1e-12
    assert exact.top1_agreement == 1
    nn.init.zeros_(converted.blocks[1].attn.proj.weight)
    changed = verify(model, converted, images)
    assert changed.layers[0] == exact.layers[0], 'every layer has the input of its convolution'
    assert changed.layers[1].error > 0.1
    assert changed.layers[1].heads_used == 0
    assert changed.logits_error > 0.01
    with torch.no_grad():
        expected, actual = model(images), converted(images)
    assert changed.logits_error == pytest.approx(max_error(expected, actual), rel=1e-4)
    assert changed.top1_agreement == (actual.argmax(dim=1) == expected.argmax(dim=1)).double().mean()
    nn.init.constant_(converted.blocks[0].attn.proj.bias, float('nan'))
    assert not verify(model, converted, images).max_error <= 1


def test_verification_leaves_models_as_they_were():
    model = phase1(depth=2, drop_path_rate=0.5, drop_rate=0.5).train()
    converted = convert_model(model)
    assert verify(nn.DataParallel(model), ModelEmaV3(converted), images_for(model)).max_error <= 1e-5
    with pytest.raises(AssertionError):
        verify(model, converted, torch.randn(4, 3, 20, 20))
    assert model.training
    assert converted.training
    assert_converts(model)  # without hooks


def test_verification_of_a_model_for_inference_that_timm_did_not_create():
    model = CmhsaConv(img_size=16, patch_size=4, depth=2, num_classes=5).eval()
    assert verify(model, reparameterize_model(convert_model(model)), images_for(model)).max_error <= 1e-5


def test_models_that_cannot_be_compared_are_refused():
    model = phase1(depth=2)
    images, converted = images_for(model), convert_model(model)
    with pytest.raises(ValueError, match='Expected a phase-1 model and its rewrite, got CmhsaAttn and CmhsaConv'):
        verify(converted, model, images)
    for source, count in ((phase1(depth=3), 2), (phase1(depth=2, num_classes=1), 2), (model, 0)):
        with pytest.raises(ValueError, match=f'cannot be compared on {count} images'):
            verify(source, converted, images[:count])
