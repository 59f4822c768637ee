"""The encoder-only Transformer (BERT type, Devlin et al. 2019), and heads for masked tokens, sequences and single tokens.

encoder = EncoderOnlyTransformer.from_config(EncoderOnlyConfig.mini(vocab_size=30522))
pretraining = MaskedLanguageModel(encoder)                # logits (N, L, vocab_size)
classifier = SequenceClassifier(encoder, n_classes=2)     # the same encoder, logits (N, 2)
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..masks import check_tokens, padding_mask
from ..nn import Dropout, FusedLayerNorm, LearnedPositions, TransformerEncoder, TransformerEncoderLayer
from ..nn.positions import check_size
from .embeddings import TokenEmbedding


@dataclass(frozen=True)
class EncoderOnlyConfig:
    """The arguments of EncoderOnlyTransformer under names. Sizes from tiny to base: Turc et al. 2019, table 1."""

    vocab_size: int
    d_model: int = 768
    n_heads: int = 12
    n_layers: int = 12
    d_ff: int = 3072
    dropout: float = 0.1
    max_len: int = 512
    n_segments: int = 2
    norm_first: bool = False
    activation: str = "gelu"
    pad_id: int = 0

    @classmethod
    def _sized(cls, vocab_size, d_model, n_layers, changes) -> "EncoderOnlyConfig":
        sizes = {"d_model": d_model, "n_heads": d_model // 64, "n_layers": n_layers, "d_ff": 4 * d_model}
        return cls(vocab_size, **(sizes | changes))

    @classmethod
    def tiny(cls, vocab_size: int, **changes: Any) -> "EncoderOnlyConfig":
        return cls._sized(vocab_size, 128, 2, changes)

    @classmethod
    def mini(cls, vocab_size: int, **changes: Any) -> "EncoderOnlyConfig":
        return cls._sized(vocab_size, 256, 4, changes)

    @classmethod
    def small(cls, vocab_size: int, **changes: Any) -> "EncoderOnlyConfig":
        return cls._sized(vocab_size, 512, 4, changes)

    @classmethod
    def medium(cls, vocab_size: int, **changes: Any) -> "EncoderOnlyConfig":
        return cls._sized(vocab_size, 512, 8, changes)

    @classmethod
    def base(cls, vocab_size: int, **changes: Any) -> "EncoderOnlyConfig":
        """The size of BERT base."""
        return cls._sized(vocab_size, 768, 12, changes)


class EncoderOnlyTransformer(nn.Module):
    """Token, segment and position embeddings, a norm, and a bidirectional encoder; padding is hidden from every token.

    Args:
        vocab_size: size of the vocabulary.
        d_model, n_heads, n_layers, d_ff: sizes.
        dropout: of embeddings, weights, activations and block ends, in [0, 1).
        max_len: number of learned positions.
        n_segments: number of segments (sentences of a pair).
        norm_first: pre-norm blocks and a final norm; else post-norm blocks, as in the paper.
        activation: of the feed-forward, "gelu" or "relu".
        pad_id: the padding token, at the right.

    Raises:
        ValueError, TypeError: a size, dropout or pad_id.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 768,
        n_heads: int = 12,
        n_layers: int = 12,
        d_ff: int = 3072,
        dropout: float = 0.1,
        max_len: int = 512,
        n_segments: int = 2,
        norm_first: bool = False,
        activation: str = "gelu",
        pad_id: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= pad_id < check_size("vocab_size", vocab_size):
            raise ValueError(f"pad_id must be a token of the vocabulary of {vocab_size}, got {pad_id}")
        self.vocab_size, self.d_model, self.pad_id = vocab_size, d_model, pad_id
        layer = TransformerEncoderLayer(
            d_model, n_heads, check_size("d_ff", d_ff), dropout, activation, batch_first=True, norm_first=norm_first
        )
        norm = nn.LayerNorm(d_model) if norm_first else None  # post-norm blocks end with a norm of their own
        self.tokens = TokenEmbedding(vocab_size, d_model, padding_idx=pad_id)
        self.segments = TokenEmbedding(check_size("n_segments", n_segments), d_model)
        self.positions = LearnedPositions(max_len, d_model)
        self.norm = FusedLayerNorm(d_model)
        self.dropout = Dropout(dropout)
        self.encoder = TransformerEncoder(layer, check_size("n_layers", n_layers), norm)
        _initialise(self)

    @classmethod
    def from_config(cls, config: EncoderOnlyConfig) -> "EncoderOnlyTransformer":
        return cls(**vars(config))

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """What the encoder makes of each token.

        Args:
            tokens: (N, L), numbers of the vocabulary.
            segments: (N, L), numbers below n_segments; None: all 0.

        Returns:
            (N, L, d_model); what stands at padding means nothing.

        Raises:
            TypeError, ValueError: numbers that are no integers or too large, or more tokens than max_len.
        """
        x = self.tokens(tokens) + self.positions(tokens.shape[1])  # (N, L, E)
        if segments is None:
            x = x + self.segments.weight[0]
        else:
            check_tokens("segments", segments)
            if segments.shape != tokens.shape:
                raise ValueError(f"segments must have the shape of tokens, {tuple(tokens.shape)}, got {tuple(segments.shape)}")
            x = x + self.segments(segments, "segments")
        return self.encoder(self.dropout(self.norm(x)), src_key_padding_mask=padding_mask(tokens, self.pad_id))


