"""Pictures: recording attention changes nothing and records the right weights; drawings say what they should, for any text."""

import contextlib
import importlib
import math
import sys
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fast_transformer as ft

for module in ("matplotlib.image", "fontTools.fontBuilder"):
    pytest.importorskip(module)

import matplotlib.image  # noqa: E402
from fontTools.fontBuilder import FontBuilder  # noqa: E402
from fontTools.pens.ttGlyphPen import TTGlyphPen  # noqa: E402
from matplotlib import font_manager  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from fast_transformer.visualize import (  # noqa: E402
    capture_attention,
    plot_attention,
    plot_attention_grid,
    plot_mask,
    plot_positions,
)

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")

ENCODER = [f"encoder.layers.{i}.self_attn" for i in range(2)]
SELF = [f"decoder.layers.{i}.self_attn" for i in range(2)]
CROSS = [f"decoder.layers.{i}.multihead_attn" for i in range(2)]
DECODER = [SELF[0], CROSS[0], SELF[1], CROSS[1]]


def transformer(dropout=0.3, nn_module=ft):
    return nn_module.Transformer(16, 4, 2, 2, 32, dropout=dropout, batch_first=True)


def sentences(L=3):  # (N, S, E), (N, L, E)
    return torch.randn(2, 7, 16, requires_grad=True), torch.randn(2, L, 16, requires_grad=True)


def run(model, *args, **kwargs):
    """Everything a call gives: output, gradients, and what the random generator gives next."""
    torch.manual_seed(1)
    out = model(*args, **kwargs)
    out = out if isinstance(out, tuple) else (out,)
    loss = sum(x.square().sum() for x in out if x is not None)
    wanted = [x for x in (*args, *model.parameters()) if x.requires_grad]
    return [*(x for x in out if x is not None), *torch.autograd.grad(loss, wanted), torch.rand(4)]


def equal(xs, ys):
    return len(xs) == len(ys) and all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


# Recording.


@pytest.mark.parametrize("average_heads", [False, True], ids=["heads", "mean"])
@pytest.mark.parametrize(
    ("nn_module", "L"),
    [(ft, 1), (ft, 3), (ft, 64), (torch.nn, 3)],  # few queries have a kernel of their own, which returns no weights
    ids=["twins-1", "twins-3", "twins-64", "torch.nn-3"],
)
def test_recording_changes_no_bit(nn_module, L, average_heads):
    model, (source, target) = transformer(nn_module=nn_module).train(), sentences(L)
    before = run(model, source, target)
    with capture_attention(model, average_heads=average_heads) as weights:
        inside = run(model, source, target)
    assert equal(before, inside) and equal(before, run(model, source, target))
    assert list(weights) == ENCODER + DECODER
    for name, S in (*((name, 7) for name in ENCODER + CROSS), *((name, L) for name in SELF)):
        (recorded,) = weights[name]
        assert recorded.shape == (2, 1 if average_heads else 4, 7 if name in ENCODER else L, S)
        assert not recorded.requires_grad


