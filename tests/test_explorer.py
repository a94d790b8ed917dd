"""The page to explore attention: its data, and the page itself in a real browser."""
import base64
import io
import json
import re

import numpy as np
import pytest
import timm
import torch
from matplotlib import colormaps
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from timm_cmhsa import RelPosAttention, attention_maps
from timm_cmhsa.images import to_pixels
from timm_cmhsa.plots import explorer_html

TITLES = ['</script><b>one</b>', 'a & b', 'three']


def peaked(model):
    """Give heads peaks, which rounding could blur."""
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.rel_pos.relative_position_bias_table)
        torch.nn.init.normal_(block.attn.rel_pos.zero_key_bias, mean=2.)
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.3)
    return model.eval()


def uneven():
    """Return a model with a grid of 6 x 8 whose layers have 4, 5 and 4 heads."""
    model = timm.create_model('test_cmhsa_attn', img_size=(24, 32), depth=3, num_heads=4)
    model.blocks[1].attn = RelPosAttention(model.embed_dim, (6, 8), num_heads=5)
    return peaked(model)


@pytest.fixture(scope='module')
def shown():
    """A model whose attention differs from image to image, the images, and the maps."""
    torch.manual_seed(0)
    model = uneven()
    images = torch.randn(3, 3, 24, 32)
    return model, images, attention_maps(model, images)


@pytest.fixture(scope='module')
def path(shown, tmp_path_factory):
    path = tmp_path_factory.mktemp('page') / 'attention.html'
    path.write_text(explorer_html(*shown[:2], TITLES), encoding='utf-8')
    return path


def page_data(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def decode(text, dtype, *shape):
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype).reshape(shape).astype(np.float32))


def test_stored_weights_are_right_to_half_a_step_of_the_largest(shown, path):
    expected = shown[2]
    data = page_data(path.read_text())
    assert [layer['name'] for layer in data['layers']] == list(expected)
    for layer, maps in zip(data['layers'], expected.values()):
        assert tuple(layer['grid']) == (6, 8)
        assert len(layer['maps']) == 3
        for image, stored in enumerate(layer['maps']):
            scale = decode(stored['scale'], '<f4', layer['heads'], 48, 1)
            weights = decode(stored['weights'], 'u1', layer['heads'], 48, 48) / 255 * scale
            assert ((weights - maps.weights[image]).abs() <= scale / 509).all()
            zero_key = decode(stored['zeroKey'], '<f4', layer['heads'], 48)
            torch.testing.assert_close(zero_key, maps.zero_key[image])


def test_heads_that_look_at_nothing_stay_dark_and_attention_by_position_alone_is_stored_once():
    model = uneven()
    torch.nn.init.constant_(model.blocks[0].attn.rel_pos.zero_key_bias, 60.)
    torch.nn.init.zeros_(model.blocks[0].attn.qkv.weight)
    layers = page_data(explorer_html(model, torch.randn(3, 3, 24, 32)))['layers']
    assert [len(layer['maps']) for layer in layers] == [1, 3, 3]
    stored, = layers[0]['maps']
    assert (decode(stored['scale'], '<f4', 4, 48) == torch.tensor(1 / 48)).all()
    assert decode(stored['weights'], 'u1', 4, 48, 48).max() == 0


def test_images_are_inlined(shown, path):
    model, images, _ = shown
    data = page_data(path.read_text())
    assert [image['title'] for image in data['images']] == TITLES
    for image, pixels in zip(data['images'], to_pixels(images, model)):
        shown_image = Image.open(io.BytesIO(base64.b64decode(image['png'])))
        np.testing.assert_array_equal(np.asarray(shown_image), pixels)


