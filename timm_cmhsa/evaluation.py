"""How good a classifier is, and what it gets wrong, by its logits, (N, num_classes), and the classes, (N,)."""
import math
from functools import partial
from typing import Callable, Dict, List, Sequence, Tuple

import torch
from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from PIL import Image
from scipy.stats import binomtest
from sklearn.metrics import ConfusionMatrixDisplay

MAX_CLASSES = 20  # of a confusion matrix, and of a table
NUM_DRAWN, COLUMNS = 24, 6  # mistakes of a picture
THUMBNAIL = 192  # pixels
MAX_NAME = 20  # letters in a picture

text_style = partial(rc_context, {'text.parse_math': False})  # to draw names in
Mistake = Tuple[int, int, int, float]  # index of an image, its class, what it is taken for, and its probability
Figures = Dict[str, Callable[[], Figure]]
Load = Callable[[int, int], Image.Image]  # of an image by its index, with sides of so many pixels or more


def interval(top1: float, number: int) -> str:
    """Return the 95 % interval of an accuracy on so many images, in percent: Wilson's."""
    low, high = binomtest(round(top1 * number / 100), number).proportion_ci(method='wilson')
    return f'{100 * low:.1f} to {100 * high:.1f}'


def class_accuracies(logits: torch.Tensor, targets: torch.Tensor) -> List[Tuple[int, float]]:
    """Return the number of images of every class, and how many of them are right, in percent."""
    right = (logits.argmax(dim=1) == targets).double()
    return [(int((targets == i).sum()), 100 * right[targets == i].mean().nan_to_num().item())
            for i in range(logits.shape[1])]


def find_mistakes(logits: torch.Tensor, targets: torch.Tensor) -> List[Mistake]:
    """Return the images that are taken for another class, the most confident mistake first."""
    probabilities, classes = logits.softmax(dim=1).max(dim=1)
    order = probabilities.argsort(descending=True, stable=True)
    wrong = order[(classes != targets)[order]]
    return list(zip(*(each.tolist() for each in (wrong, targets[wrong], classes[wrong], probabilities[wrong]))))


def error_figures(logits: torch.Tensor, targets: torch.Tensor, class_names: List[str], load: Load) -> Figures:
    """Return what draws the errors, by name of the file, without what would be empty or too large."""
    figures: Figures = {}
    if len(class_names) <= MAX_CLASSES:
        figures['confusion.png'] = partial(draw_confusion, logits, targets, class_names)
    mistakes = find_mistakes(logits, targets)
    if mistakes:
        figures['mistakes.png'] = partial(draw_mistakes, mistakes, load, class_names)
    return figures


def _labels(class_names: Sequence[str]) -> List[str]:
    """Return names for a picture: short, and the number of the class where no font has its letters."""
    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in rcParams['font.family']]
    letters = {chr(code) for font in fonts for code in font.get_charmap()}
    return [f'#{i}' if {*name} - letters else name if len(name) <= MAX_NAME else f'{name[:MAX_NAME - 1]}…'
            for i, name in enumerate(class_names)]


def draw_confusion(logits: torch.Tensor, targets: torch.Tensor, class_names: List[str]) -> Figure:
    """Draw how many images of every class were taken for which."""
    size = 3 + 0.4 * len(class_names)
    figure = Figure((size, size), dpi=120, layout='constrained')
    ConfusionMatrixDisplay.from_predictions(
        targets.numpy(), logits.argmax(dim=1).numpy(), labels=range(len(class_names)),
        display_labels=_labels(class_names), cmap='Blues', colorbar=False, xticks_rotation='vertical',
        ax=figure.subplots())
    return figure


def draw_mistakes(mistakes: Sequence[Mistake], load: Load, class_names: Sequence[str]) -> Figure:
    """Draw the first mistakes, one or more: each image, what it was taken for, how surely, and what it is."""
    names = _labels(class_names)
    rows = math.ceil(min(len(mistakes), NUM_DRAWN) / COLUMNS)
    figure = Figure((1.8 * COLUMNS, 2.2 * rows + 0.5), dpi=120, layout='constrained')
    empty = {'xticks': [], 'yticks': [], 'frame_on': False}
    axes = figure.subplots(rows, COLUMNS, squeeze=False, subplot_kw=empty)
    for axis, (index, target, taken_for, probability) in zip(axes.flat, mistakes):
        image = load(index, THUMBNAIL)
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        axis.imshow(image)
        axis.set_title(f'{names[taken_for]}: {probability:.0%}', fontsize=8)
        axis.set_xlabel(f'is {names[target]}', fontsize=8)
    figure.suptitle('The most confident mistakes: taken for, with its probability, and what it is', fontsize=10)
    return figure
