"""functional.attention against a loop in float64 that says what attention is, one query at a time."""

import itertools
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from common import TOLERANCES, assert_accurate, drawn_keep_mask, keep_count_is_likely, need_extension, randn
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from fast_transformer import functional, ops, reference
from fast_transformer.functional import attention

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Backend:
    """A path of `attention` under test: a new one joins BACKENDS and every test below runs on it."""

    name: str | None  # None: what attention chooses by itself
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (f64, f32, bf16, f16)
    # How often scores, their maximum and the log-sum-exp are rounded until a weight is exp(score - lse), once each if the
    # arithmetic is that of a softmax. A weight is off by the sum of these roundings: 2^-24 |lse| each.
    lse_roundings: int = 0

    def __str__(self):
        return str(self.name)

    @property
    def interpreted(self) -> bool:
        return self.name == "triton" and self.device == "cpu"


# Without a GPU Triton's kernels run in its interpreter, which is slow; bfloat16 differs from float16 in nothing but the type.
# Scores in base 2 are rounded when scaled; the log-sum-exp when it is made, brought to base e, and back.
TRITON = ("cuda", (f32, bf16, f16), 4) if torch.cuda.is_available() else ("cpu", (f32, f16), 4)
BACKENDS = [Backend("reference"), Backend("cpu"), Backend("triton", *TRITON)]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


# The oracle, and plain PyTorch


def sees(i, j, causal=False, query_offset=0, window=None):
    """Whether query i may look at key j."""
    ahead = j - (i + query_offset)
    left, right = (None, None) if window is None else window
    return not (causal and ahead > 0) and (left is None or -ahead <= left) and (right is None or ahead <= right)


def oracle(query, key, value, *, mask=None, bias=None, scale=None, softcap=None, kept=None, dropout_p=0.0, **position):
    """Output (B, H, L, Dv), weights (B, H, L, S) and log-sum-exp (B, H, L): for each query, a softmax over a list of keys.

    kept: bool (B, H, L, S), the weights that dropout left.
    """
    (B, H, L, D), (Hkv, S) = query.shape, key.shape[1:3]
    scale = 1 / math.sqrt(D) if scale is None else scale
    allowed = torch.ones(B, H, L, S, dtype=torch.bool) if mask is None else mask.expand(B, H, L, S)
    if bias is not None:
        bias = bias.expand(B, H, L, S)
        allowed = allowed & (bias.detach() != -math.inf)
    allowed = allowed.tolist()
    out, weights, lse = [], [], []
    for b, h, i in itertools.product(range(B), range(H), range(L)):
        kv = h // (H // Hkv)
        keys = [j for j in range(S) if allowed[b][h][i][j] and sees(i, j, **position)]
        if not keys:
            out.append(value.new_zeros(value.shape[3]))
            weights.append(query.new_zeros(S))
            lse.append(query.new_tensor(-math.inf))
            continue
        score = (key[b, kv, keys] * query[b, h, i]).sum(-1) * scale
        if softcap is not None:
            score = softcap * (score / softcap).tanh()
        if bias is not None:
            score = score + bias[b, h, i, keys]
        top = score.detach().max()
        total = (score - top).exp().sum()
        weight = (score - top).exp() / total
        if kept is not None:
            weight = weight * kept[b, h, i, keys] / (1 - dropout_p)
        out.append(weight @ value[b, kv, keys])
        weights.append(query.new_zeros(S).index_put((torch.tensor(keys),), weight))
        lse.append(top + total.log())
    if not out:
        return query.new_zeros(B, H, L, value.shape[3]), query.new_zeros(B, H, L, S), query.new_zeros(B, H, L)
    return torch.stack(out).view(B, H, L, -1), torch.stack(weights).view(B, H, L, S), torch.stack(lse).view(B, H, L)


