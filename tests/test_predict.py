"""`python -m timm_cmhsa.predict`: photos in; a table, a CSV file, an evaluation and its pictures out."""
import csv
import os
import re
import sys

import numpy as np
import pytest
import timm
import torch
from helpers import command_error, is_picture, phase1, run_forked, run_python
from PIL import Image
from timm.models import save_for_hf

import timm_cmhsa
from timm_cmhsa.checkpoint import Checkpoint
from timm_cmhsa.evaluation import draw_mistakes, find_mistakes
from timm_cmhsa.images import image_reader
from timm_cmhsa.predict import main, predict

NAMES = 'caf\u00e9', '$x^', 'owl'
PREDICT = '-m', 'timm_cmhsa.predict'


def write_images(root, names):
    """Write an image by each name. Sizes and colours differ, and so do the predictions."""
    for seed, name in enumerate(names):
        rng = np.random.RandomState(seed)
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.randint(0, 256, (4, 5, 3)) * (rng.rand(3) > 0.5)
        Image.fromarray(pixels.astype(np.uint8)).resize((40 + seed, 36)).save(path)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp('models') / 'model'
    torch.manual_seed(0)
    timm_cmhsa.save_for_hub(phase1(num_classes=3), folder, label_names=NAMES)
    return folder


def expected(model, files):
    """Return what a model says of files, one by one."""
    read = image_reader(model)
    with torch.no_grad():
        return torch.cat([model(read(file).unsqueeze(0)) for file in files])


def read_csv(path):
    with open(path, newline='', encoding='utf-8', errors='surrogateescape') as file:
        return list(csv.reader(file))


@pytest.mark.parametrize('workers', [0, 2])
def test_every_photo_gets_what_the_model_says_of_it(model, workers, tmp_path):
    odd = ['comma, "quote".png', 'line\nbreak.jpg', os.fsdecode(b'caf\xe9.png')]
    names = [*(f'{i}.png' for i in range(20)), *odd, 'deep/er/1.PNG']
    write_images(tmp_path / 'photos', [*names, '.hidden.png', '@eaDir/1.png', '.thumbs/2.png'])
    output = tmp_path / 'out.csv'
    result = run_python(
        *PREDICT, model, tmp_path / 'photos', '--output', output, '--top', 5, '--batch-size', 7, '--workers', workers,
        '--device', 'cpu', env={**os.environ, 'PYTHONIOENCODING': 'ascii'})
    header, *rows = read_csv(output)
    assert header == ['path', 'class', 'probability', 'class 2', 'probability 2', 'class 3', 'probability 3']
    files = sorted(tmp_path / 'photos' / name for name in names)
    assert [row[0] for row in rows] == [str(file) for file in files]
    probabilities = expected(timm_cmhsa.load_model(model), files).softmax(dim=1)
    for row, each in zip(rows, probabilities):
        values, order = each.sort(descending=True)
        assert row[1::2] == [NAMES[i] for i in order]
        assert [float(cell) for cell in row[2::2]] == pytest.approx(values.tolist(), abs=1e-4)
    assert len({row[1] for row in rows}) > 1
    lines = result.stdout.splitlines()
    assert len(lines) == 22
    assert lines[1].split() == [ascii(cell)[1:-1] for cell in rows[0][:3]]
    assert lines[-1] == f'... and 4 more: {output}'


def test_mirror_images_are_averaged(model, tmp_path):
    write_images(tmp_path, ['0.png', '1.png'])
    files, net = [tmp_path / '0.png', tmp_path / '1.png'], timm_cmhsa.load_model(model)
    images = torch.stack([image_reader(net)(file) for file in files])
    with torch.no_grad():
        mean = (net(images) + net(images.flip(3))) / 2
    torch.testing.assert_close(predict(model, files, tta=True).logits, mean)
    assert not torch.allclose(predict(model, files).logits, mean, rtol=1e-3)


def test_photos_that_cannot_be_read_are_named_and_left_out(model, tmp_path):
    write_images(tmp_path, ['a.png', 'c.png'])
    (tmp_path / 'b.png').write_bytes(b'no image')
    (tmp_path / 'd\n.png').symlink_to('nowhere')
    result = run_python(*PREDICT, model, tmp_path, '--batch-size', 1)
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        'path', str(tmp_path / 'a.png'), str(tmp_path / 'c.png')]
    broken, missing = result.stderr.strip().splitlines()
    assert broken.startswith(f'{tmp_path / "b.png"} cannot be read: cannot identify image')
    assert missing.startswith(f'{tmp_path / "d?.png"} cannot be read: No such file')


@pytest.fixture
def in_classes(model, tmp_path):
    """Photos in folders of the classes that they are taken for, with some mistakes; names in another Unicode form."""
    write_images(tmp_path / 'all', [f'{i}.png' for i in range(24)])
    files = sorted((tmp_path / 'all').iterdir())
    classes = expected(timm_cmhsa.load_model(model), files).argmax(dim=1).tolist()
    assert len({*classes}) == 3
    targets = [(i + 1) % 3 if n < 6 else i for n, i in enumerate(classes)]
    for file, target in zip(files, targets):
        folder = tmp_path / 'test' / NAMES[target].replace('\u00e9', 'e\u0301')
        folder.mkdir(parents=True, exist_ok=True)
        file.rename(folder / file.name)
    return tmp_path / 'test'


