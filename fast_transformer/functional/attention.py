"""Softmax attention and additive attention."""

import math

import torch
from torch import Tensor

from .. import ops, reference
from . import _random
from ._backends import check_backend, ready, use, why_not_cpu, why_not_triton
from ._checks import check_broadcast, check_flag, check_mask, check_number, check_probability, check_tensor, plain

_MAX_LENGTH = 2**62  # positions and their differences fit into 64 bits


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    query_offset: int = 0,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_weights: str | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale · query · keyᵀ + bias) · value, with masks, dropout and attention weights (Vaswani et al. 2017, eq. 1).

    A query that may attend to nothing gives output 0, weights 0, LSE -inf and zero gradients, never NaN. Under autocast
    query, key and value are cast as `F.scaled_dot_product_attention` casts them.

    Args:
        query: (B, H, L, D), any strides.
        key: (B, Hkv, S, D). H is a multiple of Hkv: each key head serves H / Hkv query heads in a row.
        value: (B, Hkv, S, Dv).
        mask: bool, broadcastable to (B, H, L, S), **True = attend** (as F.scaled_dot_product_attention; the modules of
            torch.nn mean the opposite).
        bias: float, broadcastable to (B, H, L, S), added to the scaled scores; may hold -inf; differentiable.
        causal: query i, at position i + query_offset, sees keys j <= that position.
        query_offset: position of the first query among the keys: S - L aligns the last query with the last key.
        window: (left, right): a query sees keys at most that far before and after its position; None = no limit.
        scale: factor of the scores, 1/sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap), before bias.
        dropout_p: probability, in [0, 1), with which a weight is dropped; quantised to 1/65536.
        return_weights: "mean" adds the weights averaged over heads, (B, L, S); "per_head" adds (B, H, L, S). As torch.nn
            returns them: after dropout. Differentiable.
        return_lse: adds the natural-log log-sum-exp of the scores, (B, H, L), float32 (float64 for float64).
        backend: None chooses; "cpu", "triton" or "reference" insists.

    Returns:
        (B, H, L, Dv) in query's dtype, or a tuple (output[, weights][, lse]).

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    quick = ready(query, key, value)
    if not quick:
        query, key, value = _autocast(query, key, value)
    if not _fit(query, key, value, quick):
        _check_query_key_value(query, key, value)
    _check_options(query, key, mask, bias, causal, query_offset, window, return_weights)
    if scale is None:
        scale = query.shape[3] ** -0.5
    else:
        scale = check_number("scale", scale, "a finite number", -math.inf, math.inf, open_low=True)
    if softcap is not None:
        softcap = check_softcap(softcap)
    dropout_p = check_probability("dropout_p", dropout_p)
    check_backend(backend, "cpu", "triton", "reference")
    if use("cpu", backend, None if quick and bias is None else why_not_cpu(query, key, value, bias)):
        op = ops.attention
    elif (query.is_cuda or backend == "triton") and use("triton", backend, _why_not_triton_attention(query, value, key, bias)):
        op = ops.attention_triton
    else:
        op = reference.attention
    return op(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        causal=causal,
        query_offset=query_offset,
        window=window,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        seed=_random.draw_seed(dropout_p, query.device),
        return_weights=return_weights,
        return_lse=return_lse,
    )


def _check_options(query, key, mask, bias, causal, query_offset, window, return_weights) -> None:
    if mask is not None or bias is not None:
        scores = (*query.shape[:3], key.shape[2])
    if mask is not None:
        check_mask(mask, query, scores, "; additive scores go into bias=")
    if bias is not None:
        check_tensor("bias", bias, like=query)
        check_broadcast("bias", bias, scores)
    if not isinstance(causal, (bool, torch.SymBool)):
        raise TypeError(f"causal must be True or False, got {type(causal).__name__}; a tensor goes into mask=")
    if not isinstance(query_offset, (int, torch.SymInt)) or isinstance(query_offset, bool):
        raise TypeError(f"query_offset must be an int, got {query_offset!r}")
    if not -_MAX_LENGTH < query_offset < _MAX_LENGTH:
        raise ValueError(f"query_offset must be in (-2**62, 2**62), got {query_offset}")
    if window is not None:
        check_window(window)
    if return_weights is not None and return_weights not in ("mean", "per_head"):
        raise ValueError(f'return_weights must be None, "mean" or "per_head", got {return_weights!r}')


def _fit(query, key, value, quick) -> bool:
    """Whether these three are right and what they usually are, without a word on what is wrong."""
    if ops.missing is not None or torch.compiler.is_compiling() or key is None or value is None:
        return False
    return (quick or plain(query, key, value)) and ops.heads_fit(query, key, value)


