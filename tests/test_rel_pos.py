import copy
import itertools
import math
from operator import attrgetter

import pytest
import torch
from hypothesis import given, strategies as st
from timm.layers import RelPosBias
from torch import nn

from timm_cmhsa.pixel.encodings import ENCODINGS
from timm_cmhsa.rel_pos import create_rel_pos, exact_sharpness

sizes = st.integers(1, 4)
pairs = st.tuples(sizes, sizes)
paddings = st.tuples(*[st.integers(0, 2)] * 2)
all_tables = pytest.mark.parametrize('name', ['table', 'padded_table'])


def random_rel_pos(name, grid, num_heads=2, std=1., **kwargs):
    """A bias in float64 whose every parameter is random."""
    rel_pos = create_rel_pos(name, grid, num_heads, dtype=torch.float64, **kwargs).requires_grad_(False)
    for parameter in rel_pos.parameters():
        nn.init.normal_(parameter, std=std)
    return rel_pos


def by_offset(rel_pos):
    """Return the biases of all heads by (row, column) of their offset, key minus query."""
    return dict(zip(map(tuple, rel_pos.offsets.tolist()), rel_pos.offset_bias()))


def patches(grid):
    return list(itertools.product(range(grid[0]), range(grid[1])))


@given(grid=pairs, num_heads=sizes)
def test_a_table_is_timms_with_a_zero_key(grid, num_heads):
    rel_pos = random_rel_pos('table', grid, num_heads)
    timms = RelPosBias(grid, num_heads).double()
    timms.relative_position_bias_table = rel_pos.relative_position_bias_table
    bias = rel_pos.get_bias()
    assert torch.equal(bias[..., :-1], timms.get_bias())
    assert torch.equal(bias[..., -1], rel_pos.zero_key_bias.view(1, -1, 1).expand_as(bias[..., -1]))


@given(grid=pairs, padding=paddings)
def test_a_padded_table_has_a_ring_of_keys_behind_the_zero_key(grid, padding):
    rel_pos = random_rel_pos('padded_table', grid, padding=padding)
    biases, bias = by_offset(rel_pos), rel_pos.get_bias()[0]
    rows, cols = (range(-pad, size + pad) for size, pad in zip(grid, padding))
    ring = [key for key in itertools.product(rows, cols) if key not in patches(grid)]
    for i, (row, col) in enumerate(patches(grid)):
        expected = [biases[key_row - row, key_col - col] for key_row, key_col in patches(grid)]
        torch.testing.assert_close(bias[:, i, :-1], torch.stack(expected, dim=-1))
        weights = torch.zeros(2).double()
        for key_row, key_col in ring:
            weights += biases[key_row - row, key_col - col].exp()
        torch.testing.assert_close(bias[:, i, -1], weights.log() + rel_pos.zero_key_bias)


def test_a_padded_table_is_scaled_so_that_adam_moves_it_faster():
    rel_pos = create_rel_pos('padded_table', (3, 3), 2)
    torch.testing.assert_close(rel_pos.offset_bias(), 30 * rel_pos.relative_position_bias_table)
    assert rel_pos.offset_bias().std().item() == pytest.approx(0.02, rel=0.3), 'and starts like other tables'
    assert rel_pos.state_dict()['bias_scale'] == 30, 'checkpoints hold the scale'


@pytest.mark.parametrize(('dtype', 'largest_leak'), [(torch.float32, 2e-7), (torch.float64, 4e-16)])
@all_tables
@given(grid=pairs, data=st.data())
def test_a_hard_head_looks_at_its_offset_or_at_nothing(name, dtype, largest_leak, grid, data):
    rel_pos = create_rel_pos(name, grid, 1, dtype=torch.float64)
    reach = (1, 1) if name == 'padded_table' else (grid[0] - 1, grid[1] - 1)
    row, col = (data.draw(st.integers(-size, size)) for size in reach)
    rel_pos.point_head(0, [(row, col)], exact_sharpness(math.prod(grid), dtype))
    weights = rel_pos.get_bias().softmax(dim=-1)[0, 0]
    expected = [key == (query[0] + row, query[1] + col) for query in patches(grid) for key in patches(grid)]
    expected = torch.tensor(expected).double().view(len(weights), -1)
    assert (weights[:, :-1] - expected).abs().max() <= largest_leak * (1 if name == 'table' else 3)


