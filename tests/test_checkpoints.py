"""Checkpoints: nothing is lost whenever writing stops, damage is found, and only what fits is read."""

import os
import shutil
import sys

import pytest
import torch
from sequences import assert_equal, endless, parameters, seq2seq

pytest.importorskip("safetensors")
pytestmark = pytest.mark.usefixtures("one_thread")

import safetensors.torch  # noqa: E402

from fast_transformer.training import (  # noqa: E402
    Trainer,
    checkpoints,  # noqa: E402
    load_weights,
    save_weights,
)


def trainer(folder, **options) -> Trainer:
    return Trainer(seq2seq(**options), folder=folder, progress=False)


@pytest.fixture
def run(tmp_path):
    """A trainer after 2 steps, with a checkpoint of each."""
    run = trainer(tmp_path)
    run.fit(endless(n=2), 2, every=1)
    return run


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5)
        self.head.weight = self.embedding.weight


def test_weights_come_back_bit_for_bit_and_ties_stay(tmp_path):
    model, other = Tied(), Tied()
    save_weights(model, tmp_path / "a.safetensors")
    load_weights(other, tmp_path / "a.safetensors")
    assert_equal(parameters(other), parameters(model))
    assert other.head.weight is other.embedding.weight
    assert set(safetensors.torch.load_file(tmp_path / "a.safetensors")) == {"embedding.weight", "head.bias"}


def test_files_are_those_of_safetensors(tmp_path):
    model, read, written = Tied(), Tied(), Tied()
    save_weights(model, tmp_path / "ours.safetensors")
    safetensors.torch.load_model(read, tmp_path / "ours.safetensors")
    safetensors.torch.save_model(model, tmp_path / "theirs.safetensors")
    load_weights(written, tmp_path / "theirs.safetensors")
    assert_equal(parameters(read), parameters(model))
    assert_equal(parameters(written), parameters(model))


def test_a_compiled_model_writes_the_same_names(tmp_path):
    model = Tied()
    save_weights(torch.compile(model, backend="eager"), tmp_path / "a.safetensors")
    load_weights(Tied(), tmp_path / "a.safetensors")
    load_weights(torch.compile(Tied(), backend="eager"), tmp_path / "a.safetensors")


def test_another_model_is_named_by_its_parameters_and_nothing_is_read(run, tmp_path):
    other = trainer(tmp_path, d_model=8)
    before = parameters(other.model)
    with pytest.raises(
        ValueError, match=r"another model: .*source.tokens.weight is \(13, 16\) in the file, \(13, 8\) in the model"
    ):
        other.resume()
    deeper = trainer(tmp_path, n_layers=2)
    with pytest.raises(ValueError, match=r"transformer.decoder.layers.1.\S+ is only in the model.*; and \d+ more"):
        deeper.resume()
    assert_equal(parameters(other.model), before)
    assert other.step == deeper.step == 0 and not other.optimizer.state_dict()["state"]


def test_tied_and_untied_are_different_models(tmp_path):
    untied = Tied()
    untied.head.weight = torch.nn.Parameter(untied.head.weight.detach().clone())
    save_weights(untied, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="head.weight is only in the file"):
        load_weights(Tied(), tmp_path / "a.safetensors")
    save_weights(Tied(), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="head.weight is only in the model"):
        load_weights(untied, tmp_path / "a.safetensors")


def test_another_optimizer_is_named(run, tmp_path):
    model = seq2seq()
    other = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path, progress=False)
    with pytest.raises(ValueError, match="last needs the optimizer AdamW, got SGD"):
        other.resume()
    assert other.step == 0


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_there(run, tmp_path, name):
    path = tmp_path / "last" / name
    whole, resumed = path.read_bytes(), trainer(tmp_path)
    before = parameters(resumed.model)
    middle = len(whole) // 2
    flipped = bytes(b ^ 1 if middle <= i < middle + 256 else b for i, b in enumerate(whole))  # more than torch.save pads with
    cuts = [whole[:size] for size in (0, 1, 7, 8, 9, 100, middle, len(whole) - 1)]
    for damaged in (*cuts, flipped):
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=rf"last/{name} is damaged .*; the checkpoint before it is \S+last.previous$"):
            resumed.resume()
    path.unlink()
    with pytest.raises(RuntimeError, match=rf"last/{name} is damaged or incomplete"):
        resumed.resume()
    assert_equal(parameters(resumed.model), before)
    assert resumed.step == 0 and not resumed.optimizer.state_dict()["state"]
    assert resumed.resume("last.previous") and resumed.step == 1


def test_damaged_weights_alone(tmp_path):
    path = tmp_path / "a.safetensors"
    save_weights(Tied(), path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(RuntimeError, match="a.safetensors is damaged"):
        load_weights(Tied(), path)
    with pytest.raises(FileNotFoundError, match="b.safetensors"):
        load_weights(Tied(), tmp_path / "b.safetensors")


def test_files_of_two_checkpoints_do_not_mix(run, tmp_path):
    shutil.copy(tmp_path / "last.previous" / "model.safetensors", tmp_path / "last")
    with pytest.raises(RuntimeError, match="model.safetensors is damaged .*not what was written together with state.pt"):
        trainer(tmp_path).resume()


@pytest.mark.parametrize(
    ("module", "name"),
    [(checkpoints, "save_weights"), (torch, "save"), (checkpoints, "_flush"), (os, "replace"), (shutil, "rmtree")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_writing_may_stop_anywhere(run, tmp_path, monkeypatch, module, name):
    """Stops at the first call, the second, ...; what is then on the disk is the old checkpoint or the new one, whole."""
    original, stops = getattr(module, name), 0
    while True:
        calls = 0

        def stop(*args, nth=stops, **options):
            nonlocal calls
            calls += 1
            if calls > nth:
                raise OSError("the machine has stopped")
            return original(*args, **options)

        run.step += 1
        try:
            with monkeypatch.context() as patch:
                patch.setattr(module, name, stop)
                run.save()
        except OSError:
            stops += 1
        else:
            break
        resumed = trainer(tmp_path)
        assert resumed.resume() and resumed.step in (run.step - 1, run.step)
        assert_equal(parameters(resumed.model), parameters(run.model))
        run.step = resumed.step
    assert stops > 0
    assert trainer(tmp_path).resume()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "last.previous", "log.csv"]


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path):
    assert not trainer(tmp_path / "new").resume()
    with pytest.raises(ValueError, match="resume needs a folder"):
        trainer(None).resume()


def test_a_run_is_not_overwritten_by_accident(run, tmp_path):
    with pytest.raises(FileExistsError, match="holds a run: call resume"):
        trainer(tmp_path).fit(endless(n=2), 4)


@pytest.mark.parametrize("package", ["safetensors", "tqdm"])
def test_a_missing_package_is_named_with_its_extra(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'{package}: pip install "fast-transformer-kernels\[train\]"'):
        Trainer(seq2seq(), folder=tmp_path)
