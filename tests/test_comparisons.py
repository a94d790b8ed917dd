"""The experiments that compare trainings on the digits; those that train as a user runs them are slow."""
import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import figure2
import natural_images as photo_runs
import numpy as np
import pytest
import table1
import table1_cifar100
import thin_heads
import torch
from common.data import DIGIT, place_digits, split_digits
from common.photo_rows import DRAWN, HELD, MAPPED, make_rows
from common.photos import split_photos
from common.report import spread
from common.rows import CMHSA3, CMHSA5, ROWS, TUNING_SIZE, choose_rates, plan
from common.runs import do, read_result, run_all
from common.timing import processor
from common.training import has_bfloat16
from PIL import Image
from timm.models import load_checkpoint

EXPERIMENTS = Path(__file__).parents[1] / 'experiments'
SHORT = ['--seeds', 1, '--num-train', 20, '--epochs', 1, '--repeats', 1]
LITTLE = ['--seeds', '1', '--images-per-phase', '300', '--learning-rates', '2e-3']
TITLES = [
    'ViT-base', 'DeiT-small', 'DeiT-base', 'CMHSA-3 (1st phase)', 'CMHSA-5 (1st phase)', 'CMHSA (2nd phase)',
    'CMHSA-3', 'CMHSA-5']


def cells(table, num_rows):
    """The first rows of a table in Markdown, without its head."""
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in table.splitlines()[2:2 + num_rows]]


def test_rows_are_trained_alike():
    """As many images in all, half of them in each of two phases."""
    for row in ROWS:
        for size in (20, 60):
            run = plan(row, (1e-3, 2e-3)[:len(row.phases)], size, 0, 600)
            runs = [run] if run.phase1 is None else [run.phase1, run]
            assert [each.stage.model for each in runs] == [model for model, _ in row.phases]
            assert sum(each.stage.epochs * each.num_train for each in runs) == 1200
            assert len({each.stage.epochs for each in runs}) == 1
            for each in runs:
                assert each.augment == (row.title != 'ViT-base') == (each.stage.weight_decay > 0)
                assert (each.stage.smoothing > 0) == each.augment


def test_table_has_every_row_at_every_size(tmp_path):
    accuracies = [{'top1': 10., 'top5': 90.}, {'top1': 20., 'top5': 90.}]
    results = {data: dict.fromkeys(TITLES, accuracies) for data in ('20 images', '60 images')}
    rates = {title: (1e-3, 2e-3)[:1 + (title in ('CMHSA-3', 'CMHSA-5'))] for title in TITLES}
    table = table1.markdown(results, rates, repeats=1)
    rows = cells(table, 8)
    assert [row[:6] for row in rows] == [
        ['ViT-base', '6', '4', '64', '256', '0.001'],
        ['DeiT-small', '6', '2', '32', '128', '0.001'],
        ['DeiT-base', '6', '4', '64', '256', '0.001'],
        ['CMHSA-3 (1st phase)', '3', '-', '64', '256', '0.001'],
        ['CMHSA-5 (1st phase)', '3', '-', '64', '256', '0.001'],
        ['CMHSA (2nd phase)', '3', '9', '64', '256', '0.001'],
        ['CMHSA-3', '3', '9', '64', '256', '0.002'],
        ['CMHSA-5', '3', '9', '64', '256', '0.002'],
    ]
    assert all(row[6:10] == ['15.0 ± 7.1', '15.0 ± 7.1', '90.0 ± 0.0', '90.0 ± 0.0'] for row in rows)
    assert rows[0][10] == '1.00x'
    assert 'over 2 seeds' in table
    table1.plot(results, tmp_path / 'table1.png')
    assert min(Image.open(tmp_path / 'table1.png').size) > 300


def test_a_single_seed_has_no_spread():
    assert spread([12.34]) == '12.3'


def test_curves_of_figure2():
    run = plan(CMHSA5, (1e-3, 2e-3), TUNING_SIZE, 0, 4200)
    assert run.stage.warmup_epochs == 1
    curves = figure2.plan_curves([run])
    assert list(curves) == [
        'converted, with warm-up', 'converted, without warm-up', 'random, with warm-up', 'random, without warm-up']
    assert [(each.stage.warmup_epochs, each.phase1) for each, in curves.values()] == [
        (1, run.phase1), (0, run.phase1), (1, None), (0, None)]


