import copy
import re

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn
from timm.models import group_parameters, save_for_hf
from timm.models.vision_transformer import Block
from timm.optim import create_optimizer_v2
from timm.utils import AttentionExtract, reparameterize_model
from torch import nn

from timm_cmhsa import (
    CmhsaAttn,
    CmhsaConv,
    PatchConv2d,
    conv2d_to_attention,
    fuse_shifts,
    patchify,
    save_for_hub,
    unpatchify,
)
from timm_cmhsa.cmhsa import point_at_nearest
from timm_cmhsa.construction import plan_heads
from timm_cmhsa.encodings import ENCODINGS

CONV, ATTN, PIXEL = 'test_cmhsa_conv_k3', 'test_cmhsa_attn', 'test_pixel_attn'
TINY = [CONV, ATTN, PIXEL]


def images(*size, batch=2):
    return torch.randn(batch, *(size or (3, 32, 32)))


def encodings_of(name):
    return [rel_pos for rel_pos in ENCODINGS if name == ATTN or rel_pos != 'padded_table']  # which needs a zero key


def test_registered_models():
    assert [name for name in timm.list_models('*cmhsa*') if not name.startswith('other')] == [  # of other tests
        'cmhsa_attn', 'cmhsa_attn_16x48_patch4_32', 'cmhsa_attn_16x96', 'cmhsa_attn_patch4_32', 'cmhsa_attn_soft',
        'cmhsa_attn_soft_20x48_patch4_32', 'cmhsa_attn_soft_20x96', 'cmhsa_attn_soft_patch4_32', 'cmhsa_conv_k3',
        'cmhsa_conv_k3_patch4_32', 'cmhsa_conv_k5', 'cmhsa_conv_k5_patch4_32', 'test_cmhsa_attn', 'test_cmhsa_conv_k3']
    assert set(timm.list_models('cmhsa*')) <= set(timm.list_models(module='cmhsa'))


