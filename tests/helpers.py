"""Models, images and comparisons that several test files share."""
import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import traceback
import zlib
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.optim import create_optimizer_v2

import timm_cmhsa
from timm_cmhsa.train.options import add_options


def phase1(name='test_cmhsa_conv_k3', seed=0, **kwargs):
    """Return a phase-1 model in eval mode with weights as after some training: no zeros, no ones."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **kwargs).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def make_hard(model):
    """Point the heads of a phase-2 model at the nearest offsets, and compute them as shifts."""
    for attn in (block.attn for block in model.blocks):
        for head in range(attn.num_heads):
            attn.rel_pos.point_head(head, [(head // 3 % 3 - 1, head % 3 - 1)], 50.)
        for parameter in attn.qkv.parameters():
            parameter[:attn.widths[0]] = 0
    model.set_hard_attn()
    return model


def images_for(model, count=2, seed=0):
    """Return random images of the model's size and type."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, model.in_chans, *model.patch_embed.img_size, generator=generator)
    return images.to(next(model.parameters()))


def write_image(path, seed=0, size=(32, 32), mode='RGB'):
    """Write an image of noise, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.RandomState(seed).randint(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def write_photos(folder, num_train):
    """Write noise as images of two classes: so many of each to train on, and 5 to test on."""
    for name, count in (('train/a', num_train), ('train/b', num_train), ('validation/a', 5), ('validation/b', 5)):
        for i in range(count):
            write_image(folder / name / f'{i}.png', seed=zlib.crc32(f'{name}{i}'.encode()))


def is_picture(path):
    """Return whether something is drawn."""
    with Image.open(path) as image:
        return min(image.size) > 200 and len(image.convert('RGB').getcolors(1 << 24)) > 50


def assert_equal(expected, actual):
    """The same tensors by the same names."""
    torch.testing.assert_close(dict(actual), dict(expected), rtol=0, atol=0)


def max_error(expected, actual):
    """Return the largest difference, relative to the largest expected value."""
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def assert_converts(model, images=None, tolerance=1e-5, **options):
    """Convert a model, and return its rewrite if that computes the same."""
    converted = timm_cmhsa.convert_model(model, **options)
    error = timm_cmhsa.verify(model, converted, images_for(model) if images is None else images).max_error
    assert error <= tolerance, error
    return converted


def command_error(main, arguments, capsys, code=2):
    """Run a command that has to end with an exit code, and return the one line that it prints."""
    try:
        actual = main([str(argument) for argument in arguments])
    except SystemExit as e:  # of argparse
        actual = e.code
    out, error = capsys.readouterr()
    assert (actual, out, error.count('\n')) == (code, '', 1)
    return error


def run(*command, code=0, **kwargs):
    """Run a command in a process of its own, check its exit code, and return what it printed."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, **kwargs)
    assert result.returncode == code, f'{command}\n{result.stdout[-9000:]}\n{result.stderr[-9000:]}'
    return result


def run_python(*args, **kwargs):
    return run(sys.executable, *args, **kwargs)


def train(model, images, targets, steps, optimizer=torch.optim.AdamW, **options):
    """Train all that learns for some steps, and return their losses."""
    optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad], **options)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def decayed(model, **options):
    """Return the names of the parameters that have weight decay in timm's optimizers."""
    optimizer = create_optimizer_v2(model, 'adamw', lr=1., weight_decay=0.1, **options)
    decay = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    return {name for name, parameter in model.named_parameters() if decay[id(parameter)]}


def run_forked(function, hook=None, memory=None):
    """Run a function in a process of its own, with an audit hook, and so many bytes of memory for it.

    Return the exit code: what the function returns (None is 0), 1 if it raises, negative if a signal ends it.
    """
    def child():
        if memory is not None:
            used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + memory,) * 2)
        if hook is not None:
            sys.addaudithook(hook)
        try:
            code = function() or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    process = multiprocessing.get_context('fork').Process(target=child)
    process.start()
    process.join()
    return process.exitcode


def parse(*options):
    """Return the options of a command, in one process."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args(['--device', 'cpu', *map(str, options)])
    vars(args).update(rank=0, world_size=1, distributed=False)
    return args
