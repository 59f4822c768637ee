"""fast_transformer.MultiheadAttention against torch.nn's, and against a plain formula where torch.nn has none to offer."""

import copy
import inspect
import io
import itertools
import pickle
import warnings

import pytest
import torch
from common import need_extension
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrize
from twins import (
    CLOSE,
    additive,
    assert_same_parameter_gradients,
    backward,
    causal,
    leaves,
    padding,
    pair,
    randomise,
    script,
    slow_path,
)

import fast_transformer as ft
from fast_transformer import functional, ops

pytestmark = pytest.mark.usefixtures("one_thread")

f64 = torch.float64
N, L, S, E, H = 3, 4, 5, 8, 2

OPTIONS = {
    "plain": {},
    "no_bias": {"bias": False},
    "kdim_vdim": {"kdim": 6, "vdim": 7},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv_zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
}
INPUTS = ["self", "key_is_value", "distinct"]
# kdim and vdim differ, so key and value cannot be one tensor
OPTIONS_AND_INPUTS = [(o, i) for o, i in itertools.product(OPTIONS, INPUTS) if o != "kdim_vdim" or i == "distinct"]
LAYOUTS = ["batch_first", "batch_second", "unbatched"]


def make_inputs(inputs, layout, kdim=E, vdim=E):
    """A list of the distinct tensors, and the indices that pick query, key and value out of it."""

    def make(length, width):
        shape = {"batch_first": (N, length, width), "batch_second": (length, N, width), "unbatched": (length, width)}[layout]
        return torch.randn(shape, dtype=f64)

    if inputs == "self":
        return [make(L, E)], (0, 0, 0)
    if inputs == "key_is_value":
        return [make(L, E), make(S, kdim)], (0, 1, 1)
    return [make(L, E), make(S, kdim), make(S, vdim)], (0, 1, 2)


def make_masks(attn, pad, layout, S):
    """torch.nn's masks; key 0 stays visible, because torch.nn answers NaN to a query that sees none."""
    batch = 1 if layout == "unbatched" else N
    attn_mask = key_padding_mask = None
    if attn is not None:
        hidden = torch.rand((L, S) if attn.endswith("2d") else (batch * H, L, S)) < 0.4
        hidden[..., 0] = False
        attn_mask = hidden if attn.startswith("bool") else additive(hidden)
    if pad is not None:
        hidden = padding([3, 1, S][:batch], S)
        hidden = hidden[0] if layout == "unbatched" else hidden
        key_padding_mask = hidden if pad == "bool" else additive(hidden)
    return attn_mask, key_padding_mask


def plain_attention(m, query, key, value, visible, *, window=None, softcap=None):
    """Output (N, L, E) and weights (N, H, L, S) of module m for batch-first inputs; `visible` broadcasts to the weights."""
    (wq, wk, wv), (bq, bk, bv) = m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3)
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (m.num_heads, m.head_dim)).transpose(1, 2)
        for x, w, b in ((query, wq, bq), (key, wk, bk), (value, wv, bv))
    )
    scores = q @ k.transpose(-1, -2) / m.head_dim**0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if window is not None:
        ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        visible = visible & (ahead >= -window[0]) & (ahead <= window[1])
    weights = (scores - scores.detach().amax()).exp() * visible
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total == 0, 1.0, total)
    return (weights @ v).transpose(1, 2).flatten(2) @ m.out_proj.weight.T + m.out_proj.bias, weights


@pytest.fixture
def strict_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Equal to torch.nn


