"""Classify photos, and evaluate the model if they are in folders of its classes."""
import itertools
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Union

import torch
from timm.utils import accuracy
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from .checkpoint import open_model
from .cli import ANY_SOURCE, Parser, run_command
from .errors import CheckpointError, one_line, printable, text_table
from .files import PathLike, check_destination, replacing, write_csv
from .images import IMAGE_SUFFIXES, class_name, find_images, image_reader, load_image, read_images

_logger = logging.getLogger(__name__)

NUM_SHOWN = 20  # rows of a table on the screen
PICTURES = 'confusion.png', 'mistakes.png'


class Predictions(NamedTuple):
    """What a model takes photos for."""
    files: List[Path]  # without those that cannot be read
    logits: torch.Tensor  # (N, num_classes), float32
    class_names: List[str]
    targets: Optional[torch.Tensor]  # (N,), if folders tell the classes

    def rows(self, top: int = 1) -> Iterator[Sequence[Any]]:
        """Yield a header, then for each file its class, its probability, and those of the next ones up to `top`."""
        probabilities, classes = self.logits.softmax(dim=1).topk(min(top, len(self.class_names)))
        places = ['', *(f' {place}' for place in range(2, classes.shape[1] + 1))]
        yield ['path', *(f'{name}{place}' for place in places for name in ('class', 'probability'))]
        for file, *columns in zip(self.files, classes.tolist(), probabilities.tolist()):
            yield [file, *itertools.chain(*((self.class_names[i], f'{share:.4f}') for i, share in zip(*columns)))]


