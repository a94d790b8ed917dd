"""A page to drop an image on: its classes, and where every head looks from a patch, before and after phase 2.

    python -m timm_cmhsa.demo phase2.safetensors --before converted.safetensors

serves it on this machine alone, and sends nothing anywhere. The files in examples/space make a Space of the Hugging
Face Hub of it. Needs gradio: pip install 'timm_cmhsa[demo]'.
"""
import argparse
import html
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch
from timm.utils import ParseKwargs
from torch import nn

from .cli import Parser, parse_args, run_command, say
from .files import CheckpointError
from .hub.errors import HubError
from .images import data_config, image_reader
from .messages import one_line
from .version import __version__

NUM_CLASSES = 5  # told of an image
CACHE_SECONDS = 3600  # then uploaded images are deleted


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the demo until it is stopped; return the exit code."""
    parser = _parser()
    args = parse_args(parser, argv)
    os.environ.setdefault('GRADIO_ANALYTICS_ENABLED', 'False')  # which gradio reads when it is imported
    try:
        import gradio  # noqa: F401

        from .plots import PlotError
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split('.')[0] not in ('gradio', 'matplotlib'):
            raise
        say(f"{parser.prog}: error: {e.name} is missing: pip install 'timm_cmhsa[demo]'", file=sys.stderr)
        return 1
    errors = (CheckpointError, PlotError, HubError, OSError)
    return run_command(parser, lambda: serve(**vars(args)), dict.fromkeys(errors, 1))


def serve(
        source: str,
        before: Optional[str] = None,
        model: Optional[str] = None,
        model_kwargs: Optional[Mapping[str, Any]] = None,
        host: str = '127.0.0.1',
        port: Optional[int] = None,
) -> None:
    """Serve the page until the process is stopped.

    Args:
        source: A checkpoint, a folder, or a model on the Hugging Face Hub (see `plots.load_model`).
        before: The same model before phase 2, likewise.
        model, model_kwargs: Name and arguments of the model, where the files do not tell.
        host, port: Where to listen; by default the first free port from 7860 on.

    Raises:
        CheckpointError: If a model cannot be read.
        PlotError: If it has no attention to look at, or the two do not belong together.
        HubError: If it cannot be had from the Hub.
        OSError: If it cannot listen there.
    """
    import gradio as gr

    socket.create_server((host, port or 0)).close()  # tells now if that is impossible
    models = [load(each, model, model_kwargs) for each in (source, before) if each is not None]
    app = make_app(*models)
    # the fonts of the system instead of Google's
    theme = gr.themes.Default(font=['system-ui', 'sans-serif'], font_mono=['ui-monospace', 'monospace'])
    _, url, _ = app.launch(
        server_name=host, server_port=port, share=False, quiet=True, prevent_thread_lock=True, theme=theme,
        footer_links=['gradio'])
    say(f'open {url} in a browser; Ctrl-C ends it')
    threading.Event().wait()


def load(source: str, model: Optional[str], model_kwargs: Optional[Mapping[str, Any]]) -> nn.Module:
    """Load the model of a file, folder or repository."""
    from .plots import load_model

    return load_model(source, model, model_kwargs).float()


def make_app(model: nn.Module, before: Optional[nn.Module] = None) -> Any:
    """Return the app, a `gradio.Blocks`, for a model, and for the same model before phase 2, if there is one.

    Raises:
        CheckpointError, PlotError: See `serve`.
    """
    import gradio as gr

    from .plots import explorer_html
    from .plots.data import model_name

    models: Dict[str, Any] = {'Classes': model}
    if before is not None:
        models = {'Classes before phase 2': before, 'Classes after phase 2': model}
    models = {title: each for title, each in models.items() if each.num_classes}
    read = image_reader(model)
    explorer_html(model, torch.zeros(1, *data_config(model)['input_size']), before=before)  # tells now what is wrong

    def look(path: Optional[str]) -> List[Any]:
        if path is None:
            return [*(None for _ in models), '']
        name = Path(path).name
        try:
            image = read(Path(path)).unsqueeze(0)
        except Exception as e:  # Decoders of broken files raise anything.
            reason = one_line(e).replace(path, name)
            raise gr.Error(f'{name} cannot be read: {reason}.', print_exception=False) from e
        page = explorer_html(model, image, [name], before=before)
        return [*(probabilities(each, image) for each in models.values()), frame(page)]

    with gr.Blocks(title=f'{model_name(model)}: attention', analytics_enabled=False,
                   delete_cache=(CACHE_SECONDS, CACHE_SECONDS)) as app:
        gr.Markdown(f'# What {model_name(model)} sees\nDrop an image. Its classes appear beside it, and below, where '
                    'every head of every layer looks from the patch under the mouse.')
        with gr.Row():
            image = gr.Image(type='filepath', image_mode=None, sources=['upload', 'clipboard'], height=300)
            image.preprocess = lambda file: file and file.path  # read by us: Pillow's other formats run programs
            labels = [gr.Label(label=title, num_top_classes=NUM_CLASSES) for title in models]
        page = gr.HTML()
        image.change(look, image, [*labels, page])
    return app


@torch.inference_mode()
def probabilities(model: Any, image: torch.Tensor) -> Dict[str, float]:
    """Return the probability of every class by its name, or by its number where it has no name of its own."""
    names = model.pretrained_cfg.get('label_names') or ()
    if len(set(names)) != model.num_classes:
        names = [f'class {i}' for i in range(model.num_classes)]
    return dict(zip(names, model(image)[0].softmax(dim=-1).tolist()))


def frame(page: str) -> str:
    """Return a page as a part of another one, as high as it needs to be."""
    return (f'<iframe title="Attention" srcdoc="{html.escape(page)}" style="width: 100%; border: 0" onload="'
            'new ResizeObserver(([{target}]) => { this.style.height = `${target.offsetHeight}px`; })'
            '.observe(this.contentDocument.body)"></iframe>')


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2 ** 16:
        raise argparse.ArgumentTypeError(f'{text!r} is no port: use a number from 1 to 65535')
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog='python -m timm_cmhsa.demo', description=(
        'Serve a page to drop an image on: its classes, and where every head looks from a patch, before and after '
        'phase 2. Exit code 1: a model cannot be had or shown, or it cannot listen.'))
    add = parser.add_argument
    what = "checkpoint of timm's train.py, state dict (.pth, .safetensors), local-dir: folder or hf-hub:USER/NAME"
    add('source', metavar='MODEL', help=what)
    add('--before', metavar='MODEL', help='the same model before phase 2, in any of these forms')
    add('--model', metavar='NAME', help='name of the model, where the files do not tell')
    add('--model-kwargs', metavar='NAME=VALUE', nargs='*', default={}, action=ParseKwargs,
        help='arguments of the model, where the files do not tell')
    add('--host', default='127.0.0.1', help='where to listen; 0.0.0.0 is for everybody (default: %(default)s)')
    add('--port', metavar='N', type=_port, help='port to listen on (default: the first free one from 7860 on)')
    add('--version', action='version', version=f'timm_cmhsa {__version__}')
    return parser


if __name__ == '__main__':
    sys.exit(main())
