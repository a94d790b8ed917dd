"""The recipes say what the paper says, and say it alike."""
import argparse
import importlib
import json
import os
from pathlib import Path

import pytest
import timm
import torch
import yaml
from table1_cifar100 import DEFAULT_RATES, Machine, epochs_done, search_rates, train
from timm.optim import create_optimizer_v2
from torch.utils.flop_counter import FlopCounterMode

import timm_cmhsa  # noqa: F401  registers the models

EXAMPLES = Path(__file__).parents[1] / 'examples'
RECIPES = {path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES.glob('cifar100/*.yaml')}
CIFAR10 = {path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES.glob('cifar10/*.yaml')}
OWN = {path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES.glob('imagefolder/*.yaml')}
DEIT = dict(
    aa='rand-m9-mstd0.5-inc1', color_jitter=0.3, train_interpolation='bicubic', aug_repeats=3, mixup=0.8, cutmix=1.0,
    mixup_prob=1.0, mixup_switch_prob=0.5, smoothing=0.1, reprob=0.25, remode='pixel', recount=1, drop_path=0.1,
    model_ema=True, model_ema_decay=0.99996)
PLAIN = dict(
    aa=None, color_jitter=0.0, aug_repeats=0, mixup=0.0, cutmix=0.0, smoothing=0.0, reprob=0.0, drop_path=0.0,
    model_ema=False)
COMMON = dict(
    dataset='torch/cifar100', mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225], crop_pct=0.875,
    interpolation='bicubic', amp=True, num_classes=100, batch_size=32, warmup_epochs=5, sched='cosine', warmup_lr=1e-6,
    min_lr=1e-5, opt='adamw', opt_eps=1e-8, opt_betas=[0.9, 0.999], weight_decay=0.05, cooldown_epochs=0)


def test_there_is_a_recipe_for_every_phase_and_baseline():
    assert set(RECIPES) == {'cmhsa_conv_k3', 'cmhsa_conv_k5', 'cmhsa_attn', 'vit_base', 'deit_small', 'deit_base'}


@pytest.mark.parametrize('name', RECIPES)
def test_recipe_is_appendix_b(name):
    recipe = RECIPES[name]
    phase, second = name.startswith('cmhsa'), name == 'cmhsa_attn'
    expected = dict(COMMON, epochs=200 if phase else 400, lr=DEFAULT_RATES[second])
    expected.update(PLAIN if name == 'vit_base' else DEIT)
    assert {key: recipe.get(key) for key in expected} == expected
    assert all(type(recipe[key]) is type(value) for key, value in expected.items())  # YAML reads 1e-8 as a string
    assert recipe.get('device_modules') == (['timm_cmhsa'] if phase else None)


def test_recipes_differ_in_nothing_else():
    free = {'model', 'device_modules', 'epochs', 'lr'}
    common = {name: {key: value for key, value in recipe.items() if key not in free}
              for name, recipe in RECIPES.items()}
    deit_base = common.pop('deit_base')
    vit_base = common.pop('vit_base')
    assert all(recipe == deit_base for recipe in common.values())
    assert {key: value for key, value in vit_base.items() if key not in DEIT} == {
        key: value for key, value in deit_base.items() if key not in DEIT}


@pytest.mark.parametrize('recipe', [*RECIPES.values(), OWN['phase1']], ids=[*RECIPES, 'phase1'])
def test_model_exists(recipe):
    assert timm.is_model(recipe['model'])


def test_own_images_second_phase_goes_on_as_the_first():
    assert OWN['phase2'] == {key: value for key, value in OWN['phase1'].items() if key != 'model'}


def test_epochs_done_counts_what_has_a_checkpoint(tmp_path):
    summary, last = tmp_path / 'summary.csv', tmp_path / 'last.pth.tar'
    assert epochs_done(tmp_path) == 0
    summary.write_text('epoch,eval_top1\n0,10.0\n1,11.0\nepoch,eval_top1\n2,12.0\n')  # as train.py resumes
    assert epochs_done(tmp_path) == 0
    last.write_bytes(b'')
    os.utime(summary, (1, 1))
    assert epochs_done(tmp_path) == 3
    os.utime(last, (0, 0))
    assert epochs_done(tmp_path) == 0


