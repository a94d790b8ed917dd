"""Both phases on a folder of images: results, pictures and models; stopped runs; bad input."""
import csv
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers import assert_equal, command_error, is_picture, parse, run_python, write_image
from PIL import ExifTags, Image
from torch.utils._python_dispatch import TorchDispatchMode

import timm_cmhsa
from timm_cmhsa.evaluation import draw_confusion
from timm_cmhsa.images import data_config, load_image, read_folder
from timm_cmhsa.predict import predict
from timm_cmhsa.train import train_two_phases
from timm_cmhsa.train.data import DECODED, OF_DIGITS, Images, make_loaders, open_folder, open_images, write_digits
from timm_cmhsa.train.options import choose_options
from timm_cmhsa.train.report import paired_interval, write_report
from timm_cmhsa.train.trainer import Judged

CLASSES = 'cat', 'dog', 'owl'
SPLITS = 'train', 'validation'
SIDE = 32
OPTIONS = dict(model='test_cmhsa_conv_k3', img_size=SIDE, epochs=4, switch=0.5, batch_size=4, device='cpu')
ALONE = dict(OPTIONS, epochs=1, switch=1)
COMPARED = dict(OPTIONS, compare=['test_resnet'], compare_lr=1e-4)


def write_folder(root, splits=SPLITS, count=4, side=SIDE):
    for split, (label, name), i in itertools.product(splits, enumerate(CLASSES), range(count)):
        write_image(root / split / name / f'{i}.png', seed=10 * label + i, size=(side, side))
    return root


def changed(photos, root, changes):
    """Copy a folder, then remove (None), write (bytes) or rename what is in it."""
    shutil.copytree(photos, root)
    for name, change in changes.items():
        path = root / name
        if change is None:
            shutil.rmtree(path)
        elif isinstance(change, bytes):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(change)
        else:
            (root / change).parent.mkdir(exist_ok=True)
            path.rename(root / change)
    return root


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp('photos'))


@pytest.fixture(scope='module')
def finished(photos, tmp_path_factory):
    """A whole training, and its results."""
    output = tmp_path_factory.mktemp('finished') / 'out'
    return output, train_two_phases(photos, output=output, **COMPARED)


def weights(output, name='phase2'):
    return torch.load(output / 'checkpoints' / f'{name}.pth.tar', weights_only=True)['state_dict']


def test_results(finished):
    output, results = finished
    assert json.loads((output / 'results.json').read_text()) == results
    assert results['converted_top1'] == pytest.approx(results['phase1_top1'])
    assert results['num_train'] == results['num_validation'] == 12
    assert results['top1'] in [pytest.approx(100 * right / 12) for right in range(13)]
    groups = torch.load(output / 'checkpoints' / 'test_resnet-0.0001.pth.tar')['optimizer']['param_groups']
    assert {group['initial_lr'] for group in groups} == {1e-4}
    text = (output / 'results.md').read_text()
    top1, low, high = map(float, re.search(r'\| phase 2 \| 4 \| .* \| (.*) \| (.*) to (.*) \|', text).groups())
    assert top1 == pytest.approx(results['top1'], abs=0.01)
    assert 0 <= low < top1 < high <= 100
    assert '| test_resnet |' in text
    lead, low, high = results['lead']['validation']['test_resnet']
    assert low <= lead <= high
    assert lead == pytest.approx(results['top1'] - results['compare']['test_resnet'])
    assert f'the same validation images, in points, with its paired 95 % interval: {lead:+.2f}' in text
    assert all(line in text for line in results['chosen'])
    assert '33% of them are of the largest class, cat.' in text
    classes = re.findall(r'^\| \d \| (cat|dog|owl) \| (\d+) \| (.*) \|$', text, re.M)
    assert {name: int(count) for name, count, _ in classes} == dict.fromkeys(CLASSES, 4)
    assert [float(top1) for *_, top1 in classes] == sorted(float(top1) for *_, top1 in classes)
    assert np.mean([float(top1) for *_, top1 in classes]) == pytest.approx(results['top1'])
    assert all(is_picture(output / name) for name in ('curves.png', 'attention.png', 'confusion.png', 'mistakes.png'))
    shown = {}
    exec(re.search('```python\n(.*?)```', text, re.S)[1], shown)  # how to load the model
    assert_equal(shown['model'].state_dict(), timm_cmhsa.load_model(output / 'model').state_dict())


@pytest.mark.parametrize(('number', 'most'), [(30, 1), (2000, 0.98)])
def test_the_interval_of_a_lead_is_paired(number, most):
    """It covers the true lead in 95 % of the cases, and is narrower if both models are wrong on the same images."""
    hard = np.random.RandomState(0).rand(1000, number)
    right = [torch.tensor(hard < share).double() for share in (0.7, 0.65)]
    intervals = [paired_interval(*each) for each in zip(*right)]
    assert 0.93 < np.mean([low < 5 < high for _, low, high in intervals]) <= most
    lead, low, high = intervals[0]
    assert lead == pytest.approx(100 * (right[0][0].mean() - right[1][0].mean()).item())
    _, other_low, other_high = paired_interval(right[0][0], right[1][1])
    assert high - low < 0.7 * (other_high - other_low)
    same, low, high = paired_interval(right[0][0], right[0][0])
    assert low < same == 0 < high
    assert paired_interval(torch.ones(4), torch.zeros(4))[2] <= 100


