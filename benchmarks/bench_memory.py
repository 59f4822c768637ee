"""Peak memory of attention and of attention weights, above what was there before the call; Linux only.

    python benchmarks/bench_memory.py       writes results/memory.csv

A training step (forward and backward) of (1, 8, L, 64) in float32: query, key, value, their gradients, output and its gradient
are 8 tensors of 8 L 64 elements; the plain path adds several of 8 L L. Weights of MultiheadAttention, averaged over the heads,
are B L S elements, which torch.nn makes out of B H L S.
"""

import ctypes

import torch
from common import write_csv

import fast_transformer
from fast_transformer import functional

WEIGHTS = (8, 512, 512, 8)  # B, L, width, heads


def status(field: str) -> float:
    """A field of this process's memory status, in MB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def peak(fn) -> float:
    fn()  # what is loaded or kept on a first call
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # gives back what was freed, which would hide the next call's need
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark
    before = status("VmRSS")
    fn()
    return status("VmHWM") - before


def plain(q, k, v):
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


def training_step(op, L):
    q, k, v = (torch.randn(1, 8, L, 64, requires_grad=True) for _ in range(3))
    return lambda: torch.autograd.grad(op(q, k, v).sum(), (q, k, v))


def main():
    rows = []
    for provider, op, lengths in (
        ("fast_transformer", functional.attention, (2048, 4096, 16384)),
        ("plain", plain, (2048, 4096)),
    ):
        for L in lengths:
            case = {"work": "attention, training step", "shape": f"1 8 {L} 64", "provider": provider}
            rows.append(case | {"peak_MB": peak(training_step(op, L)), "scores_MB": 8 * L * L * 4 / 2**20})
            print(rows[-1], flush=True)
    B, L, width, heads = WEIGHTS
    x = torch.randn(B, L, width)
    for provider, library in (("fast_transformer", fast_transformer), ("torch", torch.nn)):
        module = library.MultiheadAttention(width, heads, batch_first=True).eval()
        with torch.no_grad():
            for need_weights in (False, True):
                megabytes = peak(lambda m=module, need=need_weights: m(x, x, x, need_weights=need))
                case = {"work": f"MultiheadAttention, need_weights={need_weights}", "shape": " ".join(map(str, WEIGHTS))}
                rows.append(case | {"provider": provider, "peak_MB": megabytes, "scores_MB": B * L * L * 4 / 2**20})
                print(rows[-1], flush=True)
    print(write_csv("memory", rows))


if __name__ == "__main__":
    main()
