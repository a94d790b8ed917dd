"""The experiments that compare trainings; those that train as a user runs them are slow."""
import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import figure2
import natural_images as photo_runs
import numpy as np
import pytest
import table1
import table1_cifar100
import thin_heads
import torch
import vit_starts as starts
from common.images import digits, photos
from common.queue import run_queue
from common.report import spread
from common.rows import ATTN, CMHSA3, CMHSA5, ROWS, TUNING_SIZE, choose_rates, plan, to_attention
from common.runs import Run, create, do, read_results, run_all
from natural_images import DRAWN, SHORT, SOFT, make_rows
from PIL import Image
from timm.utils import random_seed

import timm_cmhsa
from timm_cmhsa import attention_maps, head_statistics

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / 'experiments'
SHORTEST = ['--seeds', 1, '--num-train', 60, '--epochs', 1, '--repeats', 1]
LITTLE = ['--seeds', '1', '--images-per-phase', '300', '--learning-rates', '2e-3']
TITLES = [
    'ViT-base', 'DeiT-small', 'DeiT-base', 'CMHSA-3 (1st phase)', 'CMHSA-5 (1st phase)', 'CMHSA (2nd phase)',
    'CMHSA-3', 'CMHSA-5']


def cells(table, num_rows):
    """The first rows of a table in Markdown, without its head."""
    return [[cell.strip() for cell in line.strip('|').split('|')] for line in table.splitlines()[2:2 + num_rows]]


def test_rows_are_trained_alike():
    """On the same number of images in all, half of them in each of two phases."""
    for row in ROWS:
        for size in (20, 60):
            run = plan(row, (1e-3, 2e-3)[:len(row.phases)], size, 0, 600)
            runs = [run] if run.after is None else [run.after, run]
            assert (run.after or run).options['model'] == row.phases[0][0]
            assert sum(each.options['epochs'] * each.num_train for each in runs) == 1200
            assert len({each.options['epochs'] for each in runs}) == 1
            for each in runs:
                is_plain = [each.options.get(name) == 0 for name in ('shift', 'smoothing', 'weight_decay')]
                assert is_plain == 3 * [row.title == 'ViT-base']


def test_table_has_every_row_at_every_size(tmp_path):
    accuracies = [{'top1': 10.}, {'top1': 20.}]
    results = {data: dict.fromkeys(TITLES, accuracies) for data in ('20 images', '60 images')}
    rates = {title: (1e-3, 2e-3)[:1 + (title in ('CMHSA-3', 'CMHSA-5'))] for title in TITLES}
    rows = cells(table1.markdown(results, rates, repeats=1), 8)
    assert [row[0] for row in rows] == TITLES
    assert rows[0][1:6] == ['6', '4', '64', '256', '0.001']
    assert rows[7][1:6] == ['3', '9', '64', '256', '0.002']
    assert all(row[6:8] == ['15.0 ± 7.1', '15.0 ± 7.1'] for row in rows)
    assert rows[0][8] == '1.00x'
    table1.plot(results, tmp_path / 'table1.png')
    assert min(Image.open(tmp_path / 'table1.png').size) > 300


def test_a_single_seed_has_no_spread():
    assert spread([12.34]) == '12.3'


def test_curves_of_figure2():
    run = plan(CMHSA5, (1e-3, 2e-3), TUNING_SIZE, 0, 4200)
    assert run.options['warmup_epochs'] == 1
    curves = figure2.plan_curves([run])
    assert [(each.options['warmup_epochs'], each.after, each.options.get('model')) for each, in curves.values()] == [
        (1, run.after, None), (0, run.after, None), (1, None, ATTN[0]), (0, None, ATTN[0])]
    assert len({run.key, *(each.key for each, in curves.values())}) == 5


def test_number_of_heads_is_what_the_kernel_needs():
    assert [[thin_heads.shape(heads, kernel) for kernel in (3, 5)] for heads in thin_heads.CHOICES] == [
        ['9 of d', '9 of d'], ['12 of 16', '12 of 16'], ['16 of 8', '20 of 8'], ['22 of 8', '26 of 8']]


@pytest.fixture(scope='module')
def phase1(tmp_path_factory):
    """A trained first phase, and the second one that goes on from there; with the folder of both."""
    folder = tmp_path_factory.mktemp('runs')
    run = plan(CMHSA3, (2e-3, 2e-3), 60, 0, 180)
    return run, folder, do(run.after, folder)


