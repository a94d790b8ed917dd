"""Files mutated at random: each is read or refused in one line, in little time and memory, and nothing else happens."""
import argparse
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from timm_cmhsa import CheckpointError, VerificationError, convert_checkpoint
from timm_cmhsa.plots import load_model
from timm_cmhsa.untrusted import ARGS, CFG

SMALL = dict(img_size=8, patch_size=4, depth=1, num_classes=3, mlp_ratio=1.)
MEMORY, SECONDS = 2 ** 31, 30  # bytes that torch may reserve beyond those of its imports; of one file, of the processor


def originals(state_dict, folder):
    """Write one file of every kind."""
    folder.mkdir()
    args = argparse.Namespace(model_kwargs=SMALL, lr=0.1)
    content = {'state_dict': state_dict, 'arch': 'test_cmhsa_conv_k3', 'args': args}
    torch.save(content, folder / 'zip.pth')
    torch.save(content, folder / 'legacy.pth', _use_new_zipfile_serialization=False)
    told = {'architecture': 'test_cmhsa_conv_k3', 'model_args': json.dumps(SMALL)}
    safetensors.torch.save_file(state_dict, folder / 'a.safetensors', told)
    (folder / 'model').mkdir()
    safetensors.torch.save_file(state_dict, folder / 'model' / 'model.safetensors')
    told = {'architecture': 'test_cmhsa_conv_k3', 'model_args': SMALL, 'pretrained_cfg': {'mean': [0.5], 'crop_pct': 1}}
    (folder / 'model' / 'config.json').write_text(json.dumps(told))


