"""Hard heads computed as shifts, for training and for inference."""
import copy
import itertools

import pytest
import timm
import torch
from helpers import images_for, make_hard, max_error, phase1, train
from hypothesis import given, strategies as st
from timm.layers import set_fused_attn
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.utils import reparameterize_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import timm_cmhsa
from timm_cmhsa import conv2d_to_attention, patchify
from timm_cmhsa.attention import RelPosAttention
from timm_cmhsa.checkpoint import Checkpoint
from timm_cmhsa.shifts import hard_offsets, shift_tokens

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
pairs = st.tuples(*[st.integers(1, 4)] * 2)
both_tables = pytest.mark.parametrize('rel_pos', ['table', 'padded_table'])


def converted(**kwargs):
    """A phase-2 model in eval mode, just rewritten."""
    return timm_cmhsa.convert_model(phase1(depth=2, num_classes=5), **kwargs)


def train_a_little(model):
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    train(model.train(), images, torch.arange(4), 3, lr=1e-3)
    return model.eval()


@given(grid=pairs, row=st.integers(-5, 5), col=st.integers(-5, 5))
def test_tokens_come_from_the_offset_and_zeros_from_outside(grid, row, col):
    x = torch.randn(2, grid[0] * grid[1], 3)
    shifted = shift_tokens(x, (row, col), grid)
    for i, (y, z) in enumerate(itertools.product(*map(range, grid))):
        inside = 0 <= y + row < grid[0] and 0 <= z + col < grid[1]
        expected = x[:, (y + row) * grid[1] + z + col] if inside else torch.zeros(2, 3)
        assert torch.equal(shifted[:, i], expected)


@both_tables
@given(
    kernel=st.sampled_from([1, 3, 5]), stride=st.sampled_from([1, 2]), dilation=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2]), bias=st.booleans(), grid=pairs, head_dim=st.sampled_from([None, 3]),
    scale=st.sampled_from([1, 1, 0]), seed=st.integers(0, 100))