class MaskedLanguageModel(nn.Module):
    """Which token stands where another, such as [MASK], is seen (Devlin et al. 2019, section 3.1).

    The output layer has the weights of the token embedding and a bias of its own, behind a layer with GELU and a norm.

    Args:
        encoder: the encoder, trained with the head.
    """

    def __init__(self, encoder: EncoderOnlyTransformer) -> None:
        super().__init__()
        self.transform = nn.Linear(encoder.d_model, encoder.d_model)
        self.norm = FusedLayerNorm(encoder.d_model)
        self.bias = nn.Parameter(torch.zeros(encoder.vocab_size))
        _initialise(self)
        self.encoder = encoder

    def forward(self, tokens: Tensor, segments: Tensor | None = None, *, at: Tensor | None = None) -> Tensor:
        """Logits for each token (N, L, vocab_size); tokens and segments as in EncoderOnlyTransformer.forward.

        With `at`, bool (N, L), for the tokens where it is True only, row after row (number of True, vocab_size): the output
        layer is the larger part of a small model, and a loss asks for some 15 % of the tokens.
        """
        x = self.encoder(tokens, segments)  # (N, L, E)
        if at is not None:
            if not isinstance(at, Tensor) or at.dtype != torch.bool:
                raise TypeError(f"at must be a bool tensor, got {at.dtype if isinstance(at, Tensor) else type(at).__name__}")
            if at.shape != tokens.shape:
                raise ValueError(f"at must have the shape of tokens, {tuple(tokens.shape)}, got {tuple(at.shape)}")
            x = x[at]  # (number of True, E)
        x = self.norm(F.gelu(self.transform(x)))
        return F.linear(x, self.encoder.tokens.weight, self.bias)


class SequenceClassifier(nn.Module):
    """One label for a sequence, from its first token ([CLS]): a tanh layer, the pooler, then a linear one.

    Args:
        encoder: the encoder, trained with the head.
        n_classes: number of labels.
        dropout: of the pooled vector, in [0, 1].
    """

    def __init__(self, encoder: EncoderOnlyTransformer, n_classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.pooler = nn.Linear(encoder.d_model, encoder.d_model)
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(encoder.d_model, check_size("n_classes", n_classes))
        _initialise(self)
        self.encoder = encoder

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Logits (N, n_classes) of tokens (N, L), L >= 1; arguments as in EncoderOnlyTransformer.forward."""
        if tokens.dim() == 2 and tokens.shape[1] == 0:
            raise ValueError(f"tokens must hold at least one token a sequence, got shape {tuple(tokens.shape)}")
        pooled = torch.tanh(self.pooler(self.encoder(tokens, segments)[:, 0]))  # (N, E)
        return self.head(self.dropout(pooled))


class TokenClassifier(nn.Module):
    """A label for each token.

    Args: as in SequenceClassifier.
    """

    def __init__(self, encoder: EncoderOnlyTransformer, n_classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(encoder.d_model, check_size("n_classes", n_classes))
        _initialise(self)
        self.encoder = encoder

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Logits (N, L, n_classes); arguments as in EncoderOnlyTransformer.forward."""
        return self.head(self.dropout(self.encoder(tokens, segments)))


@torch.no_grad()
def _initialise(module: nn.Module) -> None:
    """BERT's way: weights normal with a standard deviation of 0.02, biases 0, norms as they are."""
    for name, p in module.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            child._fill_padding_idx_with_zero()
