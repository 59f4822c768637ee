"""Learn to read dates: the same training with torch.nn and with its twins, side by side (`python -m fast_transformer.demo`).

A character-level encoder-decoder Transformer learns what dates.py says. Both variants start from the same weights and see the
same batches, some steps of one and then some of the other, so that loss, time, memory and accuracy compare fairly. With `--rnn`
another comparison runs: see rnn.py.
"""

import argparse
import copy
import os
import random
import statistics
import time
import warnings
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

try:
    import babel  # noqa: F401
    import matplotlib  # noqa: F401
    from tqdm import tqdm
except ImportError as error:  # run as a program, it says one sentence instead of a traceback
    refuse = SystemExit if __name__ == "__main__" else ImportError
    raise refuse(f'The demo needs {error.name}: pip install "fast-transformer-kernels[demo]"') from error

from fast_transformer.demo import dates, rnn
from fast_transformer.generation import beam_search
from fast_transformer.models import Seq2SeqTransformer
from fast_transformer.training import Trainer, noam, teacher_forcing
from fast_transformer.visualize import capture_attention, plot_attention

SEED, STEPS, WARMUP = 2017, 1200, 150
SIZES = {"d_model": 128, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "d_ff": 256, "dropout": 0.1}
LOSS = teacher_forcing(dates.PAD, label_smoothing=0.1)

Batch = tuple[Tensor, Tensor]


def date_reader(tokens: int) -> Seq2SeqTransformer:
    return Seq2SeqTransformer(tokens, tokens, **SIZES, norm_first=True, tie_embeddings="all", pad_id=dates.PAD)


def with_torch_nn(model: Seq2SeqTransformer) -> Seq2SeqTransformer:
    """Return a copy of the model with torch.nn's own stacks and dropouts in the place of the twins, and the same weights."""
    stock = copy.deepcopy(model)
    heads, layers, width, dropout = (SIZES[name] for name in ("n_heads", "n_encoder_layers", "d_ff", "dropout"))
    stock.transformer = nn.Transformer(
        SIZES["d_model"], heads, layers, layers, width, dropout, batch_first=True, norm_first=True
    )
    stock.transformer.load_state_dict(model.transformer.state_dict())
    stock.source.dropout, stock.target.dropout = nn.Dropout(dropout), nn.Dropout(dropout)
    return stock


def learner(model: Seq2SeqTransformer, steps: int) -> Trainer:
    """Return a Trainer: label smoothing, and a rate that rises for WARMUP steps and falls with the root of the steps."""
    schedule = noam(SIZES["d_model"], min(WARMUP, steps), scale=0.5)
    return Trainer(model, schedule=schedule, loss=LOSS, progress=False)