def test_folders_of_classes_are_evaluated(model, in_classes, tmp_path, capsys):
    output = tmp_path / 'predictions.csv'
    assert main([str(model), str(in_classes), '--output', str(output)]) == 0
    out = capsys.readouterr().out
    assert 'top-1 75.00 % of 24 images, 95 % interval 55.1 to 88.0' in out
    table = out.split('top-1\n')[-1].splitlines()
    found = predict(model, in_classes)
    right = found.logits.argmax(dim=1) == found.targets
    shares = {i: (int((found.targets == i).sum()), 100 * right[found.targets == i].float().mean().item())
              for i in range(3)}
    rows = [line.split() for line in table]
    assert [(int(i), name, int(count), float(share)) for i, name, count, share in rows] == [
        (i, NAMES[i], count, pytest.approx(share, abs=0.05))
        for i, (count, share) in sorted(shares.items(), key=lambda each: (each[1][1], each[0]))]
    assert len(read_csv(output)) == 25
    assert is_picture(tmp_path / 'confusion.png')
    assert is_picture(tmp_path / 'mistakes.png')


@pytest.mark.parametrize('name', ['predictions.csv', 'confusion.png', 'mistakes.png'])
def test_files_are_replaced_only_with_force(name, model, in_classes, tmp_path, capsys):
    (tmp_path / name).write_bytes(b'of the user')
    arguments = [str(model), str(in_classes), '--output', str(tmp_path / 'predictions.csv')]
    before = {*tmp_path.iterdir()}
    error = command_error(main, arguments, capsys)
    assert f'{name} already exists' in error
    assert (tmp_path / name).read_bytes() == b'of the user'
    assert {*tmp_path.iterdir()} == before
    assert main([*arguments, '--force']) == 0
    assert (tmp_path / name).stat().st_size > 100


def test_old_mistakes_do_not_stay_where_there_are_none(model, in_classes, tmp_path):
    (tmp_path / 'mistakes.png').write_bytes(b'of another model')
    found = predict(model, in_classes)
    for file, wrong in zip(found.files, found.logits.argmax(dim=1) != found.targets):
        if wrong:
            file.unlink()
    assert main([str(model), str(in_classes), '--output', str(tmp_path / 'predictions.csv'), '--force']) == 0
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {'predictions.csv', 'confusion.png'}


def test_mistakes_are_those_the_most_confident_first():
    logits = torch.tensor([[0., 1.], [3., 0.], [0., 2.], [9., 0.], [5., 0.]])
    mistakes = find_mistakes(logits, torch.tensor([0, 1, 0, 0, 1]))
    assert [mistake[:3] for mistake in mistakes] == [(4, 1, 0), (1, 1, 0), (2, 0, 1), (0, 0, 1)]
    assert mistakes[0][3] == pytest.approx(torch.tensor(5.).sigmoid().item())
    asked = []

    def load(image, side):
        asked.append(image)
        return Image.new('RGB', (3 * side, side))

    figure = draw_mistakes(mistakes, load, ['$', 'a class with a name that is too long'])
    assert asked == [4, 1, 2, 0]
    axis, _, third = figure.axes[:3]
    assert (axis.get_title(), axis.get_xlabel()) == ('$: 99%', 'is a class with a name…')
    assert (third.get_title(), third.get_xlabel()) == ('a class with a name…: 88%', 'is $')
    assert max(axis.get_images()[0].get_array().shape) < 300  # and not the whole image


def test_folders_that_are_not_all_classes_are_not_evaluated(model, in_classes, tmp_path):
    write_images(in_classes, ['other/1.png'])
    result = run_python(*PREDICT, model, in_classes, '--output', tmp_path / 'predictions.csv')
    assert f'Not evaluated: {in_classes}/other/1.png is in no folder of a class' in result.stderr
    assert 'top-1' not in result.stdout
    assert not (tmp_path / 'mistakes.png').exists()
    assert predict(model, [in_classes / 'owl', in_classes / 'other' / '1.png']).targets is None


def test_gray_and_stock_models_without_names(tmp_path):
    write_images(tmp_path / 'photos', ['1/a.png', '0/b.png'])
    for model in (phase1(in_chans=1, num_classes=2), timm.create_model('test_resnet', num_classes=2).train()):
        found = predict(model, tmp_path / 'photos', batch_size=2)
        assert found.class_names == ['0', '1']
        assert found.targets.tolist() == [0, 1]
        torch.testing.assert_close(found.logits, expected(model, found.files))


