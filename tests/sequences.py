"""What the tests of training share: an encoder-decoder whose parts come from torch.nn or the twins, and tasks to learn."""

import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import fast_transformer

PAD, BEGIN, END, VOCABULARY = 0, 1, 2, 13
TASKS = {"copy": lambda x: x, "reverse": lambda x: x[::-1], "sort": sorted}


class Seq2Seq(torch.nn.Module):
    """source (B, S), target (B, L) -> logits (B, L, V)."""

    pad_id = PAD

    def __init__(
        self,
        nn=fast_transformer,
        *,
        d_model: int = 16,
        n_heads: int = 2,
        n_layers: int = 1,
        dropout: float = 0.0,
        norm_first: bool = True,
    ):
        super().__init__()
        self.scale = math.sqrt(d_model)
        self.embedding = torch.nn.Embedding(VOCABULARY, d_model)
        torch.nn.init.normal_(self.embedding.weight, std=1 / self.scale)
        rates = torch.exp(torch.arange(0, d_model, 2) * (-math.log(1e4) / d_model))
        angles = torch.arange(32)[:, None] * rates
        self.register_buffer("positions", torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1), persistent=False)
        sizes = {"num_encoder_layers": n_layers, "num_decoder_layers": n_layers, "dim_feedforward": 2 * d_model}
        self.transformer = nn.Transformer(d_model, n_heads, **sizes, dropout=dropout, norm_first=norm_first, batch_first=True)
        self.head = torch.nn.Linear(d_model, VOCABULARY)

    def embed(self, tokens: Tensor) -> Tensor:  # (B, L) -> (B, L, E)
        return self.embedding(tokens) * self.scale + self.positions[: tokens.shape[1]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        padding = source == PAD
        masks = {"tgt_mask": future, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return self.head(self.transformer(self.embed(source), self.embed(target), tgt_is_causal=True, **masks))

    @torch.no_grad()
    def greedy(self, source: Tensor, length: int) -> Tensor:
        target = torch.full_like(source[:, :1], BEGIN)
        for _ in range(length):
            target = torch.cat((target, self(source, target)[:, -1:].argmax(dim=-1)), dim=1)
        return target


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
