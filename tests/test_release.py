"""What is released: a wheel that works without this repository, and one version everywhere."""
import os
import re
from pathlib import Path

import pytest
import yaml
from helpers import run, run_python

from timm_cmhsa import __version__

ROOT = Path(__file__).parents[1]
USE = '''
import pathlib, sys, timm, timm_cmhsa
assert pathlib.Path(timm_cmhsa.__file__).is_relative_to(sys.argv[1]), timm_cmhsa.__file__
timm_cmhsa.save_for_hub(timm.create_model('test_cmhsa_conv_k3', num_classes=3), 'phase1')
'''


@pytest.mark.slow
def test_the_wheel_works_without_this_repository(tmp_path):
    source, site = tmp_path / 'source', tmp_path / 'site'
    run('git', 'clone', '-q', ROOT, source, cwd=tmp_path)
    run_python('-m', 'build', '--no-isolation', '--outdir', 'dist', source, cwd=tmp_path)  # wheel from sdist
    wheel, sdist = sorted((tmp_path / 'dist').iterdir())
    assert (wheel.suffix, sdist.suffix) == ('.whl', '.gz')
    run_python('-m', 'twine', 'check', '--strict', wheel, sdist, cwd=tmp_path)
    run_python('-m', 'pip', 'install', '-q', '--no-deps', '--no-index', '--target', site, wheel, cwd=tmp_path)

    (tmp_path / 'use.py').write_text(USE)
    where = dict(cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(site)})
    run_python('-m', 'timm_cmhsa', 'use.py', site, **where)
    assert not run(site / 'bin' / 'convert_checkpoint', 'phase1', 'phase2', **where).stderr
    run(site / 'bin' / 'plot_attention', 'phase2', '--output', 'pictures', '--html', **where)
    assert {'.png', '.html'} <= {file.suffix for file in (tmp_path / 'pictures').iterdir()}


def test_a_folder_of_its_name_does_not_hide_it(tmp_path):
    """Such as the clone that it was installed from, seen from the folder above."""
    (tmp_path / 'timm_cmhsa').mkdir()
    run_python('-c', 'import timm_cmhsa; timm_cmhsa.convert_model', cwd=tmp_path)


def test_one_version():
    assert yaml.safe_load((ROOT / 'CITATION.cff').read_text(encoding='utf-8'))['version'] == __version__
    headings = re.findall(r'^## \[(.*?)\]', (ROOT / 'CHANGELOG.md').read_text(encoding='utf-8'), re.MULTILINE)
    assert headings[:2] == ['Unreleased', __version__]


@pytest.mark.parametrize(('tag', 'status'), [(f'v{__version__}', 0), (f'v{__version__}.1', 1), (__version__, 1)])
def test_a_tag_of_another_version_is_not_released(tag, status):
    workflow = yaml.safe_load((ROOT / '.github/workflows/release.yml').read_text(encoding='utf-8'))
    check = next(step for step in workflow['jobs']['build']['steps'] if 'tag' in step.get('name', ''))
    done = run('bash', '-ec', check['run'], code=status, cwd=ROOT, env={**os.environ, 'GITHUB_REF_NAME': tag})
    assert ('says' in done.stdout) == (status == 1)
