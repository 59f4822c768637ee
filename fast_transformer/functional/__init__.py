"""The public functions: one per fused op. All checks and every choice of backend happen in this package, and nowhere else.

`backend="..."` forces a path and raises the reason why it cannot take the call. `backends()` prints what is active.
"""

from ._backends import ready
from ._checks import check_probability, check_tensor
from ._report import backends
from .activation_dropout import activation_dropout, dropout
from .attention import additive_attention, attention, check_softcap, check_window
from .linear import linear
from .norm import dropout_add_layer_norm, dropout_add_rms_norm

__all__ = [
    "activation_dropout",
    "additive_attention",
    "attention",
    "backends",
    "check_probability",
    "check_softcap",
    "check_tensor",
    "check_window",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "linear",
    "ready",
]
