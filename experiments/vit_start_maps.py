"""Draw the attention of a ViT before training, by both starts: python experiments/vit_start_maps.py"""
import argparse
from pathlib import Path

import timm
import torch
from timm.utils import random_seed

import timm_cmhsa
from timm_cmhsa.plots import attention_figure, attention_from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--model', default='vit_tiny_patch16_224', help='(default: %(default)s)')
    parser.add_argument('--output', type=Path, default=Path('output/vit_start_maps.png'), help='(default: %(default)s)')
    args = parser.parse_args()
    random_seed(0)
    model = timm.create_model(args.model)
    images = torch.randn(4, 3, *model.patch_embed.img_size)
    untouched = timm_cmhsa.attention_maps(model, images)
    started = timm_cmhsa.attention_maps(timm_cmhsa.start_as_convolution(model), images)
    names = list(started)
    rows = {f"timm's start, {names[0]}": attention_from(untouched[names[0]])}
    for name in names[::3]:
        rows[f'as a convolution, {name}'] = attention_from(started[name])
    rows[f'{names[0]}, from the border'] = attention_from(started[names[0]], (1., 0.5))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    attention_figure(rows, f'{args.model} before training').savefig(args.output)


if __name__ == '__main__':
    main()
