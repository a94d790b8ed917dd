import copy
import itertools
import math
import re

import pytest
import torch
from hypothesis import given, strategies as st
from timm.layers import set_fused_attn
from torch import nn

from timm_cmhsa import RelPosAttention
from timm_cmhsa.encodings import ENCODINGS, create_rel_pos
from timm_cmhsa.rel_pos import RelPosTable

sizes = st.integers(1, 4)
pairs = st.tuples(sizes, sizes)


@given(grid=pairs, new_grid=pairs)
def test_bias_table_keeps_every_offset_that_both_grids_know(grid, new_grid):
    table = torch.randn((2 * grid[0] - 1) * (2 * grid[1] - 1), 2)
    resized = RelPosTable(grid, num_heads=2).resize_table(table, grid, new_grid)
    assert resized.shape == ((2 * new_grid[0] - 1) * (2 * new_grid[1] - 1), 2)
    for row, col in itertools.product(range(1 - new_grid[0], new_grid[0]), range(1 - new_grid[1], new_grid[1])):
        actual = resized[(row + new_grid[0] - 1) * (2 * new_grid[1] - 1) + col + new_grid[1] - 1]
        known = abs(row) < grid[0] and abs(col) < grid[1]
        expected = table[(row + grid[0] - 1) * (2 * grid[1] - 1) + col + grid[1] - 1] if known else torch.zeros(2)
        assert torch.equal(actual, expected)


def expected_bias(rel_pos, head, row, col, q):
    """The bias of one head at one offset, by the formulas of the papers."""
    offset = torch.tensor([row, col], dtype=torch.float64)
    if rel_pos.name == 'table':
        height, width = rel_pos.grid_size
        return rel_pos.relative_position_bias_table[(height - 1 - row) * (2 * width - 1) + width - 1 - col, head]
    if rel_pos.name == 'quadratic':
        return -rel_pos.inv_std[head] ** 2 / 2 * (offset - rel_pos.center[head]).norm() ** 2
    if rel_pos.name == 'quadratic_gen':
        inv_covariance = rel_pos.inv_std[head] @ rel_pos.inv_std[head].T
        return -(offset - rel_pos.center[head]) @ inv_covariance @ (offset - rel_pos.center[head]) / 2
    height, width = rel_pos.grid_size
    if rel_pos.name == 'padded_table':  # with a padding of one patch
        return 30 * rel_pos.relative_position_bias_table[(height - row) * (2 * width + 1) + width - col, head]
    # embeddings are in the order of query minus key, as timm's tables are
    embed = torch.cat([rel_pos.row_embed[height - 1 - row], rel_pos.col_embed[width - 1 - col]])
    if rel_pos.name == 'learned':
        return rel_pos.head_vector[head] @ embed
    return q @ embed / len(embed) ** 0.5


@pytest.mark.parametrize('name', ENCODINGS)
@given(grid=pairs, num_heads=sizes, head_dim=st.integers(1, 5), zero_key=st.booleans(), seed=st.integers(0, 2 ** 16))
def test_bias_is_the_papers(name, grid, num_heads, head_dim, zero_key, seed):
    torch.manual_seed(seed)
    zero_key |= name == 'padded_table'
    rel_pos = create_rel_pos(name, grid, num_heads, head_dim, zero_key, dtype=torch.float64)
    for parameter in rel_pos.parameters():
        nn.init.normal_(parameter)
    q = torch.randn(2, num_heads, grid[0] * grid[1], head_dim, dtype=torch.float64)
    bias = rel_pos.get_bias(q)
    positions = list(itertools.product(range(grid[0]), range(grid[1])))
    assert bias.shape == (2 if name == 'learned_content' else 1, num_heads, len(positions), len(positions) + zero_key)
    for head in range(num_heads):
        for i, j in itertools.product(range(len(positions)), repeat=2):
            row, col = positions[j][0] - positions[i][0], positions[j][1] - positions[i][1]
            expected = expected_bias(rel_pos, head, row, col, q[-1, head, i])
            torch.testing.assert_close(bias[-1, head, i, j], expected, atol=1e-10, rtol=1e-10)
    if zero_key and name != 'padded_table':
        assert torch.equal(bias[..., -1], rel_pos.zero_key_bias.view(1, -1, 1).expand_as(bias[..., -1]))


