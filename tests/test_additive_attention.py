"""functional.additive_attention against a loop in float64 that says what it is, on every path."""

import itertools
import math

import pytest
import torch
from common import assert_accurate, need_extension, randn
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from fast_transformer import ops, reference
from fast_transformer.functional import additive_attention

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
GPU = torch.cuda.is_available()
DTYPES = {  # Triton's interpreter is slow; bfloat16 differs from float16 in nothing but the type
    "reference": (f64, f32, bf16, f16),
    "cpu": (f64, f32, bf16, f16),
    "triton": (f32, bf16, f16) if GPU else (f32, f16),
}
DEVICE = {"reference": "cpu", "cpu": "cpu", "triton": "cuda" if GPU else "cpu"}
BACKENDS = [pytest.param(b, marks=need_extension if b == "cpu" else ()) for b in DTYPES]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def oracle(query, key, value, weight, mask=None):
    """Output (B, L, Dv) and weights (B, L, S): for each query, a softmax over a list of keys."""
    (B, L, _), S = query.shape, key.shape[1]
    seen = torch.ones(B, L, S, dtype=torch.bool) if mask is None else mask.expand(B, L, S)
    out, weights = [], []
    for b, i in itertools.product(range(B), range(L)):
        keys = seen[b, i].nonzero()[:, 0]
        w = torch.zeros(S, dtype=query.dtype)
        if len(keys):
            scores = ((query[b, i] + key[b, keys]).tanh() * weight).sum(-1)
            w = w.index_put((keys,), (scores - scores.max().detach()).exp())
            w = w / w.sum()
        weights.append(w)
        out.append((w[:, None] * value[b]).sum(0))
    return torch.stack(out).view(B, L, -1), torch.stack(weights).view(B, L, S)


def plain(query, key, value, weight, mask=None):
    """The same as one would write it in PyTorch, in the dtype of the arguments."""
    scores = torch.tanh(query[:, :, None] + key[:, None]) @ weight
    if mask is not None:
        blind = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask & ~blind, -math.inf)
    weights = scores.softmax(-1)
    weights = weights if mask is None else weights.masked_fill(blind, 0.0)
    return weights @ value, weights


CASES = {  # B, L, S, D, Dv, the shape of a random mask whose first rows are blind
    "B2-L3-S17-D33": (2, 3, 17, 33, 5, None),
    "B1-L17-S3-D16": (1, 17, 3, 16, 3, (1, 17, 3)),
    "B3-L1-S33-D17": (3, 1, 33, 17, 1, (3, 1, 33)),
    "B1-L33-S65-D3": (1, 33, 65, 3, 4, (33, 65)),
    "B2-L5-S7-D1": (2, 5, 7, 1, 2, (2, 1, 7)),
    "B1-L1-S1-D1": (1, 1, 1, 1, 1, None),
    "B1-L18-S130-D40": (1, 18, 130, 40, 8, (18, 1)),
}


def tensors(case):
    B, L, S, D, Dv, mask_shape = CASES[case]
    inputs = 2 * randn(B, L, D), randn(B, S, D), randn(B, S, Dv), randn(D)
    if mask_shape is None:
        return inputs, None
    mask = torch.rand(mask_shape) < 0.7
    mask.view(-1, mask_shape[-1])[0] = False
    return inputs, mask


