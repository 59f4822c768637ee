"""What the tests of training share: an encoder-decoder whose stacks come from torch.nn or the twins, and tasks to learn."""

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import fast_transformer
from fast_transformer.models import Seq2SeqTransformer

PAD, BEGIN, END, VOCABULARY = 0, 1, 2, 13
TASKS = {"copy": lambda x: x, "reverse": lambda x: x[::-1], "sort": sorted}


def seq2seq(
    nn=fast_transformer,
    *,
    d_model: int = 16,
    n_heads: int = 2,
    n_layers: int = 1,
    dropout: float = 0.0,
    norm_first: bool = True,
) -> Seq2SeqTransformer:
    """A small model with the stacks of fast_transformer or torch.nn; from one seed, the same weights in both."""
    sizes = (d_model, n_heads, n_layers, n_layers, 2 * d_model)
    options = {"dropout": dropout, "norm_first": norm_first}
    model = Seq2SeqTransformer(VOCABULARY, VOCABULARY, *sizes, **options, pad_id=PAD)
    if nn is not fast_transformer:
        stock = nn.Transformer(*sizes, **options, batch_first=True)
        if not norm_first:
            stock.encoder.norm = stock.decoder.norm = None
        stock.load_state_dict(model.transformer.state_dict())
        model.transformer = stock
    return model


def examples(n: int, rng: random.Random, task: Callable[[list[int]], list[int]] = sorted) -> tuple[Tensor, Tensor]:
    """Sources (n, S) of 3 to 8 random tokens and targets (n, S + 2), padded to the longest."""
    sources = [rng.choices(range(END + 1, VOCABULARY), k=rng.randint(3, 8)) for _ in range(n)]
    targets = [[BEGIN, *task(x), END] for x in sources]
    return tuple(
        torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in rows], batch_first=True, padding_value=PAD)
        for rows in (sources, targets)
    )


def endless(task: Callable[[list[int]], list[int]] = sorted, n: int = 64) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """A function epoch -> batches without end, the same for the same epoch."""

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        rng = random.Random(epoch)
        while True:
            yield examples(n, rng, task)

    return batches


def parameters(model: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    """Bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
