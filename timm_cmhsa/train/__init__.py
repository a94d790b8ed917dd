"""Train a model on a folder of images.

Phase 1 trains a convolutional model. With a switch below 1, its convolutions are then rewritten exactly as attention,
and phase 2 trains it on, in the same schedule.
"""
from .model import create_model as create_model
from .run import train_two_phases as train_two_phases
