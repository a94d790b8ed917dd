"""What the experiments share: images, training, resumable runs, tables and plots."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / 'examples' / 'cifar10'))
import resnet18_cifar  # noqa: F401  registers the model
