"""dropout_add_layer_norm: every backend and instruction set against float64 and plain PyTorch, forward and every gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from common import assert_accurate, drawn_keep_mask, need_extension, randn

from fast_transformer import functional, reference

pytestmark = need_extension
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(1, 5), (3, 7), (2, 3, 16), (5, 33), (4, 100), (3, 1023), (70, 64), (2, 5000)]


def composed(x, residual, weight, bias, *, eps=1e-5, factor=None, prenorm=False):
    """The op as a user writes it with torch.nn.functional; `factor` is dropout's mask, already scaled."""
    total = x if factor is None else x * factor.to(x.dtype)
    total = total if residual is None else residual + total
    weight, bias = (p if p is None else p.to(x.dtype) for p in (weight, bias))
    out = F.layer_norm(total, (x.shape[-1],), weight, bias, eps)
    return (out, total) if prenorm else (out,)


def run(op, inputs, grads):
    """Outputs of op(*inputs) and the gradients of those inputs that are not None."""
    inputs = [t if t is None else t.detach().requires_grad_() for t in inputs]
    out = op(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    grads = [g.to(o.dtype) for g, o in zip(grads, out, strict=False)]
    return [*out, *torch.autograd.grad(out, [t for t in inputs if t is not None], grads)]


def names(inputs, prenorm):
    given = [n for n, t in zip(("x", "residual", "weight", "bias"), inputs, strict=True) if t is not None]
    return ["out", *(["sum"] if prenorm else []), *(f"grad of {n}" for n in given)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64_and_torch(level, dtype, shape, dropout_p):
    n = shape[-1]
    x, residual, grad_out, grad_sum = (randn(*shape) for _ in range(4))
    weight, bias = randn(n), randn(n)
    options = itertools.product((residual, None), ((weight, bias), (weight, None), (None, None)), (False, True))
    for case, (r, (w, b), prenorm) in enumerate(options):
        inputs, grads = (x, r, w, b), (grad_out, grad_sum)
        factor = drawn_keep_mask(case, shape, dropout_p)

        def ours(*args, prenorm=prenorm, case=case):
            torch.manual_seed(case)
            return functional.dropout_add_layer_norm(*args, dropout_p=dropout_p, prenorm=prenorm, backend="cpu")

        def plain(*args, prenorm=prenorm, factor=factor):
            return composed(*args, factor=factor, prenorm=prenorm)

        exact = run(plain, inputs, grads)
        low = [t if t is None else t.to(dtype) for t in inputs]
        # PyTorch adds up a half-precision weight's gradient in half precision (7 % off at 4096 rows); we are held to float32's.
        summed = run(plain, [t if t is None else t.to(torch.promote_types(dtype, torch.float32)) for t in inputs], grads)
        for name, got, like, wide, want in zip(
            names(inputs, prenorm), run(ours, low, grads), run(plain, low, grads), summed, exact, strict=True
        ):
            assert got.dtype == dtype, name
            like = wide.to(dtype) if name in ("grad of weight", "grad of bias") else like
            assert_accurate(name, got, like, want, factor=3 if name.startswith("grad") else 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_element(level, dtype):
    x, residual, weight, bias = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((5, 1), (5, 1), (1,), (1,)))
    out = functional.dropout_add_layer_norm(x, residual, weight, bias, backend="cpu")
    assert torch.equal(out, bias.expand(5, 1))
    grad_x, grad_weight, grad_bias = torch.autograd.grad(out.sum(), (x, weight, bias))
    # A difference of two equal terms of size |weight|, times 1 / sqrt(eps) = 316: 0 but for 316 roundings of a term.
    assert grad_x.abs().max() <= 2 * 316 * weight.abs() * 2.0 ** (-52 if dtype == torch.float64 else -23)
    assert torch.equal(grad_weight, torch.zeros(1, dtype=dtype)) and torch.equal(grad_bias, torch.full((1,), 5.0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_parameters_beside_half_activations(level, dtype):
    x, residual, weight, bias, grad = randn(9, 40), randn(9, 40), randn(40), randn(40), randn(9, 40)
    mixed = [x.to(dtype), residual.to(dtype), weight.float(), bias.float()]
    got = run(functional.dropout_add_layer_norm, mixed, (grad,))
    assert [t.dtype for t in got] == [dtype, dtype, dtype, torch.float32, torch.float32]
    exact = run(composed, (x, residual, weight, bias), (grad,))
    plain = run(composed, [t.to(dtype) for t in mixed], (grad,))
    for name, g, p, e in zip(names(mixed, False), got, plain, exact, strict=True):
        assert_accurate(name, g, p, e, factor=2)


def test_parameters_of_yet_other_dtypes(level):
    x, weight, bias = randn(5, 8).requires_grad_(), randn(8).float().requires_grad_(), randn(8).bfloat16().requires_grad_()
    got = functional.dropout_add_layer_norm(x, None, weight, bias, backend="cpu")
    want = F.layer_norm(x, (8,), weight.double(), bias.double())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(got.sum(), (weight, bias))
    assert [g.dtype for g in grads] == [torch.float32, torch.bfloat16]


def test_mixed_dtypes_promote_as_addition_does():
    x, residual = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    out, total = functional.dropout_add_layer_norm(x, residual, None, None, prenorm=True)
    assert out.dtype == total.dtype == torch.float32
    torch.testing.assert_close(total, residual + x)
    grads = torch.autograd.grad(out.square().sum() + total.sum(), (x, residual))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_keep_their_precision(level, dtype):
    x = randn(2, 65536) + 4
    got = functional.dropout_add_layer_norm(x.to(dtype), None, None, None, backend="cpu")
    exact = F.layer_norm(x.to(dtype).double(), (65536,))
    assert_accurate("out", got, F.layer_norm(x.to(dtype), (65536,)), exact, factor=2)


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_mean_far_from_zero(level, offset):
    x = torch.randn(4, 257) * 0.5 + offset
    got = functional.dropout_add_layer_norm(x, None, None, None, backend="cpu")
    assert_accurate("out", got, F.layer_norm(x, (257,)), F.layer_norm(x.double(), (257,)), factor=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [1e-12, 0.5])
def test_constant_rows_are_finite(level, dtype, eps):
    x = torch.full((3, 24), 7.0, dtype=dtype, requires_grad=True)
    out = functional.dropout_add_layer_norm(x, None, None, None, eps=eps, backend="cpu")
    assert torch.equal(out, torch.zeros_like(out))
    if dtype != torch.float16:  # whose range ends below the gradient, about 1 / sqrt(eps)
        (grad,) = torch.autograd.grad(out, x, torch.randn_like(out))
        assert grad.isfinite().all()


def test_nan_and_infinity_stay_in_their_row(level):
    x = torch.randn(3, 40)
    x[0, 3], x[1, 17] = torch.nan, torch.inf
    got = functional.dropout_add_layer_norm(x, None, None, None, backend="cpu")
    assert got[0].isnan().all() and got[1].isnan().any() and got[2].isfinite().all()


def test_variance_past_float32_is_nan_not_zero(level):
    x = torch.randn(2, 40)
    x[0] *= 1e30
    out = functional.dropout_add_layer_norm(x, None, None, None, backend="cpu")
    assert out[0].isnan().all() and out[1].isfinite().all()


VIEWS = {
    "sliced": lambda: torch.randn(6, 9, 64)[::2, :, 16:48],
    "transposed": lambda: torch.randn(9, 3, 32).transpose(0, 1),
    "last dim strided": lambda: torch.randn(3, 9, 64)[..., ::2],
    "expanded rows": lambda: torch.randn(1, 1, 32).expand(3, 9, 32),
    "expanded columns": lambda: torch.randn(3, 9, 1).expand(3, 9, 32),
}


@pytest.mark.parametrize("name", VIEWS)
def test_any_strides(level, name):
    x, grad = VIEWS[name](), VIEWS[name]()
    residual = torch.randn(x.shape) if name == "expanded columns" else VIEWS[name]()  # a sum without variance proves little
    before = [t.clone() for t in (x, residual, grad)]
    got = run(lambda *a: functional.dropout_add_layer_norm(*a, backend="cpu"), (x, residual, None, None), (grad,))
    want = run(composed, [x.double(), residual.double(), None, None], (grad.double(),))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, residual, grad), strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
def test_no_rows(level, shape):
    x = torch.empty(shape, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    out, total = functional.dropout_add_layer_norm(x, x, weight, None, dropout_p=0.5, prenorm=True, backend="cpu")
    assert out.shape == total.shape == shape
    grads = torch.autograd.grad(out.sum() + total.sum(), (x, weight))
    assert grads[0].shape == shape and torch.equal(grads[1], torch.zeros(8))


def test_one_dimension(level):
    x = torch.randn(50)
    torch.testing.assert_close(functional.dropout_add_layer_norm(x, x, None, None, backend="cpu"), F.layer_norm(2 * x, (50,)))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9999])
def test_the_same_elements_are_dropped_by_every_backend(level, dropout_p):
    x, nothing = torch.ones(37, 1111), torch.zeros(37, 1111)
    factor = drawn_keep_mask(3, x.shape, dropout_p)
    for backend in ("cpu", "reference"):
        torch.manual_seed(3)
        _, total = functional.dropout_add_layer_norm(x, nothing, None, None, dropout_p=dropout_p, prenorm=True, backend=backend)
        assert torch.equal(total, factor.float()), backend


def test_every_number_of_threads_gives_the_same_bits(level):
    inputs, grads = [torch.randn(3000, 96), torch.randn(3000, 96), torch.rand(96), torch.rand(96)], [torch.randn(3000, 96)]

    def op(*args):
        torch.manual_seed(1)
        return functional.dropout_add_layer_norm(*args, dropout_p=0.1, backend="cpu")

    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 4, 2):
        torch.set_num_threads(count)
        results.append(run(op, inputs, grads))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("needed", list(itertools.product((False, True), repeat=4)), ids=lambda n: "".join("ny"[i] for i in n))
@pytest.mark.parametrize("prenorm", [False, True])
def test_only_the_gradients_that_are_wanted(needed, prenorm):
    inputs = [torch.randn(4, 8, dtype=torch.float64) for _ in range(2)] + [torch.rand(8, dtype=torch.float64) for _ in range(2)]
    for t, n in zip(inputs, needed, strict=True):
        t.requires_grad_(n)
    results = []
    for backend in ("cpu", "reference"):
        torch.manual_seed(0)
        out = functional.dropout_add_layer_norm(*inputs, dropout_p=0.2, prenorm=prenorm, backend=backend)
        loss = sum(o.square().sum() for o in (out if prenorm else (out,)))
        assert loss.requires_grad == any(needed)
        wanted = [t for t in inputs if t.requires_grad]
        results.append(torch.autograd.grad(loss, wanted) if wanted else ())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("used", ["out", "sum"])
def test_one_of_the_two_outputs_used(used):
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(8, dtype=torch.float64, requires_grad=True)
    grads = []
    for backend in ("cpu", "reference"):
        out = functional.dropout_add_layer_norm(x, None, weight, None, prenorm=True, backend=backend)
        grads.append(torch.autograd.grad(out[used == "sum"].square().sum(), (x, weight), allow_unused=True))
    torch.testing.assert_close(grads[0][0], grads[1][0])
    assert (grads[0][1] is None) == (used == "sum")
    if used == "out":
        torch.testing.assert_close(grads[0][1], grads[1][1])


def test_backward_keeps_nothing_of_the_size_of_x_but_the_inputs():
    x, residual = torch.randn(64, 256, requires_grad=True), torch.randn(64, 256, requires_grad=True)
    for prenorm in (False, True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            out = functional.dropout_add_layer_norm(x, residual, None, None, dropout_p=0.1, prenorm=prenorm, backend="cpu")
        large = {t.data_ptr() for t in saved if t.numel() >= x.numel()}
        assert large == ({out[1].data_ptr()} if prenorm else {x.data_ptr(), residual.data_ptr()})
        assert sum(t.numel() for t in saved if t.numel() < x.numel()) == 2 * 64 + 1  # row statistics and the seed


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_gradcheck_on_the_kernel(level, prenorm, dropout_p):
    inputs = [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inputs += [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def op(*args):
        torch.manual_seed(1)
        return functional.dropout_add_layer_norm(*args, dropout_p=dropout_p, prenorm=prenorm, backend="cpu")

    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


@pytest.mark.parametrize("prenorm", [False, True])
def test_opcheck(prenorm):
    x, residual = torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    weight, bias, seed = torch.rand(8, requires_grad=True), torch.rand(8), torch.tensor(5)
    op = torch.ops.fast_transformer.dropout_add_layer_norm.default
    torch.library.opcheck(op, (x, residual, weight, bias, 1e-5, 0.1, seed, False, prenorm, False))
    torch.library.opcheck(op, (x.detach(), None, None, None, 1e-5, 0.0, None, True, prenorm, False))
    half = [x.detach().bfloat16().requires_grad_(), residual, weight, None]
    torch.library.opcheck(op, (*half, 1e-5, 0.1, seed, True, prenorm, True), rtol=1e-2, atol=1e-2)


def test_opcheck_of_backward():
    x, residual, weight, grad = torch.randn(6, 8), torch.randn(6, 8), torch.rand(8), torch.randn(6, 8)
    forward = torch.ops.fast_transformer.dropout_add_layer_norm.default
    _, _, stats = forward(x, residual, weight, None, 1e-5, 0.0, None, False, False, False)
    op = torch.ops.fast_transformer.dropout_add_layer_norm_backward.default
    for p, seed in ((0.0, None), (0.1, torch.tensor(5))):
        torch.library.opcheck(op, (grad, None, x, residual, weight, stats, 1e-5, p, seed, False, True, True))
        torch.library.opcheck(op, (grad.bfloat16(), x, None, residual, weight, stats, 1e-5, p, seed, True, True, False))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("prenorm", [False, True])
def test_compiles_without_a_graph_break(compiler, prenorm):
    torch._dynamo.reset()
    inputs = [torch.randn(6, 8, requires_grad=True) for _ in range(2)] + [torch.rand(8, requires_grad=True) for _ in range(2)]

    def op(*args, dropout_p=0.0):
        out = functional.dropout_add_layer_norm(*args, prenorm=prenorm, dropout_p=dropout_p)
        return sum(o.square() for o in (out if prenorm else (out,)))

    compiled = torch.compile(op, fullgraph=True, backend=compiler)
    grads = [torch.autograd.grad(f(*inputs).sum(), inputs) for f in (op, compiled)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    assert compiled(*inputs, dropout_p=0.5).isfinite().all()


def test_transforms_go_to_the_reference():
    x, weight = torch.randn(5, 3, 8), torch.rand(8)

    def op(x):
        return functional.dropout_add_layer_norm(x, x, weight, None)

    torch.testing.assert_close(torch.vmap(op)(x), op(x))
    out, tangent = torch.func.jvp(op, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.zeros_like(x), atol=1e-5, rtol=0)  # a shift of the row changes nothing
    with pytest.raises(RuntimeError, match="torch.func transform"):
        torch.vmap(lambda x: functional.dropout_add_layer_norm(x, None, None, None, backend="cpu"))(x)


def test_reference_is_the_definition():
    """The oracle itself, against torch.nn.functional in float64."""
    inputs, grads = [randn(4, 9), randn(4, 9), randn(9), randn(9)], [randn(4, 9), randn(4, 9)]
    for prenorm in (False, True):

        def op(*args, prenorm=prenorm):
            return reference.dropout_add_layer_norm(
                *args, eps=1e-5, dropout_p=0.0, seed=None, prenorm=prenorm, residual_in_fp32=False
            )

        def plain(*args, prenorm=prenorm):
            return composed(*args, prenorm=prenorm)

        for got, want in zip(run(op, inputs, grads), run(plain, inputs, grads), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
