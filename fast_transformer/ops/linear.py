"""activation(x weightᵀ + bias): the fake kernels of two compiled ops, and their calls.

`linear` is for few rows and computes no gradient. `linear_onednn` has torch's oneDNN do the product and those of its gradients.
"""

import torch
from torch import Tensor

from .. import reference
from ._extension import missing
from ._register import check_devices, entry, impl_autograd

has_onednn = torch.backends.mkldnn.is_available()
_call, _call_onednn = entry("linear"), entry("linear_onednn")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return _call(x, weight, bias, activation)


def linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return reference.ACTIVATIONS[activation](_call_onednn(x, weight, bias, "none"))
    return _call_onednn(x, weight, bias, activation)


def _fake(x, weight, bias, activation):
    check_devices(x, weight, bias)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _backward_fake(grad, x, weight, bias_grad):
    check_devices(grad, x, weight)
    grad_x = grad.new_empty(0) if weight is None else grad.new_empty(*grad.shape[:-1], weight.shape[1])
    grad_weight = grad.new_empty(0) if x is None else grad.new_empty(grad.shape[-1], x.shape[-1])
    return grad_x, grad_weight, grad.new_empty(grad.shape[-1] if bias_grad else 0)


def _backward_recorded(grad, x, weight, bias_grad):
    """The backward op where it is itself differentiated: plain PyTorch."""
    rows = grad.flatten(0, -2)
    grad_x = grad.new_empty(0) if weight is None else grad @ weight
    grad_weight = grad.new_empty(0) if x is None else rows.T @ x.flatten(0, -2)
    return grad_x, grad_weight, rows.sum(0) if bias_grad else grad.new_empty(0)


if missing is None:
    torch.library.register_fake("fast_transformer::linear", _fake)
    torch.library.register_fake("fast_transformer::linear_onednn", _fake)
    torch.library.register_fake("fast_transformer::linear_onednn_backward", _backward_fake)
    impl_autograd("linear_onednn_backward", _backward_recorded)
