"""KeyValueCache in the twins: steps equal the whole, rows are reordered, misuse is an error."""

import pytest
import torch

import fast_transformer as ft
from fast_transformer.nn import DecoderLayerCache

E, H = 32, 4


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, dtype=torch.float64)  # keys, values


def test_append_grows_by_doubling_and_keeps_what_it_has():
    cache, parts, rooms = ft.KeyValueCache(capacity=4), [], set()
    for length in (3, 1, 1, 0, 7, 30):
        parts.append(heads(2, H, length, 8))
        key, value = cache.append(*parts[-1])
        whole = torch.cat(parts, dim=3)
        assert torch.equal(key, whole[0]) and torch.equal(value, whole[1])
        assert cache.length == whole.shape[3]
        rooms.add(key.stride(1) // 8)
    assert rooms == {4, 8, 16, 42}


def test_reorder_equals_indexing():
    for rows in ([0, 1, 2], [2, 1, 0], [1, 1, 1], [1, 2, 2]):
        cache, x = ft.KeyValueCache(), heads(3, H, 5, 8)
        cache.append(*x)
        cache.reorder(torch.tensor(rows))
        assert torch.equal(torch.stack(cache.contents()), x[:, rows])
    cache.reorder(torch.tensor([0, 0, 1, 1, 2, 2]))
    assert torch.equal(torch.stack(cache.contents()), x[:, [1, 1, 2, 2, 2, 2]])
    assert torch.equal(torch.stack(cache.append(*heads(6, H, 0, 8))), x[:, [1, 1, 2, 2, 2, 2]])


def test_reorder_writes_only_rows_that_change():
    cache = ft.KeyValueCache()
    key, value = cache.append(*heads(4, H, 5, 8))
    key[1], key[2] = float("nan"), float("nan")
    before = key.clone()
    cache.reorder(torch.tensor([0, 1, 3, 3]))
    assert torch.equal(key[2], before[3]) and key[1].isnan().all() and torch.equal(key[0], before[0])


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("option", ["plain", "window", "softcap", "rotary", "separate_kv", "float_padding"])
def test_attention_step_by_step_equals_the_whole(option, batch_first):
    options = {
        "window": {"window": (3, 0)},
        "softcap": {"softcap": 2.0},
        "rotary": {"rotary": ft.RotaryPositions(8)},
        "separate_kv": {"kdim": E, "vdim": E, "bias": False},
    }.get(option, {})
    m = ft.MultiheadAttention(E, H, batch_first=batch_first, **options).double()
    x = torch.randn(3, 9, E, dtype=torch.float64)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, :4] = True
    if option == "float_padding":
        padding = padding.double() * -2.0

    def call(x, padding, **extras):
        x = x if batch_first else x.transpose(0, 1)
        out, weights = m(x, x, x, padding, is_causal=True, **extras)
        return (out if batch_first else out.transpose(0, 1)), weights

    out, weights = call(x, padding)
    cache, at = ft.KeyValueCache(capacity=2), 0
    for length in (2, 1, 4, 1, 1):
        step, at = slice(at, at + length), at + length
        part, part_weights = call(x[:, step], padding[:, :at], cache=cache)
        torch.testing.assert_close(part, out[:, step], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(part_weights, weights[:, step, :at], rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("average", [True, False])
def test_beams_share_the_keys_of_cross_attention(length, average):
    m = ft.MultiheadAttention(E, H, batch_first=True, kdim=10, vdim=10).double()
    memory, x = torch.randn(2, 7, 10, dtype=torch.float64), torch.randn(6, length, E, dtype=torch.float64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 3:] = True
    cache = ft.KeyValueCache(fixed=True)
    m(x[:2], memory, memory, padding, cache=cache)
    found = m(x, memory, memory, padding, average_attn_weights=average, cache=cache)
    whole = (t.repeat_interleave(3, dim=0) for t in (memory, memory, padding))
    torch.testing.assert_close(found, m(x, *whole, average_attn_weights=average), rtol=1e-10, atol=1e-12)
    assert cache.length == 7 and len(cache.contents()[0]) == 2


@torch.no_grad()
def test_cross_attention_looks_at_memory_once():
    m = ft.MultiheadAttention(E, H, batch_first=True)
    x, memory = torch.randn(2, 1, E), torch.randn(2, 7, E)
    cache = ft.KeyValueCache(fixed=True)
    first = m(x, memory, memory, cache=cache)
    torch.testing.assert_close(m(x, torch.full_like(memory, float("nan")), memory, cache=cache), first, rtol=0, atol=0)


def call(m, x, memory=None, **options):
    memory = x if memory is None else memory
    return m(x, memory, memory, **options)


def filled(N: int, **options) -> ft.KeyValueCache:
    cache = ft.KeyValueCache(**options)
    cache.append(*torch.randn(2, N, H, 5, E // H))
    return cache


attention = ft.MultiheadAttention(E, H, batch_first=True)
encoder = ft.TransformerEncoder(ft.TransformerEncoderLayer(E, H, batch_first=True), 2)
x = torch.randn(2, 3, E)


@pytest.mark.parametrize(
    "error, text, act",
    [
        (ValueError, "capacity must be an integer >= 1, got 0", lambda: ft.KeyValueCache(0)),
        (ValueError, "keys of 3 sequences, got 2", lambda: call(attention, x, cache=filled(3))),
        (ValueError, "multiple of the cache's, 4, got 2", lambda: call(attention, x, x + 1, cache=filled(4, fixed=True))),
        (
            ValueError,
            "cache must be None with add_bias_kv",
            lambda: call(ft.MultiheadAttention(E, H, add_bias_kv=True, batch_first=True), x, cache=filled(2)),
        ),
        (ValueError, "2 queries for each row", lambda: call(attention, x, x + 1, cache=filled(1, fixed=True), is_causal=True)),
        (ValueError, "each of the 2 layers, got 1", lambda: encoder(x, cache=[filled(2)])),
        (ValueError, r"\(2, 8\), got \(2, 3\)", lambda: call(attention, x, cache=filled(2), key_padding_mask=x[..., 0] > 9)),
    ],
)
def test_misuse(error, text, act):
    with torch.no_grad(), pytest.raises(error, match=text):
        act()


def test_gradients_and_a_cache_exclude_each_other():
    with pytest.raises(RuntimeError, match="no_grad"):
        call(attention, x, cache=ft.KeyValueCache())
    layer = ft.TransformerDecoderLayer(E, H, batch_first=True)
    with pytest.raises(RuntimeError, match="no_grad"):
        layer(x, x, cache=DecoderLayerCache(ft.KeyValueCache(), ft.KeyValueCache(fixed=True)))


@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was():
    cache = filled(2)
    for options in ({"attn_mask": torch.zeros(3, 3)}, {"position_bias": torch.zeros(1, H, 3, 3)}):
        with pytest.raises(ValueError):
            call(attention, x, cache=cache, **options)
    with pytest.raises(ValueError):
        call(attention, x[:1], cache=cache)
    assert cache.length == 5


@torch.no_grad()
def test_a_query_that_is_not_the_key_object_appends_too():
    """A hook that copies the query, or adds positions to it."""
    whole = call(attention, x, is_causal=True)[0]
    cache = ft.KeyValueCache()
    steps = [attention(t.clone(), t, t, cache=cache)[0] for t in x.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)


def test_the_cache_of_cross_attention_must_be_fixed():
    layer = ft.TransformerDecoderLayer(E, H, batch_first=True)
    with torch.no_grad(), pytest.raises(ValueError, match="fixed=True"):
        layer(x, x, cache=DecoderLayerCache(ft.KeyValueCache(), ft.KeyValueCache()))
