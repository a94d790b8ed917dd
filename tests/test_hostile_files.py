"""Broken and hostile files: one line, nothing written, no code run, nothing larger than the file."""
import argparse
import codecs
import io
import json
import os
import re
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from timm_cmhsa import CheckpointError, convert_checkpoint
from timm_cmhsa.checkpoints import training_details
from timm_cmhsa.cli import convert_main as main, read_label_names, read_results
from timm_cmhsa.files import read_checkpoint
from timm_cmhsa.hub.publish import check_label_names
from timm_cmhsa.messages import shorten
from timm_cmhsa.plots import load_model

SMALL = dict(img_size=8, patch_size=4, depth=1, num_classes=3, mlp_ratio=1)
NAME = 'norm.weight'


@pytest.fixture(scope='module')
def state_dict():
    torch.manual_seed(0)
    return timm.create_model('cmhsa_conv_k3', **SMALL).state_dict()


@pytest.fixture
def refused(tmp_path, capsys):
    """Check that a file or folder is refused in one line, which moves no cursor, by all roads."""
    def check(path, message='', *options):
        before = sorted(tmp_path.rglob('*'))
        assert main([str(path), str(tmp_path / 'out'), *options]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count('\n') == 1
        assert err.strip().isprintable()
        assert len(err) < 1000
        with pytest.raises(CheckpointError):
            load_model(path)
        assert sorted(tmp_path.rglob('*')) == before
    return check


class Calls:
    """Is pickled as a call."""
    def __init__(self, function, *args, state=None):
        self.call = function, args, state

    def __reduce__(self):
        return self.call


def expanded():
    return torch.zeros(1).expand(10 ** 12)


def negative():
    return torch.view_as_complex(torch.ones(48, 2)).conj().imag


TENSORS = {
    'sparse': lambda: torch.ones(48).to_sparse(),
    'CSR': lambda: torch.ones(4, 12).to_sparse_csr(),
    'quantized': lambda: torch.quantize_per_tensor(torch.ones(48), 1., 0, torch.qint8),
    'meta': lambda: torch.ones(48, device='meta'),
    'complex': lambda: torch.ones(48, dtype=torch.complex64),
    'float8': lambda: torch.ones(48).to(torch.float8_e4m3fn),
    'expanded': expanded,
    'overlapping': lambda: torch.ones(10 ** 4).as_strided((9000, 1000), (1, 1)),
    'huge allocation': lambda: Calls(bytearray, 10 ** 13),
    'slow codec': lambda: Calls(codecs.encode, 'x' * 10 ** 6, 'punycode'),
    'not a tensor': lambda: [1, 2],
}


@pytest.mark.parametrize('kind', TENSORS)
def test_tensors_that_are_not_plain_are_refused(kind, state_dict, refused, tmp_path):
    torch.save({**state_dict, NAME: TENSORS[kind]()}, tmp_path / 'a.pth')
    refused(tmp_path / 'a.pth')


@pytest.mark.parametrize('make', [lambda x: x.clone().requires_grad_(), nn.Parameter, lambda x: -negative() * x])
def test_tensors_that_are_plain_underneath_are_taken(make, state_dict, tmp_path):
    torch.save({**state_dict, NAME: make(state_dict[NAME])}, tmp_path / 'a.pth')
    tensor = read_checkpoint(tmp_path / 'a.pth').state_dict[NAME]
    assert (type(tensor), tensor.requires_grad, tensor.is_neg()) == (torch.Tensor, False, False)
    assert torch.equal(tensor, state_dict[NAME])


def resaved(path, compression=zipfile.ZIP_STORED, **replaced):
    """Write a zip file anew, with some of its files replaced."""
    with zipfile.ZipFile(path) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, 'w', compression) as archive:
        for name, content in files.items():
            archive.writestr(name, replaced.get(name.split('/')[-1].replace('.', '_'), content))
    return files


