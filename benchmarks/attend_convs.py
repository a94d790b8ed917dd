"""What a CNN costs when its convolutions become attention: python benchmarks/attend_convs.py [--model resnet18]

Time to make it, time for one image, the difference of the logits, peak memory, and every layer's cost.
"""
import argparse
import resource
import time

import timm
import torch
from torch import nn

from timm_cmhsa import attend_convs, attention_summary


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='resnet18', help='of timm, with random weights (default: %(default)s)')
    parser.add_argument('--img-size', type=int, default=224, help='pixels of a side (default: %(default)s)')
    parser.add_argument('--names', nargs='+', default=['*'], help='which convolutions (default: all)')
    args = parser.parse_args()
    torch.manual_seed(0)
    model = timm.create_model(args.model).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # timm starts the last ones of residual branches at zero
            nn.init.uniform_(module.weight, 0.5, 1.)
    image = torch.randn(1, 3, args.img_size, args.img_size)
    logits, params = model(image), num_params(model)
    start = time.perf_counter()
    attend_convs(model, args.names, image.shape[1:])
    made = time.perf_counter()
    error = (model(image) - logits).abs().max() / logits.abs().max()
    print(attention_summary(model))
    print(f'parameters {params:.1f} M -> {num_params(model):.1f} M; made in {made - start:.1f} s, one image in '
          f'{time.perf_counter() - made:.1f} s; logits differ by {error:.1e}; peak memory '
          f'{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB')


def num_params(model: nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


if __name__ == '__main__':
    main()
