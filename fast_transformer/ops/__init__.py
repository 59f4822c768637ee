"""One file per fused op: its registration with PyTorch and the call that `functional` makes."""

from ._extension import BUILD_COMMAND, build_info, cpu_level, cuda_archs, missing
from .activation_dropout import activation_dropout, dropout
from .additive_attention import additive_scores, additive_scores_triton
from .attention import attention, attention_triton, triton_interpreted, triton_missing
from .dropout_add_layer_norm import dropout_add_layer_norm, dropout_add_rms_norm
from .linear import has_onednn, linear, linear_onednn

__all__ = [
    "BUILD_COMMAND",
    "activation_dropout",
    "additive_scores",
    "additive_scores_triton",
    "attention",
    "attention_triton",
    "build_info",
    "cpu_level",
    "cuda_archs",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "has_onednn",
    "linear",
    "linear_onednn",
    "missing",
    "triton_interpreted",
    "triton_missing",
]