def _check_query_key_value(query, key, value) -> None:
    check_tensor("query", query)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, like=query)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, heads, length, head_dim), got shape {tuple(x.shape)}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype}, {value.dtype}")
    (B, H, _, D), (_, Hkv, S, _) = query.shape, key.shape
    if key.shape[0] != B or key.shape[3] != D:
        raise ValueError(
            f"key must have the batch size and head_dim of query, {B} and {D}; "
            f"got query {tuple(query.shape)}, key {tuple(key.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value must be (B, Hkv, S, Dv) = {(B, Hkv, S)} + (Dv,) like key, got {tuple(value.shape)}")
    if H == 0 or Hkv == 0 or H % Hkv != 0:
        raise ValueError(f"query heads must be a multiple of key heads, both at least 1, got {H} and {Hkv}")
    if D == 0 or value.shape[3] == 0:
        raise ValueError(f"head_dim must be at least 1, got {D} for query and key, {value.shape[3]} for value")


def check_window(window: tuple[int | None, int | None] | None) -> None:
    if window is None:
        return
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right), got {window!r}")
    for side in window:
        if side is not None and (not isinstance(side, (int, torch.SymInt)) or not 0 <= side < _MAX_LENGTH):
            raise ValueError(f"window must hold two integers in [0, 2**62) (or None for no limit), got {tuple(window)}")


def check_softcap(softcap: float | None) -> float | None:
    return None if softcap is None else check_number("softcap", softcap, "a finite number > 0", 0, math.inf, open_low=True)


def _why_not_triton_attention(query: Tensor, value: Tensor, *others: Tensor | None) -> str | None:
    if max(query.shape[3], value.shape[3]) > 256:
        return f"head_dim is at most 256, got {query.shape[3]} for query and key, {value.shape[3]} for value"
    return why_not_triton(query, value, *others)


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    mask: Tensor | None = None,
    return_weights: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scores) · value with scores[b, l, s] = weight · tanh(query[b, l] + key[b, s]) (Bahdanau et al. 2015, A.1.2).

    The B × L × S × D hyperbolic tangents exist nowhere at once: backward computes them again. Scores are float32 (float64 for
    float64). A query that may attend to nothing gives output 0, weights 0 and zero gradients, never NaN. Under autocast query,
    key, value and weight are cast as those of `attention`.

    Args:
        query: (B, L, D), already projected, any strides.
        key: (B, S, D), already projected.
        value: (B, S, Dv).
        weight: (D,), the vector v of the paper.
        mask: bool, broadcastable to (B, L, S), **True = attend**; padding of shape (B, S) goes in as `mask[:, None]`.
        return_weights: also return the attention weights, (B, L, S), differentiable.
        backend: None chooses; "cpu", "triton" or "reference" insists.

    Returns:
        (B, L, Dv) in query's dtype; with `return_weights` the tuple (that, weights (B, L, S) in query's dtype).

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    query, key, value, weight = _autocast(query, key, value, weight)
    _check_additive_attention(query, key, value, weight, mask)
    check_flag("return_weights", return_weights)
    check_backend(backend, "cpu", "triton", "reference")
    if use("cpu", backend, why_not_cpu(query, key, value, weight)):
        scores = ops.additive_scores(query, key, weight)
    elif (query.is_cuda or backend == "triton") and use("triton", backend, why_not_triton(query, key, value, weight)):
        scores = ops.additive_scores_triton(query, key, weight)
    else:
        scores = reference.additive_scores(query, key, weight)
    return reference.weighted_values(scores, value, mask=mask, return_weights=return_weights)


def _check_additive_attention(query, key, value, weight, mask) -> None:
    check_tensor("query", query)
    for name, x, sizes in (
        ("query", query, "batch, length, size"),
        ("key", key, "batch, length, size"),
        ("value", value, "batch, length, size"),
        ("weight", weight, "size,"),
    ):
        check_tensor(name, x, like=query)
        if x.dim() != (1 if x is weight else 3):
            raise ValueError(f"{name} must have shape ({sizes}), got {tuple(x.shape)}")
    if not query.dtype == key.dtype == value.dtype == weight.dtype:
        dtypes = f"{query.dtype}, {key.dtype}, {value.dtype}, {weight.dtype}"
        raise TypeError(f"query, key, value and weight must have one dtype, got {dtypes}")
    (B, L, D), S = query.shape, key.shape[1]
    if key.shape[0] != B or key.shape[2] != D:
        raise ValueError(
            f"key must have the batch size and last size of query, {B} and {D}; "
            f"got query {tuple(query.shape)}, key {tuple(key.shape)}"
        )
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(f"value must be (B, S, Dv) = {(B, S)} + (Dv,) like key, got {tuple(value.shape)}")
    if D == 0 or value.shape[2] == 0:
        raise ValueError(f"sizes must be at least 1, got {D} for query and key, {value.shape[2]} for value")
    if weight.shape != (D,):
        raise ValueError(f"weight must have shape ({D},), the last size of query, got {tuple(weight.shape)}")
    if mask is not None:
        check_mask(mask, query, (B, L, S))


def _autocast(*tensors: object) -> tuple[object, ...]:
    """The arguments as autocast casts those of F.scaled_dot_product_attention; what it leaves alone stays as it is."""
    first = tensors[0]
    kind = first.device.type if isinstance(first, Tensor) and not first.is_cpu else "cpu"
    if kind != "cpu" and not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)

    def cast(x):
        leave = not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64
        return x if leave else x.to(dtype)

    return tuple(cast(x) for x in tensors)
