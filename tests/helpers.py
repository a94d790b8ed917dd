"""Models, images and comparisons that several test files share."""
import subprocess
import sys

import timm
import torch

import timm_cmhsa


def phase1(name='test_cmhsa_conv_k3', seed=0, **kwargs):
    """Return a phase-1 model in eval mode with weights as after some training: no zeros, no ones."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **kwargs).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def images_for(model, count=2, seed=0):
    """Return random images of the model's size and type."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, model.in_chans, *model.patch_embed.img_size, generator=generator)
    return images.to(next(model.parameters()))


def max_error(expected, actual):
    """Return the largest difference, relative to the largest expected value."""
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def assert_converts(model, images=None, tolerance=1e-5, **options):
    """Convert a model, and return its rewrite if that computes the same."""
    converted = timm_cmhsa.convert_model(model, **options)
    error = timm_cmhsa.verify(model, converted, images_for(model) if images is None else images).max_error
    assert error <= tolerance, error
    return converted


def run_python(*args, **kwargs):
    """Run `python ARGS` in a process of its own, and return what it printed and its exit code."""
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True, **kwargs)
