"""Positions against their formulas, alone and in the twins; masks and their convention."""

import copy
import math
import pickle

import pytest
import torch

import fast_transformer as ft
from fast_transformer.masks import look_ahead_mask, padding_mask, target_mask
from fast_transformer.nn.positions import sinusoidal_positions

E, H, D = 32, 4, 8


@pytest.mark.parametrize("d_model", [1, 2, 7, 512])
def test_sinusoids_are_the_formula_of_the_paper(d_model):
    table = sinusoidal_positions(600, d_model)
    assert table.shape == (600, d_model) and table.dtype == torch.float32
    for position in (0, 1, 17, 599):
        for column in range(0, d_model, 1 + d_model // 8):
            i = column // 2
            wave = math.cos if column % 2 else math.sin
            expected = wave(position / 10000 ** (2 * i / d_model))
            assert table[position, column].item() == pytest.approx(expected, abs=2**-24)  # rounded once from float64


def test_sinusoidal_positions_grow_and_keep_nothing_in_state_dicts():
    m = ft.SinusoidalPositions(7)
    assert not m.state_dict() and not list(m.parameters())
    assert torch.equal(m(3, 5), sinusoidal_positions(8, 7)[5:])
    assert torch.equal(m(10_000), sinusoidal_positions(10_000, 7))
    assert torch.equal(m(2, 19_998), sinusoidal_positions(20_000, 7)[-2:])
    assert m.double()(0).shape == (0, 7) and m(1).dtype == torch.float64


@pytest.mark.parametrize("m", [ft.SinusoidalPositions(6), ft.LearnedPositions(9, 6)], ids=["sinusoidal", "learned"])
def test_padding_shifts_positions_of_a_row(m):
    x = m(5, 1, padding=torch.tensor([0, 3]))
    assert torch.equal(x[0], m(5, 1)) and torch.equal(x[1, 2:], m(3)) and torch.equal(x[1, :2], m(1).expand(2, 6))


def test_learned_positions_end_at_max_len():
    m = ft.LearnedPositions(9, 6)
    m(4, 5).sum().backward()
    assert torch.equal(m.weight.grad, torch.cat((torch.zeros(5, 6), torch.ones(4, 6))))
    with pytest.raises(ValueError, match="max_len = 9 tokens, got 10"):
        m(5, 5)


def test_rotary_is_a_rotation_of_complex_numbers():
    """RoFormer, equation 34, with entry i as real part and i + D/2 as imaginary part of number i."""
    x = torch.randn(2, H, 600, D, dtype=torch.float64)
    rates = 10000.0 ** (-2 * torch.arange(D // 2).double() / D)
    angles = torch.arange(3, 603).double()[:, None] * rates
    expected = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    rotary = ft.RotaryPositions(D)
    torch.testing.assert_close(rotary(x, 3), torch.cat((expected.real, expected.imag), dim=-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotary(x[:, :, 500:], 503), rotary(x, 3)[:, :, 500:], rtol=0, atol=0)
    assert torch.equal(pickle.loads(pickle.dumps(rotary))(x), copy.deepcopy(rotary)(x))
    half = rotary(x.bfloat16(), 3)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rotary(x.bfloat16().float(), 3).bfloat16())


def test_rotary_scores_depend_on_distances_alone():
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64).expand(2, 1, 1, 50, D)
    rotary = ft.RotaryPositions(D)
    scores = rotary(q, 7) @ rotary(k, 7).mT
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], rtol=1e-12, atol=1e-12)
    assert (scores[..., 0, 0] - scores[..., 0, 1]).abs() > 1e-3


def bucket(distance: int, bidirectional: bool, n: int = 32, most: int = 128) -> int:
    """T5's bucket, said with integers: the least b whose range ends after the distance."""
    first = 0
    if bidirectional:
        n //= 2
        first = n if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = n // 2
    if distance < exact:
        return first + distance
    steps = n - exact
    reached = sum(distance**steps * exact**j >= exact**steps * most**j for j in range(1, steps))
    return first + exact + reached


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets(bidirectional):
    m = ft.RelativePositionBias(H, bidirectional=bidirectional)
    distances = [d for d in range(-300, 301) if abs(d) not in (16, 32, 64, 128)]  # there rounding may decide
    assert m.bucket(torch.tensor(distances)).tolist() == [bucket(d, bidirectional) for d in distances]
    assert m.bucket(torch.tensor([-(2**40), 2**40])).tolist() == [15 if bidirectional else 31, 31 if bidirectional else 0]


def test_relative_bias_and_its_gradient():
    m = ft.RelativePositionBias(H, bidirectional=True)
    bias = m(5, 9, 2)
    assert bias.shape == (1, H, 5, 9)
    for i in range(5):
        for j in range(9):
            assert torch.equal(bias[0, :, i, j], m.weight[:, bucket(j - i - 2, True)])
    bias.sum().backward()
    assert m.weight.grad.sum() == H * 45