def plain(query, key, value, *, mask=None, bias=None, scale=None, softcap=None, **position):
    """The same three as one would write them in PyTorch, in the dtype of the arguments; the log-sum-exp at least in float32."""
    (H, L, D), (Hkv, S) = query.shape[1:], key.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    key, value = key.repeat_interleave(H // Hkv, 1), value.repeat_interleave(H // Hkv, 1)
    allowed = torch.tensor([sees(i, j, **position) for i in range(L) for j in range(S)], dtype=torch.bool).view(L, S)
    allowed = allowed.to(query.device) if mask is None else allowed.to(query.device) & mask

    def scores(query, key):
        score = query @ key.mT * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias.to(score.dtype)
        score = score.masked_fill(~allowed, -math.inf)
        blind = (score == -math.inf).all(-1, keepdim=True)
        return score.masked_fill(blind, 0.0), blind

    score, blind = scores(query, key)
    weights = score.softmax(-1) * ~blind
    wide = torch.promote_types(query.dtype, f32)
    lse = scores(query.to(wide), key.to(wide))[0].logsumexp(-1).masked_fill(blind[..., 0], -math.inf)
    return weights @ value, weights, lse


# Cases


@dataclass(frozen=True, eq=False)
class Case:
    B: int = 2
    H: int = 2
    Hkv: int | None = None  # None: as H
    L: int = 7
    S: int = 9
    D: int = 8
    Dv: int | None = None  # None: as D
    mask: tuple[int, ...] | None = None  # the shape of a random mask
    bias: tuple[int, ...] | None = None  # ... and of a random bias
    blind: bool = False  # the mask hides every key from query 0
    bias_inf: bool = False  # the bias holds -inf: from query 0 to all keys, and here and there
    options: dict = field(default_factory=dict)


CASES = {
    "L63-S63-D16": Case(L=63, S=63, D=16),
    "L111-S63-D100": Case(B=1, H=1, L=111, S=63, D=100),
    "L1-S111": Case(L=1, S=111),
    "L63-S1": Case(L=63, S=1),
    "L1-S301": Case(L=1, S=301),  # few queries for many keys: the keys may be split
    "L3-S301-causal": Case(L=3, S=301, D=5, options=dict(causal=True, query_offset=298)),
    "L1-S1-D1": Case(L=1, S=1, D=1),
    "B0": Case(B=0),
    "L0": Case(L=0),
    "S0": Case(S=0),
    "B0-bias": Case(B=0, bias=(2, 7, 9)),
    "S0-bias": Case(S=0, bias=(2, 7, 1)),
    "L0-S0-causal": Case(L=0, S=0, options=dict(causal=True)),
    "D5-Dv11": Case(D=5, Dv=11),
    "D11-Dv1": Case(D=11, Dv=1),
    "H6-Hkv2": Case(H=6, Hkv=2),
    "window-padding-L300-S40": Case(L=300, S=40, mask=(2, 1, 1, 40), options=dict(window=(3, 2))),  # most see beyond the keys
    "causal-padding-L300-S40": Case(L=300, S=40, mask=(2, 1, 1, 40), options=dict(causal=True, query_offset=-200)),
    "B8-H6-Hkv3": Case(B=8, H=6, Hkv=3, L=3, S=5),  # the weights' mean over heads is a sum of two
    "H4-Hkv1-masked": Case(H=4, Hkv=1, mask=(2, 4, 7, 9), bias=(4, 1, 1)),
    "scale0.3": Case(options=dict(scale=0.3)),
    "scale-negative": Case(options=dict(scale=-0.7)),
    "scale0": Case(options=dict(scale=0.0)),
    "scores-in-the-hundreds": Case(options=dict(scale=40.0)),
    "softcap": Case(options=dict(softcap=1.5)),
    "softcap-bias-inf": Case(bias=(2, 7, 9), bias_inf=True, options=dict(softcap=0.7)),
    "causal": Case(L=9, S=9, options=dict(causal=True)),
    "causal-L63-S63": Case(L=63, S=63, options=dict(causal=True)),
    "causal-L5-S9": Case(L=5, options=dict(causal=True)),
    "causal-L9-S5": Case(L=9, S=5, options=dict(causal=True)),
    "causal-offset+4": Case(L=5, options=dict(causal=True, query_offset=4)),
    "causal-offset+99": Case(options=dict(causal=True, query_offset=99)),
    "causal-offset-3": Case(options=dict(causal=True, query_offset=-3)),
    "causal-offset-99": Case(options=dict(causal=True, query_offset=-99)),
    "offset-alone": Case(options=dict(query_offset=3)),
    "window-2-1": Case(options=dict(window=(2, 1))),
    "window-0-0": Case(options=dict(window=(0, 0))),
    "window-None-1": Case(options=dict(window=(None, 1))),
    "window-2-None": Case(options=dict(window=(2, None))),
    "window-None-None": Case(options=dict(window=(None, None))),
    "window-list": Case(options=dict(window=[1, 2])),
    "window-2-1-offset+4": Case(options=dict(window=(2, 1), query_offset=4)),
    "window-2-1-offset-4": Case(options=dict(window=(2, 1), query_offset=-4)),
    "window-2-3-causal": Case(options=dict(window=(2, 3), causal=True)),
    "window-3-0-causal-offset+5": Case(L=63, S=63, options=dict(window=(3, 0), causal=True, query_offset=5)),
    "window-None-2-causal-offset-2": Case(options=dict(window=(None, 2), causal=True, query_offset=-2)),
    "mask-blind": Case(mask=(2, 2, 7, 9), blind=True),
    "mask-padding-L63": Case(L=63, S=63, mask=(2, 1, 1, 63)),
    "mask-causal": Case(mask=(2, 1, 1, 9), options=dict(causal=True)),
    "mask-bias": Case(mask=(2, 1, 1, 9), bias=(2, 1, 9)),
    "bias-inf": Case(bias=(2, 2, 7, 9), bias_inf=True),
    "bias-causal": Case(bias=(1, 2, 7, 9), options=dict(causal=True)),
    "bias-shared-L63": Case(L=63, S=63, bias=(1, 2, 63, 63)),
    "bias-shared-L70-S140": Case(B=3, L=70, S=140, D=4, bias=(1, 2, 70, 140)),
    "bias-shared-B32": Case(B=32, L=3, S=5, bias=(1, 2, 3, 5)),  # many may share it in groups, whose gradients add up
    "bias-shared-B24-H4": Case(B=24, H=4, L=3, S=5, bias=(3, 5)),
    "bias-shared-B17-H4-Hkv2": Case(B=17, H=4, Hkv=2, L=3, S=5, bias=(3, 5)),
    "everything": Case(
        *(2, 4, 2, 11, 13, 5, 3),
        mask=(2, 1, 1, 13),
        bias=(1, 4, 11, 1),
        options=dict(causal=True, query_offset=2, window=(6, None), scale=0.6, softcap=2.0),
    ),
}

for shape in ("".join(s) for s in [*itertools.product("B1", "H1", "L1", "S1"), "HLS", "H1S", "LS", "1S", "L1", "S", "1", ""]):
    sizes = tuple({"B": 2, "H": 3, "L": 4, "S": 5, "1": 1}[c] for c in shape)
    CASES[f"mask({shape})"] = Case(2, 3, None, 4, 5, 3, mask=sizes)
    CASES[f"bias({shape})"] = Case(2, 3, None, 4, 5, 3, bias=sizes)

RETURNS = {
    "output": {},
    "mean-lse": dict(return_weights="mean", return_lse=True),
    "per_head-lse": dict(return_weights="per_head", return_lse=True),
}


@cache
def tensors(case):
    """query, key, value, mask, bias in float64."""
    torch.manual_seed(0)
    Hkv, Dv = case.Hkv or case.H, case.Dv or case.D
    query, key = randn(case.B, case.H, case.L, case.D), randn(case.B, Hkv, case.S, case.D)
    value, mask, bias = randn(case.B, Hkv, case.S, Dv), None, None
    if case.mask is not None:
        mask = torch.rand(case.mask) < 0.7
        if case.blind:
            mask[..., 0, :] = False
    if case.bias is not None:
        bias = randn(*case.bias)
        if case.bias_inf:
            bias[torch.rand(case.bias) < 0.3] = -math.inf
            bias[..., 0, :] = -math.inf
    return query, key, value, mask, bias


def select(returns, output, weights, lse):
    return {"output": (output,), "mean-lse": (output, weights.mean(1), lse), "per_head-lse": (output, weights, lse)}[returns]


def with_gradients(fn, query, key, value, bias, cotangents=None):
    """What fn returns, the cotangents it was differentiated with (random if not given), and the gradients of the floats."""
    inputs = [x.detach().clone().requires_grad_() for x in (query, key, value, bias) if x is not None]
    results = fn(*inputs[:3], bias=inputs[3] if bias is not None else None)
    results = results if isinstance(results, tuple) else (results,)
    if cotangents is None:
        cotangents = [randn(*r.shape) for r in results]
    cotangents = [c.to(r) for c, r in zip(cotangents, results, strict=True)]
    differentiable = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    outputs, grads = zip(*differentiable, strict=True) if differentiable else ((), ())
    grads = torch.autograd.grad(outputs, inputs, grads, allow_unused=True, materialize_grads=True) if outputs else []
    return results, cotangents, grads


@cache
def truth(case, returns):
    query, key, value, mask, bias = tensors(case)
    return with_gradients(
        lambda q, k, v, bias: select(returns, *oracle(q, k, v, mask=mask, bias=bias, **case.options)), query, key, value, bias
    )


def lse_rounding(lse):
    """By how much, relative, a weight exp(score - lse) is off where lse is rounded to float32."""
    return 2.0**-24 * lse.masked_fill(lse.isinf(), 0.0).abs().max().item() if lse.numel() else 0.0


def gradient_floors(query, key, value, bias, weights, lse, grads, exact, dtype, scale=None, dropout_p=0.0):
    """What rounding does to the gradients of query, key and bias where their terms cancel, relative to the gradients' sizes.

    The gradient of a score is ds = p (dp - delta), a difference of two numbers of size |grad_out| |value'| (plus the other
    cotangents) which each carry roundings of that size: delta is grad_out . out over the output as it was rounded to the
    dtype. If a query has one key, or a bias sums over all keys, the truth is 0 and only these roundings are left. They go
    through the same products as ds. Besides, backward takes a weight to be exp(score - lse) with an lse that was rounded to
    float32: all is off by up to 2^-24 |lse|. All in float64; weights: before dropout.
    """
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.abs().repeat_interleave(groups, 1) for x in (key, value))
    grad_out, *others = (g.double().cpu().abs() for g in grads)
    size = grad_out @ values.mT
    if others:
        size = size + (others[0] if others[0].dim() == 4 else others[0][:, None] / query.shape[1])
    size = size / (1 - dropout_p)
    ds = (weights * (size + (weights * size).sum(-1, keepdim=True) + (others[1][..., None] if others else 0))).detach()
    ds = ds * (TOLERANCES[dtype] / 2 if dtype in (bf16, f16) else TOLERANCES[dtype])
    scale = query.shape[3] ** -0.5 if scale is None else abs(scale)
    of_key = (ds.mT @ query.abs() * scale).unflatten(1, (-1, groups)).sum(2)
    roundings = [ds @ keys * scale, of_key, None, None if bias is None else ds.sum_to_size(bias.shape)]
    relative = 0.0 if dtype == f64 else lse_rounding(lse)
    floors = []
    for rounding, truth_ in zip(roundings, exact, strict=False):
        largest = 0.0 if rounding is None or not rounding.numel() else rounding.max().item()
        floors.append(relative + largest / ((truth_.abs().max().item() if truth_.numel() else 0.0) or 1.0))
    return floors


