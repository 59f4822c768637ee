"""The CUDA kernels where there is no GPU: run on the host through tests/cuda_on_cpu, and compiled by nvcc if it is there."""

import ctypes
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from common import assert_accurate, need_extension, randn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fast_transformer import functional, ops, reference

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).parent / "cuda_on_cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # in the order of DType in csrc/arguments.h
PAIRS = [(dtype, stream) for dtype in DTYPES for stream in dict.fromkeys((dtype, torch.float32))]
SIZES = [1, 3, 32, 33, 96, 100, 512, 768, 1000, 1024, 4096, 8192, 12000, 65536]
ARCHS = [80, 90, 100, 120]
GUARD = 16  # elements of NaN around every tensor


class Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernels as C functions. A 16-byte access that is not aligned ends the process with a message."""
    path = tmp_path_factory.mktemp("cuda_on_cpu") / "kernels.so"
    flags = "-std=c++17 -O2 -march=native -ffp-contract=off -fno-strict-aliasing -fno-extern-tls-init -Wno-psabi"
    flags += " -Wno-unknown-pragmas -fsanitize=alignment -fno-sanitize-recover=alignment -shared -fPIC"
    subprocess.run(["g++", *flags.split(), str(HERE / "kernels.cpp"), "-o", str(path)], check=True)
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
    for case, (rms, dropout_p, prenorm, aligned) in list(enumerate(options))[:: 1 if n < 4096 else 5 if n < 65536 else 15]:
        rows = 1 + case % (7 if n < 65536 else 3)
        x, residual, grad_out, grad_sum = (randn(rows, n) for _ in range(4))
        weight, bias = randn(n), randn(n)
        parameters = torch.float32 if case % 3 else dtype
        inputs = x, residual, weight, bias, grad_out, grad_sum
        low = [t.to(d) for t, d in zip(inputs, (dtype, stream, parameters, parameters, dtype, stream), strict=True)]
        options = {"eps": 1e-5, "dropout_p": dropout_p, "seed": torch.tensor(1000 + case), "rms": rms, "prenorm": prenorm}
        shared = 96 << 10 if case % 3 == 0 else 0  # bytes: long rows add up the parameters' gradients there, if they fit
        got = run_norm(kernels, Memory(aligned), *low, **options, shared=shared)
        plain = run_reference(*low, **options)
        exact = run_reference(*inputs, **options)
        names = ("out", "sum", "grad of x", "grad of residual", "grad of weight", "grad of bias")
        for name, g, p, e in zip(names, got, plain, exact, strict=True):
            assert (g is None) == (e is None)
            if g is not None:
                assert_accurate(f"{name}, {options}", g, p, e, factor=3 if name.startswith("grad") else 2)
        if prenorm:
            assert torch.equal(got[1], plain[1])  # the same elements are dropped, and the sum is the same to the last bit


def test_norm_without_what_is_optional(kernels):
    """No residual, no parameters, no gradients of parameters; no rows."""
    x, grad, none = torch.randn(3, 40), torch.randn(3, 40), rows_at(None)
    size = ctypes.c_int64(3), ctypes.c_int64(40)
    out, stats, grad_x = torch.empty(3, 40), torch.empty(3, 2), torch.empty(3, 40)
    nothing = ctypes.c_double(0.0), None
    kernels.layer_norm_forward(
        0, 0, 0, rows_at(x), none, None, None, at(out), None, at(stats), *size, ctypes.c_double(1e-5), False, *nothing
    )
    kernels.layer_norm_backward(
        0, 0, 0, rows_at(grad), none, rows_at(x), none, None, at(stats), at(grad_x), *[None] * 5, *size, False, *nothing,
        ctypes.c_int64(0)
    )  # fmt: skip
    leaf = x.clone().requires_grad_()
    want = torch.nn.functional.layer_norm(leaf, (40,))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(grad_x, torch.autograd.grad(want, leaf, grad)[0])
    assert kernels.layer_norm_parts(ctypes.c_int64(0), size[1]) == 0
    grad_weight = torch.full((40,), torch.nan)
    kernels.layer_norm_backward(
        0, 0, 0, none, none, none, none, None, None, None, None, at(out), None, at(grad_weight), None, ctypes.c_int64(0),
        size[1], False, *nothing, ctypes.c_int64(0)
    )  # fmt: skip
    assert torch.equal(grad_weight, torch.zeros(40))


def run_activation(kernels, memory, activation, x, bias, grad, *, dropout_p, seed):
    """(out, gradients of x and of bias), through the emulated kernels."""
    rows, n = x.shape
    kind = list(reference.ACTIVATIONS).index(activation)  # in the order of Activation in csrc/arguments.h
    x, grad, bias = memory.put_rows(x), memory.put_rows(grad), memory.put(bias)
    out, grad_x = (memory.empty(rows, n, dtype=x.dtype) for _ in range(2))
    size = ctypes.c_int64(rows), ctypes.c_int64(n)
    partials, grad_bias = (memory.empty(m, n, dtype=torch.float32) for m in (kernels.activation_parts(*size), 1))
    begin, end = (code(x.dtype), code(bias.dtype), kind), (*size, ctypes.c_double(dropout_p), at(seed))
    kernels.activation_dropout(*begin, rows_at(x), rows_at(None), at(bias), at(out), None, None, *end)
    given = rows_at(None if activation == "none" else x)
    kernels.activation_dropout(*begin, given, rows_at(grad), at(bias), at(grad_x), at(partials), at(grad_bias), *end)
    memory.check()
    return out, grad_x, grad_bias[0]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_dropout_against_the_reference(kernels, dtype, n):
    options = itertools.product(reference.ACTIVATIONS, (True, False))
    for case, (activation, aligned) in list(enumerate(options))[:: 1 if n < 4096 else 3 if n < 65536 else 9]:
        rows, dropout_p = 1 + case % (7 if n < 65536 else 2), (0.3 if case % 2 else 0.0)
        x, grad, bias = randn(rows, n) * 2, randn(rows, n), randn(n)
        low = x.to(dtype), bias.to(torch.float32 if case % 4 else dtype), grad.to(dtype)
        options = {"dropout_p": dropout_p, "seed": torch.tensor(3 + case)}

        def run(x, bias, grad, activation=activation, options=options):
            x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
            out = reference.activation_dropout(x, bias, activation, **options)
            return out, *torch.autograd.grad(out, (x, bias), grad)

        got = run_activation(kernels, Memory(aligned), activation, *low, **options)
        plain = run(*low)
        for name, g, p, e in zip(("out", "grad of x", "grad of bias"), got, plain, run(x, bias, grad), strict=True):
            assert_accurate(f"{activation}, {name}", g, p, e, factor=2 if name == "out" else 3)
        if activation == "none":
            assert torch.equal(got[0], plain[0])  # the same elements are dropped


@need_extension
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_call_with_tensors_on_a_gpu_reaches_the_op(dtype, monkeypatch):
    """Through `functional`, with tensors that have a device, but no memory."""
    monkeypatch.setattr(ops, "cuda_archs", "9.0")
    monkeypatch.setattr(functional._backends, "_why_not_gpu", lambda index: None)
    with FakeTensorMode():
        x, residual, weight = (torch.empty(*s, dtype=dtype, device="cuda") for s in ((4, 16), (4, 16), (16,)))
        options = {"dropout_p": 0.1, "backend": "cuda"}
        for norm, parameters in (
            (functional.dropout_add_layer_norm, (weight, weight)),
            (functional.dropout_add_rms_norm, (weight,)),
        ):
            out, total = norm(x, residual, *parameters, prenorm=True, residual_in_fp32=True, **options)
            assert out.device == total.device == x.device and out.dtype == dtype and total.dtype == torch.float32
        assert functional.activation_dropout(x, weight, "gelu", **options).device == x.device
        with pytest.raises(RuntimeError, match="no CUDA kernel for torch.float64"):
            functional.dropout(x.double(), 0.1, backend="cuda")


# What nvcc makes of the kernels


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """For every architecture what ptxas reports, and the PTX; all compiled side by side."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on the PATH")
    runs = {}
    for arch in ARCHS:
        folder = tmp_path_factory.mktemp(f"sm_{arch}")
        flags = ["-std=c++17", "-O3", f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", "--keep", "--keep-dir", folder]
        command = ["nvcc", *flags, HERE / "instantiate.cu", "-o", folder / "kernels.cubin"]
        runs[arch] = folder, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    results = {}
    for arch, (folder, run) in runs.items():
        log = run.communicate()[1]
        assert run.returncode == 0, log
        results[arch] = log, (folder / "instantiate.ptx").read_text()
    return results


REPORT = re.compile(
    r"entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?(\d+) registers",
    re.DOTALL,
)
MOVE = re.compile(r"\b(ld|st)\.global[.\w]*?\.(?:v(\d)\.)?[a-z]+(\d+)\b")


@pytest.mark.parametrize("arch", ARCHS)
def test_registers_and_memory_accesses(arch, compiled):
    """No kernel spills a register; those for aligned rows move 16 bytes at a time, the others element by element."""
    report, ptx = compiled[arch]
    kernels = REPORT.findall(report)
    assert len(kernels) > 60
    for name, stack, stores, loads, registers in kernels:
        print(f"sm_{arch} {registers:>3} registers, {stores} bytes spilled: {name}")
        assert stack == stores == loads == "0", name
        assert int(registers) <= 128, name  # of 512 threads

    for entry in ptx.split(".entry ")[1:]:
        name = entry.split("(")[0]
        moves = [(kind, int(lanes or 1) * int(bits)) for kind, lanes, bits in MOVE.findall(entry)]
        if "Lb1EEEvNS" in name:  # kAligned = true is the last template argument
            narrow = [move for move in moves if move[1] < 128]
            assert {kind for kind, bits in moves if bits >= 128} == {"ld", "st"}, name
            assert len(narrow) <= 3, (name, narrow)  # the seed, and the mean and the deviation of a row
        elif "Lb0EEEvNS" in name:
            assert max(bits for _, bits in moves) <= 64, name