def test_alibi_slopes_and_bias():
    assert ft.AlibiBias(8).slopes.tolist() == [2.0**-i for i in range(1, 9)]
    twelve = ft.AlibiBias(12).slopes.tolist()
    assert twelve == pytest.approx([2.0**-i for i in range(1, 9)] + [2.0**-i for i in (0.5, 1.5, 2.5, 3.5)])
    assert ft.AlibiBias(1).slopes.tolist() == [2.0**-8]
    bias = ft.AlibiBias(8)(3, 6, 3)
    assert bias.shape == (1, 8, 3, 6) and bias[0, 1, 0].tolist() == [-0.75, -0.5, -0.25, 0, -0.25, -0.5]
    assert not ft.AlibiBias(8).state_dict()


def manual(layer: ft.MultiheadAttention, x: torch.Tensor, bias: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """The definition, in plain PyTorch: projections, rotary, scores + bias, softmax."""
    q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in (x @ layer.in_proj_weight.T).chunk(3, dim=-1))
    if layer.rotary is not None:
        q, k = layer.rotary(q), layer.rotary(k)
    scores = q @ k.mT / D**0.5 + (0 if bias is None else bias)
    if causal:
        scores = scores.masked_fill(look_ahead_mask(x.shape[1]), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["rotary", "relative", "alibi"])