def mutated_bytes(content, rng):
    """Change, remove, repeat or add some bytes, mostly near the start or the end, where files tell what is in them."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 10))):
        near = rng.randrange(min(len(content), 3000))
        place = rng.choice((rng.randrange(len(content)), near, len(content) - 1 - near))
        length = rng.choice((1, 1, 4, 8, 100))
        old = content[place:place + length]
        new = rng.choice((rng.randbytes(length), b'\xff' * length, bytes(length), old * 2, b''))
        content[place:place + length] = new
        if not content:
            break
    return bytes(content[:rng.randrange(len(content))] if content and rng.random() < 0.1 else content)


def odd_value(rng, depth=3):
    if depth and rng.random() < 0.3:
        values = [odd_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        return rng.choice((values, dict(zip('abc', values)), values * 1000))
    return rng.choice((
        None, True, False, 0, -1, 1, 3, 4, 8, 16, 10 ** 9, -10 ** 30, 10 ** 300, 0.5, -0.0, 1e308, math.inf, math.nan,
        '', 'avg', 'gelu', 'layernorm', 'batchnorm2d', 'os.system', 'cmhsa_attn', 'local-dir:.', '\ud800', '\x1b[2J',
        'x' * 5000))


def mutated_values(rng):
    """Return a configuration in which some values are odd."""
    told = {'architecture': 'test_cmhsa_conv_k3', 'model_args': dict(SMALL), 'pretrained_cfg': {}}
    names = [
        (told['model_args'], (*ARGS, 'pretrained', 'pretrained_cfg', 'checkpoint_path')),
        (told['pretrained_cfg'], (*CFG, 'input_size', 'url', 'file')), (told, (*told, *CFG))]
    for _ in range(rng.choice((1, 1, 2, 5))):
        place, known = rng.choice(names)
        place[rng.choice(known)] = odd_value(rng)
    return told


def mutate(folder, state_dict, rng):
    """Return a mutated file or folder, written anew."""
    name = rng.choice(('zip.pth', 'legacy.pth', 'a.safetensors', 'model', 'values', 'values', 'tensors'))
    original, path = folder / 'originals' / name, folder / 'mutated' / name
    if name == 'values':
        told, kind = mutated_values(rng), rng.choice(('pth', 'json', 'metadata'))
        if kind == 'pth':
            args = {'model_kwargs': told['model_args'], **{key: odd_value(rng) for key in rng.sample(
                ('img_size', 'in_chans', 'gp', 'mean', 'lr', 'epochs', 'model'), 2)}}
            path = path.with_suffix('.pth')
            torch.save({'state_dict': state_dict, 'arch': told['architecture'], 'args': args}, path)
            return path
        if kind == 'metadata':
            path = path.with_suffix('.safetensors')
            told = {'architecture': str(told['architecture']).encode('ascii', 'replace').decode(),
                    'model_args': json.dumps(told['model_args'])}
            safetensors.torch.save_file(state_dict, path, told)
            return path
    if name == 'tensors':
        key = rng.choice(list(state_dict))
        shape = [rng.choice((0, 1, 2, 3, 48, 1000)) for _ in range(rng.randrange(5))]
        tensor = torch.full(shape if math.prod(shape) < 10 ** 6 else [1], rng.choice((0., 1e38, math.nan)))
        dtype = rng.choice((torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64, torch.bfloat16))
        expanded = tensor.expand(10 ** 6, *shape)
        changed = rng.choice((tensor, tensor.to(dtype), state_dict[key].to(dtype), expanded, None))
        torch.save({**state_dict, rng.choice((key, key, 'x', 3, b'')): changed}, path.with_suffix('.pth'))
        return path.with_suffix('.pth')
    if name in ('model', 'values'):
        path.mkdir()
        source = folder / 'originals' / 'model'
        (path / 'model.safetensors').write_bytes((source / 'model.safetensors').read_bytes())
        content = (source / 'config.json').read_bytes()
        content = mutated_bytes(content, rng) if name == 'model' else json.dumps(told).encode()
        (path / 'config.json').write_bytes(content)
        return path
    path.write_bytes(mutated_bytes(original.read_bytes(), rng))
    return path


def fuzz(folder, seed, count):
    """Read mutated files; raise what none may raise."""
    import resource
    import shutil
    import signal
    torch.manual_seed(0)
    state_dict = timm.create_model('test_cmhsa_conv_k3', **SMALL).state_dict()
    originals(state_dict, folder / 'originals')
    convert_checkpoint(folder / 'originals' / 'legacy.pth', folder / 'out')  # imports all that is needed
    used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    taken = 0
    for case in range(count):
        shutil.rmtree(folder / 'out', ignore_errors=True)
        shutil.rmtree(folder / 'mutated', ignore_errors=True)
        (folder / 'mutated').mkdir()
        path = mutate(folder, state_dict, random.Random(f'{seed} {case}'))
        print(f'case {case} of {seed}: {path}', flush=True)
        before = sorted(folder.rglob('*'))
        for read in (load_model, lambda path: convert_checkpoint(path, folder / 'out')):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process
            try:
                read(path)
            except (CheckpointError, VerificationError) as e:
                message = str(e)
            else:
                taken += 1
                continue
            assert message.isprintable() or 'above the tolerance' in message, message
            assert sorted(folder.rglob('*')) == before, message
        signal.setitimer(signal.ITIMER_PROF, 0)
    print(f'{taken} of {count} were good')
    assert taken


@pytest.mark.skipif(sys.platform != 'linux', reason='limits the memory by means of Linux')
@pytest.mark.slow
@pytest.mark.parametrize(('seed', 'count'), [(seed, 200) for seed in range(3)])
def test_mutated_files_are_read_or_refused(seed, count, tmp_path):
    result = subprocess.run(
        [sys.executable, '-W', 'ignore', __file__, str(tmp_path), str(seed), str(count)],
        capture_output=True, text=True)
    assert result.returncode == 0, f'{result.stdout[-300:]}\n{result.returncode}\n{result.stderr[-3000:]}'


if __name__ == '__main__':
    fuzz(Path(sys.argv[1]), *map(int, sys.argv[2:]))