def test_the_rewrite_of_a_convolution_is_all_hard(
        rel_pos, kernel, stride, dilation, groups, bias, grid, head_dim, scale, seed):
    torch.manual_seed(seed)
    conv = nn.Conv2d(2, 4, kernel, stride, dilation * (kernel - 1) // 2, dilation, groups, bias).double()
    conv.weight.data *= scale  # heads of a convolution of zeros are not used
    attn = conv2d_to_attention(conv, 2, grid, head_dim=head_dim, rel_pos=rel_pos).eval()
    images = torch.randn(2, 2, 2 * grid[0], 2 * grid[1]).double()
    expected = patchify(conv(images), 2 // stride)
    attn.set_hard_attn()
    torch.testing.assert_close(attn(patchify(images, 2)), expected, atol=1e-12, rtol=0)


@st.composite
def layers(draw):
    """A layer with heads from hard to soft, and queries of zero."""
    torch.manual_seed(draw(st.integers(0, 10 ** 6)))
    attn = RelPosAttention(
        4, draw(pairs), num_heads=3, head_dim=2, qkv_bias=draw(st.booleans()), dtype=torch.float64,
        rel_pos=draw(st.sampled_from(['table', 'padded_table']))).eval().requires_grad_(False)
    for parameter in attn.parameters():
        nn.init.normal_(parameter)
    for parameter in attn.qkv.parameters():
        parameter[:attn.widths[0]] = 0
    for head in range(3):
        offset = draw(st.integers(-2, 2)), draw(st.integers(-2, 2))
        attn.rel_pos.point_head(head, [offset], draw(st.sampled_from([2., 20., 40., 400., 9000.])))
    attn.rel_pos.zero_key_bias += torch.tensor(draw(st.lists(st.sampled_from([0., 3., -9.]), min_size=3, max_size=3)))
    attn.rel_pos.relative_position_bias_table += draw(st.sampled_from([0., 1e-3, 0.1])) * torch.randn_like(
        attn.rel_pos.relative_position_bias_table)
    return attn


@given(layers())
def test_a_hard_head_gives_its_offset_all_but_a_ten_thousandth(attn):
    weights = attn.rel_pos.get_bias().softmax(dim=-1)[0].unflatten(1, attn.grid_size)
    height, width = attn.grid_size
    for head, offset in enumerate(hard_offsets(attn)):
        for y, z in itertools.product(range(height), range(width)) if offset is not None else ():
            row, col = y + offset[0], z + offset[1]
            key = row * width + col if 0 <= row < height and 0 <= col < width else -1
            assert weights[head, y, z, key] >= 1 - 1.01e-4


@both_tables
def test_queries_or_a_second_offset_make_a_head_soft(rel_pos):
    attn = conv2d_to_attention(nn.Conv2d(2, 2, 3, padding=1), 4, 3, rel_pos=rel_pos).requires_grad_(False)
    offsets = hard_offsets(attn)
    assert set(offsets) == set(itertools.product((-1, 0, 1), repeat=2))
    with torch.device('meta'):  # as in a benchmark that creates everything on the GPU
        assert hard_offsets(attn) == offsets
    without_head_2 = [*offsets[:2], None, *offsets[3:]]
    for parameter in attn.qkv.parameters():
        parameter[2 * attn.qk_dim] = 1e-3
        assert hard_offsets(attn) == without_head_2
        parameter[2 * attn.qk_dim] = 0
    table = attn.rel_pos.relative_position_bias_table
    table[table[:, 2].argmin(), 2] = table[:, 2].max()
    assert hard_offsets(attn) == without_head_2


@both_tables
@pytest.mark.parametrize('kwargs', [dict(), dict(num_heads=12), dict(num_heads=11, head_dim=30), dict(qk_dim=5)])
def test_training_has_the_same_output_and_gradients(rel_pos, kwargs):
    """Only queries, keys and spare heads, whose output projection is zero, get zero gradients, as DDP needs some."""
    attn = conv2d_to_attention(nn.Conv2d(3, 3, 3, padding=1).double(), 4, (3, 4), rel_pos=rel_pos, **kwargs)
    hard = copy.deepcopy(attn)
    hard.set_hard_attn()
    x, weights = torch.randn(2, 2, 12, 48).double()
    results = []
    for form in (attn, hard):
        form.train()
        y = form(x)
        (y * weights).sum().backward()
        value = form.qkv.weight.grad[sum(form.widths[:2]):]
        used = form.proj.weight.grad.unflatten(1, (form.num_heads, -1))[:, form.used_heads()]
        results.append((y, value, form.qkv.bias.grad[sum(form.widths[:2]):], used, form.proj.bias.grad))
    torch.testing.assert_close(*results, atol=1e-11, rtol=1e-11)
    assert not hard.qkv.weight.grad[:sum(hard.widths[:2])].any()
    assert not hard.proj.weight.grad.unflatten(1, (hard.num_heads, -1))[:, ~hard.used_heads()].any()
    assert {name for name, parameter in hard.named_parameters() if parameter.grad is None} == {
        name for name, parameter in hard.named_parameters() if name.startswith('rel_pos.')}


hard_models = pytest.mark.parametrize('kwargs', [
    dict(), dict(rel_pos='padded_table'), dict(num_heads=12, head_dim=40), dict(sharpness=9000.)])


@hard_models
def test_a_trained_hard_model_is_attention_as_well(kwargs, tmp_path):
    source = converted(**kwargs)
    model = timm.create_model('test_cmhsa_attn', hard_attn=True, **source.model_args())
    model.load_state_dict(source.state_dict())
    expected = model.eval()(IMAGES)
    torch.testing.assert_close(expected, source(IMAGES), atol=1e-5, rtol=0)
    train_a_little(model)
    after = model(IMAGES)
    assert max_error(expected, after) > 1e-2
    if 'num_heads' not in kwargs:  # spare heads learn as attention only
        torch.testing.assert_close(train_a_little(source)(IMAGES), after, atol=1e-3, rtol=0)
    Checkpoint.of(model).write(tmp_path / 'model')
    for hard in ({}, dict(hard_attn=True)):
        for loaded in (timm.create_model(f'local-dir:{tmp_path}/model', pretrained=True, **hard).eval(),
                       timm_cmhsa.load_model(tmp_path / 'model', **hard)):
            assert all((block.attn.shifts is not None) == bool(hard) for block in loaded.blocks)
            torch.testing.assert_close(loaded(IMAGES), after, atol=1e-5, rtol=0)
    model.set_hard_attn(False)
    torch.testing.assert_close(model(IMAGES), after, atol=1e-5, rtol=0)
    assert all(parameter.requires_grad for parameter in model.parameters()), 'biases learn again'


@hard_models
def test_shifts_compute_the_same_at_any_size(kwargs):
    model = converted(**kwargs)
    hard = reparameterize_model(model)
    for size in ((40, 24), (64, 64), (8, 8), (32, 32)):
        for each in (model, hard):
            each.set_input_size(size)
        assert all(block.attn.shifts is not None for block in hard.blocks)
        assert all(block.attn.shifts is None for block in model.blocks)
        for count in (1, 3):
            images = images_for(model, count)
            torch.testing.assert_close(hard(images), model(images), atol=1e-5, rtol=0)


def test_what_was_frozen_by_hand_stays_frozen():
    model = timm_cmhsa.convert_model(phase1(depth=2))
    model.blocks[0].attn.rel_pos.requires_grad_(False)
    expected = [parameter.requires_grad for parameter in model.parameters()]
    for enable in (True, True, False):
        model.set_hard_attn(enable)
    assert [parameter.requires_grad for parameter in model.parameters()] == expected


def test_a_new_start_is_attention_that_learns():
    model = converted()
    model.set_hard_attn()
    model.blocks[0].attn.reset_parameters()
    assert model.blocks[0].attn.shifts is None
    assert all(parameter.requires_grad for parameter in model.blocks[0].parameters())


def test_inference_is_by_shifts_where_attention_is_not_fused():
    set_fused_attn(False)
    try:
        model = converted()
    finally:
        set_fused_attn(True)
    with FlopCounterMode(display=False) as attention:
        model(IMAGES)
    with FlopCounterMode(display=False) as shifts:
        reparameterize_model(model)(IMAGES)
    assert shifts.get_total_flops() < 0.8 * attention.get_total_flops()


def test_a_size_at_which_heads_are_not_hard_leaves_attention():
    model, other = converted(sharpness=28.), converted(sharpness=28.)
    model.set_hard_attn()
    for each in model, other:
        each.set_input_size(64)
    assert all(parameter.requires_grad for parameter in model.parameters())
    images = images_for(other)
    assert torch.equal(model(images), other(images))


def test_soft_heads_are_refused_and_the_model_stays_as_it_was(caplog):
    model = converted()
    model.blocks[1].attn.rel_pos.point_head(0, [(0, 0)], 1.)
    expected = model(IMAGES)
    assert [block.attn.shifts is None for block in reparameterize_model(model).blocks] == [False, True]
    with pytest.raises(ValueError, match='1 of 9 heads do not'):
        model.set_hard_attn()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(IMAGES), expected)
    hard = timm.create_model('test_cmhsa_attn', hard_attn=True, **model.model_args()).eval()
    hard.load_state_dict(model.state_dict())
    assert '1 of 9 heads do not' in caplog.text
    torch.testing.assert_close(hard(IMAGES), expected, atol=1e-5, rtol=0)
    assert [block.attn.shifts is None for block in hard.blocks] == [False, True]


def test_what_shifts_cannot_do_is_refused():
    with pytest.raises(ValueError, match='use attn_drop_rate=0'):
        make_hard(timm.create_model('test_cmhsa_attn', attn_drop_rate=0.1))
    model = make_hard(timm.create_model('test_cmhsa_attn'))
    for mask in (dict(is_causal=True), dict(attn_mask=torch.zeros(64, 64))):
        with pytest.raises(ValueError, match='no attention to mask'):
            model.blocks[0].attn(torch.randn(1, 64, 48), **mask)


@pytest.mark.parametrize('weights_first', [False, True])
def test_creation_without_memory(weights_first):
    """A model with hard heads is created on the meta device, then gets its weights."""
    source = make_hard(timm.create_model('test_cmhsa_attn').eval())
    model = timm.create_model('test_cmhsa_attn', hard_attn=True, device='meta').to_empty(device='cpu').eval()
    steps = [lambda: reinit_non_persistent_buffers(model), lambda: model.load_state_dict(source.state_dict())]
    for step in reversed(steps) if weights_first else steps:
        step()
    assert torch.equal(model(IMAGES), source(IMAGES))
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in source.parameters()]
