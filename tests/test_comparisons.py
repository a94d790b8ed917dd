"""The examples that compare trainings on the digits, as a user runs them, with very little training."""
import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import table1
import torch
from digits import DIGIT, place_digits
from PIL import Image
from runs import Run, split_digits
from two_phase import Stage

EXAMPLES = Path(__file__).parents[1] / 'examples'
LITTLE = ['--seeds', '1', '--images-per-phase', '300', '--learning-rates', '2e-3']


def run(script, *arguments, cwd=None):
    return subprocess.run(
        [sys.executable, '-W', 'ignore', EXAMPLES / script, *map(str, arguments)], capture_output=True, text=True,
        cwd=cwd)


@pytest.fixture(scope='module')
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp('comparisons')
    result = run('table1.py', *LITTLE, '--sizes', 20, 60, '--output', folder)
    assert result.returncode == 0, result.stderr
    assert (folder / 'table1.md').read_text() in result.stdout
    return folder


def results(output):
    return {path: json.loads(path.read_text()) for path in output.glob('runs/*/result.json')}


def test_table_has_every_row_at_every_size(output):
    lines = (output / 'table1.md').read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines[2:10]]
    assert [row[:5] for row in rows] == [
        ['ViT-base', '6', '4', '64', '256'],
        ['DeiT-small', '6', '2', '32', '128'],
        ['DeiT-base', '6', '4', '64', '256'],
        ['CMHSA-3 (1st phase)', '3', '-', '64', '256'],
        ['CMHSA-5 (1st phase)', '3', '-', '64', '256'],
        ['CMHSA (2nd phase)', '3', '9', '64', '256'],
        ['CMHSA-3', '3', '9', '64', '256'],
        ['CMHSA-5', '3', '9', '64', '256'],
    ]
    assert all(len(row) == 11 and row[5] == '0.002' for row in rows)
    assert rows[0][-1] == '1.00x'
    assert min(Image.open(output / 'table1.png').size) > 300


def test_rows_are_trained_alike(output):
    """As many images in all, half of them in each of two phases; phase 2 starts as phase 1 ends."""
    by_name = {path.parent.name: result for path, result in results(output).items()}
    assert len(by_name) == 2 * (6 + 2 * 2)
    for result in by_name.values():
        stage, size, _, augment, phase1, *_ = result['settings']
        single = phase1 is None and stage[1] not in ('CMHSA-3', 'CMHSA-5')
        assert stage[4] * size == (600 if single else 300)
        assert augment == (stage[1] != 'ViT-base') == (stage[7] > 0)
        if phase1 is not None:
            before = next(other for other in by_name.values() if other['settings'] == phase1)
            assert before['test']['top1'] == result['before']['top1']
            assert before['test']['loss'] == pytest.approx(result['before']['loss'], abs=1e-5)


def test_done_runs_are_not_done_again_and_settings_do_not_mix(output):
    before = {path: path.stat().st_mtime_ns for path in results(output)}
    again = run('table1.py', *LITTLE, '--sizes', 20, 60, '--output', output)
    assert again.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in results(output)} == before
    other = run('table1.py', *LITTLE, '--images-per-phase', 320, '--sizes', 20, '--output', output)
    assert other.returncode == 0
    assert len(results(output)) == len(before) + 10
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_figure2(output):
    before = set(results(output))
    result = run('figure2.py', *LITTLE, '--output', output)
    assert result.returncode == 0, result.stderr
    for title in ('converted, with', 'converted, without', 'random, with', 'random, without'):
        assert f'| {title} warm-up |' in result.stdout
    assert min(Image.open(output / 'figure2.png').size) > 300
    settings = [result['settings'] for path, result in results(output).items() if path not in before]
    curves = sorted((run[0][6], run[4] is not None) for run in settings if run[0][0] == 'cmhsa_attn')
    assert curves == [(0, False), (0, True), (1, False), (1, True)]  # epochs of warm-up, converted


def test_starts_of_phase2(output):
    before = set(results(output))
    result = run('phase2_starts.py', *LITTLE, '--output', output)
    assert result.returncode == 0, result.stderr
    rows = {line.split('|')[1].strip(): line for line in result.stdout.splitlines() if line.startswith('|')}
    exact, spare, soft = (rows[title].split('|') for title in ('exact', 'exact, 3 spare heads', 'sharpness 8'))
    assert exact[3] == spare[3]
    assert exact[5] == spare[5]
    assert len(soft) == len(exact) == 8
    for path, run_result in results(output).items():
        if path not in before and run_result['settings'][0][0] == 'cmhsa_attn':
            weights = torch.load(path.parent / 'cmhsa_attn' / 'last.pth.tar', weights_only=False)['state_dict']
            stage, *_, sharpness, zero_key = run_result['settings']
            bias = weights['blocks.0.attn.rel_pos.zero_key_bias']
            assert len(bias) == stage[3].get('num_heads', 9)
            assert bool((bias == -1e4).all()) != zero_key
            if sharpness is not None:
                assert bias.max() == pytest.approx(sharpness / 2, abs=0.5)


