"""What the documentation names exists, and what it shows runs: README.md and docs/."""
import argparse
import contextlib
import glob
import inspect
import io
import os
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from helpers import run, run_python
from PIL import Image

import timm_cmhsa
from timm_cmhsa import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / 'docs'
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding='utf-8')
         for path in sorted([ROOT / 'README.md', *DOCS.rglob('*.md')])}
COMMANDS = {'convert_checkpoint': cli.convert_main, 'plot_attention': cli.plot_main}
SHELL = re.compile(r'^```bash\n(.*?)^```$', re.M | re.S)
INLINE = re.compile(r'`([^`]+)`')


def commands(text):
    """Return the commands of the shell blocks of a page, and those in its text, as lists of words."""
    lines = [line for block in SHELL.findall(text) for line in block.replace('\\\n', ' ').splitlines()]
    variables = {}
    for line in lines:
        for name, value in variables.items():
            line = line.replace(f'${name}', value)
        words = shlex.split(line, comments=True)
        if len(words) == 1 and '=' in words[0]:
            variables.update([words[0].split('=', 1)])
        elif words:
            yield words
    prose = re.sub(r'^```.*?^```$', '', text, flags=re.M | re.S)
    for line in INLINE.findall(prose):
        if re.match(r'(python (examples|experiments|benchmarks)/|convert_checkpoint |plot_attention )', line):
            yield line.split()


def test_every_test_that_the_theory_names_exists():
    named = re.findall(r'`(test_\w+\.py)?::(\w+)`', PAGES['docs/theory.md'])
    assert len(named) > 10
    file = ''
    for given, name in named:
        file = given or file  # the one before, if it is left out
        assert f'\ndef {name}(' in (ROOT / 'tests' / file).read_text(encoding='utf-8'), (file, name)


def test_the_reference_has_every_public_name_and_every_model():
    names = {name for name, value in vars(timm_cmhsa).items()
             if getattr(value, '__module__', '').startswith('timm_cmhsa') and not inspect.ismodule(value)}
    assert {'convert_model', 'load_model', 'HubError'} < names
    assert names <= set(re.findall(r'^::: timm_cmhsa\.(\w+)$', PAGES['docs/reference/python.md'], re.M))
    models = {*timm.list_models('cmhsa_*'), *timm.list_models('pixel_attn_*')}
    assert models == set(re.findall(r'^        - (\w+)$', PAGES['docs/reference/models.md'], re.M))
    assert all(f'`{name}`' in PAGES['docs/models.md'] for name in models)


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r'\]\(([^)#]+)', PAGES['README.md'])
    assert len(links) > 10
    assert all(link.startswith('https://') or (ROOT / link).exists() for link in links), links