@pytest.mark.parametrize('numel', [10 ** 4, 2 ** 31 - 1])
def test_a_tensor_that_claims_more_than_the_file_holds(numel, refused, tmp_path):
    """Older versions of torch read beyond its end, if the file is not mapped."""
    path = tmp_path / 'a.pth'
    torch.save({'weight': torch.zeros(1000)}, path)
    content = resaved(path)['a/data.pkl']
    assert content.count(b'M' + struct.pack('<H', 1000)) == 2
    content = content.replace(b'M' + struct.pack('<H', 1000), b'J' + struct.pack('<i', numel))
    resaved(path, data_pkl=content)
    refused(path, 'truncated, corrupt')


def test_a_zip_bomb_is_not_unpacked(refused, tmp_path):
    path = tmp_path / 'a.pth'
    torch.save({'weight': torch.zeros(10 ** 7)}, path)
    resaved(path, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10 ** 5
    refused(path, 'is compressed')


def test_the_pickle_that_torch_takes_is_the_one_looked_at(refused, tmp_path):
    """Whatever the case of its name."""
    path = tmp_path / 'a.pth'
    torch.save({NAME: Calls(codecs.encode, 'x', 'ascii')}, path)
    files = resaved(path)
    with zipfile.ZipFile(path, 'w') as archive:
        for name, content in files.items():
            archive.writestr(name.replace('data.pkl', 'DATA.PKL'), content)
    refused(path, 'needs code to load')


def test_every_truncation_is_one_line(state_dict, tmp_path):
    """Of the file that torch wrote before 1.6, too."""
    buffer = io.BytesIO()
    torch.save({'state_dict': {NAME: torch.ones(3)}, 'args': argparse.Namespace(model='x')}, buffer,
               _use_new_zipfile_serialization=False)
    content, path = buffer.getvalue(), tmp_path / 'a.pth'
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match='truncated, corrupt or not a checkpoint'):
            read_checkpoint(path)
    path.write_bytes(content)
    assert torch.equal(read_checkpoint(path).state_dict[NAME], torch.ones(3))


def laughs(depth=60):
    value = ['ha']
    for _ in range(depth):
        value = [value, value]
    return value


class Shadowed(OrderedDict):
    """Is pickled as an OrderedDict whose own attributes hide its methods."""
    def __reduce__(self):
        hidden = dict.fromkeys(('items', 'keys', 'get', 'values'), 1)
        return OrderedDict, (), hidden, None, iter(dict.items(self))


ODD_VALUES = {
    'tensor': torch.ones(3), 'laughs': laughs(), 'dict': {'a': torch.ones(2)}, 'shadowed': Shadowed(a=1),
    'NaN': float('nan'), 'large': 10 ** 300, 'many': [10 ** 300] * 2000, 'half a character': '\ud800',
    'long': 'x' * 10 ** 5, 'escape': '\x1b[2J\n', 'set': {1, 2}, 'size': torch.Size([1]), 'device': torch.device('cpu'),
}


@pytest.mark.parametrize('kind', ODD_VALUES)
def test_odd_arguments_of_a_training_do_no_harm(kind, state_dict, tmp_path):
    names = ('epochs', 'model', 'mean', 'img_size', 'model_kwargs')
    for name in names:
        args = argparse.Namespace(**{'img_size': 8, name: ODD_VALUES[kind]})
        torch.save({'state_dict': state_dict, 'args': args}, tmp_path / 'a.pth')
        try:
            checkpoint = read_checkpoint(tmp_path / 'a.pth')
        except CheckpointError as e:
            message = str(e)
        else:
            message = ''.join(training_details(checkpoint.training_args).values())
        assert message.isprintable()
        assert len(message) < 1500


def test_dictionaries_with_methods_of_their_own(state_dict, tmp_path):
    content = Shadowed(state_dict=Shadowed(state_dict), args=Shadowed(img_size=8))
    torch.save(content, tmp_path / 'a.pth')
    checkpoint = read_checkpoint(tmp_path / 'a.pth')
    assert checkpoint.state_dict.keys() == state_dict.keys()
    assert checkpoint.model_args['img_size'] == (8, 8)


