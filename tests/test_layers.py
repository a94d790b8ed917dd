import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from timm_cmhsa import patchify, unpatchify
from timm_cmhsa.layers import DepthwiseMlp, PatchConv2d

sizes = st.integers(1, 4)
pairs = st.tuples(sizes, sizes)


@given(patch=pairs, grid=pairs, chans=sizes)
def test_a_token_holds_its_pixels_by_row_column_channel(patch, grid, chans):
    height, width = patch[0] * grid[0], patch[1] * grid[1]
    images = torch.arange(chans * height * width).reshape(1, chans, height, width)
    tokens = patchify(images, patch)
    assert tokens.shape == (1, grid[0] * grid[1], patch[0] * patch[1] * chans)
    for row, col, channel in itertools.product(range(height), range(width), range(chans)):
        token = row // patch[0] * grid[1] + col // patch[1]
        value = (row % patch[0] * patch[1] + col % patch[1]) * chans + channel
        assert tokens[0, token, value] == images[0, channel, row, col]
    assert torch.equal(unpatchify(tokens, patch, grid), images)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match='9 x 8 pixels cannot be cut into patches of'):
        patchify(torch.randn(1, 3, 9, 8), 4)
    for tokens in (torch.randn(1, 5, 48), torch.randn(1, 4, 47)):
        with pytest.raises(ValueError, match=f'{tokens.shape[1]} tokens of width {tokens.shape[2]} are not a grid of'):
            unpatchify(tokens, 4, 2)


@pytest.mark.parametrize('kernel_size', [1, 3, (3, 7)])
def test_patch_conv2d_convolves_the_whole_image(kernel_size):
    mixer = PatchConv2d(2 * 3 * 4, patch_size=(2, 3), grid_size=(4, 5), kernel_size=kernel_size)
    for grid in ((4, 5), (1, 2)):
        mixer.set_grid_size(grid)
        images = torch.randn(2, 4, 2 * grid[0], 3 * grid[1])
        expected = F.conv2d(images, mixer.conv.weight, mixer.conv.bias, padding='same')
        torch.testing.assert_close(unpatchify(mixer(patchify(images, (2, 3))), (2, 3), grid), expected)


def test_patch_conv2d_refuses_masks_and_drops_its_output():
    mixer, tokens = PatchConv2d(12, patch_size=2, grid_size=2, proj_drop=1.), torch.randn(1, 4, 12)
    for mask in (dict(attn_mask=torch.ones(4, 4, dtype=torch.bool)), dict(is_causal=True)):
        with pytest.raises(ValueError, match='no attention to mask'):
            mixer(tokens, **mask)
    assert not mixer(tokens).any()
    assert mixer.eval()(tokens).any()


def test_a_depthwise_mlp_convolves_the_grid_of_tokens():
    mlp = DepthwiseMlp(4, 6, drop=0.5).eval()
    mlp.set_grid_size((3, 5))
    images = torch.randn(2, 4, 3, 5)
    hidden = mlp.fc1(images)
    expected = mlp.fc2(mlp.conv.bn(F.conv2d(hidden, mlp.conv.conv.weight, padding=1, groups=6)))
    torch.testing.assert_close(mlp(patchify(images, 1)), patchify(expected, 1))
    assert (mlp.train()(patchify(images, 1)) == 0).any()  # dropped