@pytest.mark.parametrize('name', ['table', 'quadratic', 'quadratic_gen', 'learned'])
def test_offset_bias_is_in_the_order_of_offsets(name):
    rel_pos = create_rel_pos(name, (3, 4), 2, 6)
    by_offset = dict(zip(map(tuple, rel_pos.offsets.tolist()), rel_pos.offset_bias()))
    assert set(by_offset) == set(itertools.product(range(-2, 3), range(-3, 4)))
    bias = rel_pos.get_bias()
    assert torch.equal(bias[0, :, 1, 6], by_offset[1, 1])
    assert torch.equal(bias[0, :, 11, 0], by_offset[-2, -3])


@given(grid=pairs, padding=st.tuples(st.integers(0, 2), st.integers(0, 2)), seed=st.integers(0, 2 ** 16))
def test_the_zero_key_of_a_padded_table_stands_for_the_ring(grid, padding, seed):
    torch.manual_seed(seed)
    rel_pos = create_rel_pos('padded_table', grid, 2, 4, padding=padding, dtype=torch.float64)
    for parameter in rel_pos.parameters():
        nn.init.normal_(parameter)
    bias = rel_pos.get_bias()[0]
    by_offset = dict(zip(map(tuple, rel_pos.offsets.tolist()), rel_pos.offset_bias()))
    rows, cols = (range(-pad, size + pad) for size, pad in zip(grid, padding))
    ring = [(row, col) for row in rows for col in cols if not (0 <= row < grid[0] and 0 <= col < grid[1])]
    assert len(ring) + grid[0] * grid[1] == rel_pos.num_keys(grid)
    for i, (row, col) in enumerate(itertools.product(range(grid[0]), range(grid[1]))):
        weights = sum((by_offset[r - row, c - col].exp() for r, c in ring), torch.zeros(2, dtype=torch.float64))
        torch.testing.assert_close(bias[:, i, -1], weights.log() + rel_pos.zero_key_bias, atol=1e-10, rtol=1e-10)


@given(grid=pairs, new_grid=pairs, bias=st.floats(0, 100))
def test_a_padded_table_gives_its_offsets_the_same_weight_at_any_size(grid, new_grid, bias):
    rel_pos = create_rel_pos('padded_table', grid, 1, 4, dtype=torch.float64)
    rel_pos.point_head(0, [(0, 1)], bias)
    before = rel_pos.get_bias().softmax(dim=-1)[0, 0]
    rel_pos.set_grid_size(new_grid)
    after = rel_pos.get_bias().softmax(dim=-1)[0, 0]
    if grid[1] > 1 and new_grid[1] > 1:  # else that offset is in the padding
        torch.testing.assert_close(after[0, 1] - after[0, 0], before[0, 1] - before[0, 0], atol=1e-12, rtol=1e-9)
    assert rel_pos.relative_position_bias_table.isfinite().all()


@given(grid=pairs, new_grid=pairs)
def test_a_padded_table_of_any_biases_keeps_what_offsets_have_above_all_others(grid, new_grid):
    """Relative to the sum over all keys; below, a bias stays as it is. All are relative to their median."""
    rel_pos = create_rel_pos('padded_table', grid, 1, 4, dtype=torch.float64).requires_grad_(False)
    nn.init.normal_(rel_pos.relative_position_bias_table, std=0.3)
    growth = rel_pos.num_keys(new_grid) / rel_pos.num_keys(grid)
    biases = rel_pos.offset_bias().flatten()
    before = dict(zip(map(tuple, rel_pos.offsets.tolist()), (biases - biases.median()).tolist()))
    rel_pos.set_grid_size(new_grid)
    for offset, after in zip(map(tuple, rel_pos.offsets.tolist()), rel_pos.offset_bias().flatten().tolist()):
        bias = before.get(offset, 0.)
        expected = math.expm1(bias) * growth if bias > 0 else math.expm1(bias)
        assert math.expm1(after) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(grid=pairs, new_grid=pairs, number=st.floats(-5, 5))
def test_what_changes_no_softmax_does_not_change_it_at_another_size(grid, new_grid, number):
    rel_pos = create_rel_pos('padded_table', grid, 2, 4, dtype=torch.float64).requires_grad_(False)
    nn.init.normal_(rel_pos.relative_position_bias_table, std=0.1)
    other = copy.deepcopy(rel_pos)
    other.relative_position_bias_table += number / other.bias_scale
    for each in (rel_pos, other):
        each.set_grid_size(new_grid)
    torch.testing.assert_close(other.get_bias().softmax(dim=-1), rel_pos.get_bias().softmax(dim=-1))