@pytest.mark.parametrize("pad", [None, "bool", "float"], ids=lambda p: f"padding={p}")
@pytest.mark.parametrize("attn", [None, "bool2d", "float2d", "bool3d", "float3d"], ids=lambda a: f"mask={a}")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("option, inputs", OPTIONS_AND_INPUTS)
def test_equals_torch_nn(option, inputs, layout, attn, pad):
    """Output, weights and every gradient, masks' included."""
    options = OPTIONS[option]
    stock, ours = pair("MultiheadAttention", E, H, batch_first=layout == "batch_first", **options)
    tensors, pick = make_inputs(inputs, layout, stock.kdim, stock.vdim)
    masks = make_masks(attn, pad, layout, L if inputs == "self" else S)
    for weights in ({"need_weights": False}, {"need_weights": True}, {"need_weights": True, "average_attn_weights": False}):
        results = []
        for module, filter_ in ((stock, "ignore"), (ours, "error")):
            module.zero_grad()
            xs, (attn_mask, key_padding_mask) = leaves(*tensors), leaves(*masks)
            with warnings.catch_warnings():
                warnings.simplefilter(filter_)
                out = module(*(xs[i] for i in pick), key_padding_mask, attn_mask=attn_mask, **weights)
            backward(out)
            results.append((out, [t.grad for t in (*xs, attn_mask, key_padding_mask) if t is not None]))
        torch.testing.assert_close(results[1], results[0], **CLOSE)
        assert_same_parameter_gradients(ours, stock)


@pytest.mark.parametrize("fast_path", [False, True], ids=["slow_path", "fast_path"])
@pytest.mark.parametrize("attn", [None, "bool2d", "bool3d", "float2d"], ids=lambda a: f"mask={a}")
@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
def test_equals_torch_nn_in_eval_without_gradients(need_weights, attn, fast_path):
    stock, ours = pair("MultiheadAttention", E, H, batch_first=True, dropout=0.5)
    stock.eval(), ours.eval()
    x = torch.randn(N, L, E, dtype=f64)
    attn_mask, key_padding_mask = make_masks(attn, "float" if attn == "float2d" else "bool", "batch_first", L)
    arguments = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "need_weights": need_weights}
    with torch.no_grad():
        got = ours(x, x, x, **arguments)
        if fast_path:
            want = stock(x, x, x, **arguments)
        else:
            with slow_path():
                want = stock(x, x, x, **arguments)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("option", OPTIONS)
def test_construction_equals_torch_nn(option):
    """The same state dict from the same seed, and loadable both ways."""
    torch.manual_seed(5)
    stock = torch.nn.MultiheadAttention(E, H, **OPTIONS[option])
    torch.manual_seed(5)
    ours = ft.MultiheadAttention(E, H, **OPTIONS[option])
    assert list(stock.state_dict()) == list(ours.state_dict())
    torch.testing.assert_close(ours.state_dict(), stock.state_dict(), rtol=0, atol=0)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("method", ["__init__", "forward"])
@pytest.mark.parametrize("name", [n for n in ft.nn.__all__ if hasattr(torch.nn, n.removeprefix("Fused"))])
def test_signatures_begin_like_torch_nn(name, method):
    def parameters(cls):
        return [(p.name, p.default, p.kind) for p in inspect.signature(getattr(cls, method)).parameters.values()]

    stock, ours = parameters(getattr(torch.nn, name.removeprefix("Fused"))), parameters(getattr(ft, name))
    assert ours[: len(stock)] == stock
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, _, kind in ours[len(stock) :])


# Where torch.nn answers NaN, raises, or ignores a mask


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["bool_mask", "float_mask", "bool_padding", "float_padding", "mask_and_padding"])
def test_query_that_sees_no_key_gets_zeros(kind, dtype, need_weights):
    """Sample 1 (with a mask: row 1 of every sample) sees nothing: attention 0, so the output is out_proj's bias."""
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True)).to(dtype)
    x = torch.randn(N, L, E).to(dtype).requires_grad_()
    rows = torch.zeros(L, L, dtype=torch.bool)
    rows[1] = True
    pad = padding([L, 0, 2], L)
    blind = (rows[None, :, 0] if "mask" in kind else torch.zeros(1, L, dtype=torch.bool)) | torch.zeros(N, 1, dtype=torch.bool)
    if "padding" in kind:
        blind = blind | pad[:, :1]

    def encode(hidden):
        return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf) if kind.startswith("float") else hidden

    out, weights = m(
        x,
        x,
        x,
        attn_mask=encode(rows) if "mask" in kind else None,
        key_padding_mask=encode(pad) if "padding" in kind else None,
        need_weights=need_weights,
    )
    assert torch.equal(out[blind], m.out_proj.bias.expand_as(out[blind]))
    assert not torch.equal(out[~blind][0], m.out_proj.bias)
    if need_weights:
        assert not weights[blind].any()
        torch.testing.assert_close(weights[~blind].float().sum(-1), torch.ones(int((~blind).sum())), rtol=0, atol=0.02)
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in m.parameters())


