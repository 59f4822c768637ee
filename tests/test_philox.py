"""The random stream: Philox4x32 against its published answers, and the coordinates that a dropout mask is made of."""

import importlib
import math

import pytest
import torch
from common import keep_count_is_likely, need_extension
from hypothesis import given
from hypothesis import strategies as st

from fast_transformer import reference
from fast_transformer.reference import PHILOX_ROUNDS, keep_mask, keep_threshold, philox

# Known answers of the Random123 distribution (Salmon et al., SC 2011): counter, key -> four words.
KNOWN = [
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def scalar_philox(counter, key, rounds=7):
    """Philox4x32 on Python's unbounded integers."""
    (a, b, c, d), (k, m) = counter, key
    for i in range(rounds):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        bump_k, bump_m = (k + i * 0x9E3779B9) % 2**32, (m + i * 0xBB67AE85) % 2**32
        a, b, c, d = (right // 2**32) ^ b ^ bump_k, right % 2**32, (left // 2**32) ^ d ^ bump_m, left % 2**32
    return a, b, c, d


def scalar_decision(seed, row, col):
    """The 16 random bits of element (row, col): one half of one word of the block of eight columns that holds it."""
    key = (seed % 2**32, seed // 2**32 % 2**32)
    block = scalar_philox((col // 8, row % 2**32, row // 2**32, 0), key)
    return block[col % 8 // 2] >> (16 * (col % 2)) & 0xFFFF


def tensor_philox(counter, key, rounds=reference.PHILOX_ROUNDS):
    return tuple(x.item() for x in philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key), rounds))


@pytest.mark.parametrize("rounds, counter, key, answer", KNOWN, ids=[f"{r}-rounds-{c[:8]}" for r, c, _, _ in KNOWN])
def test_known_answers(rounds, counter, key, answer):
    assert scalar_philox(words(counter), words(key), rounds) == tuple(words(answer))
    assert tensor_philox(words(counter), words(key), rounds) == tuple(words(answer))


def test_seven_rounds_are_the_default():
    assert reference.PHILOX_ROUNDS == 7
    assert tensor_philox([0] * 4, [0] * 2) == tuple(words(KNOWN[0][3]))


word = st.integers(0, 2**32 - 1)


@given(st.tuples(word, word, word, word), st.tuples(word, word), st.integers(0, 12))
def test_equals_unbounded_integers(counter, key, rounds):
    """int64 products that wrap lose no bit of the 64 that count."""
    assert tensor_philox(counter, key, rounds) == scalar_philox(counter, key, rounds)


def test_broadcasts_counters_as_keep_mask_needs_it():
    column, row, zero = torch.arange(3)[None], torch.arange(4)[:, None], torch.zeros(1, 3, dtype=torch.int64)
    got = torch.stack(torch.broadcast_tensors(*philox((column, row, zero, zero), (torch.tensor(5), torch.tensor(6)))), -1)
    assert got.tolist() == [[list(scalar_philox((c, r, 0, 0), (5, 6))) for c in range(3)] for r in range(4)]


# keep_mask

SEEDS = {
    "0": 0,
    "1": 1,
    "2^32": 2**32,
    "2^32+1": 2**32 + 1,
    "-1": -1,
    "max": 2**63 - 1,
    "min": -(2**63),
    "mix": 0x123456789ABCDEF0,
}


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_layout_of_the_coordinates(seed):
    """Rows of 29 columns: three blocks of eight and a rest."""
    mask = keep_mask(torch.tensor(seed), (6, 29), 0.3)
    limit = round(0.7 * 65536)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[scalar_decision(seed, row, col) < limit for col in range(29)] for row in range(6)]


def test_seeds_differ_in_all_64_bits():
    masks = {s: keep_mask(torch.tensor(s), (4, 64), 0.5) for s in SEEDS.values()}
    assert len({tuple(m.flatten().tolist()) for m in masks.values()}) == len(SEEDS)


def test_rows_beyond_32_bits():
    """A mask with 2^32 rows fits nowhere; its counters are those of keep_mask, with the row's upper half in the third word."""
    rows = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**32 + 1, 5 * 2**32 + 7])
    zero = torch.zeros_like(rows)
    got = torch.stack(philox((zero + 3, rows & 0xFFFFFFFF, rows >> 32, zero), (torch.tensor(11), torch.tensor(22))), -1)
    halves = [[half for w in block for half in (w & 0xFFFF, w >> 16)] for block in got.tolist()]
    assert halves == [[scalar_decision(22 * 2**32 + 11, row, 24 + i) for i in range(8)] for row in rows.tolist()]
    assert len(set(map(tuple, halves))) == len(rows)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 20), st.integers(-(2**63), 2**63 - 1))
