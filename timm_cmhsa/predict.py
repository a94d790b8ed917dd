"""Classify photos: python -m timm_cmhsa.predict MODEL PHOTOS

Photos in folders that are named like classes of the model are evaluated, too.
"""
import itertools
import logging
import os
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from timm.utils import accuracy
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from .checkpoint import open_model
from .cli import SOURCE, Parser, run_command
from .errors import CheckpointError, one_line
from .files import PathLike, check_destination, replacing, write_csv
from .images import class_name, find_images, image_reader, load_image

_logger = logging.getLogger(__name__)

BATCH_SIZE = 64
NUM_SHOWN = 20  # rows of a table on the screen
PICTURES = 'confusion.png', 'mistakes.png'


class Predictions(NamedTuple):
    """What a model takes photos for."""
    files: List[Path]  # without those that cannot be read
    logits: torch.Tensor  # (N, num_classes), float32
    class_names: List[str]
    targets: Optional[torch.Tensor] = None  # (N,), if folders tell the classes

    def rows(self, top: int = 1) -> Iterator[Sequence[Any]]:
        """Yield a header, then for each file its class, its probability, and those of the next ones up to `top`."""
        probabilities, classes = self.logits.softmax(dim=1).topk(min(top, len(self.class_names)))
        places = ['', *(f' {place}' for place in range(2, classes.shape[1] + 1))]
        yield ['path', *(f'{name}{place}' for place in places for name in ('class', 'probability'))]
        for file, *columns in zip(self.files, classes.tolist(), probabilities.tolist()):
            yield [file, *itertools.chain(*((self.class_names[i], f'{share:.4f}') for i, share in zip(*columns)))]


class Photos(Dataset):
    """Images, each read when it is asked for; the reason, where it cannot be read."""

    def __init__(self, files: Sequence[Path], read: Callable[[Path], torch.Tensor]) -> None:
        self.files, self.read = files, read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Union[torch.Tensor, str]:
        try:
            return self.read(self.files[index])
        except Exception as e:  # decoders raise anything
            return one_line(e)


def _collate(items: Sequence[Union[torch.Tensor, str]]) -> Tuple[Optional[torch.Tensor], List[str]]:
    """Return the images that were read, and for every item why it was not, or ''."""
    images = [item for item in items if isinstance(item, torch.Tensor)]
    return torch.stack(images) if images else None, [item if isinstance(item, str) else '' for item in items]


@torch.inference_mode()
def predict(
        model: Union[nn.Module, PathLike],
        photos: Union[PathLike, Sequence[PathLike]],
        batch_size: int = BATCH_SIZE,
        workers: Optional[int] = None,
        device: Optional[str] = None,
) -> Predictions:
    """Classify photos. Images that cannot be read are left out with a warning.

    Args:
        model: A model of timm, or what `open_model` takes. It is moved to the device, and switched to eval mode.
        photos: A folder, searched through its subfolders, or files.
        batch_size: Images of a batch.
        workers: Processes that read images; by default as many as the CPU has cores, at most 8, and none for one batch.
        device: By default a GPU if there is one.

    Raises:
        CheckpointError: If there are no images, none can be read, or the model cannot be loaded.
        HubError: If the model cannot be downloaded.
        ValueError: If an argument is bad, or memory too small.
    """
    photos = [photos] if isinstance(photos, (str, Path)) else photos
    for name, value, least in (('--batch-size', batch_size, 1), ('--workers', workers or 0, 0)):
        if value < least:
            raise ValueError(f'{name} {value} must be at least {least}.')
    files = find_photos(photos)
    model = model if isinstance(model, nn.Module) else open_model(model)
    names = class_names(model)
    if workers is None:
        workers = min(os.cpu_count() or 1, 8, (len(files) - 1) // batch_size)
    batches = DataLoader(Photos(files, image_reader(model)), batch_size, num_workers=workers, collate_fn=_collate)
    logits: List[torch.Tensor] = []
    reasons: List[str] = []
    try:
        like = next(model.eval().to(device or ('cuda' if torch.cuda.is_available() else 'cpu')).parameters())
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), tqdm(
                desc='classifying', total=len(files), unit='image', leave=False, disable=None) as progress:
            for images, failed in batches:
                if images is not None:
                    logits.append(model(images.to(like)).float().cpu())
                reasons += failed
                progress.update(len(failed))
    except (AssertionError, RuntimeError) as e:  # no such device, or too little memory
        raise ValueError(f'{one_line(e)} Use another --device, or a smaller --batch-size.') from e
    for file, reason in zip(files, reasons):
        if reason:
            _logger.warning('%s cannot be read: %s It is left out.', printable(file), reason)
    if not logits:
        raise CheckpointError(f'None of {len(files)} images can be read. {printable(files[0])}: {reasons[0]}')
    files = [file for file, reason in zip(files, reasons) if not reason]
    return Predictions(files, torch.cat(logits), names, _targets(files, Path(photos[0]), names))


