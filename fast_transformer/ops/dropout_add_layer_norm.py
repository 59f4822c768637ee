"""LayerNorm and RMSNorm of residual + dropout(x): the fake kernels of the op, the derivative of its backward, the calls.

First derivatives are in csrc/autograd/dropout_add_layer_norm.cpp. One op does both norms: RMSNorm leaves out the mean.
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
    residual_in_fp32: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    out, total, _ = _call(x, residual, weight, bias, eps, dropout_p, seed, False, prenorm, residual_in_fp32)
    return (out, total) if prenorm else out


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    out, total, _ = _call(x, residual, weight, None, eps, dropout_p, seed, True, prenorm, residual_in_fp32)
    return (out, total) if prenorm else out


def _forward_fake(x, residual, weight, bias, eps, dropout_p, seed, rms, prenorm, residual_in_fp32):
    check_devices(x, residual, weight, bias, seed)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out) if prenorm else x.new_empty(0)
    stats = reference.wide(x.new_empty(x.numel() // x.shape[-1], 2))
    return out, reference.wide(total) if residual_in_fp32 else total, stats


def _backward_fake(grad_out, grad_sum, x, residual, weight, stats, eps, dropout_p, seed, rms, weight_grad, bias_grad):
    check_devices(grad_out, grad_sum, x, residual, weight, stats, seed)
    grad_x = torch.empty_like(grad_out, memory_format=torch.contiguous_format)
    grad_total = torch.empty_like(grad_x, dtype=x.dtype if residual is None else residual.dtype)
    if dropout_p == 0.0 and grad_total.dtype == grad_x.dtype:
        grad_x = grad_out.new_empty(0)
    n = grad_out.shape[-1]
    return grad_total, grad_x, stats.new_empty(n if weight_grad else 0), stats.new_empty(n if bias_grad else 0)


def _backward_recorded(grad_out, grad_sum, x, residual, weight, stats, eps, dropout_p, seed, rms, weight_grad, bias_grad):
    """The backward op where it is itself differentiated: plain PyTorch, from the reference."""
    total = None if residual is None else reference.wide(residual)
    if x is not None:
        dropped = reference.dropout(reference.wide(x), dropout_p=dropout_p, seed=seed)
        total = dropped if total is None else total + dropped
    total = differentiable(total)
    norm, no_parameters = (reference.dropout_add_rms_norm, 1) if rms else (reference.dropout_add_layer_norm, 2)
    options = {"dropout_p": 0.0, "seed": None, "prenorm": False, "residual_in_fp32": False}
    normed = norm(total, None, *[None] * no_parameters, eps=eps, **options)
    wide_grad = reference.wide(grad_out)
    grad_normed = wide_grad if weight is None else wide_grad * reference.wide(weight)
    (grad_total,) = torch.autograd.grad(normed, total, grad_normed, create_graph=True)
    if grad_sum is not None:
        grad_total = grad_total + reference.wide(grad_sum)
    rows = tuple(range(grad_out.dim() - 1))
    none = stats.new_empty(0)
    grad_weight = (wide_grad * normed).sum(rows) if weight_grad else none
    grad_bias = wide_grad.sum(rows) if bias_grad else none
    stream = x.dtype if residual is None else residual.dtype
    two_gradients = dropout_p > 0.0 or stream != grad_out.dtype
    grad_x = reference.dropout(grad_total, dropout_p=dropout_p, seed=seed) if two_gradients else none
    return grad_total.to(stream), grad_x.to(grad_out.dtype), grad_weight, grad_bias


if missing is None:
    torch.library.register_fake("fast_transformer::dropout_add_layer_norm", _forward_fake)
    torch.library.register_fake("fast_transformer::dropout_add_layer_norm_backward", _backward_fake)
    impl_autograd("dropout_add_layer_norm_backward", _backward_recorded)
