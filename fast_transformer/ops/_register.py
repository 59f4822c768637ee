"""What the ops' registrations share."""

from collections.abc import Callable

import torch
from torch import Tensor

_library = torch.library.Library("fast_transformer", "IMPL")


def impl_autograd(op: str, recorded: Callable) -> None:
    """Registers `recorded` as what `fast_transformer::op` does where autograd records it (double backward)."""
    kernel = getattr(torch.ops.fast_transformer, op).default

    def with_autograd(*args):
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args):
            return recorded(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return kernel(*args)

    _library.impl(op, with_autograd, "Autograd")


def differentiable(x: Tensor) -> Tensor:
    """x itself if it is part of a graph, else a leaf of its values to differentiate with respect to."""
    return x if x.requires_grad else x.detach().requires_grad_()
