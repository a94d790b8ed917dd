"""Stock ViTs of timm that start as a convolution."""
import copy

import pytest
import timm
import torch
from helpers import assert_equal, write_photos
from timm.layers import RmsNorm, SwiGLU
from timm.utils import random_seed

from timm_cmhsa import attention_maps, head_statistics, start_as_convolution
from timm_cmhsa.images import data_config
from timm_cmhsa.start import basis, position_code
from timm_cmhsa.train import train_two_phases


def small(name='vit_tiny_patch16_224', **kwargs):
    """Return the arguments of a small model."""
    return dict(dict(model_name=name, img_size=32, patch_size=4, depth=3, num_classes=10), **kwargs)


VIT, TINY = 'vit_tiny_patch16_224', small()
VITS = {
    'class token': TINY, 'average': small(class_token=False, global_pool='avg'),
    'registers': small(reg_tokens=4, no_embed_class=True), 'distilled': small('deit_tiny_distilled_patch16_224'),
    'not square': small(img_size=(24, 48)), 'many patches': small(img_size=(12, 160)),
    'layer scale': small(init_values=1e-5), 'norm before': small(pre_norm=True), 'gray': small(in_chans=1),
    'no biases': small(qkv_bias=False, proj_bias=False), 'any size': small(dynamic_img_size=True),
    'gated MLP, RMS norm': small(mlp_layer=SwiGLU, norm_layer=RmsNorm),
    'norm of patches': small(embed_norm_layer='layernorm'),
    'after a CNN': dict(model_name='vit_tiny_r_s16_p8_224', depth=3, num_classes=10, img_size=64),
}


def create(case, seed=0):
    random_seed(seed)
    return timm.create_model(**case).eval()


def noise(model, count=4):
    return torch.randn(count, *data_config(model)['input_size'], generator=torch.Generator().manual_seed(9))


def statistics(model, images=None):
    maps = attention_maps(model, noise(model) if images is None else images)
    return {name: head_statistics(each) for name, each in maps.items()}


def peaks(layers):
    """Return the mean weight of the best offsets, of every layer."""
    return [sum(head.best_weight for head in layer) / len(layer) for layer in layers.values()]


@pytest.mark.parametrize('case', VITS.values(), ids=VITS)
@pytest.mark.parametrize('peak', [0.5, 0.9])
def test_heads_look_at_dealt_offsets(case, peak):
    model = start_as_convolution(create(case), peak=peak)
    layers = statistics(model)
    heads = [head for layer in layers.values() for head in layer]
    assert len(layers) == 3
    assert len(heads) == 9
    assert len({head.best_offset for head in heads}) == 9  # each of 3 x 3 once
    assert all(max(map(abs, head.best_offset)) <= 1 for head in heads)
    assert peaks(layers) == pytest.approx([peak] * 3, abs=0.06)


@pytest.mark.parametrize('peak', [0.5, 0.99])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_the_peak_is_that_on_images_whose_patches_differ_in_contrast(peak, dtype):
    contrast = torch.rand(8, 1, 8, 1, 8, 1, generator=torch.Generator().manual_seed(0))
    images = (3 * contrast * noise(create(TINY), 8).view(8, 3, 8, 4, 8, 4)).view(8, 3, 32, 32).to(dtype)
    model = start_as_convolution(create(TINY).to(dtype), images, peak=peak)
    assert peaks(statistics(model, images)) == pytest.approx([peak] * 3, abs=0.02)


def test_the_code_is_long_enough_for_deep_models():
    model, contrast = create(small(depth=12)), torch.linspace(0.1, 3, 8).view(8, 1, 1, 1)
    images = contrast * noise(model, 8)
    start_as_convolution(model, images, peak=0.99)
    assert peaks(statistics(model, images)) == pytest.approx([0.99] * 12, abs=0.02)
    for tokens in model.forward_intermediates(images, intermediates_only=True, norm=False):
        code, content = (part.square().sum(dim=1).mean().sqrt() for part in (tokens[:, :33], tokens[:, 35:]))
        assert code > 1.5 * content


