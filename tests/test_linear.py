"""linear: every instruction set against float64 and plain PyTorch, and when F.linear takes the call."""

import functools
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from common import PLAIN, assert_accurate, need_extension, randn

from fast_transformer import functional, ops, reference
from fast_transformer.functional.linear import FEW_ROWS

pytestmark = need_extension
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
linear = functools.partial(functional.linear, backend="cpu")


@pytest.fixture
def calls(monkeypatch):
    """The calls of the kernel, as lists of their arguments."""
    seen, kernel = [], ops.linear
    monkeypatch.setattr(ops, "linear", lambda *args: seen.append(args) or kernel(*args))
    return seen


@pytest.mark.parametrize("K", [1, 7, 33, 512, 1023, 2100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64_and_torch(level, dtype, K):
    for rows, N, with_bias in ((1, 37, True), (2, 1, True), (3, 5, False), (4, 37, False), (7, 16, True), (65, 37, True)):
        x, weight, bias = randn(rows, K), randn(N, K), randn(N) if with_bias else None
        exact = F.linear(x, weight, bias)
        inputs = [t if t is None else t.to(dtype) for t in (x, weight, bias)]
        got = linear(*inputs)
        assert got.dtype == dtype
        assert_accurate("out", got, F.linear(*inputs), exact, factor=2)


@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(level, dtype, activation):
    x, weight, bias = randn(2, 3, 40) / 4, randn(37, 40) / 2, randn(37)
    inputs = [t.to(dtype) for t in (x, weight, bias)]
    got = linear(*inputs, activation)
    assert got.shape == (2, 3, 37)
    assert_accurate("out", got, PLAIN[activation](F.linear(*inputs)), PLAIN[activation](F.linear(x, weight, bias)), factor=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_beside_any_others(level, dtype):
    x, weight, bias = torch.randn(70, 1100).to(dtype), torch.randn(40, 1100).to(dtype), torch.randn(40).to(dtype)
    alone = torch.cat([linear(row[None], weight, bias, "gelu") for row in x])
    for rows in (2, 3, 5, 8, 64, 70):
        assert torch.equal(linear(x[:rows], weight, bias, "gelu"), alone[:rows]), rows


def test_every_number_of_threads_gives_the_same_bits(level):
    x, weight, bias = torch.randn(9, 700), torch.randn(333, 700), torch.randn(333)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(linear(x, weight, bias, "silu"))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(level, dtype):
    weight = torch.randn(45, 90).to(dtype)[3:40, 5:70]  # (37, 65)
    wide, many, one = (torch.randn(s).to(dtype) for s in ((65, 4, 3), (6, 99), (65,)))
    for x in (wide.permute(2, 1, 0), many[::2, 20:85], one.expand(3, 65)):
        bias = torch.randn(74).to(dtype)[::2]
        assert torch.equal(linear(x, weight, bias), linear(x.contiguous(), weight.contiguous(), bias.contiguous()))


def test_sizes_of_zero():
    for shape, N in (((0, 8), 5), ((2, 0, 8), 5), ((3, 8), 0), ((0, 8), 0)):
        assert linear(torch.randn(shape), torch.randn(N, 8), torch.randn(N), "gelu").shape == (*shape[:-1], N)
    assert torch.equal(functional.linear(torch.ones(2, 0), torch.ones(3, 0), torch.ones(3)), torch.ones(2, 3))
    assert linear(torch.ones(8), torch.ones(5, 8)).tolist() == [8.0] * 5  # a vector is one row


def test_infinity_and_nan_stay_in_their_rows_and_columns(level):
    x, weight = torch.ones(3, 20), torch.ones(5, 20)
    x[1, 3], weight[2, 19] = torch.inf, torch.nan
    for activation in ("none", "relu"):
        out = linear(x, weight, None, activation)
        assert out[:, 2].isnan().all() and (out[1, [0, 1, 3, 4]] == torch.inf).all()
        assert (out[[0, 2]][:, [0, 1, 3, 4]] == 20).all()


def test_in_place_updates_of_weight_are_seen():
    x, weight = torch.randn(2, 16), torch.randn(8, 16)
    before = linear(x, weight)
    weight.data.mul_(2)
    assert torch.equal(linear(x, weight), 2 * before)


def test_the_kernel_takes_few_rows_without_gradients(calls):
    x, weight = torch.randn(2, 3, 16), torch.nn.Parameter(torch.randn(8, 16))
    with torch.no_grad():
        functional.linear(x, weight)
        assert len(calls) == 1
        functional.linear(torch.randn(10_000, 16), weight)
        functional.linear(torch.randn(65, 16), weight)
        functional.linear(x, torch.randn(16, 8).t())
        functional.linear(x, weight, backend="reference")
        with torch.autocast("cpu"):
            functional.linear(x, weight)
    functional.linear(x, weight)
    assert len(calls) == 1
    functional.linear(x, weight.detach())
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_takes_as_many_rows_as_are_faster(dtype, calls):
    most, weight = FEW_ROWS[dtype], torch.randn(8, 16).to(dtype)
    functional.linear(torch.randn(min(most, 1000), 16).to(dtype), weight)
    assert len(calls) == 1
    functional.linear(torch.randn(min(most, 1000) + 1, 16).to(dtype), weight)
    assert len(calls) == (2 if most == math.inf else 1)


def test_gradients_flow():
    inputs = [torch.randn(s, requires_grad=True) for s in ((2, 3, 16), (8, 16), (8,))]
    want = F.gelu(F.linear(*inputs))
    got = functional.linear(*inputs, "gelu")
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (got, want)), strict=True):
        assert torch.equal(a, b)


onednn = functools.partial(functional.linear, backend="onednn")
need_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@need_onednn
@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("with_bias", [True, False])
def test_onednn_and_all_its_gradients(activation, with_bias):
    """Rows, columns and inner sizes from 1 on; x as it lies after a transposition; gradients summed over all leading sizes."""
    for shape, N in (((1, 1), 1), ((3, 7), 5), ((2, 5, 33), 17), ((4, 3, 9, 64), 100)):
        exact_inputs = [randn(*shape), randn(N, shape[-1]), randn(N) if with_bias else None]
        grad = randn(*shape[:-1], N)
        results = []
        for dtype, op in ((torch.float32, onednn), (torch.float32, reference.linear), (torch.float64, reference.linear)):
            inputs = [None if t is None else t.to(dtype).requires_grad_() for t in exact_inputs]
            out = op(*inputs, activation)
            given = [t for t in inputs if t is not None]
            results.append((out, *torch.autograd.grad(out, given, grad.to(dtype))))
        for name, got, plain, exact in zip(("out", "x", "weight", "bias"), *results, strict=False):
            assert got.is_contiguous()
            assert_accurate(name, got, plain, exact, factor=2 if name == "out" else 3)
        with torch.no_grad():
            inputs = [t if t is None else t.float() for t in exact_inputs]
            torch.testing.assert_close(onednn(*inputs, activation), results[0][0])


@need_onednn
def test_onednn_gives_only_the_gradients_asked_for():
    for asked in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        inputs = [torch.randn(s, requires_grad=need) for s, need in zip(((6, 8), (4, 8), (4,)), asked, strict=True)]
        onednn(*inputs).sum().backward()
        F.linear(*(leaves := [t.detach().requires_grad_(t.requires_grad) for t in inputs])).sum().backward()
        for ours, theirs in zip(inputs, leaves, strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)


@need_onednn
def test_onednn_any_strides():
    turned, columns = torch.randn(5, 4, 3).permute(2, 1, 0), torch.randn(5, 7).t()
    for inputs in ((turned, columns), (turned[..., ::2], columns[::2, ::2]), (torch.randn(5).expand(6, 5), columns)):
        x, weight = (t.detach().requires_grad_() for t in inputs)
        grad = torch.randn(*x.shape[:-1], len(weight)).transpose(0, -1).contiguous().transpose(0, -1)
        got, want = onednn(x, weight), F.linear(x, weight)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, (x, weight), grad), torch.autograd.grad(want, (x, weight), grad))


