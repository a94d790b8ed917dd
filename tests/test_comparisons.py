"""The experiments that compare trainings; those that train as a user runs them are slow."""
import copy
import sys
from pathlib import Path

import hybrid_phase2
import natural_images
import pytest
import table1
import table1_cifar100
import torch
import vit_starts as starts
from common.images import digits, photos
from common.runs import create, read_results
from helpers import decayed, images_for, is_picture, max_error, phase1, run_python, write_photos
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


def test_settings_do_not_mix(tmp_path):
    run = ROWS[SOFT]
    others = [run, run._replace(title='other'), *(run.change(**changes) for changes in (
        dict(seed=1), dict(num_train=40), dict(options=dict(epochs=2)), dict(options=dict(lr=1e-4)))),
        run._replace(after=None)]
    assert len({other.key for other in others}) == len({other.folder(tmp_path) for other in others}) == len(others)


def pixels(folder, split):
    return {Image.open(path).tobytes() for path in folder.glob(f'{split}/*/*')}


def test_training_held_out_and_test_images_are_disjoint(tmp_path):
    first, second = (digits(tmp_path, 900, seed) for seed in range(2))
    names = [[{path.name for path in folder.glob(f'{split}/*/*')} for split in ('train', 'validation', 'test')]
             for folder in (first, second)]
    for parts in names:
        assert [len(part) for part in parts] == [900, 300, 597]
        assert len(set().union(*parts)) == 1797
    assert names[0][2] == names[1][2]
    assert names[0][0] != names[1][0]


def test_photos_are_split_without_overlap(tmp_path):
    """As many of every class; the seed chooses training and held-out images, but not test images."""
    write_photos(tmp_path / 'all', num_train=20)
    first, second = (photos(tmp_path, 20, seed, tmp_path / 'all', 10) for seed in range(2))

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


@pytest.mark.slow
@pytest.mark.parametrize(('script', 'num_rows', 'num_plots'), [
    ('table1', 8, 1), ('figure2', 4, 1), ('pixel_models', 6, 0),
    ('hybrid_phase1', 5, 0), ('hybrid_phase2', 13, 0), ('vit_starts', 4, 0), ('natural_images', 3, 1),
    ('two_phases', 4, 1),
])
def test_scripts(script, num_rows, num_plots, tmp_path):
    """Each in its quick form, as a user runs it: the table has all rows, and every rewrite changes nothing."""
    output, options = tmp_path / 'output', []
    if script.startswith(('hybrid', 'natural', 'two', 'vit')):
        write_photos(tmp_path / 'data', num_train=60)
        options = ['--data-dir', tmp_path / 'data']
    if script == 'natural_images':
        options += ['--rows', SOFT, 'two phases, hard heads']
    command = '-W', 'ignore', EXPERIMENTS / f'{script}.py', '--quick', '--seeds', '1', *options, '--output', output
    done = run_python(*command)
    table = (output / f'{script}.md').read_text()
    assert table in done.stdout
    assert table.split('\n\n')[0].count('\n|') >= num_rows
    assert len(list(output.glob('*.png'))) == num_plots
    results = read_results(output / 'results.jsonl')
    for result in results.values():
        if result['after']:
            assert result['before']['top1'] == pytest.approx(results[result['after']]['test']['top1'])
    if script == 'natural_images':
        moved = {result['title']: result['bias_moved'] for result in results.values()}
        assert moved['two phases, hard heads'] == 0 < moved[SOFT]
        assert table in run_python(*command, '--workers', '1').stdout
        assert read_results(output / 'results.jsonl') == results, 'what is done is not done again'
    if script == 'pixel_models':
        names = {path.name for path in (output / 'pictures' / 'pixel_attn_quadratic_gen').iterdir()}
        assert {'attention.png', 'centers.png', 'attention.html'} <= names


@pytest.mark.slow
def test_pictures_of_starts(tmp_path):
    run_python(EXPERIMENTS / 'vit_start_maps.py', '--output', tmp_path / 'maps.png')
    assert is_picture(tmp_path / 'maps.png')


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


@pytest.mark.parametrize('rewrite', [convert_model, hybrid_phase2.attend_last, hybrid_phase2.add_beside])
def test_every_rewrite_of_a_hybrid_changes_nothing_at_first(rewrite):
    model = phase1('cmhsa_hybrid_conv_32', num_classes=5)
    rewritten = rewrite(copy.deepcopy(model)).eval()
    assert type(rewritten) in (CmhsaAttn, VisionTransformer)
    images = images_for(model)
    assert max_error(model(images), rewritten(images)) < 1e-5
    tables = {name for name, _ in rewritten.named_parameters() if 'bias_table' in name}
    assert tables
    assert not tables & decayed(rewritten)


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
