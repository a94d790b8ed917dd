"""The benchmarks as a user runs them, on the smallest models and batches."""
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODELS = 'resnet50', 'cmhsa_conv_k3'

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='peak memory is read from Linux')


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark in a copy of the folder, where it may write."""
    for folder in ('benchmarks', 'experiments'):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns('speed', '__pycache__'))

    def run(script, *arguments):
        command = [sys.executable, '-W', 'ignore', tmp_path / 'benchmarks' / script, '--device', 'cpu', *arguments]
        return subprocess.run(command, capture_output=True, text=True)
    return run


@pytest.fixture
def run_here(monkeypatch):
    """Runs a benchmark in this process."""
    def run_here(script, *arguments):
        monkeypatch.setattr(sys, 'argv', [script, *arguments])
        runpy.run_path(str(ROOT / 'benchmarks' / script), run_name='__main__')
    return run_here


@pytest.mark.slow
def test_speed(run, tmp_path):
    options = '--batch-size', '1', '--steps', '1', '--rounds', '1'
    folder = tmp_path / 'benchmarks'
    results, document = folder / 'speed' / 'cpu-float32-batch1.json', folder / 'RESULTS.md'
    text = document.read_text().partition('<!-- speed')[0]
    first = run('speed.py', *options, '--models', MODELS[0])
    assert first.returncode == 0, first.stderr
    assert first.stdout.count('round 1, ') == 2
    again = run('speed.py', *options, '--models', *MODELS)
    assert again.stdout.count('round 1, ') == 2, 'goes on from what is there'

    measured = json.loads(results.read_text())['measured']
    assert set(measured) == set(MODELS)
    for phases in measured.values():
        for rounds in phases.values():
            assert len(rounds) == 1
            assert rounds[0]['seconds'][0] > 0
    assert measured['resnet50']['inference'][0]['operations'] == pytest.approx(8.2e9, rel=0.02)  # 4.1 GMACs
    training, inference = (measured['cmhsa_conv_k3'][phase][0] for phase in ('training', 'inference'))
    assert training['operations'] == pytest.approx(3 * inference['operations'], rel=0.02)
    assert inference['peak_bytes'] > 4 * 29e6, 'its parameters'
    written = document.read_text()
    assert written.startswith(text)
    assert again.stdout[again.stdout.index('`python benchmarks/speed.py'):].strip() in written
    assert written.count('| cmhsa_conv_k3 |') == 2

    content = json.loads(results.read_text())
    content['about']['torch'] = '1.0'
    results.write_text(json.dumps(content))
    other = run('speed.py', *options)
    assert other.returncode == 1
    assert 'other versions or other options: move it away first' in other.stderr


def run_gpu(folder, *arguments):
    command = [sys.executable, '-W', 'ignore', ROOT / 'benchmarks' / 'gpu.py', folder, *arguments]
    return subprocess.run(command, env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''}, capture_output=True, text=True)


def test_gpu_needs_one(tmp_path):
    result = run_gpu(tmp_path)
    assert result.returncode == 2
    assert result.stderr == 'There is no CUDA GPU here.\n'
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_gpu_in_its_quick_form(tmp_path):
    result = run_gpu(tmp_path, '--quick', '--minutes', '60')
    assert result.returncode == 0, result.stderr
    report = (tmp_path / 'report.md').read_text()
    assert report.count(': passed\n') == 2
    assert report.count('| cmhsa_conv_k3 |') >= 2
    assert {path.name for path in tmp_path.iterdir()} == {'report.md', 'log.txt', 'cpu-bfloat16-batch1.json'}


@pytest.mark.slow
def test_gpu_goes_on_after_a_part_that_takes_too_long(tmp_path):
    result = run_gpu(tmp_path, '--quick', '--minutes', '0')
    assert result.returncode == 1
    assert result.stderr.startswith('Failed: Tests, Speed. See ')
    assert (tmp_path / 'report.md').read_text().count(': stopped\n') == 2


@pytest.mark.parametrize(('arguments', 'message'), [
    (['--models', 'resnet51'], '--models: resnet51 is none of "deit_base'),
    (['--rounds', '0'], 'must be positive'),
])
def test_bad_options(arguments, message, run_here, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_here('speed.py', '--device', 'cpu', *arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_attend_convs(run_here, capsys):
    run_here('attend_convs.py', '--model', 'test_resnet', '--img-size', '32')
    *table, figures = capsys.readouterr().out.strip().splitlines()
    assert table[-1].startswith(f'{len(table) - 2} in all')
    assert float(re.search(r'logits differ by ([\d.e-]+);', figures)[1]) < 5e-6
