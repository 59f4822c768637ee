"""Decoding against what can be enumerated: a model that is a table, exhaustive search, and forward passes without a cache."""

import itertools
import math

import pytest
import torch
from torch import nn

from fast_transformer import generation
from fast_transformer.generation import beam_search, greedy, sample
from fast_transformer.models import DecoderOnlyTransformer, RNNSeq2Seq, Seq2SeqTransformer
from fast_transformer.models.embeddings import POSITIONS

PAD, BOS, EOS = 0, 1, 2


class TableState:
    def __init__(self, sources, key):
        self.sources, self.key = sources, key

    def reorder(self, rows):
        self.key = self.key[rows]


class TableModel(nn.Module):
    """A language whose next token depends on the source's first token and on all tokens read: logits are rows of a table."""

    pad_id = PAD
    rows = 997

    def __init__(self, vocab, *, spread=2.0, dtype=torch.float64):
        super().__init__()
        self.register_buffer("table", torch.randn(self.rows, vocab, dtype=dtype) * spread)
        self.steps = []  # rows of each step
        self.known = {}  # log-probabilities after a past

    def encode(self, source):
        return source[:, 0] * 31 % self.rows

    def begin(self, inputs, *, bos_id):
        return inputs.new_full((len(inputs), 1), bos_id), TableState(inputs, self.encode(inputs))

    def read(self, key, tokens):
        keys = []
        for token in tokens.T:
            key = (key * self.table.shape[1] + token + 1) % self.rows
            keys.append(key)
        return torch.stack(keys, 1)

    def step(self, tokens, state):
        assert not self.training and not torch.is_grad_enabled()
        self.steps.append(len(tokens))
        state.key = self.read(state.key, tokens)[:, -1]
        return self.table[state.key]

    def forward(self, source, target):
        return self.table[self.read(self.encode(source), target)]


def sources(n):
    return torch.arange(3, 3 + n)[:, None]


def log_prob(model, source, tokens):
    """The sum of log-probabilities of one sequence, from forward passes."""
    total = 0.0
    for i, token in enumerate(tokens):
        past = (*source.tolist(), BOS, *tokens[:i])
        if past not in model.known:
            logits = model(source[None], torch.tensor([[BOS, *tokens[:i]]]))
            model.known[past] = logits[0, -1].log_softmax(-1).tolist()
        total += model.known[past][token]
    return total


def every_sequence(vocab, length):
    """All that a search may return: no padding, and up to EOS or of that length."""
    others = [token for token in range(vocab) if token not in (PAD, EOS)]
    for n in range(length):
        yield from ((*tokens, EOS) for tokens in itertools.product(others, repeat=n))
    yield from itertools.product(others, repeat=length)


def ranked(model, source, vocab, length, alpha):
    """[(score, tokens)] of all sequences, the best first."""
    every = [(log_prob(model, source, x) / ((5 + len(x)) / 6) ** alpha, x) for x in every_sequence(vocab, length)]
    return sorted(every, reverse=True)


def as_tuple(tokens):
    return tuple(token for token in tokens.tolist() if token != PAD)


# Beam search


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_wide_enough_finds_what_exhaustive_search_finds(seed, alpha):
    torch.manual_seed(seed)
    vocab, length, n_best = 4, 4, 20
    model, source = TableModel(vocab), sources(3)
    got = beam_search(
        model, source, beams=40, n_best=n_best, max_new_tokens=length, bos_id=BOS, eos_id=EOS, length_penalty=alpha
    )
    assert got.tokens.shape[:2] == (3, n_best) and got.scores.shape == (3, n_best)
    for i in range(3):
        expected = ranked(model, source[i], vocab, length, alpha)[:n_best]
        assert [as_tuple(x) for x in got.tokens[i]] == [tokens for _, tokens in expected]
        torch.testing.assert_close(got.scores[i], torch.tensor([s for s, _ in expected], dtype=torch.float64))


