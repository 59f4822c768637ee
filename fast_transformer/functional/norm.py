"""Dropout, residual and norm in one pass."""

import math

import torch
from torch import Tensor

from .. import ops, reference
from . import _random
from ._backends import kernel_takes
from ._checks import check_flag, check_number, check_probability, check_tensor, check_vector, plain


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm(residual + dropout(x)) over the last dimension, in one pass (Ba et al. 2016; Srivastava et al. 2014).

    Statistics and the sum are float32 (float64 for float64). x and residual of different dtypes are promoted as
    `residual + x` would be. Backward reads what forward read: only row statistics and a seed are kept besides the inputs.

    Args:
        x: (..., N), N >= 1.
        residual: the shape of x, or None.
        weight, bias: (N,) or None; may be float32 beside bfloat16 or float16 activations.
        eps: added to the variance, >= 0.
        dropout_p: probability, in [0, 1), with which an element of x is dropped; quantised to 1/65536.
        prenorm: also return the sum, as a pre-norm block carries it on.
        residual_in_fp32: residual and the returned sum are float32 (float64 for float64) whatever the dtype of x, which is the
            result's: the residual stream of a deep model in half precision keeps its small terms.
        backend: None chooses; "cpu", "cuda" or "reference" insists.

    Returns:
        (..., N) in x's (promoted) dtype; with `prenorm` the tuple (that, residual + dropout(x)).

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    if residual_in_fp32 or not _rows_fit(x, residual, weight, bias):
        x, residual = _check_rows(x, residual, weight, bias, residual_in_fp32)
    eps = check_number("eps", eps, "a finite number >= 0", 0, math.inf)
    dropout_p = check_probability("dropout_p", dropout_p)
    check_flag("prenorm", prenorm)
    check_flag("residual_in_fp32", residual_in_fp32)
    op = ops.dropout_add_layer_norm if kernel_takes(backend, x, residual, weight, bias) else reference.dropout_add_layer_norm
    seed = _random.draw_seed(dropout_p, x.device)
    flags = {"prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
    return op(x, residual, weight, bias, eps=eps, dropout_p=dropout_p, seed=seed, **flags)


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float | None = None,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm(residual + dropout(x)) over the last dimension, in one pass (Zhang and Sennrich 2019).

    Args:
        eps: added to the mean square, >= 0; None, as in torch.nn.RMSNorm: the machine epsilon of float32 (for float64 its own).
        x, residual, weight, dropout_p, prenorm, residual_in_fp32, backend: as in `dropout_add_layer_norm`.

    Returns, raises: as `dropout_add_layer_norm`.
    """
    if residual_in_fp32 or not _rows_fit(x, residual, weight, None):
        x, residual = _check_rows(x, residual, weight, None, residual_in_fp32)
    if eps is None:
        eps = torch.finfo(reference.wide_dtype(x.dtype)).eps
    else:
        eps = check_number("eps", eps, "None or a finite number >= 0", 0, math.inf)
    dropout_p = check_probability("dropout_p", dropout_p)
    check_flag("prenorm", prenorm)
    check_flag("residual_in_fp32", residual_in_fp32)
    op = ops.dropout_add_rms_norm if kernel_takes(backend, x, residual, weight) else reference.dropout_add_rms_norm
    seed = _random.draw_seed(dropout_p, x.device)
    flags = {"prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
    return op(x, residual, weight, eps=eps, dropout_p=dropout_p, seed=seed, **flags)


def _rows_fit(x, residual, weight, bias) -> bool:
    """Whether the arguments of a norm are right and what they usually are."""
    if not plain(x, residual, weight, bias):
        return False
    shape = x.shape
    if not shape or shape[-1] == 0 or (residual is not None and residual.shape != shape):
        return False
    vector = shape[-1:]
    return (weight is None or weight.shape == vector) and (bias is None or bias.shape == vector)


def _check_rows(x, residual, weight, bias, residual_in_fp32) -> tuple[Tensor, Tensor | None]:
    """x and residual in their common dtype; with `residual_in_fp32` residual in float32 (beside float64: float64)."""
    check_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last dimension of size >= 1 to normalise, got shape {tuple(x.shape)}")
    if residual is not None:
        check_tensor("residual", residual, like=x)
        if residual.shape != x.shape:
            raise ValueError(f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
        if residual_in_fp32:
            residual = residual.to(reference.wide_dtype(x.dtype))
        elif residual.dtype != x.dtype:
            dtype = torch.promote_types(x.dtype, residual.dtype)
            x, residual = x.to(dtype), residual.to(dtype)
    check_vector("weight", weight, x.shape[-1], like=x)
    check_vector("bias", bias, x.shape[-1], like=x)
    return x, residual
