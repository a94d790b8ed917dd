import copy
import io
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.utils import ModelEmaV3
from torch import nn

from timm_cmhsa import RelPosAttention
from timm_cmhsa.rel_pos import RelPosTable, resize_bias_table

sizes = st.integers(1, 4)
pairs = st.tuples(sizes, sizes)


@given(grid=pairs, new_grid=pairs)
def test_bias_table_keeps_every_offset_that_both_grids_know(grid, new_grid):
    table = torch.randn((2 * grid[0] - 1) * (2 * grid[1] - 1), 2)
    resized = resize_bias_table(table, grid, new_grid)
    assert resized.shape == ((2 * new_grid[0] - 1) * (2 * new_grid[1] - 1), 2)
    for row, col in itertools.product(range(1 - new_grid[0], new_grid[0]), range(1 - new_grid[1], new_grid[1])):
        actual = resized[(row + new_grid[0] - 1) * (2 * new_grid[1] - 1) + col + new_grid[1] - 1]
        known = abs(row) < grid[0] and abs(col) < grid[1]
        expected = table[(row + grid[0] - 1) * (2 * grid[1] - 1) + col + grid[1] - 1] if known else torch.zeros(2)
        assert torch.equal(actual, expected)


@pytest.fixture
def rel_pos():
    rel_pos = RelPosTable((2, 3), num_heads=4)
    for parameter in rel_pos.parameters():
        nn.init.normal_(parameter)
    return rel_pos.eval()


def test_bias_is_gathered_once_in_eval(rel_pos):
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            bias = rel_pos.get_bias()
            assert rel_pos.get_bias() is bias
            torch.testing.assert_close(bias, rel_pos.gather_bias(), atol=0, rtol=0)


def step(rel_pos):
    rel_pos.train()
    optimizer = torch.optim.SGD(rel_pos.parameters(), lr=1.)
    with torch.enable_grad():
        rel_pos.get_bias().square().sum().backward()
    optimizer.step()
    rel_pos.eval()


def step_in_eval(rel_pos):
    with torch.enable_grad():
        rel_pos.get_bias().square().sum().backward()
    torch.optim.SGD(rel_pos.parameters(), lr=1.).step()


def other_weights(rel_pos):
    return {name: torch.randn_like(tensor) for name, tensor in rel_pos.state_dict().items()}


def average_weights(rel_pos):
    other = RelPosTable((2, 3), num_heads=4)
    nn.init.ones_(other.zero_key_bias)
    average = ModelEmaV3(other, decay=0.5)
    average.module = rel_pos
    average.update(other)


def foreach(rel_pos):
    torch._foreach_lerp_(list(rel_pos.parameters()), [torch.ones_like(p) for p in rel_pos.parameters()], 0.5)


def same_values_elsewhere(rel_pos):
    """A bias of the columns beside: its table, flattened, is the same for both grids."""
    nn.init.zeros_(rel_pos.relative_position_bias_table)
    rel_pos.relative_position_bias_table[[6, 8]] = 1.
    rel_pos.get_bias()
    rel_pos.set_window_size((3, 2))


def assign_twice(rel_pos):
    for _ in range(2):
        rel_pos.load_state_dict(other_weights(rel_pos), assign=True)


CHANGES = {
    'training step': step,
    'training step in eval mode': step_in_eval,
    'load_state_dict': lambda rel_pos: rel_pos.load_state_dict(other_weights(rel_pos)),
    'load_state_dict, assigned': assign_twice,
    'in place': lambda rel_pos: nn.init.normal_(rel_pos.relative_position_bias_table),
    'through the state dict': lambda rel_pos: rel_pos.state_dict()['zero_key_bias'].lerp_(torch.ones(4), 0.5),
    'a new grid': lambda rel_pos: rel_pos.set_window_size((3, 3)),
    'a new grid and back': lambda rel_pos: [rel_pos.set_window_size(size) for size in ((1, 1), (2, 3))],
    'type': lambda rel_pos: rel_pos.double(),
    'type and back': lambda rel_pos: rel_pos.bfloat16().float(),
    'device': lambda rel_pos: rel_pos.to('meta'),
    '.data': lambda rel_pos: rel_pos.zero_key_bias.data.add_(1),
    'ModelEmaV3': average_weights,
    'foreach': foreach,
    'the same values for another grid': same_values_elsewhere,
    'new .data': lambda rel_pos: setattr(rel_pos.zero_key_bias, 'data', torch.randn(4)),
}


@pytest.mark.parametrize('change', CHANGES)
@torch.no_grad()
def test_cached_bias_follows_every_change(rel_pos, change):
    before = rel_pos.get_bias()
    CHANGES[change](rel_pos)
    after = rel_pos.get_bias()
    assert after is not before
    assert (after.dtype, after.device) == (rel_pos.zero_key_bias.dtype, rel_pos.zero_key_bias.device)
    if not after.is_meta:
        torch.testing.assert_close(after, rel_pos.gather_bias(), atol=0, rtol=0)


def test_bias_has_gradients_where_these_are_asked_for(rel_pos):
    with torch.no_grad():
        rel_pos.get_bias()
    assert rel_pos.get_bias().requires_grad
    assert rel_pos.train().get_bias().requires_grad
    with torch.no_grad():
        assert rel_pos.get_bias() is not rel_pos.get_bias(), 'the next step changes it'


def test_cached_bias_is_neither_saved_nor_copied():
    rel_pos = RelPosTable((16, 16), num_heads=4).eval()

    def saved_bytes():
        buffer = io.BytesIO()
        torch.save(rel_pos, buffer)
        return len(buffer.getvalue())

    before = saved_bytes()
    with torch.no_grad():
        rel_pos.get_bias()
        assert saved_bytes() == before
        twin = copy.deepcopy(rel_pos)
        nn.init.ones_(twin.zero_key_bias)
        assert (twin.get_bias()[..., -1] == 1).all()
        assert not (rel_pos.get_bias()[..., -1] == 1).any()


def test_large_bias_is_not_cached():
    rel_pos = RelPosTable((48, 48), num_heads=4).eval()
    with torch.no_grad():
        assert rel_pos.get_bias() is not rel_pos.get_bias()


def test_cached_bias_is_no_constant_of_a_trace():
    """What is compiled, traced or exported reads the parameters it will have."""
    attn, tokens = RelPosAttention(4, (2, 3), num_heads=4).eval(), torch.randn(1, 6, 4)
    with torch.no_grad():
        attn(tokens)
        forms = [
            torch.compile(attn, backend='eager', fullgraph=True),
            torch.jit.trace(attn, tokens),
            torch.fx.symbolic_trace(attn),
            torch.jit.script(attn),
        ]
        for form in forms:
            form(tokens)
        nn.init.constant_(attn.rel_pos.zero_key_bias, 2.)
        expected = attn(tokens)
        for form in forms:
            torch.testing.assert_close(form(tokens), expected)