def test_thin_heads(tmp_path):
    result = run('thin_heads.py', '--seeds', 1, '--epochs', 1, '--learning-rates', '2e-3', '--output', tmp_path)
    assert result.returncode == 0, result.stderr
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in result.stdout.splitlines()
            if line.startswith('|')][2:]
    assert [[row[0], row[2], row[6]] for row in rows] == [
        ['as wide as a token', '9 of d', '9 of d'],
        ['a quarter as wide', '12 of 16', '12 of 16'],
        ['an eighth as wide', '16 of 8', '20 of 8'],
        ['an eighth as wide, 6 spare', '22 of 8', '26 of 8'],
    ]
    for column in (3, 7):
        assert len({row[column] for row in rows}) == 1, 'every choice of heads starts where phase 1 ends'
    assert min(Image.open(tmp_path / 'thin_heads.png').size) > 300
    models = [result['settings'][0][3] for result in results(tmp_path).values() if result['settings'][4]]
    assert sorted((args['num_heads'], args['head_dim'] or 64) for args in models) == [
        (9, 64), (9, 64), (12, 16), (12, 16), (16, 8), (20, 8), (22, 8), (26, 8)]


def test_the_best_rate_is_chosen_on_seeds_of_its_own(tmp_path, monkeypatch):
    """Of two rates, one of which cannot learn, every row chooses the other; images, seeds and runs here are few."""
    monkeypatch.setattr(table1, 'TUNING_SIZE', 40)
    args = argparse.Namespace(learning_rates=[1e-12, 2e-3], images_per_phase=1200, output=tmp_path)
    rows = [row for row in table1.ROWS if 'CMHSA-3' in row.title]
    monkeypatch.setattr(table1, 'ROWS', rows)
    assert table1.choose_rates(args) == {'CMHSA-3 (1st phase)': 2e-3, 'CMHSA-3': 2e-3}
    assert {result['settings'][2] for result in results(tmp_path).values()} == {100, 101}


def test_training_validation_and_test_images_are_disjoint():
    seen = []
    for seed in (0, 1):
        run_ = Run(Stage('x', 'x', 'x', {'img_size': DIGIT}, 1, 1e-3), 900, seed)
        images, _ = place_digits(np.random.RandomState(seed), canvas=DIGIT)
        index = {}
        for number, image in enumerate(images):
            index.setdefault(image.tobytes(), set()).add(number)
        assert all(len(numbers) == 1 for numbers in index.values())
        parts = [[index[image.tobytes()] for image in data.images] for data in split_digits(run_)]
        numbers = [set().union(*part) for part in parts]
        assert [len(part) for part in numbers] == [900, 300, 597]
        assert len(set().union(*numbers)) == 1797
        seen.append(numbers)
    assert seen[0][2] == seen[1][2]
    assert seen[0][0] != seen[1][0]


@pytest.mark.parametrize(('arguments', 'message'), [
    (['--sizes', 10], '--sizes must be between 20 and 900'),
    (['--seeds', 0], '--seeds must be at least 1'),
    (['--images-per-phase', 299], '--images-per-phase must be at least 300'),
    (['--images-per-phase', 500], '--images-per-phase must be at least the largest of --sizes'),
    (['--paper', 'nowhere'], 'nowhere has no train.py'),
    (['--learning-rates', 0], '--learning-rates must be positive'),
    (['--', '--lr', 1], 'options for train.py are for --paper'),
    (['--search-rates'], '--search-rates and options'),
    (['--paper', '.', '--num-processes', 3, '--', '--device', 'cpu'], 'must divide the batch of 128'),
    (['--paper', '.', '--', '--device', 'cpu', '--lr', 1], '--lr is set by table1.py itself'),
])
def test_bad_options(tmp_path, arguments, message):
    for script in ('train.py', 'validate.py'):
        (tmp_path / script).touch()
    result = run('table1.py', '--output', tmp_path / 'out', *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / 'out').exists()


def test_attended_resnet(tmp_path):
    """Every form starts with the accuracy of the CNN; a second call does nothing again."""
    arguments = ['--seeds', 1, '--epochs', 2, '--output', tmp_path]
    result = run('attend_resnet.py', *arguments)
    assert result.returncode == 0, result.stderr
    table = (tmp_path / 'attend_resnet.md').read_text()
    assert table in result.stdout
    rows = json.loads((tmp_path / 'seed0-epochs2' / 'result.json').read_text())
    assert list(rows) == ['none', 'all convolutions', 'last two stages']
    assert len({row['before'] for row in rows.values()}) == 1
    assert rows['none']['error'] == 0
    assert all(0 < rows[title]['error'] < 5e-6 for title in list(rows)[1:])
    assert rows['none']['params'] < rows['last two stages']['params'] < rows['all convolutions']['params']
    assert (tmp_path / 'pictures' / 'attention.png').exists()
    before = (tmp_path / 'seed0-epochs2' / 'result.json').stat().st_mtime_ns
    assert run('attend_resnet.py', *arguments).returncode == 0
    assert (tmp_path / 'seed0-epochs2' / 'result.json').stat().st_mtime_ns == before


def test_pixel_models(tmp_path):
    result = run('pixel_models.py', '--seeds', 1, '--epochs', 1, '--output', tmp_path)
    assert result.returncode == 0, result.stderr
    table = (tmp_path / 'pixel_models.md').read_text()
    assert table in result.stdout
    rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in table.splitlines()[2:8]]
    assert [row[0] for row in rows] == [
        'ResNet-18', 'quadratic', 'generalised quadratic', 'learned', 'learned, with content',
        'generalised quadratic, pruned']
    assert all(0 <= float(row[3]) <= 100 for row in rows)
    assert len([line for line in table.splitlines() if re.match(r'\| [1-6] \| ', line)]) == 6, 'measures of every layer'
    for model in ('pixel_attn_quadratic', 'pixel_attn_quadratic_gen'):
        names = {path.name for path in (tmp_path / 'pictures' / model).iterdir()}
        assert {'attention.png', 'centers.png', 'attention.html'} <= names
