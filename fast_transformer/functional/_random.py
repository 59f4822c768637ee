"""The seed of dropout. The ops call it as `_random.draw_seed`, so that a test can replace it for all of them in one place."""

import torch
from torch import Tensor


def draw_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """A 64-bit seed from torch's generator of that device; it stays there, so nothing waits for it."""
    return torch.randint(2**63 - 1, (), device=device) if dropout_p > 0.0 else None
