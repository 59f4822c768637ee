"""FusedLayerNorm, FusedRMSNorm and DropoutAddLayerNorm against torch.nn, in float64 with gradients."""

import pytest
import torch
import torch.nn.functional as F
from common import drawn_keep_mask, need_extension
from torch import nn
from twins import CLOSE, assert_same_parameter_gradients, backward, leaves, randomise, script

import fast_transformer as ft
from fast_transformer import functional

TWINS = {"LayerNorm": ft.FusedLayerNorm, "RMSNorm": ft.FusedRMSNorm}
SHAPES = [
    ((7,), 1),
    ((2, 3, 7), 1),
    ((2, 3, 7), 2),
    ((2, 3, 7), 3),
    ((1, 1, 1), 2),
    ((0, 4, 5), 1),
    ((0, 4, 5), 2),
    ((2, 3, 4, 5), 3),
]


def pair(name, *args, **options):
    """(torch.nn's module, ours), in float64 and with equal parameters: `randomise` knows a norm by its name."""
    stock = nn.ModuleDict({"norm": getattr(nn, name)(*args, **options)})
    twin = nn.ModuleDict({"norm": TWINS[name](*args, **options)})
    return randomise(stock.double())["norm"], randomise(twin.double())["norm"]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape, dimensions", SHAPES, ids=str)
@pytest.mark.parametrize("name", TWINS)
def test_equals_torch(name, shape, dimensions, affine):
    stock, twin = pair(name, shape[len(shape) - dimensions :], eps=1e-3, elementwise_affine=affine)
    x = torch.randn(shape, dtype=torch.float64)
    (a,), (b,) = leaves(x), leaves(x)
    (want,), (got,) = backward(stock(a)), backward(twin(b))
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(b.grad, a.grad, **CLOSE)
    if affine:
        assert_same_parameter_gradients(twin, stock)


@pytest.mark.parametrize("options", [{}, {"eps": 0.1}, {"elementwise_affine": False}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("name", TWINS)
def test_the_same_module_as_torchs(name, options):
    stock, twin = getattr(nn, name)((3, 4), **options), TWINS[name]((3, 4), **options)
    assert isinstance(twin, getattr(nn, name)) and twin.extra_repr() == stock.extra_repr()
    assert list(twin.state_dict()) == list(stock.state_dict())
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(twin.parameters(), stock.parameters(), strict=True))
    stock.load_state_dict(twin.state_dict())
    twin.load_state_dict(stock.state_dict())


def test_layer_norm_without_bias():
    stock, twin = pair("LayerNorm", 6, bias=False)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(twin(x), stock(x), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rms_norm_takes_torchs_eps_where_it_is_none(dtype):
    x = torch.full((2, 8), 2.0**-12, dtype=dtype)
    torch.testing.assert_close(ft.FusedRMSNorm(8, dtype=dtype)(x), nn.RMSNorm(8, dtype=dtype)(x))


def test_float32_parameters_beside_bfloat16():
    for twin in (ft.FusedLayerNorm(8), ft.FusedRMSNorm(8)):
        x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
        out = twin(x)
        out.sum().backward()
        assert out.dtype == x.grad.dtype == torch.bfloat16 and twin.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", TWINS)
def test_strided_input_of_several_dimensions(name):
    stock, twin = pair(name, (4, 5))
    x = torch.randn(5, 4, 3, dtype=torch.float64).permute(2, 1, 0)
    torch.testing.assert_close(twin(x), stock(x), **CLOSE)
    torch.testing.assert_close(torch.vmap(twin)(x), stock(x), **CLOSE)  # through the reference


@pytest.mark.parametrize("name", TWINS)
def test_scripts_and_compiles(name):
    _, twin = pair(name, 8)
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(script(twin)(x), twin(x), **CLOSE)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(twin, backend="aot_eager", fullgraph=True)(x), twin(x), **CLOSE)


def composed(norm, x, residual, factor):
    total = x if factor is None else x * factor
    total = total if residual is None else residual + total
    return F.layer_norm(total, norm.normalized_shape, norm.weight, norm.bias, norm.eps), total


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(6,), (2, 5)], ids=str)
def test_dropout_add_layer_norm(shape, p, with_residual, prenorm):
    module = nn.ModuleDict({"norm": ft.DropoutAddLayerNorm(shape, p, prenorm=prenorm, eps=1e-3)}).double()
    norm = randomise(module)["norm"]
    stock = nn.LayerNorm(shape, 1e-3).double()
    stock.load_state_dict(norm.state_dict())
    data = [torch.randn(3, *shape, dtype=torch.float64) for _ in range(1 + with_residual)]
    for training in (True, False):
        norm.train(training)
        norm.zero_grad(), stock.zero_grad()
        rows = (3, stock.weight.numel())
        factor = drawn_keep_mask(5, rows, p).view(3, *shape) if p and training else None
        a, b = leaves(*data), leaves(*data)
        torch.manual_seed(5)
        got = backward(norm(*a))
        want = backward(composed(stock, *(b + [None])[:2], factor)[: 1 + prenorm])
        for g, w in zip(got + [t.grad for t in a], want + [t.grad for t in b], strict=True):
            torch.testing.assert_close(g, w, **CLOSE)
        assert_same_parameter_gradients(norm, stock)