def run(fn, inputs, cotangents):
    """Output, weights, and the gradients of query, key, value and weight."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = fn(*inputs)
    return [*results, *torch.autograd.grad(results, inputs, [c.to(r) for c, r in zip(cotangents, results, strict=True)])]


NAMES = ("output", "weights", "grad of query", "grad of key", "grad of value", "grad of weight")


def check(backend, case, dtype):
    inputs, mask = tensors(case)
    cotangents = [randn(*x.shape) for x in plain(*inputs)]
    exact = run(lambda *x: oracle(*x, mask=mask), inputs, cotangents)
    device = DEVICE[backend]
    inputs = [x.to(device, dtype) for x in inputs]
    mask = None if mask is None else mask.to(device)
    like = run(lambda *x: plain(*x, mask=mask), inputs, cotangents)
    got = run(lambda *x: additive_attention(*x, mask=mask, return_weights=True, backend=backend), inputs, cotangents)
    # A score sums D tangents, each off by up to two units of roundoff of its weight: by a fraction of what these are in all. As
    # much a weight, which is its exponential, is off relatively, where plain PyTorch may be lucky.
    floor = torch.finfo(torch.promote_types(dtype, f32)).eps / 2 * inputs[3].double().abs().sum().item()
    for i, (name, g, p, e) in enumerate(zip(NAMES, got, like, exact, strict=True)):
        assert g.dtype == dtype, name
        assert_accurate(name, g, p, e, factor=2 if i < 2 else 3, floor=floor)


@every_backend
@pytest.mark.parametrize("case", CASES)
def test_against_float64_and_torch(backend, case):
    if backend == "triton" and not GPU and case == "B1-L18-S130-D40":
        pytest.skip("slow in the interpreter, and B1-L33-S65-D3 has as many blocks")
    for dtype in DTYPES[backend]:
        check(backend, case, dtype)


@need_extension
@pytest.mark.parametrize("case", ["B2-L3-S17-D33", "B3-L1-S33-D17", "B1-L18-S130-D40"])
def test_every_instruction_set(level, case):
    for dtype in DTYPES["cpu"]:
        check("cpu", case, dtype)


@need_extension
def test_tanh_of_every_magnitude(level):
    """As a score of one column, with weight 1: right to two units in the last place, odd, at most 1, NaN kept."""
    x = torch.cat([torch.logspace(-30, 4, 40001), torch.linspace(0, 10, 40001), torch.tensor([math.inf, 0.0, 1e-40])])
    x = torch.cat([x, -x])
    zero, one = torch.zeros(1, 1, 1), torch.ones(1)
    for dtype in (f32, f64):
        scores = lambda x, dtype=dtype: torch.ops.fast_transformer.additive_scores(  # noqa: E731
            *(t.to(dtype) for t in (x[None, :, None], zero, one))
        ).view(-1)
        got, exact = scores(x), x.double().tanh()
        assert got.abs().max() == 1 and torch.equal(got, -got.roll(len(x) // 2))
        unit = 2.0 ** torch.frexp(exact).exponent.double() * torch.finfo(dtype).eps / 2
        assert ((got.double() - exact).abs() <= 2 * unit)[x.abs() > 1e-37].all()
        assert scores(torch.tensor([0.0, math.nan, 1.0])).isnan().tolist() == [False, True, False]


@every_backend
def test_blind_rows_give_zeros(backend):
    inputs = [x.to(DEVICE[backend], f32) for x in tensors("B2-L3-S17-D33")[0]]
    for mask in (torch.zeros(1, 1, 1, dtype=torch.bool), torch.zeros(2, 3, 17, dtype=torch.bool)):
        mask = mask.to(DEVICE[backend])
        fn = lambda *x, m=mask: additive_attention(*x, mask=m, return_weights=True, backend=backend)  # noqa: E731
        results = run(fn, inputs, [torch.ones_like(x) for x in fn(*inputs)])
        assert all(x.count_nonzero() == 0 and not x.isnan().any() for x in results)


@every_backend
def test_true_means_attend(backend):
    query, key, value, weight = (x.to(DEVICE[backend], f32) for x in tensors("B2-L3-S17-D33")[0])
    mask = torch.arange(17, device=query.device) < 4
    got = additive_attention(query, key, value, weight, mask=mask, backend=backend)
    expected = additive_attention(query, key[:, :4], value[:, :4], weight, backend=backend)
    torch.testing.assert_close(got, expected)
    value[:, 4:] += 100.0
    assert torch.equal(additive_attention(query, key, value, weight, mask=mask, backend=backend), got)


@every_backend
@pytest.mark.parametrize("B, L, S", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
def test_empty(backend, B, L, S):
    device = DEVICE[backend]
    inputs = [torch.ones(s, device=device, requires_grad=True) for s in ((B, L, 5), (B, S, 5), (B, S, 2), (5,))]
    mask = torch.ones(B, 1, S, dtype=torch.bool, device=device)
    for m in (None, mask):
        out, weights = additive_attention(*inputs, mask=m, return_weights=True, backend=backend)
        assert out.shape == (B, L, 2) and weights.shape == (B, L, S) and out.count_nonzero() == 0
        grads = torch.autograd.grad(out.sum() + weights.sum(), inputs)
        assert all(g.shape == x.shape and g.count_nonzero() == 0 for g, x in zip(grads, inputs, strict=True))


@every_backend
@pytest.mark.parametrize("dtype", [f32, f16], ids=str)
def test_any_strides(backend, dtype):
    device = DEVICE[backend]
    wide = torch.randn(5, 2, 20, device=device, dtype=dtype)
    inputs = (
        wide.transpose(0, 1)[:, :3, :6],  # a part of a fused projection
        torch.randn(1, 6, 5, device=device, dtype=dtype).mT.expand(2, 5, 6),  # columns apart, one batch for all
        wide[:, :, ::2].transpose(0, 1),
        torch.randn(12, device=device, dtype=dtype)[::2],
    )
    cotangents = torch.randn(2, 3, 10), torch.randn(2, 3, 5)
    fn = lambda *x: additive_attention(*x, return_weights=True, backend=backend)  # noqa: E731
    got, expected = (
        run(fn, inputs, cotangents),
        run(fn, [x.clone(memory_format=torch.contiguous_format) for x in inputs], cotangents),
    )
    assert all(torch.equal(a, b) for a, b in zip(got[:2], expected[:2], strict=True))
    for a, b in zip(got[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, b)


@need_extension
def test_every_number_of_threads_gives_the_same_bits(level):
    """Of the scores and their gradients; the softmax on top of them is PyTorch's."""
    inputs = [torch.randn(s) for s in ((3, 70, 100), (3, 90, 100), (100,))]
    cotangent = torch.randn(3, 70, 90)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(run(lambda *x: [torch.ops.fast_transformer.additive_scores(*x)], inputs, [cotangent]))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@need_extension
