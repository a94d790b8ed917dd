"""Does phase 2 learn to attend, on natural images? python experiments/natural_images.py --data-dir DIR

DIR has the folders train/CLASS and validation/CLASS with images of 32 x 32 pixels, or is where torchvision keeps
CIFAR-10. Small models are trained on 3,000 images (300 a class), augmented by crops, flips, Mixup and CutMix, and
tested on all of validation/. Every row has its own best learning rate of a few, by 1,000 other training images.
Training is in bfloat16 (AMP) where the processor or GPU has it, evaluation in float32. Queries and keys are as wide as
values, as in the paper.

A run takes 10 to 60 minutes on one core, all of them at most 35 hours. The output folder gets the table and the picture
of all results, and each run's folder a picture of its attention before and after phase 2. `--results
benchmarks/natural_images.jsonl` has those of docs/results.md, which an earlier trainer made (seconds are those of the
processor, images were shifted with the mean colour): give another file for new runs.
"""
import math
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Callable, Dict, List, Optional, Tuple

from common.options import make_run_parser
from common.report import half_interval, make_figure, markdown_table, plot_mean_and_range, show, spread, top1
from common.runs import LOOKS, Result, Results, Run, read_results, replicate, run_all
from torch import nn

import timm_cmhsa
from timm_cmhsa.rel_pos import BIAS_SCALE, PaddedRelPosTable

IMG_SIZE = 32  # pixels
PHASE1, CNN, SOFT = 'phase 1', 'ResNet-18', 'two phases, soft heads'
AS_MANY_STEPS, AS_MUCH_TIME = (f'{PHASE1} alone, {long}' for long in ('as many steps', 'as much time'))
DRAWN = (  # those whose curves are drawn
    PHASE1, AS_MUCH_TIME, 'two phases, hard heads', SOFT, 'attention alone', 'ViT', 'ConViT', 'ConvNeXt', CNN)


def keep(model: nn.Module) -> nn.Module:
    """Return the model as it is: what the second schedule does alone."""
    return model


def soft(model: Any, is_thin: bool = False, scale: float = BIAS_SCALE, **options: Any) -> Any:
    """Rewrite a model with soft heads, whose biases learn `scale` times as fast as weights."""
    width = model.embed_dim // 2 if is_thin else model.embed_dim
    model = timm_cmhsa.convert_model(model, head_dim=width, qk_dim=width, **{'peak': 0.75, **options})
    for module in model.modules():
        if isinstance(module, PaddedRelPosTable):  # change how fast biases learn, and not what they are
            module.relative_position_bias_table.data *= module.bias_scale / scale
            module.bias_scale.fill_(scale)
    return model


def hard(model: Any, is_thin: bool = False) -> nn.Module:
    """Rewrite a model with hard heads, which are trained as shifts: the same, for less."""
    model = soft(model, is_thin, architecture='cmhsa_attn', peak=None)
    model.set_hard_attn()
    return model


# with hard heads, and one more head, which attends from a random start
hard_and_spare = partial(soft, architecture='cmhsa_attn', num_heads=10, rel_pos='padded_table', peak=None)


def attend_stages(model: Any, peak: Optional[float] = None) -> nn.Module:
    """Rewrite the last two stages of a ResNet."""
    timm_cmhsa.attend_convs(model, ['layer3.*', 'layer4.*'], (3, IMG_SIZE, IMG_SIZE), peak=peak)
    model.no_weight_decay = lambda: {'*.rel_pos.*'}  # timm's optimizers ask for it
    return model


def run(title: str, epochs: int, lr: float, model: str = '', after: Optional[Run] = None,
        rewrite: Optional[Callable[[Any], nn.Module]] = None, **model_kwargs: Any) -> Run:
    own = dict(model=model, model_kwargs=model_kwargs) if model else {}
    return Run(title, 3000, dict(img_size=IMG_SIZE, batch_size=100, epochs=epochs, lr=lr, **own), after, rewrite)


SHAPE: Dict[str, Any] = dict(patch_size=4, depth=4)  # 8 x 8 tokens
conv: Callable[..., Run] = partial(run, model='cmhsa_conv_k5', hidden_chans=6, **SHAPE)  # of width 96
attention: Callable[..., Run] = partial(run, model='cmhsa_attn', hidden_chans=6, qk_dim=96, lr=5e-4, **SHAPE)
vit: Callable[..., Run] = partial(
    run, model='vit_tiny_patch16_224', embed_dim=192, num_heads=3, class_token=False, global_pool='avg', lr=5e-4,
    **SHAPE)