@pytest.fixture
def clone(tmp_path):
    """A train.py and a validate.py that only note how they were called; the best learning rates are 5e-4 and 3e-5."""
    name = 'test_cmhsa_conv_k3'
    checkpoint = dict(state_dict=timm.create_model(name).state_dict(), arch=name, args=argparse.Namespace(model=name))
    torch.save(checkpoint, tmp_path / 'phase1.pth')
    (tmp_path / 'train.py').write_text('''
import argparse, json, pathlib, shutil, sys
parser = argparse.ArgumentParser()
for name in ('output', 'experiment', 'epochs', 'lr'):
    parser.add_argument(f'--{name}')
args, _ = parser.parse_known_args()
folder = pathlib.Path(args.output, args.experiment)
folder.mkdir(parents=True, exist_ok=True)
(folder / 'calls.txt').open('a').write(json.dumps(sys.argv[1:]) + '\\n')
(folder / 'summary.csv').write_text(f'epoch\\n{int(args.epochs) - 1}\\n')
(folder / 'args.yaml').write_text(f'{{lr: {args.lr}, val_split: test, model: m, model_kwargs: {{depth: 1}}}}')
shutil.copy(pathlib.Path(__file__).with_name('phase1.pth'), folder / 'last.pth.tar')
''')
    (tmp_path / 'validate.py').write_text('''
import argparse, json, pathlib
parser = argparse.ArgumentParser()
for name in ('results-file', 'checkpoint'):
    parser.add_argument(f'--{name}')
args, _ = parser.parse_known_args()
rate = float(args.checkpoint.split('-lr')[1].rsplit('-', 1)[0])
score = 100 - min(abs(rate / best - 1) for best in (5e-4, 3e-5))
pathlib.Path(args.results_file).write_text(json.dumps(dict(top1=score, top5=100)))
''')
    return tmp_path


def calls(folder):
    return [json.loads(line) for line in (folder / 'calls.txt').read_text().splitlines()]


def test_train_resumes_what_is_unfinished_and_leaves_what_is_done(clone):
    machine = Machine(clone, 1, ['--data-dir', 'data'], clone / 'output')
    folder = train(machine, 'deit_base', 0, 1e-3, 5, None)
    assert train(machine, 'deit_base', 0, 1e-3, 5, None) == folder
    assert len(calls(folder)) == 1
    assert '--resume' not in calls(folder)[0]
    (folder / 'last.pth.tar').rename(folder / 'checkpoint-3.pth.tar')  # as a kill between two renames leaves it
    train(machine, 'deit_base', 0, 1e-3, 5, None)
    resumed = calls(folder)[1]
    assert resumed[resumed.index('--resume') + 1] == str(folder / 'checkpoint-3.pth.tar')
    for other in ((1, 1e-3, 5), (0, 2e-3, 5), (0, 1e-3, 6)):
        assert train(machine, 'deit_base', *other, None) != folder
    assert train(machine._replace(options=[]), 'deit_base', 0, 1e-3, 5, None) != folder


@pytest.mark.slow
def test_search_finds_the_best_rate_of_every_phase(clone, monkeypatch):
    monkeypatch.setattr('table1_cifar100.PAPER_RATES', ((1e-4, 5e-4), (3e-5, 7e-5)))
    machine = Machine(clone, 1, [], clone / 'output')
    assert search_rates(machine, ('cmhsa_conv_k3', 'cmhsa_attn'), 1) == (5e-4, 3e-5)
    assert len(list((clone / 'output').glob('cmhsa_attn-*'))) == 2


def test_pixel_recipes_are_table_2(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / 'cifar10')
    assert set(CIFAR10) == {'pixel_attn', 'resnet18'}
    expected = dict(
        dataset='torch/cifar10', num_classes=10, epochs=300, batch_size=100, lr=0.1, weight_decay=1e-4, momentum=0.9,
        opt='momentum', sched='cosine', min_lr=0.0, warmup_epochs=15, smoothing=0.0, mixup=0.0)
    for recipe in CIFAR10.values():
        for module in recipe['device_modules']:  # as train.py does
            importlib.import_module(module)
        assert {key: recipe.get(key) for key in expected} == expected
        assert all(type(recipe[key]) is type(value) for key, value in expected.items())
        assert timm.is_model(recipe['model'])
    free = {'model', 'device_modules', 'model_kwargs', 'drop', 'checkpoint_hist'}
    pixel, resnet = ({k: v for k, v in recipe.items() if k not in free} for recipe in CIFAR10.values())
    assert pixel == resnet
    recipe = CIFAR10['pixel_attn']
    model = timm.create_model(recipe['model'], device='meta', drop_rate=recipe['drop'], **recipe['model_kwargs'])
    block = model.blocks[0]
    assert block.attn.attn_drop.p == block.attn.proj_drop.p == block.mlp.drop2.p == model.head_drop.p == 0.1
    assert type(create_optimizer_v2(model, recipe['opt'], lr=1., momentum=0.9)) is torch.optim.SGD
    assert not create_optimizer_v2(model, recipe['opt'], lr=1.).defaults['nesterov']


def test_resnet_is_the_papers(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / 'cifar10')
    importlib.import_module('resnet18_cifar')
    model = timm.create_model('resnet18_cifar')
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(11.2e6, rel=0.005)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    assert counter.get_total_flops() == pytest.approx(1.1e9, rel=0.02)
    assert model.conv1.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.1)  # He et al., by fan-out
    backbone = timm.create_model('resnet18_cifar', features_only=True, in_chans=1)
    sizes = [32 // y.shape[-1] for y in backbone(torch.randn(1, 1, 32, 32))]
    assert sizes == backbone.feature_info.reduction() == [1, 1, 2, 4, 8]