def test_a_compared_model_is_saved(finished, photos):
    output, results = finished
    _, logits, _, targets = predict(output / 'compare' / 'test_resnet', photos / 'validation')
    assert (logits.argmax(dim=1) == targets).double().mean() == pytest.approx(
        results['compare']['test_resnet'] / 100)


def test_mistakes_are_of_the_model_that_is_saved(finished, photos):
    output, results = finished
    with open(output / 'mistakes.csv', newline='', encoding='utf-8') as file:
        header, *rows = csv.reader(file)
    assert header == ['path', 'class', 'taken for', 'probability']
    assert len(rows) == round(12 * (1 - results['top1'] / 100)) > 0
    probabilities = [float(row[3]) for row in rows]
    assert probabilities == sorted(probabilities, reverse=True)
    found = predict(output / 'model', photos / 'validation')
    taken = {str(file): (name, probability) for file, name, probability in itertools.islice(found.rows(), 1, None)}
    for path, name, taken_for, probability in rows:
        assert path.split(os.sep)[-2] == name != taken_for
        assert taken[path] == (taken_for, probability)


def test_models_can_be_loaded_and_compute_what_was_reported(finished, photos):
    output, results = finished
    files = [*(photos / 'validation').glob('*/*')]
    targets = torch.tensor([CLASSES.index(path.parent.name) for path in files])
    for name, folder, key in (('phase1', 'phase1', 'phase1_top1'), ('phase2', 'model', 'top1')):
        stopped = timm_cmhsa.load_model(output / 'checkpoints' / f'{name}.pth.tar')
        assert_equal(stopped.state_dict(), timm_cmhsa.load_model(output / folder).state_dict())
        assert stopped.patch_embed.img_size == (SIDE, SIDE)
        assert stopped.pretrained_cfg['crop_pct'] == 1
        model = timm.create_model(f'local-dir:{output / folder}', pretrained=True).eval()
        transform = timm.data.create_transform(**data_config(model))
        with torch.inference_mode():
            logits = model(torch.stack([transform(Image.open(path)) for path in files]))
        assert 100 * (logits.argmax(dim=1) == targets).float().mean().item() == pytest.approx(results[key])
        card = (output / folder / 'README.md').read_text()
        assert f'{results[key]:.2f}'.rstrip('0').rstrip('.') + ' %' in card
        assert '12 images, validated on 12 others' in card
    assert json.loads((output / 'model' / 'config.json').read_text())['label_names'] == list(CLASSES)


def test_a_finished_run_is_not_done_again(finished, photos):
    output, results = finished
    before = {path: path.stat().st_mtime_ns for path in (output / 'checkpoints').iterdir()}
    options = json.loads((output / 'options.json').read_text())
    del options['start']  # as a version without that option wrote it
    (output / 'options.json').write_text(json.dumps(options))
    assert train_two_phases(photos, output=output, **COMPARED) == results
    assert {path: path.stat().st_mtime_ns for path in (output / 'checkpoints').iterdir()} == before


def test_a_run_goes_on_with_what_was_chosen_on_another_machine(finished, photos, tmp_path):
    output = shutil.copytree(finished[0], tmp_path / 'out')
    options = json.loads((output / 'options.json').read_text())
    other = dict(workers='1', amp_dtype='None' if options['amp_dtype'] == 'bfloat16' else 'bfloat16')
    (output / 'options.json').write_text(json.dumps({**options, **other}))
    results = train_two_phases(photos, output=output, **COMPARED)
    assert results['options'] == {**options, **other}
    results = train_two_phases(photos, output=output, workers=0, **COMPARED)
    assert results['options'] == {**options, **other, 'workers': '0'}, 'workers may change'


@timm.models.register_model
def failing(pretrained=False, most=OPTIONS['batch_size'], error=torch.cuda.OutOfMemoryError, **kwargs):
    """Return a model that fails for batches of more images: by default for those of validation."""
    def fail(module, inputs):
        if len(inputs[0]) > most:
            raise error('CUDA out of memory.')

    model = timm.create_model('test_resnet', **kwargs)
    model.register_forward_pre_hook(fail)
    return model


def test_memory_that_runs_out_in_validation(photos, tmp_path):
    message = 'does not fit into memory: use a smaller --batch-size and a new --output'
    with pytest.raises(ValueError, match=f'phase1 {message}'):
        train_two_phases(photos, output=tmp_path / 'one', **{**ALONE, 'model': 'failing'})
    with pytest.raises(ValueError, match=f'failing-.* {message}'):  # a single name will do
        train_two_phases(photos, output=tmp_path / 'two', compare='failing', **ALONE)
    with pytest.raises(ValueError, match=f'converted {message}'):
        train_two_phases(
            photos, lambda _: failing(num_classes=3), output=tmp_path / 'three', **{**OPTIONS, 'epochs': 2})