def runs():
    for backend, (name, case), returns in itertools.product(BACKENDS, CASES.items(), RETURNS):
        if name[-1] == ")" and returns == "mean-lse":
            continue
        if backend.interpreted and (name[-1] == ")") != (returns == "output"):
            continue
        if backend.interpreted and case.B > 2:  # for the groups of the CPU kernel; the interpreter takes batches one by one
            continue
        for dtype in backend.dtypes[:3] if name[-1] == ")" else backend.dtypes:
            if backend.interpreted and (returns, dtype) == ("mean-lse", f16):
                continue
            yield pytest.param(backend, case, returns, dtype, id=f"{backend}-{name}-{returns}-{str(dtype)[6:]}")


@pytest.mark.parametrize("backend, case, returns, dtype", list(runs()))
def test_results_and_gradients(backend, case, returns, dtype):
    query, key, value, mask, bias = tensors(case)
    exact, cotangents, exact_grads = truth(case, returns)
    query, key, value, bias = (x if x is None else x.to(backend.device, dtype) for x in (query, key, value, bias))
    mask = mask if mask is None else mask.to(backend.device)

    def fused(q, k, v, bias):
        return attention(q, k, v, mask=mask, bias=bias, backend=backend.name, **case.options, **RETURNS[returns])

    def yardstick(q, k, v, bias):
        return select(returns, *plain(q, k, v, mask=mask, bias=bias, **case.options))

    got, _, got_grads = with_gradients(fused, query, key, value, bias, cotangents)
    usual, _, usual_grads = with_gradients(yardstick, query, key, value, bias, cotangents)
    _, weights, lse = truth(case, "per_head-lse")[0]
    off = backend.lse_roundings * lse_rounding(lse)
    for name, floor, *three in zip(("output", "weights", "lse"), (0, off, 0), got, usual, exact, strict=False):
        assert_accurate(name, *three, factor=2, floor=floor)
        assert three[0].dtype == (torch.promote_types(dtype, f32) if name == "lse" else dtype)
    exact_grads = exact_grads or [torch.zeros_like(x) for x in tensors(case)[:3]]
    floors = gradient_floors(
        *tensors(case)[:3], tensors(case)[4], weights, lse, cotangents, exact_grads, dtype, case.options.get("scale")
    )
    floors = [floor + off for floor in floors]
    for name, floor, *three in zip(
        ("query", "key", "value", "bias"), floors, got_grads, usual_grads, exact_grads, strict=False
    ):
        assert_accurate(f"gradient of {name}", *three, factor=3, floor=floor)
        assert three[0].dtype == dtype
    assert len(got_grads) == 3 + (bias is not None)


def everything(dtype=f64, device="cpu", B=2, L=11, S=13):
    """Arguments that switch everything on except dropout; every query sees a key."""
    query, key, value = randn(B, 4, L, 5), randn(B, 2, S, 5), randn(B, 2, S, 3)
    mask, bias = torch.rand(B, 1, 1, S) < 0.7, randn(1, 4, 1, S)
    mask[..., :2] = True
    inputs = [x.to(device, dtype).requires_grad_() for x in (query, key, value, bias)]
    return inputs, dict(mask=mask.to(device), causal=True, query_offset=1, window=(99, None), scale=0.6, softcap=2.0)


EXTRAS = dict(return_weights="per_head", return_lse=True)


@every_backend
@pytest.mark.parametrize("dtypes", [(bf16, f32), (f16, f32), (f32, f64), (f32, bf16), (f64, f32)], ids=str)
def test_bias_of_another_dtype(dtypes, backend):
    if dtypes[0] not in backend.dtypes:
        pytest.skip(f"{backend} has no {dtypes[0]}")
    query, key, value, _, bias = tensors(CASES["bias(1HLS)"])
    exact, cotangents, exact_grads = truth(CASES["bias(1HLS)"], "output")
    inputs = [x.to(backend.device, dtypes[0]) for x in (query, key, value)] + [bias.to(backend.device, dtypes[1])]
    got, _, grads = with_gradients(lambda *a, bias: attention(*a, bias=bias, backend=backend.name), *inputs, cotangents)
    usual, _, usual_grads = with_gradients(lambda *a, bias: plain(*a, bias=bias)[0], *inputs, cotangents)
    assert got[0].dtype == dtypes[0] and grads[3].dtype == dtypes[1]
    assert_accurate("output", got[0], usual[0], exact[0], factor=2)
    for name, *three in zip(("query", "key", "value", "bias"), grads, usual_grads, exact_grads, strict=True):
        assert_accurate(f"gradient of {name}", *three, factor=3)


# Queries that see nothing

LONG = dict(L=70, S=70)  # longer than a block of keys
HIDDEN = {
    "mask": dict(mask=torch.zeros(1, 1, 70, 1, dtype=torch.bool)),
    "bias": dict(bias=torch.full((70, 70), -math.inf)),
    "causal": dict(causal=True, query_offset=-70),
    "window": dict(window=(None, 3), query_offset=-74),
    "mask-and-window": dict(mask=torch.arange(70) < 35, window=(5, 5), query_offset=41),
    "bias-and-causal": dict(bias=torch.where(torch.arange(70) == 69, 0.0, -math.inf), causal=True, query_offset=-1),
}


@pytest.mark.parametrize("returns, dropout_p", [("output", 0.0), ("output", 0.3), ("mean-lse", 0.3), ("per_head-lse", 0.0)])
@pytest.mark.parametrize("hidden", HIDDEN)
@every_backend
def test_a_query_that_sees_nothing_gives_exact_zeros(backend, hidden, returns, dropout_p):
    q, k, v = (torch.randn(2, 2, 70, 8, device=backend.device, requires_grad=True) for _ in range(3))
    options = {n: x.to(backend.device) if isinstance(x, torch.Tensor) else x for n, x in HIDDEN[hidden].items()}
    if "bias" in options:
        options["bias"].requires_grad_()
    results = attention(q, k, v, dropout_p=dropout_p, backend=backend.name, **options, **RETURNS[returns])
    results = results if isinstance(results, tuple) else (results,)
    for r, empty in zip(results, (0.0, 0.0, -math.inf), strict=False):
        assert (r == empty).all()
    inputs = [q, k, v] + ([options["bias"]] if "bias" in options else [])
    grads = torch.autograd.grad(results, inputs, [torch.randn_like(r) for r in results])
    assert all((g == 0).all() for g in grads)


