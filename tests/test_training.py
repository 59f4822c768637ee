"""The Trainer: what it learns, and that a step is the step it should be."""

import csv
import math
import random
import re

import pytest
import torch
from sequences import BEGIN, END, PAD, TASKS, assert_equal, endless, examples, parameters, seq2seq
from torch.nn.utils.rnn import pad_sequence

import fast_transformer
from fast_transformer.generation import greedy
from fast_transformer.training import Trainer, cosine, load_weights, noam, teacher_forcing

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),  # torch.nn.Transformer about its own default
]
pytest.importorskip("safetensors")
pytest.importorskip("tqdm")


def quiet(model: torch.nn.Module, optimizer=None, **options) -> Trainer:
    return Trainer(model, optimizer, progress=False, **options)


def sgd(model: torch.nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def log(folder) -> list[dict[str, str]]:
    with open(folder / "log.csv", newline="") as file:
        return list(csv.DictReader(file))


def batch_of(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return examples(n, random.Random(0))


# What it learns.


@pytest.mark.parametrize("task", TASKS)
def test_learns_a_task_to_perfection(task):
    """Every one of 500 sequences drawn from another seed than those of training is written without an error."""
    model = seq2seq(d_model=64, n_heads=4)
    quiet(model, schedule=cosine(700, 50, peak=5e-3)).fit(endless(TASKS[task]), 700)
    source, target = examples(500, random.Random("held out"), TASKS[task])
    written = greedy(model, source, max_new_tokens=target.shape[1], bos_id=BEGIN, eos_id=END).tokens
    assert torch.equal(written, target[:, 1:])


def test_overfits_one_batch():
    losses = quiet(seq2seq(d_model=64), schedule=cosine(100, 20, peak=5e-3)).fit([batch_of(8)], 100)
    assert losses[0] > 2 and losses[-1] < 0.01


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_twins_have_the_loss_curve_of_torch_nn(norm_first):
    curves = []
    for nn in (torch.nn, fast_transformer):
        torch.manual_seed(0)
        model = seq2seq(nn, n_layers=2, norm_first=norm_first).double()
        curves.append(quiet(model, schedule=noam(16, 10, scale=0.1), accumulate=2).fit(endless(n=8), 40))
    # Sums in another order, a few 2^-53 a step; at these rates, 0.008 at most, 40 steps do not blow them up to 1e4 times that.
    # A single float32 on the way would show as 1e-8.
    torch.testing.assert_close(*curves, rtol=1e-12, atol=0)
    assert curves[0][-1] < 0.9 * curves[0][0]


def test_a_language_model_and_an_objective_of_the_user():
    class Bigram(torch.nn.Module):
        pad_id = PAD

        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(13, 13)

        def forward(self, tokens):
            return self.table(tokens)

    tokens = torch.arange(3, 11).repeat(4, 1)
    assert quiet(Bigram()).fit([(tokens,)], 3)[-1] > 1
    assert quiet(Bigram(), sgd(Bigram())).fit([(tokens,)], 1)  # (the default loss, another optimizer)

    def even(model, batch):  # is the sum of two tokens even? one decision a sequence
        logits = model(batch[0]).sum(1)[:, :2]
        return torch.nn.functional.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])

    pairs = torch.randint(3, 13, (64, 2))
    assert quiet(Bigram(), schedule=cosine(300, peak=0.1), loss=even).fit([(pairs, pairs.sum(1) % 2)], 300)[-1] < 0.7


# What a step is.