def find_photos(photos: Sequence[PathLike]) -> List[Path]:
    """Return files as they are, and the image files of folders."""
    files: List[Path] = []
    for path in map(Path, photos):
        if not path.exists():
            raise CheckpointError(f'{printable(path)} does not exist.')
        found = find_images(path) if path.is_dir() else [path]
        if not found:
            raise CheckpointError(f'{printable(path)} has no images ({", ".join(IMG_EXTENSIONS)}).')
        files += found
    return files


def class_names(model: Any) -> List[str]:
    """Return the names of a model's classes, or else their numbers."""
    if not model.num_classes:
        raise CheckpointError('The model has no classes: it was made with num_classes=0.')
    names = model.pretrained_cfg.get('label_names') or ()
    # those of an earlier head do not fit
    return [str(name) for name in (names if len(names) == model.num_classes else range(model.num_classes))]


def _targets(files: Sequence[Path], root: Path, names: Sequence[str]) -> Optional[torch.Tensor]:
    """Return the class of every file, if all are in folders of the root that are named like classes."""
    indices = {name: i for i, name in enumerate(names)}
    folders = [root / file.relative_to(root).parts[0] if root in file.parent.parents else None for file in files]
    targets = [indices.get(class_name(folder)) if folder else None for folder in folders]
    if None not in targets:
        return torch.tensor(targets)
    if any(target is not None for target in targets):
        other = printable(files[targets.index(None)])
        _logger.warning('Not evaluated: %s is in no folder of a class, as other images are.', other)
    return None


def printable(text: Any) -> str:
    """Return a name in one line, as names of files may hold anything."""
    return ''.join(char if char.isprintable() else '?' for char in str(text))


def show(predictions: Predictions, output: Optional[Path]) -> None:
    """Print the first predictions, and how many are right if folders tell the classes."""
    _print_table(itertools.islice(predictions.rows(), NUM_SHOWN + 1))
    number = len(predictions.files)
    if number > NUM_SHOWN:
        print(f'... and {number - NUM_SHOWN} more: {output or "--output FILE.csv"}')
    if predictions.targets is not None:
        from .evaluation import interval

        top1 = accuracy(predictions.logits, predictions.targets)[0].item()
        print(f'\ntop-1 {top1:.2f} % of {number} images, 95 % interval {interval(top1, number)}\n')
        right = (predictions.logits.argmax(dim=1) == predictions.targets).float()
        by_class = [(name, right[predictions.targets == i]) for i, name in enumerate(predictions.class_names)]
        rows = sorted((100 * each.mean().item(), name, len(each)) for name, each in by_class if len(each))
        _print_table([('class, the worst first', 'images', 'top-1'), *(
            (name, count, f'{top1:.1f}') for top1, name, count in rows[:NUM_SHOWN])])


def _print_table(rows: Iterable[Sequence[Any]]) -> None:
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print('  '.join(map(str.ljust, row, widths)).rstrip())


def write(predictions: Predictions, output: Path, top: int, force: bool) -> None:
    """Write all predictions, and beside them pictures of the mistakes if folders tell the classes."""
    files, logits, names, targets = predictions
    with replacing(output, force) as new:
        write_csv(new, predictions.rows(top))
    if targets is not None:
        from matplotlib import rc_context

        from .evaluation import error_figures

        figures = error_figures(logits, targets, names, lambda i, side: load_image(files[i], side=side))
        for name, draw in figures.items():
            with replacing(output.with_name(name), force) as new, rc_context({'text.parse_math': False}):
                draw().savefig(new)  # names are text


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog='python -m timm_cmhsa.predict', description=__doc__)
    add = parser.add_argument
    add('model', metavar='MODEL', help=f'{SOURCE}, or a name of timm, pretrained')
    add('photos', metavar='PHOTOS', nargs='+', help='a folder, searched through its subfolders, or files')
    add('--output', metavar='FILE.csv', type=Path,
        help='write all predictions, and beside them, if evaluated, confusion.png and mistakes.png')
    add('--force', action='store_true', help='replace these files')
    add('--top', metavar='N', type=int, default=1, help='classes of a photo in FILE.csv (default: %(default)s)')
    add('--batch-size', metavar='N', type=int, default=BATCH_SIZE, help='images of a batch (default: %(default)s)')
    add('--workers', metavar='N', type=int, help='processes that read images')
    add('--device', metavar='D', help='such as cpu (default: a GPU if there is one)')
    args = parser.parse_args(argv)
    if args.top < 1:
        parser.error(f'--top {args.top} must be at least 1')
    if args.output is not None and args.output.suffix != '.csv':
        parser.error(f'--output {args.output} must end in .csv')

    def run() -> None:
        for name in (args.output.name, *PICTURES) if args.output else ():
            check_destination(args.output.with_name(name), args.force)
        predictions = predict(args.model, args.photos, args.batch_size, args.workers, args.device)
        show(predictions, args.output)
        if args.output:
            write(predictions, args.output, args.top, args.force)

    return run_command(parser.prog, run)


if __name__ == '__main__':
    sys.exit(main())
