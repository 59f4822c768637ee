"""Masks of tokens, in one convention: **True = hidden**, as torch.nn's modules and their twins take them.

Each function's result says which keys are hidden, and goes into a module as it is: `padding_mask` as ..._key_padding_mask,
`look_ahead_mask` and `target_mask` as attn_mask, src_mask or tgt_mask. `functional.attention` takes the opposite, which keys
may be attended to: there, pass `~mask`. Masks are bool and nothing else: a float mask is refused, not reinterpreted.
"""

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tokens(name: str, tokens: Tensor, dims: int = 2) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype not in _INTEGERS:
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"{name} must be an integer tensor of token numbers, got {kind}")
    if tokens.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(tokens.shape)}")


def padding_mask(tokens: Tensor, pad_id: int) -> Tensor:
    """Bool (B, S), True where `tokens` (B, S) are padding: a key that nothing may attend to.

    Raises:
        TypeError: tokens that are no integers, such as a mask.
        ValueError: tokens without two dimensions.
    """
    check_tokens("tokens", tokens)
    return tokens == pad_id


def causal_mask(L: int, S: int, device: torch.device | str | None) -> Tensor:
    """Bool (L, S), True where key j comes after query i: j > i."""
    return torch.ones(L, S, dtype=torch.bool, device=device).triu(1)


def look_ahead_mask(n: int, *, device: torch.device | str | None = None) -> Tensor:
    """Bool (n, n), True where the key (column) comes after the query (row): the future, hidden in a decoder.

    Raises:
        ValueError: a negative n.
    """
    if not isinstance(n, (int, torch.SymInt)) or isinstance(n, bool) or n < 0:
        raise ValueError(f"n must be a length, an integer >= 0, got {n!r}")
    return causal_mask(n, n, device)


def target_mask(tokens: Tensor, pad_id: int) -> Tensor:
    """Bool (B, 1, L, L), True where a key is in the future or is padding: both masks of a decoder in one.

    Args: tokens (B, L). Raises as padding_mask does.
    """
    return padding_mask(tokens, pad_id)[:, None, None, :] | look_ahead_mask(tokens.shape[1], device=tokens.device)
