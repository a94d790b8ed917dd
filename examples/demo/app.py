"""A page to drop an image on: its classes, and where every head looks, before and after phase 2.

    python app.py MODEL --before CONVERTED_MODEL

In a Space of the Hugging Face Hub, the variables MODEL and BEFORE name the models.
"""
import argparse
import html
import os
import sys
import threading
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import gradio as gr
import torch
from torch import nn

from timm_cmhsa import CheckpointError, HubError, load_model
from timm_cmhsa.images import data_config, image_reader
from timm_cmhsa.plots import PlotError, explorer_html

NUM_CLASSES = 5  # to show
MAX_FILE_SIZE = '20mb'
CACHE_SECONDS = 3600  # uploaded images are deleted then


def make_app(model: nn.Module, before: Optional[nn.Module] = None) -> gr.Blocks:
    """Return the page for a model, and for the same model before phase 2 if it is given."""
    models = {'Classes': model}
    if before is not None:
        models = {'Classes before phase 2': before, 'Classes after phase 2': model}
    read, lock = image_reader(model), threading.Lock()
    explorer_html(model, torch.zeros(1, *data_config(model)['input_size']), before=before)  # fails now if it ever does

    def look(path: Optional[str]) -> List[Any]:
        if path is None:
            return [*(None for _ in models), '']
        name = Path(path).name
        with lock:  # attention is recorded in the model, and an image takes memory
            try:
                image = read(Path(path)).unsqueeze(0)
            except Exception as e:  # decoders raise anything
                raise refusal(f'{name} cannot be read: {e}'.replace(path, name)) from e
            page = explorer_html(model, image, [name], before=before)
            return [*(probabilities(each, image) for each in models.values()), frame(page)]

    with gr.Blocks(title='Attention', analytics_enabled=False, delete_cache=(CACHE_SECONDS, CACHE_SECONDS)) as app:
        gr.Markdown('# Where the heads look\nDrop an image. Its classes appear beside it, and below, where every head '
                    'of every layer looks from the patch under the mouse.')
        with gr.Row():
            image = uploaded_image()
            labels = [gr.Label(label=title, num_top_classes=NUM_CLASSES) for title in models]
        page = gr.HTML()
        image.change(look, image, [*labels, page], concurrency_limit=1)
    return app


def uploaded_image() -> gr.Image:
    """Return an image input that takes uploads only, while Gradio downloads any address that a request contains.

    It passes on the path of the file. Gradio would open it with all formats of Pillow.
    """
    image = gr.Image(type='filepath', image_mode=None, sources=['upload', 'clipboard'], height=300)
    move = image.async_move_resource_to_block_cache

    async def move_upload(path: Any) -> Optional[str]:
        if not os.path.isfile(path):
            raise refusal('This page does not download images: upload the file.')
        return await move(path)

    image.async_move_resource_to_block_cache = move_upload
    image.preprocess = lambda file: None if file is None else file.path
    return image


def refusal(message: str) -> gr.Error:
    """Return an error for the page, without a traceback in the log."""
    return gr.Error(message.splitlines()[0], print_exception=False)


@torch.inference_mode()
def probabilities(model: Any, image: torch.Tensor) -> Dict[str, float]:
    """Return the probability of every class by its name, or by its number if names are missing."""
    names = model.pretrained_cfg.get('label_names') or ()
    if len(set(names)) != model.num_classes:
        names = [f'class {i}' for i in range(model.num_classes)]
    return dict(zip(names, model(image)[0].softmax(dim=-1).tolist()))


def frame(page: str) -> str:
    """Return a page as part of another one, as high as it needs to be."""
    return (f'<iframe title="Attention" srcdoc="{html.escape(page)}" style="width: 100%; border: 0" onload="'
            'new ResizeObserver(([{target}]) => { this.style.height = `${target.offsetHeight}px`; })'
            '.observe(this.contentDocument.body)"></iframe>')


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Serve the page until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('model', metavar='MODEL', nargs='?', default=os.environ.get('MODEL'),
        help='checkpoint, folder, or hf-hub:USER/NAME')
    add('--before', metavar='MODEL', default=os.environ.get('BEFORE'), help='the same model before phase 2')
    add('--host', help='address to listen on; 0.0.0.0 lets others in (default: this machine only)')
    add('--port', type=int, help='port to listen on (default: the first free port from 7860)')
    args = parser.parse_args(argv)
    if not args.model:
        parser.error('MODEL is missing: give a checkpoint, a folder or hf-hub:USER/NAME.')
    theme = gr.themes.Default(font=['system-ui', 'sans-serif'], font_mono=['ui-monospace', 'monospace'])  # not Google's
    try:
        app = make_app(*(load_model(source).float() for source in (args.model, args.before) if source))
        app.launch(
            server_name=args.host, server_port=args.port, theme=theme, max_file_size=MAX_FILE_SIZE, share=False,
            run_history=False, footer_links=['gradio'])
    except (CheckpointError, HubError, PlotError, OSError) as e:
        sys.exit(f'{parser.prog}: error: {e}')


if __name__ == '__main__':
    main()