def test_nothing_of_the_size_of_the_tangents_is_kept():
    inputs = [torch.randn(s, requires_grad=True) for s in ((2, 30, 64), (2, 40, 64), (2, 40, 8), (64,))]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        additive_attention(*inputs)
    assert max(saved) <= 2 * 40 * 64


# Derivatives


def small():
    return [torch.randn(s, dtype=f64, requires_grad=True) for s in ((2, 3, 5), (2, 4, 5), (2, 4, 2), (5,))]


MASK = torch.tensor([[[True, False, True, True], [False] * 4, [True] * 4]])


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.values[0] != "triton"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "mask"])
def test_gradcheck(backend, mask):
    fn = lambda *x: additive_attention(*x, mask=mask, return_weights=True, backend=backend)  # noqa: E731
    assert gradcheck(fn, small(), fast_mode=backend == "reference")
    assert gradgradcheck(fn, small(), fast_mode=True)


@every_backend
def test_double_backward(backend):
    """Against the reference's, through what a kernel records."""
    inputs = [torch.randn(s, device=DEVICE[backend], requires_grad=True) for s in ((2, 3, 5), (2, 4, 5), (2, 4, 2), (5,))]
    results = []
    for b in (backend, "reference"):
        grads = torch.autograd.grad(additive_attention(*inputs, backend=b).square().sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), inputs))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_related_inputs_have_the_same_gradient_when_it_is_recorded():
    x = torch.randn(2, 3, 4, dtype=f64, requires_grad=True)
    loss = lambda: additive_attention(x, 2 * x, x.sin(), x[0, 0]).square().sum()  # noqa: E731
    torch.testing.assert_close(torch.autograd.grad(loss(), x, create_graph=True), torch.autograd.grad(loss(), x))


def test_transforms_go_to_the_reference():
    query, key, value, weight = small()
    fn = lambda q, w: additive_attention(q[None], key[:1], value[:1], w, mask=MASK)  # noqa: E731
    got = torch.vmap(fn, in_dims=(0, None))(query.detach(), weight.detach())
    torch.testing.assert_close(got, torch.stack([fn(q, weight) for q in query]))
    tangents = torch.func.jvp(lambda w: fn(query[0], w), (weight.detach(),), (torch.ones(5, dtype=f64),))[1]
    with forward_ad.dual_level():
        out = fn(query[0], forward_ad.make_dual(weight.detach(), torch.ones(5, dtype=f64)))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, tangents)
    step = 1e-6
    torch.testing.assert_close(tangents, (fn(query[0], weight + step) - fn(query[0], weight - step)) / (2 * step))


# torch.library, torch.compile, autocast, the choice of backend


@need_extension
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_opcheck(dtype):
    query, key, weight = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((2, 3, 5), (2, 4, 5), (5,)))
    ops = torch.ops.fast_transformer
    grad = torch.randn(2, 3, 4)
    torch.library.opcheck(ops.additive_scores.default, (query, key, weight))
    torch.library.opcheck(ops.additive_scores_backward.default, (grad, *(x.detach() for x in (query, key, weight))))


@every_backend
def test_opcheck_triton(backend):
    if backend != "triton":
        return
    query, key, weight = (torch.randn(s, device=DEVICE[backend], requires_grad=True) for s in ((2, 3, 5), (2, 4, 5), (5,)))
    ops = torch.ops.fast_transformer
    grad = torch.randn(2, 3, 4, device=DEVICE[backend])
    torch.library.opcheck(ops.additive_scores_triton.default, (query, key, weight))
    torch.library.opcheck(ops.additive_scores_triton_backward.default, (grad, *(x.detach() for x in (query, key, weight))))


