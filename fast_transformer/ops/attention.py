"""Softmax attention: the compiled op and the one in Triton, their fake kernels and derivatives, and their calls.

First derivatives of the compiled op are in csrc/autograd/attention.cpp. The ops know no causal mask, window or offset, only the
band they make: query i sees the keys i + first to i + last.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from .. import reference
from ._extension import missing
from ._register import check_devices, differentiable, entry, impl_autograd, library

_UNLIMITED = 2**62


def _attention(
    call: Callable[..., tuple[Tensor, Tensor, Tensor]],
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
    out, weights, lse = call(
        query, key, value, mask, bias, first, last, scale, softcap or 0.0, dropout_p, seed, return_weights, return_lse
    )
    if return_weights is None:
        return (out, lse) if return_lse else out
    return (out, weights, lse) if return_lse else (out, weights)


attention = partial(_attention, entry("attention"))


def _heads(like: Tensor, size: int) -> Tensor:
    """(B, H, L, size) that lies as (B, L, H, size)."""
    B, H, L, _ = like.shape
    return like.new_empty_strided((B, H, L, size), (L * H * size, size, H * size, 1))


def _gradient(x: Tensor) -> Tensor:
    """A gradient of x, as the ops return it: contiguous if x is, so that autograd need not copy it, else as `_heads`."""
    return torch.empty_like(x) if x.is_contiguous() else _heads(x, x.shape[3])


def _forward_fake(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed, return_weights, with_lse):
    check_devices(query, key, value, mask, bias, seed)
    (B, H, L, _), S = query.shape, key.shape[2]
    weights = {None: (0,), "mean": (B, L, S), "per_head": (B, H, L, S)}[return_weights]
    lse = reference.wide(query.new_empty(B, H, L) if with_lse else query.new_empty(0))
    return _heads(query, value.shape[3]), query.new_empty(weights), lse


def _backward_fake(grad_out, grad_weights, grad_lse, query, key, value, mask, bias, *rest):
    check_devices(grad_out, grad_weights, grad_lse, query, key, value, mask, bias)
    grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if rest[-1] else query.new_empty(0)
    return *map(_gradient, (query, key, value)), grad_bias


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


# The op in Triton. Its kernels are imported by the first call: that takes a while.

triton_missing = None if importlib.util.find_spec("triton") else "Triton is not installed; `pip install triton` on Linux"

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, SymInt first, SymInt last, float scale, "
    "float softcap, float dropout_p, Tensor? seed, str? return_weights"
)
library.define(f"attention_triton({_ARGUMENTS}) -> (Tensor out, Tensor weights, Tensor lse)")
library.define(
    f"attention_triton_backward(Tensor grad_out, Tensor? grad_weights, Tensor? grad_lse, {_ARGUMENTS}, Tensor out, Tensor lse, "
    "bool bias_grad) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias)"
)


def triton_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors: very slow, for tests and for debugging."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "y", "on")


@cache
def _kernels():
    from ..triton_kernels import attention

    return attention


def _triton_forward(query, *rest):
    with torch.cuda.device_of(query):
        return _kernels().attention_forward(query, *rest)


def _triton_backward(grad_out, *rest):
    with torch.cuda.device_of(grad_out):
        return _kernels().attention_backward(grad_out, *rest)


def _keep(ctx, inputs, output):
    query, key, value, mask, bias, *options, seed, return_weights = inputs
    out, weights, lse = output
    ctx.save_for_backward(query, key, value, mask, bias, seed, out, lse)
    ctx.options, ctx.return_weights = options, return_weights
    ctx.set_materialize_grads(False)
    if return_weights is None:
        ctx.mark_non_differentiable(weights)


def _differentiate(ctx, grad_out, grad_weights, grad_lse):
    query, key, value, mask, bias, seed, out, lse = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    inputs = (query, key, value, mask, bias, *ctx.options, seed, ctx.return_weights)
    bias_grad = ctx.needs_input_grad[4]
    grads = torch.ops.fast_transformer.attention_triton_backward(grad_out, grad_weights, grad_lse, *inputs, out, lse, bias_grad)
    return *grads[:3], None, grads[3] if bias_grad else None, *(None,) * 7


library.impl("attention_triton", _triton_forward, "CompositeExplicitAutograd")
library.impl("attention_triton_backward", _triton_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fast_transformer::attention_triton", partial(_forward_fake, with_lse=True), lib=library)
torch.library.register_fake("fast_transformer::attention_triton_backward", _backward_fake, lib=library)
torch.library.register_autograd("fast_transformer::attention_triton", _differentiate, setup_context=_keep, lib=library)
impl_autograd("attention_triton_backward", _backward_recorded)


def _call_triton(*args):
    """As the compiled op, whose last argument is whether to return the log-sum-exp: here it always is."""
    return torch.ops.fast_transformer.attention_triton(*args[:-1])


attention_triton = partial(_attention, _call_triton)