def test_a_namespace_cannot_change_what_runs(tmp_path, refused):
    """Neither its class, nor any attribute of one, by the opcodes that pickles have for it."""
    init = argparse.Namespace.__init__
    for target in (b'cargparse\nNamespace\n', b'cargparse\nNamespace\n)R'):
        for state in (b'}X\x08\0\0\0__init__I01\ns', b'}X\x09\0\0\0__class__ccollections\nOrderedDict\ns'):
            torch.save({}, tmp_path / 'a.pth')
            resaved(tmp_path / 'a.pth', data_pkl=b'\x80\x02' + target + b'N' + state + b'\x86b.')
            refused(tmp_path / 'a.pth')
    assert argparse.Namespace.__init__ is init


@pytest.mark.parametrize('content', [
    b']' * 10 ** 5 + b'a' * (10 ** 5 - 1), b'}(X\4\0\0\0args' + b']' * 10 ** 5 + b'a' * (10 ** 5 - 1) + b'u',
    b'\x8b\xff\xff\xff\x7f', b'\x8e' + b'\xff' * 8, b'r\xff\xff\xff\xff', b'Q', b'0' * 9, b'\x82\1', b''])
def test_odd_pickles(content, refused, tmp_path):
    torch.save({}, tmp_path / 'a.pth')
    resaved(tmp_path / 'a.pth', data_pkl=b'\x80\x02' + content + b'.')
    refused(tmp_path / 'a.pth')


@pytest.mark.parametrize('name', [
    1, b'norm', None, (1, 2), 'x' * 10 ** 6, '\x1b[2J', 'a\nb', '\u202e', '', 'blocks.', 'blocks.0.attn.conv.weight\0'])
def test_odd_names_of_tensors(name, state_dict, refused, tmp_path):
    torch.save({**state_dict, name: torch.ones(1)}, tmp_path / 'a.pth')
    refused(tmp_path / 'a.pth')
    torch.save({'.attn.conv.': torch.ones(1), name: torch.ones(1)}, tmp_path / 'a.pth')
    refused(tmp_path / 'a.pth')


def test_as_many_blocks_as_names(state_dict, refused, tmp_path):
    """Models of thousands of blocks would take minutes to build, only to be refused then."""
    torch.save({**state_dict, **{f'blocks.{i}.x': torch.ones(1) for i in range(300)}}, tmp_path / 'a.pth')
    refused(tmp_path / 'a.pth', 'depth is 300, where a whole number from 1 to 200 was expected')


def header(**entries):
    content = json.dumps(entries).encode()
    return struct.pack('<Q', len(content)) + content


def entry(*offsets, shape=(1,), dtype='F32'):
    return {'dtype': dtype, 'shape': shape, 'data_offsets': offsets}


@pytest.mark.parametrize('content', [
    struct.pack('<Q', 10 ** 9) + b'{}', struct.pack('<Q', 2 ** 64 - 1), header(a=entry(0, 4)),
    header(a=entry(0, 4), b=entry(0, 4)) + bytes(4), header(a=entry(0, 4), b=entry(2, 6)) + bytes(6),
    header(a=entry(4, 0)) + bytes(4), header(a=entry(0, 4, shape=(2 ** 62, 4))) + bytes(4),
    header(a=entry(0, 4, dtype='X')) + bytes(4), header(a=entry(0, 8, dtype='C64')) + bytes(8),
    struct.pack('<Q', 10 ** 5) + b'[' * 10 ** 5, header(a=entry(0, 4), __metadata__={'model_args': 3}) + bytes(4),
])
def test_odd_safetensors(content, refused, tmp_path):
    (tmp_path / 'a.safetensors').write_bytes(content)
    refused(tmp_path / 'a.safetensors')


