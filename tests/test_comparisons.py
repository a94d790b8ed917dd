"""The experiments that compare trainings; those that train as a user runs them are slow."""
import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hybrid_phase1
import hybrid_phase2
import natural_images
import numpy as np
import pytest
import table1
import table1_cifar100
import thin_heads
import timm
import torch
import vit_starts as starts
from common.images import digits, photos
from common.options import make_run_parser
from common.runs import Run, create, read_results, replicate, run_all
from helpers import images_for, max_error, phase1
from natural_images import DRAWN, PHASE1, ROWS, SOFT
from PIL import Image
from timm.models import VisionTransformer
from timm.utils import random_seed

from timm_cmhsa import CmhsaAttn, attention_maps, convert_model, head_statistics

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / 'experiments'


def test_rows_of_table1_are_trained_alike():
    """On the same number of images in all, half of them in each of two phases."""
    for row in table1.ROWS:
        for size in (100, 300):
            run = table1.plan(row, size)
            runs = [run] if run.after is None else [run.after, run]
            assert (run.after or run).options['model'] == row.phases[0][0]
            assert sum(each.options['epochs'] * each.num_train for each in runs) == 25200
            assert len({each.options['epochs'] for each in runs}) == 1
            for each in runs:
                is_plain = [each.options.get(name) == 0 for name in ('shift', 'smoothing', 'weight_decay')]
                assert is_plain == 3 * [row.title == 'ViT-base']


def test_number_of_heads_is_what_the_kernel_needs():
    assert [[thin_heads.shape(heads, kernel) for kernel in (3, 5)] for heads in thin_heads.CHOICES] == [
        ['9 of d', '9 of d'], ['12 of 16', '12 of 16'], ['16 of 8', '20 of 8'], ['22 of 8', '26 of 8']]


def test_settings_do_not_mix(tmp_path):
    run = ROWS[SOFT]
    others = [run, run._replace(title='other'), *(run.change(**changes) for changes in (
        dict(seed=1), dict(num_train=40), dict(options=dict(epochs=2)), dict(options=dict(lr=1e-4)))),
        run._replace(after=None)]
    assert len({other.key for other in others}) == len({other.folder(tmp_path) for other in others}) == len(others)


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


