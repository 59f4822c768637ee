"""Interrupted training goes on as if nothing had happened: after a stop, a crash and Ctrl-C, in every kind of data."""

import csv
import random
import signal
import threading

import numpy as np
import pytest
import torch
from sequences import assert_equal, endless, examples, parameters, seq2seq
from torch.utils.data import DataLoader, TensorDataset

from fast_transformer.training import Trainer, noam, teacher_forcing

pytest.importorskip("safetensors")
pytestmark = pytest.mark.usefixtures("one_thread")

DATASET = TensorDataset(*examples(24, random.Random(0)))  # 6 batches of 4 an epoch


class Drawn:
    """An epoch of 7 batches that are drawn from the global generators, one by one."""

    def __iter__(self):
        for _ in range(7):
            yield torch.randint(3, 13, (4, 5)), torch.randint(3, 13, (4, random.randint(4, 8)))


DATA = {
    "list": lambda: [examples(4, random.Random(n)) for n in range(7)],
    "function": lambda: endless(n=4),
    "epochs": lambda: lambda epoch: (examples(4, random.Random(7 * epoch + n)) for n in range(7)),
    "loader": lambda: DataLoader(DATASET, batch_size=4, shuffle=True),
    "loader-generator": lambda: DataLoader(DATASET, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "drawn": Drawn,
}
VALIDATION = DataLoader(DATASET, batch_size=12, shuffle=True)  # takes numbers from the global generator


def start(folder, seed: int = 0, **options) -> Trainer:
    """As in a new process; another seed gives other weights and another state of the generators, all to be overwritten."""
    torch.manual_seed(seed)
    random.seed(seed)
    loss = teacher_forcing(pad_id=0, label_smoothing=0.1)
    settings = {"schedule": noam(16, 8), "loss": loss, "accumulate": 2, "autocast": True} | options
    return Trainer(seq2seq(dropout=0.2), folder=folder, progress=False, **settings)


def log(folder) -> list[dict[str, str]]:
    with open(folder / "log.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in csv.DictReader(file)]


def assert_same_run(got: Trainer, want: Trainer) -> None:
    assert got.step == want.step
    assert_equal(parameters(got.model), parameters(want.model))
    for a, b in zip(got.optimizer.state.values(), want.optimizer.state.values(), strict=True):
        assert_equal(list(a.values()), list(b.values()))


@pytest.mark.parametrize("activation_checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("data", DATA)
def test_resuming_gives_the_same_losses_bit_for_bit(data, activation_checkpointing, tmp_path):
    options, settings = {"activation_checkpointing": activation_checkpointing}, {"validation": VALIDATION, "every": 4}
    straight = start(tmp_path / "straight", **options)
    losses = straight.fit(DATA[data](), 20, **settings)
    assert len(set(losses)) == 20

    first = start(tmp_path / "parts", **options).fit(DATA[data](), 10, **settings)
    resumed = start(tmp_path / "parts", seed=1, **options)
    assert resumed.resume()
    torch.rand(5)  # what happens before fit() does not matter
    assert first + resumed.fit(DATA[data](), 20, **settings) == losses
    assert_same_run(resumed, straight)
    rows = log(tmp_path / "parts")
    assert rows[9]["validation_loss"]  # in addition: step 10 was the last one of a call
    rows[9]["validation_loss"] = ""
    assert rows == log(tmp_path / "straight")


@pytest.mark.parametrize("data", DATA)
def test_fit_can_be_called_again(data, tmp_path):
    straight, parts = start(None), None
    batches = DATA[data]()
    losses = straight.fit(batches, 9)
    parts, batches = start(None), DATA[data]()
    assert [loss for steps in (2, 3, 7, 9) for loss in parts.fit(batches, steps)] == losses
    assert_same_run(parts, straight)


class Crash(Exception):
    pass


def at(step: int, action, accumulate: int = 2):
    """endless(4), and the action while the batches of that step are drawn."""

    def batches(epoch):
        for n, batch in enumerate(endless(n=4)(epoch)):
            if n == accumulate * (step - 1):
                action()
            yield batch

    return batches


def test_after_a_crash_no_step_is_missing_and_none_is_logged_twice(tmp_path):
    straight = start(tmp_path / "straight")
    straight.fit(endless(n=4), 12, every=5)

    def crash():
        raise Crash

    with pytest.raises(Crash):
        start(tmp_path / "crashed").fit(at(9, crash), 12, every=5)
    path = tmp_path / "crashed" / "log.csv"
    assert [row["step"] for row in log(path.parent)] == [str(n) for n in range(1, 9)]
    with open(path, "a") as file:
        file.write("2,0,1.")  # a line that was cut short
    resumed = start(path.parent, seed=1)
    assert resumed.resume() and resumed.step == 5
    resumed.fit(endless(n=4), 12, every=5)
    assert_same_run(resumed, straight)
    assert log(path.parent) == log(tmp_path / "straight")


@pytest.mark.parametrize("step", [1, 3, 6], ids="step-{}".format)
def test_ctrl_c_finishes_the_step_saves_and_stops(step, tmp_path):
    straight = start(tmp_path / "straight")
    straight.fit(endless(n=4), 6)

    def handler(*_):
        raise AssertionError("not to be called")

    previous = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt, match=rf"stopped after step {step}, saved in \S+last$"):
            start(tmp_path / "stopped").fit(at(step, lambda: signal.raise_signal(signal.SIGINT)), 6)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)
    resumed = start(tmp_path / "stopped", seed=1)
    assert resumed.resume() and resumed.step == step
    resumed.fit(endless(n=4), 6)
    assert_same_run(resumed, straight)


def test_a_second_ctrl_c_interrupts_at_once(tmp_path):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    handler, trainer = signal.default_int_handler, start(tmp_path)
    previous = signal.signal(signal.SIGINT, handler)  # which a job in the background begins with ignoring
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(at(3, twice), 6)
        assert trainer.step == 2 and signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_ignored_sigint_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert len(start(None).fit(at(2, lambda: signal.raise_signal(signal.SIGINT)), 4)) == 4
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_trains_in_another_thread():
    losses, previous = [], signal.getsignal(signal.SIGINT)
    trainer = start(None)
    thread = threading.Thread(target=lambda: losses.extend(trainer.fit(endless(n=4), 2)))
    thread.start()
    thread.join()
    assert len(losses) == 2 and signal.getsignal(signal.SIGINT) is previous


def test_other_data_than_before_is_found_out(tmp_path):
    batches = DATA["list"]()
    start(tmp_path).fit(batches, 3)
    resumed = start(tmp_path)
    resumed.resume()
    with pytest.raises(ValueError, match="batches must be those of the run that is resumed: epoch 0 had 6 or more"):
        resumed.fit(batches[:5], 4)


def test_rates_of_numpy_can_be_resumed(tmp_path):
    for schedule in (None, lambda step: np.float64(1e-3) * np.cos(step / 100)):
        folder = tmp_path / str(schedule is None)

        def trainer(schedule=schedule, folder=folder):
            model = seq2seq()
            optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(1e-3))
            return Trainer(model, optimizer, schedule=schedule, folder=folder, progress=False)

        trainer().fit(endless(n=2), 2)
        again = trainer()
        assert again.resume() and again.step == 2