def test_what_stopped_before_a_checkpoint_can_be_run_with_other_options(photos, tmp_path):
    message = 'phase1 stopped: CUDA out of memory. The same command goes on after the last epoch that was saved.'
    with pytest.raises(ValueError, match=re.escape(message)):
        train_two_phases(
            photos, output=tmp_path, model_kwargs=dict(most=3, error=RuntimeError), **{**ALONE, 'model': 'failing'})
    train_two_phases(photos, output=tmp_path, **{**OPTIONS, 'epochs': 2})


def test_workers_are_forked_on_linux(photos, tmp_path):
    """A script without `if __name__ == '__main__'` works there, whatever Python's default is."""
    options = {**ALONE, 'workers': 1, 'output': str(tmp_path / 'out')}
    script = tmp_path / 'script.py'
    script.write_text(f'''
import multiprocessing
multiprocessing.set_start_method('forkserver')
from timm_cmhsa.train import train_two_phases
train_two_phases({str(photos)!r}, **{options!r})
''')
    run_python(script)


@pytest.mark.parametrize(('fit', 'kept'), [('crop', False), ('squash', True), ('pad', True)])
def test_oblong_images_become_square_alike_in_training_and_later(fit, kept, tmp_path):
    """The class is at the left end of a line."""
    root = tmp_path / 'lines'
    for split, name in itertools.product(SPLITS, ('blue', 'green')):
        (root / split / name).mkdir(parents=True)
        line = Image.new('RGB', (8 * SIDE, SIDE))
        line.paste(name, (0, 0, SIDE, SIDE))
        for i in range(4):
            line.save(root / split / name / f'{i}.png')
    options = dict(ALONE, no_flip=True, data_dir=root)
    results = train_two_phases(**options, output=tmp_path / 'out', fit=fit)
    assert any('88% of the median image is cropped' in line for line in results['chosen']) == (not kept)
    model = timm_cmhsa.load_model(tmp_path / 'out' / 'model')
    later = read_folder(root / 'validation', model, 8)[0]
    args = parse()
    vars(args).update(options, fit=fit, output=tmp_path / 'new')
    images = open_images(args)
    for scale, shift in ((1., 3), (0.98, None)):  # both keep some of the class, which is four pixels wide
        vars(args).update(scale=scale, shift=shift, workers=None)
        choose_options(args, images)
        loaders = make_loaders(images, args, data_config(model))
        assert torch.equal(torch.cat([batch for batch, _ in loaders.judged['validation']]), later)
        trained = torch.cat([batch for batch, _ in loaders.train])
        seen = (trained[:, 1:].amax(dim=(2, 3)) > 0).any(dim=1)
        assert bool(seen.all()) == kept


def test_an_output_among_the_classes_is_refused(photos, tmp_path):
    """The next run would take it for a class."""
    shutil.copytree(photos / 'train', tmp_path / 'photos')
    shutil.copytree(photos, tmp_path / 'split')
    for data_dir, root in (('photos', 'photos'), ('split', 'split/train'), ('split', 'split/validation')):
        with pytest.raises(ValueError, match='would become a class of'):
            train_two_phases(tmp_path / data_dir, output=tmp_path / root / 'out', **OPTIONS)
        assert {path.name for path in (tmp_path / root).iterdir()} == set(CLASSES)


def train_with_hook(hook, photos, output, code):
    """Train in a process of its own, with an audit hook `hook(event, args)`: before it saves, it renames."""
    return run_python('-c', f'''
import os, resource, signal, sys
from pathlib import PosixPath
from timm_cmhsa.train import train_two_phases
saved = []
def hook(event, args):
    if event == 'os.rename' and str(args[1]).endswith('.pth.tar'):
        saved.append(os.path.basename(args[1]))
        {hook}
sys.addaudithook(hook)
train_two_phases({photos!r}, output={output!r}, **{OPTIONS!r})
''', code=code)


@pytest.mark.parametrize(('name', 'number'), [('phase1', 1), ('phase2', 1), ('phase2', 2)])
def test_a_killed_run_goes_on_to_the_same_weights(name, number, finished, photos, tmp_path, capsys):
    """Killed while a checkpoint is saved: the first of phase 1 and both of phase 2."""
    kill = f'saved.count("{name}.pth.tar") == {number} and os.kill(os.getpid(), signal.SIGKILL)'
    train_with_hook(kill, photos, tmp_path, -signal.SIGKILL)
    results = train_two_phases(photos, output=tmp_path, **OPTIONS)
    out = capsys.readouterr().out
    assert ('phase2 goes on after epoch 3' in out) == (number == 2)
    assert ('phase1 was trained before' in out) == (name == 'phase2')
    assert results['top1'] == finished[1]['top1']
    assert_equal(weights(tmp_path), weights(finished[0]))


def test_a_full_disk_keeps_the_last_checkpoint(finished, photos, tmp_path):
    """The second checkpoint finds a full disk. With space again, the same call ends as it would have."""
    fill = 'signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))'
    message = train_with_hook(fill, photos, tmp_path, 1).stderr.splitlines()[-1]
    assert re.fullmatch(r'.*phase1.pth.tar cannot be written: .* run the same command again\.', message)
    assert (tmp_path / 'checkpoints' / 'phase1.pth.tar').exists()
    train_two_phases(photos, output=tmp_path, **OPTIONS)
    assert_equal(weights(tmp_path), weights(finished[0]))


