"""Models of tokens and images on the twins: encoder-decoder, decoder-only, encoder-only, recurrent, vision."""

from .decoder_only import DecoderOnlyConfig, DecoderOnlyTransformer
from .encoder_only import (
    EncoderOnlyConfig,
    EncoderOnlyTransformer,
    MaskedLanguageModel,
    SequenceClassifier,
    TokenClassifier,
)
from .rnn import RNNSeq2Seq
from .seq2seq import Seq2SeqConfig, Seq2SeqTransformer
from .vision import VisionConfig, VisionTransformer

__all__ = [
    "DecoderOnlyConfig",
    "DecoderOnlyTransformer",
    "EncoderOnlyConfig",
    "EncoderOnlyTransformer",
    "MaskedLanguageModel",
    "RNNSeq2Seq",
    "Seq2SeqConfig",
    "Seq2SeqTransformer",
    "SequenceClassifier",
    "TokenClassifier",
    "VisionConfig",
    "VisionTransformer",
]
