import math

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from timm_cmhsa.pixel import prune_degenerate_heads
from timm_cmhsa.pixel.encodings import GeneralQuadraticRelPos, degenerate_heads


def rotated(smallest, largest, angle=0.4):
    """A square root of an inverse covariance with these eigenvalues."""
    c, s = math.cos(angle), math.sin(angle)
    rotation = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    return rotation @ torch.diag(torch.tensor([smallest, largest], dtype=torch.float64).sqrt())


@pytest.mark.parametrize(('smallest', 'largest', 'degenerate'), [
    (1., 1., False), (1e-6, 0.9e-5, True), (1e-6, 1.1e-5, False), (0., 0., True), (1e-5, 0.9, False),
    (1e-5, 1.1, True), (0., 1., True), (50., 90., False),
])
def test_criterion_is_appendix_es(smallest, largest, degenerate):
    rel_pos = GeneralQuadraticRelPos((4, 4), 3, dtype=torch.float64)
    with torch.no_grad():
        rel_pos.inv_std[1] = rotated(smallest, largest)
    assert degenerate_heads(rel_pos) == ([1] if degenerate else [])


def create(num_heads=4):
    return timm.create_model('test_pixel_attn', rel_pos='quadratic_gen', num_heads=num_heads).eval()


def test_a_pruned_model_is_a_smaller_model_that_loads_and_has_gradients(tmp_path):
    model, full, x = create(), create(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        model.blocks[0].attn.rel_pos.inv_std[[0, 2]] = rotated(1e-7, 1e-6).float()
        model.blocks[3].attn.rel_pos.inv_std[1] = rotated(1e-7, 3.).float()
    full.load_state_dict(model.state_dict())
    assert prune_degenerate_heads(nn.DataParallel(model)) == {
        'blocks.0.attn': [0, 2], 'blocks.1.attn': [], 'blocks.2.attn': [], 'blocks.3.attn': [1]}
    with torch.no_grad():  # the other heads contribute as before
        for block, heads in ((full.blocks[0], [0, 2]), (full.blocks[3], [1])):
            block.attn.value.weight.view(48, 4, 48)[:, heads] = 0
    torch.testing.assert_close(model(x), full(x))

    args = model.model_args()
    assert args['num_heads'] == [2, 4, 4, 3]
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in full.parameters())
    loaded = timm.create_model('test_pixel_attn', **args).eval()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(x), model(x))
    if hasattr(timm.models, 'get_model_args'):  # a timm that remembers arguments
        save_for_hf(model, tmp_path)
        assert torch.equal(timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()(x), model(x))
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_layers_can_lose_all_heads_or_have_none():
    model, x = create([3, 3, 0, 3]).requires_grad_(False), torch.randn(2, 3, 32, 32)
    nn.init.zeros_(model.blocks[1].attn.rel_pos.inv_std)
    assert prune_degenerate_heads(model)['blocks.1.attn'] == [0, 1, 2]
    assert model.model_args()['num_heads'] == [3, 0, 0, 3]
    assert not any(parameter.requires_grad for parameter in model.parameters()), 'what was frozen stays so'
    expected = model(x)
    assert not any(prune_degenerate_heads(model).values())  # with nothing left to prune
    torch.testing.assert_close(model(x), expected)
    for block in model.blocks[1:3]:
        attn = block.attn
        torch.testing.assert_close(attn(torch.randn(2, 64, 48)), attn.proj(attn.value.bias).expand(2, 64, 48))


@pytest.mark.parametrize('name', ['test_pixel_attn', 'test_cmhsa_attn'])
def test_models_without_the_encoding_are_refused(name):
    with pytest.raises(ValueError, match="no layer with rel_pos='quadratic_gen'"):
        prune_degenerate_heads(timm.create_model(name))