@pytest.mark.parametrize('num_heads', [9, 12])
def test_phase2_starts_as_phase1_ends(num_heads, phase1):
    run, folder, before = phase1
    rewrite = partial(timm_cmhsa.convert_model, architecture='cmhsa_attn', num_heads=num_heads)
    run = run._replace(title=f'{num_heads} heads', rewrite=rewrite)
    result = do(run, folder)
    assert run.after.checkpoint(folder).samefile(run.folder(folder) / 'checkpoints' / 'phase1.pth.tar')
    assert result['before']['top1'] == pytest.approx(before['test']['top1'])
    assert result['looks']['before']['best_weight'] > 0.7
    assert result['bias_moved'] is not None


def test_settings_do_not_mix(tmp_path):
    run = plan(CMHSA3, (2e-3, 2e-3), 20, 0, 20)
    others = [
        run, run._replace(title='other'), run._replace(seed=1), run._replace(num_train=40), run._replace(after=None),
        *(run._replace(options={**run.options, **changes}) for changes in (dict(epochs=2), dict(lr=1e-3)))]
    assert len({other.key for other in others}) == len({other.folder(tmp_path) for other in others}) == len(others)


def test_the_best_rate_is_chosen_on_held_out_images_and_seeds_of_its_own(tmp_path):
    """Of two rates, the better on the mean of two seeds; phase 1 of two has that of the first phase alone."""
    rows = [row for row in ROWS if 'CMHSA-3' in row.title]
    single, double = rows
    done = {}
    for row, rates, accuracies in (
            (single, (1e-3,), (90., 10.)), (single, (2e-3,), (60., 60.)),
            (double, (2e-3, 1e-3), (70., 70.)), (double, (2e-3, 2e-3), (50., 80.))):
        for seed, accuracy in zip((100, 101), accuracies):
            key = plan(row, rates, TUNING_SIZE, seed, 300).key
            done[key] = {'run': key, 'held_out': {'top1': accuracy}, 'test': {'top1': 0.}}
    (tmp_path / 'results.jsonl').write_text(''.join(f'{json.dumps(result)}\n' for result in done.values()))
    assert choose_rates(rows, (1e-3, 2e-3), 300, tmp_path) == {
        'CMHSA-3 (1st phase)': (2e-3,), 'CMHSA-3': (2e-3, 1e-3)}
    assert choose_rates(rows, (4e-3,), 300, tmp_path) == {'CMHSA-3 (1st phase)': (4e-3,), 'CMHSA-3': (4e-3, 4e-3)}


def names_in(folder, split):
    return {path.name for path in (folder / split).glob('*/*')}


def test_training_held_out_and_test_images_are_disjoint(tmp_path):
    folders = [digits(tmp_path, 900, seed) for seed in range(2)]
    for folder in folders:
        parts = [names_in(folder, split) for split in ('train', 'validation', 'test')]
        assert [len(part) for part in parts] == [900, 300, 597]
        assert len(set().union(*parts)) == 1797
    assert names_in(folders[0], 'test') == names_in(folders[1], 'test')
    assert names_in(folders[0], 'train') != names_in(folders[1], 'train')