def test_in_the_twins_with_gradients(kind, causal):
    layer = ft.MultiheadAttention(
        E, H, bias=False, batch_first=True, rotary=ft.RotaryPositions(D) if kind == "rotary" else None
    )
    layer.double()
    positions = {"relative": ft.RelativePositionBias(H, bidirectional=True), "alibi": ft.AlibiBias(H)}.get(kind)
    x, grad = torch.randn(2, 2, 11, E, dtype=torch.float64)
    results = []
    for compute in (
        lambda bias: layer(x, x, x, is_causal=causal, position_bias=bias, need_weights=False)[0],
        lambda bias: manual(layer, x, bias, causal),
    ):
        bias = None if positions is None else positions.double()(11, 11)
        out = compute(bias)
        parameters = [*layer.parameters(), *([] if kind != "relative" else positions.parameters())]
        results.append((out, torch.autograd.grad(out, parameters, grad)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_and_stacks_hand_the_extras_on(norm_first):
    """A bias for all layers equals the same numbers as a float mask; rotary reaches self-attention and not cross-attention."""
    torch.manual_seed(0)
    t = ft.Transformer(E, H, 2, 2, 16, 0.0, batch_first=True, norm_first=norm_first).double()
    src, tgt = torch.randn(2, 2, 6, E, dtype=torch.float64)
    bias = ft.AlibiBias(H).double()(6, 6)
    mask = bias.masked_fill(look_ahead_mask(6), -math.inf)
    a = t.decoder(tgt, t.encoder(src, position_bias=bias, is_causal=True), tgt_is_causal=True, position_bias=bias)
    b = t.decoder(tgt, t.encoder(src, mask), tgt_mask=mask)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    rotary = ft.Transformer(E, H, 2, 2, 16, rotary=ft.RotaryPositions(D))
    turned = [name for name, m in rotary.named_modules() if getattr(m, "rotary", None) is not None]
    assert len(turned) == 4 and all(name.endswith("self_attn") for name in turned)
    assert rotary.state_dict().keys() == t.state_dict().keys()


def test_masks_say_what_is_hidden():
    tokens = torch.tensor([[5, 6, 0], [7, 0, 0]])
    assert padding_mask(tokens, 0).tolist() == [[False, False, True], [False, True, True]]
    assert look_ahead_mask(3).tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert target_mask(tokens, 0)[1, 0].tolist() == [[False, True, True]] * 3
    assert look_ahead_mask(0).shape == (0, 0)


def test_masks_go_into_modules_as_they_are_and_negated_into_functional():
    tokens = torch.tensor([[5, 6, 0, 8], [7, 9, 0, 0]])
    x = torch.randn(2, 4, E)
    m = ft.MultiheadAttention(E, H, batch_first=True)
    both = m(x, x, x, attn_mask=look_ahead_mask(4), key_padding_mask=padding_mask(tokens, 0))
    torch.testing.assert_close(m(x, x, x, attn_mask=target_mask(tokens, 0)), both)
    q = torch.randn(2, H, 4, D)
    hidden = target_mask(tokens, 0)
    _, weights = ft.functional.attention(q, q, q, mask=~hidden, return_weights="per_head")
    assert (weights[hidden.expand_as(weights)] == 0).all() and (weights[~hidden.expand_as(weights)] > 0).all()


x = torch.randn(2, 5, E)
self_attention = ft.MultiheadAttention(E, H, batch_first=True)


@pytest.mark.parametrize(
    "error, text, call",
    [
        (TypeError, "tokens must be an integer.*got torch.bool", lambda: padding_mask(torch.ones(2, 3) > 0, 0)),
        (TypeError, "tokens must be an integer.*got list", lambda: padding_mask([[1]], 0)),
        (ValueError, r"tokens must have 2 dimensions, got shape \(3,\)", lambda: target_mask(torch.ones(3).long(), 0)),
        (ValueError, "n must be a length, an integer >= 0, got -1", lambda: look_ahead_mask(-1)),
        (ValueError, "got tensor", lambda: look_ahead_mask(torch.ones(2))),
        (TypeError, "d_model must be an integer, got 2.5", lambda: ft.SinusoidalPositions(2.5)),
        (ValueError, "max_len must be at least 1, got 0", lambda: ft.LearnedPositions(0, 4)),
        (ValueError, "offset must be at least 0, got -1", lambda: ft.SinusoidalPositions(4)(2, -1)),
        (ValueError, "head_dim must be even.*got 7", lambda: ft.RotaryPositions(7)),
        (ValueError, "base must be a number > 0, got 0", lambda: ft.RotaryPositions(8, 0)),
        (ValueError, "size head_dim = 8", lambda: ft.RotaryPositions(8)(torch.randn(1, 1, 2, 4))),
        (
            ValueError,
            "n_buckets must be at least 4, got 2",
            lambda: ft.RelativePositionBias(2, bidirectional=True, n_buckets=2),
        ),
        (ValueError, "max_distance", lambda: ft.RelativePositionBias(2, bidirectional=False, max_distance=16)),
        (TypeError, "rotary must be RotaryPositions or None, got int", lambda: ft.MultiheadAttention(E, H, rotary=8)),
        (ValueError, "heads of size 8, got head_dim 4", lambda: ft.TransformerEncoderLayer(E, H, rotary=ft.RotaryPositions(4))),
        (
            ValueError,
            r"position_bias must broadcast to .*\(2, 4, 5, 5\), got \(4, 5, 5\)",
            lambda: self_attention(x, x, x, position_bias=torch.zeros(H, 5, 5)),
        ),
        (
            TypeError,
            "position_bias must have a floating-point dtype",
            lambda: self_attention(x, x, x, position_bias=torch.zeros(1, H, 5, 5).bool()),
        ),
        (ValueError, "attn_mask must have 4 dim", lambda: self_attention(x, x, x, attn_mask=torch.zeros(1, 3, 5, 5))),
    ],
)
def test_bad_input(error, text, call):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("how", ["hook", "replaced", "compiled"])
def test_extras_reach_layers_whose_dropout_is_watched_or_replaced(how, norm_first):
    """And layers under torch.compile, whose graph holds the fused ops."""
    layer = ft.TransformerEncoderLayer(E, H, 16, 0.0, batch_first=True, norm_first=norm_first)
    bias, call = ft.AlibiBias(H)(5, 5), layer
    expected = layer(x, position_bias=bias)
    if how == "hook":
        layer.dropout1.register_forward_hook(lambda *_: None)
    elif how == "replaced":
        layer.dropout1 = torch.nn.Identity()
    else:
        graphs = []

        def keep(graph, _):
            graphs.append(graph.code)
            return graph.forward

        torch._dynamo.reset()
        call = torch.compile(layer, fullgraph=True, backend=keep)
    torch.testing.assert_close(call(x, position_bias=bias), expected)
    if how == "compiled":
        assert "dropout_add_layer_norm" in graphs[0]


@pytest.mark.parametrize("appended", ["add_bias_kv", "add_zero_attn"])
@pytest.mark.parametrize("keys", [1, 5])
def test_position_bias_beside_appended_keys_leaves_these_alone(appended, keys):
    m = ft.MultiheadAttention(E, H, batch_first=True, **{appended: True}).double()
    q = x.double()
    bias = torch.randn(1, H, 5, keys, dtype=torch.float64)
    mask = bias.expand(2, H, 5, 5).reshape(2 * H, 5, 5)
    torch.testing.assert_close(m(q, q, q, position_bias=bias), m(q, q, q, attn_mask=mask))
    torch.testing.assert_close(m(q, q, q, attn_mask=bias), m(q, q, q, attn_mask=mask))


def test_tables_made_in_inference_mode_are_of_use_in_training():
    m = ft.MultiheadAttention(E, H, batch_first=True, rotary=ft.RotaryPositions(D)).double()
    sinusoidal, long = ft.SinusoidalPositions(E).double(), torch.randn(1, 600, E, dtype=torch.float64)
    with torch.inference_mode():
        m(long, long, long)
        sinusoidal(600)
    y = torch.nn.Parameter(long) * sinusoidal(600)
    m(y, y, y)[0].sum().backward()
    assert m.in_proj_weight.grad.isfinite().all()