@pytest.fixture
def page(path, browser):
    """The browser with the page just opened; in the end, nothing must have gone wrong in it."""
    browser.get_log('performance')
    browser.get(path.as_uri())
    wait(browser, lambda: colors(browser, '#map').any())
    yield browser
    assert browser.get_log('browser') == []
    events = [json.loads(entry['message'])['message'] for entry in browser.get_log('performance')]
    requested = [
        event['params']['request']['url'] for event in events if event['method'] == 'Network.requestWillBeSent']
    assert path.as_uri() in requested
    assert {url.partition(':')[0] for url in requested} <= {'file', 'data'}


def wait(browser, condition, seconds=60):
    WebDriverWait(browser, seconds).until(lambda _: condition())


def colors(browser, canvas):
    """The middle of every patch: shape (6, 8, 3)."""
    url = browser.execute_script(f"return document.querySelector('{canvas}').toDataURL()")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(',')[2]))).convert('RGB'), dtype=float)
    cell = len(pixels) // 6
    return pixels[cell // 2::cell, cell // 2::cell]


def expected_colors(weights):
    """Of the weights of one query, (48,), as they are stored."""
    shares = (weights / weights.max() * 255).round() / 255
    return 255 * colormaps['magma'](shares.sqrt().view(6, 8).numpy())[..., :3]


def point_at(browser, canvas, row, col):
    """Move the mouse to the middle of a patch."""
    element = browser.find_element(By.ID, canvas)
    browser.execute_script('arguments[0].scrollIntoView({block: "center", behavior: "instant"})', element)
    size = element.size
    x, y = (round(((index + 0.5) / count - 0.5) * size[side])
            for index, count, side in ((col, 8, 'width'), (row, 6, 'height')))
    ActionChains(browser, duration=0).move_to_element_with_offset(element, x, y).perform()


def choose(browser, group, index):
    browser.find_element(By.CSS_SELECTOR, f'#{group} label:nth-of-type({index + 1})').click()


def text(browser, name):
    return browser.find_element(By.ID, name).text


def check_shown(browser, maps, image, head, query, key, view=''):
    """Point at a key, and compare the numbers and colours with the maps; the ids of the map start with `view`."""
    weights = maps.weights[image, head, query[0] * 8 + query[1]]
    largest = weights.max().item()
    point_at(browser, f'{view}map', *key)
    wait(browser, lambda: text(browser, f'{view}key').startswith(f'on row {key[0] + 1}, column {key[1] + 1} ('))
    weight = float(text(browser, f'{view}weight').removesuffix(' %')) / 100
    assert weight == pytest.approx(weights[key[0] * 8 + key[1]].item(), abs=largest / 509 + 5.1e-5)
    zero_key = float(text(browser, f'{view}zero').split(' %')[0]) / 100
    assert zero_key == pytest.approx(maps.zero_key[image, head, query[0] * 8 + query[1]].item(), abs=5.1e-5)
    assert text(browser, f'{view}largest') == f'{100 * largest:.2f} %'
    assert text(browser, 'query') == f'row {query[0] + 1}, column {query[1] + 1}'
    wait(browser, lambda: np.abs(colors(browser, f'#{view}map') - expected_colors(weights)).max() < 4)


@pytest.mark.slow
def test_weights_of_every_choice_are_those_of_the_model(shown, page):
    maps = list(shown[2].values())
    check_shown(page, maps[0], image=0, head=0, query=(3, 4), key=(0, 7))
    Select(page.find_element(By.ID, 'layer')).select_by_visible_text('blocks.1.attn')
    assert len(page.find_elements(By.CSS_SELECTOR, '#heads label')) == 5
    labels = page.find_elements(By.CSS_SELECTOR, '#images label')
    assert [label.get_attribute('title') for label in labels] == TITLES  # as text
    choose(page, 'heads', 4)
    point_at(page, 'image', 5, 0)
    check_shown(page, maps[1], image=0, head=4, query=(5, 0), key=(4, 1))
    choose(page, 'images', 2)
    check_shown(page, maps[1], image=2, head=4, query=(5, 0), key=(5, 7))
    Select(page.find_element(By.ID, 'layer')).select_by_visible_text('blocks.2.attn')
    check_shown(page, maps[2], image=2, head=3, query=(5, 0), key=(0, 0))


@pytest.mark.slow
def test_a_click_holds_the_query_and_another_lets_go(page):
    for query in ('row 2, column 3', 'row 5, column 5'):
        point_at(page, 'image', 1, 2)
        ActionChains(page, duration=0).click().perform()
        point_at(page, 'image', 4, 4)
        assert text(page, 'query') == query


@pytest.mark.slow
def test_everything_can_be_done_with_the_keyboard(shown, page):
    for selector, *keys in (
            ('#images input', Keys.ARROW_RIGHT), ('#layer', Keys.ARROW_DOWN), ('#heads input', Keys.ARROW_RIGHT),
            ('#image', Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_LEFT)):
        page.find_element(By.CSS_SELECTOR, selector).send_keys(*keys)
    assert text(page, 'query') == 'row 2, column 4'
    weights = shown[2]['blocks.1.attn'].weights[1, 1, 1 * 8 + 3]
    assert text(page, 'weight') == f'{100 * weights.max():.2f} %'
    row, col = divmod(weights.argmax().item(), 8)
    page.find_element(By.ID, 'map').send_keys(Keys.ARROW_UP if row else Keys.ARROW_DOWN)
    assert text(page, 'key').startswith(f'on row {row if row else 2}, column {col + 1} ')


@pytest.mark.slow
def test_the_image_is_shown_and_can_lie_under_the_map(shown, page):
    pixels = to_pixels(shown[1], shown[0])[0].reshape(6, 4, 8, 4, 3)[:, 2, :, 2].numpy()  # 4 x 4 pixels a patch
    wait(page, lambda: np.abs(colors(page, '#image') - pixels).max() <= 1)
    plain = colors(page, '#map')
    page.find_element(By.ID, 'overlay').click()
    wait(page, lambda: np.abs(colors(page, '#map') - (0.65 * plain + 0.35 * pixels)).max() < 3)


@pytest.mark.slow
def test_the_page_fits_a_phone_at_night(page):
    phone = dict(width=375, height=800, deviceScaleFactor=2, mobile=True)
    dark = [dict(name='prefers-color-scheme', value='dark')]
    page.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', phone)
    page.execute_cdp_cmd('Emulation.setEmulatedMedia', dict(features=dark))
    try:
        wait(page, lambda: page.execute_script('return innerWidth') == 375)
        assert page.execute_script('return document.documentElement.scrollWidth') == 375
        assert min(page.find_element(By.ID, name).rect['width'] for name in ('image', 'map')) > 280
        assert page.execute_script('return getComputedStyle(document.body).backgroundColor') == 'rgb(21, 24, 28)'
    finally:
        page.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})
        page.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': []})


@pytest.mark.slow
def test_two_models_are_shown_beside_each_other(shown, browser, tmp_path):
    model, images, after = shown
    earlier = uneven()
    before = attention_maps(earlier, images)
    (tmp_path / 'page.html').write_text(explorer_html(model, images[:1], before=earlier), encoding='utf-8')
    browser.get((tmp_path / 'page.html').as_uri())
    wait(browser, lambda: colors(browser, '#before-map').any())
    choose(browser, 'heads', 2)
    point_at(browser, 'image', 1, 6)
    for number, (view, maps) in enumerate((('before-', before['blocks.0.attn']), ('', after['blocks.0.attn'])), 1):
        check_shown(browser, maps, image=0, head=2, query=(1, 6), key=(3, 2), view=view)
        assert text(browser, f'{view}map-heading') == f"{'Before' if view else 'After'}: head 3 in blocks.0.attn"
        small = colors(browser, f'#heads label:nth-of-type(4) canvas:nth-of-type({number})')
        assert np.abs(small - expected_colors(maps.weights[0, 3, 1 * 8 + 6])).max() < 4
    assert not browser.find_element(By.ID, 'images').is_displayed()  # there is no choice
    assert browser.get_log('browser') == []
