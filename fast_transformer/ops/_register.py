"""What the ops' registrations share."""

from collections.abc import Callable

import torch
from torch import Tensor

from ._extension import C

library = torch.library.Library("fast_transformer", "FRAGMENT")


def entry(op: str) -> Callable | None:
    """What calls `fast_transformer::op`: torch.ops where torch.compile traces, else the module's own function.

    Both go through the dispatcher; the latter spends some microseconds less on reading its arguments.
    """
    if C is None:
        return None
    traced, direct = getattr(torch.ops.fast_transformer, op).default, getattr(C, op)

    def call(*args):
        return traced(*args) if torch.compiler.is_compiling() else direct(*args)

    return call


def impl_autograd(op: str, recorded: Callable) -> None:
    """Registers `recorded` as what `fast_transformer::op` does where autograd records it (double backward)."""
    kernel = getattr(torch.ops.fast_transformer, op).default

    def with_autograd(*args):
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args):
            return recorded(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return kernel(*args)

    library.impl(op, with_autograd, "Autograd")


def differentiable(x: Tensor) -> Tensor:
    """x to differentiate with respect to: a node of its own behind x, or a leaf of its values if x is not part of a graph.

    Of its own, because x may depend on another input or carry hooks: neither is this derivative's business.
    """
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def check_devices(*tensors: Tensor | None) -> None:
    """Refuses, in a fake kernel, what the kernels refuse: tensors of several devices."""
    devices = {str(t.device) for t in tensors if t is not None}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(sorted(devices))}")
