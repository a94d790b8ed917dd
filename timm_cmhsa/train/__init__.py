"""Train a model on a folder of images: in phase 1 a convolutional model, and with a switch below 1, its exact rewrite
as attention in phase 2, in the same schedule.
"""
from .model import create_model as create_model
from .run import train_two_phases as train_two_phases