def train_in_one_and_two(folder, *options):
    """Train in one process, and in two with half of its batch each."""
    for split, (label, name), i in itertools.product(SPLITS, enumerate(CLASSES), range(4)):
        (folder / split / name).mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (SIDE, SIDE), (80 * label, 20 * i, 100)).save(folder / split / name / f'{i}.png')
    command = ['-m', 'timm_cmhsa.train', '--data-dir', folder, '--img-size', SIDE, '--mixup', 0, '--cutmix', 0,
               '--scale', 0.9, '--no-amp', '--device', 'cpu', '--opt', 'adamw', *options]  # Muon amplifies rounding
    run_python(*command, '--output', folder / 'one', '--batch-size', 12)
    torchrun = '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 2
    run_python(*torchrun, *command, '--output', folder / 'two', '--batch-size', 6)
    return folder / 'one', folder / 'two'


def test_two_processes_do_what_one_does_with_both_batches(tmp_path):
    """Crops change nothing in images of one colour, and their order nothing if all are in a batch."""
    options = '--model', 'test_cmhsa_conv_k3', '--epochs', 4, '--switch', 0.5, '--ema', 0.9
    folders = train_in_one_and_two(tmp_path, *options)
    results = [json.loads((folder / 'results.json').read_text()) for folder in folders]
    assert results[0]['top1'] == results[1]['top1']
    torch.testing.assert_close(*map(weights, folders), rtol=1e-3, atol=1e-5)
    options = json.loads((folders[1] / 'options.json').read_text())
    resumed = train_two_phases(
        tmp_path, output=folders[1], model='test_cmhsa_conv_k3', epochs=4, switch=0.5, ema=0.9, img_size=SIDE,
        mixup=0., cutmix=0., scale=0.9, no_amp=True, device='cpu', opt='adamw')
    assert resumed['options'] == {**options, 'batch_size': '12', 'world_size': '1'}, 'one process goes on'


@pytest.mark.slow
def test_two_processes_share_the_statistics_of_batch_norm(tmp_path):
    folders = train_in_one_and_two(tmp_path, '--epochs', 1, '--switch', 1, '--lr', 1e-12)
    expected, actual = (weights(folder, 'phase1')['patch_embed.proj.1.running_mean'] for folder in folders)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_phase_1_alone(photos, tmp_path, monkeypatch):
    """Without an output, it is called like the images."""
    monkeypatch.chdir(tmp_path)
    results = train_two_phases(photos, **{**OPTIONS, 'epochs': 2, 'switch': 1})
    output = Path('output') / photos.name
    assert results['top1'] == results['phase1_top1'] == pytest.approx(results['converted_top1'])
    models = [timm_cmhsa.load_model(output / name) for name in ('model', 'converted')]
    assert [type(model).__name__ for model in models] == ['CmhsaConv', 'CmhsaAttn']
    assert timm_cmhsa.verify(*models, torch.zeros(1, 3, SIDE, SIDE)).max_error < 1e-5
    assert is_picture(output / 'attention.png')
    text = (output / 'results.md').read_text()
    assert '| converted |' in text
    assert f"timm.create_model('local-dir:{output}/model', pretrained=True)" in text
    assert '| phase 2 |' not in text


def test_moments_of_the_optimizer_and_the_schedule_go_on(finished):
    """Norms, MLPs and the head keep the steps that phase 1 counted; attention counts its own, and learns slowly."""
    checkpoint = torch.load(finished[0] / 'checkpoints' / 'phase2.pth.tar', weights_only=True)
    state, groups = (checkpoint['optimizer'][key] for key in ('state', 'param_groups'))
    steps = {False: set(), True: set()}
    for group in groups:
        counted = [state[index] for index in group['params'] if 'step' in state[index]]  # by AdamW in Muon
        steps['full_scale' in group] |= {int(each['step']) for each in counted}
    assert steps == {False: {12}, True: {6}}  # of 4 and 2 epochs of 3 steps
    assert {group['full_scale'] for group in groups if 'full_scale' in group} == {0.03}
    tables = [group for group in groups if group.get('use_fallback') and 'full_scale' in group and group['params']]
    assert len(tables) == 1, 'biases are no matrices, which Muon is for'


class Products(TorchDispatchMode):
    """Remember the types of matrix products."""
    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.baddbmm):  # those of timm's Muon are among them
            self.dtypes.add(args[1].dtype)
        return func(*args, **kwargs or {})


def test_muon_computes_in_the_type_of_the_training(photos, tmp_path):
    """In bfloat16, processors without it would take most of a step for it."""
    with Products() as products:
        train_two_phases(photos, output=tmp_path / 'float32', opt='muon', no_amp=True, **ALONE)
    assert products.dtypes == {torch.float32}
    optimizer = timm.optim.Muon([torch.nn.Parameter(torch.ones(8, 8))])  # of anybody else, as before
    optimizer.param_groups[0]['params'][0].grad = torch.eye(8)
    with Products() as products:
        optimizer.step()
    assert products.dtypes == {torch.bfloat16}