@every_backend
def test_a_query_that_sees_nothing_leaves_the_others_alone(backend):
    q, k, v = (torch.randn(2, 2, 70, 8, device=backend.device, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 2, 70, 70, device=backend.device) < 0.5
    mask[:, 1, 10:50] = False
    out = attention(q, k, v, mask=mask, backend=backend.name)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert (out[:, 1, 10:50] == 0).all() and (grads[0][:, 1, 10:50] == 0).all()
    assert (out[:, 0] != 0).all() and (out[:, 1, 50:] != 0).all()
    assert all(g.isfinite().all() for g in grads)


# Every feature with every other, on every instruction set: against the reference in float64, which the cases above compare with
# the loop

LENGTHS = [1, 2, 4, 5, 16, 17, 63, 64, 65, 127, 128, 129, 200]  # around the sizes of blocks, strips and vectors


@st.composite
def any_call(draw, queries=LENGTHS, keys=LENGTHS, sizes=(1, 3, 8, 20, 32, 64, 80, 128)):
    """Shapes, options and a seed for everything random."""
    B, Hkv, groups = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    L, S = draw(st.sampled_from(queries)), draw(st.sampled_from(keys))
    D, Dv = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    shape = dict(B=B, H=Hkv * groups, Hkv=Hkv, L=L, S=S, D=D, Dv=Dv)
    full = (B, Hkv * groups, L, S)
    patterns = st.none() | st.tuples(*(st.sampled_from([1, n]) for n in full))
    side = st.none() | st.integers(0, 150)
    options = dict(
        causal=draw(st.booleans()),
        query_offset=draw(st.sampled_from([0, 0, S - L, -7, 40])),
        window=draw(st.none() | st.tuples(side, side)),
        scale=draw(st.sampled_from([None, None, 0.3, -0.2, 0.0])),
        softcap=draw(st.sampled_from([None, None, 0.8, 20.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )
    return shape, draw(patterns), draw(patterns), options, draw(st.sampled_from(list(RETURNS))), draw(st.integers(0, 999))


def padded_or_sparse(shape, S):
    """A random mask whose keys may end early or begin late, as padding does."""
    mask = torch.rand(shape) < 0.8
    if shape[3] == S:
        begin, end = sorted(torch.randint(0, S + 1, (2,)).tolist())
        mask[..., :begin] = mask[..., end:] = False
    return mask


@pytest.fixture
def one_stream(monkeypatch):
    """Seeds are drawn on the CPU: from one seed of their generators, a CPU and a GPU draw different ones."""
    draw = functional._random.draw_seed
    monkeypatch.setattr(functional._random, "draw_seed", lambda p, device: None if p == 0.0 else draw(p, "cpu").to(device))


@need_extension
@given(call=any_call())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_combination_on_every_instruction_set(call, one_stream):
    check_any_combination(Backend("cpu"), call)


# One query a key head, which takes the longest blocks of keys; the window begins within one.
ONE_QUERY = (
    dict(B=2, H=2, Hkv=2, L=1, S=1500, D=64, Dv=80),
    *((2, 1, 1, 1500), (1, 2, 1, 1500)),
    dict(causal=False, query_offset=1400, window=(1111, 50), scale=None, softcap=None, dropout_p=0.3),
    *("output", 3),
)


@need_extension
@given(call=any_call(queries=[1, 2, 4], keys=[300, 511, 513, 1025, 1500], sizes=[20, 64, 80]))  # many errors, one largest
@example(call=ONE_QUERY)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_few_queries_and_many_keys_on_every_instruction_set(call, one_stream):
    check_any_combination(Backend("cpu"), call)


@given(call=any_call(queries=[1, 2, 17, 33, 64, 65], keys=[1, 2, 17, 33, 64, 65]))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_combination_in_triton(call, one_stream):
    check_any_combination(BACKENDS[-1], call)


def check_any_combination(backend, call):
    """In every dtype and, on CPU, at every level."""
    shape, mask_shape, bias_shape, options, returns, seed = call
    torch.manual_seed(seed)
    query, key, value = (
        randn(shape["B"], h, n, d)
        for h, n, d in (
            (shape["H"], shape["L"], shape["D"]),
            (shape["Hkv"], shape["S"], shape["D"]),
            (shape["Hkv"], shape["S"], shape["Dv"]),
        )
    )
    query = query * shape["D"] ** -0.25  # scores of size 1 to 10, whatever scale is
    query = query.bfloat16().half().double()
    mask = None if mask_shape is None else padded_or_sparse(mask_shape, shape["S"])
    bias = None if bias_shape is None else randn(*bias_shape)

    def run(backend):
        def fn(q, k, v, bias, extras=RETURNS[returns]):
            torch.manual_seed(seed)
            here = mask if mask is None else mask.to(q.device)
            return attention(q, k, v, mask=here, bias=bias, backend=backend, **options, **extras)

        return fn

    exact, cotangents, exact_grads = with_gradients(run("reference"), query, key, value, bias)
    kept = drawn_keep_mask(seed, (shape["B"], shape["H"], shape["L"], shape["S"]), options["dropout_p"])
    clean = {name: x for name, x in options.items() if name != "dropout_p"}

    def usually(q, k, v, bias):
        here = mask if mask is None else mask.to(q.device)
        output, weights, lse = plain(q, k, v, mask=here, bias=bias, **clean)
        if kept is not None:
            weights = weights * kept.to(weights)
            output = weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
        return select(returns, output, weights, lse)

    _, weights, lse = attention(query, key, value, mask=mask, bias=bias, backend="reference", **clean, **EXTRAS)
    off = backend.lse_roundings * lse_rounding(lse)
    for dtype in backend.dtypes:
        inputs = [x if x is None else x.to(backend.device, dtype) for x in (query, key, value, bias)]
        usual, _, usual_grads = with_gradients(usually, *inputs, cotangents)
        floors = gradient_floors(
            query, key, value, bias, weights, lse, cotangents, exact_grads, dtype, options["scale"], options["dropout_p"]
        )
        for level in ops.build_info()["cpu_levels"] if backend.name == "cpu" else [None]:
            with nullcontext() if level is None else ops.cpu_level(level):
                got, _, got_grads = with_gradients(run(backend.name), *inputs, cotangents)
            where = f"{dtype} {level or backend}"
            for name, floor, *three in zip(("output", "weights", "lse"), (0, off, 0), got, usual, exact, strict=False):
                assert_accurate(f"{where}: {name}", *three, factor=2, floor=floor)
            for name, floor, *three in zip(
                ("query", "key", "value", "bias"), floors, got_grads, usual_grads, exact_grads, strict=False
            ):
                assert_accurate(f"{where}: gradient of {name}", *three, factor=3, floor=floor + off)


@pytest.mark.parametrize("return_weights", [None, "mean", "per_head"])
@pytest.mark.parametrize("op", [pytest.param("attention", marks=need_extension), "attention_triton"])
def test_opcheck(op, return_weights):
    ops, device = torch.ops.fast_transformer, "cpu" if op == "attention" else BACKENDS[-1].device
    forward, backward = getattr(ops, op).default, getattr(ops, f"{op}_backward").default
    inputs = [torch.randn(2, h, n, 8, device=device, requires_grad=True) for h, n in ((4, 5), (2, 7), (2, 7))]
    inputs[2] = LAYOUTS["BLHD"](inputs[2].detach()).requires_grad_()  # its gradient lies so, too
    bias = torch.randn(1, 4, 5, 7, device=device, requires_grad=True)
    mask, seed = torch.rand(2, 1, 1, 7, device=device) < 0.8, torch.tensor(5, device=device)
    rest = (-(2**62), 2, 0.3, 1.5, 0.1, seed, return_weights)  # first, last, scale, softcap, dropout_p
    with_lse = (True,) if op == "attention" else ()
    torch.library.opcheck(forward, (*inputs, mask, bias, *rest, *with_lse))
    torch.library.opcheck(forward, (*(x.detach() for x in inputs), None, None, *rest, *with_lse))
    out, weights, lse = forward(*(x.detach() for x in inputs), mask, bias.detach(), *rest, *with_lse)
    grads = [torch.randn_like(out), None if return_weights is None else torch.randn_like(weights), torch.randn_like(lse)]
    torch.library.opcheck(backward, (*grads, *inputs, mask, bias, *rest, out, lse, True))


def test_triton_says_why_it_cannot_take_a_call(monkeypatch):
    backend = BACKENDS[-1]
    q = torch.randn(1, 1, 3, 8, device=backend.device)
    wide = torch.randn(1, 1, 3, 257, device=backend.device)
    for inputs, reason in (
        ((q.double(),) * 3, "no kernel for torch.float64"),
        ((q, q, wide), "head_dim is at most 256, got 8 for query and key, 257 for value"),
    ):
        with pytest.raises(RuntimeError, match=f"backend='triton' cannot take this call: {reason}"):
            attention(*inputs, backend="triton")
        attention(*inputs)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="backend='triton' cannot take this call: the tensors are on cpu"):
        attention(*[q.cpu()] * 3, backend="triton")


# Threads and sizes


@need_extension
@pytest.mark.parametrize("shape", [(1, 1, 300, 700), (2, 3, 130, 200), (3, 8, 20, 20)], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_the_same_bits_for_any_number_of_threads(dtype, shape):
    B, H, L, S = shape
    inputs = [torch.randn(B, H, n, 32, dtype=dtype) for n in (L, S, S)]
    bias, mask = torch.randn(1, H, L, S, dtype=dtype), torch.rand(B, 1, 1, S) < 0.9

    def fn(q, k, v, bias):
        torch.manual_seed(5)
        return attention(q, k, v, bias=bias, mask=mask, dropout_p=0.2, return_weights="mean", backend="cpu")

    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(11)
            got, _, grads = with_gradients(fn, *inputs, bias)
            results.append([*got, *grads])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@need_extension
def test_mean_weights_are_rounded_once():
    """Those of 16 heads, in two or more sums: each of them in float16 would be off by a hundredth."""
    q, k = torch.zeros(1, 16, 4, 4, dtype=f16), torch.randn(1, 16, 20000, 4, dtype=f16)
    _, weights = attention(q, k, k, return_weights="mean", backend="cpu")
    assert torch.equal(weights, torch.full((1, 4, 20000), 1 / 20000, dtype=f16))


MEMORY = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@need_extension
@pytest.mark.skipif(MEMORY < 12e9, reason=f"needs 12 GB of free memory, there are {MEMORY / 1e9:.0f}")
def test_scores_past_2_to_the_31():
    """46400 x 46400 weights in bfloat16: offsets need 64 bits. The last queries against a call of their own."""
    n = 46400
    q, k, v = (torch.randn(1, 1, n, 8, dtype=bf16) for _ in range(3))
    mask = (torch.arange(n) % 3 != 0).expand(n, n)
    out, weights = attention(q, k, v, mask=mask, return_weights="per_head", backend="cpu")
    tail = slice(n - 70, n)
    few, few_weights = attention(q[:, :, tail], k, v, mask=mask[tail], return_weights="per_head", backend="cpu")
    assert torch.equal(weights[:, :, tail], few_weights) and (weights.numel() > 2**31)
    assert torch.equal(out[:, :, tail], few)


@pytest.mark.parametrize("where", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS[1:], ids=str)
def test_what_is_not_finite_shows_where_it_shows_in_pytorch(backend, value, where):
    inputs = dict(query=torch.randn(2, 2, 70, 8), key=torch.randn(2, 2, 200, 8), value=torch.randn(2, 2, 200, 8))
    inputs["bias"] = torch.randn(70, 200)
    inputs[where][..., 5, 3] = value
    inputs = {name: x.to(backend.device) for name, x in inputs.items()}
    got, expected = (attention(**inputs, backend=b, **EXTRAS) for b in (backend.name, "reference"))
    for x, y in zip(got, expected, strict=True):  # (a log-sum-exp of infinity may be NaN)
        assert torch.equal(x.isfinite(), y.isfinite())
        close(x.nan_to_num(0.0, 0.0, 0.0), y.nan_to_num(0.0, 0.0, 0.0))


@pytest.mark.parametrize("low", [-1e10, torch.finfo(f32).min])
@pytest.mark.parametrize("L", [1, 6, 70])
@every_backend
def test_a_row_of_large_negative_scores_is_a_softmax_like_any_other(backend, L, low):
    """As a float mask makes it for a sample that is all padding: its scores are lost in the rounding of the mask."""
    q, k, v = (torch.randn(1, 2, n, 8, device=backend.device, requires_grad=True) for n in (L, 70, 70))
    bias = torch.full((1, 1, L, 70), low, device=backend.device)
    out = attention(q, k, v, bias=bias, backend=backend.name)
    close(out, v.mean(2, keepdim=True).expand_as(out))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    if backend.name != "triton":  # which takes weights from the log-sum-exp alone
        weights = attention(q, k, v, bias=bias, return_weights="mean", backend=backend.name)[1]
        close(weights, torch.full_like(weights, 1 / 70))


@pytest.mark.parametrize("size", [1e4, 1e6])
@every_backend
def test_large_queries_and_keys(backend, size):
    """One key has the largest score by far: it gets all the weight."""
    q, k, v = (torch.randn(1, 2, 70, 8, device=backend.device) for _ in range(3))
    out = attention(size * q, size * k, v, backend=backend.name)
    exact = attention(*(x.double().cpu() for x in (size * q, size * k, v)), backend="reference")
    assert (out.cpu() - exact).abs().max() < 0.1  # two scores may be near


# Memory layouts


def close(got, expected):
    """Equal up to the order of sums, for values of size 1 to 10 (which multiplies the roundings that TOLERANCES allows)."""
    tolerance = 8 * TOLERANCES[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


LAYOUTS = {  # a function of a tensor (B, H, L, D) that returns the same numbers in other strides
    "BLHD": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "LBHD": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "fused-BL3HD": lambda x: (
        torch.stack((torch.full_like(x, math.nan), x, torch.full_like(x, math.nan)))
        .permute(1, 3, 0, 2, 4)
        .contiguous()[:, :, 1]
        .transpose(1, 2)
    ),
    "BHDL": lambda x: x.mT.contiguous().mT,
    "every-second-element": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "odd-storage-offset": lambda x: F.pad(x, (1, 2), value=math.nan)[..., 1:-2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every_backend
def test_strides(backend, layout):
    contiguous = [torch.randn(2, 3, 9, 8, device=backend.device) for _ in range(3)]
    strided = [LAYOUTS[layout](x) for x in contiguous]
    assert all(torch.equal(a, b) and a.stride() != b.stride() for a, b in zip(contiguous, strided, strict=True))
    cotangent = LAYOUTS[layout](torch.randn(2, 3, 9, 8, device=backend.device))
    results = []
    for inputs in (contiguous, strided):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = attention(*inputs, causal=True, backend=backend.name)
        results.append((out, *torch.autograd.grad(out, inputs, cotangent)))
    for got, expected in zip(*reversed(results), strict=True):
        close(got, expected)


@pytest.mark.parametrize("layout", ["contiguous", "BLHD"])
@pytest.mark.parametrize("backend", BACKENDS[1:], ids=str)
def test_gradients_lie_as_their_inputs(backend, layout):
    """Autograd copies a gradient that does not, before it keeps it."""
    inputs = [torch.randn(2, n, 9, 8, device=backend.device) for n in (4, 2, 2)]
    inputs = [LAYOUTS.get(layout, lambda x: x)(x).requires_grad_() for x in inputs]
    grads = torch.autograd.grad(attention(*inputs, backend=backend.name).sum(), inputs)
    assert [g.stride() for g in grads] == [x.stride() for x in inputs]


@every_backend
def test_views_of_a_fused_projection_share_one_gradient(backend):
    fused = torch.randn(2, 9, 3, 4, 8, device=backend.device, requires_grad=True)  # (B, L, 3, H, D)
    attention(*fused.permute(2, 0, 3, 1, 4), backend=backend.name).sum().backward()
    apart = [x.detach().contiguous().requires_grad_() for x in fused.permute(2, 0, 3, 1, 4)]
    attention(*apart, backend=backend.name).sum().backward()
    close(fused.grad.permute(2, 0, 3, 1, 4), torch.stack([x.grad for x in apart]))


@every_backend
def test_expanded_inputs_and_cotangents(backend):
    query, key, value = (torch.randn(*s, device=backend.device) for s in ((1, 3, 9, 8), (2, 1, 9, 8), (2, 3, 1, 8)))
    results = []
    for copy in (lambda x: x, lambda x: x.contiguous()):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attention(*(copy(x.expand(2, 3, 9, 8)) for x in leaves), backend=backend.name)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones((), device=out.device).expand_as(out))))
    for got, expected in zip(*results, strict=True):
        close(got, expected)


@every_backend
def test_strided_mask_and_bias(backend):
    q, k, v = (torch.randn(2, 3, 9, 8, device=backend.device) for _ in range(3))
    mask, bias = torch.rand(9, 9, 3, 2, device=backend.device) < 0.7, torch.randn(9, 9, 3, 2, device=backend.device)
    mask, bias = mask.permute(3, 2, 1, 0), bias.permute(3, 2, 1, 0).requires_grad_()
    out = attention(q, k, v, mask=mask, bias=bias, backend=backend.name)
    (grad,) = torch.autograd.grad(out.sum(), bias)
    apart = bias.detach().contiguous().requires_grad_()
    expected = attention(q, k, v, mask=mask.contiguous(), bias=apart, backend=backend.name)
    close(out, expected)
    close(grad, torch.autograd.grad(expected.sum(), apart)[0])


@every_backend
def test_inputs_are_left_as_they_are(backend):
    inputs, options = everything(f32, backend.device)
    tensors = [*inputs, options["mask"]]
    before = [(x.detach().clone(), x._version) for x in tensors]
    results = attention(*inputs[:3], bias=inputs[3], dropout_p=0.2, backend=backend.name, **options, **EXTRAS)
    sum(r.sum() for r in results).backward()
    for x, (copy, version) in zip(tensors, before, strict=True):
        assert x._version == version and torch.equal(x, copy)


@every_backend
def test_order_of_the_results(backend):
    (q, k, v, bias), options = everything(f32, backend.device)
    B, H, L, S, Dv = 2, 4, 11, 13, 3
    shapes = {"output": (B, H, L, Dv), "mean": (B, L, S), "per_head": (B, H, L, S), "lse": (B, H, L)}
    whole = attention(q, k, v, bias=bias, backend=backend.name, **options, **EXTRAS)
    full = dict(zip(("output", "per_head", "lse"), whole, strict=True)) | {"mean": whole[1].mean(1)}
    for weights, lse in itertools.product((None, "mean", "per_head"), (False, True)):
        got = attention(q, k, v, bias=bias, backend=backend.name, return_weights=weights, return_lse=lse, **options)
        names = ["output"] + [weights] * (weights is not None) + ["lse"] * lse
        assert isinstance(got, tuple) == (len(names) > 1)
        for name, x in zip(names, got if len(names) > 1 else (got,), strict=True):
            assert x.shape == shapes[name]
            close(x, full[name])


# Dropout


@every_backend
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_it_says(dropout_p, backend):
    q, k, v = (torch.randn(4, 4, 64, 8, device=backend.device) for _ in range(3))
    weights = attention(q, k, v, dropout_p=dropout_p, return_weights="per_head", backend=backend.name)[1]
    assert keep_count_is_likely((weights != 0).sum().item(), weights.numel(), 1 - dropout_p)


@every_backend
@pytest.mark.parametrize("dtype", [f64, f32, bf16, f16], ids=str)
@pytest.mark.parametrize("returns", RETURNS)
def test_dropout_results_and_gradients(returns, dtype, backend):
    """Against the oracle with the weights that were dropped here; the output uses the weights that are returned."""
    if dtype not in backend.dtypes:
        pytest.skip(f"{backend} has no {dtype}")
    inputs, options = everything()

    def fused(q, k, v, bias, returns=RETURNS[returns]):
        torch.manual_seed(7)
        return attention(q, k, v, bias=bias, dropout_p=0.375, backend=backend.name, **options, **returns)

    inputs_here = [x.detach().to(backend.device, dtype) for x in inputs]
    options["mask"] = options["mask"].to(backend.device)
    output, weights, _ = fused(*inputs_here, EXTRAS)
    undropped = attention(*inputs_here[:3], bias=inputs_here[3], backend=backend.name, **options, **EXTRAS)[1]
    kept = weights != 0
    assert 0 < kept.sum() < (undropped != 0).sum()
    if dtype in (f32, f64):
        close(weights, undropped * kept / 0.625)  # 0.375 is a multiple of 1/65536: the scale is exact
        close(output, weights @ inputs_here[2].repeat_interleave(2, 1))

    def truly(fn, kept, mask):
        def results(q, k, v, bias):
            output, weights, lse = fn(q, k, v, bias=bias, **(options | {"mask": mask}))
            if fn is plain:
                weights = weights * kept / 0.625
                output = weights @ v.repeat_interleave(2, 1)
            return select(returns, output, weights, lse)

        return results

    def exactly(*a, **o):
        return oracle(*a, **o, kept=kept.cpu(), dropout_p=0.375)

    exact, cotangents, exact_grads = with_gradients(truly(exactly, None, options["mask"].cpu()), *inputs)
    usual, _, usual_grads = with_gradients(truly(plain, kept, options["mask"]), *inputs_here, cotangents)
    got, _, got_grads = with_gradients(fused, *inputs_here, cotangents)
    for name, *three in zip(("output", "weights", "lse"), got, usual, exact, strict=False):
        assert_accurate(name, *three, factor=2)
    for name, *three in zip(("query", "key", "value", "bias"), got_grads, usual_grads, exact_grads, strict=True):
        assert_accurate(f"gradient of {name}", *three, factor=3)


@every_backend
def test_dropout_follows_the_seed(backend):
    q, k, v = (torch.randn(2, 2, 9, 8, device=backend.device) for _ in range(3))
    torch.manual_seed(1)
    first, second = (attention(q, k, v, dropout_p=0.5, backend=backend.name) for _ in range(2))
    torch.manual_seed(1)
    again = attention(q, k, v, dropout_p=0.5, backend=backend.name)
    assert torch.equal(first, again) and not torch.equal(first, second)


@every_backend
def test_dropout_mask_is_the_philox_stream(backend, monkeypatch):
    """Rows are (b, h, query), columns are keys: the same for every backend, bit for bit."""
    seed = torch.tensor(-(2**40) - 12345, device=backend.device)
    monkeypatch.setattr(functional._random, "draw_seed", lambda p, device: seed)
    q, k, v = (torch.randn(2, 3, n, 8, device=backend.device) for n in (21, 37, 37))
    weights = attention(q, k, v, dropout_p=0.4, return_weights="per_head", backend=backend.name)[1]
    assert torch.equal(weights != 0, reference.keep_mask(seed, weights.shape, 0.4))


@every_backend
def test_dropout_is_distributed_as_in_pytorch(backend):
    """Mean and variance over 4000 draws, beside the mean without dropout and beside F.scaled_dot_product_attention."""
    n = 4000
    query, k, v = (torch.randn(1, 2, rows, 4, device=backend.device) for rows in (1, 3, 3))
    q = query.expand(1, 2, n, 4)
    ours = attention(q, k, v, dropout_p=0.3, backend=backend.name)[0].transpose(0, 1)  # (n, 2, 4)
    torchs = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)[0].transpose(0, 1)
    exact = F.scaled_dot_product_attention(query, k, v)[0, :, 0]
    variance, fourth = ours.var(0), (ours - ours.mean(0)).pow(4).mean(0)
    assert ((ours.mean(0) - exact).abs() < 5 * (variance / n).sqrt()).all()
    # The variance of a sample variance is (fourth moment - variance^2) / n; here is a difference of two.
    assert ((variance - torchs.var(0)).abs() < 5 * (2 * (fourth - variance**2) / n).sqrt()).all()


# Derivatives of every kind


def small():
    """Inputs for gradcheck, with one key head for two query heads and a bias shared by the queries."""
    return [torch.randn(*s, dtype=f64, requires_grad=True) for s in ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3), (2, 1, 4))]


CHECKED = {
    "output": {},
    "weights-lse": EXTRAS,
    "mean-softcap": dict(return_weights="mean", softcap=1.2),
    "everything-with-dropout": dict(**EXTRAS, causal=True, softcap=1.2, window=(2, None), scale=0.9, dropout_p=0.4),
    "blind": dict(return_weights="per_head", causal=True, query_offset=-1),
}


def seeded_attention(backend, options):
    def fn(q, k, v, bias):
        if options.get("dropout_p"):
            torch.manual_seed(3)
        return attention(q, k, v, bias=bias, backend=backend, **options)

    return fn


@pytest.mark.parametrize("backend", [b for b in BACKENDS if f64 in b.dtypes], ids=str)
@pytest.mark.parametrize("options", CHECKED)
def test_gradcheck(options, backend):
    options = CHECKED[options]
    assert gradcheck(seeded_attention(backend.name, options), small(), check_batched_grad=backend.name == "reference")


@pytest.mark.parametrize("backend", [b for b in BACKENDS if f64 in b.dtypes], ids=str)
@pytest.mark.parametrize("options", CHECKED)
def test_gradgradcheck(options, backend):
    assert gradgradcheck(seeded_attention(backend.name, CHECKED[options]), small(), fast_mode=True)


@every_backend
def test_gradgradcheck_without_bias(backend):
    if f64 not in backend.dtypes:
        pytest.skip("float64 only")
    query, key, value, _ = small()
    query, value = query.detach()[:, :1].requires_grad_(), value.detach()[..., :2].requires_grad_()
    mask = torch.tensor([[True, False, True, True]] * 3)
    mask[1] = False
    fn = lambda q, k, v: attention(q, k, v, mask=mask, scale=0.8, backend=backend.name)  # noqa: E731
    assert gradcheck(fn, (query, key, value))
    assert gradgradcheck(fn, (query, key, value))


@pytest.mark.parametrize("options", CHECKED)
def test_forward_mode(options):
    """Dual numbers pick a path that can follow them."""
    options = CHECKED[options]
    fn = seeded_attention(None, options)
    assert gradcheck(fn, small(), check_forward_ad=True, check_backward_ad=False, check_undefined_grad=False)


def along(fn, inputs, tangents):
    """The directional derivative of fn, from one reverse pass: J t is the gradient of (J^T u) t in u."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = fn(*inputs)
    u = torch.zeros_like(out, requires_grad=True)
    grads = torch.autograd.grad(out, inputs, u, create_graph=True)
    return torch.autograd.grad(sum((g * t).sum() for g, t in zip(grads, tangents, strict=True)), u)[0]


def test_jvp_and_dual_numbers_agree_with_reverse_mode():
    inputs, options = everything(L=5, S=6)
    inputs = [x.detach() for x in inputs]
    tangents = [torch.randn_like(x) for x in inputs]
    fn = lambda q, k, v, bias: attention(q, k, v, bias=bias, **options)  # noqa: E731
    expected = along(lambda q, k, v, bias: oracle(q, k, v, bias=bias, **options)[0], inputs, tangents)
    close(torch.func.jvp(fn, tuple(inputs), tuple(tangents))[1], expected)
    with forward_ad.dual_level():
        out = fn(*(forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)))
        close(forward_ad.unpack_dual(out).tangent, expected)
        assert forward_ad.unpack_dual(attention(*(x[:, :2] for x in inputs[:3]))).tangent is None


def test_vmap_equals_a_loop():
    (q, k, v, bias), options = everything()
    q, v, bias = (torch.randn(*s, dtype=f64) for s in ((3, *q.shape), (*v.shape, 3), (3, *bias.shape)))
    fn = lambda q, k, v, bias: attention(q, k, v, bias=bias, **options, **EXTRAS)  # noqa: E731
    got = torch.vmap(fn, in_dims=(0, None, -1, 0))(q, k, v, bias)
    expected = [fn(q[i], k, v[..., i], bias[i]) for i in range(3)]
    for x, *ys in zip(got, *expected, strict=True):
        close(x, torch.stack(ys))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_of_dropout(randomness):
    q, k, v = (torch.randn(1, 2, 9, 4).expand(3, 1, 2, 9, 4) for _ in range(3))
    fn = lambda q, k, v: attention(q, k, v, dropout_p=0.5)  # noqa: E731
    out = torch.vmap(fn, randomness=randomness)(q, k, v)
    assert torch.equal(out[0], out[1]) == (randomness == "same")


@pytest.mark.parametrize("per_sample", [False, True], ids=["grad", "vmap-of-grad"])
def test_func_grad(per_sample):
    q, k, v = (torch.randn(3, 1, 2, 5, 4, dtype=f64, requires_grad=True) for _ in range(3))
    fn = lambda q, k, v: attention(q, k, v, causal=True).square().sum()  # noqa: E731
    expected = torch.autograd.grad(sum(fn(q[i], k[i], v[i]) for i in range(3)), (q, k, v))
    if per_sample:
        got = torch.vmap(torch.func.grad(fn, (0, 1, 2)))(q, k, v)
    else:
        got = [torch.stack(x) for x in zip(*(torch.func.grad(fn, (0, 1, 2))(q[i], k[i], v[i]) for i in range(3)), strict=True)]
    for x, y in zip(got, expected, strict=True):
        close(x, y)


def test_nothing_is_differentiated_when_nothing_asks():
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    assert not attention(q, k, v, causal=True).requires_grad
    q.requires_grad_()
    assert attention(q, k, v).requires_grad
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert attention(q, k, v).is_inference()


# torch.compile and autocast

COMPILED = {
    "plain": dict(),
    "causal-mask": dict(causal=True, mask=torch.arange(6) < 4),
    "dropout": dict(dropout_p=0.5),
    "everything": dict(**EXTRAS, dropout_p=0.5, causal=True, query_offset=1, window=(4, None), softcap=2.0, scale=0.7),
}


@pytest.mark.parametrize("options", COMPILED)
@pytest.mark.parametrize("backend", [Backend(None), *BACKENDS], ids=str)
def test_compile(backend, options):
    torch._dynamo.reset()
    options = {n: x.to(backend.device) if isinstance(x, torch.Tensor) else x for n, x in COMPILED[options].items()}
    fn = lambda q, k, v: attention(q, k, v, backend=backend.name, **options)  # noqa: E731
    inputs = [torch.randn(2, 2, n, 4, device=backend.device, requires_grad=True) for n in (5, 6, 6)]
    results = []
    for f in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(5)
        out = f(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        results.append((*out, *torch.autograd.grad(out, inputs, [torch.ones_like(o) for o in out])))
    for got, expected in zip(*reversed(results), strict=True):
        close(got, expected)


def test_compile_once_for_all_lengths():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def decode(q, k, v):
        return attention(q, k, v, causal=True, query_offset=k.shape[2] - q.shape[2], window=(4, None))

    with torch._dynamo.config.patch(error_on_recompile=True):
        for L, S in ((3, 5), (4, 9), (6, 7)):
            q, k, v = (torch.randn(2, 2, n, 4) for n in (L, S, S))
            close(decode(q, k, v), attention(q, k, v, causal=True, query_offset=S - L, window=(4, None)))


@every_backend
def test_autocast_casts_as_sdpa_does(backend):
    q, k, v = (torch.randn(2, 3, 9, 8, device=backend.device, requires_grad=True) for _ in range(3))
    with torch.autocast(backend.device, bf16):
        out = attention(q, k, v, backend=backend.name)
        assert out.dtype == F.scaled_dot_product_attention(q, k, v).dtype == bf16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), backend=backend.name))
    assert all(g.dtype == f32 for g in torch.autograd.grad(out.sum(), (q, k, v)))


@every_backend
def test_autocast_does_not_reach_the_arithmetic(backend):
    (q, k, v, bias), options = everything(f32, backend.device)
    with torch.autocast(backend.device, bf16):
        got = attention(q, k, v, bias=bias, backend=backend.name, **options, **EXTRAS)
        with torch.autocast(backend.device, enabled=False):
            expected = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=bias, backend=backend.name, **options, **EXTRAS)
        double = attention(q.double(), k.double(), v.double()) if f64 in backend.dtypes else None
    assert got[2].dtype == f32
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert double is None or double.dtype == f64


# The choice of backend and PyTorch's own attention


@need_extension
@pytest.mark.parametrize("forced, expected", [(None, "ops"), ("cpu", "ops"), ("reference", "reference")])
def test_the_path_that_is_taken(forced, expected, monkeypatch):
    taken = []
    for name, module in (("ops", ops), ("reference", reference)):
        fn = module.attention
        monkeypatch.setattr(module, "attention", lambda *a, fn=fn, name=name, **o: taken.append(name) or fn(*a, **o))
    attention(*(torch.randn(1, 2, 5, 4) for _ in range(3)), backend=forced)
    assert taken == [expected]


@pytest.mark.parametrize("feature", ["plain", "causal", "scale", "mask", "bias", "gqa"])
@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_equals_scaled_dot_product_attention(dtype, feature):
    Hkv = 2 if feature == "gqa" else 6
    q, k, v = (torch.randn(2, h, 63, 16, dtype=dtype) for h in (6, Hkv, Hkv))
    mask, bias = torch.rand(2, 1, 1, 63) < 0.7, torch.randn(2, 6, 63, 63, dtype=dtype)
    ours, theirs = {
        "plain": ({}, {}),
        "causal": (dict(causal=True), dict(is_causal=True)),
        "scale": (dict(scale=0.2), dict(scale=0.2)),
        "mask": (dict(mask=mask), dict(attn_mask=mask)),
        "bias": (dict(bias=bias), dict(attn_mask=bias)),
        "gqa": ({}, dict(enable_gqa=True)),
    }[feature]
    expected = F.scaled_dot_product_attention(q, k, v, **theirs)
    for backend in ("reference", None):
        close(attention(q, k, v, backend=backend, **ours), expected)


# Properties


@st.composite
def problems(draw):
    """Shapes and random tensors in float64."""
    size = st.integers(1, 6)
    B, Hkv, L, S, D, Dv = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(size), draw(size), draw(size), draw(size)
    H = Hkv * draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shapes = (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv)
    return tuple(torch.randn(s, generator=generator, dtype=f64) for s in shapes), generator


def run_on(backend, query, key, value, **options):
    dtype = backend.dtypes[0]
    to = lambda x: x.to(backend.device, dtype if x.is_floating_point() else None) if isinstance(x, torch.Tensor) else x  # noqa: E731
    options = {name: to(x) for name, x in options.items()}
    return attention(to(query), to(key), to(value), backend=backend.name, **options)


positions = st.fixed_dictionaries(
    dict(
        causal=st.booleans(),
        query_offset=st.integers(-8, 8),
        window=st.none() | st.tuples(st.none() | st.integers(0, 5), st.none() | st.integers(0, 5)),
    )
)


@every_backend
@given(data=st.data())
def test_only_visible_keys_count(backend, data):
    """A change of a hidden key's value changes no bit; a change of a visible one does. So True = attend."""
    (q, k, v), generator = data.draw(problems())
    (B, H, L, _), (Hkv, S) = q.shape, k.shape[1:3]
    mask = torch.rand(B, H, L, S, generator=generator) < 0.5
    position = data.draw(positions)
    b, kv, j = (data.draw(st.integers(0, n - 1)) for n in (B, Hkv, S))
    poked = v.clone()
    poked[b, kv, j] += 10.0
    changed = (run_on(backend, q, k, v, mask=mask, **position) != run_on(backend, q, k, poked, mask=mask, **position)).any(-1)
    expected = torch.zeros(B, H, L, dtype=torch.bool)
    for h, i in itertools.product(range(H), range(L)):
        expected[b, h, i] = h // (H // Hkv) == kv and bool(mask[b, h, i, j]) and sees(i, j, **position)
    assert torch.equal(changed.cpu(), expected)


@every_backend
@given(data=st.data())
def test_causal_offset_and_window_equal_the_explicit_mask(backend, data):
    (q, k, v), _ = data.draw(problems())
    position = data.draw(positions)
    mask = torch.tensor([[sees(i, j, **position) for j in range(k.shape[2])] for i in range(q.shape[2])])
    for got, expected in zip(
        run_on(backend, q, k, v, **position, **EXTRAS), run_on(backend, q, k, v, mask=mask, **EXTRAS), strict=True
    ):
        close(got, expected)


@every_backend
@given(data=st.data())
def test_broadcast_equals_the_expanded_tensor(backend, data):
    (q, k, v), generator = data.draw(problems())
    full = (*q.shape[:3], k.shape[2])
    options, expanded = {}, {}
    for name in ("mask", "bias"):
        shape = [n if data.draw(st.booleans()) else 1 for n in full][data.draw(st.integers(0, 4)) :]
        x = torch.randn(shape, generator=generator, dtype=f64)
        options[name] = x > -0.5 if name == "mask" else x
        expanded[name] = options[name].expand(full).contiguous()
    close(run_on(backend, q, k, v, **options), run_on(backend, q, k, v, **expanded))


@every_backend
@given(data=st.data())
def test_grouped_query_equals_repeated_heads(backend, data):
    (q, k, v), _ = data.draw(problems())
    groups = q.shape[1] // k.shape[1]
    repeated = run_on(backend, q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), **EXTRAS)
    for got, expected in zip(run_on(backend, q, k, v, **EXTRAS), repeated, strict=True):
        close(got, expected)