def test_heads_are_as_many_as_the_kernel_needs():
    assert [[thin_heads.shape(heads, kernel) for kernel in (3, 5)] for heads in thin_heads.CHOICES] == [
        ['9 of d', '9 of d'], ['12 of 16', '12 of 16'], ['16 of 8', '20 of 8'], ['22 of 8', '26 of 8']]


@pytest.fixture(scope='module')
def phase1(tmp_path_factory):
    """A trained first phase, and the second one that goes on from there; with the folder of both."""
    folder = tmp_path_factory.mktemp('runs')
    run = plan(CMHSA3, (2e-3, 2e-3), 20, 0, 20)
    do(run.phase1, folder)
    return run, folder


@pytest.mark.parametrize(('num_heads', 'sharpness', 'zero_key'), [
    (9, None, True), (12, None, True), (9, 8., True), (9, None, False)])
def test_phase2_starts_as_phase1_ends(num_heads, sharpness, zero_key, phase1):
    run, folder = phase1
    stage = run.stage._replace(model_args={**run.stage.model_args, 'num_heads': num_heads})
    run = run._replace(stage=stage, sharpness=sharpness, zero_key=zero_key)
    do(run, folder)
    before, after = read_result(run.phase1, folder)['test'], read_result(run, folder)['before']
    exact = sharpness is None and zero_key
    assert exact == math.isclose(before['loss'], after['loss'], abs_tol=1e-5)
    assert not exact or before['top1'] == after['top1']
    weights = torch.load(run.checkpoint(folder), weights_only=False)['state_dict']
    bias = weights['blocks.0.attn.rel_pos.zero_key_bias']
    assert len(bias) == num_heads
    assert bool((bias == -1e4).all()) != zero_key
    if sharpness is not None:
        assert bias.max() == pytest.approx(sharpness / 2, abs=0.5)


def test_done_runs_are_not_done_again_and_settings_do_not_mix(phase1):
    run, folder = phase1
    path = folder / run.phase1.name / 'result.json'
    before = path.stat().st_mtime_ns
    assert run_all({'phase 1': [run.phase1]}, folder, 'test') == {'phase 1': [read_result(run.phase1, folder)]}
    assert path.stat().st_mtime_ns == before
    others = [
        run, run._replace(seed=1), run._replace(num_train=40), run._replace(augment=False), run._replace(phase1=None),
        run._replace(sharpness=8.), run._replace(zero_key=False), run._replace(stage=run.stage._replace(epochs=2))]
    assert len({other.name for other in others}) == len(others)


def test_the_best_rate_is_chosen_by_validation_on_seeds_of_its_own(tmp_path):
    """Of two rates, the better on the mean of two seeds; phase 1 of two has that of the first phase alone."""
    rows = [row for row in ROWS if 'CMHSA-3' in row.title]

    def done(row, rates, accuracies):
        for seed, accuracy in zip((100, 101), accuracies):
            folder = tmp_path / plan(row, rates, TUNING_SIZE, seed, 300).name
            folder.mkdir()
            (folder / 'result.json').write_text(json.dumps({'validation': {'top1': accuracy}, 'test': {'top1': 0.}}))

    single, double = rows
    done(single, (1e-3,), (90., 10.))
    done(single, (2e-3,), (60., 60.))
    done(double, (2e-3, 1e-3), (70., 70.))
    done(double, (2e-3, 2e-3), (50., 80.))
    for run in (plan(double, (2e-3, 1e-3), TUNING_SIZE, seed, 300).phase1 for seed in (100, 101)):
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / 'result.json').write_text('{}')
    assert choose_rates(rows, (1e-3, 2e-3), 300, tmp_path) == {
        'CMHSA-3 (1st phase)': (2e-3,), 'CMHSA-3': (2e-3, 1e-3)}
    assert choose_rates(rows, (4e-3,), 300, tmp_path) == {'CMHSA-3 (1st phase)': (4e-3,), 'CMHSA-3': (4e-3, 4e-3)}


