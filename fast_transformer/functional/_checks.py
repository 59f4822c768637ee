"""Checks that several ops share: ValueError or TypeError with the argument's name, what was expected and what came."""

import numbers

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import reference
from ._backends import KERNEL_DTYPES, ready


def check_tensor(name: str, x: object, *, like: Tensor | None = None, nested: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}")
    if not (nested and x.is_nested):
        _check_dense(name, x)
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the first argument, got {x.device}")


def _check_dense(name: str, x: Tensor) -> None:
    if x.is_nested:
        raise TypeError(f"{name} is a NestedTensor; pass a padded tensor (x.to_padded_tensor(0.0)) and a mask")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")


def plain(*tensors: Tensor | None) -> bool:
    """Whether these are dense tensors of one floating-point dtype on one device, or None."""
    if ready(*tensors):
        return True
    first = tensors[0]
    dtype = first.dtype if type(first) is Tensor else None
    if dtype not in KERNEL_DTYPES:
        return False
    cpu = first.is_cpu
    for x in tensors:
        if x is None:
            continue
        if type(x) is not Tensor and type(x) is not Parameter or x.dtype is not dtype:
            return False
        if not (x.is_cpu if cpu else x.device == first.device):
            return False
        if x.is_nested or x.layout is not torch.strided:
            return False
    return True


def check_vector(name: str, x: Tensor | None, n: int, like: Tensor) -> None:
    if x is not None:
        check_tensor(name, x, like=like)
        if x.shape != (n,):
            raise ValueError(f"{name} must have shape ({n},), the last size of x, got {tuple(x.shape)}")


def check_number(name: str, value: object, expected: str, low: float, high: float, *, open_low: bool = False) -> float:
    """value as a Python float if it is a real number in [low, high), or with `open_low` in (low, high)."""
    real = type(value) is float or isinstance(value, numbers.Real)  # the second is slow
    if not real or not low <= value < high or (open_low and value == low):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    if type(value) is float:
        return value
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be {expected}, got an integer past the range of float64") from None


def check_flag(name: str, value: object) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_probability(name: str, p: float) -> float:
    return check_number(name, p, "a number in [0, 1)", 0, 1)


def check_mask(mask: Tensor, query: Tensor, scores: tuple[int, ...], otherwise: str = "") -> None:
    """otherwise: what to do with a mask that is not bool."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (True = attend), got {kind}{otherwise}")
    _check_dense("mask", mask)
    if mask.device != query.device:
        raise ValueError(f"mask must be on {query.device} like query, got {mask.device}")
    check_broadcast("mask", mask, scores)


def check_broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.dim() > len(shape) or any(a not in (1, b) for a, b in zip(reversed(x.shape), reversed(shape), strict=False)):
        sizes = "(B, H, L, S)" if len(shape) == 4 else "(B, L, S)"
        raise ValueError(f"{name} must broadcast to {sizes} = {shape}, got {tuple(x.shape)}")


def check_activation(activation: str) -> None:
    if not isinstance(activation, str) or activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, reference.ACTIVATIONS))}, got {activation!r}")
