"""The recurrent encoder-decoder: what came before the Transformer, with a fixed context vector or with attention.

An encoder reads the source; a decoder writes the target, at each step from its state, the token before, and a context:

    None            the encoder's last state, the same at every step (Sutskever et al. 2014, Cho et al. 2014): all that is
                    known of the source has to fit into one vector
    "bahdanau"      a mean of the encoder's states under weights that the *previous* decoder state asks for; it goes into the
                    cell, so that the target is read step by step (Bahdanau et al. 2015)
    "luong_dot", "luong_general", "luong_concat"
                    the same under weights that the *current* decoder state asks for; it goes past the cell, without input
                    feeding, so that the cell reads the whole target in one call (Luong et al. 2015)

In each, the readout is tanh(W [state; context]), Luong's attentional state, and logits are linear in it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .. import functional
from ..masks import padding_mask
from ..nn import AdditiveAttention, Dropout, LuongAttention
from ..nn.positions import check_size
from .embeddings import TokenEmbedding

CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}
ATTENTIONS = (None, "bahdanau", "luong_dot", "luong_general", "luong_concat")


@dataclass
class RNNState:
    """Where decoding stands: what the encoder gave, one row a sentence, and the decoder's state, one row a beam."""

    memory: Tensor  # (N, S, H): the encoder's states; without attention (N, 1, H), its last one
    padding: Tensor  # (N, S), True = padding
    projected_memory: Tensor | None  # (N, S, H): what the attention needs of memory, computed once
    hidden: tuple[Tensor, ...]  # (n_layers, M, H); an LSTM has two, the second is its cell

    def reorder(self, rows: Tensor) -> None:
        """Lets row i go on from what row rows[i] has read; rows (M,), M a multiple of N, beams of a sentence in a row."""
        self.hidden = tuple(h.index_select(1, rows) for h in self.hidden)