@pytest.mark.parametrize('padding', [-1, 1.5, '1', (1, 2, 3)])
def test_padding_that_is_none_is_refused(padding):
    with pytest.raises(ValueError, match=re.escape(f'{padding=} must be one or two whole numbers of patches, 0 or')):
        create_rel_pos('padded_table', (2, 2), 1, 4, padding=padding)
    with pytest.raises(ValueError, match="is for rel_pos='padded_table', not 'table'"):
        create_rel_pos('table', (2, 2), 1, 4, padding=1)


@pytest.mark.parametrize('name', [name for name in ENCODINGS if name != 'padded_table'])
@given(grid=pairs, new_grid=pairs)
def test_every_encoding_keeps_the_offsets_that_both_grids_know(name, grid, new_grid):
    rel_pos = create_rel_pos(name, grid, 2, 4).requires_grad_(False)
    nn.init.normal_(rel_pos.zero_key_bias)
    q = torch.randn(1, 2, 1, 4)
    before = rel_pos.get_bias(q.expand(1, 2, grid[0] * grid[1], 4))
    rel_pos.set_grid_size(new_grid)
    assert rel_pos.grid_size == new_grid
    assert not any(parameter.requires_grad for parameter in rel_pos.parameters())
    after = rel_pos.get_bias(q.expand(1, 2, new_grid[0] * new_grid[1], 4))
    both = list(itertools.product(range(min(grid[0], new_grid[0])), range(min(grid[1], new_grid[1]))))
    for (row, col), (key_row, key_col) in itertools.product(both, repeat=2):
        torch.testing.assert_close(
            after[..., row * new_grid[1] + col, key_row * new_grid[1] + key_col],
            before[..., row * grid[1] + col, key_row * grid[1] + key_col])
    assert torch.equal(after[..., 0, -1], before[..., 0, -1])


@pytest.mark.parametrize('name', ENCODINGS)
def test_attention_with_every_encoding_goes_everywhere(name):
    attn, tokens = RelPosAttention(6, (2, 3), num_heads=2, head_dim=4, rel_pos=name).eval(), torch.randn(2, 6, 6)
    expected = attn(tokens)
    for form in (torch.jit.script(attn), torch.export.export(attn, (tokens,)).module(), torch.fx.symbolic_trace(attn),
                 torch.compile(attn, backend='eager', fullgraph=True), copy.deepcopy(attn), attn.fuse()):
        torch.testing.assert_close(form(tokens), expected)
    set_fused_attn(False)
    unfused = RelPosAttention(6, (2, 3), num_heads=2, head_dim=4, rel_pos=name).eval()
    unfused.load_state_dict(attn.state_dict())
    torch.testing.assert_close(unfused(tokens), expected)


@pytest.mark.parametrize('name', ENCODINGS)
def test_wide_heads_absorb_weights_whatever_the_encoding(name):
    """The function is the same; a bias that needs the queries leaves nothing to absorb."""
    attn, tokens = RelPosAttention(8, (2, 3), num_heads=2, head_dim=40, rel_pos=name), torch.randn(16, 6, 8)
    assert attn.absorb == attn.can_absorb() == (name != 'learned_content')
    assert (attn.fuse() is attn) == (name == 'learned_content')
    plain = copy.deepcopy(attn)
    plain.absorb = False
    torch.testing.assert_close(attn(tokens), plain(tokens))


@pytest.mark.parametrize('name', ['table', 'padded_table', 'quadratic', 'quadratic_gen', 'learned'])
def test_attention_in_chunks_of_queries_is_the_same_with_the_same_gradients(name):
    attn = RelPosAttention(6, (3, 5), num_heads=2, head_dim=4, rel_pos=name, dtype=torch.float64)
    x, weights = torch.randn(2, 15, 6, dtype=torch.float64, requires_grad=True), torch.randn(2, 15, 6)
    results = []
    for attn.chunk_size in (None, 4, 15, 100):
        assert f'chunk_size={attn.chunk_size}' in repr(attn)
        y = attn(x)
        with torch.no_grad():
            torch.testing.assert_close(attn(x), y)
        results.append([y, *torch.autograd.grad((y * weights).sum(), [x, *attn.parameters()])])
    for result in results[1:]:
        for actual, expected in zip(result, results[0]):
            torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)


