"""fast_transformer: drop-in twins of torch.nn's Transformer modules on fused kernels."""

from . import functional, masks, nn
from .nn import (
    AdditiveAttention,
    AlibiBias,
    Dropout,
    DropoutAddLayerNorm,
    FusedLayerNorm,
    FusedRMSNorm,
    KeyValueCache,
    LearnedPositions,
    LuongAttention,
    MultiheadAttention,
    RelativePositionBias,
    RotaryPositions,
    SinusoidalPositions,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__version__ = "0.1.0"
__all__ = [
    "AlibiBias",
    "AdditiveAttention",
    "Dropout",
    "DropoutAddLayerNorm",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "KeyValueCache",
    "LearnedPositions",
    "LuongAttention",
    "MultiheadAttention",
    "RelativePositionBias",
    "RotaryPositions",
    "SinusoidalPositions",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "functional",
    "masks",
    "nn",
]
