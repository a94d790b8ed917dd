"""What a training leaves behind: models, tables and pictures."""
import copy
import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, List

import timm
import torch
from matplotlib.figure import Figure
from timm.models import save_for_hf
from torch import nn

from ..errors import one_line
from ..evaluation import MAX_CLASSES, Figures, error_figures, find_mistakes, interval, text_style
from ..files import read_json, replacing, write_csv
from ..hub import save_for_hub
from ..images import data_config, load_image
from ..models import Cmhsa
from ..plots import PlotError, attention_figure, attention_from, mean_attention
from .data import Images
from .trainer import Judged, Point

LOAD = '''```python
import timm
import timm_cmhsa  # its docs/publish.md and docs/attention.md show what to do next

model = {create}
```'''


def save_models(models: Dict[str, Judged], args: Namespace, images: Images) -> None:
    """Write a folder for each model of this package, with a card, and for others as timm does, before a rewrite."""
    training = f'{args.num_images} images, validated on {len(images.splits["validation"])} others'
    for name, judged in models.items():
        (args.output / name).parent.mkdir(exist_ok=True)
        if isinstance(judged.model, Cmhsa) or hasattr(judged.model, 'attended'):
            save_for_hub(
                judged.model, args.output / name, force=True, label_names=images.class_names,
                results={'Top-1': round(judged.top1(), 2)}, details={'Training': training})
        elif name != 'converted':
            _save_for_timm(judged.model, args.output / name, images.class_names)


@torch.inference_mode()
def _save_for_timm(model: Any, folder: Path, label_names: List[str]) -> None:
    """Write a stock model for `timm.create_model('local-dir:FOLDER', pretrained=True)`, if that gives it back."""
    model_args = getattr(model, 'base_args', {})
    try:
        if folder.is_dir() and {path.name for path in folder.iterdir()} <= {'config.json', 'model.safetensors'}:
            shutil.rmtree(folder)  # of a run before
        with replacing(folder, force=False) as new:
            config = {'label_names': label_names, 'pretrained_cfg': data_config(model)}
            if hasattr(getattr(model, 'patch_embed', None), 'img_size'):  # timm 1.0.26 takes that of the name
                model_args = {**model_args, 'img_size': model.patch_embed.img_size}
            save_for_hf(model, str(new), config, model_args, safe_serialization=True)
            loaded = timm.create_model(f'local-dir:{new}', pretrained=True).eval()
            images = torch.randn(2, *data_config(model)['input_size'], generator=torch.Generator().manual_seed(0))
            logits = copy.deepcopy(model).cpu().eval()(images)
            torch.testing.assert_close(loaded(images), logits, rtol=1e-3, atol=1e-3 * logits.abs().max().item())
    except Exception as e:  # timm raises anything, for a model that has another form than its name
        print(f'{folder} is in checkpoints alone, as timm cannot load this model by its name: {one_line(e)}')


def write_report(
        output: Path, results: Dict[str, Any], found: Images, final: Judged, models: Dict[str, nn.Module],
        images: torch.Tensor) -> None:
    """Write results.json, results.md, mistakes.csv and pictures: of curves, of final errors and of attention."""
    (output / 'results.json').write_text(json.dumps(results, indent=2), encoding='utf-8')
    samples, names, predicted = found.splits['validation'], found.class_names, final.predicted['validation']
    mistakes = [(samples[i][0], names[target], names[taken_for], f'{probability:.4f}')
                for i, target, taken_for, probability in find_mistakes(*predicted)]
    write_csv(output / 'mistakes.csv', [('path', 'class', 'taken for', 'probability'), *mistakes])
    draw: Figures = {
        'curves.png': lambda: draw_curves(results['curves']), 'attention.png': lambda: draw_attention(models, images),
        **error_figures(*predicted, names, lambda i, side: load_image(samples[i][0], side=side))}
    pictures = []
    for name, figure in draw.items():
        try:
            with text_style():
                figure().savefig(output / name)
            pictures.append(name)
        except PlotError:  # a model without attention that can be drawn
            continue
        except Exception as e:  # a finished training is worth more than a picture
            print(f'{name} cannot be drawn: {one_line(e)}')
    (output / 'results.md').write_text(markdown(output, results, pictures), encoding='utf-8', errors='replace')


