"""Compare ways to make oblong images square (--fit of the trainer): python experiments/oblong.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Each of 3,000 images, and of 1,000 others to validate on, is pasted at a random place of an oblong canvas of
another image, blurred. A seed takes about half an hour on one core.
"""
import random
from functools import partial
from pathlib import Path
from typing import Any, Dict, List

import torch
from common.images import photos, written
from common.options import make_parser
from common.report import markdown_table, seeds_note, show, spread
from PIL import Image, ImageFilter

from timm_cmhsa.train import train_two_phases

WIDTHS = {'4:3': 43, '2:1': 64}  # of canvases, pixels
FITS = 'crop', 'squash', 'pad'
SIDE = 32
OPTIONS: Dict[str, Any] = dict(img_size=SIDE, epochs=24, opt='muon', lr=0.05, mixup_prob=0., smoothing=0.2)


def main() -> None:
    parser = make_parser(__doc__, 'oblong', seeds=1)
    parser.add_argument('--data-dir', type=Path, required=True, help='images')
    args = parser.parse_args()
    torch.set_num_threads(1)
    top1: Dict[str, Dict[str, List[float]]] = {shape: {fit: [] for fit in FITS} for shape in WIDTHS}
    for seed in range(args.seeds):
        images = photos(args.output, 3000, seed, args.data_dir, 1000)
        for shape, width in WIDTHS.items():
            canvases = written(args.output / 'images' / f'{width}-seed{seed}', partial(paste, images, width))
            for fit in FITS:
                output = args.output / f'{width}-{fit}-{seed}'
                results = train_two_phases(canvases, output=output, seed=seed, fit=fit, **OPTIONS)
                top1[shape][fit].append(results['top1'])
    rows = [[shape, *(spread(by_fit[fit]) for fit in FITS)] for shape, by_fit in top1.items()]
    show(markdown_table(['width to height', *FITS], rows) + seeds_note(args.seeds), args.output / 'oblong.md')


def paste(images: Path, width: int, root: Path) -> None:
    """Write the training and validation images of a folder on canvases of this width."""
    rng = random.Random(0)
    for split in ('train', 'validation'):
        files = sorted((images / split).glob('*/*.png'))
        for file in files:
            canvas = Image.open(rng.choice(files)).resize((width, SIDE)).filter(ImageFilter.GaussianBlur(4))
            canvas.paste(Image.open(file), (rng.randint(0, width - SIDE), 0))
            path = root / split / file.parent.name / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            canvas.save(path)


if __name__ == '__main__':
    main()
