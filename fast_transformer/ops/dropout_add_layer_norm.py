"""LayerNorm(residual + dropout(x)): the fake kernels of the compiled op, the derivative of its backward, and the call.

First derivatives are in csrc/autograd/dropout_add_layer_norm.cpp.
"""

import torch
from torch import Tensor

from .. import reference
from ._extension import missing
from ._register import check_devices, differentiable, entry, impl_autograd

_call = entry("dropout_add_layer_norm")


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    prenorm: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    out, total, _ = _call(x, residual, weight, bias, eps, dropout_p, seed, prenorm)
    return (out, total) if prenorm else out


def _forward_fake(x, residual, weight, bias, eps, dropout_p, seed, prenorm):
    check_devices(x, residual, weight, bias, seed)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out) if prenorm else x.new_empty(0)
    return out, total, reference.wide(x.new_empty(x.numel() // x.shape[-1], 2))


def _backward_fake(grad_out, grad_sum, x, residual, x_is_sum, weight, stats, eps, dropout_p, seed, parameter_grads):
    check_devices(grad_out, grad_sum, x, residual, weight, stats, seed)
    grad_total = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_x = torch.empty_like(grad_total) if dropout_p > 0.0 else x.new_empty(0)
    n = x.shape[-1] if parameter_grads else 0
    return grad_total, grad_x, stats.new_empty(n), stats.new_empty(n)


def _backward_recorded(grad_out, grad_sum, x, residual, x_is_sum, weight, stats, eps, dropout_p, seed, parameter_grads):
    """The backward op where it is itself differentiated: plain PyTorch, from the reference."""
    total = reference.wide(x)
    if not x_is_sum:
        total = reference.dropout(total, dropout_p=dropout_p, seed=seed)
        total = total if residual is None else total + reference.wide(residual)
    total = differentiable(total)
    normed = reference.dropout_add_layer_norm(total, None, None, None, eps=eps, dropout_p=0.0, seed=None, prenorm=False)
    grad_out = reference.wide(grad_out)
    grad_normed = grad_out if weight is None else grad_out * reference.wide(weight)
    (grad_total,) = torch.autograd.grad(normed, total, grad_normed, create_graph=True)
    if grad_sum is not None:
        grad_total = grad_total + reference.wide(grad_sum)
    rows = tuple(range(x.dim() - 1))
    grad_weight = (grad_out * normed).sum(rows) if parameter_grads else stats.new_empty(0)
    grad_bias = grad_out.sum(rows) if parameter_grads else stats.new_empty(0)
    grad_x = reference.dropout(grad_total, dropout_p=dropout_p, seed=seed) if dropout_p > 0.0 else stats.new_empty(0)
    return grad_total.to(x.dtype), grad_x.to(x.dtype), grad_weight, grad_bias


if missing is None:
    torch.library.register_fake("fast_transformer::dropout_add_layer_norm", _forward_fake)
    torch.library.register_fake("fast_transformer::dropout_add_layer_norm_backward", _backward_fake)
    impl_autograd("dropout_add_layer_norm_backward", _backward_recorded)
