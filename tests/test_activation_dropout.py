"""activation_dropout and dropout: every backend and instruction set against float64 and plain PyTorch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import PLAIN, assert_accurate, drawn_keep_mask, keep_count_is_likely, need_extension, randn

from fast_transformer import functional

pytestmark = need_extension
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def run(op, x, bias, grad):
    inputs = [t.detach().requires_grad_() for t in (x, bias) if t is not None]
    out = op(inputs[0], inputs[1] if bias is not None else None)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 16), (40, 33), (2, 9000)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64_and_torch(level, dtype, activation, shape):
    x, bias, grad = 3 * randn(*shape), randn(shape[-1]), randn(*shape)
    for case, (b, dropout_p) in enumerate(((bias, 0.3), (bias, 0.0), (None, 0.3), (None, 0.0))):
        factor = drawn_keep_mask(case, shape, dropout_p)

        def ours(x, b, dropout_p=dropout_p, case=case):
            torch.manual_seed(case)
            return functional.activation_dropout(x, b, activation, dropout_p=dropout_p, backend="cpu")

        def plain(x, b, factor=factor):
            y = PLAIN[activation](x if b is None else x + b)
            return y if factor is None else y * factor.to(y.dtype)

        exact = run(plain, x, b, grad)
        like = run(plain, x.to(dtype), b if b is None else b.to(dtype), grad)
        got = run(ours, x.to(dtype), b if b is None else b.to(dtype), grad)
        for name, g, p, e in zip(("out", "grad of x", "grad of bias"), got, like, exact, strict=False):
            assert g.dtype == dtype, name
            assert_accurate(name, g, p, e, factor=2 if name == "out" else 3)


@pytest.mark.parametrize("activation", [a for a in PLAIN if a != "none"])
def test_every_float32_magnitude(level, activation):
    """Value and slope over the whole range, tails and infinities included."""
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30])]).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    got = functional.activation_dropout(x, None, activation, backend="cpu")
    want = PLAIN[activation](exact_x)
    # 4 units of roundoff relative to the value, and as much absolutely where it vanishes
    torch.testing.assert_close(got.double(), want, rtol=5e-7, atol=5e-7)
    grads = [torch.autograd.grad(y.sum(), z)[0].double() for y, z in ((got, x), (want, exact_x))]
    finite = x.detach().abs() < 1e3  # beyond, x times a slope that underflows is PyTorch's NaN or ours: not compared
    torch.testing.assert_close(grads[0][finite], grads[1][finite], rtol=2e-6, atol=2e-6)


def test_nan_stays_nan(level):
    x = torch.full((20,), torch.nan)
    for activation in PLAIN:
        assert functional.activation_dropout(x, None, activation, backend="cpu").isnan().all(), activation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 1111), (1, 20000), (50,), (4097, 3)], ids=lambda s: "x".join(map(str, s)))
def test_dropout_drops_the_same_elements_in_every_backend(level, dtype, shape):
    factor = drawn_keep_mask(3, shape, 0.37)
    for backend in ("cpu", "reference"):
        torch.manual_seed(3)
        assert torch.equal(functional.dropout(torch.ones(shape, dtype=dtype), 0.37, backend=backend), factor.to(dtype)), backend


@pytest.mark.parametrize("dropout_p", [1e-4, 0.1, 0.5, 0.999])
def test_dropout_keeps_as_many_as_it_says(level, dropout_p):
    kept = functional.dropout(torch.ones(1000, 1000), dropout_p, backend="cpu").count_nonzero().item()
    threshold = round((1 - dropout_p) * 65536)
    assert keep_count_is_likely(kept, 10**6, threshold / 65536)


def test_dropout_of_infinity_is_zero_where_dropped():
    out = functional.dropout(torch.full((1000,), torch.inf), 0.5, backend="cpu")
    assert set(out.tolist()) == {0.0, torch.inf}


def test_dropout_without_probability_returns_the_values():
    x = torch.randn(3, 4)
    assert torch.equal(functional.dropout(x, 0.0), x)


def test_scalar_and_empty():
    assert functional.dropout(torch.tensor(2.0), 0.5).item() in (0.0, 4.0)
    for shape in ((0,), (3, 0), (0, 3)):
        x, bias = torch.empty(shape, requires_grad=True), torch.ones(shape[-1], requires_grad=True)
        out = functional.activation_dropout(x, bias, "gelu", dropout_p=0.5)
        assert out.shape == shape
        grads = torch.autograd.grad(out.sum(), (x, bias))
        assert grads[0].shape == shape and torch.equal(grads[1], torch.zeros(shape[-1]))


def test_any_strides(level):
    for x in (
        torch.randn(6, 64)[::2, 8:40],
        torch.randn(32, 3).t(),
        torch.randn(3, 1).expand(3, 32),
        torch.randn(32).expand(3, 32),
    ):
        got = functional.activation_dropout(x, None, "relu", backend="cpu")
        assert torch.equal(got, x.relu())
        grad = torch.randn(64, 3).t()[:, ::2]
        want = torch.where(x > 0, grad, 0)
        leaf = x.detach().requires_grad_()
        assert torch.equal(torch.autograd.grad(functional.activation_dropout(leaf, None, "relu"), leaf, grad)[0], want)


def test_every_number_of_threads_gives_the_same_bits(level):
    x, bias, grad = torch.randn(3000, 96), torch.randn(96), torch.randn(3000, 96)

    def op(x, b):
        torch.manual_seed(1)
        return functional.activation_dropout(x, b, "gelu", dropout_p=0.1, backend="cpu")

    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 4, 2):
        torch.set_num_threads(count)
        results.append(run(op, x, bias, grad))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_dropout_keeps_only_the_seed_for_backward():
    saved = []
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.dropout(x, 0.1, backend="cpu")
    assert [t.numel() for t in saved] == [1]


@pytest.mark.parametrize("activation", [a for a in PLAIN if a != "relu"])  # relu has no slope at 0 and no second derivative
def test_gradcheck_on_the_kernel(level, activation):
    x, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,)))

    def op(x, b):
        torch.manual_seed(1)
        return functional.activation_dropout(x, b, activation, dropout_p=0.3, backend="cpu")

    assert torch.autograd.gradcheck(op, (x, bias))
    assert torch.autograd.gradgradcheck(op, (x, bias))


@pytest.mark.parametrize("activation", PLAIN)
def test_opcheck(activation):
    x, bias, seed = torch.randn(3, 4, 8, requires_grad=True), torch.rand(8, requires_grad=True), torch.tensor(5)
    op = torch.ops.fast_transformer.activation_dropout.default
    torch.library.opcheck(op, (x, bias, activation, 0.1, seed))
    torch.library.opcheck(op, (x.detach(), None, activation, 0.0, None))
    backward = torch.ops.fast_transformer.activation_dropout_backward.default
    grad = torch.randn(3, 4, 8)
    torch.library.opcheck(backward, (grad, x.detach(), bias.detach(), activation, 0.1, seed, True))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_without_a_graph_break(compiler):
    torch._dynamo.reset()
    x, bias = torch.randn(6, 8, requires_grad=True), torch.rand(8, requires_grad=True)

    def op(x, bias, dropout_p=0.0):
        return functional.activation_dropout(functional.dropout(x, dropout_p), bias, "gelu", dropout_p=dropout_p)

    compiled = torch.compile(op, fullgraph=True, backend=compiler)
    for a, b in zip(*(torch.autograd.grad(f(x, bias).sum(), (x, bias)) for f in (op, compiled)), strict=True):
        torch.testing.assert_close(a, b)
    first, second = compiled(x, bias, dropout_p=0.5), compiled(x, bias, dropout_p=0.5)
    assert not torch.equal(first, second)  # each call draws its own seed


def test_transforms_go_to_the_reference():
    x = torch.randn(5, 3, 8)
    torch.testing.assert_close(torch.vmap(lambda x: functional.activation_dropout(x, None, "gelu"))(x), F.gelu(x))
    hessian = torch.func.hessian(lambda x: functional.activation_dropout(x, None, "silu").sum())(torch.randn(4))
    assert hessian.count_nonzero() == 4


def test_tensor_hooks_fire_once_when_the_gradient_is_recorded():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    grads = []
    for create_graph in (False, True):
        h = x * 1.5
        h.register_hook(lambda g: g * 2)
        out = functional.activation_dropout(h, None, "gelu")
        out = out + functional.dropout_add_layer_norm(h, None, None, None)
        out = out + functional.attention(*[h[None, None]] * 3)[0, 0]
        grads.append(torch.autograd.grad(out.square().sum(), x, create_graph=create_graph)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_transforms_inside_torch_compile(compiler):
    torch._dynamo.reset()
    x, weight = torch.randn(3, 8), torch.rand(8)

    def op(x):
        return functional.activation_dropout(functional.dropout_add_layer_norm(x, x, weight, None), None, "gelu")

    def tangent(x):
        return torch.func.jvp(op, (x,), (x.cos(),))[1]

    def gradient(x):
        return torch.func.grad(lambda x: op(x).square().sum())(x)

    for f in (tangent, gradient):
        torch.testing.assert_close(torch.compile(f, backend=compiler, fullgraph=True)(x), f(x))
        assert f(x).abs().max() > 1e-3


def test_relu_drops_the_gradient_of_what_it_hides():
    x = torch.tensor([-1.0, 0.0, 1.0, torch.nan], requires_grad=True)
    grad = torch.tensor([torch.inf, torch.nan, torch.inf, 2.0])
    for op in (F.relu, lambda x: functional.activation_dropout(x, None, "relu", backend="cpu")):
        assert torch.autograd.grad(op(x), x, grad)[0].tolist() == [0.0, 0.0, torch.inf, 2.0]


def test_ops_refuse_two_devices():
    x, elsewhere = torch.randn(3, 5), torch.ones(5, device="meta")
    op = torch.ops.fast_transformer
    with pytest.raises(ValueError, match="one device, got cpu, meta"):
        op.activation_dropout(x, elsewhere, "relu", 0.0, None)
    with pytest.raises(ValueError, match="one device, got cpu, meta"):
        op.dropout_add_layer_norm(x, None, elsewhere, None, 1e-5, 0.0, None, False, False, False)


def test_numpy_numbers_are_numbers():
    assert functional.dropout(torch.ones(100), np.float32(0.5)).unique().tolist() == [0.0, 2.0]
