"""The demo in examples/demo: real requests to its server, and a real browser."""
import importlib
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from helpers import write_image
from PIL import Image
from selenium.webdriver.common.by import By
from test_explorer import check_shown, colors, peaked, point_at, wait

from timm_cmhsa import attention_maps, load_model, save_for_hub
from timm_cmhsa.images import image_reader

gradio = pytest.importorskip('gradio')
httpx = pytest.importorskip('httpx')

demo = importlib.import_module('demo.app')

LABELS = ['<b>cat</b>', 'dog & co', *(f'bird {i}' for i in range(5))]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Two times of a training, a phase-1 model, and image files."""
    folder = tmp_path_factory.mktemp('demo')
    for seed, (name, labels) in enumerate((('before', None), ('after', LABELS))):
        torch.manual_seed(seed)
        model = timm.create_model('test_cmhsa_attn', img_size=(24, 32), depth=2, num_heads=5, num_classes=7)
        torch.nn.init.normal_(model.head.weight)
        save_for_hub(peaked(model), folder / name, label_names=labels)
    save_for_hub(timm.create_model('test_cmhsa_conv_k3', img_size=32), folder / 'phase1')
    save_for_hub(timm.create_model('test_cmhsa_attn', img_size=32), folder / 'other')
    for i in range(4):
        write_image(folder / f'{i}.png', seed=i, size=(120, 90))
    (folder / 'broken.png').write_bytes(b'no image')
    Image.new('1', (14_000, 14_000)).save(folder / 'huge.png')
    os.truncate(folder / 'huge.png', 100)  # whoever decodes it complains about that
    return folder


@pytest.fixture(scope='module')
def url(folder):
    """Address of the server."""
    app = demo.make_app(load_model(folder / 'after'), load_model(folder / 'before'))
    _, url, _ = app.launch(prevent_thread_lock=True, quiet=True)
    yield url
    app.close()


def upload(url, path):
    with path.open('rb') as file:
        return httpx.post(f'{url}gradio_api/upload', files={'files': file}).json()[0]


def look(url, path):
    """Call the page's function without its queue, as anybody can. Return the answer."""
    file = {'path': path, 'meta': {'_type': 'gradio.FileData'}}
    return httpx.post(f'{url}gradio_api/run/look', json={'data': [file]}, timeout=60).json()


def test_parallel_requests_get_their_own_answers(folder, url):
    paths = [upload(url, folder / f'{i}.png') for i in range(4)]
    expected = [look(url, path)['data'] for path in paths]
    assert all(one[2] != other[2] for one, other in itertools.combinations(expected, 2))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda path: look(url, path)['data'], paths * 10))
    assert answers == expected * 10


@pytest.mark.parametrize(('name', 'message'), [
    ('broken.png', "cannot identify image file 'broken.png'"),
    ('huge.png', 'exceeds limit of'),
])
def test_refused_files_give_one_line(folder, url, name, message, capfd):
    error = look(url, upload(url, folder / name))['error']
    assert message in error
    assert '\n' not in error
    assert capfd.readouterr() == ('', '')


def test_addresses_are_not_downloaded(url, hub, monkeypatch):
    # so that Gradio would download from here, as it does from the rest of the world
    monkeypatch.setattr('gradio.processing_utils.PUBLIC_HOSTNAME_WHITELIST', ['127.0.0.1'])
    assert 'does not download' in look(url, f'{hub.url}/0.png')['error']
    assert hub.requests == []


@pytest.mark.parametrize(('arguments', 'message'), [
    ('none', 'none does not exist'), ('0.png', 'is not a checkpoint'), ('phase1', 'has no attention that can be drawn'),
    ('after --before other', 'The models have different image sizes')])
def test_errors_are_one_line(folder, arguments, message, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as e:
        demo.main(arguments.split())
    assert message in e.value.code
    assert '\n' not in e.value.code


@pytest.fixture
def space(folder):
    """Address of the page as a Space: its models in variables."""
    env = {**os.environ, 'MODEL': str(folder / 'after'), 'BEFORE': str(folder / 'before'), 'PYTHONUNBUFFERED': '1'}
    with subprocess.Popen([sys.executable, demo.__file__], env=env, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().split()[-1] + '/'
        process.terminate()


@pytest.mark.slow
def test_a_space_in_a_browser(folder, space, browser):
    browser.get(space)
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, 'input[type=file]'))
    browser.find_element(By.CSS_SELECTOR, 'input[type=file]').send_keys(str(folder / '0.png'))
    wait(browser, lambda: browser.find_elements(By.TAG_NAME, 'iframe'))
    models = [load_model(folder / name) for name in ('before', 'after')]
    image = image_reader(models[0])(folder / '0.png').unsqueeze(0)
    text = browser.find_element(By.TAG_NAME, 'body').text
    for model in models:
        for name, probability in sorted(demo.probabilities(model, image).items(), key=lambda item: -item[1])[:5]:
            assert f'{name}\n{probability:.0%}' in text

    browser.switch_to.frame(browser.find_element(By.TAG_NAME, 'iframe'))
    wait(browser, lambda: colors(browser, '#map').any())
    wait(browser, lambda: browser.execute_script('return document.body.offsetHeight <= innerHeight'))
    point_at(browser, 'image', 4, 7)
    for view, model in (('before-', models[0]), ('', models[1])):
        maps = attention_maps(model, image)['blocks.0.attn']
        check_shown(browser, maps, image=0, head=0, query=(4, 7), key=(0, 1), view=view)
