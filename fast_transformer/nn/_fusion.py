"""When a fused op may stand in for the modules of a layer, and what runs when it may not."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook

from .. import functional, ops, reference
from .dropout import Dropout
from .norm import FusedLayerNorm

# Classes whose work a fused op knows.
LINEAR = (torch.nn.Linear, NonDynamicallyQuantizableLinear)
NORM = (FusedLayerNorm, torch.nn.LayerNorm)
DROPOUT = (Dropout, torch.nn.Dropout)


def plain(module: torch.nn.Module, classes: tuple[type, ...]) -> bool:
    """Whether calling `module` does what its class says and nothing more: no subclass, no hook, no forward of its own.

    Only then may a fused op take its parameters and stand in for the call.
    """
    if type(module) not in classes:
        return False
    own = module.__dict__
    hooks = own["_forward_pre_hooks"] or own["_forward_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]
    return not hooks and "forward" not in own and not _has_any_global_hook()


def weight_and_bias(module: torch.nn.Module) -> tuple[Tensor, Tensor | None]:
    """Those of a linear layer or a norm, without the microsecond that each costs as an attribute."""
    own = module._parameters
    return (own["weight"], own["bias"]) if "weight" in own and "bias" in own else (module.weight, module.bias)


def fused_activation(activation: Callable[[Tensor], Tensor]) -> str | None:
    """The name under which functional.activation_dropout knows this activation; None if it has to be called."""
    if activation is F.relu or activation is torch.relu or plain(activation, (torch.nn.ReLU,)):
        return "relu"
    if activation is F.silu or plain(activation, (torch.nn.SiLU,)):
        return "silu"
    if activation is F.gelu or plain(activation, (torch.nn.GELU,)):
        return "gelu_tanh" if getattr(activation, "approximate", "none") == "tanh" else "gelu"
    return None


_SMALL = 2**16  # elements of a weight: with fewer, functional.linear's checks take longer than its kernel gains


def project(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    """activation(x · weightᵀ + bias)."""
    op = reference.linear if weight.numel() < _SMALL else functional.linear
    return op(x, weight, bias, activation)


def small(x: object, *parameters: Tensor | None) -> bool:
    """Whether x and the parameters of a block are what its chain of ops takes as one call, and small enough for that to pay."""
    return functional.ready(x, *parameters) and all(p is None or p.numel() < _SMALL for p in parameters)


def drop(dropout_p: float, x: Tensor) -> tuple[float, Tensor | None]:
    """Dropout as a chain of ops takes it: the probability, and a seed."""
    dropout_p = functional.check_probability("dropout", dropout_p)
    return dropout_p, functional._random.draw_seed(dropout_p, x.device)


def layer_norm(norm: torch.nn.Module, width: int) -> tuple[Tensor | None, Tensor | None, float] | None:
    """A norm as a chain of ops takes it: weight, bias and eps; None if the module has to be called, or to say what is wrong."""
    if not plain(norm, NORM) or norm.normalized_shape != (width,) or type(norm.eps) is not float:
        return None
    weight, bias = weight_and_bias(norm)
    fits = all(x is None or x.shape == (width,) for x in (weight, bias)) and 0.0 <= norm.eps < math.inf
    return (weight, bias, norm.eps) if fits else None


def feed_forward(linear1: torch.nn.Module, linear2: torch.nn.Module, x: Tensor, activation: str, dropout_p: float) -> Tensor:
    """linear2(dropout(activation(linear1(x))))."""
    if plain(linear1, LINEAR) and plain(linear2, LINEAR):
        parameters = (*weight_and_bias(linear1), *weight_and_bias(linear2))
        if small(x, *parameters):
            return ops.feed_forward(x, (*parameters, activation, *drop(dropout_p, x)))
    if dropout_p:
        h = functional.activation_dropout(linear(linear1, x), None, activation, dropout_p=dropout_p)
    else:
        h = linear(linear1, x, activation)
    return linear(linear2, h)


def linear(module: torch.nn.Module, x: Tensor, activation: str = "none") -> Tensor:
    """activation(module(x)), in one pass where module is a plain linear layer."""
    if plain(module, LINEAR):
        return project(x, *weight_and_bias(module), activation)
    return reference.ACTIVATIONS[activation](module(x))


def fused_dropout(dropout: torch.nn.Module) -> float | None:
    """The probability with which a fused op drops in the place of this module; None if the module has to be called."""
    if not plain(dropout, DROPOUT):
        return None
    p = dropout.p if dropout.training else 0.0
    return p if p < 1.0 else None


def add(x: Tensor, branch: Tensor, dropout_p: float | None) -> Tensor:
    """x + dropout(branch); dropout_p is None where the branch has been through its dropout module."""
    return x + (functional.dropout(branch, dropout_p) if dropout_p else branch)


def add_norm(
    x: Tensor, branch: Tensor, dropout_p: float | None, norm: torch.nn.Module, *, prenorm: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """norm(x + dropout(branch)); with `prenorm` the pair (that, the sum), which a pre-norm layer carries on."""
    fits = branch.shape == x.shape and getattr(norm, "normalized_shape", None) == x.shape[-1:]
    if fits and dropout_p is not None and plain(norm, NORM):
        return functional.dropout_add_layer_norm(
            branch, x, *weight_and_bias(norm), eps=norm.eps, dropout_p=dropout_p, prenorm=prenorm
        )
    x = add(x, branch, dropout_p)
    return (norm(x), x) if prenorm else norm(x)