def test_training_validation_and_test_images_are_disjoint():
    seen = []
    for seed in (0, 1):
        images, _ = place_digits(np.random.RandomState(seed), canvas=DIGIT)
        index = {}
        for number, image in enumerate(images):
            index.setdefault(image.tobytes(), set()).add(number)
        assert all(len(numbers) == 1 for numbers in index.values())
        parts = [[index[image.tobytes()] for image in data.images] for data in split_digits(900, seed, DIGIT)]
        numbers = [set().union(*part) for part in parts]
        assert [len(part) for part in numbers] == [900, 300, 597]
        assert len(set().union(*numbers)) == 1797
        seen.append(numbers)
    assert seen[0][2] == seen[1][2]
    assert seen[0][0] != seen[1][0]


@pytest.mark.parametrize(('script', 'arguments', 'message'), [
    (table1, ['--sizes', '10'], '--sizes must be between 20 and 900'),
    (table1, ['--seeds', '0'], '--seeds: 0 is not positive'),
    (table1, ['--images-per-phase', '299'], '--images-per-phase must be at least 300'),
    (table1, ['--images-per-phase', '500'], '--sizes must be between 20 and 500'),
    (table1, ['--learning-rates', '0'], '--learning-rates: 0 is not positive'),
    (table1_cifar100, ['--timm', 'nowhere'], 'nowhere has no train.py'),
    (table1_cifar100, ['--timm', '.', '--num-processes', '3', '--', '--device', 'cpu'], 'must divide the batch of 128'),
    (table1_cifar100, ['--timm', '.', '--', '--device', 'cpu', '--lr', '1'], '--lr is set by table1_cifar100.py'),
])
def test_bad_options(tmp_path, monkeypatch, capsys, script, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ('train.py', 'validate.py'):
        Path(name).touch()
    monkeypatch.setattr(sys, 'argv', ['script', *arguments])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path('output').exists()


def test_what_follows_two_dashes_is_for_train_py(tmp_path, monkeypatch):
    for name in ('train.py', 'validate.py'):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, 'argv', ['', '--timm', str(tmp_path), '--seeds', '1', '--', '--device', 'cpu', '-j', '1'])
    assert table1_cifar100.parse_args().options == ['--device', 'cpu', '-j', '1']


