"""Models of tokens and images on the twins: encoder-decoder, decoder-only."""

from .decoder_only import DecoderOnlyConfig, DecoderOnlyTransformer
from .seq2seq import Seq2SeqConfig, Seq2SeqTransformer

__all__ = [
    "DecoderOnlyConfig",
    "DecoderOnlyTransformer",
    "Seq2SeqConfig",
    "Seq2SeqTransformer",
]
