"""Learn to read dates: the same training with torch.nn and with its twins, side by side (`python -m fast_transformer.demo`).

Babel's CLDR data writes random dates of 1900 to 2099 in the full, long, medium and short format of eight locales; a
character-level encoder-decoder Transformer learns the ISO date: `<fr> samedi 14 mars 1987` -> `1987-03-14`. Both variants start
from the same weights and see the same batches, step by step in turn, so that loss, time, memory and accuracy compare fairly.

Two things make the task well-defined. A locale token leads the sentence, since 3/4/05 means March in English and April in
Spanish. And where the CLDR pattern has a two-digit year (`yy`) only dates of 1969 to 2068 are drawn, so that the century
follows from POSIX's pivot: 69 to 99 are 19xx, 00 to 68 are 20xx.
"""

import argparse
import math
import os
import random
import re
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fast_transformer

try:
    from babel import Locale
    from babel.dates import format_date
    from matplotlib.figure import Figure
    from tqdm import tqdm
except ImportError as error:  # run as a program, it says one sentence instead of a traceback
    refuse = SystemExit if __name__ == "__main__" else ImportError
    raise refuse(f'The demo needs {error.name}: pip install "fast-transformer-kernels[demo]"') from error

VARIANTS = {"torch.nn": torch.nn, "twins": fast_transformer}  # where each variant takes its Transformer from
SEED, STEPS, BATCH, PEAK_RATE = 2017, 1200, 64, 4e-3
HELD_OUT = 2000  # dates kept for the test
LOCALES, FORMS = ("zh", "en", "de", "fr", "es", "ja", "ko", "ru"), ("full", "long", "medium", "short")


def readable_years(locale: str, form: str) -> range:
    """Return the years of which a date in this style says which one it means; see the module docstring."""
    pattern = re.sub("'[^']*'", "", Locale.parse(locale).date_formats[form].pattern)  # quoted parts are literal text
    return range(1969, 2069) if re.search("y+", pattern)[0] == "yy" else range(1900, 2100)


STYLES = {(locale, form): readable_years(locale, form) for locale in LOCALES for form in FORMS}


class Example(NamedTuple):
    style: tuple[str, str]  # locale and form
    text: str
    iso: str


def write(day: date, locale: str, form: str) -> Example:
    """Write a date in one style; every kind of space (Russian has a narrow no-break one) becomes a plain space."""
    return Example((locale, form), " ".join(format_date(day, form, locale).split()), day.isoformat())


def draw(day: date, rng: random.Random) -> Example:
    """Write a date in a random style that is unambiguous for its year."""
    return write(day, *rng.choice([style for style, years in STYLES.items() if day.year in years]))


def split_dates(rng: random.Random) -> tuple[list[date], list[date]]:
    """Return all dates of 1900 to 2099 in random order, as (training, held out): no date is in both."""
    first = date(1900, 1, 1)
    days = [first + timedelta(n) for n in range((date(2100, 1, 1) - first).days)]
    rng.shuffle(days)
    return days[HELD_OUT:], days[:HELD_OUT]


class Vocabulary:
    """Numbers for the tokens of sources and targets: three special ones, one per locale, and all characters."""

    PAD, BOS, EOS = range(3)

    def __init__(self):
        days = [date(2024, 1, 1) + timedelta(5 * n) for n in range(73)]  # every month and weekday
        letters = {letter for style in STYLES for day in days for letter in write(day, *style).text} | set("0123456789-")
        self.tokens = ["<pad>", "<bos>", "<eos>", *(f"<{locale}>" for locale in LOCALES), *sorted(letters)]
        self.number = {token: n for n, token in enumerate(self.tokens)}

    def numbers(self, tokens: Iterable[str]) -> Tensor:
        return torch.tensor([self.number[token] for token in tokens])

    def text(self, numbers: list[int]) -> str:
        """Return the tokens of a sequence up to its end token as one string, without the special ones."""
        end = numbers.index(self.EOS) if self.EOS in numbers else len(numbers)
        return "".join(self.tokens[n] for n in numbers[:end] if n > self.EOS)


