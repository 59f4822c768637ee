"""One file per fused op: its registration with PyTorch and the call that `functional` makes."""

from . import sdpa
from ._extension import build_info, cpu_level, missing
from .activation_dropout import activation_dropout, dropout
from .dropout_add_layer_norm import dropout_add_layer_norm

__all__ = ["activation_dropout", "build_info", "cpu_level", "dropout", "dropout_add_layer_norm", "missing", "sdpa"]
