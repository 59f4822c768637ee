"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al. 2017) on tokens, for training and decoding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..masks import look_ahead_mask, padding_mask
from ..nn import DecoderLayerCache, KeyValueCache, Transformer, TransformerDecoder
from ..nn._fusion import linear
from ..nn._stepping import StackStep, stack_step
from .embeddings import Embedding, position_bias, rotary_positions, tie


@dataclass(frozen=True)
class Seq2SeqConfig:
    """The arguments of Seq2SeqTransformer: `Seq2SeqTransformer.from_config(Seq2SeqConfig.small(8000, 8000))`."""

    src_vocab: int
    tgt_vocab: int
    d_model: int = 512
    n_heads: int = 8
    n_encoder_layers: int = 6
    n_decoder_layers: int = 6
    d_ff: int = 2048
    dropout: float = 0.1
    max_len: int = 5000
    norm_first: bool = False
    tie_embeddings: bool | str = False
    positions: str = "sinusoidal"
    pad_id: int = 0

    @classmethod
    def _sized(cls, src_vocab, tgt_vocab, d_model, n_heads, n_layers, changes) -> "Seq2SeqConfig":
        sizes = {"n_encoder_layers": n_layers, "n_decoder_layers": n_layers, "d_ff": 4 * d_model}
        return cls(src_vocab, tgt_vocab, d_model, n_heads, **(sizes | changes))

    @classmethod
    def tiny(cls, src_vocab: int, tgt_vocab: int, **changes: Any) -> "Seq2SeqConfig":
        return cls._sized(src_vocab, tgt_vocab, 128, 2, 2, changes)

    @classmethod
    def mini(cls, src_vocab: int, tgt_vocab: int, **changes: Any) -> "Seq2SeqConfig":
        return cls._sized(src_vocab, tgt_vocab, 256, 4, 3, changes)

    @classmethod
    def small(cls, src_vocab: int, tgt_vocab: int, **changes: Any) -> "Seq2SeqConfig":
        return cls._sized(src_vocab, tgt_vocab, 512, 8, 3, changes)

    @classmethod
    def base(cls, src_vocab: int, tgt_vocab: int, **changes: Any) -> "Seq2SeqConfig":
        """The base model of the paper's table 3."""
        return cls._sized(src_vocab, tgt_vocab, 512, 8, 6, changes)

    @classmethod
    def big(cls, src_vocab: int, tgt_vocab: int, **changes: Any) -> "Seq2SeqConfig":
        """The big model of the paper's table 3."""
        return cls._sized(src_vocab, tgt_vocab, 1024, 16, 6, {"dropout": 0.3} | changes)


@dataclass
class Seq2SeqState:
    """Where decoding stands: the encoder's output, one row a sentence, and what the decoder layers keep, one row a beam."""

    memory: Tensor  # (N, S, E)
    memory_padding: Tensor | None  # (N, S), True = padding
    caches: list[DecoderLayerCache]
    stack_step: StackStep | None  # of the decoder, for one token at a time

    @property
    def length(self) -> int:
        """How many tokens have been read."""
        return self.caches[0].self_attention.length

    def reorder(self, rows: Tensor) -> None:
        """Lets row i go on from what row rows[i] has read; rows (M,), M a multiple of N, beams of a sentence in a row."""
        for cache in self.caches:
            cache.self_attention.reorder(rows)