def reference_beam_search(model, source, vocab, beams, length, alpha, n_best):
    """Sutskever's beam with lists, one sentence, to the very end."""
    live, ended = [(0.0, ())], []
    for _ in range(length):
        candidates = [(log_prob(model, source, (*x, v)), (*x, v)) for _, x in live for v in range(vocab) if v != PAD]
        best = sorted(candidates, reverse=True)[: beams - len(ended)]
        ended += [c for c in best if c[1][-1] == EOS]
        live = [c for c in best if c[1][-1] != EOS]
    scored = [(score / ((5 + len(x)) / 6) ** alpha, x) for score, x in live + ended]
    return sorted(scored, reverse=True)[:n_best]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("beams, n_best", [(1, 1), (2, 1), (3, 3), (5, 2)])
def test_narrow_beams_against_lists(beams, n_best, alpha, cache):
    vocab, length, source = 7, 6, sources(6)
    model = TableModel(vocab)
    options = {"beams": beams, "n_best": n_best, "length_penalty": alpha}
    got = beam_search(model, source, max_new_tokens=length, bos_id=BOS, eos_id=EOS, cache=cache, **options)
    for i, row in enumerate(source):
        expected = reference_beam_search(model, row, vocab, beams, length, alpha, n_best)
        assert [as_tuple(x) for x in got.tokens[i]] == [tokens for _, tokens in expected]
        torch.testing.assert_close(got.scores[i], torch.tensor([s for s, _ in expected], dtype=torch.float64))


def test_the_search_ends_when_nothing_can_improve_and_not_before():
    """EOS has probability p_end at first and then none, until after three times token 3 it is certain."""
    certain, steps = torch.full((4, 5), -math.inf), 4
    certain[[1, 2, 3], [3, 3, EOS]] = 0.0

    class Chain(TableModel):
        def step(self, tokens, state):
            self.steps.append(len(tokens))
            return certain[len(self.steps) - 1].expand(len(tokens), -1)

    def search(alpha, p_end):
        certain[0, [EOS, 3]] = torch.tensor([p_end, 1 - p_end]).log()
        model = Chain(5)
        limits = {"max_new_tokens": steps, "bos_id": BOS, "eos_id": EOS}
        best = beam_search(model, sources(1), beams=2, length_penalty=alpha, **limits)
        return as_tuple(best.tokens[0, 0]), len(model.steps)

    assert search(0.0, 0.4) == ((3, 3, 3, EOS), 4)  # 0.6 > 0.4, whatever the length
    assert search(0.0, 0.55) == ((EOS,), 1)  # nothing that starts with 0.45 can become better
    assert search(1.0, 0.55) == ((3, 3, 3, EOS), 4)  # log(0.45) / (9 / 6) > log(0.55)
    assert search(0.1, 0.55) == ((EOS,), 1)  # log(0.45) / (9 / 6)^0.1 < log(0.55)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_one_beam_is_greedy(alpha):
    model, source = TableModel(9), sources(20)
    one = greedy(model, source, max_new_tokens=8, bos_id=BOS, eos_id=EOS)
    beam = beam_search(model, source, beams=1, max_new_tokens=8, bos_id=BOS, eos_id=EOS, length_penalty=alpha)
    assert torch.equal(beam.tokens[:, 0], one.tokens)
    length = (one.tokens != PAD).sum(1)
    torch.testing.assert_close(beam.scores[:, 0], one.scores / ((5 + length) / 6) ** alpha)


def test_fewer_sequences_than_n_best():
    got = beam_search(TableModel(3), sources(2), beams=5, n_best=5, max_new_tokens=1, bos_id=BOS, eos_id=EOS)
    assert sorted(got.tokens[0, :2, 0].tolist()) == [BOS, EOS]
    assert (got.tokens[:, 2:] == PAD).all() and (got.scores[:, 2:] == -math.inf).all()
    assert got.scores[:, :2].isfinite().all()


@pytest.mark.parametrize("beams", [1, 2, 5, 8])
def test_children_stay_in_their_parents_place(beams):
    parent = torch.randint(beams, (200, beams))
    order = generation._staying(parent)
    assert torch.equal(order.sort(1)[0], torch.arange(beams).expand(200, -1))  # each child once
    moved = (parent.gather(1, order) != torch.arange(beams)).sum(1)
    assert torch.equal(moved, torch.tensor([beams - len(set(row.tolist())) for row in parent]))


# Greedy


