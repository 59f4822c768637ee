"""additive_attention on CPU against plain PyTorch, eager and compiled: time, rate and peak memory (Linux only).

    python benchmarks/bench_additive_attention.py     interleaved, writes results/additive_attention.csv
    pytest benchmarks --benchmark-only                the same variants under pytest-benchmark

The work is B L S D tangents, in forward and once more in backward: `tanh_per_ns` counts those. `peak_MB` is what a call needs
above what was there before it, beside `scores_MB` (B L S numbers in float32) and `tangents_MB` (one B L S D tensor in the
dtype of the inputs). Eager weighs the tangents by a matrix product, which is faster there; compiled by a sum, which the
compiler fuses with them. L = 1 is a step of a recurrent decoder.
"""

import itertools

import pytest
import torch
from bench_memory import peak
from common import interleave, write_csv

from fast_transformer import functional

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = [(16, 128, 128, 256), (2, 512, 512, 128), (64, 1, 128, 512)]  # B, L, S, D; values are as wide as keys
WORK = ("forward", "forward+backward")
CASES = list(itertools.product(WORK, SHAPES, DTYPES))
PROVIDERS = ("fast_transformer", "eager", "compiled")


def eager(query, key, value, weight):
    scores = torch.tanh(query[:, :, None] + key[:, None]) @ weight
    return scores.softmax(-1) @ value


def summed(query, key, value, weight):
    scores = (torch.tanh(query[:, :, None] + key[:, None]) * weight).sum(-1)
    return scores.softmax(-1) @ value


def setup(case, provider):
    """A function that does the work once and returns the output (and gradients)."""
    work, (B, L, S, D), dtype = case
    torch.manual_seed(0)
    backward = work == "forward+backward"
    inputs = [torch.randn(B, n, D) for n in (L, S, S)] + [torch.randn(D) * D**-0.5]
    inputs = [x.to(DTYPES[dtype]).requires_grad_(backward) for x in inputs]
    grad = torch.randn(B, L, D, dtype=DTYPES[dtype])
    op = {"fast_transformer": functional.additive_attention, "eager": eager}.get(provider)
    if provider == "compiled":
        op = torch.compile(summed, dynamic=False)

    def run():
        out = op(*inputs)
        return (out, *torch.autograd.grad(out, inputs, grad)) if backward else (out,)

    return run


def check(case, variants):
    """Every variant's output and gradients are those of the eager one in float32, to what the dtype can hold."""
    want = setup((case[0], case[1], "float32"), "eager")()
    for provider, fn in variants.items():
        for got, expected in zip(fn(), want, strict=True):
            error = (got - expected).abs().max() / expected.abs().max()
            assert error <= (1e-4 if case[2] == "float32" else 5e-2), (case, provider, error)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_speed(benchmark, case, provider):
    benchmark(setup(case, provider))


def main():
    rows = []
    for case in CASES:
        work, (B, L, S, D), dtype = case
        torch._dynamo.reset()
        with torch.set_grad_enabled(work == "forward+backward"):
            variants = {provider: setup(case, provider) for provider in PROVIDERS}
            check(case, variants)
            times = interleave(variants, seconds=0.5, rounds=7)
            peaks = {provider: peak(fn) for provider, fn in variants.items()}
        ours = times["fast_transformer"]["median_ms"]
        tangents = B * L * S * D * (2 if work == "forward+backward" else 1)
        for provider, t in times.items():
            row = {"work": work, "B_L_S_D": f"{B} {L} {S} {D}", "dtype": dtype, "provider": provider, **t}
            row |= {"over_ours": t["median_ms"] / ours, "tanh_per_ns": tangents / t["median_ms"] / 1e6}
            row |= {"peak_MB": peaks[provider], "scores_MB": B * L * S * 4 / 2**20}
            rows.append(row | {"tangents_MB": B * L * S * D * DTYPES[dtype].itemsize / 2**20})
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    print(write_csv("additive_attention", rows))


if __name__ == "__main__":
    main()