def test_a_float32_stream_through_two_blocks():
    first = ft.DropoutAddLayerNorm(8, prenorm=True, residual_in_fp32=True, dtype=torch.bfloat16)
    last = ft.DropoutAddLayerNorm(8, residual_in_fp32=True, dtype=torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    h, stream = first(x)
    assert h.dtype == torch.bfloat16 and stream.dtype == torch.float32
    out = last(h, stream)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all()


@need_extension
def test_encoder_layers_fuse_a_fused_norm(monkeypatch):
    """A FusedLayerNorm in an encoder layer is as good as torch.nn.LayerNorm: one pass, not three."""
    layer = ft.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    layer.norm1, layer.norm2 = ft.FusedLayerNorm(8), ft.FusedLayerNorm(8)
    calls = []
    op = functional.dropout_add_layer_norm
    monkeypatch.setattr(functional, "dropout_add_layer_norm", lambda *a, **o: calls.append(a[1] is not None) or op(*a, **o))
    x = torch.randn(2, 3, 8)
    in_one_call = layer(x)
    assert calls == []
    layer.self_attn.register_forward_hook(lambda *_: None)
    assert torch.equal(layer(x), in_one_call) and calls == [True, True]


# fmt: off
BAD = [  # id, call, exception, what the text says
    ("layer-shape", lambda: ft.FusedLayerNorm(8)(torch.zeros(2, 7)), ValueError,
     "input must have a shape that ends in (8,), the normalized_shape, got (2, 7)"),
    ("layer-shape-2", lambda: ft.FusedLayerNorm((3, 8))(torch.zeros(2, 8)), ValueError,
     "input must have a shape that ends in (3, 8), the normalized_shape, got (2, 8)"),
    ("layer-rank", lambda: ft.FusedLayerNorm((3, 8))(torch.zeros(8)), ValueError, "that ends in (3, 8)"),
    ("layer-0-dim", lambda: ft.FusedLayerNorm(8)(torch.tensor(1.0)), ValueError, "that ends in (8,)"),
    ("layer-int", lambda: ft.FusedLayerNorm(8)(torch.zeros(2, 8, dtype=torch.int64)), TypeError,
     "input must have a floating-point dtype, got torch.int64"),
    ("layer-list", lambda: ft.FusedLayerNorm(8)([1.0] * 8), TypeError, "input must be a torch.Tensor, got list"),
    ("layer-none", lambda: ft.FusedLayerNorm(())(torch.zeros(2)), ValueError,
     "normalized_shape must hold sizes of at least 1, got ()"),
    ("layer-zero", lambda: ft.FusedLayerNorm((3, 0))(torch.zeros(3, 0)), ValueError,
     "sizes of at least 1, got (3, 0)"),
    ("layer-eps", lambda: ft.FusedLayerNorm(8, eps=-1.0)(torch.zeros(2, 8)), ValueError,
     "eps must be a finite number >= 0, got -1.0"),
    ("rms-shape", lambda: ft.FusedRMSNorm(8)(torch.zeros(2, 7)), ValueError,
     "x must have a shape that ends in (8,), the normalized_shape, got (2, 7)"),
    ("rms-eps", lambda: ft.FusedRMSNorm(8, eps="x")(torch.zeros(2, 8)), ValueError,
     "eps must be None or a finite number >= 0, got 'x'"),
    ("rms-none", lambda: ft.FusedRMSNorm(())(torch.zeros(2)), ValueError,
     "normalized_shape must hold sizes of at least 1, got ()"),
    ("add-p", lambda: ft.DropoutAddLayerNorm(8, 1.0), ValueError, "p must be a number in [0, 1), got 1.0"),
    ("add-residual", lambda: ft.DropoutAddLayerNorm(8)(torch.zeros(2, 8), torch.zeros(3, 8)), ValueError,
     "residual must have the shape of x, (2, 8), got (3, 8)"),
    ("add-residual-shape", lambda: ft.DropoutAddLayerNorm((2, 8))(torch.zeros(2, 8), torch.zeros(16)), ValueError,
     "residual must have a shape that ends in (2, 8), the normalized_shape, got (16,)"),
    ("add-prenorm", lambda: ft.DropoutAddLayerNorm(8, prenorm=1)(torch.zeros(2, 8)), TypeError,
     "prenorm must be True or False, got 1"),
    ("add-fp32", lambda: ft.DropoutAddLayerNorm(8, residual_in_fp32="yes")(torch.zeros(2, 8)), TypeError,
     "residual_in_fp32 must be True or False, got 'yes'"),
]
# fmt: on


@pytest.mark.parametrize("call, exception, text", [pytest.param(*c, id=name) for name, *c in BAD])
def test_error_says_what_is_wrong(call, exception, text):
    with pytest.raises(exception) as caught:
        call()
    assert caught.type is exception and text in str(caught.value)
