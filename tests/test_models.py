"""Both phases keep timm's promises."""
import pytest
import timm
import torch
from helpers import assert_equal, decayed, images_for, max_error, phase1
from timm.data import resolve_model_data_config
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.models.vision_transformer import Block
from torch import nn

import timm_cmhsa
from timm_cmhsa import CheckpointError, CmhsaAttn, CmhsaConv, patchify
from timm_cmhsa.checkpoint import Checkpoint
from timm_cmhsa.construction import plan_heads

CONV, ATTN = 'test_cmhsa_conv_k3', 'test_cmhsa_attn'
THIN = dict(num_heads=10, head_dim=24, rel_pos='padded_table')
both_phases = pytest.mark.parametrize('name', [CONV, ATTN])
HYBRID = dict(stem='24p-48p', hidden_chans=48, mlp_layer='depthwise')
MODELS = [(CONV, {}), (ATTN, {}), (ATTN, THIN), (CONV, HYBRID), (ATTN, dict(HYBRID, rel_pos='padded_table'))]
all_models = pytest.mark.parametrize(('name', 'kwargs'), MODELS)


def random_model(name, **kwargs):
    """A model in eval mode whose every parameter is random."""
    model = timm.create_model(name, **kwargs).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def assert_same(actual, expected):
    """The same function, of all that a checkpoint holds."""
    assert_equal(expected.state_dict(), actual.state_dict())
    images = images_for(expected)
    torch.testing.assert_close(actual.eval()(images), expected.eval()(images))


def test_names_tell_the_phase():
    for name in timm.list_models('cmhsa*'):
        assert type(timm.create_model(name, device='meta')) is (CmhsaAttn if 'attn' in name else CmhsaConv)


@pytest.mark.parametrize(('name', 'other', 'remedy'), [
    (ATTN, CONV, 'rewrite them by `convert_checkpoint CHECKPOINT FOLDER`'), (CONV, ATTN, 'timm_cmhsa.load_model')])
def test_weights_of_the_other_phase_are_named(name, other, remedy, tmp_path):
    file = str(tmp_path / 'last.pth.tar')
    torch.save(dict(state_dict=timm.create_model(other, in_chans=1).state_dict()), file)
    overlay = dict(pretrained=True, pretrained_cfg_overlay=dict(file=file))
    for options in (dict(checkpoint_path=file), overlay, dict(overlay, num_classes=3)):  # the last is not strict
        with pytest.raises(ValueError, match=remedy) as error:
            timm.create_model(name, **options)
        assert 'Missing key' not in str(error.value)
    with pytest.raises(CheckpointError, match='convert_checkpoint'):
        timm_cmhsa.load_model(file, architecture=name)
    with pytest.raises(RuntimeError, match='Missing key'):
        timm.create_model(name).load_state_dict(timm.create_model('test_vit').state_dict())
    incompatible = timm.create_model(name).load_state_dict(torch.load(file)['state_dict'], strict=False)
    assert incompatible.unexpected_keys


