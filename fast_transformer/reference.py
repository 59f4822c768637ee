"""Every fused op in plain PyTorch: the specification, the fallback and the oracle of the tests.

Arguments arrive validated (`functional` does that). Half-precision inputs are computed in float32 and rounded once, at the
end; float64 stays float64. Everything here can be differentiated any number of times, forward and backward, and vmapped.
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

PHILOX_ROUNDS = 7  # csrc/philox.h says why, and states the counter layout
_U32 = 0xFFFFFFFF

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that arithmetic is done in: float64 stays, everything else becomes float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their own dtype: autocast would round them to half precision."""
    kind = a.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        return a @ b


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor], rounds: int = PHILOX_ROUNDS) -> tuple[Tensor, ...]:
    """Philox4x32 (Salmon et al., SC 2011): four 32-bit words for every four-word counter, all held in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # 64-bit products; int64 wraps, which keeps all 64 bits
        c0, c1, c2, c3 = (p1 >> 32 & _U32) ^ c1 ^ k0, p1 & _U32, (p0 >> 32 & _U32) ^ c3 ^ k1, p0 & _U32
        k0, k1 = k0 + 0x9E3779B9 & _U32, k1 + 0xBB67AE85 & _U32
    return c0, c1, c2, c3


def keep_threshold(dropout_p: float) -> int:
    """How many of the 65536 values of a 16-bit decision keep the element; the scale of what is kept is its exact inverse."""
    return max(1, round((1.0 - dropout_p) * 65536))


def keep_mask(seed: Tensor, shape: torch.Size, dropout_p: float) -> Tensor:
    """Bool mask of `shape`, True = kept, from a 0-dim int64 `seed`. A function of the coordinates alone: see csrc/philox.h."""
    n = shape[-1]
    row = torch.arange(math.prod(shape[:-1]), device=seed.device)[:, None]
    block = torch.arange((n + 7) // 8, device=seed.device)[None, :]
    words = philox((block, row & _U32, row >> 32, torch.zeros_like(block)), (seed & _U32, seed >> 32 & _U32))
    decisions = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)  # (rows, blocks, 8)
    return (decisions.flatten(1)[:, :n] < keep_threshold(dropout_p)).reshape(shape)


def dropout(x: Tensor, *, dropout_p: float, seed: Tensor | None) -> Tensor:
    """x with each element kept and scaled, or 0."""
    return activation_dropout(x, None, "none", dropout_p=dropout_p, seed=seed)


def activation_dropout(x: Tensor, bias: Tensor | None, activation: str, *, dropout_p: float, seed: Tensor | None) -> Tensor:
    """dropout(activation(x + bias)), x (..., N), bias (N,) or None."""
    y = wide(x)
    if bias is not None:
        y = y + wide(bias)
    y = ACTIVATIONS[activation](y)
    if dropout_p > 0.0:
        y = torch.where(keep_mask(seed, y.shape, dropout_p), y * (65536 / keep_threshold(dropout_p)), 0.0)
    return y.to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """torch's own product, the better kernel for many rows; in half precision it rounds once more, before the activation."""
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def _dropout_add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    rms: bool,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    total = dropout(wide(x), dropout_p=dropout_p, seed=seed)
    stream = total.dtype if residual_in_fp32 else x.dtype
    if residual is not None:
        total = total + wide(residual)
    if prenorm:
        total = wide(total.to(stream))  # what is normalised is the sum as returned
    out = total if rms else total - total.mean(-1, keepdim=True)
    out = out * (out.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        out = out * wide(weight)
    if bias is not None:
        out = out + wide(bias)
    return (out.to(x.dtype), total.to(stream)) if prenorm else out.to(x.dtype)


def dropout_add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, **options
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm(residual + dropout(x)) over the last dimension, x (..., N); with `prenorm` also the sum itself."""
    return _dropout_add_norm(x, residual, weight, bias, rms=False, **options)


def dropout_add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, **options
) -> Tensor | tuple[Tensor, Tensor]:
    """The same for RMSNorm, which subtracts no mean and adds no bias."""
    return _dropout_add_norm(x, residual, weight, None, rms=True, **options)


def visible_keys(
    L: int,
    S: int,
    *,
    mask: Tensor | None,
    causal: bool,
    query_offset: int,
    window: tuple[int | None, int | None] | None,
    device: torch.device,
) -> Tensor | None:
    """Bool, broadcastable to (B, H, L, S): which keys each query may attend to; None when it may attend to all."""
    left, right = window or (None, None)
    if causal:
        right = 0  # a window never ends before the query itself
    if left is not None or right is not None:
        distance = torch.arange(S, device=device) - (torch.arange(L, device=device)[:, None] + query_offset)  # (L, S)
        if left is not None:
            mask = distance >= -left if mask is None else mask & (distance >= -left)
        if right is not None:
            mask = distance <= right if mask is None else mask & (distance <= right)
    return mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    query_offset: int,
    window: tuple[int | None, int | None] | None,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    seed: Tensor | None,
    return_weights: str | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, ...]:
    """Softmax attention (Vaswani et al. 2017, eq. 1) with everything `functional.attention` names."""
    q, k, v = wide(query), wide(key), wide(value)
    if q.shape[1] != k.shape[1]:  # grouped-query: each key head serves a run of query heads
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = _matmul(q * scale, k.transpose(-2, -1))  # (B, H, L, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_keys(
        q.shape[2], k.shape[2], mask=mask, causal=causal, query_offset=query_offset, window=window, device=q.device
    )
    hidden = None if visible is None else ~visible
    if bias is not None:
        bias = bias.to(scores.dtype)
        scores = scores + bias
        hidden = bias == -math.inf if hidden is None else hidden | (bias == -math.inf)
    # A blind row sees no key. It gets some finite scores, so that nothing divides by 0, and zeros where it would show: its
    # output and weights are 0, its LSE is -inf, no gradient passes. `hidden` and `blind` broadcast; they are small.
    blind = None if hidden is None else hidden.all(-1, keepdim=True)
    if hidden is not None:
        scores = scores.masked_fill(hidden & ~blind, -math.inf)
        if bias is not None:
            scores = scores.masked_fill(blind, 0.0)

    def clear(x: Tensor, value: float = 0.0) -> Tensor:
        return x if blind is None else x.masked_fill(blind, value)

    weights = scores.softmax(-1)
    if return_weights is not None:
        weights = clear(weights)
    if dropout_p > 0.0:
        weights = dropout(weights, dropout_p=dropout_p, seed=seed)
    out = clear(_matmul(weights, v)).to(query.dtype)
    extras = []
    if return_weights is not None:
        extras.append((weights if return_weights == "per_head" else weights.mean(1)).to(query.dtype))
    if return_lse:
        extras.append(clear(scores.logsumexp(-1, keepdim=True), -math.inf)[..., 0])
    return (out, *extras) if extras else out


def additive_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """weight · tanh(query + key) for each query (B, L, D) and key (B, S, D): (B, L, S), float32 or float64."""
    hidden = torch.tanh(wide(query)[:, :, None] + wide(key)[:, None])  # (B, L, S, D)
    return _matmul(hidden, wide(weight))


def weighted_values(
    scores: Tensor, value: Tensor, *, mask: Tensor | None, return_weights: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scores) · value, scores (B, L, S) float32 or float64, value (B, S, Dv); 0 where the mask shows a row nothing."""
    if mask is None:
        weights = scores.softmax(-1)
    else:
        blind = ~mask.any(-1, keepdim=True)  # gets its scores as they are, so that nothing divides by 0, and weights of 0
        weights = scores.masked_fill(~(mask | blind), -math.inf).softmax(-1).masked_fill(blind, 0.0)
    out = _matmul(weights, wide(value)).to(value.dtype)
    return (out, weights.to(value.dtype)) if return_weights else out


def additive_attention(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, *, mask: Tensor | None, return_weights: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by a network with one hidden layer (Bahdanau et al. 2015, appendix A.1.2)."""
    scores = additive_scores(query, key, weight)
    return weighted_values(scores, value, mask=mask, return_weights=return_weights)