@pytest.mark.parametrize(('script', 'arguments', 'message'), [
    (table1, ['--sizes', '10'], '--sizes must be between 60 and 900'),
    (thin_heads, ['--num-train', '1200'], '--num-train: 1200 is not between 60 and 900'),
    (table1, ['--seeds', '0'], '--seeds: 0 is not positive'),
    (table1, ['--images-per-phase', '299'], '--images-per-phase must be at least 300'),
    (table1, ['--images-per-phase', '500'], '--sizes must be between 60 and 500'),
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


def two_runs():
    """Two phases of one model, the first of which takes some seconds."""
    options = dict(img_size=32, batch_size=20, epochs=40, lr=1e-3, model='test_cmhsa_conv_k3',
                   model_kwargs=dict(in_chans=1), mixup=0., cutmix=0.)
    second = {**options, 'epochs': 1}
    return {'both': [Run('phase 2', 60, 0, second, after=Run('phase 1', 60, 0, options), rewrite=to_attention)]}


@pytest.mark.parametrize('number', [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_runs_that_were_stopped_go_on_and_what_is_done_is_not_done_again(number, tmp_path):
    """The runs end with the process that started them: later ones write to the same checkpoints."""
    code = f'import sys; sys.path[:0] = {sys.path}; import test_comparisons as test; from pathlib import Path; '
    code += f'test.run_all(test.two_runs(), Path({str(tmp_path)!r}), "runs")'
    process = subprocess.Popen(
        [sys.executable, '-W', 'ignore', '-c', code], stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs ignore it
    (run,), = two_runs().values()
    checkpoint = run.after.checkpoint(tmp_path)
    while not checkpoint.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    error = process.communicate(timeout=600)[1]  # until no process has this pipe open
    if number == signal.SIGINT:
        assert error.endswith('Stopped. The same command goes on from here.\n')
        assert 'Traceback' not in error
    history = torch.load(checkpoint, weights_only=True)['history']
    assert 0 < len(history) < 40
    assert not (tmp_path / 'results.jsonl').exists()

    (result,), = run_all(two_runs(), tmp_path, 'runs').values()
    results = read_results(tmp_path / 'results.jsonl')
    assert results == {result['run']: result, result['after']: results[result['after']]}
    assert result['before']['top1'] == pytest.approx(results[result['after']]['test']['top1'])
    whole = torch.load(checkpoint, weights_only=True)['history']
    assert [row['epoch'] for row in whole] == [*range(1, 41)]
    assert whole[:len(history)] == history

    checkpoint.unlink()
    assert run_all(two_runs(), tmp_path, 'runs') == {'both': [result]}
    assert not checkpoint.exists()


def run_script(script, *arguments):
    """Run a script as a user does; returns what it printed."""
    result = subprocess.run(
        [sys.executable, '-W', 'ignore', EXPERIMENTS / script, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope='module')
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp('comparisons')
    stdout = run_script('table1.py', *LITTLE, '--sizes', 60, '--repeats', 1, '--output', folder)
    assert (folder / 'table1.md').read_text() in stdout
    return folder


@pytest.mark.slow
def test_table1(output):
    rows = cells((output / 'table1.md').read_text(), 8)
    assert [row[0] for row in rows] == TITLES
    assert all(len(row) == 8 for row in rows)
    assert min(Image.open(output / 'table1.png').size) > 300
    assert len(read_results(output / 'runs' / 'results.jsonl')) == 6 + 2 * 2


@pytest.mark.slow
def test_figure2(output):
    before = read_results(output / 'runs' / 'results.jsonl')
    stdout = run_script('figure2.py', *LITTLE, '--output', output)
    for title in ('converted, with', 'converted, without', 'random, with', 'random, without'):
        assert f'| {title} warm-up |' in stdout
    assert min(Image.open(output / 'figure2.png').size) > 300
    after = read_results(output / 'runs' / 'results.jsonl')
    assert len([key for key in after if 'warm-up' in key]) == 4
    assert all(after[key] == result for key, result in before.items())


@pytest.mark.slow
def test_thin_heads(tmp_path):
    stdout = run_script('thin_heads.py', *SHORTEST, '--learning-rates', '2e-3', '--output', tmp_path)
    rows = cells(stdout[stdout.index('| heads of phase 2'):], 4)
    assert [row[0] for row in rows] == [heads.title for heads in thin_heads.CHOICES]
    for column in (3, 7):
        assert len({row[column] for row in rows}) == 1, 'every choice of heads starts where phase 1 ends'
    assert min(Image.open(tmp_path / 'thin_heads.png').size) > 300


@pytest.mark.slow
def test_attended_resnet(tmp_path):
    """Every form starts with the accuracy of the CNN."""
    stdout = run_script('attend_resnet.py', *SHORTEST, '--output', tmp_path)
    assert (tmp_path / 'attend_resnet.md').read_text() in stdout
    rows = cells((tmp_path / 'attend_resnet.md').read_text(), 3)
    assert [row[0] for row in rows] == ['none', 'all convolutions', 'last two stages']
    assert len({row[3] for row in rows}) == 1
    errors = [float(row[2]) for row in rows]
    assert errors[0] == 0
    assert all(0 < error < 5e-6 for error in errors[1:])
    assert len(list(tmp_path.rglob('attention.png'))) == 2


@pytest.mark.slow
def test_pixel_models(tmp_path):
    stdout = run_script('pixel_models.py', *SHORTEST, '--output', tmp_path)
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


def test_the_documents_have_the_table_of_the_stored_results():
    """All rows are there, and those that are drawn have their curves."""
    results = read_results(ROOT / 'benchmarks' / 'natural_images.jsonl')
    args = argparse.Namespace(epochs1=160, epochs2=40, num_train=3000)
    best = photo_runs.best_results(results, args)
    assert list(best) == [row.title for row in make_rows(160, 40)]
    documents = (ROOT / 'docs' / 'results.md').read_text(encoding='utf-8')
    assert photo_runs.accuracies(best, results, args) in documents
    assert photo_runs.looks(best) in documents
    assert {SOFT, *SHORT} <= {*DRAWN} <= {*best}
    for title in DRAWN:
        for result in best[title]:
            end = photo_runs.curve(result, results, 'top1')[-1]
            assert end == pytest.approx((photo_runs.time_of(result, results), result['held_out']['top1']), rel=1e-3)


# queries of rewritten CNNs were as wide as values
SAME_SIZE = [row for row in make_rows(2, 1) if 'last two stages' not in row.title]


@pytest.mark.parametrize('row', SAME_SIZE, ids=lambda row: row.title)
def test_rows_of_natural_images_have_the_size_that_was_measured(row):
    sizes = {result['title']: result['params'] for result in read_results(
        ROOT / 'benchmarks' / 'natural_images.jsonl').values()}
    args = argparse.Namespace(num_train=20, data_dir=None, num_held_out=10)
    rates = {(row.after or row).title: 1e-3, row.title: 1e-3}
    model = create(photo_runs.plan(row, 0, rates, args))
    if row.rewrite:
        model = row.rewrite(model.eval())
    num_params = sum(parameter.numel() for parameter in model.parameters())
    assert num_params / 1e6 == pytest.approx(sizes[row.title], rel=1e-4)


def test_rows_of_natural_images_are_chosen_by_held_out_images_and_compared_by_seed():
    """Of two rates that of the better first seed, of this budget only; a curve of phase 2 follows that of phase 1."""
    def result(after, seed, held_out, test, seconds=60., device='fast'):
        return dict(
            title='phase 1' if after is None else SOFT, after=after, seed=seed, held_out={'top1': held_out},
            test={'top1': test}, epochs=4, seconds=seconds, curves={'epoch': [2, 4], 'top1': [1., test]}, device=device)

    phase1 = 'phase 1 | 4 epochs | 50 images | lr 0.001 | seed 0'
    soft, alone = f'{SOFT} | 4 + 2 epochs', 'phase 1 alone, as many steps | 6 epochs'
    results = {
        phase1: result(None, 0, 40., 40.),
        f'{soft} | 50 images | lr 0.001 and 0.001 | seed 0': result(phase1, 0, 50., 99.),
        f'{soft} | 50 images | lr 0.001 and 0.002 | seed 0': result(phase1, 0, 60., 58.),
        f'{soft} | 50 images | lr 0.001 and 0.002 | seed 1': result(phase1, 1, 10., 62., 90., 'slow'),
        f'{soft} | 50 images | lr 0.001 and 0.002 | seed 2': result(phase1, 2, 10., 63., device='unknown'),
        f'{soft} | 60 images | lr 0.001 and 0.002 | seed 0': result(phase1, 0, 90., 90.),
        f'{alone} | 50 images | lr 0.001 | seed 0': result(None, 0, 50., 56.),
        f'{alone} | 50 images | lr 0.001 | seed 1': result(None, 1, 50., 58., 180., 'slow'),
        f'{alone} | 50 images | lr 0.001 | seed 2': result(None, 2, 50., 60.),
    }
    best = photo_runs.best_results(results, argparse.Namespace(epochs1=4, epochs2=2, num_train=50))
    tops = {title: [each['test']['top1'] for each in seeds] for title, seeds in best.items()}
    assert tops == {'phase 1': [40.], 'phase 1 alone, as many steps': [56., 58., 60.], SOFT: [58., 62., 63.]}
    chosen, baseline = best[SOFT], best['phase 1 alone, as many steps']
    assert photo_runs.gain(chosen, baseline) == '+3.0 (+0.5 to +5.5)'  # t = 4.303 with two degrees of freedom
    assert photo_runs.gain(chosen[:2], baseline) == '+3.0'
    assert photo_runs.gain(baseline, baseline) == '-'
    assert photo_runs.curve(chosen[0], results, 'top1') == [(2., 1.), (4., 40.), (6., 1.), (8., 58.)]
    assert photo_runs.time_of(chosen[1], results) == 6., 'in epochs of phase 1 on the same machine'
    assert math.isnan(photo_runs.time_of(chosen[2], results)), 'of a machine without phase 1'


def test_photos_are_split_without_overlap(tmp_path):
    """As many of every class; the seed chooses training and held-out images, but not test images."""
    write_photos(tmp_path / 'all', num_train=20)
    first, second = (photos(tmp_path, 20, seed, tmp_path / 'all', 10) for seed in range(2))

    def pixels(folder, split):
        return {Image.open(path).tobytes() for path in (folder / split).glob('*/*')}

    for folder in (first, second):
        counts = [[len(list((folder / split / name).iterdir())) for name in 'ab']
                  for split in ('train', 'validation', 'test')]
        assert counts == [[10, 10], [5, 5], [5, 5]]
        assert not pixels(folder, 'train') & pixels(folder, 'validation')
    assert pixels(first, 'train') != pixels(second, 'train')
    assert pixels(first, 'test') == pixels(second, 'test')
    for numbers in ((40, 10), (20, 1)):
        with pytest.raises(ValueError, match='has 20 training images of a class, where'):
            photos(tmp_path, numbers[0], 0, tmp_path / 'all', numbers[1])


def add_one(name, seed, data_dir, output):
    """A run that leaves a mark."""
    with (output / 'done').open('a') as file:
        file.write(name)
    return [name, seed, int(seed) + 1]


def test_a_queue_does_every_run_once(tmp_path):
    write_photos(tmp_path / 'data', num_train=20)
    args = argparse.Namespace(
        results=tmp_path / 'results.csv', output=tmp_path, images=20, seeds=1, data_dir=tmp_path / 'data', workers=1)
    for names in 'ab', 'abc':
        run_queue(args, [(name, 0) for name in names], add_one, ('name', 'seed', 'sum'), held_out=10)
    assert (tmp_path / 'done').read_text() == 'abc'
    assert args.results.read_text() == 'name,seed,sum\na,0,1\nb,0,1\nc,0,1\n'


def test_starts_of_a_stock_vit():
    """Those of others look where their papers say."""
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    offsets = {}
    for name in starts.STARTS:
        random_seed(0)
        model = starts.vit_photos(start=name, img_size=32, num_classes=10)
        maps = next(iter(attention_maps(model, images).values()))
        offsets[name] = [head.best_offset for head in head_statistics(maps) if head.best_weight > 0.15]
    assert offsets['timm'] == []
    assert offsets['mimetic'] == 3 * [(0, 0)]
    assert offsets['structured'] == [(0, 0), (-1, 0), (0, 1)]
    assert all(len(set(heads)) == 3 for name, heads in offsets.items() if 'convolution' in name)


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
        '--num-held-out', '10', '--learning-rates', '1e-3', '--seeds', '1', '--output', tmp_path / 'output',
        '--results', tmp_path / 'results.jsonl', '--workers', '1', *options]


@pytest.mark.slow
def test_natural_images(tmp_path):
    """Every run is done once, and what is there is read again."""
    command = natural_images(tmp_path, '--epochs1', '1', '--epochs2', '1', '--rows', SOFT, 'two phases, hard heads')
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert 'runs' not in done.stderr  # nothing was left to do
    results = read_results(tmp_path / 'results.jsonl')
    titles = ['phase 1', 'two phases, hard heads', SOFT]
    assert [result['title'] for result in results.values()] == titles
    *_, hard, soft = results.values()
    for result in (hard, soft):
        assert result['before']['top1'] == pytest.approx(results[result['after']]['test']['top1'])  # exact
    assert hard['bias_moved'] == 0 < soft['bias_moved']
    output = tmp_path / 'output'
    assert [row[0] for row in cells((output / 'natural_images.md').read_text(), 3)] == titles
    for name in ('natural_images.png', 'two_phases.png'):
        assert (output / name).stat().st_size > 10_000
    assert len(list(output.glob('two_phases*/attention.png'))) == 2


@pytest.mark.parametrize(('options', 'message'), [
    (['--rows', 'peak 0.75'], "no row is called 'peak 0.75': choose from 'phase 1', "),
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
def test_a_file_without_results_is_left_as_it_is(content, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', list(map(str, natural_images(tmp_path)[1:])))
    (tmp_path / 'results.jsonl').write_text(content)
    with pytest.raises(SystemExit, match='2'):
        photo_runs.main()
    assert 'results.jsonl is not a file of results: give another one' in capsys.readouterr().err
    assert (tmp_path / 'results.jsonl').read_text() == content