def test_models_are_judged_by_mirror_images_too(photos, tmp_path):
    train_two_phases(photos, output=tmp_path, tta=True, **ALONE)
    predicted = predict(tmp_path / 'model', photos / 'validation', tta=True)
    shares = dict(zip(map(str, predicted.files), predicted.logits.softmax(dim=1).amax(dim=1).tolist()))
    with open(tmp_path / 'mistakes.csv', newline='') as file:
        mistakes = list(csv.DictReader(file))
    assert mistakes
    for row in mistakes:
        assert float(row['probability']) == pytest.approx(shares[row['path']], abs=1e-3)


def test_more_options(photos, tmp_path):
    """A schedule for each phase, averaged weights, and gray images."""
    results = train_two_phases(
        photos, output=tmp_path, separate_schedules=True, phase2_lr=1e-4, ema=0.9,
        architecture='test_cmhsa_attn', phase2_kwargs=dict(num_heads=10), compile=False,
        model_kwargs=dict(in_chans=1), opt='muon', opt_kwargs=dict(momentum=0.5), no_amp=True, **OPTIONS)
    checkpoint = torch.load(tmp_path / 'checkpoints' / 'phase2.pth.tar', weights_only=True)
    history = checkpoint['history']
    assert {group['momentum'] for group in checkpoint['optimizer']['param_groups']} == {0.5}
    assert results['curves']['phase 2'] == history
    assert timm_cmhsa.load_model(tmp_path / 'model').blocks[0].attn.num_heads == 10


def test_a_rewrite_of_ones_own(photos, tmp_path):
    """Any model can be trained, and rewritten by any function."""
    results = train_two_phases(
        photos, lambda model: timm_cmhsa.attend_convs(model, 'conv1.0', (3, SIDE, SIDE)), output=tmp_path,
        **{**OPTIONS, 'model': 'test_resnet', 'epochs': 2})
    assert results['converted_top1'] == pytest.approx(results['phase1_top1'])


def test_test_images_are_judged_in_the_end(photos, tmp_path):
    """They are those of `test` where there is a folder for validation, too."""
    root = shutil.copytree(photos, tmp_path / 'photos')
    shutil.copytree(root / 'validation', root / 'test')
    (root / 'test' / 'owl' / '0.png').unlink()
    write_image(root / 'val' / 'cat' / '0.png')  # not a third one
    results = train_two_phases(root, output=tmp_path, compare=['test_resnet'], **{**OPTIONS, 'epochs': 2})
    assert results['num_validation'] == 12
    assert set(results['test']) == {'phase 1', 'converted', 'phase 2', 'test_resnet'}
    assert results['test']['converted'] == results['test']['phase 1'] in [
        pytest.approx(100 * right / 11) for right in range(12)]
    lead = results['lead']['test']['test_resnet'][0]
    assert lead == pytest.approx(results['test']['phase 2'] - results['test']['test_resnet'])
    text = (tmp_path / 'results.md').read_text()
    assert re.search(r'Top-1 on 11 test images, %: phase 1 [0-9.]+ \([0-9.]+ to [0-9.]+\), ', text)
    assert f'on the same test images, in points, with its paired 95 % interval: {lead:+.2f}' in text
    assert 'test' in open_folder(root).splits
    (root / 'test' / 'owl').rename(root / 'test' / 'unknown')
    data = open_folder(root)
    assert 'test' not in data.splits
    assert data.notes == [
        f"owl, unknown: in one of {root / 'train'} and {root / 'test'} only, so no model is tested on the latter"]


def test_images_are_shifted_by_so_many_pixels_at_most(tmp_path):
    image = Image.new('RGB', (SIDE, SIDE))
    image.putpixel((16, 16), (255, 255, 255))
    image.save(tmp_path / 'a.png')
    samples = [(tmp_path / 'a.png', i % 3) for i in range(60)]
    images = Images(dict.fromkeys(SPLITS, samples), list(CLASSES), [(SIDE, SIDE)], [])
    args = parse(
        '--img-size', SIDE, '--fit', 'crop', '--batch-size', 4, '--scale', 1, '--shift', 2, '--workers', 0, '--no-flip')
    loader = make_loaders(images, args, data_config(timm.create_model('test_cmhsa_conv_k3', img_size=SIDE))).train
    places = torch.cat([images for images, _ in loader])[:, 0].flatten(1).argmax(dim=1)
    assert {*(places // SIDE).tolist()} == {*(places % SIDE).tolist()} == {14, 15, 16, 17, 18}


def test_a_training_that_diverges_ends(photos, tmp_path):
    with pytest.raises(ValueError, match='phase1 diverged in epoch 1: use a smaller --lr'):
        train_two_phases(photos, output=tmp_path, lr=1e20, opt='sgd', warmup_epochs=0, **OPTIONS)


@pytest.mark.slow
def test_compiled(photos, tmp_path):
    train_two_phases(photos, output=tmp_path, compile=True, **ALONE)


def test_without_a_compiler(photos, tmp_path, monkeypatch):
    monkeypatch.setenv('CXX', 'nonsense')
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path / 'cache'))
    result = run_python(
        '-m', 'timm_cmhsa.train', '--data-dir', photos, '--output', tmp_path / 'out', '--model', 'test_cmhsa_conv_k3',
        '--img-size', SIDE, '--epochs', 1, '--switch', 1, '--batch-size', 4, '--device', 'cpu', '--compile', code=2)
    assert re.search('error: phase1 cannot be compiled: .*compiler.* Leave out --compile.$', result.stderr.strip())