@every_backend
def test_compile(backend):
    torch._dynamo.reset()
    inputs = [torch.randn(s, device=DEVICE[backend], requires_grad=True) for s in ((2, 3, 5), (2, 4, 5), (2, 4, 2), (5,))]
    fn = lambda *x: additive_attention(*x, mask=MASK.to(DEVICE[backend]), return_weights=True, backend=backend)  # noqa: E731
    results = [run(f, inputs, fn(*inputs)) for f in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager"))]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_autocast_casts_as_attention_does():
    inputs = [torch.randn(s, requires_grad=True) for s in ((2, 3, 5), (2, 4, 5), (2, 4, 2), (5,))]
    with torch.autocast("cpu", bf16):
        out, weights = additive_attention(*inputs, return_weights=True)
    expected = additive_attention(*(x.bfloat16() for x in inputs), return_weights=True)
    assert out.dtype == weights.dtype == bf16
    assert torch.equal(out, expected[0]) and torch.equal(weights, expected[1])
    assert all(g.dtype == f32 for g in torch.autograd.grad(out.sum(), inputs))


@need_extension
@pytest.mark.parametrize("forced, expected", [(None, "ops"), ("cpu", "ops"), ("reference", "reference")])
def test_the_path_that_is_taken(forced, expected, monkeypatch):
    taken = []
    for name, module in (("ops", ops), ("reference", reference)):
        fn = module.additive_scores
        monkeypatch.setattr(module, "additive_scores", lambda *a, fn=fn, name=name: taken.append(name) or fn(*a))
    additive_attention(*small(), backend=forced)
    assert taken == [expected]


# Bad input


SHAPES = dict(query=(2, 3, 5), key=(2, 4, 5), value=(2, 4, 6), weight=(5,))


def call(**changes):
    return additive_attention(**{name: torch.zeros(shape) for name, shape in SHAPES.items()} | changes)


META = torch.device("meta")
# fmt: off
BAD = {
    "query-list": (dict(query=[1.0]), TypeError, "query must be a torch.Tensor, got list"),
    "key-None": (dict(key=None), TypeError, "key must be a torch.Tensor, got NoneType"),
    "weight-int": (dict(weight=torch.ones(5, dtype=torch.int64)), TypeError, "weight must have a floating-point dtype"),
    "key-double": (dict(key=torch.zeros(2, 4, 5).double()), TypeError, "query, key, value and weight must have one dtype"),
    "weight-half": (dict(weight=torch.zeros(5).half()), TypeError, "one dtype, got torch.float32, "),
    "value-meta": (dict(value=torch.zeros(2, 4, 6, device=META)), ValueError, "value must be on cpu"),
    "query-2-dims": (dict(query=torch.zeros(2, 5)), ValueError, "query must have shape (batch, length, size), got (2, 5)"),
    "weight-2-dims": (dict(weight=torch.zeros(1, 5)), ValueError, "weight must have shape (size,), got (1, 5)"),
    "weight-length": (dict(weight=torch.zeros(1)), ValueError, "weight must have shape (5,), the last size of query, got (1,)"),
    "key-batch": (dict(key=torch.zeros(1, 4, 5)), ValueError, "key must have the batch size and last size of query, 2 and 5;"),
    "key-size": (dict(key=torch.zeros(2, 4, 1)), ValueError, "got query (2, 3, 5), key (2, 4, 1)"),
    "value-length": (dict(value=torch.zeros(2, 5, 6)), ValueError, "value must be (B, S, Dv) = (2, 4) + (Dv,) like key"),
    "value-size": (dict(value=torch.zeros(2, 4, 0)), ValueError, "sizes must be at least 1, got 5 for query"),
    "mask-float": (dict(mask=torch.ones(2, 3, 4)), TypeError, "mask must be a bool tensor (True = attend), got torch.float32"),
    "mask-(B,S)": (dict(mask=torch.ones(2, 4).bool()), ValueError, "mask must broadcast to (B, L, S) = (2, 3, 4), got (2, 4)"),
    "mask-4-dims": (dict(mask=torch.ones(1, 2, 3, 4).bool()), ValueError, "mask must broadcast to (B, L, S)"),
    "weights-str": (dict(return_weights="mean"), TypeError, "return_weights must be True or False, got 'mean'"),
    "backend": (dict(backend="cuda"), ValueError, "backend must be None or one of 'cpu', 'triton', 'reference', got 'cuda'"),
}
# fmt: on


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changes, exception, text = BAD[name]
    with pytest.raises(exception) as info:
        call(**changes)
    assert text in str(info.value)


@need_extension
def test_forced_backend_gives_its_reason():
    float8 = {name: torch.zeros(shape).to(torch.float8_e4m3fn) for name, shape in SHAPES.items()}
    with pytest.raises(RuntimeError, match="backend='cpu' cannot take this call: no kernel for torch.float8_e4m3fn"):
        call(**float8, backend="cpu")
