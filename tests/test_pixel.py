import itertools

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.optim import create_optimizer_v2
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from timm_cmhsa import save_for_hub
from timm_cmhsa.pixel import PositionalAttention, PositionalContentAttention

ENCODINGS = ['table', 'quadratic', 'quadratic_gen', 'learned', 'learned_content']


@pytest.mark.parametrize(('name', 'num_heads', 'rel_pos', 'params', 'paper_params'), [
    ('pixel_attn_quadratic', 9, 'quadratic', 12.09, 12.1),
    ('pixel_attn_quadratic_gen', 9, 'quadratic_gen', 12.09, 12.1),
    ('pixel_attn_learned', 9, 'learned', 12.18, 12.3),
    ('pixel_attn_learned_content', 9, 'learned_content', 29.49, 29.5),
])
def test_models_are_the_papers(name, num_heads, rel_pos, params, paper_params):
    model = timm.create_model(name, device='meta')
    assert (model.embed_dim, len(model.blocks), model.patch_embed.grid_size) == (400, 6, (16, 16))
    assert (model.patch_embed.proj.kernel_size, model.patch_embed.proj.stride) == ((2, 2), (2, 2))
    for block in model.blocks:
        assert (block.attn.num_heads, block.attn.rel_pos.name) == (num_heads, rel_pos)
        assert block.attn.value.weight.shape == (400, num_heads * 400)
        assert block.mlp.fc1.out_features == 512
        assert block.attn.rel_pos.zero_key_bias is None
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert count == pytest.approx(params, abs=0.005)
    assert count == pytest.approx(paper_params, rel=0.01)


@pytest.mark.parametrize(('name', 'paper', 'all_operations'), [
    ('pixel_attn_quadratic', 6.2, 9.0), ('pixel_attn_learned', 6.2, 9.0), ('pixel_attn_learned_content', 15., 20.9),
])
def test_operations_are_the_papers(name, paper, all_operations):
    """The paper counts multiplications by weights, two operations each, and leaves out what attends."""
    set_fused_attn(False)  # whose operations are counted alike by all versions
    model = timm.create_model(name, device='meta').eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32, device='meta'))
    by_operator = {str(op): flops / 1e9 for op, flops in counter.get_flop_counts()['Global'].items()}
    weights = sum(flops for op, flops in by_operator.items() if 'addmm' in op or 'convolution' in op)
    assert weights == pytest.approx(paper, rel=0.02)
    assert sum(by_operator.values()) == pytest.approx(all_operations, rel=0.02)


def attention_by_hand(attn, x):
    """Equations 12 and 18 and Section 4.3, pixel by pixel."""
    B, N, D = x.shape
    bias = attn.rel_pos.get_bias(
        attn.qk(x)[..., :attn.num_heads * D].view(B, N, -1, D).transpose(1, 2) if hasattr(attn, 'qk') else None)
    y = torch.zeros_like(x)
    for b, head in itertools.product(range(B), range(attn.num_heads)):
        scores = bias[b % len(bias), head]
        if hasattr(attn, 'qk'):
            weight, qk_bias = attn.qk.weight.view(2, -1, D, D)[:, head], attn.qk.bias.view(2, -1, D)[:, head]
            q, k = (x[b] @ w.T + c for w, c in zip(weight, qk_bias))
            scores = scores + q @ k.T / D ** 0.5
        y[b] += scores.softmax(dim=-1) @ x[b] @ attn.value.weight[:, head * D:(head + 1) * D].T
    return attn.proj(y + attn.value.bias)


@pytest.mark.parametrize('rel_pos', ENCODINGS)
@pytest.mark.parametrize('fused', [True, False])
def test_attention_is_the_papers(rel_pos, fused):
    set_fused_attn(fused)
    layer = PositionalContentAttention if rel_pos == 'learned_content' else PositionalAttention
    attn, x = layer(6, (2, 3), num_heads=3, rel_pos=rel_pos, dtype=torch.float64).eval(), torch.randn(2, 6, 6).double()
    for parameter in attn.parameters():
        nn.init.normal_(parameter)
    torch.testing.assert_close(attn(x), attention_by_hand(attn, x))


