"""Bias, activation and dropout in one pass, and dropout alone."""

from torch import Tensor

from .. import ops, reference
from . import _random
from ._backends import kernel_takes
from ._checks import check_activation, check_probability, check_tensor, check_vector


def activation_dropout(
    x: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """dropout(activation(x + bias)) in one pass; backward recomputes from x and a seed.

    Args:
        x: any shape; (..., N) if bias is given.
        bias: (N,) or None.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu" or "none".
        dropout_p: probability, in [0, 1), with which an element is dropped; quantised to 1/65536.
        backend: None chooses; "cpu", "cuda" or "reference" insists.

    Returns:
        A tensor like x.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    check_tensor("x", x)
    if x.dim() == 0:
        if bias is not None:
            raise ValueError("bias needs an x with at least one dimension, got a 0-dim x")
        return activation_dropout(x[None], None, activation, dropout_p=dropout_p, backend=backend)[0]
    check_vector("bias", bias, x.shape[-1], like=x)
    check_activation(activation)
    dropout_p = check_probability("dropout_p", dropout_p)
    op = ops.activation_dropout if kernel_takes(backend, x, bias) else reference.activation_dropout
    return op(x, bias, activation, dropout_p=dropout_p, seed=_random.draw_seed(dropout_p, x.device))


def dropout(x: Tensor, dropout_p: float, *, backend: str | None = None) -> Tensor:
    """Each element of x dropped with probability `dropout_p`, the others scaled by the inverse of the keep probability.

    Args:
        x: any shape.
        dropout_p: in [0, 1); quantised to 1/65536.
        backend: None chooses; "cpu", "cuda" or "reference" insists.

    Returns:
        A tensor like x.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    return activation_dropout(x, None, "none", dropout_p=dropout_p, backend=backend)
