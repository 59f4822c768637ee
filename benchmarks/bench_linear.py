"""linear for few rows against F.linear: how near reading the weights it comes.

    python benchmarks/bench_linear.py       interleaved, writes results/linear.csv
    pytest benchmarks --benchmark-only      the same variants under pytest-benchmark

A call takes the next of several weights, more than the caches hold, as in a model that is decoded with. `gb_s` counts the N × K
weights alone. `share_of_read` compares that with the rate of `read`, a sum over the same weights. `prepacked` is for
information: oneDNN with weights that it has packed before, which is a copy of them that goes stale when they change. It takes
bfloat16 with AVX-512 only.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from common import interleave, write_csv

from fast_transformer import functional, ops

ROWS = (1, 8, 16, 32, 64)
SHAPES = [(1536, 512), (2048, 512), (512, 2048), (32000, 512)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = list(itertools.product(SHAPES, DTYPES, ROWS))
PROVIDERS = ("fast_transformer", "torch", "prepacked", "read")
COLD = 128 * 2**20  # bytes of weights that take turns


def setup(case, provider):
    """A function that works with all the weights once and returns the last result, and the number of weights."""
    (N, K), dtype, rows = case
    torch.manual_seed(0)
    x, bias = torch.randn(rows, K).to(DTYPES[dtype]), torch.randn(N).to(DTYPES[dtype])
    count = -(-COLD // (N * K * x.element_size()))
    weights = [torch.randn(N, K).to(DTYPES[dtype]) for _ in range(count)]
    if provider == "prepacked":
        weights = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]
    op = {
        "fast_transformer": lambda w: functional.linear(x, w, bias, backend="cpu"),
        "torch": lambda w: F.linear(x, w, bias),
        "prepacked": lambda w: torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], ""),
        "read": lambda w: w.view(torch.int32).sum() if dtype == "bfloat16" else w.sum(),
    }[provider]

    @torch.no_grad()
    def run():
        for weight in weights:
            out = op(weight)
        return out

    return run, count


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_speed(benchmark, case, provider):
    benchmark(setup(case, provider)[0])


def main():
    rows = []
    for case in CASES:
        (N, K), dtype, m = case
        packs = dtype == "float32" or "avx512" in ops.build_info()["cpu_levels"]
        variants = {provider: setup(case, provider) for provider in PROVIDERS if packs or provider != "prepacked"}
        count = variants["read"][1]
        variants = {provider: run for provider, (run, _) in variants.items()}
        want = variants["torch"]()
        for provider in variants:
            if provider == "read":
                continue
            assert (variants[provider]() - want).abs().max() <= (1e-5 if dtype == "float32" else 2e-2) * want.abs().max()
        times = interleave(variants, seconds=0.5, rounds=5)
        ms = {provider: t["median_ms"] / count for provider, t in times.items()}
        ours = ms["fast_transformer"]
        over_torch, share = ms["torch"] / ours, ms["read"] / ours
        print(f"{m:2} rows, {N}x{K} {dtype:8} {ours:7.3f} ms  {over_torch:.2f} x torch  {share:.2f} of reading", flush=True)
        for provider, t in times.items():
            size = DTYPES[dtype].itemsize
            row = {"rows": m, "n": N, "k": K, "dtype": dtype, "provider": provider} | {q: v / count for q, v in t.items()}
            row["gb_s"] = N * K * size / ms[provider] / 1e6
            fused = provider == "fast_transformer"
            rows.append(row | {"over_torch": over_torch if fused else "", "share_of_read": share if fused else ""})
    print(write_csv("linear", rows))


if __name__ == "__main__":
    main()
