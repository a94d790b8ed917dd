"""timm's own scripts, unmodified, run as users run them.

They are not part of the timm package: set TIMM_CLONE to a clone of pytorch-image-models, best at the tag of the
installed timm. The data are the digits, in the folders that examples/digits.py writes.
"""
import csv
import json
import os
import re
import shlex
import time
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from helpers import run_python, write_photos

from timm_cmhsa import convert_checkpoint
from timm_cmhsa.cli import convert_main

CLONE = Path(os.environ.get('TIMM_CLONE', ''))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    'TIMM_CLONE' not in os.environ, reason="needs timm's scripts: set TIMM_CLONE to a clone of pytorch-image-models")]

EXAMPLES = Path(__file__).parents[1] / 'examples'
EXPERIMENTS = EXAMPLES.with_name('experiments')
CONV, ATTN = 'test_cmhsa_conv_k3', 'test_cmhsa_attn'
SMALL_IMAGES = ['--model-kwargs', 'img_size=16', '--img-size', 16, '--crop-pct', 1]
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
DDP_DEVICE = 'cuda' if torch.cuda.device_count() > 1 else 'cpu'


def run(*command):
    result = run_python(*command, env={**os.environ, 'PYTHONWARNINGS': 'ignore'})
    return result.stdout + result.stderr


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp('digits') / 'images'
    run(EXAMPLES / 'digits.py', folder, '--num-train', 1600, '--canvas', 16)
    return folder


@pytest.fixture(scope='module')
def few(tmp_path_factory):
    folder = tmp_path_factory.mktemp('few')
    write_photos(folder, num_train=65)
    return folder


def options(digits, output, model, *extra):
    """Return options of train.py; the last ones count. A folder's configuration holds the image size."""
    size = ['--crop-pct', 1] if str(model).startswith('local-dir:') else SMALL_IMAGES
    return [
        '--device-modules', 'timm_cmhsa', '--data-dir', digits, '--model', model, '--num-classes', 10,
        *size, '-b', 50, '--opt', 'adamw', '--lr', 4e-3, '--weight-decay', 0.05, '--warmup-epochs', 0,
        '--epochs', 1, '--hflip', 0, '--scale', 0.6, 1, '--device', DEVICE, '-j', 1, '--output', output.parent,
        '--experiment', output.name, *extra]


def train(digits, output, model, *extra):
    return run(CLONE / 'train.py', *options(digits, output, model, *extra))


def validate(digits, model, *extra):
    """Return the numbers that validate.py prints."""
    size = ['--crop-pct', 1] if str(model).startswith('local-dir:') else SMALL_IMAGES
    stdout = run(
        '-m', 'timm_cmhsa', CLONE / 'validate.py', '--data-dir', digits, '--split', 'validation', '--model', model,
        '--num-classes', 10, *size, '-b', 100, '--device', DEVICE, '-j', 1, *extra)
    return json.JSONDecoder().raw_decode(stdout.split('--result\n')[1])[0]


@pytest.fixture(scope='module')
def phase1(digits, tmp_path_factory):
    """The folder of a finished phase 1."""
    output = tmp_path_factory.mktemp('train') / 'phase1'
    train(digits, output, CONV, '--epochs', 3)
    return output


def last_epoch(output):
    with open(output / 'summary.csv') as f:
        return {key: float(value) for key, value in list(csv.DictReader(f))[-1].items()}


