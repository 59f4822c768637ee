"""The twins of torch.nn's Transformer layers, stacks and Transformer against torch.nn itself, and what people do to layers."""

import copy
import functools
import io
import math
import pickle
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from common import need_extension
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
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
N, L, S, E, H, FF = 3, 4, 5, 8, 2, 12
LAYERS = {"encoder": "TransformerEncoderLayer", "decoder": "TransformerDecoderLayer"}
each_layer = pytest.mark.parametrize("kind", LAYERS)
norm_order = pytest.mark.parametrize("norm_first", [False, True], ids=["post_norm", "pre_norm"])
train_and_eval = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def make(kind, **options):
    """Our layer in float64 with random parameters."""
    options = {"batch_first": True, "dropout": 0.0, **options}
    return randomise(getattr(ft, LAYERS.get(kind, kind))(E, H, FF, **options)).double()


def make_inputs(kind, batch_first=True):
    """x for an encoder, (x, memory) for a decoder."""
    shapes = [(N, L), (N, S)][: 1 if kind == "encoder" else 2]
    return [torch.randn(*(shape if batch_first else shape[::-1]), E, dtype=f64) for shape in shapes]


def make_masks(kind, masks):
    """The mask arguments of a layer: two bool, two float, a 3-D and a float one, or none."""
    if masks == "none":
        return {}
    hidden = {"src_mask": causal(L), "src_key_padding_mask": padding([L, 2, 1], L)}
    if kind == "decoder":
        hidden = {k.replace("src", "tgt"): v for k, v in hidden.items()}
        hidden |= {"memory_mask": torch.rand(L, S) < 0.3, "memory_key_padding_mask": padding([2, S, 1], S)}
        hidden["memory_mask"][:, 0] = False
    if masks == "3d":
        hidden = {
            k: v.repeat(N * H, 1, 1) if k.endswith("y_mask") or not k.endswith("padding_mask") else v for k, v in hidden.items()
        }
    return {k: additive(v) if masks == "float" else v for k, v in hidden.items()}


def hooked(layer):
    """A copy in which every module is watched, so that nothing is fused."""
    layer = copy.deepcopy(layer)
    for module in layer.modules():
        module.register_forward_hook(lambda *_: None)
    return layer


# Equal to torch.nn


@pytest.mark.parametrize("masks", ["none", "bool", "float", "3d"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "batch_second"])
@pytest.mark.parametrize(
    "activation", ["relu", "gelu", F.silu, nn.GELU("tanh"), torch.tanh], ids=lambda a: getattr(a, "__name__", str(a))
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@norm_order
@each_layer
def test_layer_equals_torch_nn(kind, norm_first, bias, activation, batch_first, masks):
    """Output and every gradient, in training; then the output in eval."""
    options = {"norm_first": norm_first, "bias": bias, "activation": activation, "batch_first": batch_first}
    stock, ours = pair(LAYERS[kind], E, H, FF, dropout=0.0, layer_norm_eps=1e-3, **options)
    inputs, arguments = make_inputs(kind, batch_first), make_masks(kind, masks)
    results = []
    for layer in (stock, ours):
        xs = leaves(*inputs)
        out = layer(*xs, **arguments)
        backward(out)
        results.append((out, [x.grad for x in xs]))
    torch.testing.assert_close(results[1], results[0], **CLOSE)
    assert_same_parameter_gradients(ours, stock)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(*inputs, **arguments), results[0][0].detach(), **CLOSE)


@pytest.mark.parametrize("masks", ["none", "bool", "float"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "batch_second"])
@norm_order
def test_transformer_equals_torch_nn(norm_first, batch_first, masks):
    """The whole model: output and every gradient, in training; then the output in eval."""
    stock, ours = pair("Transformer", E, H, 2, 2, FF, dropout=0.0, norm_first=norm_first, batch_first=batch_first)
    tgt, src = make_inputs("decoder", batch_first)
    arguments = make_masks("decoder", masks)
    if masks != "none":
        arguments["src_key_padding_mask"] = arguments["memory_key_padding_mask"]
    results = []
    for model in (stock, ours):
        xs = leaves(src, tgt)
        out = model(*xs, **arguments)
        backward(out)
        results.append((out, [x.grad for x in xs]))
    torch.testing.assert_close(results[1], results[0], **CLOSE)
    assert_same_parameter_gradients(ours, stock)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(src, tgt, **arguments), results[0][0].detach(), **CLOSE)


@each_layer
def test_unbatched(kind):
    stock, ours = pair(LAYERS[kind], E, H, FF, dropout=0.0, batch_first=True)
    xs = [x[0] for x in make_inputs(kind)]
    name = "src" if kind == "encoder" else "tgt"
    masks = {f"{name}_mask": causal(L), f"{name}_key_padding_mask": padding([3], L)[0]}
    torch.testing.assert_close(ours(*xs, **masks), stock(*xs, **masks), **CLOSE)


@pytest.mark.parametrize(
    "name, args, options",
    [
        ("TransformerEncoderLayer", (E, H, FF), {"bias": False}),
        ("TransformerDecoderLayer", (E, H, FF), {"norm_first": True}),
        ("Transformer", (E, H, 2, 2, FF), {"batch_first": True}),
        ("Transformer", (E, H, 1, 2, FF), {"bias": False, "norm_first": True, "dtype": torch.float64}),
    ],
)
def test_construction_equals_torch_nn(name, args, options):
    """The same state dict from the same seed, loadable both ways; no warning."""
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = getattr(nn, name)(*args, **options)
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = getattr(ft, name)(*args, **options)
    assert list(ours.state_dict()) == list(stock.state_dict())
    torch.testing.assert_close(ours.state_dict(), stock.state_dict(), rtol=0, atol=0)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())


