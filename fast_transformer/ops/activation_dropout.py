"""dropout(activation(x + bias)): the fake kernels of the compiled op, the derivative of its backward, and the call.

First derivatives are in csrc/autograd/activation_dropout.cpp.
"""

import torch
from torch import Tensor

from .. import reference
from ._extension import missing
from ._register import check_devices, differentiable, entry, impl_autograd

_call = entry("activation_dropout")


def activation_dropout(x: Tensor, bias: Tensor | None, activation: str, *, dropout_p: float, seed: Tensor | None) -> Tensor:
    return _call(x, bias, activation, dropout_p, seed)


def dropout(x: Tensor, *, dropout_p: float, seed: Tensor | None) -> Tensor:
    return activation_dropout(x, None, "none", dropout_p=dropout_p, seed=seed)


def _forward_fake(x, bias, activation, dropout_p, seed):
    check_devices(x, bias, seed)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward_fake(grad, x, bias, activation, dropout_p, seed, bias_grad):
    check_devices(grad, x, bias, seed)
    grad_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
    return grad_x, reference.wide(grad.new_empty(grad.shape[-1] if bias_grad else 0))


def _backward_recorded(grad, x, bias, activation, dropout_p, seed, bias_grad):
    """The backward op where it is itself differentiated: plain PyTorch, from the reference."""
    grad_wide = reference.dropout(reference.wide(grad), dropout_p=dropout_p, seed=seed)
    if activation != "none":
        inner = differentiable(reference.wide(x) if bias is None else reference.wide(x) + reference.wide(bias))
        (grad_wide,) = torch.autograd.grad(reference.ACTIVATIONS[activation](inner), inner, grad_wide, create_graph=True)
    grad_bias = grad_wide.sum(tuple(range(grad.dim() - 1))) if bias_grad else grad_wide.new_empty(0)
    return grad_wide.to(grad.dtype), grad_bias


if missing is None:
    torch.library.register_fake("fast_transformer::activation_dropout", _forward_fake)
    torch.library.register_fake("fast_transformer::activation_dropout_backward", _backward_fake)
    impl_autograd("activation_dropout_backward", _backward_recorded)
