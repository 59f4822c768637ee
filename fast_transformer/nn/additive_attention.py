"""The attention of recurrent encoder-decoders: Bahdanau's and Luong's.

A recurrent decoder asks step by step, with a new query over the same keys, so what depends on the keys alone can be done once:

    attention = AdditiveAttention(query_size=512, key_size=1024, hidden_size=256)
    context, weights = attention(query, key, key_padding_mask=padding)  # all steps at once, query (B, L, 512)
    projected = attention.project_key(key)                              # or once, and then step by step, state (B, 512)
    context, weights = attention(state, key, key_padding_mask=padding, projected_key=projected)
"""

import torch
from torch import Tensor, nn

from .. import functional


class _RecurrentAttention(nn.Module):
    """What both have in common: (query, key, value) in, (context, weights) out, in one or in many steps."""

    def __init__(self, query_size: int, key_size: int):
        super().__init__()
        self.query_size, self.key_size = query_size, key_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        projected_key: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The mean of the values under weights that compare the query with each key.

        Args:
            query: (B, L, query_size), or (B, query_size) for one step.
            key: (B, S, key_size), the states of an encoder.
            value: (B, S, Dv); None: the keys.
            key_padding_mask: bool (B, S), True = hidden, as torch.nn's modules take it. A query that sees no key gets context 0
                and weights 0.
            projected_key: what `project_key(key)` gave, where that is done once for many calls.

        Returns:
            context (B, L, Dv) and weights (B, L, S); for one step (B, Dv) and (B, S).

        Raises:
            ValueError, TypeError: an argument does not fit; the text names it.
        """
        _check_sizes("query", query, self.query_size, (2, 3))
        step = query.dim() == 2
        mask = None
        if key_padding_mask is not None:
            _check_padding(key_padding_mask, tuple(key.shape[:2]))
            mask = ~key_padding_mask[:, None]  # (B, 1, S), True = attend
        projected_key = self.project_key(key) if projected_key is None else projected_key
        value = key if value is None else value
        context, weights = self._attend(query[:, None] if step else query, projected_key, value, mask)
        return (context[:, 0], weights[:, 0]) if step else (context, weights)

    def project_key(self, key: Tensor) -> Tensor:
        """The part of the scores that depends on the keys (B, S, key_size) alone, for `forward` to take as projected_key."""
        _check_sizes("key", key, self.key_size, (3,))
        return self._project_key(key)

    def extra_repr(self) -> str:
        return f"query_size={self.query_size}, key_size={self.key_size}"


def _check_sizes(name: str, x: Tensor, size: int, dims: tuple[int, ...]) -> None:
    functional.check_tensor(name, x)
    if x.dim() not in dims or x.shape[-1] != size:
        expected = " or ".join("(batch, length, {})" if d == 3 else "(batch, {})" for d in dims).replace("{}", str(size))
        raise ValueError(f"{name} must have shape {expected}, got {tuple(x.shape)}")


def _check_padding(mask: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"key_padding_mask must be a bool tensor (True = hidden), got {kind}")
    if mask.shape != shape:
        raise ValueError(f"key_padding_mask must have shape {shape}, got {tuple(mask.shape)}")


class AdditiveAttention(_RecurrentAttention):
    """Scores v · tanh(W query + U key) (Bahdanau et al. 2015, appendix A.1.2), W, U and v without a bias.

    Args:
        query_size: of the decoder's states; the paper takes the previous one.
        key_size: of the encoder's states.
        hidden_size: of W query + U key.
    """

    def __init__(self, query_size: int, key_size: int, hidden_size: int, device=None, dtype=None):
        if hidden_size < 1:
            raise ValueError(f"hidden_size must be at least 1, got {hidden_size}")
        super().__init__(query_size, key_size)
        self.query_projection = nn.Linear(query_size, hidden_size, bias=False, device=device, dtype=dtype)  # W
        self.key_projection = nn.Linear(key_size, hidden_size, bias=False, device=device, dtype=dtype)  # U
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))  # v
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.query_projection.reset_parameters()
        self.key_projection.reset_parameters()
        bound = self.weight.numel() ** -0.5  # as nn.Linear(hidden_size, 1)
        nn.init.uniform_(self.weight, -bound, bound)

    def _project_key(self, key: Tensor) -> Tensor:
        return self.key_projection(key)  # (B, S, hidden)

    def _attend(self, query, projected_key, value, mask):
        query = self.query_projection(query)  # (B, L, hidden)
        return functional.additive_attention(query, projected_key, value, self.weight, mask=mask, return_weights=True)


class LuongAttention(_RecurrentAttention):
    """Scores of a query, the decoder's current state, and a key (Luong et al. 2015, section 3.1).

    Args:
        query_size: of the decoder's states.
        key_size: of the encoder's states.
        score: "dot": query · key, of one size; "general": query · W key; "concat": v · tanh(W [query; key]), with a hidden
            layer of query_size.
    """

    def __init__(self, query_size: int, key_size: int, score: str = "dot", device=None, dtype=None):
        if score not in ("dot", "general", "concat"):
            raise ValueError(f'score must be "dot", "general" or "concat", got {score!r}')
        if score == "dot" and query_size != key_size:
            raise ValueError(f'score="dot" needs query_size and key_size to be equal, got {query_size} and {key_size}')
        super().__init__(query_size, key_size)
        self.score = score
        if score == "general":
            self.key_projection = nn.Linear(key_size, query_size, bias=False, device=device, dtype=dtype)
        elif score == "concat":  # W [query; key] = W1 query + W2 key
            self.additive = AdditiveAttention(query_size, key_size, query_size, device=device, dtype=dtype)

    def _project_key(self, key: Tensor) -> Tensor:
        if self.score == "concat":
            return self.additive.project_key(key)  # (B, S, query_size), as the others'
        return self.key_projection(key) if self.score == "general" else key

    def _attend(self, query, projected_key, value, mask):
        if self.score == "concat":
            return self.additive._attend(query, projected_key, value, mask)
        heads = (x[:, None] for x in (query, projected_key, value))  # (B, 1, length, size)
        mask = None if mask is None else mask[:, None]  # (B, 1, 1, S)
        context, weights = functional.attention(*heads, mask=mask, scale=1.0, return_weights="mean")
        return context[:, 0], weights

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, score={self.score!r}"