def test_transformer_is_built_of_twins():
    model = ft.Transformer(E, H, 2, 2, FF)
    for module in model.modules():
        name = type(module).__name__
        assert type(module) is getattr(ft, name, type(module)), f"{name} is torch.nn's"
    first, second = model.encoder.layers
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


def test_stacks_copy_the_layer():
    layer = make("encoder")
    stack = ft.TransformerEncoder(layer, 3)
    assert len({x.linear1.weight.data_ptr() for x in (*stack.layers, layer)}) == 4
    assert all(torch.equal(x.linear1.weight, layer.linear1.weight) for x in stack.layers)


def test_custom_encoder_and_decoder():
    encoder, decoder = nn.TransformerEncoder(make("encoder"), 1), ft.TransformerDecoder(make("decoder"), 1)
    model = ft.Transformer(E, H, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)
    assert model.encoder is encoder and model.decoder is decoder
    tgt, src = make_inputs("decoder")
    torch.testing.assert_close(model(src, tgt), decoder(tgt, encoder(src)), **CLOSE)


# Masks and causality


def stack_of(kind, n=2, layer=None):
    stack = ft.TransformerEncoder if kind == "encoder" else ft.TransformerDecoder
    return stack(make(kind) if layer is None else layer, n, nn.LayerNorm(E, dtype=f64))


@pytest.mark.parametrize("whole", ["layer", "stack"])
@train_and_eval
@each_layer
def test_is_causal_without_a_mask_is_causal(kind, training, whole):
    module = (make(kind) if whole == "layer" else stack_of(kind)).train(training)
    xs = make_inputs(kind)
    if kind == "decoder":
        flags, masks = {"tgt_is_causal": True, "memory_is_causal": True}, {"tgt_mask": causal(L), "memory_mask": causal(L, S)}
    else:
        flags, masks = {"is_causal": True}, {"src_mask" if whole == "layer" else "mask": causal(L)}
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(module(*xs, **flags), module(*xs, **masks), **CLOSE)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "batch_second"])
@train_and_eval
@pytest.mark.parametrize("kind", [*LAYERS, "stack"])
def test_is_causal_reaches_torch_nn_modules_as_a_mask(kind, training, batch_first):
    """torch.nn's attention and layers take is_causal as a hint: without a mask they raise, or in eval ignore it."""
    options = {"dropout": 0.0, "batch_first": batch_first, "dtype": f64}
    if kind == "stack":
        module = ft.TransformerEncoder(randomise(nn.TransformerEncoderLayer(E, H, FF, **options)), 2)
    else:
        module = make(kind, batch_first=batch_first)
        module.self_attn = randomise(nn.MultiheadAttention(E, H, batch_first=batch_first, dtype=f64))
    module.train(training)
    name = {"encoder": "src_mask", "decoder": "tgt_mask", "stack": "mask"}[kind]
    flag = "tgt_is_causal" if kind == "decoder" else "is_causal"
    xs = make_inputs("encoder" if kind == "stack" else kind, batch_first)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(module(*xs, **{flag: True}), module(*xs, **{name: causal(L)}), **CLOSE)


@pytest.mark.parametrize("whole", ["layer", "stack"])
@each_layer
def test_a_mask_wins_over_is_causal(kind, whole):
    module, xs = make(kind) if whole == "layer" else stack_of(kind), make_inputs(kind)
    name = "tgt_mask" if kind == "decoder" else "src_mask" if whole == "layer" else "mask"
    flag = "tgt_is_causal" if kind == "decoder" else "is_causal"
    mask = causal(L).T.contiguous()  # looks ahead only
    torch.testing.assert_close(module(*xs, **{name: mask, flag: True}), module(*xs, **{name: mask}), **CLOSE)


@pytest.mark.parametrize("layer", ["ours", "torch_nn"])
@pytest.mark.parametrize("masks", ["padding", "causal", "both"])
def test_encoder_in_eval_equals_training(masks, layer):
    """Full length and the same numbers also where every sample is padded at its end, whoever wrote the layers."""
    options = {"dropout": 0.0, "batch_first": True}
    cls = ft.TransformerEncoderLayer if layer == "ours" else nn.TransformerEncoderLayer
    stack = ft.TransformerEncoder(randomise(cls(E, H, FF, **options)).double(), 2, nn.LayerNorm(E, dtype=f64))
    (x,), pad = make_inputs("encoder"), padding([3, 2, 1], L)
    arguments = {"src_key_padding_mask": pad} if masks != "causal" else {}
    arguments |= {"mask": causal(L)} if masks != "padding" else {}
    want = stack(x, **arguments)
    with torch.no_grad():
        got = stack.eval()(x, **arguments)
    assert got.shape == x.shape
    torch.testing.assert_close(got[~pad], want[~pad], **CLOSE)


@pytest.mark.parametrize("pad", [padding([4, 2, 0], L), padding([0, 0, 0], L)], ids=["one_sample", "every_sample"])
@train_and_eval
def test_wholly_padded_samples_stay_finite(training, pad):
    model = randomise(ft.Transformer(E, H, 1, 1, FF, 0.0, batch_first=True))
    model.train(training)
    src, tgt = torch.randn(N, L, E, requires_grad=True), torch.randn(N, L, E, requires_grad=True)
    masks = {f"{name}_key_padding_mask": pad for name in ("src", "tgt", "memory")}
    out = model(src, tgt, **masks)
    out.square().sum().backward()
    assert out.isfinite().all() and src.grad.isfinite().all() and tgt.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# Errors