def test_two_phases_and_validation(digits, phase1, tmp_path):
    before = validate(digits, CONV, '--checkpoint', phase1 / 'model_best.pth.tar')
    convert_checkpoint(
        phase1 / 'model_best.pth.tar', tmp_path / 'converted', architecture='cmhsa_attn_soft',
        images=digits / 'validation')
    model = f"local-dir:{tmp_path / 'converted'}"
    after = validate(digits, model, '--pretrained')
    accuracies = 'top1', 'top1_err', 'top5', 'top5_err'
    assert {key: before[key] for key in accuracies} == {key: after[key] for key in accuracies}
    assert before['top1'] > 20

    extra = ['--pretrained', '--lr', 1e-3, '--amp', '--amp-dtype', 'bfloat16']
    train(digits, tmp_path / 'phase2', model, *extra)
    train(digits, tmp_path / 'phase2', model, *extra, '--epochs', 2, '--resume', tmp_path / 'phase2' / 'last.pth.tar')
    trained = validate(digits, model, '--checkpoint', tmp_path / 'phase2' / 'last.pth.tar')
    assert trained['top1'] == pytest.approx(last_epoch(tmp_path / 'phase2')['eval_top1'], abs=1)  # that was in bfloat16
    assert trained['top1'] > before['top1']


def test_hint_of_a_conversion_can_be_followed(digits, phase1, tmp_path, monkeypatch, capsys):
    (tmp_path / 'pytorch-image-models').symlink_to(CLONE.resolve())
    (tmp_path / 'DIR').symlink_to(digits)
    (tmp_path / 'examples').symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    assert convert_main([str(phase1 / 'model_best.pth.tar'), 'phase 2']) == 0
    hint = shlex.split(capsys.readouterr().out.split('train.py with ')[1])
    stdout = run(
        '-m', 'timm_cmhsa', 'pytorch-image-models/train.py', '--config', 'examples/imagefolder/phase2.yaml',
        '--data-dir', 'DIR', '--experiment', 'phase2', *hint, '--epochs', 1, '--device', DEVICE, '-j', 1)
    assert 'Train: 0 [' in stdout
    assert (tmp_path / 'output/train/phase2/last.pth.tar').exists()


@pytest.mark.parametrize('extra', [[], ['--torchcompile', '--amp', '--amp-dtype', 'bfloat16', '--model-ema']])
def test_phase2_with_hard_heads_as_shifts(digits, phase1, tmp_path, extra):
    """The result is a checkpoint of attention with the accuracy of the shifts."""
    convert_checkpoint(phase1 / 'model_best.pth.tar', tmp_path / 'converted')
    model = f"local-dir:{tmp_path / 'converted'}"
    before = validate(digits, model, '--pretrained')
    as_shifts = ['--pretrained', '--model-kwargs', 'hard_attn=True', '--epochs', 2]
    train(digits, tmp_path / 'run', model, *as_shifts, *extra)
    last = tmp_path / 'run' / 'last.pth.tar'
    after = validate(digits, model, '--checkpoint', last)
    assert after['top1'] > before['top1']
    if '--model-ema' not in extra:
        assert after['top1'] == pytest.approx(last_epoch(tmp_path / 'run')['eval_top1'], abs=0.5 if extra else 1e-3)
    assert validate(digits, model, '--checkpoint', last, '--reparam')['top1'] == pytest.approx(after['top1'], abs=1e-3)
    train(digits, tmp_path / 'attention', model, '--resume', last, '--no-resume-opt', '--epochs', 3)


@pytest.mark.parametrize(('model', 'extra'), [(CONV, '--torchcompile'), *product([CONV, ATTN], [
    '--amp --amp-dtype bfloat16 --model-ema --model-ema-decay 0.9 --layer-decay 0.75',
    '--grad-checkpointing --in-chans 1 --mean 0.1 --std 0.25 --clip-grad 1.0 --grad-accum-steps 2 --channels-last',
    '--img-size 24 --model-kwargs img_size=24 --aa rand-m9-mstd0.5-inc1 --mixup 0.8 --cutmix 1.0 --no-prefetcher '
    '--reprob 0.25 --drop-path 0.1']),
    ('test_pixel_attn', '--model-kwargs img_size=16 rel_pos=quadratic_gen --opt momentum')])
def test_options(few, tmp_path, model, extra):
    stdout = train(few, tmp_path / 'run', model, *extra.split())
    assert 'Traceback' not in stdout
    assert last_epoch(tmp_path / 'run')['train_loss'] < 3