@need_onednn
def test_onednn_takes_large_products_of_float32(monkeypatch):
    seen, kernel = [], ops.linear_onednn
    monkeypatch.setattr(ops, "linear_onednn", lambda *args: seen.append(args) or kernel(*args))
    # As on the CPUs where it is the faster.
    monkeypatch.setattr(sys.modules[functional.linear.__module__], "ONEDNN_WORK", 2**22)
    weight = torch.nn.Parameter(torch.randn(256, 256))
    large = 2**22 // 256**2
    functional.linear(torch.randn(large - 1, 256), weight)
    functional.linear(torch.randn(large, 256).double(), weight.double())
    functional.linear(torch.randn(large, 256), weight, backend="reference")
    with torch.autocast("cpu"):
        functional.linear(torch.randn(large, 256), weight)
    assert not seen
    functional.linear(torch.randn(large, 256), weight)
    functional.linear(torch.randn(2, large, 128), weight[:, :128])
    assert len(seen) == 2
    with torch.no_grad():
        functional.linear(torch.randn(65, 1024), torch.randn(64, 1024))
    assert len(seen) == 3


@need_onednn
def test_onednn_second_derivatives():
    exact_inputs, results = [randn(6, 8), randn(4, 8), randn(4)], []
    for dtype, op in ((torch.float32, onednn), (torch.float32, reference.linear), (torch.float64, reference.linear)):
        inputs = [t.to(dtype).requires_grad_() for t in exact_inputs]
        out = op(*inputs, "none").tanh()
        first = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for name, *grads in zip(("x", "weight", "bias"), *results, strict=True):
        assert_accurate(name, *grads, factor=3)


