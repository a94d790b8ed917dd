import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from timm_cmhsa import prune_degenerate_heads
from timm_cmhsa.attention import RelPosAttention
from timm_cmhsa.encodings import ENCODINGS, GeneralQuadraticRelPos
from timm_cmhsa.pruning import degenerate_heads


def rotated(smallest, largest, angle=0.4):
    """A square root of an inverse covariance with these eigenvalues."""
    c, s = torch.cos(torch.tensor(angle)).item(), torch.sin(torch.tensor(angle)).item()
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


def degenerate_model(name, **kwargs):
    model = timm.create_model(name, rel_pos='quadratic_gen', **kwargs).eval()
    with torch.no_grad():
        model.blocks[0].attn.rel_pos.inv_std[[0, 2]] = rotated(1e-7, 1e-6).float()
        model.blocks[3].attn.rel_pos.inv_std[1] = rotated(1e-7, 3.).float()
    return model


@pytest.mark.parametrize('name', ['test_pixel_attn', 'test_cmhsa_attn'])
def test_pruned_model_is_a_smaller_model_that_loads_and_trains(name):
    model, x = degenerate_model(name, num_heads=4), torch.randn(2, 3, 32, 32)
    full = degenerate_model(name, num_heads=4)
    full.load_state_dict(model.state_dict())
    assert prune_degenerate_heads(model) == {
        'blocks.0.attn': [0, 2], 'blocks.1.attn': [], 'blocks.2.attn': [], 'blocks.3.attn': [1]}
    with torch.no_grad():  # the others compute what they did: the pruned ones no longer contribute
        for block, heads in ((full.blocks[0], [0, 2]), (full.blocks[3], [1])):
            out = block.attn.value if name == 'test_pixel_attn' else block.attn.proj
            out.weight.view(len(out.weight), 4, -1)[:, heads] = 0
    torch.testing.assert_close(model(x), full(x))

    args = model.model_args()
    assert args['num_heads'] == [2, 4, 4, 3]
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in full.parameters())
    loaded = timm.create_model(name, **args).eval()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(x), model(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(x), torch.tensor([1, 2]))
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize('name', ['test_pixel_attn', 'test_cmhsa_attn'])
def test_pruning_leaves_frozen_what_is_frozen(name):
    model = degenerate_model(name, num_heads=4).requires_grad_(False)
    prune_degenerate_heads(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_a_wrapped_model_is_pruned_as_a_whole():
    model = degenerate_model('test_pixel_attn', num_heads=4)
    prune_degenerate_heads(nn.DataParallel(model))
    assert model.model_args()['num_heads'] == [2, 4, 4, 3]
    if hasattr(model, '_model_args'):
        assert model._model_args['num_heads'] == [2, 4, 4, 3]


def test_pruned_models_are_shifts_as_before_and_known_to_timm(tmp_path):
    model = timm.create_model('test_cmhsa_attn', rel_pos='quadratic_gen', num_heads=4, num_classes=3, hard_attn=True)
    prune_degenerate_heads(model)
    assert all(block.attn.can_shift() for block in model.blocks)
    assert model.hard_attn
    model = degenerate_model('test_cmhsa_attn', num_heads=4, num_classes=3)
    prune_degenerate_heads(model)
    if hasattr(timm.models, 'get_model_args'):  # a timm that notes arguments
        save_for_hf(model, tmp_path)
        loaded, x = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval(), torch.randn(2, 3, 32, 32)
        assert torch.equal(loaded(x), model(x))


def test_layer_of_a_pixel_model_can_lose_all_heads():
    model, x = timm.create_model('test_pixel_attn', rel_pos='quadratic_gen').eval(), torch.randn(2, 3, 32, 32)
    nn.init.zeros_(model.blocks[1].attn.rel_pos.inv_std)
    prune_degenerate_heads(model)
    assert model.model_args()['num_heads'] == [9, 0, 9, 9]
    attn = model.blocks[1].attn
    torch.testing.assert_close(attn(torch.randn(2, 64, 48)), attn.proj(attn.value.bias).expand(2, 64, 48))
    assert model(x).shape == (2, 1000)


def test_what_cannot_be_pruned_is_told_and_left_as_it_was():
    with pytest.raises(ValueError, match="CmhsaAttn has no layer with rel_pos='quadratic_gen'"):
        prune_degenerate_heads(timm.create_model('test_cmhsa_attn', rel_pos='quadratic'))
    model = degenerate_model('test_cmhsa_attn', num_heads=4)
    nn.init.zeros_(model.blocks[1].attn.rel_pos.inv_std)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r'All 4 heads of blocks\.1\.attn are degenerate'):
        prune_degenerate_heads(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize('rel_pos', ENCODINGS)
def test_a_layer_without_a_head_is_one_whose_head_adds_nothing(rel_pos):
    attn = RelPosAttention(12, (3, 3), num_heads=4, head_dim=6, rel_pos=rel_pos).double()
    for parameter in attn.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    attn.proj.weight.data[:, 6:12] = 0
    expected = attn.eval()(x)
    attn.keep_heads([0, 2, 3])
    assert attn.num_heads == attn.rel_pos.num_heads == 3
    torch.testing.assert_close(attn(x), expected)
