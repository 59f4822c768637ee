"""Twins of torch.nn's Transformer modules: same constructors, parameters, state dicts and numbers, on fused kernels."""

from .dropout import Dropout
from .multihead_attention import MultiheadAttention
from .norm import DropoutAddLayerNorm, FusedLayerNorm, FusedRMSNorm
from .transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "Dropout",
    "DropoutAddLayerNorm",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MultiheadAttention",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