@pytest.mark.parametrize(('name', 'kernel_size'), [('cmhsa_conv_k3', 3), ('cmhsa_conv_k5', 5)])
def test_phase_1_is_the_papers(name, kernel_size):
    model = timm.create_model(name, device='meta')
    assert isinstance(model, CmhsaConv)
    assert (model.embed_dim, len(model.blocks), model.patch_embed.grid_size) == (768, 6, (14, 14))
    assert model.blocks[0].mlp.fc1.out_features == 3072
    assert not [name for name, _ in model.named_parameters() if 'patch_embed' in name or 'pos_embed' in name]
    for block in model.blocks:
        conv = block.attn.conv
        assert conv.weight.shape == (3, 3, kernel_size, kernel_size)
        assert (conv.padding, conv.padding_mode) == ((kernel_size // 2,) * 2, 'zeros')
        assert conv.bias is not None
    per_block = 3 * 3 * kernel_size ** 2 + 3 + 2 * 2 * 768 + 2 * 768 * 3072 + 3072 + 768
    assert sum(p.numel() for p in model.parameters()) == 6 * per_block + 2 * 768 + 769 * 1000


def test_phase_2_is_the_papers():
    model = timm.create_model('cmhsa_attn', device='meta')
    assert isinstance(model, CmhsaAttn)
    for block in model.blocks:
        assert (block.attn.num_heads, block.attn.head_dim) == (9, 768)
        assert block.attn.rel_pos.relative_position_bias_table.shape == (27 * 27, 9)
        assert block.attn.rel_pos.zero_key_bias.shape == (9,)
    assert model.patch_embed.proj.weight.requires_grad


@pytest.mark.parametrize(('name', 'kernel_size', 'num_heads', 'head_dim', 'peak'), [
    ('cmhsa_attn_16x96', 3, 16, 96, None), ('cmhsa_attn_16x96', 5, 16, 96, None),
    ('cmhsa_attn_16x48_patch4_32', 5, 16, 48, None),
    ('cmhsa_attn_soft_20x96', 5, 20, 96, 0.75), ('cmhsa_attn_soft_20x48_patch4_32', 5, 20, 48, 0.75)])
def test_thin_heads_express_the_convolution(name, kernel_size, num_heads, head_dim, peak):
    model = timm.create_model(name, device='meta')
    attn = model.blocks[0].attn
    assert (attn.num_heads, attn.head_dim) == (num_heads, head_dim)
    conv = nn.Conv2d(model.hidden_chans, model.hidden_chans, kernel_size, padding=kernel_size // 2)
    patch_size, grid_size = model.patch_embed.patch_size, model.patch_embed.grid_size
    assert len(plan_heads(conv, patch_size, grid_size, head_dim, peak=peak)) == num_heads


def test_a_reparameterized_model_cannot_be_built_anew():
    model = reparameterize_model(timm.create_model('test_cmhsa_attn', depth=1))
    with pytest.raises(ValueError, match='reparameterized for inference cannot be built anew'):
        model.model_args()


@pytest.mark.parametrize('name', TINY)
def test_forward_is_norm_then_pool_then_head(name):
    model, x = timm.create_model(name).eval(), images()
    tokens = model.patch_embed(x)
    for block in model.blocks:
        tokens = tokens + block.attn(block.norm1(tokens))
        tokens = tokens + block.mlp(block.norm2(tokens))
    torch.testing.assert_close(model.forward_features(x), model.norm(tokens))
    torch.testing.assert_close(model(x), model.head(model.norm(tokens).mean(dim=1)))


@pytest.mark.parametrize('name', [CONV, ATTN])
def test_patch_projection_starts_as_a_reshape(name):
    x = images(2, 8, 12)
    model = timm.create_model(name, img_size=(8, 12), patch_size=(2, 4), in_chans=2, hidden_chans=5)
    expected = patchify(F.pad(x, (0, 0, 0, 0, 0, 3)), (2, 4))
    assert torch.equal(model.patch_embed(x), expected)
    model.init_weights()
    assert torch.equal(model.patch_embed(x), expected)


@pytest.mark.parametrize('name', TINY)
@pytest.mark.parametrize('kwargs', [
    dict(img_size=24),
    dict(img_size=(8, 24)),
    dict(patch_size=8),
    dict(patch_size=(2, 4)),
    dict(hidden_chans=5),
    dict(in_chans=1),
    dict(in_chans=4, hidden_chans=4),
    dict(num_classes=7),
    dict(num_classes=0),
    dict(depth=1),
    dict(mlp_ratio=1.5),
    dict(drop_rate=0.1, drop_path_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1),
    dict(global_pool=''),
    dict(act_layer='silu', norm_layer='rmsnorm'),
])
def test_arguments_of_all_models(name, kwargs):
    model = timm.create_model(name, **dict(dict(img_size=16, depth=2), **kwargs))
    size = kwargs.get('img_size', 16)
    x = images(kwargs.get('in_chans', 3), *(size if isinstance(size, tuple) else (size, size)))
    y = model(x)
    if kwargs.get('global_pool') == '':
        assert y.shape == (2, model.patch_embed.num_patches, 1000)
    else:
        assert y.shape == (2, kwargs.get('num_classes', 1000) or model.embed_dim)
    assert len(model.blocks) == kwargs.get('depth', 2)
    patch_h, patch_w = model.patch_embed.patch_size
    assert model.embed_dim == patch_h * patch_w * kwargs.get('hidden_chans', 3)
    y.mean().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing


def test_arguments_of_one_phase():
    conv = timm.create_model(CONV, kernel_size=7)
    assert conv.blocks[0].attn.conv.kernel_size == (7, 7)
    attn = timm.create_model(ATTN, num_heads=4, head_dim=8, qkv_bias=False)
    assert (attn.blocks[0].attn.num_heads, attn.blocks[0].attn.head_dim) == (4, 8)
    assert attn.blocks[0].attn.qkv.bias is None
    assert attn(images()).shape == (2, 1000)


@pytest.mark.parametrize(('kwargs', 'message'), [
    (dict(img_size=33), 'img_size=33 is not divisible by patch_size=4: use a multiple'),
    (dict(img_size=(32, 30)), 'not divisible'),
    (dict(img_size=2), 'not divisible'),
    (dict(patch_size=5), 'not divisible'),
    (dict(patch_size=0), 'not divisible'),
    (dict(in_chans=4), 'set hidden_chans to 4 or more'),
    (dict(in_chans=0), 'must be positive'),
    (dict(depth=0), 'must be positive'),
])
def test_impossible_combinations_say_what_to_change(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(CONV, **kwargs)


def test_attention_pooling_of_tokens_of_any_width():
    for hidden_chans in (1, 3):
        model = timm.create_model(ATTN, in_chans=1, hidden_chans=hidden_chans, global_pool='map', num_classes=3)
        assert model(images(1, 32, 32)).shape == (2, 3)


def test_numbers_of_heads_can_be_numpys():
    assert [block.attn.num_heads for block in timm.create_model(ATTN, num_heads=np.int64(2)).blocks] == [2] * 4


@pytest.mark.parametrize('kwargs', [dict(num_heads=0), dict(head_dim=0), dict(head_dim=-1)])
def test_heads_are_positive(kwargs):
    with pytest.raises(ValueError, match='must be positive'):
        timm.create_model(ATTN, **kwargs)


@pytest.mark.parametrize('name', [ATTN, PIXEL])
def test_every_encoding_can_be_chosen(name):
    for rel_pos in encodings_of(name):
        model = timm.create_model(name, rel_pos=rel_pos, img_size=(24, 16), depth=1)
        assert {block.attn.rel_pos.name for block in model.blocks} == {rel_pos} == {model.model_args()['rel_pos']}
        x = images(3, 24, 16)
        model(x).mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.set_input_size((16, 32))
        other = timm.create_model(name, **model.model_args())
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other.eval()(x[..., :16, :].repeat(1, 1, 1, 2)),
                                   model.eval()(x[..., :16, :].repeat(1, 1, 1, 2)))
    with pytest.raises(ValueError, match="rel_pos='cubic' is not a relative position encoding: use table, "):
        timm.create_model(name, rel_pos='cubic')


@pytest.mark.parametrize(('name', 'rel_pos'), [(name, each) for name in (ATTN, PIXEL) for each in encodings_of(name)])
def test_weights_of_every_encoding_load_at_another_size(name, rel_pos, tmp_path):
    source = timm.create_model(name, rel_pos=rel_pos, img_size=(24, 16), depth=1)
    torch.save(source.state_dict(), tmp_path / 'weights.pth')
    overlay = dict(file=str(tmp_path / 'weights.pth'), input_size=(3, 24, 16))
    model = timm.create_model(
        name, rel_pos=rel_pos, img_size=(16, 32), depth=1, pretrained=True, pretrained_cfg_overlay=overlay)
    source.set_input_size((16, 32))
    for expected, actual in zip(source.state_dict().values(), model.state_dict().values()):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize('name', [ATTN, PIXEL])
def test_blocks_can_differ_in_their_heads(name, tmp_path):
    model, x = timm.create_model(name, num_heads=[1, 3, 2, 1]), images()
    assert [block.attn.num_heads for block in model.blocks] == [1, 3, 2, 1] == model.model_args()['num_heads']
    save_for_hub(model, tmp_path / 'model')
    loaded = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)
    torch.testing.assert_close(loaded.eval()(x), model.eval()(x))
    with pytest.raises(ValueError, match=r'num_heads=\[1, 3\] has 2 numbers for depth=4 blocks: give one for each'):
        timm.create_model(name, num_heads=[1, 3])


def test_even_kernels_are_refused():
    with pytest.raises(ValueError, match='use an odd size such as 3 or 5'):
        timm.create_model(CONV, kernel_size=4)


@pytest.mark.parametrize('name', TINY)
def test_dropout_rates_reach_their_layers(name):
    rates = dict(drop_rate=0.1, proj_drop_rate=0.2, drop_path_rate=0.4)
    model = timm.create_model(name, attn_drop_rate=0.3, **rates)
    assert model.head_drop.p == 0.1
    assert model.blocks[0].attn.proj_drop.p == model.blocks[0].mlp.drop1.p == 0.2
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.4)
    if name != CONV:
        assert model.blocks[0].attn.attn_drop.p == 0.3
    x = images()
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize('name', TINY)
def test_features(name):
    model, x = timm.create_model(name).eval(), images()
    final, intermediates = model.forward_intermediates(x)
    assert [tuple(y.shape) for y in intermediates] == [(2, 48, 8, 8)] * 4
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(model.forward_head(final), model(x))
    backbone = timm.create_model(name, features_only=True, out_indices=(1, 3))
    assert [tuple(y.shape) for y in backbone(x)] == [(2, 48, 8, 8)] * 2
    assert backbone.feature_info.reduction() == [4, 4]


@pytest.mark.parametrize('name', TINY)
def test_classifier(name):
    model = timm.create_model(name, num_classes=5)
    assert model.get_classifier().out_features == 5
    model.reset_classifier(3)
    assert model(images()).shape == (2, 3)
    model.reset_classifier(0, '')
    assert model(images()).shape == (2, 64, 48)


@pytest.mark.parametrize('name', TINY)
def test_grad_checkpointing_changes_nothing(name):
    model, x = timm.create_model(name), images()
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(x).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize('name', TINY)
def test_layer_decay_groups_follow_the_depth(name):
    model = timm.create_model(name)
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    for parameter, layer in groups.items():
        if match := re.match(r'blocks\.(\d+)\.', parameter):
            assert layer - int(match[1]) == groups['blocks.0.norm1.weight']
    assert groups['head.weight'] == max(groups.values())
    optimizer = create_optimizer_v2(model, 'adamw', lr=1., layer_decay=0.5)
    scales = {id(p): group['lr_scale'] for group in optimizer.param_groups for p in group['params']}
    parameters = dict(model.named_parameters())
    assert scales[id(parameters['head.weight'])] == 1
    assert scales[id(parameters['blocks.0.norm1.weight'])] == 0.5 * scales[id(parameters['blocks.1.norm1.weight'])]


def test_biases_of_the_attention_pattern_are_not_decayed():
    model = timm.create_model(ATTN)
    optimizer = create_optimizer_v2(model, 'adamw', lr=1., weight_decay=0.1)
    decay = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    for name, parameter in model.named_parameters():
        decayed = name.endswith('.weight') and 'norm' not in name
        assert decay[id(parameter)] == (0.1 if decayed else 0.), name
    assert timm.create_model(CONV).no_weight_decay() == set()


@pytest.mark.parametrize('img_size', [(32, 48), 16, (20, 28)])
def test_set_input_size_keeps_the_function(img_size):
    """The rewrite of a convolution stays its rewrite at every resolution: offsets keep their meaning."""
    conv_model, attn_model = timm.create_model(CONV).eval(), timm.create_model(ATTN).eval()
    for conv_block, attn_block in zip(conv_model.blocks, attn_model.blocks):
        attn_block.attn.load_state_dict(conv2d_to_attention(conv_block.attn.conv, 4, 8).state_dict())
    for model in (conv_model, attn_model):
        model.set_input_size(img_size)
    x = images(3, *(img_size if isinstance(img_size, tuple) else (img_size, img_size)))
    for conv_block, attn_block in zip(conv_model.blocks, attn_model.blocks):
        tokens = torch.randn_like(conv_model.patch_embed(x))
        torch.testing.assert_close(attn_block.attn(tokens), conv_block.attn(tokens), atol=1e-5, rtol=1e-5)
    assert attn_model(x).shape == (2, 1000)


@pytest.mark.parametrize('name', TINY)
def test_set_input_size_refuses_what_cannot_be(name):
    model = timm.create_model(name)
    with pytest.raises(ValueError, match='not divisible'):
        model.set_input_size(30)
    with pytest.raises(ValueError, match='would change the width of a token'):
        model.set_input_size(patch_size=8)
    assert model(images()).shape == (2, 1000)
    for size in (48., (32, 48.), (32, 32, 32), '32', float('nan')):
        with pytest.raises(ValueError, match='one or two whole numbers'):
            model.set_input_size(size)
    model.set_input_size(patch_size=4)
    model.set_input_size()
    assert model(images()).shape == (2, 1000)


@pytest.mark.parametrize('rel_pos', ENCODINGS)
def test_a_size_that_memory_does_not_hold_leaves_the_model_as_it_was(rel_pos):
    model = timm.create_model(ATTN if rel_pos == 'padded_table' else PIXEL, rel_pos=rel_pos, depth=2).eval()
    model.blocks[0].attn = PatchConv2d(48, 4, 8)  # which any grid suits
    expected, x = model(x := images()), x
    with pytest.raises(RuntimeError, match=r'memory|overflow|too large'):
        model.set_input_size(2 ** (25 if rel_pos.startswith('quadratic') or rel_pos.endswith('table') else 48))
    assert torch.equal(model(x), expected)


def test_a_size_that_one_layer_refuses_leaves_the_model_as_it_was():
    model, x = timm.create_model(ATTN, rel_pos='padded_table', depth=2).eval(), images()
    for parameter in model.blocks[0].attn.rel_pos.parameters():
        nn.init.normal_(parameter)
    point_at_nearest(model.blocks[1].attn.rel_pos)
    nn.init.zeros_(model.blocks[1].attn.qkv.weight)
    fuse_shifts(model.blocks[1])
    expected, parameters = model(x), list(model.parameters())
    with pytest.raises(ValueError, match='reparameterized'):
        model.set_input_size(16)
    assert torch.equal(model(x), expected)
    assert all(new is old for new, old in zip(model.parameters(), parameters))
    assert model.patch_embed.img_size == (32, 32)


@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize(('name', 'kwargs', 'form'), [
    (CONV, {}, {}), (ATTN, {}, dict(absorb=True)), (ATTN, {}, dict(chunk_size=5)), (PIXEL, {}, {}),
    *((name, dict(rel_pos=rel_pos), {}) for name in (ATTN, PIXEL) for rel_pos in ('quadratic_gen', 'learned_content'))])
def test_a_batch_of_no_images(name, kwargs, form, fused):
    set_fused_attn(fused)
    model = timm.create_model(name, depth=1, **kwargs)
    vars(model.blocks[0].attn).update(form)
    model(images(batch=0)).sum().backward()
    for eval_model in (model.eval(), reparameterize_model(model)):
        assert eval_model(images(batch=0)).shape == (0, 1000)


def test_pretrained_weights_adapt_to_channels_classes_and_size(tmp_path):
    source = timm.create_model(ATTN, num_classes=5)
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.1)
    path = tmp_path / 'weights.pth'
    torch.save(source.state_dict(), path)
    kwargs = dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(path), num_classes=5))
    same = timm.create_model(ATTN, num_classes=5, **kwargs)
    x = images()
    torch.testing.assert_close(same.eval()(x), source.eval()(x))

    gray = timm.create_model(ATTN, num_classes=5, in_chans=1, **kwargs).eval()
    torch.testing.assert_close(gray(x[:, :1]), source(x[:, :1].expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-4)
    assert timm.create_model(ATTN, num_classes=3, **kwargs).head.weight.shape == (3, 48)

    wide = timm.create_model(ATTN, num_classes=5, img_size=(32, 64), **kwargs)
    source.set_input_size((32, 64))
    for expected, actual in zip(source.blocks, wide.blocks):
        assert torch.equal(
            expected.attn.rel_pos.relative_position_bias_table, actual.attn.rel_pos.relative_position_bias_table)


def test_weights_of_any_image_size_load_at_any_image_size(tmp_path):
    """A file does not say what size it is for: the tables' own length must do."""
    for source_size, size in ((48, 48), (48, 64), ((32, 48), (32, 48)), (32, 32), (32, (16, 48))):
        source = timm.create_model(ATTN, img_size=source_size, depth=1)
        torch.save(source.state_dict(), tmp_path / 'weights.pth')
        model = timm.create_model(
            ATTN, img_size=size, depth=1, pretrained=True,
            pretrained_cfg_overlay=dict(file=str(tmp_path / 'weights.pth')))
        source.set_input_size(size)
        for expected, actual in zip(source.state_dict().values(), model.state_dict().values()):
            assert torch.equal(expected, actual)


@pytest.mark.parametrize('name', TINY)
def test_the_configuration_gives_the_size(name):
    model = timm.create_model(name, pretrained_cfg_overlay=dict(input_size=(3, 64, 48)))
    assert model.patch_embed.img_size == (64, 48)


def test_other_channels_than_phase_1_was_trained_on_are_told(tmp_path, caplog):
    torch.save(timm.create_model(CONV, num_classes=3).state_dict(), tmp_path / 'weights.pth')
    overlay = dict(file=str(tmp_path / 'weights.pth'), num_classes=3)
    args = dict(num_classes=3, pretrained=True, pretrained_cfg_overlay=overlay, hidden_chans=3)
    timm.create_model(CONV, **args)
    assert 'in_chans' not in caplog.text
    timm.create_model(CONV, **args, in_chans=1)
    assert 'in_chans=1, but the weights are of a configuration with 3 channels' in caplog.text


@pytest.mark.parametrize('name', TINY)
def test_saved_after_changes_and_loaded_back(name, tmp_path):
    model, x = timm.create_model(name), images(3, 16, 48)
    model.set_input_size((16, 48))
    model.reset_classifier(5, 'max')
    save_for_hf(model, str(tmp_path), safe_serialization=True, model_args=dict(img_size=(16, 48), global_pool='max'))
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True)
    torch.testing.assert_close(loaded.eval()(x), model.eval()(x))