def test_layers_of_many_tokens_attend_in_chunks():
    attn = RelPosAttention(8, 64, num_heads=9, head_dim=8, device='meta')
    assert attn.chunk_size == 2 ** 26 // (9 * 4097)
    attn.set_grid_size((8, 8))
    assert attn.chunk_size is None
    attn = RelPosAttention(8, 64, num_heads=9, head_dim=8, rel_pos='padded_table', padding=36, device='meta')
    assert attn.chunk_size == 2 ** 26 // (9 * (136 ** 2 + 1))  # the ring takes memory as well


def test_unknown_encodings_are_told():
    with pytest.raises(ValueError, match='use table, padded_table, quadratic, quadratic_gen, learned, learned_content'):
        create_rel_pos('cubic', (2, 2), 1, 4)


def test_parameters_are_in_the_order_that_optimizers_have_saved():
    names = [name for name, _ in RelPosTable((2, 2), 1).named_parameters()]
    assert names == ['relative_position_bias_table', 'zero_key_bias']


@pytest.mark.parametrize('name', ['table', 'padded_table', 'quadratic', 'quadratic_gen', 'learned'])
def test_bias_is_never_rounded_by_autocast(name):
    rel_pos = create_rel_pos(name, (2, 3), 4, 6).eval()
    with torch.autocast('cpu', torch.bfloat16):
        under_autocast = rel_pos.get_bias()
    assert under_autocast.dtype == torch.float32
    assert torch.equal(rel_pos.get_bias(), under_autocast)


def dropped(attn, tokens, **kwargs):
    """What attention is left of a layer in training mode that drops every weight."""
    attn.attn_drop.p = 1.
    return attn.train()(tokens, **kwargs)


@pytest.mark.parametrize('form', ['fused', 'unfused', 'absorbed', 'chunks'])
def test_dropout_of_attention_weights_reaches_every_form(form):
    set_fused_attn(form != 'unfused')
    head_dim = 40 if form == 'absorbed' else 4
    attn, tokens = RelPosAttention(8, (2, 3), num_heads=2, head_dim=head_dim), torch.randn(16, 6, 8)
    attn.chunk_size = 4 if form == 'chunks' else None
    assert attn.can_absorb() == (form == 'absorbed')
    torch.testing.assert_close(dropped(attn, tokens), attn.proj.bias.expand(16, 6, 8))


def test_chunks_give_way_to_masks_and_maps():
    """What needs all queries at once gets them."""
    attn, tokens = RelPosAttention(8, (2, 3), num_heads=2, head_dim=4), torch.randn(16, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = attn(tokens, attn_mask=mask)
    attn.chunk_size = 4
    torch.testing.assert_close(attn(tokens, attn_mask=mask), expected)
    torch.testing.assert_close(attn(tokens, is_causal=True), expected)
    attn.fused_attn = False
    assert not attn.can_chunk()


def test_starts():
    """Centres N(0, 2 I) as in Section 4.2; square roots of inverse covariances near the identity."""
    rel_pos = create_rel_pos('quadratic_gen', (4, 4), 4000, 8)
    assert rel_pos.center.var().item() == pytest.approx(2, rel=0.1)
    assert abs(rel_pos.center.mean().item()) < 0.1
    noise = rel_pos.inv_std - torch.eye(2)
    assert noise.std().item() == pytest.approx(0.01, rel=0.1)
    rel_pos = create_rel_pos('quadratic', (4, 4), 4000, 8)
    assert rel_pos.inv_std.mean().item() == pytest.approx(1, abs=1e-3)
    assert rel_pos.inv_std.std().item() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize('name', ['quadratic', 'quadratic_gen'])
def test_half_precision_holds_large_offsets_or_says_that_it_does_not(name):
    rel_pos = create_rel_pos(name, (1, 400), 1, 4, dtype=torch.bfloat16)
    rel_pos.point_head(0, [(0, 300)], 40.)
    bias = rel_pos.get_bias()[0, 0, 0, :-1].float()
    assert bias.argmax() == 300
    assert bias[300] == 0
    assert bias[[299, 301]].max() <= -39
    with pytest.raises(ValueError, match=r'torch.bfloat16 does not hold the offset \(0, 301\): use float32'):
        rel_pos.point_head(0, [(0, 301)], 40.)