class RNNSeq2Seq(nn.Module):
    """GRU or LSTM encoder-decoder. Sources and targets are token numbers, padded with pad_id; padding changes no result.

    With attention the encoder reads in both directions, hidden_size / 2 each; the decoder starts from its last state.

    Args:
        src_vocab, tgt_vocab: sizes of the vocabularies.
        d_model: width of the embeddings.
        hidden_size: width of the states of encoder and decoder.
        n_layers: number of layers of both.
        cell: "gru" or "lstm".
        attention: None, "bahdanau", "luong_dot", "luong_general" or "luong_concat". The module `attention` is called with
            queries (N, L, H), beam after beam where there are several, and returns (contexts, weights (N, L, S)): with
            "bahdanau" once for each token of the target, else once.
        dropout: of embeddings, between layers, and of the readout, in [0, 1).
        pad_id: the padding token.

    Raises:
        ValueError, TypeError: a size, cell, attention, dropout or pad_id.
    """

    def __init__(
        self,
        src_vocab: int,
        tgt_vocab: int,
        d_model: int = 256,
        hidden_size: int = 512,
        n_layers: int = 1,
        cell: str = "gru",
        attention: str | None = None,
        dropout: float = 0.1,
        pad_id: int = 0,
    ) -> None:
        super().__init__()
        if cell not in CELLS:
            raise ValueError(f"cell must be one of {', '.join(map(repr, CELLS))}, got {cell!r}")
        if attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(map(repr, ATTENTIONS))}, got {attention!r}")
        if check_size("hidden_size", hidden_size) % 2 != 0 and attention is not None:
            raise ValueError(f"hidden_size must be even with attention, half for each direction, got {hidden_size}")
        if not 0 <= pad_id < min(check_size("src_vocab", src_vocab), check_size("tgt_vocab", tgt_vocab)):
            raise ValueError(f"pad_id must be a token of both vocabularies, of {src_vocab} and {tgt_vocab}, got {pad_id}")
        self.src_vocab, self.tgt_vocab, self.d_model, self.hidden_size = src_vocab, tgt_vocab, d_model, hidden_size
        self.n_layers, self.pad_id = check_size("n_layers", n_layers), pad_id
        self.context_feeds_cell = attention in (None, "bahdanau")
        functional.check_probability("dropout", dropout)
        between = dropout if n_layers > 1 else 0.0  # a single layer has nothing between layers, and warns
        self.source = TokenEmbedding(src_vocab, check_size("d_model", d_model), padding_idx=pad_id)
        self.target = TokenEmbedding(tgt_vocab, d_model, padding_idx=pad_id)
        self.dropout = Dropout(dropout)
        self.encoder = CELLS[cell](
            d_model,
            hidden_size if attention is None else hidden_size // 2,
            n_layers,
            batch_first=True,
            dropout=between,
            bidirectional=attention is not None,
        )
        decoder_input = d_model + hidden_size if self.context_feeds_cell else d_model
        self.decoder = CELLS[cell](decoder_input, hidden_size, n_layers, batch_first=True, dropout=between)
        self.attention: AdditiveAttention | LuongAttention | None = None
        if attention == "bahdanau":
            self.attention = AdditiveAttention(hidden_size, hidden_size, hidden_size)
        elif attention is not None:
            self.attention = LuongAttention(hidden_size, hidden_size, attention.removeprefix("luong_"))
        self.readout = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.head = nn.Linear(hidden_size, tgt_vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (N, L, tgt_vocab) for what follows each token of target (N, L), given source (N, S).

        Raises:
            TypeError, ValueError: tokens that are no integers, outside the vocabulary, or of different batch sizes.
        """
        return self.head(self._decode(target, self.encode(source), "target"))

    def begin(self, inputs: Tensor, *, bos_id: int) -> tuple[Tensor, RNNState]:
        """Encodes inputs (N, S); returns a column of bos_id (N, 1), to be the first tokens of `step`, and the state."""
        return inputs.new_full((len(inputs), 1), bos_id), self.encode(inputs)

    def step(self, tokens: Tensor, state: RNNState) -> Tensor:
        """Logits (M, tgt_vocab) for what follows tokens (M, L), which follow those that state has read."""
        return self.head(self._decode(tokens, state, "tokens")[:, -1])

    def encode(self, source: Tensor) -> RNNState:
        """The state before the first token of a target, given source (N, S)."""
        x = self.dropout(self.source(source, "source"))  # (N, S, E)
        padding = padding_mask(source, self.pad_id)
        if source.numel() == 0:
            memory = x.new_zeros(*source.shape, self.hidden_size)
            hidden = (x.new_zeros(self.n_layers, len(source), self.hidden_size),) * (2 if self.decoder.mode == "LSTM" else 1)
        else:
            order = padding.long().argsort(dim=1, stable=True)  # a row's tokens come first, wherever its padding stands
            lengths = (~padding).sum(dim=1)
            x = pack_padded_sequence(_take(x, order), lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
            x, hidden = _run(self.encoder, x)
            memory = _take(pad_packed_sequence(x, batch_first=True, total_length=source.shape[1])[0], order.argsort(dim=1))
            # (n_layers * directions, N, H / directions) -> (n_layers, N, H); 0 where there is nothing but padding
            hidden = tuple(h.unflatten(0, (self.n_layers, -1)).transpose(1, 2).flatten(2) for h in hidden)
            hidden = tuple(h * (lengths > 0)[:, None] for h in hidden)
        if self.attention is None:
            return RNNState(hidden[0][-1][:, None], padding, None, hidden)
        return RNNState(memory, padding, self.attention.project_key(memory), hidden)

    def _decode(self, target: Tensor, state: RNNState, name: str) -> Tensor:
        """Readouts (M, L, H) of target (M, L), by whose tokens the state advances."""
        x = self.dropout(self.target(target, name))  # (M, L, E)
        M, L = target.shape
        if M != state.hidden[0].shape[1]:
            raise ValueError(f"{name} must have {state.hidden[0].shape[1]} rows, one for each sequence, got {M}")
        if L == 0:
            return x.new_zeros(M, 0, self.hidden_size)
        if self.attention is None:
            contexts = self._contexts(x, state)
            outputs = self._advance(torch.cat((x, contexts), dim=-1), state)
        elif not self.context_feeds_cell:
            outputs = self._advance(x, state)
            contexts = self._contexts(outputs, state)
        else:
            steps = []
            for token in x.split(1, dim=1):  # (M, 1, E)
                context = self._contexts(state.hidden[0][-1][:, None], state)
                steps.append((self._advance(torch.cat((token, context), dim=-1), state), context))
            outputs, contexts = (torch.cat(parts, dim=1) for parts in zip(*steps, strict=True))
        return self.dropout(torch.tanh(self.readout(torch.cat((outputs, contexts), dim=-1))))

    def _advance(self, x: Tensor, state: RNNState) -> Tensor:
        """States of the top layer (M, L, H) for the cell's inputs x (M, L, ...)."""
        outputs, state.hidden = _run(self.decoder, x, state.hidden)
        return outputs

    def _contexts(self, query: Tensor, state: RNNState) -> Tensor:
        """Contexts (M, L, H) for queries (M, L, ...); the beams of a sentence share its row of memory."""
        N, (M, L, size) = len(state.memory), query.shape
        queries = M // max(N, 1) * L  # of a sentence
        if self.attention is None:
            context = state.memory.expand(N, queries, self.hidden_size)
        else:
            query = query.reshape(N, queries, size)
            keys = {"key_padding_mask": state.padding, "projected_key": state.projected_memory}
            context, _ = self.attention(query, state.memory, **keys)
        return context.reshape(M, L, self.hidden_size)


def _run(rnn: nn.GRU | nn.LSTM, x, hidden: tuple[Tensor, ...] | None = None):
    """rnn(x, hidden) with a tuple of states for both cells: (h,) of a GRU, (h, c) of an LSTM."""
    outputs, hidden = rnn(x, hidden[0] if hidden is not None and len(hidden) == 1 else hidden)
    return outputs, hidden if isinstance(hidden, tuple) else (hidden,)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """The rows of x (N, S, E) in the order (N, S) of each sentence."""
    return x.gather(1, order[..., None].expand_as(x))