def test_greedy_against_a_loop():
    model, source, length = TableModel(9), sources(20), 8
    got = greedy(model, source, max_new_tokens=length, bos_id=BOS, eos_id=EOS)
    for i, row in enumerate(source):
        tokens = ()
        while len(tokens) < length and EOS not in tokens:
            tokens = max(((*tokens, v) for v in range(9) if v != PAD), key=lambda x: log_prob(model, row, x))
        assert got.tokens[i].tolist() == [*tokens, *[PAD] * (got.tokens.shape[1] - len(tokens))]
        assert got.scores[i].item() == pytest.approx(log_prob(model, row, tokens))
    assert len({(row != PAD).sum().item() for row in got.tokens}) > 2  # sequences end at different steps


def test_decoding_ends_with_the_last_sequence():
    model, source = TableModel(9), sources(20)
    full = greedy(model, source, max_new_tokens=50, bos_id=BOS, eos_id=EOS)
    assert len(model.steps) == full.tokens.shape[1] < 50
    assert full.tokens.shape[1] == (full.tokens != PAD).sum(1).max()
    endless = greedy(model, source, max_new_tokens=50, bos_id=BOS, eos_id=None)
    assert endless.tokens.shape == (20, 50) and (endless.tokens != PAD).all()


def test_padding_may_be_the_end():
    model = TableModel(5)
    got = greedy(model, sources(9), max_new_tokens=30, bos_id=BOS, eos_id=PAD)
    assert (got.tokens == PAD).any(1).all()
    assert ((got.tokens == PAD).cummax(1)[0] == (got.tokens == PAD)).all()  # nothing follows it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_wide(dtype):
    model = TableModel(9, dtype=dtype)
    for decode in (greedy, sample, lambda *a, **k: beam_search(*a, beams=2, **k)):
        scores = decode(model, sources(2), max_new_tokens=3, bos_id=BOS, eos_id=EOS).scores
        assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# Sampling


class FixedModel(TableModel):
    """The same logits (V,) in every step."""

    def __init__(self, logits):
        super().__init__(len(logits))
        self.logits = torch.tensor(logits)

    def step(self, tokens, state):
        return self.logits.expand(len(tokens), -1).clone()


def allowed(probs, top_k, top_p):
    """{token: probability} after both cuts, by their definitions."""
    order = sorted(probs, key=probs.get, reverse=True)[:top_k]
    mass = sum(probs[v] for v in order)
    kept, reached = [], 0.0
    for v in order:
        if reached >= top_p:
            break
        kept.append(v)
        reached += probs[v] / mass
    return {v: probs[v] / sum(probs[u] for u in kept) for v in kept}


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("top_k, top_p", [(None, 1.0), (3, 1.0), (1, 1.0), (100, 1.0), (None, 0.7), (None, 1e-9), (3, 0.7)])
def test_samples_follow_the_cut_distribution(top_k, top_p, temperature):
    probs, n = [0.0, 0.05, 0.3, 0.1, 0.35, 0.2], 20000  # token 0 is padding
    got = sample(
        FixedModel([math.log(p) if p else 5.0 for p in probs]),
        sources(n),
        max_new_tokens=1,
        bos_id=BOS,
        eos_id=None,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=1,
    )
    heated = {v: p ** (1 / temperature) for v, p in enumerate(probs) if p}
    heated = {v: p / sum(heated.values()) for v, p in heated.items()}
    expected = allowed(heated, top_k, top_p)
    counts = torch.bincount(got.tokens[:, 0], minlength=6).tolist()
    assert {v for v, count in enumerate(counts) if count} == set(expected)
    for v, p in expected.items():  # 5 standard deviations of a binomial: 1 in 1.7 million
        assert abs(counts[v] - n * p) <= 5 * (n * p * (1 - p)) ** 0.5


def test_top_p_that_is_reached_exactly_keeps_no_more():
    logits = [-math.inf, math.log(0.125), math.log(0.5), math.log(0.25), math.log(0.125)]
    options = {"max_new_tokens": 1, "bos_id": BOS, "eos_id": None, "seed": 0}
    got = sample(FixedModel(logits), sources(2000), top_p=0.75, **options)
    assert set(got.tokens.flatten().tolist()) == {2, 3}


