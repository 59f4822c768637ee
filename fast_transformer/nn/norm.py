"""LayerNorm and RMSNorm on the fused kernels, and the pass that ends a block: norm(residual + dropout(x))."""

import math

import torch
from torch import Tensor

from .. import functional
from ._scripted import scriptable


def _as_rows(module: torch.nn.LayerNorm | torch.nn.RMSNorm, name: str, x: object) -> Tensor:
    """x with the normalised dimensions as one."""
    functional.check_tensor(name, x)
    shape = tuple(module.normalized_shape)
    if not shape or 0 in shape:
        raise ValueError(f"normalized_shape must hold sizes of at least 1, got {shape}")
    if x.dim() < len(shape) or x.shape[x.dim() - len(shape) :] != shape:
        raise ValueError(f"{name} must have a shape that ends in {shape}, the normalized_shape, got {tuple(x.shape)}")
    return x if len(shape) == 1 else x.reshape(*x.shape[: x.dim() - len(shape)], math.prod(shape))


def _flat(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dim() == 1 else parameter.flatten()


def _shaped(out: Tensor, like: Tensor) -> Tensor:
    return out if out.shape == like.shape else out.reshape(like.shape)


class FusedLayerNorm(torch.nn.LayerNorm):
    """Drop-in torch.nn.LayerNorm on `functional.dropout_add_layer_norm`. Any floating-point dtype beside any other.

    Args: as in torch.nn.LayerNorm; every size in normalized_shape is at least 1. The output has the dtype of the input, under
        autocast too.
    """

    def forward(self, input: Tensor) -> Tensor:
        rows = _as_rows(self, "input", input)
        out = functional.dropout_add_layer_norm(rows, None, _flat(self.weight), _flat(self.bias), eps=self.eps)
        return _shaped(out, input)

    __prepare_scriptable__ = scriptable


class FusedRMSNorm(torch.nn.RMSNorm):
    """Drop-in torch.nn.RMSNorm on `functional.dropout_add_rms_norm`.

    Args: as in torch.nn.RMSNorm; every size in normalized_shape is at least 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        out = functional.dropout_add_rms_norm(_as_rows(self, "x", x), None, _flat(self.weight), eps=self.eps)
        return _shaped(out, x)

    __prepare_scriptable__ = scriptable


class DropoutAddLayerNorm(torch.nn.LayerNorm):
    """LayerNorm(residual + dropout(x)), the end of a Transformer block, in one pass; dropout only in training.

    Example:
        norm = DropoutAddLayerNorm(512, p=0.1, prenorm=True)
        h, stream = norm(attention(h), stream)  # h goes into the next block, stream past it

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in torch.nn.LayerNorm (and so is the state dict).
        p: probability, in [0, 1), with which an element of x is dropped.
        prenorm: returns (norm, residual + dropout(x)) instead of the norm alone.
        residual_in_fp32: residual and the returned sum are float32 beside activations in half precision.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        p: float = 0.0,
        *,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.p = functional.check_probability("p", p)
        self.prenorm, self.residual_in_fp32 = prenorm, residual_in_fp32

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x and residual: (*, normalized_shape); residual may be None, as at the start of a stream."""
        out = functional.dropout_add_layer_norm(
            _as_rows(self, "x", x),
            None if residual is None else _as_rows(self, "residual", residual),
            _flat(self.weight),
            _flat(self.bias),
            eps=self.eps,
            dropout_p=self.p if self.training else 0.0,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
        )
        return tuple(_shaped(t, x) for t in out) if self.prenorm else _shaped(out, x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}, prenorm={self.prenorm}, residual_in_fp32={self.residual_in_fp32}"
