"""RNNSeq2Seq: against its papers' formulas written with torch.nn's cells, step by step, padded, at its limits, and learning."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from twins import CLOSE, randomise

from fast_transformer.generation import beam_search, greedy
from fast_transformer.models import RNNSeq2Seq
from fast_transformer.models.rnn import ATTENTIONS, CELLS

pytestmark = pytest.mark.usefixtures("one_thread")

PAD, BOS, SOURCE, TARGET, H = 0, 1, 13, 11, 6
each_attention = pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
each_cell = pytest.mark.parametrize("cell", CELLS)


def make(**options) -> RNNSeq2Seq:
    sizes = {"d_model": 5, "hidden_size": H, "n_layers": 2, "dropout": 0.0}
    return randomise(RNNSeq2Seq(SOURCE, TARGET, **(sizes | options))).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Source (3, 7) with 0, 3 and 1 padding tokens at the right, target (3, 5)."""
    source, target = torch.randint(2, SOURCE, (3, 7)), torch.randint(2, TARGET, (3, 5))
    source[1, 4:] = source[2, 6:] = PAD
    return source, target


class Cells:
    """The decoder as a torch.nn cell for each layer, with their states (1, H)."""

    def __init__(self, rnn, hidden):
        self.kind = nn.GRUCell if rnn.mode == "GRU" else nn.LSTMCell
        self.states = [tuple(h[layer] for h in hidden) for layer in range(rnn.num_layers)]
        self.parameters = [
            {name: getattr(rnn, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
            for layer in range(rnn.num_layers)
        ]

    def read(self, x):
        for layer, parameters in enumerate(self.parameters):
            cell, state = self.kind(x.shape[1], H), self.states[layer]
            state = functional_call(cell, parameters, (x, state if len(state) == 2 else state[0]))
            self.states[layer] = state if isinstance(state, tuple) else (state,)
            x = self.states[layer][0]
        return x

    @property
    def top(self):
        return self.states[-1][0]


def score(model: RNNSeq2Seq, state: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """(S,): how well the decoder's state (1, H) fits each of the encoder's (S, H)."""
    attention = model.attention
    kind = getattr(attention, "score", "additive")
    if kind == "dot":
        return memory @ state[0]
    if kind == "general":
        return attention.key_projection(memory) @ state[0]
    attention = attention.additive if kind == "concat" else attention
    return (attention.query_projection(state) + attention.key_projection(memory)).tanh() @ attention.weight


def by_hand(model: RNNSeq2Seq, attention: str | None, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Logits (L, TARGET) for one sentence (S,) without padding: the formulas of the papers, a token at a time."""
    memory, hidden = model.encoder(model.source(source[None]))
    hidden = hidden if isinstance(hidden, tuple) else (hidden,)
    if attention is not None:  # both directions side by side
        hidden = [torch.stack([torch.cat((h[2 * i], h[2 * i + 1]), dim=-1) for i in range(model.n_layers)]) for h in hidden]
    decoder, memory, logits = Cells(model.decoder, hidden), memory[0], []
    for token in target:
        x = model.target(token.view(1, 1))[0]  # (1, d_model)
        if attention is None:
            context = memory[-1:]
        if attention == "bahdanau":
            context = score(model, decoder.top, memory).softmax(0) @ memory
        output = decoder.read(torch.cat((x, context.view(1, H)), dim=-1) if attention in (None, "bahdanau") else x)
        if attention is not None and attention != "bahdanau":
            context = score(model, output, memory).softmax(0) @ memory
        attentional = torch.tanh(torch.cat((output, context.view(1, H)), dim=-1) @ model.readout.weight.T)
        logits.append(model.head(attentional)[0])
    return torch.stack(logits)


@each_cell
@each_attention
@pytest.mark.parametrize("n_layers", [1, 2])
def test_equals_the_formulas_with_and_without_padding(attention, cell, n_layers):
    model, (source, target) = make(attention=attention, cell=cell, n_layers=n_layers), batch()
    expected = torch.stack([by_hand(model, attention, source[row, :n], target[row]) for row, n in enumerate([7, 4, 6])])
    got, grad = model(source, target), torch.randn_like(expected)
    torch.testing.assert_close(got, expected, **CLOSE)
    parameters = dict(model.named_parameters())
    got, expected = (torch.autograd.grad(x, parameters.values(), grad) for x in (got, expected))
    for name, a, b in zip(parameters, got, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE, msg=lambda m, n=name: f"gradient of {n}: {m}")


@each_attention
def test_padding_may_stand_anywhere(attention):
    model, (source, target) = make(attention=attention), batch()
    expected = model(source, target)
    moved = source.clone()
    moved[1] = torch.cat((source[1, 4:], source[1, :4]))
    moved[2] = torch.cat((source[2, :2], source[2, 6:], source[2, 2:6]))
    assert moved[1, 0] == moved[2, 2] == PAD
    torch.testing.assert_close(model(moved, target), expected, **CLOSE)
    wider = F.pad(source, (2, 5), value=PAD)
    torch.testing.assert_close(model(wider, target), expected, **CLOSE)


@each_cell
@each_attention
def test_steps_equal_forward(attention, cell):
    model, (source, target) = make(attention=attention, cell=cell), batch()
    tokens, state = model.begin(source, bos_id=BOS)
    assert tokens.tolist() == [[BOS]] * 3
    target = torch.cat((tokens, target), dim=1)
    expected = model(source, target)
    for start, stop in [(0, 1), (1, 2), (2, 5), (5, 6)]:  # one token, or several at once
        torch.testing.assert_close(model.step(target[:, start:stop], state), expected[:, stop - 1], **CLOSE)


@each_cell
@each_attention
def test_beams_go_on_from_the_rows_they_came_from(attention, cell):
    model, (source, _) = make(attention=attention, cell=cell), batch()
    tokens, state = model.begin(source, bos_id=BOS)
    model.step(tokens, state)
    read = tokens
    for rows in (torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([1, 0, 3, 3, 4, 5])):  # two beams a sentence
        state.reorder(rows)
        new = torch.randint(2, TARGET, (6, 2))
        read = torch.cat((read[rows], new), dim=1)
        logits = model.step(new, state)
        expected = model(source.repeat_interleave(2, dim=0), read)[:, -1]
        torch.testing.assert_close(logits, expected, **CLOSE)
    assert len(state.memory) == 3  # never copied for the beams


@each_cell
@each_attention
def test_decodes_alike_with_and_without_its_state(attention, cell):
    model, (source, _) = make(attention=attention, cell=cell), batch()
    limits = {"max_new_tokens": 6, "bos_id": BOS, "eos_id": 2}
    for decode in (greedy, partial(beam_search, beams=3, n_best=2)):
        got, expected = (decode(model, source, cache=cache, **limits) for cache in (True, False))
        assert torch.equal(got.tokens, expected.tokens)
        torch.testing.assert_close(got.scores, expected.scores, **CLOSE)


@pytest.mark.parametrize("attention", ATTENTIONS[1:])
def test_weights_can_be_taken_down_and_are_zero_at_padding(attention):
    model, (source, target) = make(attention=attention), batch()
    taken = []
    hook = model.attention.register_forward_hook(lambda module, args, result: taken.append(result))
    model(source, target)
    hook.remove()
    assert len(taken) == (5 if attention == "bahdanau" else 1)
    contexts, weights = (torch.cat(parts, dim=1) for parts in zip(*taken, strict=True))
    assert contexts.shape == (3, 5, H) and weights.shape == (3, 5, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 5, dtype=torch.float64), **CLOSE)
    seen = (source != PAD)[:, None].expand_as(weights)
    assert (weights[seen] > 0).all() and not weights[~seen].any()


@each_attention
def test_a_decoder_sees_no_later_token(attention):
    model, (source, target) = make(attention=attention), batch()
    before = model(source, target)
    target[:, 3] = (target[:, 3] - 1) % 9 + 2
    changed = (model(source, target) != before).any(-1)
    assert changed.tolist() == [[False] * 3 + [True] * 2] * 3


@each_cell
@each_attention
def test_gradients_reach_every_parameter_and_nothing_but_padding_is_finite(attention, cell):
    model, (source, target) = make(attention=attention, cell=cell), batch()
    source[1] = PAD
    logits = model(source, target)
    logits.square().sum().backward()
    assert logits.isfinite().all()
    assert [name for name, p in model.named_parameters() if not (p.grad.isfinite().all() and p.grad.any())] == []
    torch.testing.assert_close(logits[1], model(source[:1, :0], target[1:2])[0], **CLOSE)  # a source without tokens


@each_attention
def test_empty_batches(attention):
    model, (source, target) = make(attention=attention), batch()
    assert model(source[:0], target[:0]).shape == (0, 5, TARGET)
    assert model(source, target[:, :0]).shape == (3, 0, TARGET)
    tokens, state = model.begin(source[:0], bos_id=BOS)
    assert model.step(tokens, state).shape == (0, TARGET)


@each_attention
def test_state_dict_is_complete(attention):
    model, other = make(attention=attention), RNNSeq2Seq(SOURCE, TARGET, 5, H, 2, attention=attention, dropout=0.0).double()
    other.load_state_dict(model.state_dict())
    source, target = batch()
    assert torch.equal(model(source, target), other(source, target))


def test_dropout_acts_in_training_only():
    model, (source, target) = make(attention="bahdanau", dropout=0.5), batch()
    assert not torch.equal(model(source, target), model(source, target))
    model.eval()
    torch.testing.assert_close(model(source, target), make(attention="bahdanau").eval()(source, target), **CLOSE)


def test_compiles():
    """In more than one graph: torch.compile leaves recurrent layers as they are."""
    model, (source, target) = make(attention="luong_general"), batch()
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(source, target), model(source, target), **CLOSE)


@pytest.mark.parametrize("attention", ["bahdanau", "luong_dot"])
def test_runs_in_bfloat16_autocast(attention):
    model, (source, target) = make(attention=attention).float(), batch()
    exact = model(source, target)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(source, target)
    logits.float().sum().backward()
    # Logits of size 1; each is a sum of 6 products of numbers below 1, each rounded to 2^-8, on states that were rounded, too.
    assert (logits - exact).abs().max() < 16 * 2**-8
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("cell, attention", [("gru", "bahdanau"), ("lstm", "luong_general")])
def test_learns_to_copy(cell, attention):
    model = RNNSeq2Seq(8, 8, 32, 64, cell=cell, attention=attention, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=200)
    for _ in range(200):
        source = torch.randint(2, 8, (64, 5))
        target = F.pad(source, (1, 0), value=BOS)[:, :-1]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(source, target).flatten(0, 1), source.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
    tokens, state = model.begin(source, bos_id=BOS)
    written = []
    with torch.no_grad():
        for _ in range(5):
            tokens = model.step(tokens, state).argmax(-1, keepdim=True)
            written.append(tokens)
    assert torch.equal(torch.cat(written, dim=1), source), f"loss {loss}"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cell": "rnn"}, "cell must be one of 'gru', 'lstm', got 'rnn'"),
        ({"attention": "dot"}, "attention must be one of None, 'bahdanau', .* got 'dot'"),
        ({"attention": "bahdanau", "hidden_size": 7}, "hidden_size must be even with attention, .* got 7"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"n_layers": 0}, "n_layers"),
        ({"d_model": 0}, "d_model"),
        ({"pad_id": TARGET}, "pad_id must be a token of both vocabularies, of 13 and 11, got 11"),
        ({"pad_id": -1}, "pad_id"),
        ({"dropout": 1.5}, "dropout"),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_wrong_tokens():
    model, (source, target) = make(attention="bahdanau"), batch()
    for error, message, inputs in [
        (ValueError, "source must be numbers from 0 to 12, got 13", (source.clamp(min=13), target)),
        (ValueError, "target must be numbers from 0 to 10, got -1", (source, target * 0 - 1)),
        (TypeError, "source must be an integer tensor", (source.double(), target)),
        (ValueError, "target must have 2 dimensions", (source, target[0])),
        (ValueError, "target must have 3 rows, .* got 2", (source, target[:2])),
    ]:
        with pytest.raises(error, match=message):
            model(*inputs)
    _, state = model.begin(source, bos_id=BOS)
    with pytest.raises(ValueError, match="tokens must have 3 rows, .* got 6"):
        model.step(target.repeat(2, 1), state)
    with pytest.raises(ValueError, match="tokens must be numbers from 0 to 10, got 11"):
        model.step(target[:, :1] * 0 + 11, state)
