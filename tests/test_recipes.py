"""The recipes say what the paper says, and say it alike."""
import os
from pathlib import Path

import pytest
import timm
import yaml
from recipes import DEFAULT_RATES, epochs_done

import timm_cmhsa  # noqa: F401  registers the models

EXAMPLES = Path(__file__).parents[1] / 'examples'
RECIPES = {path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES.glob('cifar100/*.yaml')}
OWN = {path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES.glob('imagefolder/*.yaml')}
DEIT = dict(
    aa='rand-m9-mstd0.5-inc1', color_jitter=0.3, train_interpolation='bicubic', aug_repeats=3, mixup=0.8, cutmix=1.0,
    mixup_prob=1.0, mixup_switch_prob=0.5, smoothing=0.1, reprob=0.25, remode='pixel', recount=1, drop_path=0.1,
    model_ema=True, model_ema_decay=0.99996)
COMMON = dict(
    dataset='torch/cifar100', num_classes=100, batch_size=32, warmup_epochs=5, sched='cosine', warmup_lr=1e-6,
    min_lr=1e-5, opt='adamw', opt_eps=1e-8, opt_betas=[0.9, 0.999], weight_decay=0.05, cooldown_epochs=0)


def test_there_is_a_recipe_for_every_phase_and_baseline():
    assert set(RECIPES) == {'cmhsa_conv_k3', 'cmhsa_conv_k5', 'cmhsa_attn', 'vit_base', 'deit_small', 'deit_base'}


@pytest.mark.parametrize('name', RECIPES)
def test_recipe_is_appendix_b(name):
    recipe = RECIPES[name]
    phase, second = name.startswith('cmhsa'), name == 'cmhsa_attn'
    expected = dict(COMMON, epochs=200 if phase else 400, lr=DEFAULT_RATES[second])
    if name != 'vit_base':
        expected.update(DEIT)
    assert {key: recipe.get(key) for key in expected} == expected
    assert all(type(recipe[key]) is type(value) for key, value in expected.items())  # YAML reads 1e-8 as a string
    assert recipe.get('device_modules') == (['timm_cmhsa'] if phase else None)


def test_recipes_differ_in_nothing_else():
    free = {'model', 'device_modules', 'epochs', 'lr'}
    common = [{key: value for key, value in recipe.items() if key not in free}
              for name, recipe in RECIPES.items() if name != 'vit_base']
    assert all(recipe == common[0] for recipe in common)


@pytest.mark.parametrize('recipe', [*RECIPES.values(), *OWN.values()], ids=[*RECIPES, *OWN])
def test_model_exists(recipe):
    assert timm.is_model(recipe['model'])


def test_own_images_second_phase_goes_on_as_the_first():
    free = {'model': ('cmhsa_conv_k5', 'cmhsa_attn'), 'lr': (3e-4, 3e-5)}
    for index, phase in enumerate(('phase1', 'phase2')):
        assert {key: OWN[phase][key] for key in free} == {key: values[index] for key, values in free.items()}
    assert {**OWN['phase1'], 'model': '', 'lr': 0} == {**OWN['phase2'], 'model': '', 'lr': 0}


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
