"""fast_transformer: drop-in twins of torch.nn's Transformer modules on fused kernels."""

from . import functional, nn
from .nn import (
    Dropout,
    DropoutAddLayerNorm,
    FusedLayerNorm,
    FusedRMSNorm,
    MultiheadAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__version__ = "0.1.0"
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
    "functional",
    "nn",
]