def test_forms_of_models(model, hub, tmp_path):
    """File, folder, Hub; also of stock models, which the trainer writes, and pretrained ones by name."""
    write_images(tmp_path, ['1.png'])
    torch.manual_seed(1)
    stock = timm.create_model('test_resnet', num_classes=3).eval()
    save_for_hf(stock, str(tmp_path / 'stock'), {'label_names': NAMES, 'pretrained_cfg': {
        **stock.pretrained_cfg, 'crop_pct': 0.5, 'num_classes': 3}}, safe_serialization=True)
    stock = timm.create_model(f'local-dir:{tmp_path}/stock', pretrained=True).eval()
    ours = timm_cmhsa.load_model(model)
    Checkpoint.of(ours).write(tmp_path / 'model.safetensors')
    timm_cmhsa.push_to_hub(ours, 'alice/ours')
    official = timm.create_model('test_resnet').eval()
    for name, each in (('alice/stock', stock), ('alice/official', official)):
        timm.models.push_to_hf_hub(each, name, safe_serialization=True)
    hub.repositories['timm/test_resnet.r160_in1k'] = hub.repositories['alice/official']
    forms = {
        ours: (model, f'local-dir:{model}', tmp_path / 'model.safetensors', 'hf-hub:alice/ours'),
        stock: (tmp_path / 'stock', f'local-dir:{tmp_path}/stock', 'hf-hub:alice/stock'),
        official: ('test_resnet', 'hf-hub:timm/test_resnet.r160_in1k')}
    for loaded, sources in forms.items():
        for source in sources:
            logits = predict(source, tmp_path / '1.png').logits
            torch.testing.assert_close(logits, expected(loaded, [tmp_path / '1.png']), msg=str(source))
    assert predict(tmp_path / 'stock', tmp_path / '1.png').class_names == [*NAMES]


def test_memory_does_not_grow_with_the_photos(tmp_path):
    """530 MB of prepared images in 300 MB."""
    write_images(tmp_path, ['0.png'])
    for i in range(1, 300):
        os.link(tmp_path / '0.png', tmp_path / f'{i}.png')
    model = timm.create_model('test_resnet', num_classes=3, pretrained_cfg_overlay=dict(input_size=(3, 384, 384)))

    def check():
        assert len(predict(model, tmp_path, batch_size=4, workers=0, device='cpu').logits) == 300

    assert run_forked(check, memory=300 * 2 ** 20) == 0


@pytest.mark.parametrize(('arguments', 'message'), [
    ('MODEL nowhere', 'No image can be read. nowhere: No such file or directory.'),
    ('MODEL empty', 'empty has no images (.jpg, '), ('empty ok.png', 'config.json cannot be read'),
    ('MODEL broken.png', 'No image can be read. broken.png: cannot identify'),
    ('nowhere ok.png', 'nowhere does not exist: give a checkpoint file'),
    ('bad ok.png', 'bad cannot be loaded by timm.create_model: '), ('headless ok.png', 'has no classes'),
    ('coatnet_0_224 ok.png', 'coatnet_0_224 does not exist'),
    ('test_vit ok.png', 'test_vit cannot be loaded by timm.create_model: '),  # from the Hub
    ('MODEL ok.png --device abacus', 'abacus'),
    ('MODEL ok.png --workers -1', 'num_workers'), ('MODEL ok.png --top 0', '--top 0 must be at'),
    ('MODEL ok.png --output ok.png', '--output ok.png must end in .csv'),
    ('MODEL ok.png --output nowhere/1.csv', 'nowhere is not a folder')])
def test_bad_input_is_one_line(arguments, message, model, hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path, ['ok.png'])
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'broken.png').write_bytes(b'')
    timm_cmhsa.save_for_hub(phase1(num_classes=0), 'headless')
    stock = timm.create_model('test_resnet', num_classes=3)
    save_for_hf(stock, 'bad', {'architecture': 'test_vit'}, safe_serialization=True)
    before = sorted(tmp_path.rglob('*'))
    code = 3 if arguments.startswith('test_vit') else 2
    error = command_error(main, arguments.replace('MODEL', str(model)).split(), capsys, code)
    assert re.fullmatch(f'python -m timm_cmhsa.predict: error: .*{re.escape(message)}.*\n', error)
    assert sorted(tmp_path.rglob('*')) == before


def test_predictions_are_written_though_an_evaluation_lacks_its_extra(model, in_classes, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'timm_cmhsa.evaluation', None)  # as without scikit-learn
    assert main([str(model), str(in_classes), '--output', str(tmp_path / 'out.csv')]) == 2
    assert "Try pip install 'timm_cmhsa[train]'" in capsys.readouterr().err
    assert len((tmp_path / 'out.csv').read_text().splitlines()) == 25


def test_photos_without_classes_need_nothing_of_an_evaluation(model, tmp_path):
    """No place for its pictures, and not its extra."""
    write_images(tmp_path / 'photos', ['1.png'])
    (tmp_path / 'confusion.png').write_text('of an evaluation')
    run_python('-c', f'''
import sys
from timm_cmhsa.predict import main
assert main([{str(model)!r}, {str(tmp_path / "photos")!r}, '--output', {str(tmp_path / "1.csv")!r}]) == 0
assert not {{'sklearn', 'scipy', 'matplotlib'}} & sys.modules.keys()
''')
    assert (tmp_path / 'confusion.png').read_text() == 'of an evaluation'