def collate(examples: list[Example], vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return sources (B, S), padded at the right, and targets (B, 12) as token numbers."""
    sources = [vocabulary.numbers((f"<{example.style[0]}>", *example.text)) for example in examples]
    targets = [vocabulary.numbers(("<bos>", *example.iso, "<eos>")) for example in examples]
    return nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=vocabulary.PAD), torch.stack(targets)


def batches(days: list[date], vocabulary: Vocabulary, rng: random.Random, pool: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for ever; `pool` of them at a time are sorted by length, so that little is padding."""
    while True:
        examples = sorted((draw(day, rng) for day in rng.choices(days, k=pool * BATCH)), key=lambda example: len(example.text))
        for start in rng.sample(range(0, len(examples), BATCH), pool):
            yield collate(examples[start : start + BATCH], vocabulary)


def sinusoids(length: int, d_model: int) -> Tensor:
    """Return the positions of "Attention Is All You Need", section 3.5: (length, d_model), sines and cosines in turn."""
    rates = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class DateReader(nn.Module):
    """A small encoder-decoder Transformer over one vocabulary; its parts come from nn_module, torch.nn or fast_transformer."""

    def __init__(self, nn_module, tokens: int, d_model: int = 128, heads: int = 4, layers: int = 2, dropout: float = 0.1):
        super().__init__()
        self.embedding = nn.Embedding(tokens, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.register_buffer("positions", sinusoids(64, d_model), persistent=False)
        self.dropout = nn_module.Dropout(dropout)
        self.transformer = nn_module.Transformer(
            d_model, heads, layers, layers, dim_feedforward=2 * d_model, dropout=dropout, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(d_model, tokens)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits (B, L, tokens) for what follows each token of target (B, L), given source (B, S)."""
        return self.decode(target, self.encode(source), source)

    def loss(self, source: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    def embed(self, numbers: Tensor) -> Tensor:  # (B, L) -> (B, L, E)
        return self.dropout(self.embedding(numbers) * math.sqrt(self.head.in_features) + self.positions[: numbers.shape[1]])

    def encode(self, source: Tensor) -> Tensor:  # masks as in torch.nn: True = hidden
        return self.transformer.encoder(self.embed(source), src_key_padding_mask=source == Vocabulary.PAD)

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        masks = {"tgt_mask": future, "tgt_is_causal": True, "memory_key_padding_mask": source == Vocabulary.PAD}
        return self.head(self.transformer.decoder(self.embed(target), memory, **masks))

    @torch.no_grad()
    def read(self, source: Tensor, length: int = 11) -> Tensor:
        """Decode greedily: source (B, S) -> (B, length), without the begin token."""
        memory = self.encode(source)
        target = torch.full_like(source[:, :1], Vocabulary.BOS)
        for _ in range(length):
            target = torch.cat((target, self.decode(target, memory, source)[:, -1:].argmax(dim=-1)), dim=1)
        return target[:, 1:]


class Learner:
    """A model with its optimizer: AdamW, the rate rising over a tenth of the steps, then falling linearly to zero."""

    def __init__(self, model: DateReader, steps: int):
        rise = max(1, steps // 10)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / rise, max(0, steps - step) / max(1, steps - rise))
        )

    def step(self, source: Tensor, target: Tensor) -> float:
        """Train on one batch and return its loss; the gradients are freed at the end, so no step starts with any."""
        loss = self.model.loss(source, target)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item()


def train(learners: dict[str, Learner], stream: Iterator[tuple[Tensor, Tensor]], steps: int) -> list[float]:
    """Train all learners on the same batches, step by step in turn; return each one's median seconds of a step."""
    seconds, losses, turns = {name: [] for name in learners}, {}, list(learners)
    for _ in (bar := tqdm(range(steps), desc="training both", unit="step", dynamic_ncols=True)):
        batch = next(stream)
        for name in turns:
            start = time.perf_counter()
            losses[name] = learners[name].step(*batch)
            seconds[name].append(time.perf_counter() - start)
        turns.reverse()  # nobody is always the first to touch a batch
        bar.set_postfix({name: f"{losses[name]:.3f}" for name in learners}, refresh=False)
    return [statistics.median(times) for times in seconds.values()]


def differences(models: list[DateReader], source: Tensor, target: Tensor) -> tuple[float, float]:
    """Return the largest difference between two models' outputs and between their gradients, with dropout off."""
    found = []
    for model in models:
        model.eval()
        model.loss(source, target).backward()
        found.append((model(source, target[:, :-1]).detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
        model.zero_grad()
        model.train()
    outputs, gradients = ((theirs - ours).abs().max().item() for theirs, ours in zip(*found, strict=True))
    return outputs, gradients


def peak_memory(learner: Learner, source: Tensor, target: Tensor) -> int:
    """Return how many bytes a training step holds at most, beyond those held before: the running sum of torch's allocations."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler reports its own start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        learner.step(source, target)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # frees are negative
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def cross_attention(model: DateReader, source: Tensor, target: Tensor) -> Tensor:
    """Return what the last decoder layer attends to, the mean of its heads: (B, L, S)."""
    attention, found = model.transformer.decoder.layers[-1].multihead_attn, []
    # The layer wants no weights from its attention: one hook asks for them all the same, another picks them up.
    ask = attention.register_forward_pre_hook(lambda _, args, named: (args, named | {"need_weights": True}), with_kwargs=True)
    pick_up = attention.register_forward_hook(lambda _, args, result: found.append(result[1]))
    with ask, pick_up, torch.no_grad():
        model(source, target)
    return found[0]


def picture(model: DateReader, example: Example, vocabulary: Vocabulary) -> Figure:
    """Return a heat map: which characters of the sentence the model looks at while it writes each character of the date."""
    source, _ = collate([example], vocabulary)
    written = model.read(source, len(example.iso))
    begin = torch.full_like(written[:, :1], Vocabulary.BOS)
    weights = cross_attention(model, source, torch.cat((begin, written[:, :-1]), dim=1))[0]

    figure = Figure(figsize=(2.4 + 0.4 * weights.shape[1], 1.4 + 0.36 * weights.shape[0]), dpi=150, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights.numpy(), cmap="YlGnBu", vmin=0, aspect="auto")
    axes.set_xticks(range(weights.shape[1]), [f"<{example.style[0]}>", *example.text.replace(" ", "␣")])
    axes.set_yticks(range(weights.shape[0]), [vocabulary.tokens[n] for n in written[0]])
    axes.tick_params(length=0, labelsize=12)
    axes.set(xlabel="read: the sentence (␣ is a space)", ylabel="written: the ISO date")
    axes.set_title(f"Reading “{example.text}” as {vocabulary.text(written[0].tolist())}", pad=12)
    figure.colorbar(image, label="attention weight, mean of the heads")
    return figure


def main(argv: list[str] | None = None) -> int:
    """Run the comparison and print it; return 1 if the variants disagree or one has not learnt to read dates."""
    parser = argparse.ArgumentParser(prog="python -m fast_transformer.demo", description="Learn to read dates, twice.")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default="demo", metavar="FOLDER", help="for the picture (default: %(default)s)")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="enable_nested_tensor is True")  # torch.nn.Transformer about its own default

    torch.manual_seed(SEED)
    rng, vocabulary = random.Random(SEED), Vocabulary()
    training, held_out = split_dates(rng)
    examples = [draw(day, rng) for day in held_out]
    sources, targets = collate(examples, vocabulary)
    batch = sources[:BATCH], targets[:BATCH]  # of all lengths: to compare on, never to learn from

    theirs, ours = models = [DateReader(nn_module, len(vocabulary.tokens)) for nn_module in VARIANTS.values()]
    ours.load_state_dict(theirs.state_dict())
    size = sum(p.numel() for p in ours.parameters()) / 1e6
    print(f"torch {torch.__version__} on the CPU, {torch.get_num_threads()} threads")
    print(f"{len(STYLES)} styles of {len(LOCALES)} locales, {BATCH} sentences a step, {size:.2f} M parameters")
    outputs, gradients = differences(models, *batch)
    print(f"same weights, dropout off: largest difference of outputs {outputs:.1e}, of gradients {gradients:.1e}", flush=True)

    learners = {name: Learner(model, options.steps) for name, model in zip(VARIANTS, models, strict=True)}
    seconds = train(learners, batches(training, vocabulary, rng), options.steps)
    # After the last step the rate is zero: this one more step, on held-out dates, changes no weight.
    peaks = [peak_memory(learner, *batch) for learner in learners.values()]
    for what, unit, (a, b) in (("step time in ms", 1e-3, seconds), ("peak memory of a step in MB", 1e6, peaks)):
        print(f"{what}: torch.nn {a / unit:.1f}, twins {b / unit:.1f}, ratio {a / b:.2f}")

    readings = [[vocabulary.text(row) for row in model.eval().read(sources).tolist()] for model in models]
    right = [statistics.mean(text == example.iso for text, example in zip(found, examples, strict=True)) for found in readings]
    print(f"accuracy on {HELD_OUT} held-out dates: torch.nn {right[0]:.2%}, twins {right[1]:.2%}")

    print("\ntruth       twins read         sentence")
    one_of_each = {example.style: (example, found) for example, found in zip(examples, readings[1], strict=True)}
    for example, found in rng.sample(list(one_of_each.values()), 10):
        print(f"{example.iso}  {found:11} {'ok   ' if found == example.iso else 'WRONG'}  <{example.style[0]}> {example.text}")

    path = options.out / "attention.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(ours, write(held_out[0], "en", "long"), vocabulary).savefig(path)
    print(f"\nwhere the decoder looks while it reads: {path}")
    return 0 if max(outputs, gradients) <= 1e-4 and (min(right) >= 0.98 or options.steps != STEPS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