@need_onednn
def test_onednn_opcheck():
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((2, 3, 8), (5, 8), (5,)))
    torch.library.opcheck(torch.ops.fast_transformer.linear_onednn.default, (x, weight, bias, "none"))
    torch.library.opcheck(torch.ops.fast_transformer.linear_onednn.default, (x.detach(), weight.detach(), None, "gelu"))
    backward = torch.ops.fast_transformer.linear_onednn_backward.default
    for args in ((x, weight, True), (x, None, False), (None, weight, True)):
        torch.library.opcheck(
            backward, (torch.randn(2, 3, 5), *(t.detach() if isinstance(t, torch.Tensor) else t for t in args))
        )
    with pytest.raises(ValueError, match="gradient without an activation only, got relu"):
        torch.ops.fast_transformer.linear_onednn(x, weight, bias, "relu")


def test_the_op_refuses_to_lose_a_gradient():
    x, weight, bias = torch.randn(2, 8), torch.randn(4, 8), torch.randn(4)
    op = torch.ops.fast_transformer.linear
    for i in range(3):
        inputs = [t.clone().requires_grad_(i == j) for j, t in enumerate((x, weight, bias))]
        with pytest.raises(NotImplementedError, match="computes no gradient"):
            op(*inputs, "none")
        with torch.no_grad():
            torch.testing.assert_close(op(*inputs, "none"), F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_autocast_is_that_of_f_linear(dtype):
    x, weight, bias = torch.randn(2, 8, dtype=dtype), torch.randn(4, 8), torch.randn(4)
    if dtype == torch.float64:
        weight, bias = weight.double(), bias.double()
    with torch.autocast("cpu"):
        got, want = functional.linear(x, weight, bias, "relu"), F.linear(x, weight, bias).relu()
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_opcheck():
    op = torch.ops.fast_transformer.linear.default
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = torch.randn(2, 3, 8).to(dtype), torch.randn(5, 8).to(dtype), torch.randn(5).to(dtype)
        torch.library.opcheck(op, (x, weight, bias, "gelu"))
        torch.library.opcheck(op, (x.transpose(0, 1), weight, None, "none"))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("backend", [None, "cpu", "onednn"])
def test_compiles_without_a_graph_break(compiler, backend):
    torch._dynamo.reset()
    x, weight, bias = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)
    compiled = torch.compile(functional.linear, fullgraph=True, backend=compiler)
    torch.testing.assert_close(compiled(x, weight, bias, "gelu", backend=backend), F.gelu(F.linear(x, weight, bias)))