@pytest.mark.parametrize("option", ["plain", "bias_kv_zero_attn"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_is_causal_without_a_mask_is_causal(training, need_weights, padded, option):
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True, **OPTIONS[option])).double().train(training)
    q, k = torch.randn(N, L, E, dtype=f64), torch.randn(N, S, E, dtype=f64)
    pad = padding([1, 5, 3], S) if padded else None
    with torch.set_grad_enabled(training):
        got = m(q, k, k, key_padding_mask=pad, is_causal=True, need_weights=need_weights)
        want = m(q, k, k, key_padding_mask=pad, attn_mask=causal(L, S), need_weights=need_weights)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("shape", [(L, S), (N * H, L, S)], ids=["2d", "3d"])
def test_a_mask_wins_over_is_causal(shape, need_weights):
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True)).double()
    q, k = torch.randn(N, L, E, dtype=f64), torch.randn(N, S, E, dtype=f64)
    mask = torch.rand(shape) < 0.5
    got = m(q, k, k, attn_mask=mask, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(got, m(q, k, k, attn_mask=mask, need_weights=need_weights), **CLOSE)


@pytest.mark.parametrize("attn", ["bool", "float"])
def test_masks_of_two_kinds_hide_what_either_hides(attn, strict_warnings):
    """One bool and one float mask: both count, and no warning about it."""
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True)).double()
    x, hidden, pad = torch.randn(N, L, E, dtype=f64), causal(L), padding([4, 2, 3], L)
    zeros = torch.zeros(N, L, dtype=f64)
    masks = (hidden, zeros.masked_fill(pad, -torch.inf)) if attn == "bool" else (zeros[0].masked_fill(hidden, -torch.inf), pad)
    out, weights = m(x, x, x, attn_mask=masks[0], key_padding_mask=masks[1], average_attn_weights=False)
    want = plain_attention(m, x, x, x, ~(hidden | pad[:, None, None]))
    torch.testing.assert_close((out, weights), want, **CLOSE)


@pytest.mark.parametrize("extras", [{"window": (1, 2)}, {"softcap": 0.7}, {"window": (0, 1), "softcap": 2.0}], ids=str)
def test_window_and_softcap(extras):
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True, **extras)).double()
    q, k = torch.randn(N, L, E, dtype=f64), torch.randn(N, S, E, dtype=f64)
    pad = padding([5, 2, 4], S)
    got = m(q, k, k, key_padding_mask=pad, average_attn_weights=False)
    torch.testing.assert_close(got, plain_attention(m, q, k, k, ~pad[:, None, None], **extras), **CLOSE)


# Errors


def call(q=(N, L, E), k=(N, S, E), v=(N, S, E), **masks):
    return lambda: ft.MultiheadAttention(E, H, batch_first=True)(torch.randn(q), torch.randn(k), torch.randn(v), **masks)