SMALLER = {  # in place of large models and downloads
    r'cmhsa_conv_k\d\w*': 'test_cmhsa_conv_k3',
    r'cmhsa_attn_soft_patch4_32': 'cmhsa_attn_soft',
    r"'cmhsa_attn_soft', num_classes=100, img_size=\(224, 320\)": "'test_cmhsa_attn'",
    r'--head-dim 96': '--head-dim 48',
    r"'pixel_attn_quadratic_gen'": "'test_pixel_attn', rel_pos='quadratic_gen'",
    'epochs=100': "epochs=2, img_size=32, model='test_cmhsa_conv_k3'",
    r"'resnet18', pretrained=True": "'resnet18'",
    r'USER/(?=NAME|CONVERTED|PHASE1)': 'alice/'}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with small versions of the files that the pages use."""
    def save(path, name, **kwargs):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        model = timm.create_model(name, **kwargs)
        args = argparse.Namespace(model=name, model_kwargs=kwargs)
        torch.save(dict(epoch=1, arch=name, state_dict=model.state_dict(), args=args), path)

    for name in ('phase1/model_best', 'digits1/model_best', 'conv_k5/last'):
        save(f'output/train/{name}.pth.tar', 'test_cmhsa_conv_k3', num_classes=3)
    save('output/train/phase2/model_best.pth.tar', 'test_cmhsa_attn', num_classes=3)
    for epoch in range(2):
        save(f'output/train/quadratic/checkpoint-{epoch}.pth.tar', 'test_pixel_attn')
    save('output/train/quadratic_gen/last.pth.tar', 'test_pixel_attn', rel_pos='quadratic_gen')
    for name in ('cat', 'dog', 'horse'):
        for split in ('train', 'validation'):
            (tmp_path / 'DIR' / split / name).mkdir(parents=True)
            Image.linear_gradient('L').convert('RGB').save(tmp_path / 'DIR' / split / name / '1.png')
    (tmp_path / 'PHOTOS').symlink_to('DIR')
    (tmp_path / 'OUT').mkdir()
    model = timm.create_model('test_cmhsa_conv_k3', num_classes=3)
    for name, each in (('model', model), ('converted', timm_cmhsa.convert_model(model))):
        timm_cmhsa.save_for_hub(each, tmp_path / 'OUT' / name, label_names=['cat', 'dog', 'horse'])
    monkeypatch.chdir(tmp_path)


SLOW = ('docs/attention.md', 'docs/pixels.md')  # they draw


@pytest.mark.parametrize('page', [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name, text in PAGES.items()
    if re.search(f'^```python|^{"|^".join(COMMANDS)}', text, re.M)])
def test_what_a_page_shows_runs(page, workplace, hub):
    """Its Python, and its commands of this package, in their order."""
    names = {'images': torch.randn(2, 3, 32, 32)}
    for language, block in re.findall(r'^```(python|bash)\n(.*?)^```$', PAGES[page], re.M | re.S):
        for large, small in SMALLER.items():
            block = re.sub(large, small, block)
        if language == 'python':
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block, page, 'exec'), names)
            continue
        for name, *arguments in commands(f'```bash\n{block}```\n'):
            if name in COMMANDS:
                paths = [path for word in arguments for path in sorted(glob.glob(word)) or [word]]
                assert COMMANDS[name]([*paths, *(['--force'] if name == 'convert_checkpoint' else [])]) == 0, name


@pytest.mark.parametrize('page', PAGES)
def test_files_and_options_that_a_page_names_are_there(page, monkeypatch, capsys):
    """Other tests run the scripts."""
    for words in commands(PAGES[page]):
        files = (word for word in words if re.match(r'(examples|experiments|benchmarks|tests)/', word))
        assert all((ROOT / file).exists() for file in files), words
        words = [word for word in words if not re.match(r'[A-Z]+=', word)]
        words = words[:words.index('--')] if '--' in words else words
        if words[0] in COMMANDS:
            main = partial(COMMANDS[words[0]], ['--help'])
        elif words[0] == 'python' and words[1].startswith(('examples/', 'experiments/', 'benchmarks/')):
            main = partial(runpy.run_path, str(ROOT / words[1]), run_name='__main__')
        else:
            continue
        if 'demo' in words[1]:
            pytest.importorskip('gradio')
        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setattr(sys, 'argv', [words[1], '--help'])
            patch.syspath_prepend((ROOT / words[1]).parent)
            main()
        known = re.findall(r'--[\w-]+', capsys.readouterr().out)
        assert {word.split('=')[0] for word in words if word.startswith('--')} <= {*known}, words


# timm's own scripts

CLONE = os.environ.get('TIMM_CLONE')
needs_clone = pytest.mark.skipif(CLONE is None, reason="needs timm's scripts: see test_train_script.py")


@pytest.mark.slow
@needs_clone
def test_options_of_timms_scripts_are_there():
    named = {}
    for words in (words for text in PAGES.values() for words in commands(text)):
        scripts = [i for i, word in enumerate(words) if re.match(r'pytorch-image-models/\w+\.py', word)]
        for i in scripts[:1]:
            named.setdefault(words[i].split('/')[1], set()).update(word.split('=')[0] for word in words[i:])
    for script, words in named.items():
        known = re.findall(r'--[\w-]+', run_python(Path(CLONE) / script, '--help').stdout)
        assert {word for word in words if word.startswith('--')} <= {*known, '--config'}  # which train.py reads first


@pytest.mark.slow
@needs_clone
@pytest.mark.parametrize('heading', ['Both phases', 'On the digits, on a CPU'])
def test_training_on_own_images(heading, tmp_path):
    """The commands of the page in their order, with small models and one epoch."""
    text = re.split(r'\n##+ ', PAGES['docs/train.md'].split(f'## {heading}\n')[1])[0]
    text = text.replace('--num-train 1200', '--num-train 160')
    for name in ('examples', 'experiments'):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / 'pytorch-image-models').symlink_to(Path(CLONE).resolve())
    env = {**os.environ, 'PATH': f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'}

    run('python', 'examples/digits.py', 'DIR', '--num-train', '160', cwd=tmp_path, env=env)
    for words in commands(text):
        last = ['--device', 'cpu', '--workers', '1'] if 'pytorch-image-models' in ' '.join(words) else []
        if 'pytorch-image-models/train.py' in words:
            last += ['--epochs', '1', '--warmup-epochs', '0', '--batch-size', '32']
            last += [] if '--model' in words else ['--model', 'test_cmhsa_conv_k3']
        run(*words, *last, cwd=tmp_path, env=env)
    assert len(list(tmp_path.glob('output/train/*/model_best.pth.tar'))) == 2