class Seq2SeqTransformer(nn.Module):
    """Encoder-decoder Transformer. Sources and targets are token numbers, padded at the right with pad_id. (The padding of a
    target is in the future of all its tokens, so it needs no mask, and may be the begin token, too.)

    Its stacks are `transformer.encoder` and `transformer.decoder`, twins of torch.nn's; torch.nn's own may take their place,
    but for `step`, and for positions that act inside attention.

    Args:
        src_vocab, tgt_vocab: sizes of the vocabularies.
        d_model, n_heads, n_encoder_layers, n_decoder_layers, d_ff: sizes.
        dropout: of embeddings, weights, activations and block ends, in [0, 1).
        max_len: number of learned positions; the other kinds know no limit.
        norm_first: pre-norm blocks and a final norm of each stack; else post-norm blocks, as in the paper.
        tie_embeddings: True: the output layer has the weights of the target embedding. "all": the source embedding too
            (section 3.4 of the paper), which takes one vocabulary.
        positions: "sinusoidal", "learned", "rotary", "relative" (T5) or "alibi".
        pad_id: the padding token.

    Raises:
        ValueError: a size, dropout, positions or pad_id; "all" with different vocabularies.
    """

    def __init__(
        self,
        src_vocab: int,
        tgt_vocab: int,
        d_model: int = 512,
        n_heads: int = 8,
        n_encoder_layers: int = 6,
        n_decoder_layers: int = 6,
        d_ff: int = 2048,
        dropout: float = 0.1,
        max_len: int = 5000,
        norm_first: bool = False,
        tie_embeddings: bool | str = False,
        positions: str = "sinusoidal",
        pad_id: int = 0,
    ) -> None:
        super().__init__()
        if tie_embeddings not in (False, True, "all"):
            raise ValueError(f'tie_embeddings must be False, True or "all", got {tie_embeddings!r}')
        if tie_embeddings == "all" and src_vocab != tgt_vocab:
            raise ValueError(f'tie_embeddings="all" takes one vocabulary, got src_vocab {src_vocab} and tgt_vocab {tgt_vocab}')
        self.src_vocab, self.tgt_vocab, self.d_model, self.pad_id = src_vocab, tgt_vocab, d_model, pad_id
        self.max_len = max_len if positions == "learned" else None
        self.transformer = Transformer(  # draws its matrices by Xavier's rule
            d_model,
            n_heads,
            n_encoder_layers,
            n_decoder_layers,
            d_ff,
            dropout,
            batch_first=True,
            norm_first=norm_first,
            rotary=rotary_positions(positions, d_model, n_heads),
        )
        if not norm_first:  # post-norm blocks end with a norm of their own
            self.transformer.encoder.norm = self.transformer.decoder.norm = None
        embedding = {"positions": positions, "max_len": max_len, "dropout": dropout, "pad_id": pad_id}
        self.source = Embedding(src_vocab, d_model, **embedding)
        self.target = Embedding(tgt_vocab, d_model, **embedding)
        self.encoder_bias = position_bias(positions, n_heads, bidirectional=True)
        self.decoder_bias = position_bias(positions, n_heads, bidirectional=False)
        self.head = nn.Linear(d_model, tgt_vocab, bias=False)
        nn.init.xavier_uniform_(self.head.weight)
        if tie_embeddings:
            tie(self.head, self.target)
        if tie_embeddings == "all":
            self.source.tokens.weight = self.target.tokens.weight

    @classmethod
    def from_config(cls, config: Seq2SeqConfig) -> "Seq2SeqTransformer":
        return cls(**vars(config))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (N, L, tgt_vocab) for what follows each token of target (N, L), given source (N, S).

        Raises:
            TypeError, ValueError: tokens that are no integers, outside the vocabulary, or of different batch sizes.
        """
        return self.decode(target, self.encode(source), padding_mask(source, self.pad_id))

    def encode(self, source: Tensor) -> Tensor:
        """source (N, S) -> memory (N, S, d_model)."""
        x = self.source(source, name="source")
        bias = None if self.encoder_bias is None else self.encoder_bias(source.shape[1], source.shape[1])
        return self.transformer.encoder(x, src_key_padding_mask=padding_mask(source, self.pad_id), **_given(bias))

    def decode(self, target: Tensor, memory: Tensor, memory_padding: Tensor | None = None) -> Tensor:
        """Logits (N, L, tgt_vocab), given target (N, L), memory (N, S, d_model) and memory_padding (N, S), True = padding."""
        if len(target) != len(memory):
            raise ValueError(f"target must have the batch size of source, {len(memory)}, got {len(target)}")
        x = self.target(target, name="target")
        L = target.shape[1]
        bias = None if self.decoder_bias is None else self.decoder_bias(L, L)
        x = self.transformer.decoder(
            x,
            memory,
            memory_key_padding_mask=memory_padding,
            **_causal(self.transformer.decoder, L, target.device),
            **_given(bias),
        )
        return self.head(x)

    def begin(self, inputs: Tensor, *, bos_id: int) -> tuple[Tensor, Seq2SeqState]:
        """Encodes inputs (N, S); returns a column of bos_id (N, 1), to be the first tokens of `step`, and the state."""
        memory, padding = self.encode(inputs), padding_mask(inputs, self.pad_id)
        caches = [DecoderLayerCache(KeyValueCache(), KeyValueCache(fixed=True)) for _ in self.transformer.decoder.layers]
        state = Seq2SeqState(memory, padding if padding.any() else None, caches, stack_step(self.transformer.decoder))
        return inputs.new_full((len(inputs), 1), bos_id), state

    def step(self, tokens: Tensor, state: Seq2SeqState) -> Tensor:
        """Logits (M, tgt_vocab) for what follows tokens (M, L), which follow those that state has read; no padding among them.

        Decode under torch.no_grad().
        """
        offset, L = state.length, tokens.shape[1]
        x = self.target(tokens, offset)
        bias = None if self.decoder_bias is None else self.decoder_bias(L, offset + L, offset)
        if state.stack_step is not None and offset > 0 and L == 1:
            visible = None if state.memory_padding is None else ~state.memory_padding[:, None, None]
            return linear(self.head, state.stack_step(x[:, 0], state.caches, bias=bias, memory_visible=visible))
        x = self.transformer.decoder(
            x,
            state.memory,
            memory_key_padding_mask=state.memory_padding,
            tgt_is_causal=True,
            cache=state.caches,
            **_given(bias),
        )
        return linear(self.head, x[:, -1])


def _causal(decoder: nn.Module, L: int, device: torch.device) -> dict[str, Any]:
    """How to tell a stack to hide the future: torch.nn's wants a mask beside the word."""
    mask = {} if isinstance(decoder, TransformerDecoder) else {"tgt_mask": look_ahead_mask(L, device=device)}
    return {"tgt_is_causal": True} | mask


def _given(bias: Tensor | None) -> dict[str, Tensor]:
    return {} if bias is None else {"position_bias": bias}  # a stock stack has no such argument, and needs none
