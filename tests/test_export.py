"""`python -m timm_cmhsa.export`: an ONNX file that computes what the model does, or none."""
import json
import sys

import pytest
import timm
import torch
from helpers import command_error, max_error, phase1, run_python

import timm_cmhsa
from timm_cmhsa.export import export_onnx, main
from timm_cmhsa.images import data_config

onnx = pytest.importorskip('onnx')
onnxruntime = pytest.importorskip('onnxruntime')
pytest.importorskip('onnxscript')
if torch.__version__ < '2.7':
    pytest.skip('the exporter of torch 2.6 fails on batch norm', allow_module_level=True)

NAMES = ['caf\u00e9', 'dog', 'owl']


def hybrid():
    return phase1(stem='16p-32p', hidden_chans=32, mlp_layer='depthwise', num_classes=3)


FORMS = {
    'phase 1': lambda: phase1(num_classes=3),
    'hard': lambda: timm_cmhsa.convert_model(phase1(num_classes=3)),
    'soft': lambda: timm_cmhsa.convert_model(phase1(num_classes=3), peak=0.75),
    'hybrid, phase 1': hybrid,
    'hybrid, phase 2': lambda: timm_cmhsa.convert_model(hybrid(), peak=0.75),
    'cnn': lambda: timm.create_model('test_resnet', num_classes=3),
    'cnn, phase 2': lambda: timm_cmhsa.attend_convs(
        timm.create_model('test_resnet', num_classes=3), 'layer4.*', input_size=(3, 160, 160)),
    'half': lambda: phase1(num_classes=3).bfloat16()}


@pytest.mark.parametrize('form', FORMS)
def test_every_form_in_batches_of_any_size(form, tmp_path):
    model, path = FORMS[form](), tmp_path / 'model.onnx'
    training, dtype = model.training, next(model.parameters()).dtype
    assert export_onnx(model, path) < 1e-5
    assert [*tmp_path.iterdir()] == [path]  # weights are in it
    assert (model.training, next(model.parameters()).dtype) == (training, dtype)
    onnx.checker.check_model(path, full_check=True)
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert ('Softmax' in operators) == (form in ('soft', 'hybrid, phase 2'))  # hard heads are shifts
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    model = model.float().eval()
    for count in (1, 3):
        images = torch.randn(count, *data_config(model)['input_size'])
        logits, = session.run(None, {'images': images.numpy()})
        assert max_error(model(images), torch.from_numpy(logits)) < 1e-5


def test_the_command_notes_classes_and_preprocessing(tmp_path):
    model = phase1(num_classes=3, img_size=(24, 32), pretrained_cfg_overlay=dict(crop_pct=0.8, mean=(0.1, 0.2, 0.3)))
    timm_cmhsa.save_for_hub(model, tmp_path / 'model', label_names=NAMES)
    result = run_python('-m', 'timm_cmhsa.export', 'model', 'model.onnx', cwd=tmp_path)
    assert result.stdout.startswith('largest error in onnxruntime: ')
    assert result.stdout.endswith('written to model.onnx\n')
    session = onnxruntime.InferenceSession(tmp_path / 'model.onnx', providers=['CPUExecutionProvider'])
    noted = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert noted['label_names'] == NAMES
    expected = data_config(model)
    assert expected['crop_pct'] == 0.8
    assert expected['input_size'] == (3, 24, 32)
    assert {key: tuple(noted[key]) if isinstance(value, tuple) else noted[key] for key, value in expected.items()} == (
        expected)


def test_nothing_is_written_if_the_error_is_too_large(tmp_path, capsys):
    path = tmp_path / 'model.onnx'
    timm_cmhsa.save_for_hub(phase1(), tmp_path / 'model')
    path.write_bytes(b'an older one')
    error = command_error(main, [tmp_path / 'model', path, '--tolerance', '0', '--force'], capsys, code=1)
    assert 'above the tolerance of 0' in error
    assert path.read_bytes() == b'an older one'
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.filterwarnings('ignore')
def test_what_cannot_be_exported_is_one_line(tmp_path):
    model = phase1()
    model.register_forward_pre_hook(lambda _, args: args if args[0].sum() > 0 else None)  # depends on the images
    with pytest.raises(timm_cmhsa.CheckpointError, match=r'^The model cannot be exported: [^\n]*$'):
        export_onnx(model, tmp_path / 'model.onnx')
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(('arguments', 'message'), [
    ('nowhere new.onnx', 'nowhere does not exist'), ('model new.pb', 'new.pb must end in .onnx'),
    ('model old.onnx', 'old.onnx already exists'), ('model nowhere/new.onnx', 'nowhere is not a folder')])
def test_bad_input_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    timm_cmhsa.save_for_hub(phase1(), 'model')
    (tmp_path / 'old.onnx').write_bytes(b'of the user')
    error = command_error(main, arguments.split(), capsys)
    assert message in error
    assert {path.name for path in tmp_path.iterdir()} == {'model', 'old.onnx'}
    assert (tmp_path / 'old.onnx').read_bytes() == b'of the user'


@pytest.mark.parametrize('missing', ['onnxscript', 'onnxruntime'])
def test_what_is_missing_is_named(missing, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    error = command_error(main, ['model', tmp_path / 'model.onnx'], capsys)
    assert missing in error
    assert "pip install 'timm_cmhsa[export]'" in error
