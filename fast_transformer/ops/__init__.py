"""One file per fused op: its registration with PyTorch and the call that `functional` makes."""

from ._extension import BUILD_COMMAND, build_info, cpu_level, cuda_archs, heads_fit, missing, ready
from .activation_dropout import activation_dropout, dropout
from .additive_attention import additive_scores, additive_scores_triton
from .attention import attention, attention_triton, triton_interpreted, triton_missing
from .blocks import encoder_layer, feed_forward, self_attention
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
    "encoder_layer",
    "feed_forward",
    "has_onednn",
    "heads_fit",
    "linear",
    "linear_onednn",
    "missing",
    "ready",
    "self_attention",
    "triton_interpreted",
    "triton_missing",
]