def test_classes_alone_hold_out_every_tenth_image(tmp_path):
    root = write_folder(tmp_path, ['.'], count=11)
    data = open_folder(root)
    assert len(data.splits['train']) == 27
    assert sorted(path.name for path, _ in data.splits['validation']) == sorted(3 * ['0.png', '9.png'])
    assert 'every tenth image' in ' '.join(data.notes)
    assert not {*data.splits['train']} & {*data.splits['validation']}


@pytest.mark.parametrize(('side', 'size'), [(20, 32), (32, 32), (60, 64), (64, 64), (100, 96), (500, 224)])
def test_model_and_schedule_fit_the_images(side, size, tmp_path):
    data = open_folder(write_folder(tmp_path, side=side, count=1))
    hybrid = f'cmhsa_hybrid_conv_{64 if size == 96 else size}'
    for options, expected in (
            ([], (size, hybrid, 8.8e-3, 8.8e-3, 1.)),  # for 2 images in a step
            (['--batch-size', '3', '--mixup', '0', '--cutmix', '0'], (size, hybrid, 1.1e-2, 1.1e-2, 1.)),
            (['--opt', 'adamw'], (size, hybrid, 1.8e-4, 1.8e-4, 1.)),
            (['--model', 'cmhsa_conv_k5', '--img-size', '64'], (64, 'cmhsa_conv_k5', 8.8e-3, 8.8e-3, 0.4)),
            (['--compare', 'test_vit'], (size, hybrid, 8.8e-3, 1.8e-3, 1.)),
            (['--compare', 'test_vit', '--lr', '1'], (size, hybrid, 1., 1.8e-3, 1.)),
            (['--compare', 'test_vit', '--lr', '1', '--opt', 'adamw'], (size, hybrid, 1., 1., 1.)),
            (['--model', 'test_vit', '--img-size', '64'], (64, 'test_vit', 1.8e-3, 8.8e-3, 1.)),
            (['--model', 'test_vit', '--img-size', '64', '--start', 'convolution'],
             (64, 'test_vit', 1.8e-4, 8.8e-3, 1.)),
            (['--model', 'test_resnet', '--img-size', '64'], (64, 'test_resnet', 8.8e-3, 8.8e-3, 1.)),
            (['--model', 'eva02_tiny_patch14_224', '--img-size', '64', '--opt', 'nmuon'],
             (64, 'eva02_tiny_patch14_224', 1.8e-3, 8.8e-3, 1.)),
            (['--model', 'test_cmhsa_attn', '--img-size', '64'], (64, 'test_cmhsa_attn', 1.8e-3, 8.8e-3, 1.)),
            (['--compare', 'swin_tiny_patch4_window7_224'], (size, hybrid, 8.8e-3, 1.8e-3, 1.)),
            (['--img-size', '128', '--lr', '1'], (128, 'cmhsa_hybrid_conv_64', 1., 1., 1.))):
        args = parse('--compare', 'resnet18', *options)
        choose_options(args, data)
        rival, = args.rivals.values()
        assert (args.img_size, args.model, args.lr, rival.get('lr', args.lr), args.switch) == expected


@pytest.mark.parametrize('options', [{}, dict(batch_size=20)])
def test_a_run_of_two_processes_goes_on_with_as_many_images_of_a_step(options):
    args = parse()
    images = Images({'train': [(i, i % 3) for i in range(400)]}, list(CLASSES), [(SIDE, SIDE)], [], options)
    assert '--batch-size 40: fits these images' in choose_options(args, images, dict(batch_size='20', world_size='2'))
    assert args.batch_size == 40


@pytest.mark.parametrize(('opt', 'lr'), [(None, 3e-3), ('adamw', 3e-3), ('muon', 0.028)])
def test_the_rate_that_fits_the_digits_is_of_their_optimizer(opt, lr):
    args = parse(*(['--opt', opt] if opt else []))
    choose_options(args, Images({'train': [(i, i % 3) for i in range(400)]}, list(CLASSES), [(32, 32)], [], OF_DIGITS))
    assert (args.opt, args.lr) == (opt or 'adamw', lr)


@pytest.mark.parametrize(('number', 'epochs'), [(100, 300), (8_000, 32), (50_000, 30)])
def test_epochs_fit_the_number_of_images(number, epochs):
    args = parse()
    choose_options(args, Images({'train': [(i, i % 3) for i in range(number)]}, list(CLASSES), [(SIDE, SIDE)], []))
    assert args.epochs == epochs


def test_usual_names_of_folders(photos, tmp_path):
    root = changed(photos, tmp_path / 'photos', {
        'train': 'Train', 'validation': 'valid', 'Train/__MACOSX/a.png': b'', 'Train/cat/.ipynb_checkpoints/a.png': b'',
        'Train/cat/._0.png': b'of macOS'})
    data = open_folder(root)
    assert data.notes == []
    assert ({split: len(samples) for split, samples in data.splits.items()}, data.class_names) == (
        dict(train=12, validation=12), list(CLASSES))