@pytest.mark.parametrize('method', ['fx', 'hook'])
def test_attention_maps(method):
    set_fused_attn(False)
    model = timm.create_model(ATTN)
    maps = AttentionExtract(model, method=method)(images())
    assert len(maps) == 4
    for attention in maps.values():
        assert attention.shape == (2, 9, 64, 65)
        torch.testing.assert_close(attention.sum(dim=-1), torch.ones(2, 9, 64))


@pytest.mark.parametrize('name', TINY)
def test_models_are_picklable_and_copyable(name, tmp_path):
    model, x = timm.create_model(name).eval(), images()
    torch.save(model, tmp_path / 'model.pt')
    loaded = torch.load(tmp_path / 'model.pt', weights_only=False)
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert all(isinstance(block, Block) for block in model.blocks)


def test_phase_1_sees_the_whole_image():
    """A pixel's influence crosses patch borders by K // 2 pixels per block."""
    mixer = timm.create_model(CONV).blocks[0].attn
    image = torch.zeros(1, 3, 32, 32)
    image[..., 15, 15] = 1
    changed = unpatchify(mixer(patchify(image, 4)) - mixer(patchify(torch.zeros_like(image), 4)), 4, 8)
    rows, cols = changed.abs().sum(dim=(0, 1)).nonzero(as_tuple=True)
    assert (rows.min(), rows.max(), cols.min(), cols.max()) == (14, 16, 14, 16)