convit: Callable[..., Run] = partial(
    run, model='convit_tiny', embed_dim=48, num_heads=4, local_up_to_layer=3, lr=1e-3, **SHAPE)
PHASE1_RUN = conv(PHASE1, epochs=160, lr=1e-3)
CNN_RUN = run(CNN, 99, 2e-3, 'resnet18_cifar', channels=(24, 48, 96, 192))
phase2 = partial(run, epochs=40, lr=2e-3, after=PHASE1_RUN)
# Where nothing else is said, epochs are those that take as long as two phases with soft heads: an epoch of soft heads
# takes 3.4 times that of phase 1, of attention 3.1, of ViT 3.4, of ConViT 3.8, of ConvNeXt 0.75, of ResNet-18 3.
ROWS = {row.title: row for row in (
    PHASE1_RUN,
    conv(AS_MANY_STEPS, epochs=200, lr=1e-3),
    conv(AS_MUCH_TIME, epochs=296, lr=2e-3),
    phase2('two phases, not rewritten', rewrite=keep),
    phase2('two phases, hard heads', rewrite=hard),
    phase2(SOFT, rewrite=soft),
    phase2('two phases, thin hard heads', rewrite=partial(hard, is_thin=True)),
    phase2('two phases, thin soft heads', rewrite=partial(soft, is_thin=True)),
    phase2(f'{SOFT}, bias scale 10', rewrite=partial(soft, scale=10.)),
    phase2(f'{SOFT}, bias scale 100', rewrite=partial(soft, scale=100.)),
    phase2(f'{SOFT}, peak 0.5, bias scale 10', rewrite=partial(soft, peak=0.5, scale=10.)),
    phase2('two phases, hard heads and a spare one, bias scale 10', rewrite=partial(hard_and_spare, scale=10.)),
    attention('attention alone', epochs=95),
    attention('attention alone, 4 times as long', epochs=382),
    vit('ViT', epochs=87),
    vit('ViT, 4 times as long', epochs=348),
    convit('ConViT', epochs=78),
    convit('ConViT, 4 times as long', epochs=312),
    run('ConvNeXt', 395, 1e-3, 'convnext_atto', patch_size=2, dims=(32, 64, 128, 256), depths=(1, 1, 2, 1)),
    CNN_RUN,
    run(f'{CNN}, trained on', 20, 1e-3, after=CNN_RUN, rewrite=keep),
    run(f'{CNN}, last two stages with hard heads', 20, 2e-3, after=CNN_RUN, rewrite=attend_stages),
    run(f'{CNN}, last two stages with soft heads', 20, 2e-3, after=CNN_RUN, rewrite=partial(attend_stages, peak=0.75)),
)}


def main() -> None:
    args = make_run_parser(__doc__, 'natural_images', seeds=3, photos=True).parse_args()
    run_all(replicate(ROWS, args), args)
    args.rows, results = ['*'], read_results(args.results)
    best = done({title: run for title, (run, *_) in replicate(ROWS, args).items()}, results)
    devices = '; '.join(f'{phase1_epoch(device, results):.2g} s on {device}'
                        for device in sorted({result['device'] for result in results.values()}))
    show(f"""{accuracies(best, results)}
Top-1 on the test images in %, mean ± standard deviation over the seeds; the mean gain over phase 1 alone with as many
steps, and with as much time, from the seeds that both have, from three on with its 95 % interval over seeds (Student's
t, paired); the loss of the last epoch, which Mixup makes noisy; the training time with that of the first phase, in
epochs of phase 1 on the same machine ({devices}).

{looks(best)}
Over all heads and layers, before and after training: the weight on one offset, the distance of where a head looks from
the query (patches), the entropy of the weights (nats), and how much the bias moved that moved most.
""", args.output / 'natural_images.md')
    draw_curves(best, results, args.output / 'natural_images.png')


def done(rows: Dict[str, Run], results: Results) -> Dict[str, List[Result]]:
    """Return the results of every row, all seeds that there are."""
    found = {title: [result for key, result in results.items() if key.rsplit(' ', 1)[0] == row.key.rsplit(' ', 1)[0]]
             for title, row in rows.items()}
    return {title: sorted(seeds, key=lambda result: result['seed']) for title, seeds in found.items() if seeds}