@every_backend
@given(data=st.data())
def test_bias_of_minus_infinity_equals_the_mask(backend, data):
    (q, k, v), generator = data.draw(problems())
    mask = torch.rand(q.shape[2], k.shape[2], generator=generator) < 0.5
    got = run_on(backend, q, k, v, bias=torch.zeros(mask.shape, dtype=f64).masked_fill(~mask, -math.inf), **EXTRAS)
    expected = run_on(backend, q, k, v, mask=mask, **EXTRAS)
    for x, y in zip(got, expected, strict=True):
        close(x, y)


def test_related_inputs_have_the_same_gradient_when_it_is_recorded():
    """Self-attention on one tensor: the recorded gradient must not run through the other roles of that tensor a second time."""
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    for loss in (
        lambda: functional.attention(x, x, x).square().sum(),
        lambda: functional.attention(x, 2 * x, x.sin(), causal=True).square().sum(),
    ):
        (plain,), (recorded,) = torch.autograd.grad(loss(), x), torch.autograd.grad(loss(), x, create_graph=True)
        torch.testing.assert_close(recorded, plain)
    assert torch.autograd.gradgradcheck(lambda x: functional.attention(x, x, x), x)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_with_a_scale_that_is_not_positive(scale):
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(
        functional.attention(q, k, v, causal=True, scale=scale), functional.attention(q, k, v, mask=mask, scale=scale)
    )


def test_masks_under_another_default_device():
    q = torch.randn(1, 2, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    want = functional.attention(q, q, q, mask=mask)
    with torch.device("meta"):
        assert torch.equal(functional.attention(q, q, q, mask=mask), want)