@pytest.fixture
def folder(state_dict, tmp_path):
    folder = tmp_path / 'model'
    folder.mkdir()
    safetensors.torch.save_file(state_dict, folder / 'model.safetensors')
    return folder


ODD_CONFIGS = {
    'nested': b'[' * 10 ** 5, 'nested in a dictionary': b'{"a":' * 10 ** 5, 'digits': b'{"a": 1' + b'0' * 10 ** 4,
    'list': b'[]', 'null': b'null', 'empty': b'', 'not UTF-8': b'{"a": "\xff\xfe"}', 'half of UTF-16': b'\xff\xfe{',
    'long': b' ' * (2 ** 24 + 1),
    **{f'{name} = {value!r:.20}': json.dumps({name: value}).encode() for name, value in {
        'architecture': ['cmhsa_conv_k3'], 'model_args': [1], 'pretrained_cfg': 'x', 'label_names': 'abc',
        'label_descriptions': [1]}.items()},
    **{f'architecture = {name:.20}': json.dumps({'architecture': name}).encode() for name in ('x' * 10 ** 6, '\ud800')},
    **{f'input_size = {value!r:.20}': json.dumps({'pretrained_cfg': {'input_size': value}}).encode() for value in (
        3, [3], [3, 1e999, 8], [3, [8, 8], 8], {'a': 1, 'b': 2, 'c': 3})},
    'no means': b'{"pretrained_cfg": {"mean": []}}',
    **{f'{name} = {value!r:.20}': json.dumps({'model_args': {name: value}}).encode() for name, value in {
        'img_size': float('nan'), 'patch_size': -1, 'in_chans': 10 ** 30, 'norm_layer': 'batchnorm2d',
        'act_layer': '__import__', 'global_pool': {}, 'num_heads': [[]]}.items()},
}


@pytest.mark.parametrize('kind', ODD_CONFIGS)
def test_odd_configurations(kind, folder, refused):
    (folder / 'config.json').write_bytes(ODD_CONFIGS[kind])
    refused(folder)


@pytest.mark.parametrize('encoding', ['utf-8-sig', 'utf-16'])
def test_configurations_in_other_encodings(encoding, folder, tmp_path):
    told = {'architecture': 'cmhsa_conv_k3', 'model_args': {'img_size': 8, 'patch_size': 4}}
    (folder / 'config.json').write_bytes(json.dumps(told).encode(encoding))
    assert convert_checkpoint(folder, tmp_path / 'out').img_size_source == 'from the checkpoint'


@pytest.mark.parametrize('name', [
    'local-dir:{}', 'hf-hub:nobody/nothing', 'https://example.org/x', '../../x', 'resnet18', 'cmhsa_conv_k3.tag', ''])
def test_names_of_other_models_are_never_made(name, folder, tmp_path):
    """Such a folder is not even opened: no config.json is in it."""
    told = {'architecture': name.format(tmp_path), 'model_args': {'img_size': 8}}
    (folder / 'config.json').write_text(json.dumps(told))
    report = convert_checkpoint(folder, tmp_path / 'out')
    assert report.architecture.startswith('cmhsa_attn')
    with pytest.raises(CheckpointError, match=r'no model that timm knows|of resnet18|does not tell'):
        load_model(folder)


@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='makes pipes by POSIX means')
@pytest.mark.parametrize('make', [
    os.mkfifo, os.mkdir, lambda path: path.symlink_to(path), lambda path: path.symlink_to('/dev/zero'),
    lambda path: path.symlink_to('/dev/null')], ids=['pipe', 'folder', 'loop', 'zero', 'null'])