def run(script, *arguments):
    """Run a script as a user does; returns what it printed."""
    result = subprocess.run(
        [sys.executable, '-W', 'ignore', EXPERIMENTS / script, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope='module')
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp('comparisons')
    stdout = run('table1.py', *LITTLE, '--sizes', 20, 60, '--repeats', 1, '--output', folder)
    assert (folder / 'table1.md').read_text() in stdout
    return folder


def results(output):
    return {path: json.loads(path.read_text()) for path in output.glob('runs/*/result.json')}


@pytest.mark.slow
def test_table1(output):
    rows = cells((output / 'table1.md').read_text(), 8)
    assert [row[0] for row in rows] == TITLES
    assert all(len(row) == 11 for row in rows)
    assert min(Image.open(output / 'table1.png').size) > 300
    before = {path: path.stat().st_mtime_ns for path in results(output)}
    assert len(before) == 2 * (6 + 2 * 2)
    run('table1.py', *LITTLE, '--sizes', 20, 60, '--repeats', 1, '--output', output)
    assert {path: path.stat().st_mtime_ns for path in results(output)} == before


@pytest.mark.slow
def test_figure2(output):
    before = set(results(output))
    stdout = run('figure2.py', *LITTLE, '--output', output)
    for title in ('converted, with', 'converted, without', 'random, with', 'random, without'):
        assert f'| {title} warm-up |' in stdout
    assert min(Image.open(output / 'figure2.png').size) > 300
    settings = [result['settings'] for path, result in results(output).items() if path not in before]
    assert len([run for run in settings if run[0][0] == 'cmhsa_attn']) == 4


@pytest.mark.slow
def test_starts_of_phase2(output):
    stdout = run('phase2_starts.py', *LITTLE, '--output', output)
    rows = {line.split('|')[1].strip(): line.split('|') for line in stdout.splitlines() if line.startswith('|')}
    exact, spare, soft = (rows[title] for title in ('exact', 'exact, 3 spare heads', 'sharpness 8'))
    assert exact[3] == spare[3]
    assert exact[5] == spare[5]
    assert len(soft) == len(exact) == 8
    assert {'zero key', 'no zero key'} <= set(rows)


@pytest.mark.slow
def test_thin_heads(tmp_path):
    stdout = run('thin_heads.py', *SHORT, '--learning-rates', '2e-3', '--output', tmp_path)
    rows = cells(stdout[stdout.index('| heads of phase 2'):], 4)
    assert [row[0] for row in rows] == [heads.title for heads in thin_heads.CHOICES]
    for column in (3, 7):
        assert len({row[column] for row in rows}) == 1, 'every choice of heads starts where phase 1 ends'
    assert min(Image.open(tmp_path / 'thin_heads.png').size) > 300


@pytest.mark.slow
def test_attended_resnet(tmp_path):
    """Every form starts with the accuracy of the CNN."""
    stdout = run('attend_resnet.py', *SHORT, '--output', tmp_path)
    assert (tmp_path / 'attend_resnet.md').read_text() in stdout
    rows = json.loads((tmp_path / 'images20-seed0-epochs1' / 'result.json').read_text())
    assert list(rows) == ['none', 'all convolutions', 'last two stages']
    assert len({row['before'] for row in rows.values()}) == 1
    assert rows['none']['error'] == 0
    assert all(0 < rows[title]['error'] < 5e-6 for title in list(rows)[1:])
    assert (tmp_path / 'pictures' / 'attention.png').exists()


@pytest.mark.slow
def test_pixel_models(tmp_path):
    stdout = run('pixel_models.py', *SHORT, '--output', tmp_path)
    table = (tmp_path / 'pixel_models.md').read_text()
    assert table in stdout
    rows = cells(table, 6)
    assert [row[0] for row in rows] == [
        'ResNet-18', 'quadratic', 'generalized quadratic', 'learned', 'learned, with content',
        'generalized quadratic, pruned']
    assert all(0 <= float(row[3]) <= 100 for row in rows)
    assert len([line for line in table.splitlines() if re.match(r'\| [1-6] \| ', line)]) == 6, 'measures of every layer'
    for model in ('pixel_attn_quadratic', 'pixel_attn_quadratic_gen'):
        names = {path.name for path in (tmp_path / 'pictures' / model).iterdir()}
        assert {'attention.png', 'centers.png', 'attention.html'} <= names


def test_rows_of_natural_images_that_are_drawn_are_trained():
    assert {*DRAWN, MAPPED} <= {row.title for row in make_rows(2, 1)}


def test_rows_of_natural_images_are_chosen_by_held_out_images_and_compared_by_seed():
    """Of two rates that of the better first seed, of this budget only; a curve of phase 2 follows that of phase 1."""
    def record(after, seed, held_out, test, seconds=60., device='fast'):
        history = [{'epoch': 4, 'seconds': seconds, 'top1': test, 'train_loss': 1.}]
        return dict(
            title='phase 1' if after is None else 'two phases, peak 0.75', after=after, seed=seed,
            held_out={'top1': held_out}, test={'top1': test}, seconds=seconds, history=history, device=device)

    phase1 = 'phase 1 | 4 epochs | 50 images | lr 0.001 | seed 0'
    soft, alone = 'two phases, peak 0.75 | 4 + 2 epochs', 'phase 1 alone, as many steps | 6 epochs'
    results = {
        phase1: record(None, 0, 40., 40.),
        f'{soft} | 50 images | lr 0.001 and 0.001 | seed 0': record(phase1, 0, 50., 99.),
        f'{soft} | 50 images | lr 0.001 and 0.002 | seed 0': record(phase1, 0, 60., 58.),
        f'{soft} | 50 images | lr 0.001 and 0.002 | seed 1': record(phase1, 1, 10., 62., 90., 'slow'),
        f'{soft} | 50 images | lr 0.001 and 0.002 | seed 2': record(phase1, 2, 10., 63., device='unknown'),
        f'{soft} | 60 images | lr 0.001 and 0.002 | seed 0': record(phase1, 0, 90., 90.),
        f'{alone} | 50 images | lr 0.001 | seed 0': record(None, 0, 50., 56.),
        f'{alone} | 50 images | lr 0.001 | seed 1': record(None, 1, 50., 58., 180., 'slow'),
        f'{alone} | 50 images | lr 0.001 | seed 2': record(None, 2, 50., 60.),
    }
    best = photo_runs.best_records(results, argparse.Namespace(epochs1=4, epochs2=2, num_train=50))
    tops = {title: [each['test']['top1'] for each in records] for title, records in best.items()}
    assert tops == {
        'phase 1': [40.], 'phase 1 alone, as many steps': [56., 58., 60.], 'two phases, peak 0.75': [58., 62., 63.]}
    chosen, baseline = best['two phases, peak 0.75'], best['phase 1 alone, as many steps']
    assert photo_runs.gain(chosen, baseline) == '+3.0 (+0.5 to +5.5)'  # t = 4.303 with two degrees of freedom
    assert photo_runs.gain(chosen[:2], baseline) == '+3.0'
    assert photo_runs.gain(baseline, baseline) == '-'
    times = [[point['time'] for point in photo_runs.curve(each, results)] for each in chosen]
    assert times[:2] == [[4., 8.], [4., 6.]], 'in epochs of phase 1 on the same machine'
    assert math.isnan(times[2][1]), 'of a machine without phase 1'


def test_learning_rates_of_natural_images_are_chosen_by_held_out_images():
    args = argparse.Namespace(num_train=50, learning_rates=[1e-3, 2e-3], output=Path('none'))
    row = make_rows(4, 2)[0]
    results = {
        photo_runs.plan(row, 0, {row.title: rate}, args).key: {'held_out': {'top1': held_out}, 'test': {'top1': test}}
        for rate, held_out, test in ((1e-3, 40., 60.), (2e-3, 50., 30.))}
    assert photo_runs.tune([row], {'other': 1.}, results, args) == {'other': 1., 'phase 1': 2e-3}


@pytest.mark.skipif(sys.platform != 'linux' or torch.cuda.is_available(), reason='asks Linux what a CPU has')
def test_a_processor_is_told_by_name_family_and_model_and_trains_in_bfloat16_if_it_has_it():
    lines = Path('/proc/cpuinfo').read_text().split('\n\n')[0].splitlines()
    cpu = dict((part.strip() for part in line.split(':', 1)) for line in lines)
    assert has_bfloat16() == ('avx512_bf16' in cpu.get('flags', '').split()), 'emulated, it takes three times as long'
    if 'cpu family' in cpu:
        assert processor() == f'{cpu["model name"]} (family {cpu["cpu family"]}, model {cpu["model"]})'


def test_photos_are_split_without_overlap(tmp_path):
    """As many of every class; the seed chooses training and held-out images, but not test images."""
    write_photos(tmp_path, num_train=20)
    first, second = (split_photos(tmp_path, 20, 10, seed) for seed in range(2))

    def pixels(photos):
        return {image.numpy().tobytes() for image in photos.images}

    for split in (first, second):
        assert [len(pixels(photos)) for photos in split] == [20, 10, 10]
        assert [sum(photos.targets) for photos in split] == [10, 5, 5]
        assert not pixels(split.train) & pixels(split.held_out)
    assert pixels(first.train) != pixels(second.train)
    assert torch.equal(first.test.images, second.test.images)
    with pytest.raises(ValueError, match='has 20 training images of a class, where'):
        split_photos(tmp_path, 40, 10, seed=0)


def write_photos(folder, num_train):
    """Write noise as images of two classes: so many of each to train on, and 5 to test on."""
    random = np.random.RandomState(0)
    for name, count in (('train/a', num_train), ('train/b', num_train), ('validation/a', 5), ('validation/b', 5)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = random.randint(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f'{i}.png')


def natural_images(tmp_path, *options):
    """Return the command of this experiment, on noise."""
    write_photos(tmp_path / 'data', num_train=60)
    return [
        sys.executable, EXPERIMENTS / 'natural_images.py', '--data-dir', tmp_path / 'data', '--num-train', '100',
        '--num-held-out', '10', '--learning-rates', '1e-3', '--seeds', '1', '--results', tmp_path / 'results.json',
        '--output', tmp_path / 'output', '--workers', '1', *options]


@pytest.mark.slow
def test_natural_images(tmp_path):
    """Every run is done once, and what is there is read again."""
    command = natural_images(tmp_path, '--epochs1', '1', '--epochs2', '1', '--rows', MAPPED, '*held')
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert 'runs' not in done.stderr  # nothing was left to do
    results = json.loads((tmp_path / 'results.json').read_text())
    titles = ['phase 1', MAPPED, f'two phases, {HELD}']
    by_title = {record['title']: record for record in results.values()}
    assert sorted(record['title'] for record in results.values()) == sorted(titles)
    soft = by_title[f'two phases, {HELD}']
    assert soft['before']['top1'] == pytest.approx(results[soft['after']]['test']['top1'], abs=1e-4)  # exact
    assert max(soft['bias_movement']) > 0
    row = next(row for row in make_rows(1, 1) if row.title == soft['title'])
    run = photo_runs.plan(row, 0, {'phase 1': 1e-3, row.title: 1e-3}, argparse.Namespace(num_train=100))
    attn = photo_runs.start(run, tmp_path / 'output')[1].blocks[0].attn
    start = [values.clone() for values in photo_runs.global_head(attn)]
    load_checkpoint(model := photo_runs.start(run, tmp_path / 'output')[1], str(run.checkpoint(tmp_path / 'output')))
    for before, after in zip(start, photo_runs.global_head(model.blocks[0].attn)):
        assert torch.equal(before, after)  # held
    assert [row[0] for row in cells((tmp_path / 'results.md').read_text(), 3)] == titles
    for picture in ('results.png', 'results_maps.png'):
        assert (tmp_path / picture).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
def test_natural_images_stopped(number, tmp_path):
    """The runs end with the command: later ones write to the same checkpoints. A second phase waits for the first."""
    command = natural_images(
        tmp_path, '--epochs1', '20', '--epochs2', '1', '--seeds', '2', '--rows', 'two phases, not rewritten')
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs ignore it
    while not list(tmp_path.glob('output/phase_1*seed_1/model/last.pth.tar')):
        assert process.poll() is None
        time.sleep(0.01)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()
    error = process.communicate(timeout=600)[1]  # until no process has this pipe open
    if number == signal.SIGINT:
        assert error.endswith('Stopped. The same command goes on from here.\n')
        assert 'Traceback' not in error
    history, = tmp_path.glob('output/phase_1*seed_1/model/history.json')
    assert json.loads(history.read_text())[-1]['epoch'] < 20, 'it was not trained to its end'
    subprocess.run(command, capture_output=True, check=True)
    results = json.loads((tmp_path / 'results.json').read_text())
    assert [(record['seed'], record['history'][-1]['epoch']) for record in results.values()] == [
        (0, 20), (1, 20), (0, 1), (1, 1)]


@pytest.mark.parametrize(('options', 'message'), [
    (['--rows', 'peak 0.75'], "no row is called 'peak 0.75': choose of 'phase 1', "),
    (['--data-dir', 'none'], 'none has no folder train: expected train/CLASS and validation/CLASS with images, or'),
    (['--num-train', '700'], 'has 60 training images of a class, where 350 to train on and 5 to hold out were'),
])
def test_inputs_of_natural_images(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', list(map(str, natural_images(tmp_path, *options)[1:])))
    with pytest.raises(SystemExit, match='2'):
        photo_runs.main()
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {'data'}


@pytest.mark.parametrize('content', ['{"phase 1": {"top1": 50}}', '[1]', 'text'])
def test_a_file_that_is_no_results_of_natural_images_is_left_as_it_is(content, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', list(map(str, natural_images(tmp_path)[1:])))
    (tmp_path / 'results.json').write_text(content)
    with pytest.raises(SystemExit, match='2'):
        photo_runs.main()
    assert 'results.json holds no results of this script: give another --results' in capsys.readouterr().err
    assert (tmp_path / 'results.json').read_text() == content
