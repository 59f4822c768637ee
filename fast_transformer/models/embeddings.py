"""What every model of tokens begins with: token embeddings, positions, dropout, and the check of token numbers."""

import math

import torch
from torch import Tensor, nn

from ..masks import check_tokens
from ..nn import AlibiBias, Dropout, LearnedPositions, RelativePositionBias, RotaryPositions, SinusoidalPositions

POSITIONS = ("sinusoidal", "learned", "rotary", "relative", "alibi")


def check_positions(positions: str) -> str:
    if positions not in POSITIONS:
        raise ValueError(f"positions must be one of {', '.join(map(repr, POSITIONS))}, got {positions!r}")
    return positions


def rotary_positions(positions: str, d_model: int, n_heads: int) -> RotaryPositions | None:
    """What the twins take as `rotary`."""
    return RotaryPositions(d_model // n_heads) if check_positions(positions) == "rotary" else None


def position_bias(positions: str, n_heads: int, *, bidirectional: bool) -> nn.Module | None:
    """The module whose result the twins take as `position_bias`; one for all layers of a stack, as in T5."""
    if check_positions(positions) == "relative":
        return RelativePositionBias(n_heads, bidirectional=bidirectional)
    return AlibiBias(n_heads) if positions == "alibi" else None


class TokenEmbedding(nn.Embedding):
    """torch.nn.Embedding that names the argument and the number when a token is outside the vocabulary.

    On a GPU, where an error cannot wait for the result, the assertion is made there.
    """

    def forward(self, tokens: Tensor, name: str = "tokens") -> Tensor:
        check_tokens(name, tokens)
        if tokens.device.type != "cpu":
            inside = (tokens >= 0) & (tokens < self.num_embeddings)
            torch._assert_async(inside.all(), f"{name} holds numbers outside a vocabulary of {self.num_embeddings}")
        try:
            return super().forward(tokens.long())  # F.embedding takes no small integers
        except IndexError:
            wrong = tokens[(tokens < 0) | (tokens >= self.num_embeddings)][0].item()
            raise ValueError(f"{name} must be numbers from 0 to {self.num_embeddings - 1}, got {wrong}") from None


class Embedding(nn.Module):
    """Token embeddings times sqrt(d_model), plus positions, then dropout (Vaswani et al. 2017, sections 3.4, 3.5 and 5.4).

    Args:
        vocab_size, d_model: of the tokens.
        positions: one of POSITIONS; those that act inside attention ("rotary", "relative", "alibi") add nothing here.
        max_len: number of learned positions.
        dropout: in [0, 1).
        pad_id: the padding token, whose embedding is 0 and gets no gradient; or None.
    """

    def __init__(
        self, vocab_size: int, d_model: int, *, positions: str, max_len: int, dropout: float, pad_id: int | None
    ) -> None:
        super().__init__()
        if vocab_size < 1 or (pad_id is not None and not 0 <= pad_id < vocab_size):
            raise ValueError(f"pad_id must be a token of a vocabulary of at least 1, got {pad_id} of {vocab_size}")
        self.tokens = TokenEmbedding(vocab_size, d_model, padding_idx=pad_id)
        nn.init.normal_(self.tokens.weight, std=d_model**-0.5)  # times sqrt(d_model): entries of size 1, like the positions
        with torch.no_grad():
            self.tokens._fill_padding_idx_with_zero()
        self.positions: nn.Module | None = None
        if check_positions(positions) == "sinusoidal":
            self.positions = SinusoidalPositions(d_model)
        elif positions == "learned":
            self.positions = LearnedPositions(max_len, d_model)
        self.scale = math.sqrt(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, offset: int = 0, *, padding: Tensor | None = None, name: str = "tokens") -> Tensor:
        """tokens (N, L) -> (N, L, d_model). The first one stands at `offset`, after padding (N,) tokens that do not count."""
        x = self.tokens(tokens, name) * self.scale
        if self.positions is not None:
            x = x + self.positions(tokens.shape[1], offset, padding=padding)
        return self.dropout(x)


def tie(head: nn.Linear, embedding: Embedding) -> None:
    """Makes the weight of the output layer that of the token embedding (Press and Wolf 2017)."""
    head.weight = embedding.tokens.weight
