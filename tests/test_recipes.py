"""The recipes say what the paper says, and say it alike."""
import importlib
from pathlib import Path

import pytest
import timm
import torch
import yaml
from table1_cifar100 import DEFAULT_RATES, ROWS
from torch.utils.flop_counter import FlopCounterMode

import timm_cmhsa  # noqa: F401  registers the models

EXAMPLES = Path(__file__).parents[1] / 'examples'
RECIPES, CIFAR10, OWN = (
    {path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES.glob(f'{folder}/*.yaml')}
    for folder in ('cifar100', 'cifar10', 'imagefolder'))
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


@pytest.mark.parametrize('name', sorted({recipe for row in ROWS for recipe in row.recipes}))
def test_recipe_is_appendix_b(name):
    recipe, ours, second = RECIPES[name], name.startswith('cmhsa'), name == 'cmhsa_attn'
    expected = {
        **COMMON, **(PLAIN if name == 'vit_base' else DEIT), 'epochs': 200 if ours else 400,
        'lr': DEFAULT_RATES[second]}
    assert {key: recipe.get(key) for key in expected} == expected
    assert all(type(recipe[key]) is type(value) for key, value in expected.items())  # YAML reads 1e-8 as a string
    assert recipe.get('device_modules') == (['timm_cmhsa'] if ours else None)
    assert timm.is_model(recipe['model'])
    free = {'model', 'device_modules', *expected, *DEIT}
    rest, same = ({key: value for key, value in each.items() if key not in free}
                  for each in (recipe, RECIPES['deit_base']))
    assert rest == same, 'they differ in nothing else'


def test_own_images_second_phase_goes_on_as_the_first():
    assert timm.is_model(OWN['phase1']['model'])
    assert OWN['phase2'] == {key: value for key, value in OWN['phase1'].items() if key != 'model'}


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


def test_resnet_is_the_papers(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / 'cifar10')
    importlib.import_module('resnet18_cifar')
    model = timm.create_model('resnet18_cifar')
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(11.2e6, rel=0.005)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    assert counter.get_total_flops() == pytest.approx(1.1e9, rel=0.02)
    assert model.conv1.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.1)  # He et al., by fan-out