def test_transforms_and_subclasses_go_to_f_linear():
    class Own(torch.Tensor):
        pass

    x, weight = torch.randn(5, 3, 8), torch.randn(4, 8)
    torch.testing.assert_close(torch.vmap(lambda x: functional.linear(x, weight))(x), F.linear(x, weight))
    assert type(functional.linear(x.as_subclass(Own), weight)) is Own
    _, tangent = torch.func.jvp(lambda x: functional.linear(x, weight), (x,), (x,))
    torch.testing.assert_close(tangent, F.linear(x, weight))
    with pytest.raises(RuntimeError, match="subclass of torch.Tensor"):
        linear(x, weight.as_subclass(Own))


X, WEIGHT = torch.zeros(2, 8), torch.zeros(4, 8)
BAD = [
    ("x", lambda: functional.linear([1.0], WEIGHT), TypeError, "x must be a torch.Tensor, got list"),
    ("integers", lambda: functional.linear(X.long(), WEIGHT), TypeError, "x must have a floating-point dtype, got torch.int64"),
    ("weight", lambda: functional.linear(X, None), TypeError, "weight must be a torch.Tensor, got NoneType"),
    (
        "weight-dim",
        lambda: functional.linear(X, WEIGHT[0]),
        ValueError,
        r"weight must have 2 dimensions \(N, K\), got shape \(8,",
    ),
    ("width", lambda: functional.linear(X[:, 1:], WEIGHT), ValueError, r"weight \(N, K\) = \(4, 8\), got shape \(2, 7\)"),
    ("scalar", lambda: functional.linear(X[0, 0], WEIGHT), ValueError, r"weight \(N, K\) = \(4, 8\), got shape \(\)"),
    ("bias", lambda: functional.linear(X, WEIGHT, X[0]), ValueError, r"bias must have shape \(4,\), .* got \(8,\)"),
    ("dtypes", lambda: functional.linear(X, WEIGHT.half()), TypeError, "one dtype, got torch.float32, torch.float16"),
    ("devices", lambda: functional.linear(X, WEIGHT.to("meta")), ValueError, "weight must be on cpu .* got meta"),
    ("activation", lambda: functional.linear(X, WEIGHT, None, "tanh"), ValueError, "activation must be one of .* got 'tanh'"),
    ("no-text", lambda: functional.linear(X, WEIGHT, None, F.relu), ValueError, "activation must be one of .* got <function"),
    ("backend", lambda: functional.linear(X, WEIGHT, backend="cuda"), ValueError, "backend must be None or one of 'cpu'"),
    ("gradient", lambda: linear(X, WEIGHT.clone().requires_grad_()), RuntimeError, "an input needs a gradient"),
    ("onednn-dtype", lambda: onednn(X.double(), WEIGHT.double()), RuntimeError, "float32 only; got torch.float64"),
    (
        "onednn-shape",
        lambda: torch.ops.fast_transformer.linear_onednn(X, X[:, 1:], None, "none"),
        ValueError,
        r"expected x \(..., K\)",
    ),
    ("strides", lambda: linear(X, torch.zeros(8, 4).t()), RuntimeError, r"must lie contiguous, got .* strides \(1, 4\)"),
    ("op-shape", lambda: torch.ops.fast_transformer.linear(X, X[:, 1:], None, "none"), ValueError, r"expected x \(..., K\)"),
    (
        "op-bias",
        lambda: torch.ops.fast_transformer.linear(X, WEIGHT, X[0], "none"),
        ValueError,
        "expected a bias of 4 elements",
    ),
    ("op-dtype", lambda: torch.ops.fast_transformer.linear(X, WEIGHT.half(), None, "none"), TypeError, "of one dtype"),
]


@pytest.mark.parametrize("call, kind, text", [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


@need_onednn
@pytest.mark.parametrize("activation", PLAIN)
def test_onednn_keeps_nan(activation):
    x = torch.randn(8, 16)
    x[0, 0] = torch.nan
    out = onednn(x, torch.randn(8, 16), None, activation)
    assert out[0].isnan().all() and not out[1:].isnan().any()


@need_onednn
def test_onednn_sizes_of_zero():
    for rows, N in ((0, 5), (3, 0)):
        x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((rows, 8), (N, 8), (N,)))
        out = onednn(x, weight, bias)
        assert out.shape == (rows, N)
        out.sum().backward()
        assert (weight.grad == 0).all() and (x.grad == 0).all() and (bias.grad == rows).all()