@all_tables
@given(grid=pairs, new_grid=pairs)
def test_another_grid_keeps_offsets_and_what_is_frozen(name, grid, new_grid):
    rel_pos = random_rel_pos(name, grid)
    zero_key_bias, before = rel_pos.zero_key_bias.clone(), by_offset(rel_pos)
    rel_pos.set_grid_size(new_grid)
    assert rel_pos.grid_size == new_grid
    assert torch.equal(rel_pos.zero_key_bias, zero_key_bias)
    assert not any(parameter.requires_grad for parameter in rel_pos.parameters())
    assert rel_pos.get_bias().shape == (1, 2, math.prod(new_grid), math.prod(new_grid) + 1)
    if name == 'table':
        for offset, bias in by_offset(rel_pos).items():
            assert torch.equal(bias, before.get(offset, torch.zeros(2))), 'what was unknown starts at zero'


@given(grid=pairs, padding=paddings, grids=st.lists(pairs, min_size=1, max_size=3), bias=st.floats(0, 100))
def test_a_head_of_a_padded_table_keeps_its_weight_on_every_grid(grid, padding, grids, bias):
    """Also by way of a single patch: offsets within the padding are never forgotten."""
    rel_pos = create_rel_pos('padded_table', grid, 1, padding=padding, dtype=torch.float64)
    offset = tuple(min(pad, 1) for pad in padding)
    rel_pos.point_head(0, [offset], bias)

    def weight():
        """Of the offset, beyond that of every other key."""
        num_keys = math.prod(size + 2 * pad for size, pad in zip(rel_pos.grid_size, padding))
        excess = by_offset(rel_pos)[offset].expm1().item()
        return excess / (num_keys + excess)

    before = weight()
    for new_grid in (*grids, grid):
        rel_pos.set_grid_size(new_grid)
        assert weight() == pytest.approx(before, rel=1e-9)
        others = [bias.item() for each, bias in by_offset(rel_pos).items() if each != offset]
        assert others == [0.] * len(others)


@given(grid=pairs, new_grid=pairs, padding=paddings, shift=st.floats(-5, 5))
def test_a_trained_padded_table_is_resized_relative_to_its_median(grid, new_grid, padding, shift):
    """What a bias has above its head's median grows with the number of keys; a number added to all changes nothing."""
    rel_pos = random_rel_pos('padded_table', grid, 1, std=0.1, padding=padding)
    shifted = copy.deepcopy(rel_pos)
    shifted.relative_position_bias_table += shift / 30
    num_keys = [math.prod(size + 2 * pad for size, pad in zip(sizes, padding)) for sizes in (grid, new_grid)]
    biases = rel_pos.offset_bias()
    before = {offset: (bias - biases.median() if len(biases) > 1 else bias).item()
              for offset, bias in by_offset(rel_pos).items()}
    for each in (rel_pos, shifted):
        each.set_grid_size(new_grid)
    for offset, bias in by_offset(rel_pos).items():
        expected = math.expm1(before.get(offset, 0.))
        expected *= num_keys[1] / num_keys[0] if expected > 0 else 1
        assert math.expm1(bias.item()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    if len(biases) > 1:
        torch.testing.assert_close(shifted.get_bias().softmax(dim=-1), rel_pos.get_bias().softmax(dim=-1))


@pytest.mark.parametrize('rel_pos', [
    *(create_rel_pos(name, (2, 3), 4) for name in ('table', 'padded_table')),
    *(ENCODINGS[name]((2, 3), 4, 6) for name in ('quadratic', 'quadratic_gen', 'learned'))], ids=attrgetter('name'))
def test_autocast_does_not_round_biases(rel_pos):
    with torch.autocast('cpu', torch.bfloat16):
        under_autocast = rel_pos.get_bias()
    assert torch.equal(rel_pos.get_bias(), under_autocast)


@pytest.mark.parametrize(('name', 'padding'), [('cubic', None), ('table', 1), ('table', 0)])
def test_bad_names_are_refused(name, padding):
    with pytest.raises(ValueError, match=f"rel_pos='{name}' with padding={padding}: use 'table' without padding, or "):
        create_rel_pos(name, (2, 2), 1, padding)
