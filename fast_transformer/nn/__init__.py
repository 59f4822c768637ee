"""Twins of torch.nn's Transformer modules: same constructors, parameters, state dicts and numbers, on fused kernels.

And the attention of recurrent models, which torch.nn has not.
"""

from .additive_attention import AdditiveAttention, LuongAttention
from .cache import DecoderLayerCache, KeyValueCache
from .dropout import Dropout
from .multihead_attention import MultiheadAttention
from .norm import DropoutAddLayerNorm, FusedLayerNorm, FusedRMSNorm
from .positions import (
    AlibiBias,
    LearnedPositions,
    RelativePositionBias,
    RotaryPositions,
    SinusoidalPositions,
    sinusoidal_positions,
)
from .transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "AdditiveAttention",
    "AlibiBias",
    "DecoderLayerCache",
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
    "sinusoidal_positions",
]
