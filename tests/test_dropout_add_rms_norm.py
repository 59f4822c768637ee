"""dropout_add_rms_norm, and the float32 residual stream of both norms, against float64 and plain PyTorch.

What the two norms share in code is tested in test_dropout_add_layer_norm.py.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from common import assert_accurate, drawn_keep_mask, need_extension, randn

from fast_transformer import functional, reference

pytestmark = need_extension
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(1, 5), (2, 3, 16), (5, 33), (70, 64), (2, 5000)]


def norm_of(rms):
    """(ours, PyTorch's), as functions of (x, residual, weight, bias); RMSNorm leaves the bias out."""
    if rms:
        return (
            lambda x, residual, weight, bias, **options: functional.dropout_add_rms_norm(x, residual, weight, **options),
            lambda x, weight, bias, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
        )
    return functional.dropout_add_layer_norm, lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def gradients(outputs, inputs, grads):
    return torch.autograd.grad(outputs, inputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=False)])


def compare(dtype, shape, *, rms, dropout_p, prenorm, in_fp32, case):
    """One call and its gradients: ours, plain PyTorch in the same dtypes, float64."""
    x, residual, *grads = (randn(*shape) for _ in range(4))
    parameters = [randn(shape[-1]) for _ in range(1 if rms else 2)]
    factor = drawn_keep_mask(case, shape, dropout_p)
    ours, theirs = norm_of(rms)
    stream = torch.promote_types(dtype, torch.float32) if in_fp32 else dtype

    def run(dtype, stream, fused):
        inputs = [t.to(d).requires_grad_() for t, d in ((x, dtype), (residual, stream), *((p, dtype) for p in parameters))]
        bias = None if rms else inputs[3]
        if fused:
            torch.manual_seed(case)
            options = {"eps": 1e-5, "dropout_p": dropout_p, "prenorm": prenorm, "residual_in_fp32": in_fp32, "backend": "cpu"}
            out = ours(*inputs[:3], bias, **options)
        else:
            total = inputs[1] + (inputs[0] if factor is None else inputs[0] * factor.to(dtype))
            out = theirs(total, inputs[2].to(stream), bias if bias is None else bias.to(stream), 1e-5).to(dtype), total
        outputs = out if isinstance(out, tuple) else (out,)
        outputs = outputs[: 1 + prenorm]
        return [*outputs, *gradients(outputs, inputs, grads)]

    wide = torch.promote_types(dtype, torch.float32)
    names = ["out", *(["sum"] if prenorm else []), "grad of x", "grad of residual", "grad of weight", "grad of bias"]
    results = (
        run(dtype, stream, True),
        run(dtype, stream, False),
        run(wide, wide, False),
        run(torch.float64, torch.float64, False),
    )
    for name, got, plain, summed, exact in zip(names, *results, strict=False):
        assert got.dtype == plain.dtype, name
        # As in test_dropout_add_layer_norm: parameters' gradients are held to sums in float32.
        plain = summed.to(dtype) if name in ("grad of weight", "grad of bias") else plain
        assert_accurate(name, got, plain, exact, factor=3 if name.startswith("grad") else 2)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64_and_torch(level, dtype, shape):
    for case, (dropout_p, prenorm) in enumerate(itertools.product((0.0, 0.3), (False, True))):
        compare(dtype, shape, rms=True, dropout_p=dropout_p, prenorm=prenorm, in_fp32=False, case=case)


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_in_fp32(level, dtype, rms):
    for case, (dropout_p, prenorm) in enumerate(itertools.product((0.0, 0.3), (False, True))):
        compare(dtype, (5, 33), rms=rms, dropout_p=dropout_p, prenorm=prenorm, in_fp32=True, case=case)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
