"""What the ops' registrations share."""

from collections.abc import Callable

import torch
from torch import Tensor

_library = torch.library.Library("fast_transformer", "IMPL")


def impl_autograd(op: str, recorded: Callable) -> None:
    """Registers `recorded` as what `fast_transformer::op` does while autograd records it (double backward)."""

    def with_grad(*args):
        with torch.enable_grad():
            return recorded(*args)

    _library.impl(op, with_grad, "Autograd")


def differentiable(x: Tensor) -> Tensor:
    """x itself if it is part of a graph, else a leaf of its values to differentiate with respect to."""
    return x if x.requires_grad else x.detach().requires_grad_()
