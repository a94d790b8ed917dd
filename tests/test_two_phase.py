"""The main job, with a few epochs."""
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import two_phase
from common.data import DIGIT, Digits, place_digits
from common.training import Stage, create, train
from PIL import Image
from timm.models import load_checkpoint

from timm_cmhsa import convert_checkpoint

EXAMPLE = Path(__file__).parents[1] / 'examples' / 'two_phase.py'
COMMAND = [
    sys.executable, '-W', 'ignore', str(EXAMPLE), '--device', 'cpu', '--epochs', '3', '--num-train', '40', '--output']


def run_here(*options):
    """Run the script in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['two_phase.py', '--device', 'cpu', *map(str, options)])
        two_phase.main()


@pytest.fixture(scope='module')
def output(tmp_path_factory):
    """Results of one epoch of one step in each phase."""
    folder = tmp_path_factory.mktemp('two_phase')
    run_here('--epochs', 1, '--num-train', 20, '--output', folder)
    return folder


def rows(output):
    return {row['training']: row for row in json.loads((output / 'results.json').read_text())}


def test_table_has_every_training_with_the_same_epochs(output):
    assert {name: row['epochs'] for name, row in rows(output).items()} == {
        'phase 1': 1, 'phase 1, converted': 1, 'phase 1, converted, phase 2': 2, 'phase 1 alone': 2,
        'attention alone': 2}
    assert f"| attention alone | 2 | {rows(output)['attention alone']['top1']:.2f} % |" in (
        output / 'results.md').read_text()


def test_conversion_changes_no_accuracy(output):
    before, after = rows(output)['phase 1'], rows(output)['phase 1, converted']
    for name in ('top1', 'top5'):  # of one image, rounding may decide between two classes that are as likely
        assert after[name] == pytest.approx(before[name], abs=0.1)


def test_pictures_are_pictures(output):
    for name in ('loss.png', 'attention.png'):
        image = Image.open(output / name)
        assert min(image.size) > 300
        assert len(image.convert('RGB').getcolors(1 << 24)) > 50


def test_checkpoints_are_readable_by_timm_and_by_the_converter(output, tmp_path):
    shape = dict(img_size=32, patch_size=8, in_chans=1, hidden_chans=1, depth=4, num_classes=10)
    conv_model = timm.create_model('cmhsa_conv_k5', **shape)
    load_checkpoint(conv_model, str(output / 'conv_only' / 'last.pth.tar'), strict=True)
    report = convert_checkpoint(output / 'conv_only' / 'last.pth.tar', tmp_path / 'out', num_heads=12)
    assert report.model_args['img_size'] == (32, 32)
    model = timm.create_model(f'local-dir:{output / "model"}', pretrained=True)
    assert model(torch.randn(1, 1, 32, 32)).shape == (1, 10)


def test_runs_of_different_settings_are_never_mixed(output):
    with pytest.raises(SystemExit, match='holds a run with other settings'):
        run_here('--epochs', 1, '--num-train', 20, '--output', output, '--seed', 1)


@pytest.mark.parametrize(('options', 'message'), [
    (['--output', 'unused', '--num-train', 5], '--num-train between 20 and 1700'),
    (['--output', 'unused', '--device', 'foo'], '--device foo cannot be used'),
    (['--output', __file__], 'is not a folder'),
])
def test_bad_options(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_here(*options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


class StoppingDigits(Digits):
    """Images that end the training after so many."""
    left = 0

    def __getitem__(self, index):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().__getitem__(index)


def test_a_stopped_training_goes_on_to_the_same_result(tmp_path):
    """Stopped in epoch 4 of 5, after epoch 2 was saved."""
    images, targets = place_digits(np.random.RandomState(0), canvas=DIGIT)
    data, test_data = StoppingDigits(images, targets, range(40), augment=True), Digits(images, targets, range(40, 80))
    model_args = dict(img_size=DIGIT, in_chans=1, num_classes=10)
    stage = Stage('stage', 'test', 'test_cmhsa_conv_k3', model_args, 5, 1e-3, warmup_epochs=1, eval_every=2)

    def go(name, num_images):
        data.left = num_images
        return train(stage, create(stage, 0), data, test_data, tmp_path / name, 0, torch.device('cpu'))

    expected, expected_history = go('whole', 5 * 40)
    with pytest.raises(KeyboardInterrupt):
        go('stopped', 3 * 40 + 20)
    model, history = go('stopped', 3 * 40)
    assert data.left == 0
    for row, expected_row in zip(history, expected_history):
        row['seconds'] = expected_row['seconds']
    assert history == expected_history
    for name, weight in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_result(finished, tmp_path):
    """Killed within the third of four stages: epoch 5 of 6 is saved and the last is not."""
    process = subprocess.Popen([*COMMAND, tmp_path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / 'conv_only' / 'last.pth.tar').exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / 'results.json').exists()
    result = subprocess.run([*COMMAND, tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name, row in rows(finished[0]).items():
        for key in ('top1', 'top5'):
            assert rows(tmp_path)[name][key] == row[key]


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp('finished')
    result = subprocess.run([*COMMAND, output], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return output, result.stdout


@pytest.mark.slow
def test_table_is_printed(finished):
    output, stdout = finished
    assert (output / 'results.md').read_text() in stdout
    top1 = rows(output)['phase 1, converted, phase 2']['top1']
    assert f'loaded back: top-1 {top1:.2f} %' in stdout