@pytest.mark.parametrize("kwargs", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
@pytest.mark.parametrize("nn_module", [ft, torch.nn], ids=["twin", "torch.nn"])
def test_what_the_caller_asks_for_is_what_it_gets(nn_module, kwargs):
    attention = nn_module.MultiheadAttention(16, 4, dropout=0.3)
    x = torch.randn(7, 2, 16, requires_grad=True)
    before = run(attention, x, x, x, **kwargs)
    with capture_attention(attention) as weights, capture_attention(attention, average_heads=True) as means:
        assert equal(before, run(attention, x, x, x, **kwargs))
    torch.manual_seed(1)
    expected = attention(x, x, x, need_weights=True, average_attn_weights=False)[1]
    assert torch.equal(weights["MultiheadAttention"][0], expected)  # the dropped elements, too
    torch.testing.assert_close(means["MultiheadAttention"][0], expected.mean(1, keepdim=True))


def test_positional_arguments_masks_and_calls_without_a_batch():
    attention = ft.MultiheadAttention(16, 4).double()
    query, memory = torch.randn(3, 16).double(), torch.randn(5, 16).double()
    hidden = torch.tensor([False, True, False, False, True])
    with capture_attention(attention) as weights, capture_attention(attention, average_heads=True) as means:
        attention(query, memory, memory, hidden, False)
    (recorded,), (mean,) = weights["MultiheadAttention"], means["MultiheadAttention"]
    assert torch.equal(recorded[0], attention(query, memory, memory, hidden, True, None, False)[1])
    assert recorded.shape == (1, 4, 3, 5) and not recorded[..., hidden].any()
    assert mean.shape == (1, 1, 3, 5)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (None, ENCODER + DECODER),
        ("decoder", DECODER),
        ("decoder.layers.1", DECODER[2:]),
        ("*.multihead_attn", CROSS),
        (["decoder.layers.0.multihead_attn", "encoder"], [*ENCODER, CROSS[0]]),
        (lambda model: model.decoder.layers[1], DECODER[2:]),
        (lambda model: [model.encoder.layers[0].self_attn, SELF[1]], [ENCODER[0], SELF[1]]),
    ],
    ids=["all", "part", "layer", "wildcard", "list", "module", "mixed"],
)
def test_layers_are_chosen(layers, names):
    model = transformer()
    with capture_attention(model, layers(model) if callable(layers) else layers) as weights:
        model(*sentences())
        model(*sentences())
    assert list(weights) == names and all(len(calls) == 2 for calls in weights.values())


def test_any_module_that_returns_weights():
    class Pointer(torch.nn.Module):
        def forward(self, query, memory):  # (N, D), (N, S, D) or (N, L, D), (N, S, D)
            weights = torch.einsum("n...d,nsd->n...s", query, memory).softmax(-1)
            return torch.einsum("n...s,nsd->n...d", weights, memory), weights

    model = torch.nn.ModuleDict({"pointer": Pointer(), "linear": torch.nn.Linear(4, 4)})
    memory = torch.randn(2, 5, 4, requires_grad=True)
    with capture_attention(model, "pointer") as weights:
        model["pointer"](memory[:, 0], memory)
        _, full = model["pointer"](memory[:, :3], memory)
    one, many = weights["pointer"]
    assert one.shape == (2, 1, 1, 5) and torch.equal(many, full[:, None]) and not many.requires_grad
    with pytest.raises(TypeError, match=r"linear must return \(output, weights\).*got Tensor\(2, 5, 4\)"):
        with capture_attention(model, "linear"):
            model["linear"](memory)
    with (
        pytest.raises(ValueError, match="holds no attention; its modules are .*pointer, linear"),
        capture_attention(model),
    ):
        pass


def hooks(model):
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def test_hooks_go_after_an_exception():
    model = transformer()
    with pytest.raises(RuntimeError, match="stop"), capture_attention(model) as weights:
        model(*sentences())
        assert hooks(model)
        raise RuntimeError("stop")
    assert not hooks(model) and len(weights[CROSS[0]]) == 1
    with capture_attention(model) as weights:
        with pytest.raises(ValueError, match="must have a last dimension"):  # from the model itself
            model.encoder(torch.randn(2, 7, 15))
        model(*sentences())
    assert not hooks(model) and len(weights[CROSS[0]]) == 1


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoint"])
def test_autocast_and_checkpointing_keep_their_gradients(checkpointed):
    model, (source, target) = transformer(), sentences()

    def gradients(context):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            with context:
                out = checkpoint(model, source, target, use_reentrant=False) if checkpointed else model(source, target)
        return torch.autograd.grad(out.sum(), [source, target, *model.parameters()])

    with capture_attention(model) as weights:
        inside = gradients(contextlib.nullcontext())
    assert weights[CROSS[0]][0].dtype == torch.bfloat16
    assert equal(gradients(contextlib.nullcontext()), inside)
    assert equal(gradients(capture_attention(model)), inside)  # without hooks when backward computes the block again


