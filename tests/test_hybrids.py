"""The experiments with hybrids."""
import copy
import csv

import hybrid_phase1
import hybrid_phase2
import pytest
import timm
from helpers import images_for, max_error, phase1
from PIL import Image
from timm.models import VisionTransformer
from torch import nn

from timm_cmhsa import CmhsaAttn, convert_model


@pytest.mark.parametrize('row', [row for row in hybrid_phase2.ROWS.values() if row.switch < 1])
def test_every_rewrite_changes_nothing_at_first(row):
    model = phase1('cmhsa_hybrid_conv_32', num_classes=5)
    rewritten = (row.rewrite or convert_model)(copy.deepcopy(model)).eval()
    assert type(rewritten) in (CmhsaAttn, VisionTransformer)
    images = images_for(model)
    assert max_error(model(images), rewritten(images)) < 1e-5
    optimizer = timm.optim.create_optimizer_v2(rewritten, 'adamw', lr=1., weight_decay=0.1)
    decayed = {id(p) for group in optimizer.param_groups if group['weight_decay'] for p in group['params']}
    tables = [p for name, p in rewritten.named_parameters() if 'bias_table' in name]
    assert tables
    assert not any(id(table) in decayed for table in tables)


def test_phase_1_is_the_registered_hybrid():
    model, registered = hybrid_phase1.hybrid(), timm.create_model('cmhsa_hybrid_conv_32', num_classes=10)
    shapes = [sorted(tuple(p.shape) for p in each.parameters()) for each in (model, registered)]
    assert shapes[0] == shapes[1]
    for run in hybrid_phase1.QUEUE:
        name, args, _ = hybrid_phase1.parse(run)
        assert isinstance(hybrid_phase1.MODELS[name](**args), nn.Module)


def test_gains_are_paired_by_seed_and_number_of_images():
    lines = [dict(row=row, images=images, seed=str(seed), test_top1=str(top1)) for row, images, seed, top1 in (
        ('a', '500', 0, 50.), ('a', '500', 1, 52.), ('a', '500', 2, 54.), ('a', '900', 0, 60.), ('a', '999', 0, 1.),
        ('b', '500', 2, 51.), ('b', '500', 0, 49.), ('b', '500', 1, 50.), ('b', '900', 0, 61.), ('b', '777', 0, 1.))]
    found = hybrid_phase2.gains(lines, 'a', 'b')
    assert list(found) == [500, 900]
    assert found[500] == pytest.approx((2., 4.303 / 3 ** 0.5), rel=1e-3)
    assert found[900] == pytest.approx((-1., 1.96 * (2400 / 5000 + 2379 / 5000) ** 0.5))


@pytest.mark.slow
def test_runs_of_phase_2_are_done_once(tmp_path, monkeypatch):
    for split, count in (('train', 5), ('validation', 1)):
        for label in range(10):
            (tmp_path / 'data' / split / str(label)).mkdir(parents=True)
            for i in range(count):
                Image.new('RGB', (32, 32), (25 * label, i, 0)).save(tmp_path / 'data' / split / str(label) / f'{i}.png')
    monkeypatch.setattr(hybrid_phase2, 'HELD_OUT', 10)
    results = hybrid_phase2.do('heads beside, switch 0.4', 40, 0, 2, tmp_path / 'data', tmp_path / 'out')
    line = dict(zip(hybrid_phase2.COLUMNS, results))
    assert line['phase1_top1'] == line['converted_top1']
    with (tmp_path / 'out.csv').open('w') as file:
        csv.writer(file).writerows([hybrid_phase2.COLUMNS, results])
    command = [
        'hybrid_phase2.py', '--data-dir', tmp_path / 'data', '--images', 40, '--epochs', 3, '--seeds', 1,
        '--rows', line['row'], '--output', tmp_path / 'out', '--results', tmp_path / 'out.csv']
    monkeypatch.setattr('sys.argv', list(map(str, command)))
    hybrid_phase2.main()
    assert len((tmp_path / 'out.csv').read_text().splitlines()) == 2
    assert (tmp_path / 'out' / 'gain.png').stat().st_size > 1000