def accuracies(best: Dict[str, List[Result]], results: Results) -> str:
    head = ['', 'epochs', 'seeds', 'parameters, M', 'learning rate', 'start', 'top-1', 'as many steps', 'as much time',
            'training loss', 'time']
    cells = []
    for title, seeds in best.items():
        epochs = seeds[0]['run'].split(' | ')[1].removesuffix(' epochs')
        start = f'{mean(top1(seeds, "before")):.1f}' if seeds[0]['after'] else '-'
        cells.append([
            title, epochs, str(len(seeds)), f"{mean(result['params'] for result in seeds):.2f}",
            f'{seeds[0]["lr"]:g}', start, spread(top1(seeds)),
            *(gain(seeds, best.get(alone, [])) for alone in (AS_MANY_STEPS, AS_MUCH_TIME)),
            f"{mean(result['train_loss'] for result in seeds):.3f}",
            f'{mean(time_of(result, results) for result in seeds):.0f}'])
    return markdown_table(head, cells)


def gain(seeds: List[Result], baseline: List[Result]) -> str:
    """Return the mean gain in top-1 over the same seeds of another row, from three seeds on with its 95 % interval."""
    others = {result['seed']: result['test']['top1'] for result in baseline}
    gains = [result['test']['top1'] - others[result['seed']] for result in seeds if result['seed'] in others]
    if not gains or seeds is baseline:
        return '-'
    if len(gains) < 3:
        return f'{mean(gains):+.1f}'
    half = half_interval(gains)
    return f'{mean(gains):+.1f} ({mean(gains) - half:+.1f} to {mean(gains) + half:+.1f})'


def looks(best: Dict[str, List[Result]]) -> str:
    cells = [
        [title, *(' -> '.join(f'{mean(result["looks"][when][name] for result in seeds):.2f}'
                              for when in ('before', 'after')) for name in LOOKS),
         f"{mean(result['bias_moved'] for result in seeds):.2f}"]
        for title, seeds in best.items() if seeds[0]['bias_moved'] is not None]
    return markdown_table(['', 'weight on one offset', 'distance', 'entropy', 'bias moved by'], cells)


def time_of(result: Result, results: Results) -> float:
    """Return the time of a training and of the one before it, in epochs of phase 1 on the same machine."""
    before = time_of(results[result['after']], results) if result['after'] else 0.
    return before + result['seconds'] / phase1_epoch(result['device'], results)


def phase1_epoch(device: str, results: Results) -> float:
    """Return the mean seconds of an epoch of phase 1 on a device: machines differ, and are compared by it."""
    seconds = [result['seconds'] / result['epochs'] for result in results.values()
               if result['device'] == device and result['title'] in (PHASE1, AS_MANY_STEPS, AS_MUCH_TIME)]
    return mean(seconds) if seconds else math.nan


def draw_curves(best: Dict[str, List[Result]], results: Results, path: Path) -> None:
    """Draw training loss and held-out accuracy over the training time. Ablations are left to the table."""
    figure, axes = make_figure((12, 4.5), 2)
    labels = {'train_loss': 'training loss', 'top1': 'top-1 on held-out images, %'}
    for axis, (name, label) in zip(axes, labels.items()):
        for title in (title for title in DRAWN if title in best):
            curves = [curve(result, results, name) for result in best[title]]
            times = [mean(time for time, _ in points) for points in zip(*curves)]
            plot_mean_and_range(axis, times, [[value for _, value in points] for points in curves], label=title)
        axis.set(xlabel='training time, epochs of phase 1', ylabel=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside right upper', fontsize=7, frameon=False)
    figure.savefig(path)


def curve(result: Result, results: Results, name: str) -> List[Tuple[float, float]]:
    """Return (time, measure) of a training, which begins where the first phase ends, if there was one."""
    points = curve(results[result['after']], results, name)[-1:] if result['after'] else []
    begin, end = points[-1][0] if points else 0., time_of(result, results)
    epochs = result['curves']['epoch']
    times = [begin + (end - begin) * epoch / epochs[-1] for epoch in epochs]
    return [*points, *zip(times, result['curves'][name])]


if __name__ == '__main__':
    main()
