"""Which tiles make the attention kernels fastest on this GPU: prints rows for TILES in triton_kernels/tiles.py.

    python benchmarks/tune_attention.py [--seconds 300] [--kernels forward query] [--head-dims 64 128] [--dtypes bfloat16]

Row by row: the candidates are compiled and checked side by side in many processes, where those drop out that do not fit into
the GPU, spill registers or give another answer than the tile in the table. The others take turns; timed is a whole call, of
which nothing but the one kernel changes. Rows that were not reached when the time is over keep what the table says.
"""

import argparse
import itertools
import multiprocessing
import os
import time
from contextlib import contextmanager
from functools import lru_cache, partial

import torch
from bench_attention_gpu import TOKENS, WIDTH
from common import interleave_cuda, need_cuda
from triton.runtime.jit import JITFunction

from fast_transformer.functional import attention as attend
from fast_transformer.triton_kernels import attention
from fast_transformer.triton_kernels.tiles import HEAD_DIMS, Tile, architecture

DEVICE, DTYPES = "cuda", {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SPILLS = 64  # words of a thread that may go through memory
TOLERANCES = {2: 2e-2, 4: 1e-5}  # of an answer, relative to its norm, by the bytes of an element
TABLE = attention.tile

# What is tried: block_m, block_n, warps, stages, for 16 bits and heads up to 128; larger rows get smaller blocks.
CANDIDATES = {
    "forward": ((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)),
    "decode": ((16,), (32, 64, 128), (2, 4, 8), (2, 3, 4)),
    "key_value": ((32, 64, 128), (64, 128), (4, 8), (1, 2, 3)),
    "query": ((64, 128), (32, 64, 128), (4, 8), (1, 2, 3)),
    "bias": ((32, 64, 128), (32, 64, 128), (4, 8), (1, 2)),
    "weights": ((32, 64, 128), (32, 64, 128), (4, 8), (1, 2)),
}


def candidates(kernel: str, head_dim: int, itemsize: int) -> list[Tile]:
    blocks_m, blocks_n, *rest = CANDIDATES[kernel]
    shrink = itemsize // 2 * max(1, head_dim // 128)
    smaller = [sorted({max(16, block // shrink) for block in blocks}) for blocks in (blocks_m, blocks_n)]
    return [Tile(*choice) for choice in itertools.product(*smaller, *rest)]


@contextmanager
def tiled(kernel: str, tile: Tile):
    """Calls launch this kernel in this tile."""
    attention.tile = lambda name, *rest: tile if name == kernel else TABLE(name, *rest)
    try:
        yield
    finally:
        attention.tile = TABLE


@lru_cache(maxsize=1)
def work(kernel: str, head_dim: int, dtype: torch.dtype):
    """A function that launches the kernel, among others, and returns what they compute."""
    torch.manual_seed(0)
    H, tokens = WIDTH // head_dim, TOKENS * 2 // dtype.itemsize
    L, S = {"decode": (1, 8192), "bias": (1024, 1024), "weights": (1024, 1024)}.get(kernel, (4096, 4096))
    B = 4 if kernel == "decode" else max(1, tokens // L)
    q, grad, k, v = (torch.randn(B, n, H, head_dim, dtype=dtype, device=DEVICE).transpose(1, 2) for n in (L, L, S, S))
    options = dict(causal=kernel in ("forward", "key_value", "query"), return_weights="mean" if kernel == "weights" else None)
    inputs = [q, k, v] + ([torch.randn(1, H, L, S, dtype=dtype, device=DEVICE)] if kernel == "bias" else [])
    if kernel in ("forward", "decode", "weights"):
        return lambda: as_tuple(attend(q, k, v, backend="triton", **options))
    for x in inputs:
        x.requires_grad_()
    out = attend(q, k, v, bias=inputs[3] if kernel == "bias" else None, backend="triton", **options)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@lru_cache(maxsize=1)
def usual(kernel, head_dim, dtype):
    return work(kernel, head_dim, dtype)()


def launch(kernel: str, head_dim: int, dtype: torch.dtype, tile: Tile):
    with tiled(kernel, tile):
        return work(kernel, head_dim, dtype)()


def why_not(task) -> str | None:
    """Compiles a candidate, in a process of its own; the reason why it is none."""
    kernel, head_dim, dtype, tile = task
    spills, run = [0], JITFunction.run

    def recorded(self, *args, **kwargs):
        compiled = run(self, *args, **kwargs)
        if self.fn.__name__ == ("forward" if kernel == "decode" else kernel) + "_kernel":
            spills.append(compiled.n_spills)
        return compiled

    try:
        expected = usual(kernel, head_dim, dtype)
        JITFunction.run = recorded
        got = launch(*task)
        off = max(((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(got, expected, strict=True))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]
    finally:
        JITFunction.run = run
    if not off <= TOLERANCES[dtype.itemsize]:
        return f"wrong by {off:.2g}"
    return f"spills {max(spills)} words" if max(spills) > SPILLS else None


def best(kernel: str, head_dim: int, dtype: torch.dtype, pool, until: float) -> Tile:
    """The fastest tile, the one in the table included."""
    table = TABLE(kernel, architecture(torch.device(DEVICE)), dtype, head_dim)
    tiles = list(dict.fromkeys([table, *candidates(kernel, head_dim, dtype.itemsize)]))
    waiting = [pool.apply_async(why_not, ((kernel, head_dim, dtype, tile),)) for tile in tiles]
    reasons = {}
    for tile, result in zip(tiles, waiting, strict=True):
        try:
            reasons[tile] = result.get(max(0.0, until - time.monotonic()))
        except multiprocessing.TimeoutError:
            reasons[tile] = "not compiled in time"
    fit = [tile for tile in tiles if reasons[tile] is None]
    dropped = ", ".join(sorted({reason.split(":")[0] for reason in reasons.values() if reason}))
    if not fit:
        print(f"{kernel} D{head_dim} {dtype}: nothing fits ({dropped})", flush=True)
        return table
    times = interleave_cuda({t: partial(launch, kernel, head_dim, dtype, t) for t in fit}, seconds=0.03, rounds=7)
    ranked = sorted(fit, key=lambda t: times[t]["median_ms"])
    shown = ", ".join(f"{tuple(t)} {times[t]['median_ms']:.3f}" for t in ranked[:3])
    before = f"{times[table]['median_ms']:.3f} ms" if table in times else reasons[table]
    print(f"{kernel} D{head_dim} {dtype}: {shown} ms; in the table {tuple(table)} {before}")
    print(f"    {len(fit)} of {len(tiles)} timed; the others: {dropped or 'none'}", flush=True)
    return ranked[0]


def main(kernels, head_dims, dtypes, seconds, processes):
    until, found = time.monotonic() + seconds, {}
    rows = list(itertools.product(dtypes, head_dims, kernels))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for i, (dtype, head_dim, kernel) in enumerate(rows):
            if time.monotonic() > until:
                print(f"{len(rows) - i} of {len(rows)} rows were not reached")
                break
            found[dtype, head_dim, kernel] = best(kernel, head_dim, DTYPES[dtype], pool, until)
    arch = architecture(torch.device(DEVICE))
    for dtype in dtypes:
        print(f'    "{arch}": {{\n        {DTYPES[dtype].itemsize}: {{')
        for kernel in kernels:
            row = (found.get((dtype, D, kernel)) or TABLE(kernel, arch, DTYPES[dtype], D) for D in HEAD_DIMS)
            print(f'            "{kernel}": ({", ".join(str(tuple(tile)) for tile in row)}),')
        print("        },\n    },")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kernels", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=list(HEAD_DIMS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--processes", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    arguments = parser.parse_args()
    need_cuda()
    main(arguments.kernels, arguments.head_dims, arguments.dtypes, arguments.seconds, arguments.processes)