def bools(*shape):
    return torch.zeros(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    "error, text, function",
    [
        (ValueError, "embed_dim must be divisible by num_heads, got 10 and 3", lambda: ft.MultiheadAttention(10, 3)),
        (ValueError, "num_heads must be at least 1, got 0", lambda: ft.MultiheadAttention(8, 0)),
        (ValueError, "num_heads must be at least 1, got -2", lambda: ft.MultiheadAttention(8, -2)),
        (ValueError, "embed_dim must be at least 1, got 0", lambda: ft.MultiheadAttention(0, 4)),
        (ValueError, r"dropout must be a number in \[0, 1\), got 1.0", lambda: ft.MultiheadAttention(8, 2, dropout=1.0)),
        (ValueError, r"dropout must be a number in \[0, 1\), got -0.1", lambda: ft.MultiheadAttention(8, 2, dropout=-0.1)),
        (ValueError, "window must be None with", lambda: ft.MultiheadAttention(8, 2, add_zero_attn=True, window=(1, 1))),
        (ValueError, "window must be None with", lambda: ft.MultiheadAttention(8, 2, add_bias_kv=True, window=(1, 1))),
        (ValueError, r"query .* size 8, got shape \(3, 4, 7\)", call(q=(N, L, 7))),
        (ValueError, r"key .* size 8, got shape \(3, 5, 7\)", call(k=(N, S, 7))),
        (ValueError, r"value .* size 8, got shape \(3, 5, 7\)", call(v=(N, S, 7))),
        (ValueError, r"key .*batch size of query, 3, got 1", call(k=(1, S, E), v=(1, S, E))),
        (ValueError, r"key .*batch size of query, 1, got 3", call(q=(1, L, E))),
        (ValueError, r"value .*length of key, \(3, 5, 8\), got \(3, 4, 8\)", call(v=(N, L, E))),
        (ValueError, r"key must have 3 dimensions", call(k=(S, E), v=(S, E))),
        (ValueError, r"query must have 3 dimensions", call(q=(1, N, L, E), k=(1, N, S, E), v=(1, N, S, E))),
        (ValueError, r"attn_mask .*\(4, 5\) or \(6, 4, 5\), got \(5, 4\)", call(attn_mask=bools(S, L))),
        (ValueError, r"attn_mask .*got \(3, 1\)", call(attn_mask=torch.zeros(3, 1), is_causal=True, need_weights=False)),
        (ValueError, r"attn_mask .*got \(3, 4, 5\)", call(attn_mask=bools(N, L, S))),
        (ValueError, r"key_padding_mask .*\(3, 5\), got \(3, 4\)", call(key_padding_mask=bools(N, L))),
        (ValueError, r"key_padding_mask .*\(3, 5\), got \(1, 5\)", call(key_padding_mask=bools(1, S), is_causal=True)),
        (ValueError, r"key_padding_mask .*\(5,\), got \(1, 5\)", call((L, E), (S, E), (S, E), key_padding_mask=bools(1, S))),
        (TypeError, "attn_mask .*got torch.int64", call(attn_mask=bools(L, S).long())),
        (TypeError, "key_padding_mask .*got torch.uint8", call(key_padding_mask=bools(N, S).byte())),
        (TypeError, "attn_mask .*got list", call(attn_mask=[[True]])),
    ],
)
def test_error(error, text, function):
    with pytest.raises(error, match=text):
        function()


# Layouts and copies


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_projections_are_taken_apart_without_a_copy(inputs, layout, monkeypatch):
    """One matrix product for each distinct input; what attention gets are views of its result."""
    monkeypatch.setattr(functional, "ready", lambda *_: False)  # small self-attention would be one call
    m = ft.MultiheadAttention(E, H, batch_first=layout == "batch_first")
    seen = {}

    def attention(query, key, value, **_):
        seen["storages"] = [t.untyped_storage().data_ptr() for t in (query, key, value)]
        seen["shapes"] = [tuple(t.shape) for t in (query, key, value)]
        return query, query.new_zeros(1)

    monkeypatch.setattr(functional, "attention", attention)
    tensors, pick = make_inputs(inputs, layout)
    tensors = [t.float() for t in tensors]
    m(*(tensors[i] for i in pick))
    storages = seen["storages"]
    assert [storages.index(s) for s in storages] == list(pick)
    n, s = (1 if layout == "unbatched" else N), (L if inputs == "self" else S)
    assert seen["shapes"] == [(n, H, L, 4), (n, H, s, 4), (n, H, s, 4)]


