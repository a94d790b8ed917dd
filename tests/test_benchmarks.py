"""The benchmarks as a user runs them, on the smallest models and batches."""
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers import run_python, write_photos

ROOT = Path(__file__).parents[1]
MODELS = 'resnet50', 'cmhsa_conv_k3'

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='peak memory is read from Linux')


def run(script, *arguments, code=0):
    env = {**os.environ, 'CUDA_VISIBLE_DEVICES': ''}
    return run_python('-W', 'ignore', ROOT / 'benchmarks' / script, *arguments, code=code, env=env)


@pytest.mark.slow
def test_speed(tmp_path):
    for folder in ('benchmarks', 'experiments'):  # a copy, where it may write
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns('speed', '__pycache__'))
    script = tmp_path / 'benchmarks' / 'speed.py'
    options = '--batch-size', '1', '--steps', '1', '--rounds', '1'
    results, document = script.parent / 'speed' / 'cpu-float32-batch1.json', script.parent / 'RESULTS.md'
    text = document.read_text().partition('<!-- speed')[0]
    assert run(script, *options, '--models', MODELS[0]).stdout.count('round 1, ') == 2
    again = run(script, *options, '--models', *MODELS)
    assert again.stdout.count('round 1, ') == 2, 'goes on from what is there'
    assert document.read_text().startswith(text)
    assert again.stdout[again.stdout.index('`python benchmarks/speed.py'):].strip() in document.read_text()
    cnn, ours = map(json.loads(results.read_text())['measured'].get, MODELS)
    assert cnn['inference'][0]['operations'] == pytest.approx(8.2e9, rel=0.02)  # 4.1 GMACs
    assert ours['training'][0]['operations'] == pytest.approx(3 * ours['inference'][0]['operations'], rel=0.02)
    assert ours['inference'][0]['peak_bytes'] > 4 * 29e6, 'its parameters'


@pytest.mark.slow
def test_gpu_in_its_quick_form(tmp_path):
    """A part that takes too long does not stop the next, and the same command does it again."""
    write_photos(tmp_path / 'data', num_train=60)
    command = 'gpu.py', tmp_path / 'gpu', '--quick', '--data-dir', tmp_path / 'data', '--minutes'
    stopped = run(*command, 0, code=1)
    assert stopped.stderr.startswith('Failed: Tests, Speed, heads beside on a tenth of the width. See ')
    assert run(*command, 60).stderr == ''
    report = (tmp_path / 'gpu' / 'quick' / 'report.md').read_text()
    assert report.count(': passed\n') == 3
    assert report.count('| cmhsa_conv_k3 |') == 4, 'what speed.py prints, and its table'
    assert '| heads beside on a tenth of the width |' in report
    assert run(*command, 0).stderr == '', 'nothing is left to do'


def test_attend_convs():
    *_, operations, figures = run(
        'attend_convs.py', '--model', 'test_resnet', '--img-size', '32').stdout.strip().splitlines()
    before, after = map(float, re.findall(r'[\d.e-]+(?= )', operations))
    assert 0 < before < after
    assert float(re.search(r'logits differ by ([\d.e-]+);', figures)[1]) < 5e-6