def test_top_k_keeps_no_more_where_logits_are_equal():
    got = sample(FixedModel([0.0] * 9), sources(2000), top_k=4, max_new_tokens=1, bos_id=BOS, eos_id=None, seed=0)
    assert len(set(got.tokens.flatten().tolist())) == 4


def test_seeds_and_generators():
    model, source = TableModel(30), sources(8)

    def draw(**options):
        return sample(model, source, max_new_tokens=10, bos_id=BOS, eos_id=EOS, **options)

    first = draw(seed=5)
    state = torch.get_rng_state()
    assert torch.equal(first.tokens, draw(seed=5).tokens)
    assert torch.equal(state, torch.get_rng_state())  # torch's own generator stands where it stood
    assert not torch.equal(first.tokens, draw(seed=6).tokens)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(first.tokens, draw(seed=generator).tokens)
    assert not torch.equal(first.tokens, draw(seed=generator).tokens)  # a generator goes on
    torch.manual_seed(5)
    assert torch.equal(first.tokens, draw().tokens)
    for i in range(8):
        assert first.scores[i].item() == pytest.approx(log_prob(model, source[i], as_tuple(first.tokens[i])))


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-300])
def test_temperature_towards_zero_is_greedy(temperature):
    model, source = TableModel(30, dtype=torch.float32), sources(20)
    limits = {"max_new_tokens": 10, "bos_id": BOS, "eos_id": EOS}
    cold = sample(model, source, temperature=temperature, seed=0, **limits)
    assert torch.equal(cold.tokens, greedy(model, source, **limits).tokens)


# All of them


DECODERS = {
    "greedy": greedy,
    "sample": lambda *args, **options: sample(*args, seed=0, top_p=0.9, **options),
    "beam_search": lambda *args, **options: beam_search(*args, beams=4, n_best=3, length_penalty=2.0, **options),
}
every_decoder = pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)


@every_decoder
def test_mode_is_restored_even_after_an_error(decode):
    model = nn.Sequential(nn.Dropout(), TableModel(5))
    model[0].eval()
    table = model[1]
    table.inner = nn.Dropout().eval()
    decode(table, sources(2), max_new_tokens=2, bos_id=BOS, eos_id=EOS)
    assert table.training and not table.inner.training and torch.is_grad_enabled()
    with pytest.raises(ValueError, match="eos_id"):
        decode(table, sources(2), max_new_tokens=2, bos_id=BOS, eos_id=5)
    assert table.training and not table.inner.training and torch.is_grad_enabled()


@every_decoder
def test_empty_batch(decode):
    got = decode(TableModel(5), sources(0), max_new_tokens=4, bos_id=BOS, eos_id=EOS)
    shape = (0, 3) if decode is DECODERS["beam_search"] else (0,)
    assert got.scores.shape == shape and got.tokens.shape[:-1] == shape and got.tokens.dtype == torch.int64


@every_decoder
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an integer, got 2.0"),
        ({"bos_id": None}, ValueError, "bos_id must be the first token"),
        ({"bos_id": -1}, ValueError, "bos_id must be at least 0, got -1"),
        ({"eos_id": 5}, ValueError, "eos_id must be a token of a vocabulary of 5, got 5"),
        ({"inputs": torch.zeros(2, 3)}, TypeError, "inputs must be an integer tensor"),
        ({"inputs": torch.zeros(3, dtype=torch.int64)}, ValueError, "inputs must have 2 dimensions"),
        ({"model": nn.Linear(2, 2)}, TypeError, "model must have begin and step, got Linear"),
        ({"model": FixedModel([math.nan] * 5)}, RuntimeError, "nan|NaN"),
    ],
)
def test_bad_input(decode, change, error, message):
    call = {"model": TableModel(5), "inputs": sources(2), "max_new_tokens": 3, "bos_id": BOS, "eos_id": EOS} | change
    with pytest.raises(error, match=message):
        decode(call.pop("model"), call.pop("inputs"), **call)