@need_extension
@pytest.mark.parametrize("masks", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(
    "weights", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=["", "mean", "per_head"]
)
def test_small_self_attention_is_one_call(weights, bias, dropout, masks, monkeypatch):
    """Of the very ops that it would call one by one: the same bits, gradients and masks of dropout."""
    m = randomise(ft.MultiheadAttention(E, H, dropout=dropout, bias=bias, batch_first=True))
    arguments = {
        "none": {},
        "bool": {"attn_mask": causal(L), "key_padding_mask": padding([L, 2, 1], L)},
        "float": {"attn_mask": additive(causal(L)).float(), "key_padding_mask": padding([L, 2, 1], L)},
        "causal": {"is_causal": True},
    }[masks]
    calls, original, results = [], ops.self_attention, []
    monkeypatch.setattr(ops, "self_attention", lambda *a: (calls.append(1), original(*a))[1])
    x = torch.randn(N, L, E)
    for _ in range(2):
        m.zero_grad()
        torch.manual_seed(3)
        x = x.detach().requires_grad_()
        out = m(x, x, x, **arguments, **weights)
        results.append([*backward(out), x.grad, *(p.grad for p in m.parameters())])
        monkeypatch.setattr(functional, "ready", lambda *_: False)
    assert calls == [1]
    assert all(map(torch.equal, *results)) and len(results[0]) == len(results[1])


def test_heads_that_do_not_fit_any_more_are_refused():
    m, x = ft.MultiheadAttention(E, H, batch_first=True), torch.randn(N, L, E)
    m.num_heads = 0
    with pytest.raises(RuntimeError):
        m(x, x, x)


def test_forward_mode_through_a_mask():
    m, x = ft.MultiheadAttention(E, H, batch_first=True), torch.randn(N, L, E)
    mask, tangent = torch.randn(2, L, L)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(mask, tangent)
        got = torch.autograd.forward_ad.unpack_dual(m(x, x, x, attn_mask=dual)[0]).tangent
    _, want = torch.autograd.functional.jvp(lambda mask: m(x, x, x, attn_mask=mask)[0], mask, tangent)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_function_mode_sees_every_product():
    class Mode(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += func is torch.nn.functional.linear
            return func(*args, **(kwargs or {}))

    m, x = ft.MultiheadAttention(E, H, batch_first=True), torch.randn(N, L, E)
    with Mode() as mode:
        m(x, x, x)
    assert mode.seen == 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("name, shape", [("attn_mask", (L, L)), ("key_padding_mask", (N, L))])
def test_masks_on_another_device_are_refused(name, shape, dtype):
    m, x = ft.MultiheadAttention(E, H, batch_first=True), torch.randn(N, L, E)
    with pytest.raises(ValueError, match="must be on cpu"):
        m(x, x, x, **{name: torch.zeros(shape, dtype=dtype, device="meta")})


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded_batch", "expanded_length", "expanded_width"])
def test_strided_inputs_and_masks(view):
    """The same numbers as from contiguous copies, and nothing is written to."""
    x = {
        "transposed": torch.randn(E, L, N, dtype=f64).permute(2, 1, 0),
        "sliced": torch.randn(2 * N, L, 2 * E, dtype=f64)[::2, :, ::2],
        "expanded_batch": torch.randn(1, L, E, dtype=f64).expand(N, L, E),
        "expanded_length": torch.randn(N, 1, E, dtype=f64).expand(N, L, E),
        "expanded_width": torch.randn(N, L, 1, dtype=f64).expand(N, L, E),
    }[view]
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True)).double()
    attn_mask, pad = torch.randn(L, 1, dtype=f64).expand(L, L), padding([3], L).expand(N, L)
    arguments = (x, attn_mask, pad)
    before = [t.clone() for t in arguments]
    got = m(x, x, x, attn_mask=attn_mask, key_padding_mask=pad)
    x, attn_mask, pad = before
    torch.testing.assert_close(got, m(x, x, x, attn_mask=attn_mask, key_padding_mask=pad), **CLOSE)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


