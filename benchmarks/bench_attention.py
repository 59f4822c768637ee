"""attention on CPU against the best of PyTorch: F.scaled_dot_product_attention, matmul-softmax-matmul, and that compiled.

    python benchmarks/bench_attention.py [float32]  interleaved, writes results/attention.csv; of one dtype, or of all
    pytest benchmarks --benchmark-only              the same variants under pytest-benchmark

FLOPs of a forward pass: 4 B H L S D (two products); of forward and backward 3.5 times that (seven products); with a causal
mask, or half padded, half. `over_mm` divides the rate by that of torch.mm on 2048 x 2048 matrices in the same run. Decoding
is bound by memory: `share_of_read` compares with the time in which key and value are read and summed. `over_unpadded`: how
much faster half the keys are than all of them.
"""

import itertools
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import interleave, write_csv

from fast_transformer import functional

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TINY = (1, 4, 8, 16)  # what a call costs
SHORT, LONG = [(32, 8, 64, 64), (8, 8, 128, 64)], [(8, 8, 512, 64), (1, 8, 2048, 64)]  # B, H, L, D
WORK = {
    "forward": [TINY, *SHORT, (4, 8, 512, 64), (1, 8, 4096, 64)],
    "causal forward": [(8, 8, 128, 64), (4, 8, 512, 64), (1, 8, 4096, 64)],
    "forward+backward": [TINY, *SHORT, *LONG],
    "forward+backward, dropout 0.1": SHORT + LONG,
    "forward+backward, learned bias": SHORT + LONG,
    "forward, half padded": [(8, 8, 512, 64)],
    "decode": [(8, 8, 2048, 64)],  # L = 1, S = 2048
}
CASES = [(work, shape, dtype) for work, shapes in WORK.items() for shape, dtype in itertools.product(shapes, DTYPES)]
PROVIDERS = ("fast_transformer", "sdpa", "plain", "compiled")


def plain(q, k, v, *, mask=None, bias=None, causal=False, dropout_p=0.0):
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return F.dropout(scores.softmax(-1), dropout_p) @ v


def sdpa(q, k, v, *, mask=None, bias=None, causal=False, dropout_p=0.0):
    attn_mask = bias if mask is None else mask
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=causal, dropout_p=dropout_p)


def setup(case, provider):
    """A function that does the work once and returns the output (and gradients)."""
    work, (B, H, L, D), dtype = case
    torch.manual_seed(0)
    queries = 1 if work == "decode" else L
    q, grad = (torch.randn(B, H, queries, D, dtype=DTYPES[dtype]) for _ in range(2))
    k, v = (torch.randn(B, H, L, D, dtype=DTYPES[dtype]) for _ in range(2))
    backward = work.startswith("forward+backward")
    inputs, options = [q, k, v], {}
    if "bias" in work:
        options["bias"] = torch.randn(1, H, L, L, dtype=DTYPES[dtype])
        inputs.append(options["bias"])
    if "dropout" in work:
        options["dropout_p"] = 0.1
    if "causal" in work:
        options["causal"] = True
    if "padded" in work:
        options["mask"] = (torch.arange(L) < L // 2).expand(B, 1, 1, L)
    for x in inputs:
        x.requires_grad_(backward)
    op = {"fast_transformer": functional.attention, "sdpa": sdpa}.get(provider, plain)
    if provider == "compiled":
        op = torch.compile(plain, dynamic=False)

    def run():
        out = op(q, k, v, **options)
        return (out, *torch.autograd.grad(out, inputs, grad)) if backward else (out,)

    return run


def check(case, variants):
    """Where nothing is random: every variant's output and gradients are those of the plain one in float64."""
    if "dropout" in case[0]:
        return
    want = variants["plain"]()
    for fn in variants.values():
        for got, expected in zip(fn(), want, strict=True):
            assert (got - expected).abs().max() <= (1e-4 if case[2] == "float32" else 5e-2) * expected.abs().max()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_speed(benchmark, case, provider):
    benchmark(setup(case, provider))


def peaks(dtypes):
    """The rate of large matrix products in GFLOP/s, by dtype: what the machine's arithmetic is measured by."""
    n = 2048
    matrices = {name: torch.randn(n, n, dtype=DTYPES[name]) for name in dtypes}
    times = interleave({name: partial(torch.mm, x, x) for name, x in matrices.items()}, seconds=2.0)
    return {name: 2 * n**3 / t["median_ms"] / 1e6 for name, t in times.items()}


def measures(case, times, variants, mm):
    """What is reported beside the times: the ratio to the best of torch, and shares of what the machine can do."""
    work, (B, H, L, D), dtype = case
    ours = times["fast_transformer"]["median_ms"]
    best = min((p for p in times if p != "fast_transformer"), key=lambda p: times[p]["median_ms"])
    flops = 4 * B * H * L * L * D * (3.5 if "backward" in work else 1) * (0.5 if "causal" in work or "padded" in work else 1)
    row = {"over_best": times[best]["median_ms"] / ours, "best": best}
    row |= {"gflops": flops / ours / 1e6, "over_mm": flops / ours / 1e6 / mm[dtype], "share_of_read": "", "over_unpadded": ""}
    if work == "decode":
        k, v = (torch.randn(B, H, L, D, dtype=DTYPES[dtype]) for _ in range(2))
        pair = interleave({"ours": variants["fast_transformer"], "read": lambda: (k.sum(), v.sum())}, seconds=1.0)
        row |= {"gflops": "", "over_mm": "", "share_of_read": pair["read"]["median_ms"] / pair["ours"]["median_ms"]}
    if "padded" in work:
        pair = interleave({"ours": variants["fast_transformer"], "all": setup(("forward", case[1], dtype), "fast_transformer")})
        row["over_unpadded"] = pair["all"]["median_ms"] / pair["ours"]["median_ms"]
    return row


def main(dtypes):
    mm, rows = peaks(dtypes), []
    print({dtype: f"{rate:.0f} GFLOP/s in torch.mm" for dtype, rate in mm.items()})
    for case in CASES:
        if case[2] not in dtypes:
            continue
        torch._dynamo.reset()
        backward = case[0].startswith("forward+backward")
        with torch.set_grad_enabled(backward):
            variants = {provider: setup(case, provider) for provider in PROVIDERS}
            check(case, variants)
            times = interleave(variants, seconds=0.3, rounds=15 if case[1][2] < 2048 else 5)
            row = measures(case, times, variants, mm)
        print(*case, {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        for provider, t in times.items():
            place = {"work": case[0], "B_H_L_D": " ".join(map(str, case[1])), "dtype": case[2], "provider": provider}
            rows.append(place | t | (row if provider == "fast_transformer" else dict.fromkeys(row, "")))
    print(write_csv("attention", rows))


if __name__ == "__main__":
    main(sys.argv[1:] or list(DTYPES))