def test_leading_dimensions_only_count_rows(leading, n, seed):
    seed, rows = torch.tensor(seed), math.prod(leading)
    assert torch.equal(keep_mask(seed, (*leading, n), 0.4), keep_mask(seed, (rows, n), 0.4).view(*leading, n))


@given(st.integers(1, 40), st.integers(0, 20), st.integers(0, 5))
def test_a_mask_is_a_corner_of_every_larger_one(n, more_columns, more_rows):
    seed = torch.tensor(99)
    larger = keep_mask(seed, (3 + more_rows, n + more_columns), 0.5)
    assert torch.equal(keep_mask(seed, (3, n), 0.5), larger[:3, :n])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (7,), (2, 0, 3)], ids=str)
def test_shapes_at_the_edge(shape):
    mask = keep_mask(torch.tensor(3), shape, 0.5)
    assert mask.shape == shape
    assert mask.tolist() == keep_mask(torch.tensor(3), (8, *shape[-1:]), 0.5)[: math.prod(shape[:-1])].reshape(shape).tolist()


# Probabilities


@pytest.mark.parametrize(
    "dropout_p, threshold",
    [(0.0, 65536), (0.5, 32768), (0.25, 49152), (0.1, 58982), (0.9, 6554), (1 / 65536, 65535), (1e-6, 65536), (0.999999, 1)],
)
def test_threshold(dropout_p, threshold):
    """Rounded to the nearest 1/65536; never 0, since its inverse is the scale."""
    assert keep_threshold(dropout_p) == threshold


@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.25, 0.5, 0.9, 0.999, 0.99999])
def test_share_of_kept_elements(dropout_p):
    """About 260,000 decisions, against the quantised probability."""
    mask = keep_mask(torch.tensor(2024), (511, 513), dropout_p)
    assert keep_count_is_likely(mask.sum().item(), mask.numel(), keep_threshold(dropout_p) / 65536)


def test_neighbours_are_independent():
    """Kept pairs of neighbours along rows, along columns, across one block and between two seeds come at p squared."""
    mask = keep_mask(torch.tensor(5), (512, 512), 0.5)
    pairs = {
        "columns": (mask[:, :-1], mask[:, 1:]),
        "rows": (mask[:-1], mask[1:]),
        "blocks": (mask[:, :-8], mask[:, 8:]),
        "seeds": (mask, keep_mask(torch.tensor(6), (512, 512), 0.5)),
    }
    for name, (a, b) in pairs.items():
        assert keep_count_is_likely((a == b).sum().item(), a.numel(), 0.5), name


def test_the_scale_is_the_exact_inverse_of_the_keep_probability():
    """So the mean of what dropout returns, over all 65536 decisions, is what went in."""
    for dropout_p in (0.1, 0.25, 0.5, 0.77):
        y = reference.dropout(torch.ones(64, 64, dtype=torch.float64), dropout_p=dropout_p, seed=torch.tensor(1))
        assert set(y.unique().tolist()) == {0.0, 65536 / round((1 - dropout_p) * 65536)}


@need_extension
@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN)
def test_known_answers_of_the_compiled_generator(rounds, counter, key, answer):
    compiled = importlib.import_module("fast_transformer._C").philox4x32
    assert compiled(words(counter), words(key), rounds) == words(answer)
    if rounds == PHILOX_ROUNDS:
        assert compiled(words(counter), words(key)) == words(answer)
