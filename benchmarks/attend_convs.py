"""Measure a CNN whose convolutions became attention: python benchmarks/attend_convs.py [--model resnet18]

Prints the parameters of every layer, the operations of the model before and after, the time to make it and to run it on
one image, as attention and with hard heads as shifts, the difference of the logits and the peak memory.
"""
import argparse
import resource
import time

import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from timm_cmhsa import attend_convs
from timm_cmhsa.cnn import attention_summary


def count_operations(model: nn.Module, image: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(image)
    return counter.get_total_flops()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='resnet18', help='timm model with random weights (default: %(default)s)')
    parser.add_argument('--img-size', type=int, default=224, help='pixels of a side (default: %(default)s)')
    args = parser.parse_args()
    torch.manual_seed(0)
    model = timm.create_model(args.model).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # timm starts the last ones of residual branches at zero
            nn.init.uniform_(module.weight, 0.5, 1.)
    image = torch.randn(1, 3, args.img_size, args.img_size)
    operations = [count_operations(model, image)]
    logits, times = model(image), [time.perf_counter()]
    attend_convs(model, '*', image.shape[1:])
    times.append(time.perf_counter())
    error = (model(image) - logits).abs().max() / logits.abs().max()
    times.append(time.perf_counter())
    operations.append(count_operations(model, image))
    print(attention_summary(model))
    print(f'{operations[0] / 1e9:.3g} -> {operations[1] / 1e9:.3g} G operations')
    shifts = timm.utils.reparameterize_model(model)
    shifts(image)
    times.append(time.perf_counter())
    shifts(image)
    print(f'made in {times[1] - times[0]:.1f} s, one image in {times[2] - times[1]:.1f} s, as shifts in '
          f'{time.perf_counter() - times[3]:.1f} s; logits differ by {error:.1e}; peak memory '
          f'{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB')


if __name__ == '__main__':
    main()