def write_photos(folder, num_train):
    """Write noise as images of two classes: so many of each to train on, and 5 to test on."""
    random = np.random.RandomState(0)
    for name, count in (('train/a', num_train), ('train/b', num_train), ('validation/a', 5), ('validation/b', 5)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = random.randint(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f'{i}.png')


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


@pytest.mark.parametrize(('script', 'arguments', 'message'), [
    (table1, ['--seeds', '0'], '--seeds: 0 is not positive'),
    (table1_cifar100, ['--timm', 'nowhere'], 'nowhere has no train.py'),
    (table1_cifar100, ['--timm', '.', '--num-processes', '3', '--', '--device', 'cpu'], 'must divide the batch of 128'),
    (table1_cifar100, ['--timm', '.', '--', '--device', 'cpu', '--lr', '1'], '--lr is set by table1_cifar100.py'),
    (natural_images, ['--data-dir', '.', '--rows', 'peak 0.75'], "choose from 'phase 1', "),
    (natural_images, ['--data-dir', 'none'], 'none has no folder train: expected train/CLASS and validation/CLASS'),
    (natural_images, ['--data-dir', '.', '--results', 'train.py'], 'train.py is not a file of results'),
])
def test_bad_options(tmp_path, monkeypatch, capsys, script, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ('train.py', 'validate.py'):
        Path(name).write_text('[1]')
    monkeypatch.setattr(sys, 'argv', ['script', *arguments])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert message in (capsys.readouterr().err if stopped.value.code == 2 else stopped.value.code)
    assert not Path('output').exists()
    assert Path('train.py').read_text() == '[1]'


def two_runs(output):
    """Do two phases of one model, the first of which takes some seconds."""
    options = dict(img_size=32, batch_size=20, epochs=40, lr=1e-3, model='test_cmhsa_conv_k3',
                   model_kwargs=dict(in_chans=1), mixup=0., cutmix=0.)
    first = Run('phase 1', 60, options)
    second = Run('phase 2', 60, {**options, 'epochs': 1}, after=first, rewrite=table1.to_attention)
    args = make_run_parser('', 'runs', 1).parse_args(['--output', str(output)])
    return first.checkpoint(output), lambda: run_all(replicate({0: second}, args), args)


@pytest.mark.parametrize('number', [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_runs_that_were_stopped_go_on_and_what_is_done_is_not_done_again(number, tmp_path):
    """The runs end with the process that started them: later ones write to the same checkpoints."""
    code = f'import sys; sys.path[:0] = {sys.path}; import test_comparisons as test; from pathlib import Path; '
    code += f'test.two_runs(Path({str(tmp_path)!r}))[1]()'
    process = subprocess.Popen(
        [sys.executable, '-W', 'ignore', '-c', code], stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background jobs ignore it
    checkpoint, run = two_runs(tmp_path)
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

    (result,), = run().values()
    results = read_results(tmp_path / 'results.jsonl')
    assert results == {result['run']: result, result['after']: results[result['after']]}
    assert result['before']['top1'] == pytest.approx(results[result['after']]['test']['top1'])
    whole = torch.load(checkpoint, weights_only=True)['history']
    assert [row['epoch'] for row in whole] == [*range(1, 41)]
    assert whole[:len(history)] == history

    checkpoint.unlink()
    assert run() == {0: [result]}
    assert not checkpoint.exists()


@pytest.mark.slow
@pytest.mark.parametrize(('script', 'num_rows', 'options'), [
    ('table1', 8, []), ('figure2', 4, []), ('thin_heads', 4, []), ('attend_resnet', 3, []), ('pixel_models', 6, []),
    ('hybrid_phase1', 14, 'photos'), ('hybrid_phase2', 6, 'photos'), ('vit_starts', 4, 'photos'),
    ('natural_images', 3, ['--rows', SOFT, 'two phases, hard heads']),
])
def test_scripts(script, num_rows, options, tmp_path):
    """Each in its quick form, as a user runs it: the table has all rows, and every rewrite changes nothing."""
    if options:
        write_photos(tmp_path / 'data', num_train=60)
        options = ['--data-dir', tmp_path / 'data', *(options if script == 'natural_images' else [])]
    output = tmp_path / 'output'
    command = [sys.executable, '-W', 'ignore', EXPERIMENTS / f'{script}.py', '--quick', '--seeds', '1', *options]
    done = subprocess.run([*command, '--output', output], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = (output / f'{script}.md').read_text()
    assert table in done.stdout
    assert table.split('\n\n')[0].count('\n|') >= num_rows
    for path in output.glob('*.png'):
        assert min(Image.open(path).size) > 300
    assert len(list(output.glob('*.png'))) == (script in ('table1', 'figure2', 'thin_heads', 'hybrid_phase2',
                                                         'natural_images'))
    results = read_results(output / 'results.jsonl')
    for result in results.values():
        if result['after'] and 'pruned' not in result['title']:
            assert result['before']['top1'] == pytest.approx(results[result['after']]['test']['top1'])
    if script == 'natural_images':
        moved = {result['title']: result['bias_moved'] for result in results.values()}
        assert moved['two phases, hard heads'] == 0 < moved[SOFT]
        assert len(list(output.glob('runs/two_phases*/attention.png'))) == 2
    if script == 'pixel_models':
        names = {path.name for path in (output / 'pictures' / 'pixel_attn_quadratic_gen').iterdir()}
        assert {'attention.png', 'centers.png', 'attention.html'} <= names


def test_the_documents_have_the_table_of_the_stored_results():
    """All rows are there, and those that are drawn have their curves."""
    results = read_results(ROOT / 'benchmarks' / 'natural_images.jsonl')
    best = natural_images.done(ROWS, results)
    assert list(best) == list(ROWS)
    documents = (ROOT / 'docs' / 'results.md').read_text(encoding='utf-8')
    assert natural_images.accuracies(best, results) in documents
    assert natural_images.looks(best) in documents
    assert {*DRAWN} <= {*best}
    assert all(result['curves']['top1'] for title in DRAWN for result in best[title])
    first, soft = (best[title][0] for title in (PHASE1, SOFT))
    points = natural_images.curve(soft, results, 'top1')
    assert points[0] == natural_images.curve(first, results, 'top1')[-1], 'phase 2 begins where phase 1 ends'
    assert points[-1] == (natural_images.time_of(soft, results), soft['curves']['top1'][-1])


def test_rows_have_the_size_that_was_measured():
    """But for queries of rewritten CNNs, which were as wide as values."""
    sizes = {result['title']: result['params'] for result in read_results(
        ROOT / 'benchmarks' / 'natural_images.jsonl').values()}
    for title, row in ROWS.items():
        if 'last two stages' not in title:
            model = create(row)
            model = row.rewrite(model.eval()) if row.rewrite else model
            assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(
                sizes[title], rel=1e-4), title
    lines = (ROOT / 'benchmarks' / 'hybrid_phase1.csv').read_text().splitlines()
    measured = {int(line.split(',')[4]) for line in lines[1:]}
    assert {sum(parameter.numel() for parameter in create(row).parameters()) for row in hybrid_phase1.ROWS} == measured


def test_gains_of_hybrids_are_paired_by_seed_and_number_of_images():
    results = [dict(title=title, num_train=images, seed=seed, test={'top1': top1}) for title, images, seed, top1 in (
        ('a', 500, 0, 50.), ('a', 500, 1, 52.), ('a', 500, 2, 54.), ('a', 900, 0, 60.), ('a', 999, 0, 1.),
        ('b', 500, 2, 51.), ('b', 500, 0, 49.), ('b', 500, 1, 50.), ('b', 900, 0, 61.), ('b', 777, 0, 1.))]
    found = hybrid_phase2.gains(results, 'a', 'b')
    assert list(found) == [500, 900]
    assert found[500] == pytest.approx((2., 4.303 / 3 ** 0.5), rel=1e-3)
    assert found[900] == pytest.approx((-1., 1.96 * (2400 / 5000 + 2379 / 5000) ** 0.5))


@pytest.mark.parametrize('rewrite', [convert_model, hybrid_phase2.attend_last, hybrid_phase2.add_beside])
def test_every_rewrite_of_a_hybrid_changes_nothing_at_first(rewrite):
    model = phase1('cmhsa_hybrid_conv_32', num_classes=5)
    rewritten = rewrite(copy.deepcopy(model)).eval()
    assert type(rewritten) in (CmhsaAttn, VisionTransformer)
    images = images_for(model)
    assert max_error(model(images), rewritten(images)) < 1e-5
    optimizer = timm.optim.create_optimizer_v2(rewritten, 'adamw', lr=1., weight_decay=0.1)
    decayed = {id(p) for group in optimizer.param_groups if group['weight_decay'] for p in group['params']}
    tables = [p for name, p in rewritten.named_parameters() if 'bias_table' in name]
    assert tables
    assert not any(id(table) in decayed for table in tables)


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
    assert len(set(offsets['convolution, peak 0.35'])) == 3