def test_a_block_without_a_call_warns():
    model = transformer()
    with pytest.warns(UserWarning, match="no attention was recorded") as caught, capture_attention(model, "encoder"):
        model.decoder(*reversed(sentences()))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("layers", "error", "text"),
    [
        ("encoder.layers.7", ValueError, "'encoder.layers.7' matches nothing; there are encoder.layers.0.self_attn, "),
        ("coder", ValueError, "'coder' matches nothing"),
        (torch.nn.Linear(1, 1), ValueError, "a Linear that is no part of model matches nothing"),
        ([], ValueError, "layers is empty; there are encoder.layers.0.self_attn"),
        ([3], TypeError, "layers must hold names or modules, got int"),
    ],
    ids=["name", "infix", "module", "empty", "type"],
)
def test_layers_that_do_not_exist(layers, error, text):
    with pytest.raises(error, match=text), capture_attention(transformer(), layers):
        pass
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got dict"), capture_attention({}):
        pass


# Drawing.


def random_weights(*shape):
    return torch.randn(shape).mul(2).softmax(-1)


def labels(axes):
    """Rows and columns as they are written."""
    return [[label.get_text() for label in axis.get_ticklabels()] for axis in (axes.yaxis, axes.xaxis)]


def image(axes):
    return torch.from_numpy(axes.images[0].get_array().filled(math.nan))


def colorbar_label(axes):
    return axes.images[0].colorbar.ax.get_ylabel()


@pytest.fixture
def path(tmp_path):
    """Where to save; at the end there is a picture that is not blank."""
    path = tmp_path / "picture.png"
    yield path
    assert path.read_bytes().startswith(b"\x89PNG") and matplotlib.image.imread(path)[..., :3].std() > 0.01


def test_heat_map_of_one_head(path):
    weights, queries, keys = random_weights(2, 4, 3, 5), ["<bos>", "ein", " Hund"], ["a", "", "dog\n", "$x$", "\t\xa0"]
    axes = plot_attention(weights, queries, keys, head=2, sample=1, title="layer 0", path=path)
    assert torch.equal(image(axes), weights[1, 2])
    assert labels(axes) == [["<bos>", "ein", "␣Hund"], ["a", "''", "dog⏎", "$x$", "⇥ U+00A0"]]
    assert (axes.get_title(), axes.get_ylabel(), axes.get_xlabel()) == ("layer 0", "query", "key")
    assert colorbar_label(axes) == "attention weight, head 2"


