"""Training: a Trainer, losses, schedules and checkpoints (`pip install "fast-transformer-kernels[train]"`)."""

from .checkpoints import load_weights, save_weights
from .losses import cross_entropy, summed_cross_entropy, teacher_forcing
from .schedules import cosine, noam
from .trainer import Trainer

__all__ = [
    "Trainer",
    "cosine",
    "cross_entropy",
    "load_weights",
    "noam",
    "save_weights",
    "summed_cross_entropy",
    "teacher_forcing",
]
