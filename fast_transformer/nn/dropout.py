"""Dropout on the package's own random stream (csrc/philox.h)."""

import torch
from torch import Tensor

from .. import functional
from ._scripted import scriptable


class Dropout(torch.nn.Dropout):
    """torch.nn.Dropout with its mask from `functional.dropout`: the same mask on every backend, and no mask kept for backward.

    Args:
        p: probability of an element to be zeroed, 0.5 by default.
        inplace: writes the result into the input.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        if self.p == 1.0 or input.is_nested:
            return super().forward(input)  # `functional` wants something to be kept, and a padded tensor
        out = functional.dropout(input, self.p)
        return input.copy_(out) if self.inplace else out

    __prepare_scriptable__ = scriptable