def markdown(output: Path, results: Dict[str, Any], pictures: List[str]) -> str:
    number, (largest, most, _) = results['num_validation'], max(results['classes'], key=lambda each: each[1])
    rows = {'phase 1': results['phase1_top1'], 'converted': results['converted_top1'],
            'phase 2': results['top1'] if 'phase 2' in results['curves'] else None, **results['compare']}
    lines = [
        '# Results', '',
        f'Top-1 accuracy on {number} validation images, %, with its 95 % interval: smaller differences may be luck. '
        f'{most / number:.0%} of them are of the largest class, {largest}. '
        f'{results["num_train"]} training images; {results["options"]["model"]}, '
        f'{results["parameters"] / 1e6:.2f} M parameters at the end.']
    lines += ['', '| | epochs | minutes | top-1 | 95 % |', '|---|---:|---:|---:|---:|']
    for title, top1 in rows.items():
        if top1 is None:
            continue
        last = results['curves'].get(title, [{}])[-1]
        length = f'{last["epoch"]} | {last["seconds"] / 60:.1f}' if last else '- | -'
        lines.append(f'| {title} | {length} | {top1:.2f} | {interval(top1, number)} |')
    if 'test' in results:
        number = results['num_test']
        tested = ', '.join(f'{title} {top1:.2f} ({interval(top1, number)})' for title, top1 in results['test'].items())
        lines += ['', f'Top-1 on {number} test images, %: {tested}.']
    for split, leads in results['lead'].items():
        for name, (lead, low, high) in leads.items():
            lines += ['', f'Lead over {name} on the same {split} images, in points, with its paired 95 % interval: '
                          f'{lead:+.2f} ({low:+.2f} to {high:+.2f}).']
    worst = sorted(enumerate(results['classes']), key=lambda each: each[1][2])[:MAX_CLASSES]
    lines += ['', '| # | class, the worst first | validation images | top-1 |', '|---:|---|---:|---:|']
    lines += [f'| {i} | {name} | {count} | {top1:.1f} |' for i, (name, count, top1) in worst]
    lines += ['', 'All mistakes on the validation images, the most confident first, are in `mistakes.csv`.']
    load, folder = '', output / 'model'
    if folder.is_dir():
        is_attended = 'attend' in read_json(folder / 'config.json')
        load = LOAD.format(create=f"timm_cmhsa.load_model('{folder}')" if is_attended else
                           f"timm.create_model('local-dir:{folder}', pretrained=True).eval()")
    lines += ['', *(f'![{name}]({name})' for name in pictures), '', load, '']
    lines += ['Chosen (all options: `options.json`):', '', *(f'- {line}' for line in results['chosen']), '']
    return '\n'.join(lines)


def paired_interval(right: torch.Tensor, other: torch.Tensor) -> List[float]:
    """Return by how many points one model is more often `right` than another, and the paired 95 % interval.

    The interval is that of Agresti and Min (2005), which holds for few images too. Both arguments have 1 for every
    image that is classified right and 0 for the others, (N,).
    """
    wins, losses = ((each > 0).sum().item() + 0.5 for each in (right - other, other - right))
    number, lead = len(right) + 2, wins - losses
    margin = 1.96 * (wins + losses - lead ** 2 / number) ** 0.5
    low, high = max((lead - margin) / number, -1.), min((lead + margin) / number, 1.)
    return [100 * lead / len(right), 100 * low, 100 * high]


def draw_curves(curves: Dict[str, List[Point]]) -> Figure:
    """Draw training loss and validation accuracy over the training time."""
    figure = Figure((10, 4), dpi=120, layout='constrained')
    for axis, key, label in zip(figure.subplots(1, 2), ('train_loss', 'top1'), ('training loss', 'top-1, %')):
        for title, points in curves.items():
            axis.plot(
                [point['seconds'] / 60 for point in points], [point[key] for point in points], label=title,
                marker='o' if len(points) == 1 else '')
        axis.set(xlabel='training time, minutes', ylabel=label)
        axis.grid(alpha=0.3)
    axis.legend()
    return figure


def draw_attention(models: Dict[str, nn.Module], images: torch.Tensor) -> Figure:
    """Draw where heads of the first and the last layer look from the centre, mean of some images."""
    maps = {title: mean_attention(model, images)[0] for title, model in models.items()}
    layers = list(next(iter(maps.values())))
    rows = {f'{layer}, {title}': attention_from(maps[title][layer])
            for layer in dict.fromkeys((layers[0], layers[-1])) for title in models}
    return attention_figure(rows, f'Attention, mean of {len(images)} validation images')
