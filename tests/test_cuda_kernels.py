"""The CUDA kernels where there is no GPU: run on the host through tests/cuda_on_cpu, and compiled by nvcc if it is there."""

import ctypes
import itertools
import subprocess
from pathlib import Path

import pytest
import torch
from common import assert_accurate, randn
from torch import Tensor

from fast_transformer import reference

HERE = Path(__file__).parent / "cuda_on_cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # in the order of DType in csrc/arguments.h
PAIRS = [(dtype, stream) for dtype in DTYPES for stream in dict.fromkeys((dtype, torch.float32))]
SIZES = [1, 3, 32, 33, 96, 100, 512, 768, 1000, 1024, 4096, 8192, 65536]
GUARD = 16  # elements of NaN around every tensor
NONE = Tensor()


class Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernels as C functions. A 16-byte access that is not aligned ends the process with a message."""
    path = tmp_path_factory.mktemp("cuda_on_cpu") / "kernels.so"
    flags = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-fno-extern-tls-init",
        "-Wno-psabi",
        "-Wno-unknown-pragmas",
    ]
    flags += ["-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(HERE / "kernels.cpp"), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    for name in ("layer_norm_parts", "activation_parts"):
        getattr(library, name).restype = ctypes.c_int64
    return library


class Memory:
    """Places tensors where a kernel's bounds can be checked: NaN before, behind and between the rows."""

    def __init__(self, aligned: bool):
        self.shift, self.guarded = (0 if aligned else 1), []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        numel = torch.Size(shape).numel()
        memory = torch.full((2 * GUARD + numel + self.shift + 8,), torch.nan, dtype=dtype)
        begin = GUARD + self.shift + (-memory.data_ptr() // dtype.itemsize) % (16 // dtype.itemsize)
        self.guarded.append((memory, begin, numel))
        return memory[begin : begin + numel].view(shape)

    def put(self, x: Tensor | None) -> Tensor | None:
        return x if x is None else self.empty(*x.shape, dtype=x.dtype).copy_(x)

    def put_rows(self, x: Tensor | None) -> Tensor | None:
        """x (rows, n) with more memory between the rows than they need."""
        return x if x is None else self.empty(x.shape[0], x.shape[1] + 8, dtype=x.dtype)[:, : x.shape[1]].copy_(x)

    def check(self) -> None:
        for memory, begin, numel in self.guarded:
            assert memory[:begin].isnan().all() and memory[begin + numel :].isnan().all(), "written out of bounds"


def at(x: Tensor | None) -> ctypes.c_void_p | None:
    return None if x is None else ctypes.c_void_p(x.data_ptr())


def rows_at(x: Tensor | None) -> Rows:
    return Rows(0, 0) if x is None else Rows(x.data_ptr(), x.stride(0))


def code(dtype: torch.dtype) -> int:
    return DTYPES.index(dtype)


def run_norm(kernels, memory, x, residual, weight, bias, grad_out, grad_sum, *, eps, dropout_p, seed, rms, prenorm, shared):
    """(out, sum, gradients of x, residual, weight and bias), through the emulated kernels."""
    (rows, n), stream = x.shape, residual.dtype
    x, residual, grad_out, grad_sum = (memory.put_rows(t) for t in (x, residual, grad_out, grad_sum))
    weight, bias = memory.put(weight), None if rms else memory.put(bias)
    out, stats = memory.empty(rows, n, dtype=x.dtype), memory.empty(rows, 2, dtype=torch.float32)
    total = memory.empty(rows, n, dtype=stream) if prenorm else None
    types = code(x.dtype), code(stream), code(weight.dtype)
    dropout = ctypes.c_double(dropout_p), at(seed)
    size = ctypes.c_int64(rows), ctypes.c_int64(n)
    kernels.layer_norm_forward(
        *types, rows_at(x), rows_at(residual), at(weight), at(bias), at(out), at(total), at(stats), *size,
        ctypes.c_double(eps), rms, *dropout
    )  # fmt: skip
    given = (None, rows_at(total)) if prenorm else (rows_at(x), rows_at(residual))
    grad_total = memory.empty(rows, n, dtype=stream)
    grad_x = memory.empty(rows, n, dtype=x.dtype) if dropout_p > 0 or stream != x.dtype else None
    parts = kernels.layer_norm_parts(*size)
    partials = [memory.empty(parts, n, dtype=torch.float32) for _ in range(2 - rms)] + [None] * rms
    grads = [memory.empty(n, dtype=torch.float32) for _ in range(2 - rms)] + [None] * rms
    kernels.layer_norm_backward(
        *types, rows_at(grad_out), rows_at(grad_sum if prenorm else None), given[0] or rows_at(None), given[1], at(weight),
        at(stats), at(grad_total), at(grad_x), *map(at, partials), *map(at, grads), *size, rms, *dropout, ctypes.c_int64(shared)
    )  # fmt: skip
    memory.check()
    return [out, total, grad_total if grad_x is None else grad_x, grad_total, *grads]


def run_reference(x, residual, weight, bias, grad_out, grad_sum, *, eps, dropout_p, seed, rms, prenorm):
    inputs = [t.detach().requires_grad_() for t in (x, residual, weight) + (() if rms else (bias,))]
    norm = reference.dropout_add_rms_norm if rms else reference.dropout_add_layer_norm
    out = norm(*inputs, eps=eps, dropout_p=dropout_p, seed=seed, prenorm=prenorm, residual_in_fp32=residual.dtype != x.dtype)
    out = out if prenorm else (out,)
    grads = torch.autograd.grad(out, inputs, [g.to(o.dtype) for g, o in zip((grad_out, grad_sum), out, strict=False)])
    return [out[0], out[1] if prenorm else None, *grads, *((None,) if rms else ())]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("types", PAIRS, ids=lambda p: "-".join(str(t).removeprefix("torch.") for t in p))
def test_norm_against_the_reference(kernels, types, n):
    dtype, stream = types
    options = itertools.product((False, True), (0.0, 0.3), (False, True), (True, False))  # 16 cases, fewer of the largest
    for case, (rms, dropout_p, prenorm, aligned) in list(enumerate(options))[:: 1 if n < 4096 else 3 if n < 65536 else 5]:
        rows = 1 + case % (7 if n < 65536 else 3)
        x, residual, grad_out, grad_sum = (randn(rows, n) for _ in range(4))
        weight, bias = randn(n), randn(n)
        parameters = torch.float32 if case % 3 else dtype
        low = [
            x.to(dtype),
            residual.to(stream),
            weight.to(parameters),
            bias.to(parameters),
            grad_out.to(dtype),
            grad_sum.to(stream),
        ]
        options = {"eps": 1e-5, "dropout_p": dropout_p, "seed": torch.tensor(1000 + case), "rms": rms, "prenorm": prenorm}
        shared = 8 * n if case % 2 else 0  # where long rows add up the parameters' gradients: in shared or in global memory
        got = run_norm(kernels, Memory(aligned), *low, **options, shared=shared if shared <= 96 << 10 else 0)
        plain = run_reference(*low, **options)
        exact = run_reference(x, residual, weight, bias, grad_out, grad_sum, **options)
        names = ("out", "sum", "grad of x", "grad of residual", "grad of weight", "grad of bias")
        for name, g, p, e in zip(names, got, plain, exact, strict=True):
            assert (g is None) == (e is None)
            if g is not None:
                assert_accurate(f"{name}, {options}", g, p, e, factor=3 if name.startswith("grad") else 2)
        if prenorm:
            assert torch.equal(got[1], plain[1])  # the same elements are dropped, and the sum is the same to the last bit
