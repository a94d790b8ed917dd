import os
import shutil
import tempfile
import zlib

import pytest
from hub_server import HubServer

# huggingface_hub reads these when it is imported: no test asks the real Hub
HUB = HubServer()
HUB_HOME = tempfile.TemporaryDirectory()
os.environ.update(HF_ENDPOINT=HUB.url, HF_HOME=HUB_HOME.name)
# small tensors gain nothing by threads, here and in the processes that tests start
os.environ.setdefault('OMP_NUM_THREADS', '1')

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from timm.layers import set_fused_attn  # noqa: E402

# `pytest --hypothesis-profile thorough` tries more cases
settings.register_profile('quick', derandomize=True, deadline=None, max_examples=25)
settings.register_profile('thorough', derandomize=True, deadline=None, max_examples=200)
settings.load_profile('quick')


@pytest.fixture(autouse=True)
def _alone():
    torch.manual_seed(0)
    yield
    set_fused_attn(True)


@pytest.fixture
def hub(request, monkeypatch):
    """The Hub, empty, with alice logged in. Every test has weights of its own, since Xet uploads the same ones once."""
    HUB.reset()
    torch.manual_seed(zlib.crc32(request.node.name.encode()))
    shutil.rmtree(os.path.join(HUB_HOME.name, 'hub'), ignore_errors=True)  # what huggingface_hub has fetched
    monkeypatch.setenv('HF_TOKEN', 'hf_alice')
    return HUB


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    """A headless browser that logs what it is told and what it asks for."""
    chromium, driver = shutil.which('chromium') or shutil.which('google-chrome'), shutil.which('chromedriver')
    if chromium is None or driver is None:
        pytest.skip('needs chromium and chromedriver: apt-get install chromium chromium-driver')
    from selenium import webdriver
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
            'headless=new', 'no-sandbox', 'disable-gpu', 'disable-dev-shm-usage', 'no-first-run',
            'disable-background-networking', 'disable-component-update', 'disable-sync', 'disable-quic',
            f'user-data-dir={tmp_path_factory.mktemp("profile")}', 'window-size=1200,1600'):
        options.add_argument(f'--{argument}')
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL', 'performance': 'ALL'})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    browser.get('about:blank')  # instead of its own start page
    yield browser
    browser.quit()