@pytest.mark.parametrize(
    "error, text, function",
    [
        (ValueError, "d_model must be divisible by nhead, got 10 and 3", lambda: ft.TransformerEncoderLayer(10, 3)),
        (ValueError, "nhead must be at least 1, got 0", lambda: ft.TransformerDecoderLayer(8, 0)),
        (ValueError, "d_model must be at least 1, got -4", lambda: ft.Transformer(-4, 2)),
        (ValueError, r"dropout must be a number in \[0, 1\), got 1.5", lambda: ft.TransformerEncoderLayer(8, 2, dropout=1.5)),
        (ValueError, r"dropout must be a number in \[0, 1\), got -1", lambda: ft.Transformer(8, 2, dropout=-1)),
        (
            ValueError,
            r"attn_mask must .*got \(3, 1\)",
            lambda: make("encoder")(make_inputs("encoder")[0], torch.zeros(3, 1), is_causal=True),
        ),
        (
            ValueError,
            r"src and tgt must have one batch size",
            lambda: ft.Transformer(8, 2, 1, 1)(torch.zeros(4, 2, 8), torch.zeros(4, 3, 8)),
        ),
        (
            ValueError,
            r"tgt .*d_model = 8, got \(4, 2, 7\)",
            lambda: ft.Transformer(8, 2, 1, 1)(torch.zeros(4, 2, 8), torch.zeros(4, 2, 7)),
        ),
        (
            ValueError,
            r"key .*batch size of query, 3, got 1",
            lambda: make("decoder")(torch.zeros(3, 4, 8, dtype=f64), torch.zeros(1, 4, 8, dtype=f64)),
        ),
        (
            TypeError,
            "key_padding_mask .*got torch.int64",
            lambda: make("encoder")(make_inputs("encoder")[0], None, torch.zeros(N, L).long()),
        ),
    ],
)
def test_error(error, text, function):
    with pytest.raises(error, match=text):
        function()


# Fusion: taken when the modules are plain, and never seen