def test_dtypes_of_a_float32_stream(rms, backend):
    """The stream starts without a residual, and what comes in half precision is taken into it."""
    norm, _ = norm_of(rms)
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True), torch.rand(8, requires_grad=True)
    options = {"prenorm": True, "residual_in_fp32": True, "backend": backend}
    for residual in (None, torch.randn(3, 8), torch.randn(3, 8, dtype=torch.float16), torch.randn(3, 8, dtype=torch.float64)):
        residual = residual if residual is None else residual.requires_grad_()
        out, total = norm(x, residual, weight, None, **options)
        assert out.dtype == torch.bfloat16 and total.dtype == torch.float32
        assert torch.equal(total, x.float() if residual is None else x.float() + residual.float())
        inputs = [x, weight] + ([] if residual is None else [residual])
        for used in (out.square().sum() + total.sum(), total.sum()):
            for t, g in zip(inputs, torch.autograd.grad(used, inputs, retain_graph=True, allow_unused=True), strict=True):
                assert g is None or g.dtype == t.dtype
    out, total = norm(x.double(), torch.randn(3, 8), weight, None, **options)
    assert out.dtype == total.dtype == torch.float64
    assert norm(x, torch.randn(3, 8), None, None, **options | {"prenorm": False}).dtype == torch.bfloat16


def test_small_terms_survive_in_a_float32_stream():
    """1 + 2^-9 is 1 in bfloat16: adding it 512 times moves a float32 stream by 1, a bfloat16 stream not at all."""
    x = torch.full((1, 4), 2.0**-9, dtype=torch.bfloat16)
    for in_fp32, end in ((True, 2.0), (False, 1.0)):
        stream = torch.ones(1, 4, dtype=torch.bfloat16)
        for _ in range(512):
            _, stream = functional.dropout_add_rms_norm(x, stream, None, prenorm=True, residual_in_fp32=in_fp32)
        assert torch.equal(stream.float(), torch.full((1, 4), end))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eps_none_is_that_of_torch(dtype):
    x = torch.full((2, 8), 2.0**-12, dtype=dtype)  # its square is of the size of float32's machine epsilon
    for backend in ("cpu", "reference"):
        got = functional.dropout_add_rms_norm(x, None, None, backend=backend)
        torch.testing.assert_close(got, F.rms_norm(x, (8,)))


def test_variance_past_float32_is_nan_not_zero(level):
    out = functional.dropout_add_rms_norm(torch.full((1, 40), 1e30), None, None, backend="cpu")
    assert out.isnan().all()


@pytest.mark.parametrize("prenorm", [False, True])
def test_gradcheck_on_the_kernel(level, prenorm):
    inputs = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (3, 5), (5,))]

    def op(*args):
        torch.manual_seed(1)
        return functional.dropout_add_rms_norm(*args, dropout_p=0.4, prenorm=prenorm, backend="cpu")

    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    x, weight = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True), torch.rand(8, requires_grad=True)
    residual = torch.randn(6, 8, requires_grad=True)

    def op(*args):
        out, total = functional.dropout_add_rms_norm(*args, prenorm=True, residual_in_fp32=True)
        return out.float().square() + total

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(x, residual, weight).sum(), (x, residual, weight)) for f in (op, compiled)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_transforms_go_to_the_reference():
    x, weight = torch.randn(5, 3, 8), torch.rand(8)
    op = functional.dropout_add_rms_norm
    torch.testing.assert_close(torch.vmap(lambda x: op(x, x, weight))(x), op(x, x, weight))
    torch.testing.assert_close(
        torch.func.grad(lambda x: op(x, x, weight).square().sum())(x),
        torch.func.grad(lambda x: F.rms_norm(2 * x, (8,), weight).square().sum())(x),
    )


def test_reference_is_the_definition():
    x, weight = randn(4, 9), randn(9)
    options = {"eps": 1e-5, "dropout_p": 0.0, "seed": None, "prenorm": False, "residual_in_fp32": False}
    got = reference.dropout_add_rms_norm(x, x, weight, **options)
    torch.testing.assert_close(got, F.rms_norm(2 * x, (9,), weight, 1e-5), rtol=1e-12, atol=1e-12)