def test_no_head_looks_at_the_opposite_border():
    """A grid of 32 patches would have the period of 8 frequencies."""
    model = start_as_convolution(create(small(img_size=(12, 128))))
    for maps in attention_maps(model, noise(model, 1)).values():
        for head, weights in zip(head_statistics(maps), maps.weights[0].view(3, 3, 32, 3, 32)):
            if head.best_offset[1] != 0:
                border, opposite = (0, -1) if head.best_offset[1] < 0 else (-1, 0)
                assert weights[:, border, :, opposite].sum(dim=-1).max() < 0.1


@pytest.mark.parametrize('name', ['class token', 'average', 'distilled', 'gated MLP, RMS norm', 'norm of patches'])
def test_the_code_survives_whatever_the_image(name):
    model = start_as_convolution(create(VITS[name]))
    first, second = model.forward_intermediates(noise(model, 2), intermediates_only=True)[-1]
    same = (first == second).flatten(1).all(dim=1)
    assert same[:33].all()
    assert same.sum() < 40
    code = first[:33].flatten(1).t() @ basis(32).t()
    torch.testing.assert_close(code / code.norm(dim=1, keepdim=True), position_code((8, 8), 8) / 4)


def test_nothing_but_queries_and_keys_reads_the_code():
    """Of an image of equal patches, attention then returns the same everywhere."""
    model = start_as_convolution(create(VITS['average']))
    with torch.no_grad():
        model.pos_embed[..., 33:] = 0
        tokens = model.forward_features(noise(model, 1)[..., :4, :4].repeat(1, 1, 8, 8))
        assert not model.forward_head(tokens, pre_logits=True)[:, :33].any()
    tokens = tokens[0, :, 33:]
    assert (tokens - tokens.mean(dim=0)).abs().max() < 0.05 * tokens.abs().max()


@pytest.mark.parametrize('case', [TINY, VITS['gated MLP, RMS norm']], ids=['layer norm', 'RMS norm'])
def test_content_is_as_long_as_without_a_code(case):
    model, seen = start_as_convolution(create(case), noise(create(case), 8)), []
    for norm in (model.norm, *(norm for block in model.blocks for norm in (block.norm1, block.norm2))):
        norm.register_forward_hook(lambda *args: seen.append(args[-1]))
    model(noise(model, 8))
    for tokens in seen:
        assert tokens[..., 35:].square().mean().sqrt().item() == pytest.approx(1, abs=0.05)
    assert len(seen) == 7


def test_values_are_near_a_negative_identity():
    products = []
    for seed in range(2):
        attn = start_as_convolution(create(TINY), seed=seed).blocks[1].attn
        products.append((attn.proj.weight @ attn.qkv.weight[-192:])[35:, 35:].t())
    for product in products:
        assert product.diagonal().mean().item() == pytest.approx(-0.4, abs=0.02)
        assert (product + 0.4 * torch.eye(157)).std().item() == pytest.approx(0.4 / 192 ** 0.5, rel=0.05)
    assert not products[0].allclose(products[1], atol=0.05)


@pytest.mark.parametrize('case', [VITS[name] for name in ('class token', 'registers', 'distilled', 'no biases')])
def test_class_tokens_look_evenly_and_serve_the_border(case):
    model = start_as_convolution(create(case))
    layer, seen = model.blocks[1].attn, []
    layer.fused_attn = False
    layer.attn_drop.register_forward_hook(lambda *args: seen.append(args[-1]))
    model(noise(model))
    prefix = model.num_prefix_tokens
    assert seen[0][:, :, :prefix].max() < 0.05  # of 65 to 69 tokens
    name, heads = list(statistics(model).items())[1]
    zero_key = attention_maps(model, noise(model))[name].zero_key.mean(dim=0)
    for head, weights in zip(heads, zero_key.view(3, 8, 8)):
        row, col = head.best_offset
        outside = torch.zeros(8, 8, dtype=bool)
        outside[:1, :], outside[-1:, :] = outside[:1, :] | (row < 0), outside[-1:, :] | (row > 0)
        outside[:, :1], outside[:, -1:] = outside[:, :1] | (col < 0), outside[:, -1:] | (col > 0)
        if outside.any():
            assert weights[outside].mean() > 3 * weights[~outside].mean()