@torch.inference_mode()
def predict(
        model: Union[nn.Module, PathLike],
        photos: Union[PathLike, Sequence[PathLike]],
        batch_size: int = 64,
        workers: Optional[int] = None,
        device: Optional[str] = None,
        tta: bool = False,
) -> Predictions:
    """Classify photos. Those that cannot be read are left out with a warning.

    Args:
        model: A model of timm, or what `open_model` takes. It is moved to the device, and switched to eval mode.
        photos: A folder, searched through its subfolders, or files.
        batch_size: Images of a batch.
        workers: Processes that read images; by default one for each core and batch, at most 8, and none for one batch.
        device: By default a GPU if there is one.
        tta: Average the logits of each photo and of its mirror image (test-time augmentation), for twice the time.

    Raises:
        CheckpointError: If the model cannot be loaded, or no image can be read.
        HubError: If the model cannot be downloaded.
        ValueError: If an argument is bad, or memory is too small.
    """
    paths = [Path(path) for path in ([photos] if isinstance(photos, (str, Path)) else photos)]
    files: Any = [file for path in paths for file in (find_images(path) if path.is_dir() else [path])]
    if not files:
        raise CheckpointError(f'{" ".join(map(printable, paths))} has no images ({", ".join(IMAGE_SUFFIXES)}).')
    net: Any = model if isinstance(model, nn.Module) else open_model(model)
    if not net.num_classes:
        raise CheckpointError('The model has no classes: it was made with num_classes=0.')
    names = net.pretrained_cfg.get('label_names') or ()
    if len(names) != net.num_classes:  # those of an earlier head
        names = range(net.num_classes)
    logits, reasons, names = [], [], [str(name) for name in names]
    classify = mirrored(net) if tta else net
    workers = min(os.cpu_count() or 1, 8, (len(files) - 1) // max(batch_size, 1)) if workers is None else workers
    batches = DataLoader(files, batch_size, num_workers=workers, collate_fn=partial(read_images, image_reader(net)))
    try:
        like = next(net.eval().to(device or ('cuda' if torch.cuda.is_available() else 'cpu')).parameters())
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            for images, failed in tqdm(batches, 'classifying', unit='batch', leave=False, disable=None):
                if images is not None:
                    logits.append(classify(images.to(like)).float().cpu())
                reasons += failed
    except (AssertionError, RuntimeError) as e:  # no such device, or too little memory
        raise ValueError(f'{one_line(e)} Use another --device, or a smaller --batch-size.') from e
    if all(reasons):
        raise CheckpointError(f'No image can be read. {printable(files[0])}: {reasons[0]}')
    for file, reason in zip(files, reasons):
        if reason:
            _logger.warning('%s cannot be read: %s It is left out.', printable(file), reason)
    files = [file for file, reason in zip(files, reasons) if not reason]
    return Predictions(files, torch.cat(logits), names, _targets(files, paths[0], names))


def mirrored(model: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that averages the logits of images, (B, C, H, W), and of their mirror images."""
    return lambda images: (model(images) + model(images.flip(-1))) / 2


def _targets(files: Sequence[Path], root: Path, names: Sequence[str]) -> Optional[torch.Tensor]:
    """Return the class of every file, if all are in folders of the root that are named like classes."""
    indices = {name: i for i, name in enumerate(names)}
    folders = [file.relative_to(root).parts[0] if root in file.parent.parents else '' for file in files]
    targets = [indices.get(class_name(folder)) for folder in folders]
    if None not in targets:
        return torch.tensor(targets)
    if any(target is not None for target in targets):
        other = printable(files[targets.index(None)])
        _logger.warning('Not evaluated: %s is in no folder of a class, as other images are.', other)
    return None


def _evaluate(predictions: Predictions, targets: torch.Tensor, output: Optional[Path], force: bool) -> None:
    """Print how many predictions are right, and draw the mistakes beside the file of all predictions."""
    from .evaluation import class_accuracies, error_figures, interval, text_style

    files, logits, names, _ = predictions
    top1 = accuracy(logits, targets)[0].item()
    print(f'\ntop-1 {top1:.2f} % of {len(files)} images, 95 % interval {interval(top1, len(files))}\n')
    by_class = enumerate(class_accuracies(logits, targets))
    classes = sorted((share, i, count) for i, (count, share) in by_class if count)
    rows = [(i, names[i], count, f'{share:.1f}') for share, i, count in classes[:NUM_SHOWN]]
    print(text_table([('#', 'class, the worst first', 'images', 'top-1'), *rows]))
    if output is None:
        return
    figures = error_figures(logits, targets, names, lambda i, side: load_image(files[i], side=side))
    for name, draw in figures.items():
        with replacing(output.with_name(name), force) as new, text_style():
            draw().savefig(new)
    for name in {*PICTURES} - figures.keys():
        output.with_name(name).unlink(missing_ok=True)  # of an earlier model


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog='python -m timm_cmhsa.predict', description=__doc__)
    add = parser.add_argument
    add('model', metavar='MODEL', help=ANY_SOURCE)
    add('photos', metavar='PHOTOS', nargs='+', help='a folder, searched through its subfolders, or files')
    add('--output', metavar='FILE.csv', type=Path,
        help='write all predictions, and beside them, if evaluated, confusion.png and mistakes.png')
    add('--force', action='store_true', help='replace these files')
    add('--top', metavar='N', type=int, default=1, help='classes of a photo in FILE.csv (default: %(default)s)')
    add('--batch-size', metavar='N', type=int, default=64, help='images of a batch (default: %(default)s)')
    add('--workers', metavar='N', type=int, help='processes that read images')
    add('--tta', action='store_true', help='average each photo and its mirror image, for twice the time')
    add('--device', metavar='D', help='such as cpu (default: a GPU if there is one)')
    args = parser.parse_args(argv)
    if args.top < 1:
        parser.error(f'--top {args.top} must be at least 1')
    if args.output is not None and args.output.suffix != '.csv':
        parser.error(f'--output {args.output} must end in .csv')

    def run() -> None:
        root = Path(args.photos[0])
        in_folders = root.is_dir() and any(each.is_dir() for each in root.iterdir())
        for name in (args.output.name, *PICTURES * in_folders) if args.output else ():
            check_destination(args.output.with_name(name), args.force)
        predictions = predict(args.model, args.photos, args.batch_size, args.workers, args.device, args.tta)
        if args.output:  # first, as what follows may need an extra
            with replacing(args.output, args.force) as new:
                write_csv(new, predictions.rows(args.top))
        print(text_table(itertools.islice(predictions.rows(), NUM_SHOWN + 1)))
        if len(predictions.files) > NUM_SHOWN:
            print(f'... and {len(predictions.files) - NUM_SHOWN} more: {args.output or "--output FILE.csv"}')
        if predictions.targets is not None:
            _evaluate(predictions, predictions.targets, args.output, args.force)

    return run_command(parser.prog, run)


if __name__ == '__main__':
    sys.exit(main())