@pytest.mark.parametrize('kernel_size', [3, 5])
def test_phase_1_is_the_papers(kernel_size):
    model = timm.create_model(f'cmhsa_conv_k{kernel_size}', device='meta')
    assert (model.embed_dim, len(model.blocks), model.patch_embed.grid_size) == (768, 6, (14, 14))
    conv = model.blocks[0].attn.conv
    assert (conv.kernel_size, conv.padding, conv.padding_mode) == ((kernel_size,) * 2, (kernel_size // 2,) * 2, 'zeros')
    per_block = 3 * 3 * kernel_size ** 2 + 3 + 2 * 2 * 768 + 2 * 768 * 3072 + 3072 + 768
    assert sum(p.numel() for p in model.parameters()) == 6 * per_block + 2 * 768 + 769 * 1000


@pytest.mark.parametrize(('name', 'num_heads', 'head_dim', 'qk_dim', 'table'), [
    ('cmhsa_attn', 9, 768, 64, 27 * 27), ('cmhsa_attn_soft', 20, 96, 32, 29 * 29),
    ('cmhsa_attn_patch4_32', 9, 192, 64, 15 * 15), ('cmhsa_attn_soft_patch4_32', 20, 48, 32, 17 * 17)])
def test_phase_2_expresses_phase_1(name, num_heads, head_dim, qk_dim, table):
    model = timm.create_model(name, device='meta')
    attn, dim = model.blocks[0].attn, model.embed_dim
    assert (attn.num_heads, attn.head_dim, attn.qk_dim) == (num_heads, head_dim, qk_dim)
    width = 2 * qk_dim + head_dim
    assert sum(p.numel() for p in attn.parameters()) == (
        num_heads * (width * (dim + 1) + head_dim * dim) + dim + (table + 1) * num_heads)
    conv = nn.Conv2d(model.hidden_chans, model.hidden_chans, 5, padding=2)
    peak = 0.75 if 'soft' in name else None
    heads = plan_heads(conv, model.patch_embed.patch_size, model.patch_embed.grid_size, head_dim, peak=peak)
    assert len(heads) == num_heads


@all_models
def test_a_model_is_patches_then_blocks_then_norm_pool_and_head(name, kwargs):
    model = random_model(name, **kwargs)
    images = images_for(model)
    tokens = model.patch_embed(images)
    for block in model.blocks:
        assert isinstance(block, Block)
        tokens = tokens + block.attn(block.norm1(tokens))
        tokens = tokens + block.mlp(block.norm2(tokens))
    torch.testing.assert_close(model.forward_features(images), model.norm(tokens))
    torch.testing.assert_close(model(images), model.head(model.norm(tokens).mean(dim=1)))


@both_phases
def test_the_patch_projection_starts_as_a_reshape(name):
    """Phase 1's is fixed, and phase 2's starts like it. Channels beyond those of the image are zero."""
    model = timm.create_model(name, img_size=(8, 12), patch_size=(2, 4), in_chans=2, hidden_chans=3)
    images = images_for(model)
    expected = patchify(nn.functional.pad(images, (0, 0, 0, 0, 0, 1)), (2, 4))
    assert torch.equal(model.patch_embed(images), expected)
    model.init_weights()
    assert torch.equal(model.patch_embed(images), expected)


@pytest.mark.parametrize(('name', 'kwargs'), [
    *((name, kwargs) for name in (CONV, ATTN) for kwargs in (
        dict(img_size=(8, 24)), dict(img_size=4), dict(patch_size=(2, 4)), dict(in_chans=1, hidden_chans=5),
        dict(num_classes=0), dict(mlp_ratio=1.5, init_values=0.1), dict(global_pool=''), dict(global_pool='map'),
        dict(fc_norm=True, act_layer='silu', norm_layer='rmsnorm'),
        dict(drop_rate=0.1, drop_path_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1))),
    (CONV, dict(kernel_size=(3, 7))), (CONV, dict(stem='8-12-16p', patch_size=2, hidden_chans=16)),
    (CONV, dict(HYBRID, in_chans=60, act_layer='relu', mlp_ratio=1.5, proj_drop_rate=0.1)),
    (CONV, dict(mlp_layer='depthwise', hidden_chans=5)), (ATTN, dict(HYBRID, mlp_layer='mlp', img_size=(8, 24))),
    (ATTN, dict(HYBRID, num_heads=2, head_dim=5)), (ATTN, dict(THIN, padding=(2, 1))),
    (ATTN, dict(num_heads=4, head_dim=8, qk_dim=3, qkv_bias=False)),
])
def test_arguments(name, kwargs):
    model = timm.create_model(name, **dict(dict(img_size=16, depth=2, num_classes=5), **kwargs))
    images = images_for(model)
    logits = model(images)
    tokens = (model.patch_embed.num_patches,) if kwargs.get('global_pool') == '' else ()
    assert logits.shape == (2, *tokens, model.num_classes or model.embed_dim)
    logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.set_input_size((24, 16))
    same = timm.create_model(name, **model.model_args())
    same.load_state_dict(model.state_dict())
    assert_same(same, model)


@pytest.mark.parametrize(('name', 'kwargs', 'message'), [
    (CONV, dict(img_size=33), 'img_size=33 is not divisible by patch_size=4: use a multiple'),
    (CONV, dict(img_size=32.), 'one or two whole numbers'), (CONV, dict(patch_size=0), 'not divisible'),
    (CONV, dict(img_size=(32, 30)), 'not divisible'), (CONV, dict(in_chans=4), 'set hidden_chans to 4 or more'),
    *((CONV, {name: 0}, 'must be positive') for name in ('in_chans', 'depth')),
    *((ATTN, {name: value}, 'must be positive') for name, value in (('num_heads', 0), ('head_dim', 0), ('qk_dim', -1))),
    (CONV, dict(kernel_size=(3, 4)), 'use an odd size such as 3 or 5'),
    (CONV, dict(global_pool='token'), "needs a class token, which these models do not have: use 'avg'"),
    (CONV, dict(stem='8p-16p'), 'use hidden_chans=16 and patch_size=4'),
    (CONV, dict(stem='0p'), "such as '24-48p-96p'"), (CONV, dict(stem=8), "such as '24-48p-96p'"),
    (CONV, dict(stem='8p-8'), 'where p pools by 2, as the last must'),
    (CONV, dict(mlp_layer='glu'), 'must be one of mlp, depthwise'),
])
def test_bad_arguments_say_what_to_change(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, **kwargs)


@both_phases
def test_dropout_rates_reach_their_layers(name):
    model = timm.create_model(name, drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3, drop_path_rate=0.4)
    assert model.head_drop.p == 0.1
    assert model.blocks[0].attn.proj_drop.p == model.blocks[0].mlp.drop1.p == 0.2
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.4)
    assert name == CONV or model.blocks[0].attn.attn_drop.p == 0.3
    images = images_for(model)
    assert not torch.equal(model.train()(images), model(images))
    assert torch.equal(model.eval()(images), model(images))


@all_models
def test_features(name, kwargs):
    model = random_model(name, **kwargs)
    images = images_for(model)
    final, intermediates = model.forward_intermediates(images)
    assert [tuple(y.shape) for y in intermediates] == [(2, 48, 8, 8)] * 4
    torch.testing.assert_close(final, model.forward_features(images))
    torch.testing.assert_close(model.forward_head(final), model(images))
    backbone = timm.create_model(name, features_only=True, out_indices=(1, 3), **kwargs).eval()
    backbone.model.load_state_dict({key: model.state_dict()[key] for key in backbone.model.state_dict()})
    assert backbone.feature_info.reduction() == [4, 4]
    torch.testing.assert_close(backbone(images), intermediates[1::2])
    assert model.prune_intermediate_layers(1, prune_head=False) == [3]
    torch.testing.assert_close(model.forward_head(model.forward_features(images)), model(images))
    model.prune_intermediate_layers([0, 1])
    torch.testing.assert_close(model.forward_intermediates(images, intermediates_only=True), intermediates[:2])


def test_features_of_a_single_block():
    backbone = timm.create_model('cmhsa_hybrid_conv_32', features_only=True).eval()
    assert [tuple(y.shape) for y in backbone(torch.zeros(2, 3, 32, 32))] == [(2, 192, 4, 4)]


@pytest.mark.parametrize(('name', 'kwargs'), [*MODELS, ('test_pixel_attn', {})])
def test_biases_of_attention_are_not_decayed(name, kwargs):
    model = timm.create_model(name, **kwargs)
    assert decayed(model) == {
        name for name, parameter in model.named_parameters() if name.endswith('.weight') and parameter.dim() > 1}


@pytest.mark.parametrize('options', [{}, dict(rel_pos='padded_table'), dict(peak=0.75), dict(peak=0.6, head_dim=24)])
def test_another_image_size_keeps_the_function(options):
    """The rewrite of a convolution stays its rewrite: offsets keep their meaning, and heads their weights."""
    model = phase1(depth=2, num_classes=5, dtype=torch.float64)
    converted = timm_cmhsa.convert_model(model, **options)
    # only a padded table can grow again from a single patch: a table forgets what lies outside
    for size in ((32, 48), 16, (20, 28), 32, (4, 64), 4) + (() if options == {} else (32,)):
        for each in (model, converted):
            each.set_input_size(size)
        images = images_for(model)
        assert max_error(model(images), converted(images)) < 1e-9, size


@all_models
def test_the_image_size_can_change_during_a_training(name, kwargs):
    """What is left of the last step, its loss and gradients, does no harm."""
    model = random_model(name, **kwargs).train()
    for size in (32, 48, 16):
        model.set_input_size(size)
        loss = model(images_for(model)).square().mean()
        loss.backward()
    assert all(parameter.grad is None or parameter.grad.shape == parameter.shape for parameter in model.parameters())


@all_models
def test_bad_image_sizes_leave_the_model_as_it_was(name, kwargs):
    model = random_model(name, **kwargs)
    images = images_for(model)
    expected = model(images)
    for size, message in ((30, 'not divisible'), (48., 'whole numbers'), ((32,) * 3, 'whole numbers'), ('32', 'whole')):
        with pytest.raises(ValueError, match=message):
            model.set_input_size(size)
    with pytest.raises(ValueError, match='would change the width of a token'):
        model.set_input_size(patch_size=8)
    model.set_input_size(patch_size=4)
    model.set_input_size()
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize('kwargs', [{}, THIN, dict(THIN, padding=(0, 2))])
@pytest.mark.parametrize(('source_size', 'size'), [
    (32, (16, 48)), (32, 4), (4, 32), (48, (48, 64)), ((24, 48), 32)])
def test_weights_of_another_image_size_load(kwargs, source_size, size, tmp_path):
    """A folder names its image size. A file does not: it is the model's usual one, or a square."""
    source = random_model(ATTN, img_size=source_size, depth=1, num_classes=5, **kwargs)
    Checkpoint.of(source).write(tmp_path / 'model')
    torch.save(source.state_dict(), tmp_path / 'weights.pth')
    kwargs = dict(kwargs, depth=1, num_classes=5)
    same = timm.create_model(ATTN, img_size=source_size, checkpoint_path=str(tmp_path / 'weights.pth'), **kwargs)
    assert_same(same, source)
    same = timm.create_model(f'local-dir:{tmp_path}/model', pretrained=True)
    assert_same(same, source)
    assert tuple(resolve_model_data_config(same)['input_size'][1:]) == source.patch_embed.img_size
    overlay = dict(file=str(tmp_path / 'weights.pth'), num_classes=5)
    loaded = [timm.create_model(f'local-dir:{tmp_path / "model"}', pretrained=True, img_size=size)]
    if not isinstance(source_size, tuple):
        loaded += [timm.create_model(ATTN, img_size=size, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)]
    source.set_input_size(size)
    for model in loaded:
        assert_same(model, source)


@all_models
def test_creation_without_memory(name, kwargs):
    expected = random_model(name, **kwargs)
    model = timm.create_model(name, device='meta', **kwargs).to_empty(device='cpu')
    reinit_non_persistent_buffers(model)
    model.load_state_dict(expected.state_dict())
    assert_same(model, expected)
