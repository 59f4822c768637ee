"""dropout_add_layer_norm against the best PyTorch can do: eager and compiled.

    python benchmarks/bench_dropout_add_layer_norm.py       interleaved, writes results/dropout_add_layer_norm.csv
    pytest benchmarks --benchmark-only                      the same variants under pytest-benchmark

Bytes that must move, for rows × N elements of e bytes (a fresh output's page faults and read-for-ownership come on top):
forward reads x and residual and writes the result: 3 e; a copy into fresh memory reads and writes: 2 e. `share_of_copy` is
the ratio of the two rates, the two taking turns by themselves.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from common import interleave, write_csv

from fast_transformer import functional

SIZES = [(4096, 512), (4096, 1024), (16384, 768)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [
    (size, dtype, dropout_p, backward)
    for size, dtype, dropout_p, backward in itertools.product(SIZES, DTYPES, (0.0, 0.1), (False, True))
]
PROVIDERS = ("fast_transformer", "torch", "torch.compile")


def torch_eager(x, residual, weight, bias, *, dropout_p):
    dropped = F.dropout(x, dropout_p) if dropout_p else x
    return F.layer_norm(residual + dropped, weight.shape, weight, bias)


def setup(case, provider):
    """A function that does the work once and returns its result (and gradients)."""
    (rows, n), dtype, dropout_p, backward = case
    torch.manual_seed(0)
    x, residual, grad = (torch.randn(rows, n, dtype=DTYPES[dtype]) for _ in range(3))
    weight, bias = torch.rand(n), torch.rand(n)
    if dtype != "float32":
        weight, bias = weight.to(DTYPES[dtype]), bias.to(DTYPES[dtype])
    inputs = [t.requires_grad_(backward) for t in (x, residual, weight, bias)]
    if provider == "copy":
        return x.detach().clone
    op = functional.dropout_add_layer_norm if provider == "fast_transformer" else torch_eager
    if provider == "torch.compile":
        op = torch.compile(op, dynamic=False)

    def run():
        out = op(*inputs, dropout_p=dropout_p)
        return (out, *torch.autograd.grad(out, inputs, grad)) if backward else (out,)

    return run


def check(case, variants):
    """Where nothing is random: the output and the gradient of x of every variant are those of PyTorch."""
    if case[2] == 0.0:
        results = {name: fn()[:2] for name, fn in variants.items()}
        for result in results.values():
            for got, want in zip(result, results["torch"], strict=True):
                assert (got - want).abs().max() <= (1e-5 if case[1] == "float32" else 2e-2) * want.abs().max()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_speed(benchmark, case, provider):
    benchmark(setup(case, provider))


def main():
    rows = []
    for case in CASES:
        torch._dynamo.reset()
        (m, n), dtype, dropout_p, backward = case
        variants = {provider: setup(case, provider) for provider in PROVIDERS}
        check(case, variants)
        times = interleave(variants, seconds=1.0)
        ours = times["fast_transformer"]["median_ms"]
        ratio = {"over_eager": times["torch"]["median_ms"] / ours}
        ratio["over_best"] = min(times[p]["median_ms"] for p in PROVIDERS[1:]) / ours
        ratio["share_of_copy"] = ""
        if not backward and not dropout_p:
            pair = interleave({"ours": variants["fast_transformer"], "copy": setup(case, "copy")}, seconds=1.0)
            ratio["share_of_copy"] = 3 / 2 * pair["copy"]["median_ms"] / pair["ours"]["median_ms"]
        work = "forward+backward" if backward else "forward"
        print(f"{m}x{n} {dtype:8} p={dropout_p} {work:16} {ours:8.3f} ms", {k: v and round(v, 2) for k, v in ratio.items()})
        for provider, t in times.items():
            case_row = {"rows": m, "n": n, "dtype": dtype, "dropout_p": dropout_p, "work": work, "provider": provider}
            rows.append(case_row | t | (ratio if provider == "fast_transformer" else dict.fromkeys(ratio, "")))
    print(write_csv("dropout_add_layer_norm", rows))


if __name__ == "__main__":
    main()