@pytest.mark.parametrize("n, length, source", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty(n, length, source):
    m = ft.MultiheadAttention(E, H, batch_first=True)
    q, k = torch.randn(n, length, E), torch.randn(n, source, E)
    for attn_mask in (None, bools(length, source), torch.zeros(n * H, length, source)):
        out, weights = m(q, k, k, key_padding_mask=bools(n, source), attn_mask=attn_mask)
        assert out.shape == (n, length, E) and weights.shape == (n, length, source)
        if source == 0:
            assert torch.equal(out, m.out_proj.bias.expand_as(out))


def test_more_rows_than_a_grid_dimension_holds():
    m = randomise(ft.MultiheadAttention(4, 2, batch_first=True))
    x = torch.randn(33000, 2, 4)  # 66000 batch * heads rows
    with torch.no_grad():
        out = m(x, x, x, need_weights=False)[0]
        some = x[[0, 32767, 32768, -1]]
        torch.testing.assert_close(out[[0, 32767, 32768, -1]], m(some, some, some)[0], rtol=1e-4, atol=1e-5)


# Dropout


@pytest.mark.parametrize("average", [True, False], ids=["mean", "per_head"])
def test_returned_weights_are_those_that_were_used(average):
    m = randomise(ft.MultiheadAttention(E, H, dropout=0.5, batch_first=True)).double()
    x = torch.randn(N, L, E, dtype=f64)
    torch.manual_seed(3)
    out, per_head = m(x, x, x, average_attn_weights=False)
    values = (x @ m.in_proj_weight[2 * E :].T + m.in_proj_bias[2 * E :]).unflatten(-1, (H, -1)).transpose(1, 2)
    torch.testing.assert_close(out, m.out_proj((per_head @ values).transpose(1, 2).flatten(2)), **CLOSE)
    assert 0.2 < (per_head == 0).double().mean() < 0.8
    torch.manual_seed(3)
    torch.testing.assert_close(m(x, x, x, average_attn_weights=average)[1], per_head.mean(1) if average else per_head, **CLOSE)


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
def test_dropout_is_unbiased_and_keeps_masks(need_weights):
    m = randomise(ft.MultiheadAttention(4, 2, dropout=0.25, batch_first=True)).double()
    x = torch.randn(1, 3, 4, dtype=f64)
    with torch.no_grad():
        want = m.eval()(x, x, x, attn_mask=causal(3))[0][0]
        many = x.expand(4000, 3, 4)
        got = m.train()(many, many, many, attn_mask=causal(3), need_weights=need_weights)[0]
    assert got.std(0).max() > 0.01
    assert ((got.mean(0) - want).abs() < 5 * got.std(0) / 4000**0.5 + 1e-9).all()  # 5 standard errors


def test_edited_dropout_is_used():
    m = ft.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, L, E)
    assert torch.equal(m(x, x, x)[0], m(x, x, x)[0])
    m.dropout = 0.5
    assert not torch.equal(m(x, x, x)[0], m(x, x, x)[0])


def test_dropout_module():
    x = torch.ones(200, 50)
    drop = ft.Dropout(0.25)
    kept = drop(x)
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3], rel=1e-4)
    assert abs((kept == 0).float().mean().item() - 0.25) < 0.03
    assert drop.eval()(x) is x
    assert not ft.Dropout(1.0)(x).any()
    assert ft.Dropout(0.5, inplace=True)(x) is x and (x == 0).any()


# What people do with modules


def test_replaced_and_hooked_out_proj_is_called():
    m = ft.MultiheadAttention(E, H, batch_first=True).eval()
    x, calls = torch.randn(N, L, E), []
    m.out_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        m(x, x, x)
        m.out_proj = torch.nn.Linear(E, 3)
        assert m(x, x, x)[0].shape == (N, L, 3)
    assert calls == [1]


def test_parametrized_weight_is_used():
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True))
    doubled, x = copy.deepcopy(m), torch.randn(N, L, E)
    with torch.no_grad():
        doubled.in_proj_weight.mul_(2)
    scale = torch.nn.Module()
    scale.forward = lambda w: 2 * w
    parametrize.register_parametrization(m, "in_proj_weight", scale)
    torch.testing.assert_close(m(x, x, x), doubled(x, x, x))


def test_copies_and_pickles():
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True, window=(1, 0))).eval()
    x = torch.randn(N, L, E)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(x, x, x)[0], m(x, x, x)[0])


