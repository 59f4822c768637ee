"""A Trainer that takes up an interrupted run as if it had never stopped.

A batch is a tuple of tensors. By default the last one is the target (B, L + 1) with its begin token and the others are inputs
of the model: (source, target) trains an encoder-decoder, (tokens,) a language model. Another objective is another `loss`.

A step divides the sum over all tokens of its micro-batches once by their number: a mean of means would weigh the tokens of
short sequences more. Resuming is exact because a checkpoint holds, besides weights and optimizer, the state of the random
generators now *and* at the start of the epoch: from there the same shuffled epoch is drawn again, up to the same batch.
"""

import csv
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from . import checkpoints
from .losses import Batch, Loss, teacher_forcing
from .schedules import check_counts

Batches = Iterable[Batch] | Callable[[int], Iterable[Batch]]

COLUMNS = ("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "validation_loss")
PROGRESS = ("step", "epoch", "seen", "best", "stale", "epoch_random")  # what a checkpoint holds of the Trainer
CAUSES = (
    "Likely causes: a learning rate too high or without warm-up; no clip_norm; inputs or weights that are not finite; a query "
    "without a visible key in torch.nn's attention (in the twins it gives 0); a mean over nothing in the loss"
)


class Trainer:
    """Trains a model: accumulation, clipping, schedule, validation, checkpoints, log, exact resume.

    Example:
        trainer = Trainer(model, schedule=noam(512, 4000), loss=teacher_forcing(pad_id=0, label_smoothing=0.1), folder="run")
        trainer.resume()  # from where the last run stopped, if there was one
        trainer.fit(batches, steps=100_000, validation=held_out, every=1000, patience=10)

    Args:
        model: is called by `loss`; batches are moved to the device of its parameters.
        optimizer: of the model's parameters. By default AdamW with betas (0.9, 0.98) and a rate of 1 (1e-3 without schedule).
        schedule: function of the number of steps made; the next step has the optimizer's rates times what it returns.
        loss: function (model, batch) -> (sum of losses, number of tokens); by default teacher_forcing(model.pad_id).
        clip_norm: limit for the norm of all gradients together; None = no limit.
        accumulate: so many batches make up one step, which is that of their concatenation.
        autocast: computes in bfloat16 what torch.autocast does.
        activation_checkpointing: of every TransformerEncoderLayer and TransformerDecoderLayer only the input is kept for the
            backward pass, which computes the layer again: less memory, the same numbers.
        folder: for checkpoints and log.csv; None = neither is written.
        progress: shows a bar with loss and tokens per second.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. ImportError: an optional package is missing.
    """

    def __init__(
        self,
        model: Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        schedule: Callable[[int], float] | None = None,
        loss: Loss | None = None,
        clip_norm: float | None = 1.0,
        accumulate: int = 1,
        autocast: bool = False,
        activation_checkpointing: bool = False,
        folder: str | os.PathLike | None = None,
        progress: bool = True,
    ) -> None:
        check_counts(accumulate=accumulate)
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be greater than 0, or None for no limit, got {clip_norm}")
        if schedule is not None and not callable(schedule):
            raise TypeError(f"schedule must be a function of the number of steps made, got {type(schedule).__name__}")
        if loss is None and not hasattr(model, "pad_id"):
            raise TypeError("loss must be given for a model without pad_id, for example teacher_forcing(pad_id=0)")
        if optimizer is None:
            rate = 1e-3 if schedule is None else 1.0
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), fused=True)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], float):
                group["lr"] = float(group["lr"])  # of a number of numpy's, which a checkpoint could not be read with
        layers = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
        self.recomputed = [m for m in model.modules() if isinstance(m, layers)] if activation_checkpointing else []
        if activation_checkpointing and not self.recomputed:
            raise ValueError("activation_checkpointing needs a TransformerEncoderLayer or TransformerDecoderLayer in the model")
        self.tqdm = checkpoints.optional("tqdm").tqdm if progress else None
        if folder is not None:
            checkpoints.optional("safetensors")
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.loss = teacher_forcing(model.pad_id) if loss is None else loss
        self.clip_norm, self.accumulate, self.autocast = clip_norm, accumulate, autocast
        self.folder = None if folder is None else Path(folder)
        self.step = 0  # steps made
        self.epoch = self.seen = 0  # the position in the data: `seen` batches of this epoch
        self.best, self.stale = math.inf, 0  # best validation loss, and validations since
        self.epoch_random = None  # state of the random generators at the start of the epoch
        self.random = None  # the state that fit() has to go on with, after resume()
        self.generator = None  # the generator of the DataLoader, if it has its own

    def fit(
        self,
        batches: Batches,
        steps: int,
        *,
        validation: Iterable[Batch] | None = None,
        every: int = 1000,
        patience: int | None = None,
    ) -> list[float]:
        """Train until `steps` steps have been made in all, in as many epochs as that takes.

        In `folder`, `last` and `best` (by validation loss) are checkpoints. Ctrl-C (SIGINT) finishes the step, saves `last` and
        raises KeyboardInterrupt; a second one interrupts at once.

        Args:
            batches: iterable anew for every epoch (a list, a DataLoader), or a function epoch -> iterable. To resume, the
                interrupted epoch is drawn again and what was seen of it is skipped: its order must follow from the epoch, from
                torch's or Python's global generator, or from the DataLoader's own.
            steps: in all, those before resume() included.
            validation: batches whose mean loss per token is taken in eval mode.
            every: steps from one validation and checkpoint to the next; the last step has both, too.
            patience: stop after so many validations in a row without a new best; None = go on.

        Returns:
            The loss per token of every step that this call has made.

        Raises:
            FloatingPointError: a loss or gradient is not finite; that step changes no parameter.
            FileExistsError: `folder` holds a run, and resume() was not called.
        """
        check_counts(steps=steps, every=every)
        if patience is not None:
            check_counts(patience=patience)
            if validation is None:
                raise ValueError("patience needs validation batches, got validation=None")
        if validation is not None and iter(validation) is validation:
            raise TypeError("validation must be iterable anew for every validation, such as a list; got an iterator")
        if self.folder and self.step == 0 and checkpoints.find(self.folder / "last"):
            raise FileExistsError(f"{self.folder} holds a run: call resume() before fit(), or take another folder")
        if not self.model.training:
            self.model.train()  # else as it is: what the caller froze in eval mode stays so
        self._start_log()
        losses, stream = [], self._stream(batches)
        with ExitStack() as stack:
            interrupted = stack.enter_context(_sigint())
            stack.enter_context(_recomputed(self.recomputed))
            bar = self.tqdm and stack.enter_context(self.tqdm(total=steps, initial=self.step, unit="step", dynamic_ncols=True))
            while self.step < steps and (patience is None or self.stale < patience):
                start = time.perf_counter()
                loss, rate, norm, tokens = self._make_step(stream)
                speed = tokens / (time.perf_counter() - start)
                losses.append(loss)
                due, score = self.step % every == 0 or self.step == steps, None
                if due and validation is not None:
                    score = self.evaluate(validation)
                    self.best, self.stale = (score, 0) if score < self.best else (self.best, self.stale + 1)
                self._log(self.step, self.epoch, loss, rate, norm, tokens, round(speed, 1), score)
                if self.folder and (due or interrupted.is_set()):
                    self.save("last")
                    if score is not None and self.stale == 0:
                        self.save("best")
                if bar is not None:
                    best = f", best validation {self.best:.4g}" if self.best < math.inf else ""
                    bar.set_postfix_str(f"loss {loss:.4g}, {speed:.3g} tokens/s{best}", refresh=False)
                    bar.update()
                if interrupted.is_set():
                    saved = f", saved in {self.folder / 'last'}" if self.folder else ""
                    raise KeyboardInterrupt(f"stopped after step {self.step}{saved}")
        return losses

    def _make_step(self, stream: Iterator[Batch]) -> tuple[float, float, float, int]:
        """Make one step; return loss per token, learning rate, norm of the gradients before clipping, tokens."""
        self.optimizer.zero_grad()
        total, tokens = 0.0, 0
        for batch in islice(stream, self.accumulate):
            loss, count = self._loss(batch)
            loss.backward()
            total, tokens = total + loss.detach(), tokens + count
        groups, total, tokens = self.optimizer.param_groups, float(total), int(tokens)
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        for p in parameters:
            p.grad /= max(tokens, 1)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm or math.inf).item()
        if self.schedule is not None:
            for group in groups:
                group["lr"] = float(group.setdefault("initial_lr", group["lr"]) * self.schedule(self.step))
        loss, rate = total / max(tokens, 1), float(groups[0]["lr"])
        if not (math.isfinite(loss) and math.isfinite(norm) and math.isfinite(rate)):
            raise FloatingPointError(
                f"step {self.step + 1} (learning rate {rate:.3g}) has loss {loss} and gradient norm {norm}; "
                f"it was not made. {CAUSES}"
            )
        self.optimizer.step()
        self.step += 1
        return loss, rate, norm, tokens

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor | int]:
        if not isinstance(batch, (tuple, list)) or not all(isinstance(x, Tensor) for x in batch):
            raise TypeError(f"a batch must be a tuple of tensors, (source, target) or (tokens,), got a {type(batch).__name__}")
        device = next(self.model.parameters()).device
        batch = tuple(x.to(device, non_blocking=True) for x in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            result = self.loss(self.model, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"loss must return (sum of losses, number of tokens), got {type(result).__name__}")
        return result

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss per token in eval mode; the model and the random generators are left as they were.

        Raises:
            FloatingPointError: the loss is not finite. ValueError: there is not one token.
        """
        training, state = [m for m in self.model.modules() if m.training], checkpoints.random_state()
        self.model.eval()
        total, tokens = 0.0, 0
        try:
            for batch in batches:
                loss, count = self._loss(batch)
                total, tokens = total + loss, tokens + count
        finally:
            for module in training:
                module.training = True
            checkpoints.set_random_state(state)
        if not tokens:
            raise ValueError("validation must hold at least one token that is no padding, got none")
        mean = float(total) / int(tokens)
        if not math.isfinite(mean):
            raise FloatingPointError(f"the validation loss after step {self.step} is {mean}. {CAUSES}")
        return mean

    def _stream(self, batches: Batches) -> Iterator[Batch]:
        """Yield batches for ever, from the present position in the data."""
        self.generator = None if callable(batches) else getattr(batches, "generator", None)  # a DataLoader's own
        while True:
            now, self.random = self.random or checkpoints.random_state(self.generator), None
            if self.seen == 0:
                self.epoch_random = now
            checkpoints.set_random_state(self.epoch_random, self.generator)
            iterator = iter(batches(self.epoch) if callable(batches) else batches)
            if iterator is batches:
                raise TypeError("batches must be iterable anew for every epoch: pass a function epoch -> iterator")
            if sum(1 for _ in islice(iterator, self.seen)) < self.seen:
                raise ValueError(
                    f"batches must be those of the run that is resumed: epoch {self.epoch} had {self.seen} or more"
                )
            if self.seen > 0:
                checkpoints.set_random_state(now, self.generator)
            for batch in iterator:
                self.seen += 1
                yield batch
            if self.seen == 0:
                raise ValueError(f"batches must yield at least one batch an epoch, got none in epoch {self.epoch}")
            self.epoch, self.seen = self.epoch + 1, 0

    def save(self, name: str = "last") -> None:
        """Write a checkpoint to `folder` / name, whole or not at all; the one before it stays as name.previous."""
        state = {attribute: getattr(self, attribute) for attribute in PROGRESS}
        state["random"] = self.random or checkpoints.random_state(self.generator)
        state["optimizer"] = self.optimizer.state_dict()
        state["optimizer_class"] = type(self.optimizer).__name__
        checkpoints.save(self.folder / name, self.model, state)

    def resume(self, name: str = "last") -> bool:
        """Go back to a checkpoint in `folder`; the next fit() makes the same steps, bit for bit, as the run that wrote it.

        Returns:
            Whether there is such a checkpoint.

        Raises:
            ValueError: it is of another model or optimizer. RuntimeError: a file is damaged. The text names file and
                parameters, and nothing has been changed.
        """
        if self.folder is None:
            raise ValueError("resume needs a folder, got Trainer(folder=None)")
        folder = checkpoints.find(self.folder / name)
        if folder is None:
            return False
        state, weights = checkpoints.read(folder, self.model)
        if state["optimizer_class"] != type(self.optimizer).__name__:
            raise ValueError(f"{folder} needs the optimizer {state['optimizer_class']}, got {type(self.optimizer).__name__}")
        self.optimizer.load_state_dict(state["optimizer"])
        checkpoints.put(self.model, weights)
        for attribute in (*PROGRESS, "random"):
            setattr(self, attribute, state[attribute])
        return True

    def _start_log(self) -> None:
        """Keep of an older log the rows of the steps that have been made; those past the checkpoint will be made again."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path, rows = self.folder / "log.csv", []
        if path.exists():
            with open(path, newline="") as file:
                rows = [row for row in csv.DictReader(file) if None not in row.values() and int(row["step"]) <= self.step]
        with open(path.with_suffix(".new"), "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(path.with_suffix(".new"), path)

    def _log(self, *row: float | None) -> None:
        if self.folder is not None:
            with open(self.folder / "log.csv", "a", newline="") as file:
                csv.writer(file).writerow(row)


@contextmanager
def _recomputed(layers: list[Module]) -> Iterator[None]:
    """Within, the layers keep only their inputs for the backward pass, which runs them again, with the same dropout."""
    own = [vars(layer).get("forward") for layer in layers]  # of the object, where somebody has replaced that of the class
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


@contextmanager
def _sigint() -> Iterator[threading.Event]:
    """Within, the first SIGINT sets the event, and gives the signal back to whom it belonged before."""
    interrupted = threading.Event()
    previous = signal.getsignal(signal.SIGINT)  # None: set outside Python, and not to be restored from here
    if threading.current_thread() is not threading.main_thread() or previous in (None, signal.SIG_IGN):
        yield interrupted
        return

    def handler(number, frame):
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handler)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