@pytest.mark.parametrize('rel_pos', ['quadratic', 'learned_content'])
@pytest.mark.parametrize('fused', [True, False])
def test_dropout_of_attention_weights(rel_pos, fused):
    set_fused_attn(fused)
    model = timm.create_model('test_pixel_attn', rel_pos=rel_pos, attn_drop_rate=1., depth=1).train()
    attn = model.blocks[0].attn
    torch.testing.assert_close(attn(torch.randn(2, 64, 48)), attn.proj(attn.value.bias).expand(2, 64, 48))


def test_encodings_that_need_queries_need_the_layer_that_has_them():
    with pytest.raises(ValueError, match="rel_pos='learned_content' needs queries: use PositionalContentAttention"):
        PositionalAttention(4, 2, rel_pos='learned_content')


@pytest.mark.parametrize('rel_pos', ['quadratic', 'learned_content'])
def test_masked_keys_have_no_influence(rel_pos):
    model = timm.create_model('test_pixel_attn', rel_pos=rel_pos, depth=1).eval()
    attn, x = model.blocks[0].attn, torch.randn(2, 64, 48)
    mask = torch.ones(64, 64, dtype=torch.bool)
    mask[:, 5] = False
    changed = x.clone()
    changed[:, 5] += 1
    others = torch.arange(64) != 5
    torch.testing.assert_close(attn(x, attn_mask=mask)[:, others], attn(changed, attn_mask=mask)[:, others])
    assert not torch.allclose(attn(x)[:, others], attn(changed)[:, others])


@pytest.mark.parametrize('rel_pos', ENCODINGS)
def test_a_model_learns_with_every_encoding(rel_pos):
    """Where a bright pixel is: what only attention by position can tell, as all tokens are pooled alike."""
    model = timm.create_model('test_pixel_attn', rel_pos=rel_pos, img_size=16, num_classes=2, depth=1)
    x = torch.zeros(16, 3, 16, 16)
    targets = torch.arange(16) % 2
    for i in range(16):
        x[i, :, i // 2 * 2, 2 if targets[i] else 12] = 1.  # near the left or the right border
    optimizer = create_optimizer_v2(model, 'adamw', lr=3e-3)
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3


@pytest.mark.parametrize('rel_pos', ['quadratic', 'learned_content'])  # by position, and by content
def test_models_go_everywhere(rel_pos):
    model = timm.create_model('test_pixel_attn', rel_pos=rel_pos, img_size=16, depth=1).eval()
    x = torch.randn(2, 3, 16, 16)
    expected = model(x)
    for form in (
            torch.jit.script(model),
            torch.export.export(model, (x,)).module(),
            torch.fx.symbolic_trace(model),
            torch.compile(model, backend='eager', fullgraph=True),
    ):
        torch.testing.assert_close(form(x), expected, atol=1e-5, rtol=1e-5)


def test_centres_and_widths_are_not_decayed():
    model = timm.create_model('test_pixel_attn', depth=1)
    optimizer = create_optimizer_v2(model, 'momentum', lr=0.1, weight_decay=1e-4)
    decay = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0 if '.rel_pos.' in name or name.endswith('bias') or 'norm' in name else 1e-4)


def test_card_cites_the_paper(tmp_path):
    save_for_hub(timm.create_model('test_pixel_attn'), tmp_path / 'model')
    card = (tmp_path / 'model' / 'README.md').read_text()
    assert 'arxiv.org/abs/1911.03584' in card
    assert 'cordonnier2020relationship' in card
    assert '2111.01353' not in card
    assert 'Token mixer: self-attention, 9 heads of 48, quadratic relative positions' in card
