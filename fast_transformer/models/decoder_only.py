"""The decoder-only Transformer (GPT type): a causal language model, for training and decoding."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..masks import padding_mask
from ..nn import KeyValueCache, TransformerEncoder, TransformerEncoderLayer
from ..nn._fusion import linear
from ..nn._stepping import StackStep, stack_step
from .embeddings import Embedding, position_bias, rotary_positions, tie


@dataclass(frozen=True)
class DecoderOnlyConfig:
    """The arguments of DecoderOnlyTransformer: `DecoderOnlyTransformer.from_config(DecoderOnlyConfig.mini(8000))`."""

    vocab_size: int
    d_model: int = 768
    n_heads: int = 12
    n_layers: int = 12
    d_ff: int = 3072
    dropout: float = 0.1
    max_len: int = 1024
    tie_embeddings: bool = True
    positions: str = "learned"
    pad_id: int | None = None

    @classmethod
    def _sized(cls, vocab_size, d_model, n_layers, changes) -> "DecoderOnlyConfig":
        return cls(
            vocab_size, **({"d_model": d_model, "n_heads": d_model // 64, "n_layers": n_layers, "d_ff": 4 * d_model} | changes)
        )

    @classmethod
    def tiny(cls, vocab_size: int, **changes: Any) -> "DecoderOnlyConfig":
        return cls._sized(vocab_size, 128, 2, changes)

    @classmethod
    def mini(cls, vocab_size: int, **changes: Any) -> "DecoderOnlyConfig":
        return cls._sized(vocab_size, 256, 4, changes)

    @classmethod
    def small(cls, vocab_size: int, **changes: Any) -> "DecoderOnlyConfig":
        return cls._sized(vocab_size, 512, 8, changes)

    @classmethod
    def base(cls, vocab_size: int, **changes: Any) -> "DecoderOnlyConfig":
        """The size of the smallest GPT-2."""
        return cls._sized(vocab_size, 768, 12, changes)


@dataclass
class DecoderOnlyState:
    """Where decoding stands: the layers' keys and values; which of them are padding, and how many for each row, or None."""

    caches: list[KeyValueCache]
    stack_step: StackStep | None  # for one token at a time
    hidden: Tensor | None = None  # (N, tokens read), True = padding
    padding: Tensor | None = None  # (N,)

    def reorder(self, rows: Tensor) -> None:
        """Lets row i go on from what row rows[i] has read; rows (M,)."""
        for cache in self.caches:
            cache.reorder(rows)
        if self.hidden is not None:
            self.hidden, self.padding = self.hidden[rows], self.padding[rows]


class DecoderOnlyTransformer(nn.Module):
    """Causal language model with pre-norm blocks (GPT-2, Radford et al. 2019).

    Positions count from the first token that is no padding.

    Args:
        vocab_size: size of the vocabulary.
        d_model, n_heads, n_layers, d_ff: sizes.
        dropout: of embeddings, weights, activations and block ends, in [0, 1).
        max_len: number of learned positions; the other kinds know no limit.
        tie_embeddings: the output layer has the weights of the token embedding.
        positions: "learned", "sinusoidal", "rotary", "relative" (T5) or "alibi".
        pad_id: the padding token, at the left or the right; None: there is none.

    Raises:
        ValueError: a size, dropout, positions or pad_id.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 768,
        n_heads: int = 12,
        n_layers: int = 12,
        d_ff: int = 3072,
        dropout: float = 0.1,
        max_len: int = 1024,
        tie_embeddings: bool = True,
        positions: str = "learned",
        pad_id: int | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.d_model, self.pad_id = vocab_size, d_model, pad_id
        self.max_len = max_len if positions == "learned" else None
        layer = TransformerEncoderLayer(
            d_model,
            n_heads,
            d_ff,
            dropout,
            F.gelu,
            batch_first=True,
            norm_first=True,
            rotary=rotary_positions(positions, d_model, n_heads),
        )
        self.decoder = TransformerEncoder(layer, n_layers, nn.LayerNorm(d_model))  # causal: nothing attends to an encoder
        for name, p in self.decoder.named_parameters():
            if p.dim() > 1:  # GPT-2: what writes to the residual stream is smaller, so that its sum over the layers is not
                writes = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(p, std=0.02 / (2 * n_layers) ** 0.5 if writes else 0.02)
        self.embedding = Embedding(vocab_size, d_model, positions=positions, max_len=max_len, dropout=dropout, pad_id=pad_id)
        self.bias = position_bias(positions, n_heads, bidirectional=False)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        if tie_embeddings:
            tie(self.head, self.embedding)

    @classmethod
    def from_config(cls, config: DecoderOnlyConfig) -> "DecoderOnlyTransformer":
        return cls(**vars(config))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, L, vocab_size) for what follows each of tokens (N, L).

        Raises:
            TypeError, ValueError: tokens that are no integers or outside the vocabulary.
        """
        hidden = padding = None
        if self.pad_id is not None:
            hidden = padding_mask(tokens, self.pad_id)
            padding = _leading(hidden)
        x, bias = self._enter(tokens, 0, padding)
        return self.head(self.decoder(x, src_key_padding_mask=hidden, is_causal=True, position_bias=bias))

    def begin(self, inputs: Tensor, *, bos_id: int | None = None) -> tuple[Tensor, DecoderOnlyState]:
        """The prompts (N, L), padded on whatever side, now at the left, to be the first tokens of `step`; and the state.

        bos_id is the first token where there is no prompt, L = 0.
        """
        if inputs.shape[1] == 0:
            if bos_id is None:
                raise ValueError("an empty prompt needs bos_id, got None")
            inputs = inputs.new_full((len(inputs), 1), bos_id)
        state = DecoderOnlyState([KeyValueCache() for _ in self.decoder.layers], stack_step(self.decoder))
        if self.pad_id is not None:
            hidden = padding_mask(inputs, self.pad_id)
            if hidden.any():
                order = (~hidden).long().argsort(dim=1, stable=True)  # padding first
                inputs, state.padding, state.hidden = inputs.gather(1, order), hidden.sum(dim=1), hidden[:, :0]
        return inputs, state

    def step(self, tokens: Tensor, state: DecoderOnlyState) -> Tensor:
        """Logits (N, vocab_size) for what follows tokens (N, L), which follow those that state has read.

        Decode under torch.no_grad().
        """
        offset = state.caches[0].length
        x, bias = self._enter(tokens, offset, state.padding)
        if state.hidden is not None:
            state.hidden = torch.cat((state.hidden, padding_mask(tokens, self.pad_id)), dim=1)
        hidden = state.hidden
        if state.stack_step is not None and offset > 0 and tokens.shape[1] == 1:
            visible = None if hidden is None else ~hidden[:, None, None]
            return linear(self.head, state.stack_step(x[:, 0], state.caches, visible, bias))
        masks = {"src_key_padding_mask": hidden, "is_causal": True}
        return linear(self.head, self.decoder(x, **masks, position_bias=bias, cache=state.caches)[:, -1])

    def _enter(self, tokens: Tensor, offset: int, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the stack reads, (N, L, d_model), for tokens (N, L) after `offset` others; and its position_bias."""
        L = tokens.shape[1]
        bias = None if self.bias is None else self.bias(L, offset + L, offset)
        return self.embedding(tokens, offset, padding=padding), bias


def _leading(hidden: Tensor) -> Tensor:
    """(N, L) -> (N,): how many padding tokens come before the first other one."""
    return hidden.long().cumprod(dim=1).sum(dim=1)