@pytest.mark.parametrize('case', VITS.values(), ids=VITS)
def test_everything_learns(case):
    model = start_as_convolution(create(case)).train()
    logits = model(noise(model))
    (logits if torch.is_tensor(logits) else torch.stack(logits)).logsumexp(dim=-1).sum().backward()  # two if distilled
    for name, parameter in model.named_parameters():
        assert parameter.grad.any(), name


@pytest.mark.parametrize('case', [TINY, VITS['average']], ids=['class token', 'average'])
def test_again_after_a_change_of_the_size(case):
    model, expected = create(case), create(case)
    start_as_convolution(model)
    for each in model, expected:
        each.set_input_size(img_size=(40, 56))
        start_as_convolution(each)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


def assert_refused(model, message, **options):
    """In one line, and the model stays as it was."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message) as error:
        start_as_convolution(model, **options)
    assert '\n' not in str(error.value)
    assert_equal(before, model.state_dict())


@pytest.mark.parametrize(('name', 'kwargs', 'options', 'message'), [
    ('resnet18', {}, {}, 'ResNet cannot be started as a convolution: it needs to be'),
    ('test_cmhsa_attn', {}, {}, "it needs timm's Block"), ('vit_small_patch16_18x2_224', {}, {}, "timm's Block"),
    (VIT, dict(qk_norm=True), {}, 'qk_norm=False'), (VIT, dict(pos_embed='none'), {}, "pos_embed='learn'"),
    ('vit_base_mci_224', {}, {}, 'a projection of'),
    (VIT, dict(num_heads=24), {}, 'Heads of 8 dimensions'),
    (VIT, dict(dynamic_img_pad=True), {}, 'dynamic_img_pad=False'), (VIT, {}, dict(peak=1.), 'must be below 1'),
    (VIT, {}, dict(peak=0.004), 'above that of even attention'), (VIT, {}, dict(kernel_size=4), 'odd'),
    (VIT, {}, dict(kernel_size=29), 'below 28'),
])
def test_what_cannot_be_pointed(name, kwargs, options, message):
    depth = {} if name == 'resnet18' else {'depth': 1}
    assert_refused(timm.create_model(name, **depth, **kwargs), message, **options)


@pytest.mark.parametrize(('images', 'message'), [
    *((torch.randn(shape), r'where \(B, 3, 32, 32\) is needed') for shape in (
        (2, 3, 48, 48), (2, 1, 32, 32), (3, 32, 32), (0, 3, 32, 32))),
    (torch.full((2, 3, 32, 32), float('nan')), 'weight of nan'),
    ('nowhere', 'nowhere'),
])
def test_images_that_do_not_fit(images, message):
    assert_refused(create(VITS['any size']), message, images=images)


def test_maps_of_images_of_another_size():
    for size in (40, 40), (16, 64):
        with pytest.raises(ValueError, match='set_input_size'):
            attention_maps(create(VITS['any size']), torch.randn(1, 3, *size))


def test_a_shorter_code_needs_a_new_model():
    model = start_as_convolution(create(VITS['many patches']))
    model.set_input_size(img_size=(32, 32))
    assert_refused(model, 'create it anew')


def test_trainer_starts_as_a_convolution(tmp_path):
    write_photos(tmp_path / 'images', 8)
    train_two_phases(
        tmp_path / 'images', output=tmp_path, model=VIT, model_kwargs=dict(depth=3, patch_size=4),
        start='convolution', switch=1., epochs=1, img_size=32, lr=1e-9)
    model = create(small(num_classes=2))
    model.load_state_dict(torch.load(tmp_path / 'checkpoints/phase1.pth.tar')['state_dict'])
    heads = [head for layer in statistics(model).values() for head in layer]
    assert len({head.best_offset for head in heads}) == 9
    assert min(head.best_weight for head in heads) > 0.3, 'and even attention has 0.02'
    assert (tmp_path / 'attention.png').exists()
    assert_equal(model.state_dict(), timm.create_model(f'local-dir:{tmp_path}/model', pretrained=True).state_dict())