def test_pickle_from_before_the_extras():
    m = ft.MultiheadAttention(E, H, batch_first=True)
    del m.__dict__["window"], m.__dict__["softcap"]
    old, x = pickle.loads(pickle.dumps(m)), torch.randn(N, L, E)
    assert torch.equal(old(x, x, x)[0], m(x, x, x)[0])


def test_changed_parameters_are_used_at_once():
    m, x = ft.MultiheadAttention(E, H, batch_first=True).eval(), torch.randn(N, L, E)
    with torch.inference_mode():
        before = m(x, x, x)[0]
    m.in_proj_weight.data = torch.randn(3 * E, E)
    m.out_proj.weight.data.mul_(0.5)
    fresh = ft.MultiheadAttention(E, H, batch_first=True).eval()
    fresh.load_state_dict(m.state_dict())
    with torch.inference_mode():
        assert torch.equal(m(x, x, x)[0], fresh(x, x, x)[0])
        assert not torch.equal(m(x, x, x)[0], before)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("option", [{}, {"kdim": 6, "vdim": 7}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_script(option, bias):
    m = randomise(ft.MultiheadAttention(E, H, bias=bias, **option)).double().eval()
    (q, k, v), _ = make_inputs("distinct", "batch_second", m.kdim, m.vdim)
    scripted = script(m)
    for arguments in ({}, {"is_causal": True}, {"need_weights": False, "is_causal": True}):
        torch.testing.assert_close(scripted(q, k, v, **arguments), m(q, k, v, **arguments), **CLOSE)
    assert scripted.out_proj.weight.data_ptr() == m.out_proj.weight.data_ptr()
    assert type(m) is ft.MultiheadAttention
    torch.jit.load(io.BytesIO(scripted.save_to_buffer()))(q, k, v)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_script_refuses_what_torch_nn_cannot_do():
    with pytest.raises(RuntimeError, match="window and softcap"):
        torch.jit.script(ft.MultiheadAttention(E, H, softcap=3.0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_self_attention(layout):
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True)).double()
    samples = [torch.randn(n, E, dtype=f64) for n in (4, 2, 3)]
    nested = torch.nested.nested_tensor(samples, layout=layout, requires_grad=True)
    out, _ = m(nested, nested, nested)
    assert out.is_nested and out.layout == layout
    for got, x in zip(out.unbind(), samples, strict=True):
        torch.testing.assert_close(got, m(x, x, x)[0], **CLOSE)
    sum(o.sum() for o in out.unbind()).backward()
    assert all(g.any() for g in nested.grad.unbind())


def test_nested_tensor_errors():
    nested, x = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)]), torch.randn(2, 3, E)
    m = ft.MultiheadAttention(E, H, batch_first=True)
    for text, function in (
        ("self-attention", lambda: m(x, nested, nested)),
        ("key_padding_mask must be None", lambda: m(nested, nested, nested, key_padding_mask=bools(2, 3))),
        ("batch_first=True", lambda: ft.MultiheadAttention(E, H)(nested, nested, nested)),
    ):
        with pytest.raises(ValueError, match=text):
            function()


# Derivatives, transforms, compilers


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "batch_second"])
def test_double_backward(batch_first, need_weights):
    m = randomise(ft.MultiheadAttention(4, 2, batch_first=batch_first)).double()
    x = torch.randn(2, 3, 4, dtype=f64, requires_grad=True)
    length = x.shape[1 if batch_first else 0]
    mask = torch.randn(length, length, dtype=f64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x, b: m(x, x, x, attn_mask=b, need_weights=need_weights)[0], (x, mask), fast_mode=True)


