"""Softmax attention: the fake kernels of the compiled op, the derivative of its backward, and the call.

First derivatives are in csrc/autograd/attention.cpp. The op knows no causal mask, window or offset, only the band they make:
query i sees the keys i + first to i + last.
"""

import torch
from torch import Tensor

from .. import reference
from ._extension import missing
from ._register import check_devices, differentiable, entry, impl_autograd

_call = entry("attention")

_UNLIMITED = 2**62


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
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    first = -_UNLIMITED if left is None else query_offset - left
    last = _UNLIMITED if right is None else query_offset + right
    out, weights, lse = _call(
        query, key, value, mask, bias, first, last, scale, softcap or 0.0, dropout_p, seed, return_weights, return_lse
    )
    if return_weights is None:
        return (out, lse) if return_lse else out
    return (out, weights, lse) if return_lse else (out, weights)


def _heads(like: Tensor, size: int) -> Tensor:
    """(B, H, L, size) that lies as (B, L, H, size)."""
    B, H, L, _ = like.shape
    return like.new_empty(B, L, H, size).transpose(1, 2)


def _forward_fake(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, return_weights, with_lse):
    check_devices(query, key, value, mask, bias, seed)
    (B, H, L, _), S = query.shape, key.shape[2]
    weights = {None: (0,), "mean": (B, L, S), "per_head": (B, H, L, S)}[return_weights]
    lse = reference.wide(query.new_empty(B, H, L) if with_lse else query.new_empty(0))
    return _heads(query, value.shape[3]), query.new_empty(weights), lse


def _backward_fake(grad_out, grad_weights, grad_lse, query, key, value, mask, bias, *rest):
    check_devices(grad_out, grad_weights, grad_lse, query, key, value, mask, bias)
    grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if rest[-1] else query.new_empty(0)
    return *(_heads(x, x.shape[3]) for x in (query, key, value)), grad_bias


def _backward_recorded(
    grad_out,
    grad_weights,
    grad_lse,
    query,
    key,
    value,
    mask,
    bias,
    first,
    last,
    scale,
    softcap,
    dropout_p,
    seed,
    return_weights,
    out,
    lse,
    bias_grad,
):
    """The backward op where it is itself differentiated: plain PyTorch, from the reference."""
    inputs = [differentiable(x) for x in (query, key, value)] + ([differentiable(bias)] if bias_grad else [])
    results = reference.attention(
        *inputs[:3],
        mask=mask,
        bias=inputs[3] if bias_grad else bias,
        causal=False,
        query_offset=0,
        window=(None if first == -_UNLIMITED else -first, None if last == _UNLIMITED else last),
        scale=scale,
        softcap=softcap or None,
        dropout_p=dropout_p,
        seed=seed,
        return_weights=return_weights,
        return_lse=True,
    )
    cotangents = [grad_out, grad_lse] if return_weights is None else [grad_out, grad_weights, grad_lse]
    outputs, cotangents = zip(*((x, g) for x, g in zip(results, cotangents, strict=True) if g is not None), strict=True)
    grads = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True)
    return *grads, *(() if bias_grad else (query.new_empty(0),))


if missing is None:
    torch.library.register_fake("fast_transformer::attention", _forward_fake)
    torch.library.register_fake("fast_transformer::attention_backward", _backward_fake)
    impl_autograd("attention_backward", _backward_recorded)
