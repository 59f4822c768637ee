"""The bottleneck made visible: recurrent models without and with attention, and the Transformer, on sentences of several dates.

A recurrent encoder-decoder without attention has to put a whole sentence into one vector (Sutskever et al. 2014); attention
lets the decoder look back at every token (Bahdanau et al. 2015, Luong et al. 2015). All models are of about one size, see the
same batches and are trained in the same way; what is compared is the share of dates read right, by the length of the sentence.
"""

import random
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from fast_transformer.demo import dates
from fast_transformer.generation import greedy
from fast_transformer.models import RNNSeq2Seq, Seq2SeqTransformer
from fast_transformer.training import Trainer, noam, teacher_forcing

SEED, STEPS = 2015, 1600
MOST_DATES = 4  # in a sentence
SENTENCES = 600  # of held-out dates
BIN = 15  # tokens of length that one point of the plot stands for


def models(tokens: int) -> dict[str, nn.Module]:
    recurrent = {"d_model": 128, "hidden_size": 160, "dropout": 0.1, "pad_id": dates.PAD}
    transformer = {"d_model": 128, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "d_ff": 256, "dropout": 0.1}
    return {
        "RNN": RNNSeq2Seq(tokens, tokens, **recurrent),
        "RNN, Bahdanau attention": RNNSeq2Seq(tokens, tokens, attention="bahdanau", **recurrent),
        "RNN, Luong attention": RNNSeq2Seq(tokens, tokens, attention="luong_general", **recurrent),
        "Transformer": Seq2SeqTransformer(
            tokens, tokens, **transformer, norm_first=True, tie_embeddings="all", positions="rotary", pad_id=dates.PAD
        ),
    }


def accuracies(model: nn.Module, sentences: list[dates.Sentence], vocabulary: dates.Vocabulary) -> list[float]:
    """Return, for each sentence, the share of its dates that the model reads right, in their places."""
    found = []
    for start in range(0, len(sentences), 100):
        part = sentences[start : start + 100]
        source, target = dates.collate(part, vocabulary)
        written = greedy(model, source, max_new_tokens=target.shape[1], bos_id=dates.BOS, eos_id=dates.EOS).tokens
        for sentence, row in zip(part, written.tolist(), strict=True):
            read = vocabulary.text(row).split(" ")
            right = sum(a == example.iso for a, example in zip(read, sentence, strict=False))
            found.append(right / len(sentence))
    return found


def by_length(sentences: list[dates.Sentence], shares: list[float]) -> tuple[list[float], list[float]]:
    """Return the middles of the bins of length that hold a sentence, and the mean accuracy in each, every date counted once."""
    bins: dict[int, list[tuple[float, int]]] = {}
    for sentence, share in zip(sentences, shares, strict=True):
        bins.setdefault(dates.length(sentence) // BIN, []).append((share * len(sentence), len(sentence)))
    middles = [(n + 0.5) * BIN for n in sorted(bins)]
    return middles, [sum(right for right, _ in bins[n]) / sum(count for _, count in bins[n]) for n in sorted(bins)]


def plot(curves: dict[str, tuple[list[float], list[float]]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for (name, (lengths, accuracy)), marker in zip(curves.items(), "osD^", strict=True):
        axes.plot(lengths, accuracy, marker=marker, label=name)
    axes.set(xlabel="length of the sentence in tokens", ylabel="dates read right", ylim=(-0.03, 1.03))
    axes.set_title(f"Sentences of 1 to {MOST_DATES} dates")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def compare_models(steps: int, out: Path) -> int:
    """Train all models, print and plot how well they read; return 1 if attention has not helped on long sentences."""
    rng, vocabulary = random.Random(SEED), dates.Vocabulary()
    training, held_out = dates.split_dates(rng)
    sentences = [[dates.draw(day, rng) for day in rng.sample(held_out, n % MOST_DATES + 1)] for n in range(SENTENCES)]
    batches = dates.batches(training, vocabulary, MOST_DATES)
    torch.manual_seed(SEED)
    curves = {}
    for name, model in models(len(vocabulary.tokens)).items():
        torch.manual_seed(SEED)  # whatever was trained before
        print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
        loss = teacher_forcing(dates.PAD, label_smoothing=0.1)
        Trainer(model, schedule=noam(128, min(200, steps), scale=0.5), loss=loss).fit(batches, steps)
        curves[name] = by_length(sentences, accuracies(model, sentences, vocabulary))
        print("  dates read right, by length: " + ", ".join(f"{n:.0f}: {a:.0%}" for n, a in zip(*curves[name], strict=True)))
    path = out / "rnn.png"
    plot(curves, path)
    print(f"\naccuracy against length: {path}")
    last = {name: accuracy[-1] for name, (_, accuracy) in curves.items()}
    return 0 if last["RNN"] < min(last["RNN, Bahdanau attention"], last["Transformer"]) or steps != STEPS else 1
