"""The norms on a GPU against PyTorch eager and compiled and, where installed, Liger and apex.

    python benchmarks/bench_norm_gpu.py        needs a CUDA GPU; interleaved, writes results/norm_gpu.csv

Bytes that must move, for rows × N elements of e bytes: forward reads x and residual and writes the result and the sum, 4 e;
backward reads two gradients and the sum and writes one gradient, with dropout two: 4 e or 5 e. `share_of_copy` is that
traffic's rate over that of a copy of 16 Mi elements (2 e), which takes turns with the others. Targets: 0.85 forward for
N >= 2048, and never slower than eager PyTorch forward+backward.
"""

import importlib.util
import itertools
import statistics

import torch
import torch.nn.functional as F
from common import write_csv

from fast_transformer import functional, ops

ELEMENTS = 2**24
SIZES = [256, 512, 1024, 2048, 4096, 8192, 16384]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NORMS = ("layer_norm", "rms_norm")
CASES = list(itertools.product(NORMS, SIZES, DTYPES, (0.0, 0.1), (False, True)))  # norm, N, dtype, dropout_p, backward


def fast_transformer(norm, x, residual, weight, bias, p):
    if norm == "rms_norm":
        return functional.dropout_add_rms_norm(x, residual, weight, dropout_p=p, eps=1e-5, prenorm=True, backend="cuda")
    return functional.dropout_add_layer_norm(x, residual, weight, bias, dropout_p=p, prenorm=True, backend="cuda")


def eager(norm, x, residual, weight, bias, p):
    total = residual + (F.dropout(x, p) if p else x)
    if norm == "rms_norm":
        return F.rms_norm(total, weight.shape, weight, 1e-5), total
    return F.layer_norm(total, weight.shape, weight, bias), total


def liger(norm, x, residual, weight, bias, p):
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    x = F.dropout(x, p) if p else x
    if norm == "rms_norm":
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-5, 0.0, "llama", False)
    total = residual + x
    return LigerLayerNormFunction.apply(total, weight, bias, 1e-5), total


def apex(norm, x, residual, weight, bias, p):
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

    total = residual + (F.dropout(x, p) if p else x)
    if norm == "rms_norm":
        return fused_rms_norm_affine(total, weight, weight.shape, 1e-5), total
    return fused_layer_norm_affine(total, weight, bias, weight.shape, 1e-5), total


def providers():
    compiled = torch.compile(eager, dynamic=False)
    found = {"fast_transformer": fast_transformer, "torch": eager, "torch.compile": compiled}
    return found | {
        f.__name__: f for f, package in ((liger, "liger_kernel"), (apex, "apex")) if importlib.util.find_spec(package)
    }


def setup(case, op):
    """A function that does the work once and returns its results (and gradients)."""
    norm, n, dtype, p, backward = case
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": DTYPES[dtype]}
    x, residual, grad, grad_sum = (torch.randn(ELEMENTS // n, n, **options) for _ in range(4))
    inputs = [t.requires_grad_(backward) for t in (x, residual, torch.rand(n, **options), torch.rand(n, **options))]
    wanted = inputs if norm == "layer_norm" else inputs[:3]

    def run():
        out = op(norm, *inputs, p)
        return (*out, *torch.autograd.grad(out, wanted, (grad, grad_sum))) if backward else out

    return run


def check(case, variants):
    """Where nothing is random: every variant's result and gradient of x are those of PyTorch."""
    if case[3] == 0.0:
        want = variants["torch"]()
        for name, fn in variants.items():
            for got, like in zip(fn()[:3], want, strict=False):
                limit = (1e-4 if case[2] == "float32" else 4e-2) * like.abs().max()
                assert (got - like).abs().max() <= limit, (case, name)


def interleave(variants, rounds=60):
    """Median, 20 % and 80 % quantile of each variant's milliseconds, run in turn, between two events of the GPU's own."""
    for fn in variants.values():
        for _ in range(3):
            fn()
    times = {name: [] for name in variants}
    for _ in range(rounds):
        for name, fn in variants.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            fn()
            end.record()
            times[name].append((begin, end))
    torch.cuda.synchronize()
    result = {}
    for name, events in times.items():
        ms = [begin.elapsed_time(end) for begin, end in events]
        quantiles = statistics.quantiles(ms, n=5)
        result[name] = {"median_ms": statistics.median(ms), "q20_ms": quantiles[0], "q80_ms": quantiles[3]}
    return result


def main():
    if not torch.cuda.is_available():
        raise SystemExit("bench_norm_gpu needs a CUDA GPU, and torch sees none here: nothing was measured")
    if ops.cuda_archs is None:
        raise SystemExit(
            "bench_norm_gpu needs the CUDA kernels, and this build has none: python -m fast_transformer.info says why"
        )
    rows = []
    for case in CASES:
        torch._dynamo.reset()
        norm, n, dtype, p, backward = case
        variants = {name: setup(case, op) for name, op in providers().items()}
        check(case, variants)
        source = torch.empty(ELEMENTS, device="cuda", dtype=DTYPES[dtype])
        target = torch.empty_like(source)
        times = interleave(variants | {"copy": lambda source=source, target=target: target.copy_(source)})
        copy = times.pop("copy")["median_ms"]
        moved = 4 + (4 + (p > 0)) * backward
        work = "forward+backward" if backward else "forward"
        where = {
            "gpu": torch.cuda.get_device_name(),
            "norm": norm,
            "rows": ELEMENTS // n,
            "n": n,
            "dtype": dtype,
            "dropout_p": p,
        }
        for name, t in times.items():
            rows.append(where | {"work": work, "provider": name} | t | {"share_of_copy": moved / 2 * copy / t["median_ms"]})
        ours, theirs = (times[name]["median_ms"] for name in ("fast_transformer", "torch"))
        print(f"{norm:10} {n:6} {dtype:8} p={p} {work:16} {ours:7.3f} ms", end="")
        print(f", {theirs / ours:5.2f} x torch, {moved / 2 * copy / ours:4.2f} of a copy")
    print(write_csv("norm_gpu", rows))


if __name__ == "__main__":
    main()