def test_photos_are_upright_and_large_ones_are_decoded_smaller(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image = Image.new('RGB', (1600, 1200))
    image.paste((255, 255, 255), (0, 0, 1600, 600))
    image.save(tmp_path / 'a.jpg', exif=exif)
    assert load_image(tmp_path / 'a.jpg', side=1000).size == (1200, 1600)
    photo = load_image(tmp_path / 'a.jpg', side=DECODED)
    assert photo.size == (600, 800)
    assert photo.getpixel((500, 400)) == (255, 255, 255)
    assert photo.getpixel((100, 400)) == (0, 0, 0)


def test_images_that_cannot_be_used_are_left_out_and_named(photos, tmp_path):
    root = changed(photos, tmp_path / 'photos', {'train/cat/broken.jpg': b'no image'})
    Image.fromarray(np.zeros((SIDE, SIDE), dtype=np.uint16)).save(root / 'train' / 'dog' / 'deep.png')
    write_image(root / 'train' / 'owl' / 'gray.png', mode='L')
    images = open_folder(root)
    assert len(images.splits['train']) == 13
    assert all(os.path.isfile(path) for path, _ in images.splits['train'])  # seen as by load_image
    note, = images.notes
    assert 'left out 2 of 15 images' in note
    assert 'broken.jpg: cannot identify' in note
    assert 'deep.png: it has more than 8 bits' in note


def test_files_that_are_no_images_of_a_class_are_noted(photos, tmp_path):
    root = changed(photos, tmp_path / 'photos', {'train/loose.png': b'', 'train/owl/IMG_1.HEIC': b''})
    loose, other = open_folder(root).notes
    assert loose == f"left out 1 images of {root / 'train'} that are in no folder of a class"
    assert other == f"left out 1 files of {root / 'train'} in other formats (IMG_1.HEIC)"


@pytest.mark.parametrize(('changes', 'options', 'message'), [
    ({'train/bee/a.txt': b''}, {}, 'photos/train: Found no valid file for the classes bee'),
    ({'validation/owl': 'validation/eagle'}, {}, 'eagle, owl: in one of'),
    (dict.fromkeys(('train/dog', 'train/owl', 'validation/dog', 'validation/owl')), {}, 'has one class, cat'),
    ({'train': None, 'validation': None, '0.png': b''}, {}, 'has no class: expected two folders of images or more'),
    ({'train/cat/0.png': 'train/cat/pets/0.png'}, {}, 'is a folder in a folder'),
    ({f'validation/dog/{i}.png': b'no image' for i in range(4)}, {}, 'dog needs an image to train on, and one to'),
    ({'train/dog': 'train/caf\u00e9', 'train/owl': 'train/cafe\u0301'}, {}, 'has two folders of the same name, such'),
    ({'': None}, {}, 'is not a folder'),
    ({}, dict(learning_rate=1e-3), 'learning_rate: not an option. Choose from '),
    ({}, dict(batch_size=100), '12 training images are fewer than a step needs'),
    ({}, dict(batch_size=3), 'must be even for Mixup'),
    ({}, dict(model='resnet18', switch=0.5), 'got ResNet. --switch 1 trains resnet18 alone'),
    ({}, dict(phase2_kwargs=dict(peak=2)), 'peak'),
    ({}, dict(model_kwargs=dict(in_chans=4)), 'Images have 1 or 3 channels, but the model takes 4'),
    ({}, dict(model_kwargs=dict(crop_mode='border')), '--model-kwargs crop_mode: leave it out.'),
    ({}, dict(start='convolution'), 'is for a ViT of timm: add --model'),
    ({}, dict(start='nothing'), "start='nothing' must be one of convolution"),
    ({}, dict(switch=0), '--switch 0 must be above 0 and at most 1'),
    ({}, dict(ema=2), '--ema 2 must be at least 0 and at most 1'),
    ({}, dict(weight_decay=float('nan')), '--weight-decay nan must be at least 0'),
    ({}, dict(epochs=1, switch=0.5), '--epochs 1 has no room for two phases'),
    ({}, dict(aa='nonsense'), 'nonsense'),
    ({}, dict(device='nonsense'), 'nonsense'),
    ({}, dict(opt='nonsense'), 'nonsense'),
    ({}, dict(switch=1, phase2_lr=1e-3), '--phase2-lr and --separate-schedules are for two phases'),
    ({}, dict(scale=0.5, shift=3), '--shift 3 is for whole images, but --scale 0.5 crops: add'),
    ({}, dict(shift=32), '--shift 32 must be smaller than the image, 32 pixels'),
    ({}, dict(tta=True, no_flip=True), '--tta averages mirror images, which --no-flip says are other images'),
    ({}, dict(compare=['nonsense']), 'nonsense is not a model of timm'),
    ({}, dict(compare=['inception_v3'], img_size=32), "Kernel size can't be greater than actual input size"),
])
def test_bad_input_is_refused_before_any_training(changes, options, message, photos, tmp_path):
    root = changed(photos, tmp_path / 'photos', changes)
    with pytest.raises((ValueError, TypeError, OSError), match=re.escape(message)):
        train_two_phases(root, output=tmp_path / 'out', **options)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(('options', 'message'), [
    (['--data-dir', 'nowhere'], 'nowhere is not a folder'),
    (['--model-ema'], 'unrecognized arguments: --model-ema'),
    (['--output', os.devnull], f'error: {os.devnull}'),
])
def test_the_command_prints_one_line(options, message, tmp_path, monkeypatch, capsys):
    def main(arguments):
        monkeypatch.setattr(sys, 'argv', ['train', *arguments])
        runpy.run_module('timm_cmhsa.train', run_name='__main__')

    assert message in command_error(main, ['--output', tmp_path / 'out', *options], capsys)


def test_names_are_text(tmp_path):
    """Also for matplotlib, in another form of Unicode, and in no Unicode at all."""
    names = ['$', '$$', 'a_b^c\\%', 'caf\u00e9', os.fsdecode(b'caf\xe9')]
    for split, (label, name), i in itertools.product(SPLITS, enumerate(names), range(2)):
        name = name.replace('\u00e9', 'e\u0301') if split == 'train' else name
        write_image(tmp_path / 'images' / split / name / f'{i} $.png', seed=10 * label + i)
    results = train_two_phases(tmp_path / 'images', output=tmp_path / 'out', **OPTIONS)
    assert results['num_train'] == 10
    assert {'results.md', 'curves.png', 'attention.png', 'confusion.png'} <= set(os.listdir(tmp_path / 'out'))
    labels = json.loads((tmp_path / 'out' / 'model' / 'config.json').read_text())['label_names']
    assert labels == ['$', '$$', 'a_b^c\\%', 'caf\u00e9', 'caf\ufffd']


def test_letters_that_the_font_lacks():
    """Classes have numbers, as in the table of results.md."""
    axis, = draw_confusion(torch.eye(2), torch.arange(2), ['cat', 'x\U00100123']).axes  # no font has it
    assert [label.get_text() for label in axis.get_xticklabels()] == ['cat', '#1']


def test_a_picture_that_fails_costs_no_results(finished, tmp_path, capsys):
    final = Judged('phase 1', None, {'validation': (torch.zeros(2, 3), torch.zeros(2).long())})
    write_report(tmp_path, finished[1], Images({'validation': []}, [], [], []), final, {'x': torch.nn.Identity()}, None)
    assert 'confusion.png cannot be drawn' in capsys.readouterr().out
    assert json.loads((tmp_path / 'results.json').read_text()) == finished[1]
    assert '![curves.png]' in (tmp_path / 'results.md').read_text()


def test_a_folder_with_other_results_is_left_as_it_is(photos, tmp_path):
    (tmp_path / 'results.md').write_text('mine')
    with pytest.raises(ValueError, match=r'holds a results.md that is not of a training: give another --output'):
        train_two_phases(photos, output=tmp_path, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ['results.md']


def test_a_folder_of_another_run_is_left_as_it_is(finished, photos, tmp_path):
    """With other options, or with another file among as many."""
    with pytest.raises(ValueError, match=r'holds a run with --seed 0, no --no-flip: give another --output'):
        train_two_phases(photos, output=finished[0], seed=1, no_flip=True, **OPTIONS)
    root = changed(photos, tmp_path / 'photos', {})
    assert open_folder(root).digest == open_folder(photos).digest
    (root / 'train' / 'cat' / '0.png').rename(root / 'train' / 'cat' / 'other.png')
    with pytest.raises(ValueError, match='holds a run with other images: give another --output'):
        train_two_phases(root, output=finished[0], **OPTIONS)


def test_large_seeds_and_digits_with_other_models(tmp_path):
    """The options that fit the digits' own model are not those of another one; models to compare are as gray."""
    for name, models in (('model', 'test_resnet'), ('compare', ['test_resnet'])):
        results = train_two_phases(
            output=tmp_path / name, **{name: models}, seed=20_261_124, epochs=1, switch=1, device='cpu')
        assert results['num_train'] == 400
    config = json.loads((tmp_path / 'model' / 'model' / 'config.json').read_text())
    assert len(config['label_names']) == 10


def test_split_names_can_be_classes(tmp_path):
    for name, i in itertools.product(('train', 'test', 'bus'), range(2)):
        write_image(tmp_path / name / f'{i}.png')
    assert open_folder(tmp_path).class_names == ['bus', 'test', 'train']


def test_quick_is_four_epochs_of_the_digits_too(tmp_path):
    command = '-m', 'timm_cmhsa.train', '--quick', '--device', 'cpu', '--output', tmp_path
    result = run_python(*command)
    assert len(json.loads((tmp_path / 'results.json').read_text())['curves']['phase 1']) == 2
    assert (tmp_path / 'results.md').read_text() in result.stdout


def test_digits_are_the_same_for_a_seed(tmp_path):
    contents = []
    for root in (tmp_path / 'one', tmp_path / 'two'):
        write_digits(root, num_train=20)
        contents.append({path.relative_to(root): path.read_bytes() for path in root.rglob('*.png')})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 1797