def count_calls(monkeypatch, name):
    calls, original = [], getattr(functional, name)
    monkeypatch.setattr(functional, name, lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    return calls


@norm_order
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind, fused", [("encoder", 2), ("decoder", 3)])
def test_plain_layers_are_fused(kind, fused, dropout, norm_first, monkeypatch):
    monkeypatch.setattr(functional, "ready", lambda *_: False)  # a small layer would be one call
    names = ("dropout_add_layer_norm", "activation_dropout", "dropout")
    norms, activations, dropouts = (count_calls(monkeypatch, name) for name in names)
    layer, xs = make(kind, dropout=dropout, norm_first=norm_first), make_inputs(kind)
    layer(*xs)
    # Pre-norm ends with a sum, not a norm, and with a dropout before it.
    expected = (fused - norm_first, dropout > 0, norm_first and dropout > 0)
    assert (len(norms), len(activations), len(dropouts)) == expected
    hooked(layer)(*xs)
    assert len(norms) == expected[0]  # watched modules are called, not fused


def spy_on_one_call(monkeypatch):
    calls, original = [], ops.encoder_layer
    monkeypatch.setattr(ops, "encoder_layer", lambda *arguments: (calls.append(1), original(*arguments))[1])
    return calls


@need_extension
@pytest.mark.parametrize("masks", ["none", "bool", "float", "3d", "causal"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.GELU("tanh"), F.silu], ids=lambda a: getattr(a, "__name__", str(a)))
@pytest.mark.parametrize("dtype", [f64, torch.float32, torch.bfloat16], ids=str)
@norm_order
def test_a_small_encoder_layer_is_one_call(norm_first, dtype, activation, dropout, masks, monkeypatch):
    """Of the very ops that it would call one by one: the same bits, gradients and masks of dropout."""
    layer = make("encoder", norm_first=norm_first, activation=activation, dropout=dropout, bias=masks != "bool").to(dtype)
    if norm_first:
        layer.norm1 = ft.FusedLayerNorm(E, dtype=dtype)  # the chain takes it for torch.nn.LayerNorm too
    arguments = {"is_causal": True} if masks == "causal" else make_masks("encoder", masks)
    arguments = {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
    calls, results = spy_on_one_call(monkeypatch), []
    (x,) = make_inputs("encoder")
    for _ in range(2):
        layer.zero_grad()
        torch.manual_seed(3)
        x = x.detach().to(dtype).requires_grad_()
        out = layer(x, **arguments)
        backward(out)
        with torch.no_grad():
            evaluated = copy.deepcopy(layer).eval()(x, **arguments)
        results.append([out, evaluated, x.grad, *(p.grad for p in layer.parameters())])
        monkeypatch.setattr(functional, "ready", lambda *_: False)
    assert calls == [1, 1]
    assert all(map(torch.equal, *results))


UNUSUAL = {
    "a hook": lambda layer: layer.linear2.register_forward_hook(lambda *_: None),
    "a hook on the projection": lambda layer: layer.self_attn.out_proj.register_forward_pre_hook(lambda *_: None),
    "a projection that is wrapped": lambda layer: setattr(layer.self_attn, "out_proj", nn.Sequential(layer.self_attn.out_proj)),
    "a window": lambda layer: setattr(layer.self_attn, "window", (1, 0)),
    "a softcap": lambda layer: setattr(layer.self_attn, "softcap", 2.0),
    "rotary positions": lambda layer: setattr(layer.self_attn, "rotary", ft.RotaryPositions(E // H)),
    "a norm in another dtype": lambda layer: setattr(layer, "norm2", ft.FusedLayerNorm(E)),
    "a norm over more": lambda layer: setattr(layer, "norm1", nn.LayerNorm((L, E), dtype=f64)),
    "a linear layer for a norm": lambda layer: setattr(layer, "norm1", nn.Linear(E, E, dtype=f64)),
    "an activation of one's own": lambda layer: setattr(layer, "activation", torch.tanh),
    "a block of one's own": lambda layer: setattr(layer, "_ff_block", torch.tanh),
    "a subclass": lambda layer: setattr(layer, "linear1", type("Mine", (nn.Linear,), {})(E, FF, dtype=f64)),
    "a branch that broadcasts": lambda layer: setattr(layer, "linear2", nn.Linear(FF, 1, dtype=f64)),
    "all dropped": lambda layer: setattr(layer.dropout2, "p", 1.0),
    "batch in the second place": lambda layer: setattr(layer.self_attn, "batch_first", False),
}


@need_extension
@pytest.mark.parametrize("change", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_layer_is_more_than_one_call(change, monkeypatch):
    layer, (x,) = make("encoder"), make_inputs("encoder")
    calls = spy_on_one_call(monkeypatch)
    layer(x)
    assert calls == [1]
    change(layer)
    out = layer(x)
    assert calls == [1]
    torch.testing.assert_close(out, hooked(layer)(x), **CLOSE)


def test_attention_that_was_put_into_the_class_is_called(monkeypatch):
    layer, calls, original = make("encoder"), [], ft.MultiheadAttention.forward
    monkeypatch.setattr(ft.MultiheadAttention, "forward", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    layer(*make_inputs("encoder"))
    assert calls == [1]


@pytest.mark.parametrize("eps", [-1e-5, math.inf, "small"])
def test_wrong_eps(eps):
    layer = make("encoder")
    layer.norm2.eps = eps
    with pytest.raises(ValueError, match="eps must be a finite number >= 0"):
        layer(*make_inputs("encoder"))


@need_extension
def test_a_parameter_that_is_no_parameter_is_used():
    layer, (x,) = make("encoder"), make_inputs("encoder")
    expected = layer(x)
    for module in (layer.linear1, layer.norm2, layer.self_attn.out_proj):
        for name in ("weight", "bias"):
            tensor = getattr(module, name).detach()
            delattr(module, name)
            setattr(module, name, tensor)
    torch.testing.assert_close(layer(x), expected, **CLOSE)


@norm_order
@each_layer
def test_fused_and_unfused_drop_the_same(kind, norm_first):
    """Same seed, same masks, same numbers and gradients, whether the modules are watched or not."""
    fused = make(kind, dropout=0.4, norm_first=norm_first)
    unfused, xs = hooked(fused), make_inputs(kind)
    outputs = []
    for layer in (fused, unfused):
        torch.manual_seed(11)
        outputs.append(backward(layer(*xs)))
    torch.testing.assert_close(*outputs, **CLOSE)
    assert_same_parameter_gradients(fused, unfused)
    assert not torch.equal(fused(*xs), fused(*xs))


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@train_and_eval
@norm_order
@each_layer
def test_hooks_fire_on_every_module(kind, norm_first, training, hook):
    layer, fired = make(kind, norm_first=norm_first).train(training), []
    modules = dict(layer.named_modules())
    for name, module in modules.items():
        getattr(module, f"register_{hook}_hook")(lambda *_, name=name: fired.append(name))
    out = layer(*leaves(*make_inputs(kind)))
    if "backward" in hook:
        out.sum().backward()
    else:
        with torch.no_grad():
            layer(*make_inputs(kind))
    assert sorted(set(fired)) == sorted(modules)
    assert len(fired) == len(modules) * (1 if "backward" in hook else 2)


def test_global_hooks_fire():
    seen = set()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(module))
    layer = make("encoder")
    try:
        layer(*make_inputs("encoder"))
    finally:
        handle.remove()
    assert seen == set(layer.modules())


@pytest.mark.parametrize("name", ["norm1", "norm2", "dropout", "dropout1", "dropout2", "linear1", "linear2", "self_attn"])
@norm_order
def test_hook_may_change_the_output(name, norm_first):
    """A hook that doubles what `name` returns is seen in the result, as in torch.nn."""
    stock, ours = pair("TransformerEncoderLayer", E, H, FF, dropout=0.0, norm_first=norm_first, batch_first=True)
    for layer in (stock, ours):
        getattr(layer, name).register_forward_hook(lambda m, i, o: (o[0] * 2, o[1]) if isinstance(o, tuple) else o * 2)
    (x,) = make_inputs("encoder")
    torch.testing.assert_close(ours(x), stock(x), **CLOSE)


@pytest.mark.parametrize("name", ["norm1", "norm3", "dropout", "dropout2", "dropout3", "linear2", "multihead_attn"])
def test_replaced_forward_of_a_module_is_called(name):
    """As accelerate and others do it: module.forward = something."""
    layer, calls = make("decoder"), []
    module = getattr(layer, name)
    module.forward = functools.partial(lambda f, *a, **k: (calls.append(name), f(*a, **k))[1], module.forward)
    layer(*make_inputs("decoder"))
    assert calls == [name]


REPLACEMENTS = {
    "norm1": lambda: nn.RMSNorm(E, dtype=f64),
    "norm2": lambda: nn.LayerNorm((L, E), dtype=f64),
    "norm3": lambda: nn.LayerNorm(E, elementwise_affine=False),
    "dropout": lambda: nn.Identity(),
    "dropout1": lambda: nn.Sequential(nn.Linear(E, E, dtype=f64)),
    "dropout3": lambda: nn.Dropout(1.0),
    "linear1": lambda: nn.Sequential(nn.Linear(E, FF, dtype=f64), nn.Tanh()),
    "self_attn": lambda: nn.MultiheadAttention(E, H, batch_first=True, dtype=f64),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
@norm_order
def test_replaced_module_is_used(name, norm_first):
    stock, ours = pair("TransformerDecoderLayer", E, H, FF, dropout=0.0, norm_first=norm_first, batch_first=True)
    module = REPLACEMENTS[name]()
    setattr(stock, name, module)
    setattr(ours, name, module)
    xs = make_inputs("decoder")
    torch.testing.assert_close(ours(*xs), stock(*xs), **CLOSE)


@pytest.mark.parametrize(
    "name, tensor", [("norm1", "weight"), ("norm2", "bias"), ("linear1", "weight"), ("self_attn", "in_proj_weight")]
)
def test_parametrized_module_is_used(name, tensor):
    stock, ours = pair("TransformerEncoderLayer", E, H, FF, dropout=0.0, batch_first=True)
    double = nn.Module()
    double.forward = lambda w: 2 * w
    parametrize.register_parametrization(getattr(ours, name), tensor, double)
    with torch.no_grad():
        getattr(getattr(stock, name), tensor).mul_(2)
    (x,) = make_inputs("encoder")
    torch.testing.assert_close(ours(x), stock(x), **CLOSE)


ACTIVATIONS = [F.relu, torch.relu, F.gelu, F.silu, nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh(), torch.tanh]


@pytest.mark.parametrize(
    "activation",
    [*ACTIVATIONS, functools.partial(F.gelu, approximate="tanh"), nn.Softplus(beta=2)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
@train_and_eval
def test_reassigned_activation_is_used(activation, training):
    stock, ours = pair("TransformerEncoderLayer", E, H, FF, dropout=0.0, batch_first=False)
    for layer in (stock, ours):
        layer.activation = activation
        layer.train(training)
    (x,) = make_inputs("encoder", False)
    torch.testing.assert_close(ours(x), stock(x), **CLOSE)


def test_hook_on_an_activation_module_fires():
    layer, calls = make("encoder", activation=nn.GELU()), []
    layer.activation.register_forward_hook(lambda *_: calls.append(1))
    layer(*make_inputs("encoder"))
    assert calls == [1]


def test_edited_eps_is_used():
    stock, ours = pair("TransformerEncoderLayer", E, H, FF, dropout=0.0, batch_first=True)
    stock.norm2.eps = ours.norm2.eps = 0.7
    (x,) = make_inputs("encoder")
    torch.testing.assert_close(ours(x), stock(x), **CLOSE)


@pytest.mark.parametrize("name", ["dropout", "dropout1", "dropout2", "dropout3"])
def test_each_dropout_keeps_its_own_switch_and_rate(name):
    """In a layer that trains, one dropout in eval mode does nothing; in eval, one in training mode drops; p may be edited."""
    layer, xs = make("decoder"), make_inputs("decoder")
    module = getattr(layer, name)
    still = layer(*xs)
    module.p = 0.5
    assert not torch.equal(layer(*xs), still)
    module.eval()
    torch.testing.assert_close(layer(*xs), still, **CLOSE)
    layer.eval()
    module.train()
    assert not torch.equal(layer(*xs), still)


@pytest.mark.parametrize("block", ["_sa_block", "_mha_block", "_ff_block"])
@pytest.mark.parametrize("how", ["subclass", "patched_method", "patched_with_wraps"])
@train_and_eval
def test_overridden_block_is_honoured(block, how, training):
    """A block that halves what torch.nn's computes, as torch.nn honours it."""

    def halve(base):
        original = getattr(base, block)

        def half(self, *args, **kwargs):
            return original(self, *args, **kwargs) * 0.5

        return functools.wraps(original)(half) if how == "patched_with_wraps" else half

    stock, ours = pair("TransformerDecoderLayer", E, H, FF, dropout=0.0, batch_first=True)
    for layer, base in ((stock, nn.TransformerDecoderLayer), (ours, ft.TransformerDecoderLayer)):
        if how == "subclass":
            layer.__class__ = type("Halved", (base,), {block: halve(base)})
        else:
            setattr(layer, block, types.MethodType(halve(base), layer))
        layer.train(training)
    xs = make_inputs("decoder")
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(ours(*xs), stock(*xs), **CLOSE)


@each_layer
def test_attention_is_called_as_torch_nn_calls_it(kind):
    """Keyword arguments that a hook may read and change, here to ask for the weights."""
    layer, weights = make(kind), []
    layer.self_attn.register_forward_pre_hook(lambda m, a, kw: (a, {**kw, "need_weights": True}), with_kwargs=True)
    layer.self_attn.register_forward_hook(lambda m, a, kw, out: weights.append((sorted(kw), out[1].shape)), with_kwargs=True)
    layer(*make_inputs(kind))
    assert weights == [(["attn_mask", "is_causal", "key_padding_mask", "need_weights"], (N, L, L))]


def test_block_methods_are_those_of_torch_nn():
    """Called from outside, they include their last dropout."""
    layer = make("decoder", dropout=0.5)
    x, memory = make_inputs("decoder")
    for out in (layer._sa_block(x, None, None), layer._mha_block(x, memory, None, None), layer._ff_block(x)):
        assert out.shape == x.shape and 0.2 < (out == 0).double().mean() < 0.8


# Nested tensors and torch.nn's own stack


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("others", ["all_ours", "first_is_torch_nn", "last_is_torch_nn"])
@norm_order
def test_layers_in_the_stack_of_torch_nn(norm_first, others):
    """In eval it hands a NestedTensor to the layers; no warning when it is built, and the numbers of training."""
    layer = make("encoder", norm_first=norm_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if norm_first else "error")
        stack = nn.TransformerEncoder(layer, 3, nn.LayerNorm(E, dtype=f64))
    stock = nn.TransformerEncoderLayer(E, H, FF, 0.0, batch_first=True, norm_first=norm_first, dtype=f64)
    stock.load_state_dict(layer.state_dict())
    if others != "all_ours":
        stack.layers[0 if others == "first_is_torch_nn" else 2] = stock
    (x,), pad = make_inputs("encoder"), padding([4, 1, 2], L)
    want = stack(x, src_key_padding_mask=pad)
    with torch.no_grad():
        got = stack.eval()(x, src_key_padding_mask=pad)
    torch.testing.assert_close(got[~pad], want[~pad], **CLOSE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@train_and_eval
def test_nested_input(training, layout):
    layer = make("encoder").train(training)
    samples = [torch.randn(n, E, dtype=f64) for n in (4, 2, 3)]
    nested = torch.nested.nested_tensor(samples, layout=layout, requires_grad=True)
    out = layer(nested)
    assert out.is_nested and out.layout == layout
    for got, x in zip(out.unbind(), samples, strict=True):
        torch.testing.assert_close(got, layer(x), **CLOSE)
    sum(o.square().sum() for o in out.unbind()).backward()
    assert all(g.any() for g in nested.grad.unbind())


# State


def test_copies_pickles_and_checkpoints():
    model = randomise(ft.Transformer(E, H, 1, 1, FF, batch_first=True)).double().eval()
    tgt, src = make_inputs("decoder")
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)
    for other in others:
        assert torch.equal(other(src, tgt), model(src, tgt))
        assert type(other.encoder.layers[0].self_attn) is ft.MultiheadAttention


def test_changed_parameters_are_used_at_once():
    layer, (x,) = make("encoder").eval(), make_inputs("encoder")
    with torch.inference_mode():
        layer(x)
    layer.linear1.weight.data = torch.randn(FF, E, dtype=f64)
    layer.norm1.weight = nn.Parameter(torch.rand(E, dtype=f64))
    layer.linear2.weight.data.mul_(0.5)
    fresh = make("encoder").eval()
    fresh.load_state_dict(layer.state_dict())
    with torch.inference_mode():
        assert torch.equal(layer(x), fresh(x))


@each_layer
def test_only_biases_trainable(kind):
    stock, ours = pair(LAYERS[kind], E, H, FF, dropout=0.0, batch_first=True)
    xs = make_inputs(kind)
    for layer in (stock, ours):
        for name, p in layer.named_parameters():
            p.requires_grad_(name.endswith("bias"))
        backward(layer(*xs))
    for (name, a), (_, b) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        if name.endswith("bias"):
            torch.testing.assert_close(a.grad, b.grad, **CLOSE)
        else:
            assert a.grad is None


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved_tensor_hooks", "reentrant"])
@each_layer
def test_activation_checkpointing_with_dropout(kind, reentrant):
    layer, inputs, results = make(kind, dropout=0.3), make_inputs(kind), []
    for f in (layer, functools.partial(checkpoint, layer, use_reentrant=reentrant)):
        layer.zero_grad()
        xs = leaves(*inputs)
        torch.manual_seed(9)
        outputs = backward(f(*xs))
        results.append((outputs, [x.grad for x in xs], [p.grad for p in layer.parameters()]))
    torch.testing.assert_close(*results, **CLOSE)


# Derivatives, transforms, compilers


@norm_order
@each_layer
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch.func scripts its own decompositions
def test_double_backward_and_forward_mode(kind, norm_first):
    layer = randomise(getattr(ft, LAYERS[kind])(4, 2, 6, dropout=0.0, activation="gelu", norm_first=norm_first)).double()
    xs = [torch.randn(n, 1, 4, dtype=f64, requires_grad=True) for n in (3, 2)[: 1 if kind == "encoder" else 2]]
    torch.autograd.gradgradcheck(layer, xs, fast_mode=True)
    torch.autograd.gradcheck(layer, xs, fast_mode=True, check_forward_ad=True)


@norm_order
@each_layer
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch.func scripts its own decompositions
def test_function_transforms(kind, norm_first):
    """Per-sample gradients by vmap, and jvp, against one sample after the other."""
    layer, xs = make(kind, norm_first=norm_first), make_inputs(kind)
    parameters = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(p, *samples):
        return functional_call(layer, p, samples).square().sum()

    batched = vmap(grad(loss), (None, *[0] * len(xs)))(parameters, *xs)
    for i, samples in enumerate(zip(*xs, strict=True)):
        torch.testing.assert_close({n: g[i] for n, g in batched.items()}, grad(loss)(parameters, *samples), **CLOSE)
    _, tangent = jvp(lambda x: loss(parameters, x, *xs[1:]), (xs[0],), (torch.ones_like(xs[0]),))
    torch.testing.assert_close(tangent, grad(loss, 1)(parameters, *xs).sum(), **CLOSE)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_to_one_graph(backend):
    """The whole model with float and bool masks, forward and backward: no value of a mask is looked at."""
    torch._dynamo.reset()
    model = randomise(ft.Transformer(E, H, 1, 1, FF, 0.0, batch_first=True)).double()
    tgt, src = make_inputs("decoder")
    masks = {"tgt_mask": additive(causal(L)), "src_key_padding_mask": padding([5, 2, 3], S)}
    results = []
    for f in (torch.compile(model, backend=backend, fullgraph=True), model):
        model.zero_grad()
        outputs = backward(f(src, tgt, **masks))
        results.append((outputs, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*results, **CLOSE)


def half_feed_forward(layer):
    layer._ff_block = types.MethodType(lambda self, x: nn.TransformerEncoderLayer._ff_block(self, x) * 0.5, layer)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: None,
        lambda m: m.norm1.register_forward_hook(lambda m, i, o: o * 2),
        lambda m: setattr(m, "norm2", nn.RMSNorm(E, dtype=f64)),
        half_feed_forward,
    ],
    ids=["plain", "hook", "other_norm", "overridden_block"],
)
def test_compile_with_dropout_and_changes(change):
    torch._dynamo.reset()
    layer, (x,) = make("encoder", dropout=0.3, norm_first=True), make_inputs("encoder")
    change(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert not torch.equal(compiled(x), compiled(x))
    layer.eval()
    torch.testing.assert_close(compiled(x), layer(x), **CLOSE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_export_with_dynamic_sizes(mode):
    stack = stack_of("decoder", 1).eval()
    n, length, source = (torch.export.Dim(name, min=2, max=64) for name in ("n", "length", "source"))
    shapes = {"tgt": {0: n, 1: length}, "memory": {0: n, 1: source}, "tgt_is_causal": None}
    with mode():
        exported = torch.export.export(
            stack, tuple(make_inputs("decoder")), {"tgt_is_causal": True}, dynamic_shapes=shapes
        ).module()
        xs = torch.randn(2, 9, E, dtype=f64), torch.randn(2, 7, E, dtype=f64)
        torch.testing.assert_close(exported(*xs, tgt_is_causal=True), stack(*xs, tgt_is_causal=True), **CLOSE)


@need_extension
def test_export_of_training_with_dropout_and_a_dynamic_length():
    layer = make("encoder", dropout=0.3).train()
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(layer, (torch.randn(2, 16, E, dtype=f64),), dynamic_shapes=({1: length},)).module()
    for n in (7, 40):
        x = torch.randn(2, n, E, dtype=f64)
        torch.manual_seed(1)
        got = exported(x)
        torch.manual_seed(1)
        torch.testing.assert_close(got, layer(x), **CLOSE)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("module", ["encoder", "decoder", "encoder_stack", "decoder_stack", "transformer", "dropout"])
def test_script(module, bias):
    """The same numbers on the same parameters, and the module that was scripted keeps its parts."""
    kind = "encoder" if module in ("encoder", "encoder_stack", "dropout") else "decoder"
    m = {
        "encoder_stack": lambda: stack_of("encoder", layer=make("encoder", bias=bias)),
        "decoder_stack": lambda: stack_of("decoder", layer=make("decoder", bias=bias)),
        "transformer": lambda: randomise(ft.Transformer(E, H, 1, 1, FF, bias=bias, batch_first=True)).double(),
        "dropout": lambda: ft.Dropout(0.5),
    }.get(module, lambda: make(kind, bias=bias))().eval()
    classes, xs = [type(x) for x in m.modules()], make_inputs(kind)
    scripted = script(m)
    torch.testing.assert_close(scripted(*xs), m(*xs), **CLOSE)
    assert [type(x) for x in m.modules()] == classes
    assert [p.data_ptr() for p in scripted.parameters()] == [p.data_ptr() for p in m.parameters()]


@pytest.mark.filterwarnings("ignore")  # quantisation announces its own end in several places
@pytest.mark.skipif(torch.backends.quantized.engine == "none", reason="this build has no quantised kernels")
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no_grad"])
def test_dynamic_quantisation(gradients):
    model = ft.Transformer(E, H, 1, 1, FF, 0.0, batch_first=True).eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(quantised.encoder.layers[0].linear1) is not nn.Linear
    src, tgt = torch.randn(N, S, E), torch.randn(N, L, E)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(quantised(src, tgt), model(src, tgt), rtol=0, atol=0.2)  # 8-bit weights


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["autocast", "cast"])
@norm_order
@each_layer
def test_half_precision(kind, norm_first, how, dtype):
    """Within 3 times the error of torch.nn in the same dtype, plus one rounding of the largest element; float32 masks."""
    stock, ours = pair(LAYERS[kind], E, H, FF, dropout=0.0, norm_first=norm_first, batch_first=True)
    xs, arguments = make_inputs(kind), make_masks(kind, "bool")
    exact = stock(*xs, **arguments)
    arguments = {k: torch.zeros(v.shape).masked_fill(v, -torch.inf) for k, v in arguments.items()}
    errors = []
    for layer in (stock, ours):
        if how == "cast":
            masks = {k: v.to(dtype) for k, v in arguments.items()} if layer is stock else arguments
            out = layer.to(dtype)(*[x.to(dtype) for x in xs], **masks)
            assert out.dtype == dtype
        else:
            with torch.autocast("cpu", dtype=dtype):
                out = layer.float()(*[x.float() for x in xs], **arguments)
        errors.append((out.double() - exact).abs().max())
        out.float().square().sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert errors[1] <= 3 * errors[0] + torch.finfo(dtype).eps / 2 * exact.abs().max()


@train_and_eval
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_constant_rows_and_a_tiny_eps(dtype, training):
    layer = ft.TransformerEncoderLayer(16, H, FF, 0.0, layer_norm_eps=1e-12, batch_first=True).to(dtype).train(training)
    assert layer(torch.zeros(1, 2, 16, dtype=dtype)).isfinite().all()


def test_slow_path_is_what_the_oracle_takes():
    """The fast path of torch.nn zeroes padding; the twins do not, and agree with its slow path."""
    stock, ours = pair("TransformerEncoderLayer", E, H, FF, batch_first=True)
    (x,), pad = make_inputs("encoder"), padding([4, 1, 2], L)
    with torch.no_grad(), slow_path():
        torch.testing.assert_close(ours.eval()(x, None, pad), stock.eval()(x, None, pad), **CLOSE)


class Wrapped(torch.nn.Module):
    """Any module around another one, its attributes out of sight."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_wrapped_attention_and_layers_take_is_causal():
    layer = randomise(ft.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    x = torch.randn(2, 5, 8)
    want = layer(x, is_causal=True)
    wrapped = copy.deepcopy(layer)
    wrapped.self_attn = Wrapped(wrapped.self_attn)
    torch.testing.assert_close(wrapped(x, is_causal=True), want)
    stack = ft.TransformerEncoder(layer, 1)
    stack.layers[0] = Wrapped(layer)
    torch.testing.assert_close(stack(x, is_causal=True), want)


@pytest.mark.parametrize("shape", [(), (8,), (1, 1, 8)], ids=str)
def test_a_branch_that_only_broadcasts(shape):
    class Constant(torch.nn.Module):
        def forward(self, _):
            return torch.ones(shape)

    x, results = torch.randn(2, 5, 8), []
    for module in pair("TransformerEncoderLayer", 8, 2, 16, dropout=0.0, batch_first=True):
        module.linear2 = Constant()
        results.append(module(x.double()))
    torch.testing.assert_close(*results, **CLOSE)


def test_dropout_of_a_nested_tensor():
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])
    dropped = ft.Dropout(0.5)(nested)
    assert dropped.is_nested and set(dropped.to_padded_tensor(0.0).flatten().tolist()) <= {0.0, 2.0}


NOT_TENSORS = [None, "x", [1.0], 3]


@pytest.mark.parametrize("value", NOT_TENSORS, ids=repr)
def test_what_is_not_a_tensor_is_named(value):
    x = torch.randn(2, 5, 8)
    attention = ft.MultiheadAttention(8, 2, batch_first=True)
    encoder_layer, decoder_layer = (
        kind(8, 2, 16, batch_first=True) for kind in (ft.TransformerEncoderLayer, ft.TransformerDecoderLayer)
    )
    calls = {
        "query": lambda: attention(value, x, x),
        "key": lambda: attention(x, value, x),
        "value": lambda: attention(x, x, value),
        "src": lambda: encoder_layer(value),
        "tgt": lambda: decoder_layer(value, x),
        "memory": lambda: decoder_layer(x, value),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got {type(value).__name__}"):
            call()
    for call in (lambda: ft.TransformerEncoder(encoder_layer, 1)(value), lambda: ft.Transformer(8, 2, 1, 1, 16)(value, x)):
        with pytest.raises(TypeError, match="^src must be a torch.Tensor"):
            call()


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"embed_dim": "8"}, TypeError, "embed_dim must be an integer, got '8'"),
        ({"num_heads": 2.0}, TypeError, "num_heads must be an integer, got 2.0"),
        ({"dropout": "x"}, ValueError, r"dropout must be a number in \[0, 1\), got 'x'"),
        ({"dropout": None}, ValueError, r"dropout must be a number in \[0, 1\), got None"),
        ({"window": (-1, 0)}, ValueError, "window must hold"),
        ({"softcap": 0}, ValueError, "softcap must be"),
    ],
    ids=str,
)
def test_constructor_names_what_is_wrong(arguments, error, text):
    with pytest.raises(error, match=text):
        ft.MultiheadAttention(**({"embed_dim": 8, "num_heads": 2} | arguments))


@pytest.mark.filterwarnings("ignore")  # the tracer's, about every check of a shape
@pytest.mark.parametrize("recording", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_jit_trace_runs_on_other_shapes_without_our_ops(masked, recording):
    stack = ft.TransformerEncoder(ft.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    inputs = [
        (torch.randn(n, length, 8), *[torch.arange(length).expand(n, -1) >= 3][:masked]) for n, length in ((2, 5), (3, 7))
    ]

    class Run(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack

        def forward(self, x, padding=None):
            return self.stack(x, src_key_padding_mask=padding)

    with torch.set_grad_enabled(recording):
        traced = torch.jit.trace(Run(), inputs[0])
        for xs in inputs:
            torch.testing.assert_close(traced(*xs), Run()(*xs), rtol=1e-4, atol=1e-5)
    assert "fast_transformer::" not in str(traced.inlined_graph)