def test_what_is_not_a_file_is_not_read(make, folder, refused, tmp_path, state_dict):
    """A pipe would be waited for, and a device might never end."""
    paths = folder / 'config.json', tmp_path / 'a.pth', tmp_path / 'a.safetensors'
    for path in paths:
        make(path)
    refused(folder, 'config.json')
    for path in paths:
        if path.parent != folder and not path.is_dir():
            refused(path, 'does not exist or ')
        for read in (read_label_names, read_results):
            with pytest.raises(CheckpointError, match='does not exist or is not a file'):
                read(path)
    make(folder / 'pytorch_model.bin')
    (folder / 'model.safetensors').unlink()
    paths[0].rmdir() if paths[0].is_dir() else paths[0].unlink()
    paths[0].write_text('{}')
    refused(folder, 'is a folder without weights')


@pytest.mark.parametrize('name', ['x' * 300, 'x' * 300 + '.safetensors', 'x/' * 3000])
def test_names_that_no_file_has(name, tmp_path, capsys):
    assert main([name, str(tmp_path / 'out')]) == 2
    assert capsys.readouterr().err.count('\n') == 1
    with pytest.raises(CheckpointError):
        load_model(name)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == 'nt', reason='names files by bytes')
def test_odd_names_of_files(state_dict, tmp_path):
    torch.save(state_dict, tmp_path / 'a.pth')
    (tmp_path / 'a.pth').rename(tmp_path / 'a\n\x1b.pth')
    report = convert_checkpoint(tmp_path / 'a\n\x1b.pth', tmp_path / 'out', img_size=8)
    assert report.source['Checkpoint'] == r'a\n\x1b.pth'
    (tmp_path / 'a\n\x1b.pth').rename(tmp_path / os.fsdecode(b'\xff.pth'))
    with pytest.raises(CheckpointError):  # torch maps no file whose name is no text
        read_checkpoint(tmp_path / os.fsdecode(b'\xff.pth'))


def test_label_names_and_results_that_are_none(tmp_path):
    path = tmp_path / 'a'
    large = b'{"top1": 1' + b'0' * 400 + b'}'
    for content in (b'\xff\xff', b'', b' ' * (2 ** 24 + 1), b'[' * 10 ** 5, b'{"top1": [1]}', large):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            read_results(path)
        if b'top' not in content and b'[' not in content:
            with pytest.raises(CheckpointError):
                read_label_names(path)


@pytest.mark.parametrize(('value', 'expected'), [
    ('a' * 10 ** 6, 110), (list(range(10 ** 5)), 110), (laughs(), 210), ('\x1b\n\u202e\ud800', 40),
    (torch.ones(10 ** 4), 210)])
def test_what_is_printed_of_a_file_is_short_and_in_one_line(value, expected):
    assert shorten(value).isprintable()
    assert len(shorten(value)) <= expected


def test_names_of_classes_and_results_are_shortened(tmp_path):
    with pytest.raises(CheckpointError) as error:
        check_label_names(['y\1' * 10 ** 5], 1)
    assert len(str(error.value)) < 300
    (tmp_path / 'a').write_text(json.dumps({'top1': ['x' * 10 ** 5]}))
    with pytest.raises(CheckpointError) as error:
        read_results(tmp_path / 'a')
    assert len(str(error.value)) < 300


def test_long_shapes_and_arguments_are_shortened(state_dict, folder, refused, tmp_path):
    torch.save({**state_dict, 'head.weight': torch.zeros([1] * 3000)}, tmp_path / 'a.pth')
    refused(tmp_path / 'a.pth', 'head.weight has shape (1, 1')
    told = {'architecture': 'cmhsa_attn', 'model_args': {'num_heads': [1] * 1000, 'img_size': 8}}
    (folder / 'config.json').write_text(json.dumps(told))
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    assert len(str(error.value)) < 1000


def test_every_test_that_the_promises_name_is_there():
    root = Path(__file__).parents[1]
    named = re.findall(r'`(tests/\w+\.py)::(\w+)`', (root / 'SECURITY.md').read_text(encoding='utf-8'))
    assert len(named) > 10
    for file, name in named:
        assert f'\ndef {name}(' in (root / file).read_text(encoding='utf-8'), (file, name)
