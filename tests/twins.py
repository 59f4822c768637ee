"""What the tests of the modules share: a torch.nn module and its twin with the same parameters, and how to compare them."""

import warnings
from contextlib import contextmanager

import torch
from torch import Tensor

import fast_transformer

# float64 against float64: only the order of summation differs, so a few roundings (2^-53) of sums of some hundred terms.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    """Every parameter non-trivial, biases and norms too; the same for two modules with the same parameters."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4
            p.copy_(noise + 1.0 if "norm" in name and name.endswith("weight") else noise)
    return module


def pair(name: str, *args, **options) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(torch.nn's module, ours), in float64 and with equal parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.nn's hints about its nested tensors
        stock = getattr(torch.nn, name)(*args, **options)
    return randomise(stock.double()), randomise(getattr(fast_transformer, name)(*args, **options).double())


def leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    """Copies of the tensors, with their strides; the floating-point ones record a gradient."""
    return [t if t is None else t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]


@contextmanager
def slow_path():
    """torch.nn without its inference fast path, whose outputs differ at padding."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def backward(outputs: Tensor | tuple[Tensor | None, ...]) -> list[Tensor]:
    """The outputs that are tensors, after a backward pass in which every element counts differently."""
    tensors = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]
    sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in tensors).backward()
    return tensors


def assert_same_parameter_gradients(got: torch.nn.Module, want: torch.nn.Module) -> None:
    for (name, a), (_, b) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **CLOSE, msg=lambda m, n=name: f"gradient of {n}: {m}")


def causal(L: int, S: int | None = None) -> Tensor:
    """Bool (L, S), True = hidden."""
    return torch.ones(L, S or L, dtype=torch.bool).triu(1)


def padding(lengths: list[int], S: int) -> Tensor:
    """Bool (N, S), True = padding."""
    return torch.arange(S) >= torch.tensor(lengths)[:, None]


def additive(hidden: Tensor) -> Tensor:
    """A float64 mask of random numbers, -inf where `hidden`."""
    return torch.randn(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)


def script(module: torch.nn.Module) -> torch.jit.ScriptModule:
    """torch.jit.script, and the warning that it has to come with."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scripted = torch.jit.script(module)
    assert any("torch.nn's own code" in str(w.message) for w in caught)
    return scripted