@pytest.mark.parametrize(
    "decode, options, error, message",
    [
        (beam_search, {"beams": 0}, ValueError, "beams must be at least 1, got 0"),
        (beam_search, {"beams": 1.5}, TypeError, "beams must be an integer, got 1.5"),
        (beam_search, {"beams": 2, "n_best": 3}, ValueError, "n_best must be from 1 to 2, got 3"),
        (beam_search, {"beams": 2, "n_best": 0}, ValueError, "n_best must be from 1 to 2, got 0"),
        (
            beam_search,
            {"beams": 2, "length_penalty": -1.0},
            ValueError,
            "length_penalty must be a finite number >= 0, got -1.0",
        ),
        (beam_search, {"beams": 2, "length_penalty": math.nan}, ValueError, "length_penalty must be a finite number >= 0"),
        (sample, {"temperature": 0.0}, ValueError, "temperature must be a finite number > 0, got 0.0"),
        (sample, {"temperature": math.inf}, ValueError, "temperature must be a finite number > 0, got inf"),
        (sample, {"temperature": "1"}, ValueError, "temperature must be a finite number > 0, got '1'"),
        (sample, {"top_p": 0.0}, ValueError, r"top_p must be a number in \(0, 1\], got 0.0"),
        (sample, {"top_p": 1.5}, ValueError, r"top_p must be a number in \(0, 1\], got 1.5"),
        (sample, {"top_p": math.nan}, ValueError, r"top_p must be a number in \(0, 1\], got nan"),
        (sample, {"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        (sample, {"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        (sample, {"seed": 2**64}, ValueError, "seed must be from"),
    ],
)
def test_bad_options(decode, options, error, message):
    with pytest.raises(error, match=message):
        decode(TableModel(5), sources(2), max_new_tokens=3, bos_id=BOS, eos_id=EOS, **options)


# The models, in float64, where no rounding changes a choice


def make_seq2seq(**options):
    sizes = {"d_model": 16, "n_heads": 2, "n_encoder_layers": 2, "n_decoder_layers": 2, "d_ff": 24}
    return Seq2SeqTransformer(13, 11, **sizes, dropout=0.1, norm_first=True, **options).double()


def make_decoder_only(**options):
    model = DecoderOnlyTransformer(11, 16, 2, 2, 24, 0.1, tie_embeddings=False, **({"pad_id": PAD} | options)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(20.0 if p.dim() > 1 else 1.0)  # at first, what such a model says hardly depends on what it reads
    return model


MODELS = {"seq2seq": make_seq2seq, "decoder_only": make_decoder_only}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def ragged(side="right"):
    x = torch.randint(3, 11, (6, 7))
    for row, n in enumerate([0, 3, 5, 7, 1, 0]):
        x[row, 7 - n :] = PAD
    return x if side == "right" else torch.stack([row.roll((row == PAD).sum().item()) for row in x])


def assert_same_without_a_cache(model, decode):
    inputs, limits = ragged(), {"max_new_tokens": 12, "bos_id": BOS, "eos_id": EOS}
    cached, anew = (decode(model, inputs, cache=cache, **limits) for cache in (True, False))
    assert torch.equal(cached.tokens, anew.tokens)
    torch.testing.assert_close(cached.scores, anew.scores, rtol=1e-9, atol=1e-11)
    assert len(set(map(str, cached.tokens.tolist()))) > 1  # it matters what the model reads
    assert cached.scores.isfinite().all()


@every_decoder
@pytest.mark.parametrize("positions", POSITIONS)
@every_model
def test_with_and_without_a_cache(make, positions, decode):
    assert_same_without_a_cache(make(positions=positions), decode)


@every_decoder
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("attention", [None, "bahdanau", "luong_general"])
def test_recurrent_with_and_without_its_state(attention, cell, decode):
    model = RNNSeq2Seq(13, 11, 16, 16, cell=cell, attention=attention).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)  # at first, what such a model says hardly depends on what it reads
    assert_same_without_a_cache(model, decode)


@pytest.mark.parametrize("name", ["greedy", "beam_search"])
@pytest.mark.parametrize("positions", ["learned", "relative"])
@every_model
def test_each_sequence_is_decoded_as_if_it_were_alone(make, positions, name):
    model, inputs = make(positions=positions), ragged()
    limits = {"max_new_tokens": 9, "bos_id": BOS, "eos_id": EOS}
    together = DECODERS[name](model, inputs, **limits)
    for row, tokens, scores in zip(inputs, *together, strict=True):
        real = row[row != PAD]
        if len(real):
            alone = DECODERS[name](model, real[None], **limits)
            width = alone.tokens.shape[-1]
            assert torch.equal(alone.tokens[0], tokens[..., :width]) and (tokens[..., width:] == PAD).all()
            torch.testing.assert_close(alone.scores[0], scores)


@every_decoder
@pytest.mark.parametrize("positions", POSITIONS)
def test_prompts_may_be_padded_on_either_side(positions, decode):
    model = make_decoder_only(positions=positions)
    torch.manual_seed(1)
    left = ragged("left")
    torch.manual_seed(1)
    a, b = (decode(model, inputs, max_new_tokens=6, eos_id=EOS) for inputs in (left, ragged()))
    assert torch.equal(a.tokens, b.tokens)


def test_a_language_model_without_padding_repeats_the_end():
    got = greedy(make_decoder_only(pad_id=None), torch.randint(11, (6, 7)), max_new_tokens=40, eos_id=EOS)
    ended = (got.tokens == EOS).long().cummax(1)[0].bool()
    assert ended.any() and (got.tokens[ended] == EOS).all()


@every_decoder
def test_a_language_model_can_start_from_nothing(decode):
    model, nothing = make_decoder_only(), torch.zeros(3, 0, dtype=torch.int64)
    got = decode(model, nothing, max_new_tokens=4, eos_id=None, bos_id=BOS)
    assert torch.equal(got.tokens, decode(model, torch.full((3, 1), BOS), max_new_tokens=4, eos_id=None).tokens)


@every_decoder
@pytest.mark.parametrize("cache", [True, False])
@every_model
def test_zero_sizes(make, cache, decode):
    limits = {"max_new_tokens": 3, "bos_id": BOS, "eos_id": EOS, "cache": cache}
    assert decode(make(), torch.zeros(0, 5, dtype=torch.int64), **limits).tokens.numel() == 0
    assert decode(make(), torch.zeros(2, 0, dtype=torch.int64), **limits).scores.isfinite().all()


@every_model
def test_all_padding_is_a_source_of_nothing(make):
    model = make()
    limits = {"max_new_tokens": 5, "bos_id": BOS, "eos_id": EOS}
    got = greedy(model, torch.full((2, 4), PAD), **limits)
    assert got.scores.isfinite().all() and torch.equal(got.tokens[0], got.tokens[1])
    if make is make_seq2seq:
        assert torch.equal(got.tokens, greedy(model, torch.full((2, 0), PAD), **limits).tokens)


@every_decoder
@every_model
def test_learned_positions_end(make, decode):
    room = 9 if make is make_seq2seq else 3  # for new tokens, the last of which is not read: 9 or 7 + 3 - 1
    model, inputs = make(positions="learned", max_len=9), ragged()
    limits = {"bos_id": BOS, "eos_id": None}
    assert decode(model, inputs, max_new_tokens=room, **limits).tokens.shape[-1] == room
    with pytest.raises(ValueError, match=f"max_new_tokens must be at most {room}, max_len being 9, got {room + 1}"):
        decode(model, inputs, max_new_tokens=room + 1, **limits)


@every_decoder
@pytest.mark.parametrize("wrong", [-1, 13])
@every_model
def test_tokens_outside_the_vocabulary(make, wrong, decode):
    inputs = ragged()
    inputs[1, 1] = wrong
    with pytest.raises(ValueError, match=f"must be numbers from 0 to 1., got {wrong}"):
        decode(make(), inputs, max_new_tokens=2, bos_id=BOS, eos_id=EOS)
    with pytest.raises(ValueError, match="must be numbers from 0 to 10, got 11"):
        decode(make(), ragged() * 0 if make is make_seq2seq else ragged()[:, :0], max_new_tokens=2, bos_id=11, eos_id=EOS)


def test_training_goes_on_after_decoding():
    """Tables of positions that decoding makes are no tensors of inference mode."""
    for positions in POSITIONS:
        model = make_seq2seq(positions=positions)
        greedy(model, ragged(), max_new_tokens=3, bos_id=BOS, eos_id=None)
        model(ragged(), ragged()).square().sum().backward()
