"""The norms on a GPU against PyTorch eager and compiled and, where installed, Liger and apex.

    python benchmarks/bench_norm_gpu.py [--seconds 40]        needs a CUDA GPU; interleaved, writes results/norm_gpu.csv

Bytes that must move, for rows × N elements of e bytes: forward reads x and residual and writes the result and the sum, 4 e;
backward reads two gradients and the sum and writes one gradient, with dropout two: 4 e or 5 e. `share_of_copy` is that
traffic's rate over that of a copy. Targets: 0.85 forward for N >= 2048, and never slower than eager PyTorch forward+backward.
"""

import argparse
import importlib.util
import itertools
import time

import torch
import torch.nn.functional as F
from common import copy_rate_cuda, interleave_cuda, need_cuda, write_csv

from fast_transformer import functional, ops

ELEMENTS = 2**24
SIZES = [256, 512, 1024, 2048, 4096, 8192, 16384]
COMPILED = (1024, 4096)  # each takes seconds to compile
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# norm, N, dtype, dropout_p, backward
CASES = [("layer_norm", *c) for c in itertools.product(SIZES, ("bfloat16",), (0.0, 0.1), (False, True))]
CASES += [("rms_norm", *c) for c in itertools.product(SIZES, ("bfloat16",), (0.0,), (False, True))]
CASES += [("layer_norm", *c) for c in itertools.product(SIZES, ("float32",), (0.0,), (False, True))]


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


def providers(n):
    found = {"fast_transformer": fast_transformer, "torch": eager}
    if n in COMPILED:
        found["torch.compile"] = torch.compile(eager, dynamic=False)
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


def main(seconds):
    if ops.cuda_archs is None:
        raise SystemExit(
            "bench_norm_gpu needs the CUDA kernels, and this build has none: python -m fast_transformer.info says why"
        )
    until, rows, copy_rate = time.monotonic() + seconds, [], copy_rate_cuda()
    for case in CASES:
        if time.monotonic() > until:
            print(f"out of time before {case}")
            break
        torch._dynamo.reset()
        norm, n, dtype, p, backward = case
        variants = {name: setup(case, op) for name, op in providers(n).items()}
        check(case, variants)
        times = interleave_cuda(variants)
        moved = (4 + (4 + (p > 0)) * backward) * ELEMENTS * DTYPES[dtype].itemsize
        work = "forward+backward" if backward else "forward"
        place = {"norm": norm, "rows": ELEMENTS // n, "n": n, "dtype": dtype, "dropout_p": p, "work": work}
        for name, t in times.items():
            rows.append(place | {"provider": name} | t | {"share_of_copy": moved / t["median_ms"] * 1e3 / copy_rate})
        ours, theirs = (times[name]["median_ms"] for name in ("fast_transformer", "torch"))
        print(f"{norm:10} {n:6} {dtype:8} p={p} {work:16} {ours:7.3f} ms", end="")
        print(f", {theirs / ours:5.2f} x torch, {moved / ours * 1e3 / copy_rate:4.2f} of a copy", flush=True)
        path = write_csv("norm_gpu", rows, "cuda")  # after each case: a limit from outside loses nothing
    print(path if rows else "nothing was measured")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=40.0)
    arguments = parser.parse_args()
    need_cuda()
    main(arguments.seconds)
