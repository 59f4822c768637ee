"""Linear layer and activation, by the fastest of three paths."""

import math

import torch
from torch import Tensor

from .. import ops, reference
from ._backends import check_backend, ready, use, why_not_cpu
from ._checks import check_activation, check_tensor, plain

_cpu = ops.build_info() or {"cpu_levels": [], "cpu_is_amd": False}
# The number of rows up to which `linear` takes its own kernel, as measured with AVX-512 and with AVX2. With more, F.linear or
# oneDNN overtakes it; but for AVX2 F.linear has no fast product of half precision at all.
if "avx512" in _cpu["cpu_levels"]:
    FEW_ROWS = {torch.float32: 64, torch.bfloat16: 32, torch.float16: 64, torch.float64: 64}
elif "avx2" in _cpu["cpu_levels"]:
    FEW_ROWS = {torch.float32: 32, torch.bfloat16: math.inf, torch.float16: math.inf, torch.float64: 4}
else:
    FEW_ROWS = {torch.float32: 4, torch.bfloat16: 4, torch.float16: 4, torch.float64: 4}
# Products from which `linear` takes oneDNN. MKL, which is behind F.linear, is half as fast where it leaves AVX-512 unused, and
# faster with AVX2. Other processors keep it unmeasured.
ONEDNN_WORK = 2**22 if _cpu["cpu_is_amd"] and "avx512" in _cpu["cpu_levels"] else math.inf


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", *, backend: str | None = None
) -> Tensor:
    """activation(x · weightᵀ + bias), by the fastest of three.

    "cpu" is for few rows without gradients, as in decoding, and with AVX2 for any number in half precision: a kernel bound by
    reading weight, which lies as it is: nothing is packed, so nothing goes stale. A row's result has the same bits beside any
    other rows. "onednn" has torch's oneDNN do large float32 products and those of their gradients on AMD's processors with
    AVX-512, where F.linear, which takes MKL, has half the speed. F.linear ("reference") takes everything else: more rows, other
    devices, autocast, torch.func transforms, tensor subclasses.

    Args:
        x: (..., K).
        weight: (N, K), in the dtype of x.
        bias: (N,) or None, in the dtype of x.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu" or "none".
        backend: None chooses; "cpu", "onednn" (whatever the sizes) or "reference" insists.

    Returns:
        (..., N) in the dtype of x; under autocast as F.linear.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    if not _linear_fits(x, weight, bias):
        _check_linear(x, weight, bias)
    check_activation(activation)
    check_backend(backend, "cpu", "onednn", "reference")
    op = reference.linear
    if (backend == "cpu" or _few_rows(x)) and use("cpu", backend, _why_not_linear_cpu(x, weight, bias)):
        op = ops.linear
    elif (backend == "onednn" or _large(x, weight)) and use("onednn", backend, _why_not_linear_onednn(x, weight, bias)):
        op = ops.linear_onednn
    return op(x, weight, bias, activation)


def _linear_fits(x, weight, bias) -> bool:
    """Whether the arguments of `linear` are right and what they usually are."""
    if weight is None or not plain(x, weight, bias):
        return False
    shape, rows = x.shape, weight.shape
    return len(rows) == 2 and len(shape) > 0 and shape[-1] == rows[1] and (bias is None or bias.shape == rows[:1])


def _check_linear(x, weight, bias) -> None:
    check_tensor("x", x)
    check_tensor("weight", weight, like=x)
    if weight.dim() != 2:
        raise ValueError(f"weight must have 2 dimensions (N, K), got shape {tuple(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be (..., K) for a weight (N, K) = {tuple(weight.shape)}, got shape {tuple(x.shape)}")
    if bias is not None:
        check_tensor("bias", bias, like=x)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have shape ({weight.shape[0]},), the first size of weight, got {tuple(bias.shape)}")
    dtypes = [t.dtype for t in (x, weight, bias) if t is not None]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"x, weight and bias must have one dtype, got {', '.join(map(str, dtypes))}")


def _few_rows(x: Tensor) -> bool:
    """Whether the kernel beats F.linear, which torch.compile fuses with what surrounds it."""
    return not torch.compiler.is_compiling() and x.numel() <= FEW_ROWS.get(x.dtype, 0) * x.shape[-1]


def _why_not_linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        return "an input needs a gradient"
    if weight.shape[1] == 0 or weight.stride(1) != 1:
        return f"the rows of weight must lie contiguous, got shape {tuple(weight.shape)}, strides {weight.stride()}"
    return _why_not_linear(x, weight, bias)


def _large(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's speed outweighs its 10 microseconds of preparation."""
    if torch.compiler.is_compiling():  # a condition on the rows would tie the graph to their number
        return weight.numel() * 2**6 >= ONEDNN_WORK
    return x.numel() * weight.shape[0] >= ONEDNN_WORK


def _why_not_linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if x.dtype != torch.float32:
        return f"F.linear takes oneDNN for half precision itself, and this is for float32 only; got {x.dtype}"
    if not ops.has_onednn:
        return "this torch has no oneDNN"
    return _why_not_linear(x, weight, bias)


def _why_not_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """What both kernels of linear leave to F.linear."""
    if ready(x, weight, bias):
        return None
    if torch.is_autocast_enabled("cpu"):
        return "autocast is active, whose casts are those of F.linear"
    if (reason := why_not_cpu(x, weight, bias)) is not None:
        return reason
    if not plain(x, weight, bias):
        return "x is a subclass of torch.Tensor, or weight or bias one other than torch.nn.Parameter"
    return None