@pytest.mark.parametrize("shape", [(3, 5), (4, 3, 5), (1, 4, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_mean_of_the_heads(shape, dtype):
    weights = random_weights(*shape).to(dtype).requires_grad_()
    axes = plot_attention(weights)
    assert torch.equal(image(axes), weights.detach().float().view(-1, 3, 5).mean(0))
    assert labels(axes) == [["0", "1", "2"], ["0", "1", "2", "3", "4"]]
    assert colorbar_label(axes) == ("attention weight" if len(shape) == 2 else "attention weight, mean of 4 heads")


def test_axes_of_the_caller(path):
    figure = Figure(figsize=(8, 3))
    left, right = (part.subplots() for part in figure.subfigures(1, 2))
    assert plot_attention(random_weights(3, 5), axes=left) is left
    assert plot_mask(torch.zeros(3, 5), axes=right, path=path) is right
    assert figure.get_size_inches().tolist() == [8, 3]


@pytest.mark.parametrize(("heads", "columns"), [(1, 1), (5, 3), (8, 4)])
def test_grid_of_heads(heads, columns, path):
    weights = random_weights(heads, 3, 5)
    panels = plot_attention_grid(weights, "abc", "vwxyz", title="layer 0", path=path)
    assert panels.shape == (heads,) and panels[0].figure.get_suptitle() == "layer 0"
    for head, axes in enumerate(panels):
        assert torch.equal(image(axes), weights[head]) and axes.get_title() == f"head {head}"
        left, bottom = head % columns == 0, head + columns >= heads
        assert labels(axes) == [list("abc") if left else [], list("vwxyz") if bottom else []]
        assert (axes.get_ylabel(), axes.get_xlabel()) == ("query" if left else "", "key" if bottom else "")
        assert axes.images[0].get_clim() == (0, weights.max().item())  # colours compare between heads
    assert len(panels[0].figure.axes) == heads + 1  # and one scale of colours
    figure = Figure()
    assert list(plot_attention_grid(weights, axes=figure.subplots(heads, 1, squeeze=False))) == figure.axes[:heads]


def test_long_sequences_are_thinned(path):
    tokens = [f"token{i}" for i in range(300)]
    axes = plot_attention(random_weights(300, 300), tokens, tokens, path=path)
    for names in labels(axes):
        assert 20 <= len(names) <= 60 and names[:2] == ["0 token0", "5 token5"]
    assert max(axes.figure.get_size_inches()) < 16
    assert len(labels(plot_attention(random_weights(60, 60), tokens[:60], tokens[:60]))[1]) == 60
    assert labels(plot_attention(random_weights(4, 300)))[1] == [str(i) for i in range(0, 300, 20)]
    small = Figure(figsize=(2, 2)).subplots()
    assert len(labels(plot_attention(random_weights(60, 60), tokens[:60], tokens[:60], axes=small))[0]) <= 12


def test_thousands_of_tokens_keep_their_peaks(path):
    """A weight of 1 on one of 4000 keys is as dark in the picture as it would be alone; a lone token stays in its place."""
    axes = plot_attention(torch.eye(4000)[:3000], path=path)
    assert max(image(axes).shape) <= 1024 and image(axes).amax(1).eq(1).all()
    assert axes.images[0].get_extent() == [-0.5, 3999.5, 2999.5, -0.5]
    causal = torch.ones(3000, 3000, dtype=torch.bool).triu(1)
    seen = image(plot_mask(causal))
    assert 0 < seen[0, 0] < 1 and seen[0, 2:].eq(0).all() and seen[-1, :-2].eq(1).all()


def test_long_tokens_are_cut():
    rows, _ = labels(plot_attention(random_weights(2, 2), ["x" * 100, "y" * 24]))
    assert rows == ["x" * 21 + "...", "y" * 24]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_mask_picture_states_its_convention(path):
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    axes = plot_mask(hidden, "abcd", "abcd", title="look-ahead", path=path)
    assert torch.equal(image(axes), (~hidden).float()) and legend(axes) == ["attend (False)", "hidden (True)"]
    assert labels(axes) == [list("abcd"), list("abcd")] and axes.get_title() == "look-ahead"
    rgba = axes.images[0].to_rgba(axes.images[0].get_array())
    colors = [patch.get_facecolor() for patch in axes.get_legend().get_patches()]
    assert tuple(rgba[1, 0]) == pytest.approx(colors[0], abs=0.01) and tuple(rgba[0, 1]) == pytest.approx(colors[1], abs=0.01)
    for value in (-math.inf, -1e9, torch.finfo(torch.float32).min):
        axes = plot_mask(torch.zeros(4, 4).masked_fill(hidden, value))
        assert torch.equal(image(axes), (~hidden).float()) and legend(axes) == ["attend (0)", "hidden (-inf)"]
    assert labels(plot_mask(hidden[0]))[0] == ["all"]
    assert torch.equal(image(plot_mask(torch.stack([hidden, ~hidden]), head=1)), hidden.float())


def test_mask_with_a_bias(path):
    bias = -torch.arange(4.0).expand(3, 4).clone()
    bias[0, 2] = -math.inf
    axes = plot_mask(bias, path=path)
    assert torch.equal(image(axes).nan_to_num(-math.inf), bias) and legend(axes) == ["hidden (-inf)"]
    assert colorbar_label(axes) == "added to the score"
    assert axes.images[0].get_clim() == (-3, 3)
    assert plot_mask(bias[1:]).get_legend() is None  # nothing is hidden


def test_positions_picture(path):
    encoding = torch.randn(1, 50, 8)
    axes = plot_positions(encoding, title="positions", path=path)
    assert torch.equal(image(axes), encoding[0])
    assert (axes.get_title(), axes.get_ylabel(), axes.get_xlabel()) == ("positions", "position", "dimension")


@torch.no_grad()
def test_capturing_adds_nothing_to_a_cache():
    attention, x = ft.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    plain, captured = ft.KeyValueCache(), ft.KeyValueCache()
    for token in x.split(1, dim=1):
        out = attention(token, token, token, cache=plain)[0]
        with capture_attention(attention) as weights:
            assert torch.equal(attention(token, token, token, cache=captured)[0], out)
        assert weights["MultiheadAttention"][0].shape == (2, 2, 1, captured.length)
    assert captured.length == 5


def test_pyplot_is_not_touched(monkeypatch, path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    plot_attention_grid(random_weights(2, 3, 4), path=path)


def test_without_matplotlib_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for module in ("", ".plots"):
        monkeypatch.delitem(sys.modules, f"fast_transformer.visualize{module}")
    with pytest.raises(ImportError, match=r'pictures need matplotlib: pip install "fast-transformer-kernels\[viz\]"'):
        importlib.import_module("fast_transformer.visualize")


# Fonts.


def make_font(path, name, characters):
    """Write a font in which all `characters` look alike."""
    pen = TTGlyphPen(None)
    for point in ((100, 0), (100, 700), (600, 700)):
        (pen.lineTo if point[1] or point[0] != 100 else pen.moveTo)(point)
    pen.closePath()
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", "shape"])
    builder.setupCharacterMap({ord(character): "shape" for character in characters})
    builder.setupGlyf({".notdef": pen.glyph(), "shape": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (700, 0), "shape": (700, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": name, "styleName": "Regular"})
    builder.setupOS2(usWeightClass=400)
    builder.setupPost()
    builder.save(path)
    return font_manager.ttfFontProperty(font_manager.get_font(path))


@pytest.fixture
def fonts(monkeypatch):
    """The installed fonts: those that come with matplotlib, which have no CJK; to be appended to."""
    listed = [e for e in font_manager.fontManager.ttflist if "DejaVu" in e.name or "Last Resort" in e.name]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", listed)
    return listed


def test_cjk_without_a_font_is_escaped_with_one_warning(fonts, path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        axes = plot_attention(random_weights(3, 2), ["中文", "я", "한"], ["あ", "x中 y"], title="文", path=path)
    assert labels(axes) == [["U+4E2D U+6587", "я", "U+D55C"], ["U+3042", "x U+4E2D ␣y"]] and axes.get_title() == "U+6587"
    (warning,) = caught  # and none of matplotlib's about missing glyphs
    text = str(warning.message)
    assert "no installed font has あ中文한 (CJK, HANGUL, HIRAGANA)" in text and "fonts-noto-cjk" in text
    assert warning.filename == __file__


def test_cjk_in_a_font_that_has_it(fonts, path, tmp_path):
    fonts.append(make_font(tmp_path / "some.ttf", "Some Han", "中"))
    make_font(tmp_path / "more.ttf", "More Han", "中文")
    fonts.append(font_manager.FontEntry(fname=str(tmp_path / "more.ttf"), name="More Han"))  # as users add one: a named weight
    fonts.append(make_font(tmp_path / "kana.ttf", "Kana", "あ"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axes = plot_attention(random_weights(2, 2), ["中文", "wide"], ["あ", "x"], path=path)
    assert labels(axes) == [["中文", "wide"], ["あ", "x"]]
    assert axes.get_yticklabels()[0].get_fontfamily() == [*font_manager.FontProperties().get_family(), "More Han", "Kana"]


def test_fonts_without_the_symbols(fonts, tmp_path):
    fonts[:] = [make_font(tmp_path / "ascii.ttf", "Only ASCII", map(chr, range(32, 127)))]
    with matplotlib.rc_context({"font.family": "Only ASCII"}), warnings.catch_warnings():
        warnings.simplefilter("error")
        axes = plot_attention(random_weights(3, 1), [" a", "\n", "\t"])
    assert labels(axes)[0] == ["_a", "\\n", "\\t"]


def test_a_broken_font_file_is_passed_over(fonts, tmp_path):
    entry = make_font(tmp_path / "broken.ttf", "Broken", "中")
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    fonts.append(entry)
    with pytest.warns(UserWarning, match="no installed font has 文"):
        assert labels(plot_attention(random_weights(1, 1), ["文"]))[0] == ["U+6587"]


# Bad input.


WEIGHTS = random_weights(2, 3, 4)
NAN = WEIGHTS.clone()
NAN[1, 2, 3] = math.nan


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: plot_attention(WEIGHTS.tolist()), TypeError, "weights must be a torch.Tensor, got list"),
        (lambda: plot_attention(WEIGHTS.long()), TypeError, "weights must have a floating-point dtype"),
        (lambda: plot_attention(WEIGHTS[0, 0]), ValueError, r"weights must have shape \(L, S\), .* got \(4,\)"),
        (lambda: plot_attention(WEIGHTS[None, None]), ValueError, r"weights must have shape .* got \(1, 1, 2, 3, 4\)"),
        (lambda: plot_attention(WEIGHTS[:, :, :0]), ValueError, r"weights must not be empty, got shape \(2, 3, 0\)"),
        (lambda: plot_attention(NAN), ValueError, r"weights must be finite, got nan at \(1, 2, 3\)"),
        (lambda: plot_attention(WEIGHTS, head=2), ValueError, "head must be in 0 to 1, got 2"),
        (lambda: plot_attention(WEIGHTS, head=-1), ValueError, "head must be in 0 to 1, got -1"),
        (lambda: plot_attention(WEIGHTS, head=0.0), TypeError, "head must be an integer, got 0.0"),
        (lambda: plot_attention(WEIGHTS, sample=0), ValueError, "sample must be None"),
        (lambda: plot_attention(WEIGHTS[:, None]), ValueError, "sample must say which of the 2 samples"),
        (lambda: plot_attention(WEIGHTS[:, None], sample=2), ValueError, "sample must be in 0 to 1, got 2"),
        (lambda: plot_attention(WEIGHTS, "ab"), ValueError, r"query_tokens must have 3 tokens, .*\(3, 4\), got 2"),
        (lambda: plot_attention(WEIGHTS, None, "abc"), ValueError, "key_tokens must have 4 tokens, .*got 3"),
        (lambda: plot_attention(WEIGHTS, [1, 2, 3]), TypeError, "query_tokens must hold strings, got 1"),
        (lambda: plot_attention(WEIGHTS, axes=Figure()), TypeError, "axes must be matplotlib Axes, got Figure"),
        (lambda: plot_attention_grid(WEIGHTS, axes=[]), ValueError, "axes must hold 2 axes, one per head, got 0"),
        (lambda: plot_attention_grid(NAN), ValueError, "weights must be finite"),
        (lambda: plot_mask(WEIGHTS > 0), ValueError, "head must say which of the 2 masks"),
        (lambda: plot_mask(torch.ones(3, 3, dtype=torch.long)), TypeError, "hidden must have a floating-point dtype"),
        (lambda: plot_mask(NAN, head=1), ValueError, r"hidden must be finite, got nan at \(2, 3\)"),
        (lambda: plot_mask(torch.full((2, 2), math.inf)), ValueError, "hidden must be finite, got inf"),
        (lambda: plot_mask(None), TypeError, "hidden must be a torch.Tensor, got NoneType"),
        (lambda: plot_positions(WEIGHTS), ValueError, r"encoding must have shape \(L, d_model\) .* got \(2, 3, 4\)"),
        (lambda: plot_positions(NAN[1]), ValueError, "encoding must be finite"),
    ],
)
def test_bad_input(call, error, text):
    with pytest.raises(error, match=text):
        call()