def split(source: torch.Tensor, target: torch.Tensor, *sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches, each padded no longer than it has to be."""

    def trim(rows):
        return pad_sequence([row[row != PAD] for row in rows], batch_first=True, padding_value=PAD)

    return [(trim(s), trim(t)) for s, t in zip(source.split(sizes), target.split(sizes), strict=True)]


def test_accumulation_makes_the_step_of_the_large_batch():
    source, target = batch_of(12)
    order = target.ne(PAD).sum(1).argsort()  # the first micro-batches are the short ones
    parts = split(source[order], target[order], 2, 3, 6, 1)
    assert len({part[1].ne(PAD).sum(1).double().mean().item() for part in parts}) == 4
    results = []
    for batches in ([(source, target)], parts):
        torch.manual_seed(0)
        model = seq2seq().double()
        losses = quiet(model, sgd(model), loss=teacher_forcing(PAD, 0.1), clip_norm=0.5, accumulate=len(batches)).fit(
            batches, 2
        )
        results.append([torch.tensor(losses, dtype=torch.float64), *parameters(model)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)  # float64 sums in another order, twice


def test_clipping_limits_the_step_and_logs_the_norm_before(tmp_path):
    model = seq2seq().double()
    before = parameters(model)
    quiet(model, sgd(model, 0.5), clip_norm=0.01, folder=tmp_path / "clipped").fit([batch_of(4)], 1)
    moved = torch.cat([(a - b).flatten() for a, b in zip(parameters(model), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5 * 0.01, rel=1e-3)  # clip_grad_norm_ adds 1e-6 to the norm it divides by
    assert float(log(tmp_path / "clipped")[0]["grad_norm"]) > 0.1
    free = seq2seq().double()
    free.load_state_dict(dict(zip((n for n, _ in free.named_parameters()), before, strict=True)))
    quiet(free, sgd(free, 0.5), clip_norm=None).fit([batch_of(4)], 1)
    unclipped = torch.cat([(a - b).flatten() for a, b in zip(parameters(free), before, strict=True)])
    assert unclipped.norm().item() == pytest.approx(0.5 * float(log(tmp_path / "clipped")[0]["grad_norm"]))


def test_the_schedule_starts_with_its_first_value_and_multiplies_every_rate(tmp_path):
    model = seq2seq()
    groups = [{"params": model.source.parameters(), "lr": 3.0}, {"params": model.head.parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups)
    quiet(model, optimizer, schedule=noam(64, 3), folder=tmp_path).fit([batch_of(2)], 5)
    assert [float(row["learning_rate"]) for row in log(tmp_path)] == [3.0 * noam(64, 3)(step) for step in range(5)]
    assert optimizer.param_groups[1]["lr"] == noam(64, 3)(4)


def test_autocast_computes_in_bfloat16_and_keeps_the_parameters():
    model, dtypes = seq2seq(), set()
    model.head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    quiet(model, autocast=True).fit(endless(n=4), 2, validation=[batch_of(2)])
    assert dtypes == {torch.bfloat16} and {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("nn", [fast_transformer, torch.nn], ids=["twins", "torch.nn"])
def test_activation_checkpointing_changes_no_bit(nn, autocast):
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        model, calls = seq2seq(nn, n_layers=2, dropout=0.3), []
        names = list(model.state_dict())
        model.transformer.decoder.layers[1].linear1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        trainer = quiet(model, activation_checkpointing=on, autocast=autocast, accumulate=2)
        losses = trainer.fit(endless(n=4), 4, validation=[batch_of(2)])
        assert len(calls) == 4 * 2 * (1 + on) + 1  # every micro-batch, and once more for its backward pass; the validation
        assert not any("forward" in vars(module) for module in model.modules())
        assert list(model.state_dict()) == names
        results.append((losses, parameters(model)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_of_padding_alone_is_a_loss_of_zero(accumulate):
    source, target = batch_of(4)
    empty = (source, torch.full_like(target, PAD).index_fill(1, torch.tensor(0), BEGIN))
    model = seq2seq(dropout=0.1)
    losses = quiet(model, sgd(model), accumulate=accumulate).fit([empty, (source, target)], 4 // accumulate)
    assert (losses[0] == 0) == (accumulate == 1) and all(map(math.isfinite, losses))
    assert all(p.isfinite().all() for p in model.parameters())


def test_sources_of_padding_alone_are_no_nan():
    source, target = batch_of(4)
    source[1] = PAD
    assert math.isfinite(quiet(seq2seq()).fit([(source, target)], 3)[-1])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_before_the_step(where, tmp_path):
    model, calls = seq2seq(), []

    def loss(model, batch):
        total, count = teacher_forcing(PAD)(model, batch)
        calls.append(1)
        if len(calls) == 3:
            total = total * math.nan if where == "loss" else total + (model.head.weight * 0).sum().sqrt()  # d sqrt(0) = inf * 0
        return total, count

    trainer = quiet(model, loss=loss, folder=tmp_path)
    with pytest.raises(FloatingPointError, match=r"step 3 \(learning rate 0.001\) has loss .*nan.*not made. Likely causes: "):
        trainer.fit(endless(n=2), 5, every=2)
    assert trainer.step == 2 and len(log(tmp_path)) == 2
    saved = seq2seq()
    load_weights(saved, tmp_path / "last" / "model.safetensors")
    assert_equal(parameters(model), parameters(saved))


def test_a_validation_loss_that_is_not_finite_stops():
    def loss(model, batch):
        total, count = teacher_forcing(PAD)(model, batch)
        return (total if model.training else total * math.inf), count

    with pytest.raises(FloatingPointError, match="validation loss after step 2 is inf"):
        quiet(seq2seq(), loss=loss).fit(endless(n=2), 5, validation=[batch_of(2)], every=2)


# Validation, best, early stopping, the log.


def test_evaluate_is_the_mean_over_tokens_and_leaves_everything_as_it_was():
    model = seq2seq(dropout=0.5)
    model.transformer.encoder.eval()
    modes = [module.training for module in model.modules()]
    parts, trainer = split(*batch_of(9), 1, 8), quiet(model)
    state = torch.get_rng_state()
    together, apart = trainer.evaluate([batch_of(9)]), trainer.evaluate(torch.utils.data.DataLoader(parts, batch_size=None))
    assert together == pytest.approx(apart, rel=1e-6) == trainer.evaluate(parts)
    assert torch.equal(torch.get_rng_state(), state)
    trainer.fit(parts, 2)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ValueError, match="validation must hold at least one token"):
        trainer.evaluate([])
    model.eval()
    trainer.fit(parts, 3)
    assert model.training and model.transformer.encoder.training


def test_best_is_the_checkpoint_of_the_lowest_validation_loss(tmp_path):
    model, validation = seq2seq(), [examples(8, random.Random(1))]
    trainer = quiet(model, schedule=cosine(60, peak=0.05, end=0.05), folder=tmp_path, clip_norm=None)
    trainer.fit([batch_of(8)], 60, validation=validation, every=3)  # overfits
    scores = [float(row["validation_loss"]) for row in log(tmp_path) if row["validation_loss"]]
    assert len(scores) == 20 and min(scores) < scores[-1]
    assert trainer.best == min(scores)
    assert trainer.resume("best") and trainer.step == 3 * (1 + scores.index(min(scores)))
    assert trainer.evaluate(validation) == min(scores)


def test_patience(tmp_path):
    model = seq2seq()
    trainer = quiet(model, sgd(model, 0.0), folder=tmp_path)  # a rate of 0: no validation is better than the first
    assert len(trainer.fit(endless(n=2), 100, validation=[batch_of(2)], every=3, patience=4)) == 3 * (1 + 4)
    resumed = quiet(model, sgd(model, 0.0), folder=tmp_path)
    assert resumed.resume() and resumed.step == 15
    assert resumed.fit(endless(n=2), 100, validation=[batch_of(2)], every=3, patience=4) == []


def test_the_log(tmp_path):
    model = seq2seq()
    batches = split(*batch_of(6), 2, 4)
    losses = quiet(model, schedule=noam(16, 5), folder=tmp_path).fit(batches, 5, validation=batches, every=2)
    rows = log(tmp_path)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    assert [int(row["epoch"]) for row in rows] == [0, 0, 1, 1, 2]
    assert [float(row["loss"]) for row in rows] == losses  # every digit
    assert [int(row["tokens"]) for row in rows] == [int(batches[i % 2][1][:, 1:].ne(PAD).sum()) for i in range(5)]
    assert [bool(row["validation_loss"]) for row in rows] == [False, True, False, True, True]
    assert all(float(row["tokens_per_second"]) > 0 and float(row["grad_norm"]) > 0 for row in rows)


def test_the_progress_bar_shows_loss_and_speed(capsys):
    Trainer(seq2seq()).fit(endless(n=2), 3, validation=[batch_of(2)])
    shown = capsys.readouterr().err
    assert "3/3" in shown and re.search(r"loss \d.*tokens/s, best validation \d", shown)


# Arguments that do not fit.


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"accumulate": 0}, ValueError, "accumulate must be at least 1, got 0"),
        ({"accumulate": 1.5}, TypeError, "accumulate must be an integer, got 1.5"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm must be greater than 0, or None"),
        ({"clip_norm": math.nan}, ValueError, "clip_norm must be greater than 0, or None"),
        ({"schedule": 0.1}, TypeError, "schedule must be a function of the number of steps made, got float"),
        ({"model": torch.nn.Linear(2, 2)}, TypeError, "loss must be given for a model without pad_id"),
        (
            {"model": torch.nn.Linear(2, 2), "loss": teacher_forcing(), "activation_checkpointing": True},
            ValueError,
            "activation_checkpointing needs a TransformerEncoderLayer",
        ),
    ],
)
def test_bad_options(options, error, text):
    with pytest.raises(error, match=text):
        Trainer(**({"model": seq2seq()} | options))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"every": True}, TypeError, "every must be an integer, got True"),
        ({"patience": 0, "validation": [batch_of(2)]}, ValueError, "patience must be at least 1"),
        ({"patience": 3}, ValueError, "patience needs validation batches"),
        ({"batches": []}, ValueError, "at least one batch an epoch, got none in epoch 0"),
        ({"batches": iter([batch_of(2)])}, TypeError, "iterable anew for every epoch"),
        ({"validation": iter([batch_of(2)])}, TypeError, "validation must be iterable anew"),
        ({"batches": batch_of(2)}, TypeError, r"a batch must be a tuple of tensors.*\(tokens,\), got a Tensor"),
        ({"batches": [{"source": batch_of(2)[0]}]}, TypeError, "a batch must be a tuple of tensors.*got a dict"),
        (
            {"batches": [(torch.tensor([[3, 99]]), torch.tensor([[BEGIN, END]]))]},
            ValueError,
            "source must be numbers from 0 to 12, got 99",
        ),
        ({"batches": [(torch.tensor([[3, 4]]), torch.tensor([[BEGIN, 99]]))]}, ValueError, r"tokens in \[0, 13\).*got 99"),
    ],
)
def test_bad_arguments_of_fit(options, error, text):
    with pytest.raises(error, match=text):
        quiet(seq2seq()).fit(**({"batches": endless(n=2), "steps": 2} | options))


def test_a_loss_must_return_a_sum_and_a_count():
    with pytest.raises(TypeError, match=r"loss must return \(sum of losses, number of tokens\), got a?\s?Tensor"):
        quiet(seq2seq(), loss=lambda model, batch: model(*batch).sum()).fit(endless(n=2), 1)


@pytest.mark.parametrize("rate", [math.inf, math.nan])
def test_a_rate_that_is_not_finite_stops_before_the_step(rate):
    model = seq2seq()
    before = parameters(model)
    with pytest.raises(FloatingPointError, match="step 1"):
        quiet(model, schedule=lambda step: rate).fit(endless(n=2), 2)
    assert_equal(parameters(model), before)
