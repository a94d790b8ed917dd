"""Write a model as an ONNX file: python -m timm_cmhsa.export MODEL DST.onnx

onnxruntime runs it beside the model before it is written. Exit code 1: the error is too large; 2: bad input; 3: the
Hugging Face Hub was not reached. Nothing is written then.
"""
import copy
import json
import sys
from pathlib import Path
from typing import Any, Optional, Sequence, Union

import torch
from timm.utils import reparameterize_model
from torch import nn

from .checkpoint import LABEL_KEYS, open_model
from .cli import ANY_SOURCE, Parser, run_command
from .conversion import MAX_ERROR
from .errors import CheckpointError, VerificationError, one_line
from .files import PathLike, check_destination, replacing
from .images import data_config


@torch.inference_mode()
def export_onnx(
        model: Union[nn.Module, PathLike],
        dst: PathLike,
        *,
        tolerance: float = MAX_ERROR,
        force: bool = False,
) -> float:
    """Write a model in the form for inference, in float32 and for any number of images, as an ONNX file.

    Its `metadata_props` have the preprocessing and the names of the classes, in timm's terms, each as JSON.

    Args:
        model: A model of timm, or what `open_model` takes.
        dst: New file, with the suffix .onnx.
        tolerance: Largest accepted error of the logits in onnxruntime, relative to the largest of them.
        force: Replace the file.

    Returns:
        This error, on random images.

    Raises:
        CheckpointError, HubError: If the model cannot be loaded or exported, or the file cannot be written.
        VerificationError: If the error is above the tolerance.
    """
    import onnxruntime
    import onnxscript  # noqa: F401  torch needs it

    dst = check_destination(dst, force)
    if dst.suffix != '.onnx':
        raise CheckpointError(f'{dst} must end in .onnx.')
    source: Any = copy.deepcopy(model) if isinstance(model, nn.Module) else open_model(model)
    source = source.float().cpu().eval()
    config, cfg = data_config(source), source.pretrained_cfg
    images = torch.randn(5, *config['input_size'], generator=torch.Generator().manual_seed(0))
    try:
        program: Any = torch.onnx.export(
            reparameterize_model(source), (images[:2],), input_names=['images'], output_names=['logits'], dynamo=True,
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), verbose=False)
        labels = {key: cfg[key] for key in LABEL_KEYS if cfg.get(key)}
        program.model.metadata_props.update({key: json.dumps(value) for key, value in {**config, **labels}.items()})
        content = program.model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=['CPUExecutionProvider'])
        logits = torch.from_numpy(session.run(['logits'], {'images': images.numpy()})[0])
    except Exception as e:  # exporter and onnxruntime raise many kinds
        raise CheckpointError(f'The model cannot be exported: {one_line(e, 500)}') from e
    expected = source(images)
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    if not error <= tolerance:
        raise VerificationError(f'the error of {error:.1e} is above the tolerance of {tolerance:.1e}.')
    with replacing(dst, force) as new:
        new.write_bytes(content)
    return error


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog='python -m timm_cmhsa.export', description=__doc__)
    add = parser.add_argument
    add('model', metavar='MODEL', help=ANY_SOURCE)
    add('dst', metavar='DST.onnx', type=Path, help='new file')
    add('--tolerance', metavar='E', type=float, default=MAX_ERROR,
        help='largest accepted error, relative to the largest logit (default: %(default)s)')
    add('--force', action='store_true', help='replace the file')
    args = parser.parse_args(argv)

    def run() -> None:
        error = export_onnx(args.model, args.dst, tolerance=args.tolerance, force=args.force)
        print(f'largest error in onnxruntime: {error:.1e} of the largest logit\nwritten to {args.dst}')

    return run_command(parser.prog, run, extra='export')


if __name__ == '__main__':
    sys.exit(main())
