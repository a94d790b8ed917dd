"""The main job, run as a user runs it, with a few epochs."""
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.models import load_checkpoint

from timm_cmhsa import convert_checkpoint

EXAMPLE = Path(__file__).parents[1] / 'examples' / 'two_phase.py'
COMMAND = [sys.executable, '-W', 'ignore', str(EXAMPLE), '--device', 'cpu', '--epochs', '3', '--output']


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp('finished')
    result = subprocess.run([*COMMAND, output], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return output, result.stdout


def rows(output):
    return {row['training']: row for row in json.loads((output / 'results.json').read_text())}


def test_table_has_every_training_with_the_same_epochs(finished):
    output, stdout = finished
    assert (output / 'results.md').read_text() in stdout
    assert {name: row['epochs'] for name, row in rows(output).items()} == {
        'phase 1': 3, 'phase 1, converted': 3, 'phase 1, converted, phase 2': 6, 'phase 1 alone': 6,
        'attention alone': 6}


def test_conversion_changes_no_accuracy(finished):
    output, _ = finished
    before, after = rows(output)['phase 1'], rows(output)['phase 1, converted']
    assert (before['top1'], before['top5']) == (after['top1'], after['top5'])


def test_pictures_are_pictures(finished):
    for name in ('loss.png', 'attention.png'):
        image = Image.open(finished[0] / name)
        assert min(image.size) > 300
        assert len(image.convert('RGB').getcolors(1 << 24)) > 50


def test_checkpoints_are_readable_by_timm_and_by_the_converter(finished, tmp_path):
    output, stdout = finished
    shape = dict(img_size=32, patch_size=8, in_chans=1, hidden_chans=1, depth=4, num_classes=10)
    conv_model = timm.create_model('cmhsa_conv_k5', **shape)
    load_checkpoint(conv_model, str(output / 'conv_only' / 'last.pth.tar'), strict=True)
    report = convert_checkpoint(output / 'conv_only' / 'last.pth.tar', tmp_path / 'out', num_heads=12)
    assert report.img_size_source == 'from the checkpoint'
    model = timm.create_model(f'local-dir:{output / "model"}', pretrained=True)
    assert model(torch.randn(1, 1, 32, 32)).shape == (1, 10)
    top1 = rows(output)['phase 1, converted, phase 2']['top1']
    assert f'loaded back: top-1 {top1:.2f} %' in stdout


@pytest.mark.parametrize('moment', ['phase2', 'conv_only'])
def test_a_stopped_run_goes_on_to_the_same_result(moment, finished, tmp_path):
    """Killed between two stages, and within one: epoch 5 of 6 is saved and the last is not."""
    process = subprocess.Popen([*COMMAND, tmp_path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (tmp_path / moment / 'last.pth.tar').exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / 'results.json').exists()
    result = subprocess.run([*COMMAND, tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name, row in rows(finished[0]).items():
        for key in ('top1', 'top5'):
            assert rows(tmp_path)[name][key] == row[key]


def test_runs_of_different_settings_are_never_mixed(finished):
    result = subprocess.run([*COMMAND, finished[0], '--seed', '1'], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'holds a run with other settings' in result.stderr
    assert result.stderr.count('\n') == 1


@pytest.mark.parametrize(('options', 'message'), [
    (['unused', '--num-train', '5'], '--num-train between 20 and 1700'),
    (['unused', '--device', 'foo'], '--device foo cannot be used'),
    ([__file__], 'is not a folder'),
])
def test_bad_options_are_told(options, message):
    result = subprocess.run([*COMMAND, *options], capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
    assert 'Traceback' not in result.stderr