def test_double_backward_without_a_learned_mask():
    """The path that attention takes without weights and without a mask that records a gradient."""
    m = randomise(ft.MultiheadAttention(4, 2, batch_first=True)).double()
    x = torch.randn(2, 3, 4, dtype=f64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x: m(x, x, x, attn_mask=causal(3), need_weights=False)[0], (x,), fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch.func scripts its own decompositions
def test_function_transforms():
    """vmap, jvp, per-sample gradients: the same numbers as one sample after the other."""
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True)).double()
    x = torch.randn(N, L, E, dtype=f64)
    parameters = {n: p.detach() for n, p in m.named_parameters()}

    def loss(p, sample):
        return functional_call(m, p, (sample, sample, sample), {"need_weights": False})[0].square().sum()

    batched = vmap(grad(loss), (None, 0))(parameters, x)
    for i, sample in enumerate(x):
        torch.testing.assert_close({n: g[i] for n, g in batched.items()}, grad(loss)(parameters, sample), **CLOSE)
    _, tangent = jvp(lambda x: loss(parameters, x), (x[0],), (x[1],))
    torch.testing.assert_close(tangent, (grad(loss, 1)(parameters, x[0]) * x[1]).sum(), **CLOSE)


@pytest.mark.parametrize(
    "backend, need_weights, attn",
    [("aot_eager", False, None), ("aot_eager", True, "bool2d"), ("aot_eager", False, "float3d"), ("inductor", False, "bool2d")],
)
def test_compile_to_one_graph(backend, need_weights, attn):
    torch._dynamo.reset()
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True)).double()
    compiled = torch.compile(m, backend=backend, fullgraph=True)
    x = torch.randn(N, L, E, dtype=f64)
    attn_mask, pad = make_masks(attn, "bool", "batch_first", L)
    results = []
    for f in (compiled, m):
        m.zero_grad()
        outputs = backward(f(x, x, x, pad, attn_mask=attn_mask, need_weights=need_weights))
        results.append((outputs, [p.grad for p in m.parameters()]))
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_export_with_dynamic_sizes(mode):
    m = randomise(ft.MultiheadAttention(E, H, batch_first=True)).double().eval()
    n, length = torch.export.Dim("n", min=2, max=64), torch.export.Dim("length", min=2, max=64)

    class SelfAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = m

        def forward(self, x, pad):
            return self.attention(x, x, x, pad)

    with mode():
        example = (torch.randn(3, 5, E, dtype=f64), bools(3, 5))
        exported = torch.export.export(SelfAttention(), example, dynamic_shapes=({0: n, 1: length}, {0: n, 1: length})).module()
        x, pad = torch.randn(2, 9, E, dtype=f64), padding([9, 4], 9)
        torch.testing.assert_close(exported(x, pad), m(x, x, x, pad), **CLOSE)


# Precision


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["autocast", "cast"])
def test_half_precision_with_a_float32_mask(how, dtype, need_weights):
    """Within 3 times the error of torch.nn in the same dtype, plus one rounding of the largest element."""
    stock, ours = pair("MultiheadAttention", E, H, batch_first=True)
    x, mask = torch.randn(N, L, E, dtype=f64), torch.zeros(L, L, dtype=f64).masked_fill(causal(L), -torch.inf)
    exact = stock(x, x, x, attn_mask=mask)[0]
    errors = []
    for m in (stock, ours):
        if how == "cast":
            m.to(dtype)
            out = m(*[x.to(dtype)] * 3, attn_mask=mask.to(dtype if m is stock else torch.float32), need_weights=need_weights)[0]
            assert out.dtype == dtype
        else:
            m.float()
            with torch.autocast("cpu", dtype=dtype):
                out = m(*[x.float()] * 3, attn_mask=mask.float(), need_weights=need_weights)[0]
        errors.append((out.double() - exact).abs().max())
        out.float().sum().backward()
        assert all(p.grad.isfinite().all() for p in m.parameters())
    assert errors[1] <= 3 * errors[0] + torch.finfo(dtype).eps / 2 * exact.abs().max()


def test_float16_scores_do_not_overflow():
    """q . k is 82944 here, more than float16 holds; scaled by 1/8 it fits."""
    m = ft.MultiheadAttention(64, 1, bias=False, batch_first=True)
    with torch.no_grad():
        m.in_proj_weight.copy_(torch.eye(64).repeat(3, 1))
        m.out_proj.weight.copy_(torch.eye(64))
    x = (torch.randn(1, 5, 64).sign() * 36).half()
    for need_weights in (False, True):
        out = m.half()(x, x, x, need_weights=need_weights)[0]
        torch.testing.assert_close(out, x)  # every vector attends to itself alone
