"""The demo: the real command, used in a real browser."""
import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from test_explorer import check_shown, choose, colors, point_at, sharpened, text, wait

from timm_cmhsa import attention_maps, save_for_hub
from timm_cmhsa.demo import main, probabilities
from timm_cmhsa.images import image_reader
from timm_cmhsa.plots import load_model

NAMES = ['<b>cat</b>', 'dog & co', *(f'bird {i}' for i in range(5))]


with_gradio = pytest.mark.skipif(find_spec('gradio') is None, reason="needs gradio: pip install 'timm_cmhsa[demo]'")


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Two times of a training, one with the names of its classes; a phase-1 model, and an image."""
    folder = tmp_path_factory.mktemp('demo')
    for seed, (name, labels) in enumerate((('before', None), ('after', NAMES))):
        torch.manual_seed(seed)
        model = timm.create_model('test_cmhsa_attn', img_size=(24, 32), depth=2, num_heads=[4, 5], num_classes=7)
        torch.nn.init.normal_(model.head.weight)
        save_for_hub(sharpened(model), folder / name, label_names=labels)
    save_for_hub(timm.create_model('test_cmhsa_conv_k3', img_size=32), folder / 'phase1')
    save_for_hub(timm.create_model('test_cmhsa_attn', img_size=32), folder / 'other')
    pixels = np.random.RandomState(0).randint(0, 256, (90, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / 'photo & more.png')
    (folder / 'broken.png').write_bytes(b'no image')
    return folder


@pytest.fixture(scope='module')
def address(folder):
    """The address of the running command; when it is stopped, it says so in one line."""
    command = [sys.executable, '-m', 'timm_cmhsa.demo', f'local-dir:{folder / "after"}', '--before', folder / 'before']
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs ignore Ctrl-C
    told = process.stdout.readline()
    assert told.startswith('open http://127.0.0.1:'), process.communicate()
    yield told.split()[1]
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert output == ''
    assert errors.strip() == 'python -m timm_cmhsa.demo: interrupted.'
    assert process.returncode == 130


@pytest.fixture
def page(address, browser):
    """The page just opened; in the end, it must have asked its own server alone."""
    browser.get_log('performance')
    browser.get(address)
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, 'input[type=file]'), 60)
    yield browser
    browser.switch_to.default_content()
    events = [json.loads(entry['message'])['message'] for entry in browser.get_log('performance')]
    asked = [event['params']['request']['url'] for event in events if event['method'] == 'Network.requestWillBeSent']
    assert address in asked
    assert all(url.startswith((address, 'data:', 'blob:', 'about:')) for url in asked), asked


def upload(page, path):
    page.find_element(By.CSS_SELECTOR, 'input[type=file]').send_keys(str(path))


def wait_for_height(page):
    """Until the page is as high as its frame: nothing to scroll, and nothing moves under the mouse."""
    wait(page, lambda: page.execute_script('return document.body.offsetHeight <= innerHeight'))


@with_gradio
@pytest.mark.slow
def test_an_image_its_classes_and_where_heads_look(folder, page):
    upload(page, folder / 'photo & more.png')
    wait(page, lambda: page.find_elements(By.TAG_NAME, 'iframe'), 60)
    models = [load_model(folder / name) for name in ('before', 'after')]
    image = image_reader(models[0])(folder / 'photo & more.png').unsqueeze(0)
    told = page.find_element(By.TAG_NAME, 'body').text
    for model in models:
        for name, probability in sorted(probabilities(model, image).items(), key=lambda item: -item[1])[:5]:
            assert f'{name}\n{probability:.0%}' in told
    assert 'Classes before phase 2' in told

    page.switch_to.frame(page.find_element(By.TAG_NAME, 'iframe'))
    wait(page, lambda: colors(page, '#map').any())
    before, after = (attention_maps(model, image)['blocks.1.attn'] for model in models)
    Select(page.find_element(By.ID, 'layer')).select_by_visible_text('blocks.1.attn')
    choose(page, 'heads', 4)
    wait_for_height(page)
    for query, key in (((4, 7), (0, 1)), ((1, 2), (5, 6))):
        point_at(page, 'image', *query)
        ActionChains(page, duration=0).click().perform()
        check_shown(page, before, image=0, head=4, query=query, key=key, view='before-')
        check_shown(page, after, image=0, head=4, query=query, key=key)
        point_at(page, 'image', *query)
        ActionChains(page, duration=0).click().perform()  # lets go
    assert text(page, 'map-heading') == 'After: head 5 in blocks.1.attn'
    wait_for_height(page)


@with_gradio
@pytest.mark.slow
def test_what_is_no_image_is_told_in_one_line(folder, page):
    upload(page, folder / 'broken.png')
    told = "broken.png cannot be read: cannot identify image file 'broken.png'."
    wait(page, lambda: told in page.find_element(By.TAG_NAME, 'body').text, 60)
    assert not page.find_elements(By.TAG_NAME, 'iframe')


@with_gradio
@pytest.mark.slow
@pytest.mark.parametrize(('arguments', 'message'), [
    (['{0}/none'], 'none does not exist or is not a file'),
    (['{0}/photo & more.png'], 'is truncated, corrupt or not a checkpoint'),
    (['{0}/phase1'], 'has no attention layer of timm_cmhsa to look at'),
    (['{0}/after', '--before', '{0}/other'], 'the two models have other image sizes'),
    (['hf-hub:nobody/none'], 'nobody/none: there is no such repository'),
    (['{0}/after', '--host', '192.0.2.1', '--port', '7999'], "bind on address ('192.0.2.1', 7999)"),
])
def test_errors_are_one_line(folder, hub, capsys, arguments, message):
    assert main([argument.format(folder) for argument in arguments]) == 1
    output, errors = capsys.readouterr()
    assert errors.startswith('python -m timm_cmhsa.demo: error: ')
    assert message in errors
    assert (output, errors.count('\n')) == ('', 1)


def test_without_gradio_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'gradio', None)
    assert main(['model']) == 1
    expected = "python -m timm_cmhsa.demo: error: gradio is missing: pip install 'timm_cmhsa[demo]'\n"
    assert capsys.readouterr() == ('', expected)


@pytest.mark.parametrize('arguments', [[], ['model', '--port', 'x'], ['model', '--share']])
def test_bad_options_are_exit_2(arguments):
    with pytest.raises(SystemExit) as e:
        main(arguments)
    assert e.value.code == 2


@with_gradio
@pytest.mark.slow
def test_the_space_asks_the_hub_for_its_models(hub):
    app = Path(__file__).parents[1] / 'examples' / 'space' / 'app.py'
    result = subprocess.run([sys.executable, app], capture_output=True, text=True)
    expected = 'error: USER/NAME: there is no such repository, or it is private and the token gives no right to it.'
    assert (result.returncode, result.stderr) == (1, f'python -m timm_cmhsa.demo: {expected}\n')