def train(learners: dict[str, Trainer], batches: dates.Batches, steps: int) -> list[float]:
    """Train all learners on the same batches, an epoch of each in turn; return each one's median seconds of a step."""
    seconds, losses, turns = {name: [] for name in learners}, {}, list(learners)
    for epoch in (bar := tqdm(range(-(-steps // dates.POOL)), desc="training both", unit="epoch", dynamic_ncols=True)):
        batches(epoch)  # makes and keeps them: that is not timed
        for name in turns:
            start = time.perf_counter()
            losses[name] = learners[name].fit(batches, min(steps, (epoch + 1) * dates.POOL))
            seconds[name].append((time.perf_counter() - start) / len(losses[name]))
        turns.reverse()  # nobody is always the first to touch a batch
        bar.set_postfix({name: f"{losses[name][-1]:.3f}" for name in learners}, refresh=False)
    return [statistics.median(times) for times in seconds.values()]


def differences(models: list[Seq2SeqTransformer], batch: Batch) -> tuple[float, float]:
    """Return the largest difference between two models' outputs and between their gradients, over the largest entry.

    In float64, without dropout: in float32 a ReLU whose input is rounded to the other side of 0 makes a gradient jump.
    """
    found = []
    for model in models:
        exact = copy.deepcopy(model).double().eval()
        total, tokens = LOSS(exact, batch)
        (total / tokens).backward()
        outputs = exact(batch[0], batch[1][:, :-1]).detach()
        found.append((outputs, torch.cat([p.grad.flatten() for p in exact.parameters()])))
    outputs, gradients = (((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found, strict=True))
    return outputs, gradients


def peak_memory(learner: Trainer, batches: dates.Batches) -> int:
    """Return how many bytes one more training step holds at most beyond those held before: the sum of torch's allocations."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler reports its own start and stop
    learner.fit(batches, learner.step + 1)  # draws the epoch: its tensors shall not count
    learner.optimizer.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        learner.fit(batches, learner.step + 1)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # frees are negative
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def read(model: Seq2SeqTransformer, sources: Tensor, vocabulary: dates.Vocabulary, longest: int) -> list[str]:
    """Return what the model reads in sources (N, S): beam search with 4 beams."""
    ids = {"bos_id": dates.BOS, "eos_id": dates.EOS}
    chunks = [beam_search(model, part, beams=4, max_new_tokens=longest, **ids).tokens[:, 0] for part in sources.split(250)]
    return [vocabulary.text(row) for chunk in chunks for row in chunk.tolist()]


def picture(model: Seq2SeqTransformer, example: dates.Example, vocabulary: dates.Vocabulary, path: Path) -> None:
    """Save a heat map: which characters of the sentence the last layer looks at while it writes each character of the date."""
    source, target = dates.collate([[example]], vocabulary)
    (written,) = read(model, source, vocabulary, target.shape[1])
    numbers = vocabulary.numbers(("<bos>", *written))[None]
    layer = f"transformer.decoder.layers.{SIZES['n_decoder_layers'] - 1}.multihead_attn"
    with capture_attention(model.eval(), layer) as weights, torch.no_grad():
        model(source, numbers[:, :-1])
    plot_attention(
        weights[layer][0],
        query_tokens=list(written),
        key_tokens=[f"<{example.style[0]}>", *example.text],
        title=f"Reading “{example.text}” as {written}",
        path=path,
    )


def compare_with_torch_nn(steps: int, out: Path) -> int:
    """Run the comparison and print it; return 1 if the variants disagree or one has not learnt to read dates."""
    warnings.filterwarnings("ignore", message="enable_nested_tensor is True")  # torch.nn.Transformer about its own default
    torch.manual_seed(SEED)
    rng, vocabulary = random.Random(SEED), dates.Vocabulary()
    training, held_out = dates.split_dates(rng)
    examples = [dates.draw(day, rng) for day in held_out]
    sources, targets = dates.collate([[example] for example in examples], vocabulary)
    batches = dates.batches(training, vocabulary)

    ours = date_reader(len(vocabulary.tokens))
    theirs = with_torch_nn(ours)
    size = sum(p.numel() for p in ours.parameters()) / 1e6
    print(f"torch {torch.__version__} on the CPU, {torch.get_num_threads()} threads")
    print(
        f"{len(dates.STYLES)} styles of {len(dates.LOCALES)} locales, {dates.BATCH} sentences a step, {size:.2f} M parameters"
    )
    outputs, gradients = differences([theirs, ours], (sources[: dates.BATCH], targets[: dates.BATCH]))
    print(
        f"same weights, in float64: largest relative difference of outputs {outputs:.1e}, of gradients {gradients:.1e}",
        flush=True,
    )

    learners = {"torch.nn": learner(theirs, steps), "twins": learner(ours, steps)}
    seconds = train(learners, batches, steps)
    peaks = [peak_memory(learner, batches) for learner in learners.values()]
    for what, unit, (a, b) in (("step time in ms", 1e-3, seconds), ("peak memory of a step in MB", 1e6, peaks)):
        print(f"{what}: torch.nn {a / unit:.1f}, twins {b / unit:.1f}, ratio {a / b:.2f}")

    trained_by_torch_nn = date_reader(len(vocabulary.tokens))  # the twins read with these weights, too: they have a cache
    trained_by_torch_nn.load_state_dict(theirs.state_dict())
    readings = [read(model, sources, vocabulary, targets.shape[1]) for model in (trained_by_torch_nn, ours)]
    right = [statistics.mean(text == example.iso for text, example in zip(found, examples, strict=True)) for found in readings]
    print(f"accuracy on {dates.HELD_OUT} held-out dates: torch.nn {right[0]:.2%}, twins {right[1]:.2%}")

    print("\ntruth       twins read         sentence")
    one_of_each = {example.style: (example, found) for example, found in zip(examples, readings[1], strict=True)}
    for example, found in rng.sample(list(one_of_each.values()), 10):
        print(f"{example.iso}  {found:11} {'ok   ' if found == example.iso else 'WRONG'}  <{example.style[0]}> {example.text}")

    path = out / "attention.png"
    picture(ours, dates.write(held_out[0], "en", "long"), vocabulary, path)
    print(f"\nwhere the decoder looks while it reads: {path}")
    return 0 if max(outputs, gradients) <= 1e-10 and (min(right) >= 0.98 or steps != STEPS) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fast_transformer.demo", description="Learn to read dates.")
    parser.add_argument("--rnn", action="store_true", help="compare recurrent models and the Transformer, on longer sentences")
    parser.add_argument("--steps", type=int, help=f"training steps (default: {STEPS}, with --rnn {rnn.STEPS})")
    parser.add_argument("--out", type=Path, default="demo", metavar="FOLDER", help="for the picture (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.rnn:
        return rnn.compare_models(options.steps if options.steps is not None else rnn.STEPS, options.out)
    return compare_with_torch_nn(options.steps if options.steps is not None else STEPS, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