def test_distillation(digits, phase1, tmp_path):
    convert_checkpoint(phase1 / 'model_best.pth.tar', tmp_path / 'teacher')
    stdout = train(digits, tmp_path / 'student', ATTN, '--kd-model-name', f"local-dir:{tmp_path / 'teacher'}")
    assert 'KD teacher' in stdout


@pytest.mark.parametrize('model_kwargs', [[], ['hard_attn=True']])
def test_two_processes(digits, tmp_path, model_kwargs):
    """Every parameter gets its gradient, repeated augmentations included."""
    launcher = tmp_path / 'launcher.py'
    launcher.write_text(LAUNCHER)
    stdout = run(
        '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 2, '-m', 'timm_cmhsa', launcher,
        CLONE / 'train.py', *options(
            digits, tmp_path / 'run', ATTN, '--model-kwargs', 'img_size=16', *model_kwargs, '-b', 25,
            '--aug-repeats', 3, '--drop-path', 0.1, '--device', DDP_DEVICE))
    assert 'Process 0, total 2' in stdout
    assert not re.search(r'unused|find_unused_parameters|Grad strides|UserWarning', stdout), stdout


# Runs train.py. Without GPUs it cannot run in several processes: it gives torch's DistributedDataParallel the
# device_ids=[cpu], which torch refuses.
LAUNCHER = '''
import runpy, sys, warnings
import torch

class CpuDDP(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids=None, **kwargs):
        super().__init__(module, **kwargs)

if torch.cuda.device_count() < 2:
    torch.nn.parallel.DistributedDataParallel = CpuDDP
sys.argv = sys.argv[1:]
warnings.simplefilter('always', UserWarning)
runpy.run_path(sys.argv[0], run_name='__main__')
'''


def test_onnx_export(phase1, tmp_path):
    convert_checkpoint(phase1 / 'model_best.pth.tar', tmp_path / 'phase2')
    run('-m', 'timm_cmhsa', CLONE / 'onnx_export.py', tmp_path / 'out.onnx', '--model',
        f"local-dir:{tmp_path / 'phase2'}", '--num-classes', 10, '--img-size', 16, '--dynamo', '--check-forward')
    assert (tmp_path / 'out.onnx').stat().st_size > 0


def test_recipes_name_options_of_train_py():
    help_text = run(CLONE / 'train.py', '--help')
    for path in EXAMPLES.glob('*/*.yaml'):
        for key in yaml.safe_load(path.read_text()):
            assert re.search(rf'--{key.replace("_", "-")}(?![\w-])', help_text), f'{path.name}: {key}'


def test_table_at_paper_scale(few, tmp_path):
    """All rows through the recipes, with their models at full width but of one block, one epoch in each phase."""
    command = [
        EXPERIMENTS / 'table1_cifar100.py', '--timm', CLONE, '--num-processes', 1, '--epochs-per-phase', 1,
        '--seeds', 1, '--output', tmp_path / 'out', '--', '--dataset', '', '--data-dir', few, '--num-classes', 10,
        '--img-size', 32, '--model-kwargs', 'img_size=32', 'depth=1', '--device', DEVICE, '--amp-dtype', 'bfloat16',
        '-j', 1]
    stdout = run(*command)
    table = (tmp_path / 'out' / 'table1.md').read_text()
    assert table in stdout
    rows = [line.split('|') for line in table.splitlines()[2:10]]
    assert [row[1].strip() for row in rows] == [
        'ViT-base', 'DeiT-small', 'DeiT-base', 'CMHSA-3 (1st phase)', 'CMHSA-5 (1st phase)', 'CMHSA (2nd phase)',
        'CMHSA-3', 'CMHSA-5']
    assert len(list((tmp_path / 'out' / 'runs').iterdir())) == 10
    started = time.time()
    assert table in run(*command)
    assert all(path.stat().st_mtime < started for path in tmp_path.glob('out/runs/*/*'))
    folder, = tmp_path.glob('out/runs/vit_base-*')
    for name in ('done', 'validation.json'):
        (folder / name).unlink()
    again = run(*command)
    assert table in again
    assert 'Loaded checkpoint' in again, 'what was stopped goes on'
