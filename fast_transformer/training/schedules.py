"""Schedules: functions of the number of steps made, from 0, that return what the learning rate is multiplied by.

They are functions and nothing else: nothing to save, nothing to call at the right moment, and LambdaLR takes them, too.
"""

import math
from collections.abc import Callable


def check_counts(**counts: int) -> None:
    """Each must be an integer, at least 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} must be an integer, got {count!r}")
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def noam(d_model: int, warmup: int = 4000, scale: float = 1.0) -> Callable[[int], float]:
    """Linear warm-up, then the inverse square root (Vaswani et al. 2017, section 5.3), for an optimizer with a rate of 1.

    Returns:
        A function of the number of steps made, from 0. The paper counts the steps from 1: the first has a rate of
        scale * d_model^-0.5 * warmup^-1.5, step number `warmup` the highest.
    """
    check_counts(d_model=d_model, warmup=warmup)
    return lambda step: scale * d_model**-0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


def cosine(steps: int, warmup: int = 0, *, peak: float, end: float = 0.0) -> Callable[[int], float]:
    """Linear warm-up to `peak`, then half a cosine (Loshchilov and Hutter 2017, equation 5) down to `end` after `steps` steps.

    Both are in units of the optimizer's rate: that of the Trainer's own is 1, and a peak of 1e-3 may suit it.

    Returns:
        A function of the number of steps made, from 0. It is `peak` at `warmup`; neither the first nor the last of the `steps`
        steps has a factor of 0.
    """
    check_counts(steps=steps)
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup must be in [0, steps), steps is {steps}, got {warmup}")

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / (steps - warmup))
        return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2

    return rate
