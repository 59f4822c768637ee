"""attention on a GPU against PyTorch's flash, efficient and cuDNN attention, FlexAttention, flash-attn and xformers.

    python benchmarks/bench_attention_gpu.py [--seconds 150]     interleaved, writes results/attention_gpu.csv
    pytest benchmarks --benchmark-only                           the same variants under pytest-benchmark

bfloat16, 16384 tokens, heads x head_dim = 2048, laid out as a projection leaves them: (B, L, H, D) in memory. FLOPs are
counted as is usual: 4 B H L S D forward, 2.5 times that backward, half under a causal mask. Decoding is bound by memory:
`share_of_copy` compares the rate at which key and value are read with that of a copy. `over_best`: how many times faster than
the fastest of the others; `share_of_cudnn`: the same for cuDNN alone. `peak_MB`: what a call needs beyond what was there
before. Kernels are compiled beforehand, side by side in many processes.
"""

import argparse
import multiprocessing
import os
import time
from functools import cache, partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from common import copy_rate_cuda, interleave_cuda, need_cuda, peak_cuda, write_csv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fast_transformer import functional

DEVICE, DTYPE, TOKENS, WIDTH = "cuda", torch.bfloat16, 16384, 2048
TOLERANCE = 2e-2  # of a result, relative to its norm: ten roundings to bfloat16
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FLEX_LENGTHS = (1024, 4096)  # each takes seconds to compile


def sizes(L: int, D: int, *, S: int | None = None, B: int | None = None) -> tuple[int, ...]:
    return B or TOKENS // L, WIDTH // D, L, S or L, D  # B, H, L, S, D


DIRECTIONS = ("forward", "backward")
SPECIAL = {
    "forward+backward, dropout 0.1": [sizes(2048, 64), sizes(2048, 128)],
    "causal forward+backward, dropout 0.1": [sizes(2048, 64), sizes(2048, 128)],
    "forward+backward, learned bias": [sizes(512, 64), sizes(2048, 64)],
    "forward, mean weights": [sizes(1024, 64)],
    "forward+backward, mean weights": [sizes(1024, 64)],
    "decode": [sizes(1, D, S=8192, B=B) for B, D in ((8, 64), (8, 128), (1, 128))],
}
CASES = [(work, shape) for work, shapes in SPECIAL.items() for shape in shapes]
CASES += [(c + w, sizes(L, D)) for L in reversed(LENGTHS) for D in (64, 128) for c in ("", "causal ") for w in DIRECTIONS]


def sdpa(backend, q, k, v, *, bias=None, causal=False, dropout_p=0.0):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, dropout_p=dropout_p)


def matmul(q, k, v, *, bias=None, causal=False, return_weights=None):
    """Also what is right, in float32."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), float("-inf"))
    weights = scores.softmax(-1)
    return (weights @ v, weights.mean(1)) if return_weights else weights @ v


compiled_flex = torch.compile(flex_attention, dynamic=False)
causal_blocks = cache(lambda L: create_block_mask(lambda b, h, i, j: i >= j, None, None, L, L, device=DEVICE))


def flex(q, k, v, *, bias=None, causal=False):
    score_mod = None if bias is None else lambda score, b, h, i, j: score + bias[0, h, i, j]
    return compiled_flex(q, k, v, score_mod=score_mod, block_mask=causal_blocks(q.shape[2]) if causal else None)


def flash_attn(q, k, v, *, causal=False, dropout_p=0.0):
    from flash_attn import flash_attn_func

    return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p, causal=causal).transpose(1, 2)


def xformers(q, k, v, *, causal=False, dropout_p=0.0):
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    inputs = (x.transpose(1, 2) for x in (q, k, v))
    return memory_efficient_attention(*inputs, attn_bias=LowerTriangularMask() if causal else None, p=dropout_p).transpose(1, 2)


SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
PROVIDERS = {"fast_transformer": functional.attention} | {name: partial(sdpa, backend) for name, backend in SDPA.items()}
PROVIDERS |= {"flex": flex, "matmul": matmul, "compiled": torch.compile(matmul, dynamic=False)}
PROVIDERS |= {"flash_attn": flash_attn, "xformers": xformers}
SLOW_TO_COMPILE = ("flex", "compiled")
FASTEST = ["flash", "efficient", "cudnn", *(name for name in ("flash_attn", "xformers") if find_spec(name))]


def providers(case) -> list[str]:
    work, (_, _, L, S, _) = case
    if "bias" in work:
        return ["fast_transformer", "efficient", "math", "flex"]
    if "weights" in work:
        return ["fast_transformer", "matmul", "compiled"]
    flexible = work == "decode" or L in FLEX_LENGTHS and "dropout" not in work
    return ["fast_transformer", *FASTEST, *(["flex"] if flexible else [])]


def problem(case):
    """The leaves, the gradients of what a call returns, and its options."""
    work, (B, H, L, S, D) = case
    torch.manual_seed(0)
    q, grad, k, v = (torch.randn(B, n, H, D, dtype=DTYPE, device=DEVICE).transpose(1, 2) for n in (L, L, S, S))
    inputs, grads, options = [q, k, v], [grad], {}
    if "bias" in work:
        options["bias"] = torch.randn(1, H, L, S, dtype=DTYPE, device=DEVICE)
        inputs.append(options["bias"])
    if "dropout" in work:
        options["dropout_p"] = 0.1
    if "causal" in work:
        options["causal"] = True
    if "weights" in work:
        options["return_weights"] = "mean"
        grads.append(torch.randn(B, L, S, dtype=DTYPE, device=DEVICE))
    return inputs, grads, options


def results(case, op, inputs, grads, options):
    """A function that does the work of a case once and returns the output, or gradients, or both."""
    work = case[0]
    if work != "decode":
        inputs = [x.detach().requires_grad_() for x in inputs]
    options = options | ({"bias": inputs[3]} if "bias" in options else {})

    def forward():
        out = op(*inputs[:3], **options)
        return out if isinstance(out, tuple) else (out,)

    def backward(results, retain_graph=False):
        return torch.autograd.grad(results, inputs, grads, retain_graph=retain_graph)

    if work.endswith("backward"):
        done = forward()
        return lambda: backward(done, retain_graph=True)
    return lambda: (*(done := forward()), *backward(done)) if "backward" in work else forward()


def setup(case, provider):
    return results(case, PROVIDERS[provider], *problem(case))


def part(case):
    """What is compared: attention goes by batch and head, so one head of the last batch, unless there is a sum over them."""
    return slice(None) if "bias" in case[0] else slice(-1, None), slice(None) if "weights" in case[0] else slice(-1, None)


def truth(case):
    """That part of the results, in float32."""
    inputs, grads, options = problem(case)
    inputs, grads = ([x[part(case)].float() for x in xs] for xs in (inputs, grads))
    return results(case, matmul, inputs, grads, options)()


def right(case, variants, failures):
    """The variants that can do the work, right where nothing is random; adds to `failures` if ours is not among them."""
    exact, passed = None if "dropout" in case[0] else truth(case), {}
    for provider in variants:
        try:
            fn = setup(case, provider)
            got, errors = fn(), [0.0]
            if exact is not None:
                pairs = zip((x[part(case)].float() for x in got), exact, strict=True)
                errors = [((x - y).norm() / y.norm()).item() for x, y in pairs]
            assert all(e <= TOLERANCE for e in errors), f"wrong: relative errors {', '.join(f'{e:.2g}' for e in errors)}"
            passed[provider] = fn
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:150]
            print(*case, provider, "left out,", reason, flush=True)
            if provider == "fast_transformer":
                failures.append(f"{case}: {reason}")
    return passed


def rates(case, provider, times, copy_rate):
    """What is reported beside the times."""
    work, (B, H, L, S, D) = case
    ms = times[provider]["median_ms"]
    flops = 4 * B * H * L * S * D * (3.5 if "forward+backward" in work else 2.5 if "backward" in work else 1)
    row = {"tflops": flops * (0.5 if "causal" in work else 1) / ms / 1e9, "share_of_copy": ""}
    if work == "decode":
        row["share_of_copy"] = 4 * B * H * S * D / ms * 1e3 / copy_rate
    row |= {"over_best": "", "best": "", "share_of_cudnn": ""}
    others = [p for p in times if p != "fast_transformer"]
    if provider == "fast_transformer" and others:
        best = min(others, key=lambda p: times[p]["median_ms"])
        row |= {"over_best": times[best]["median_ms"] / ms, "best": best}
        if "cudnn" in times:
            row["share_of_cudnn"] = times["cudnn"]["median_ms"] / ms
    return row


def configure():
    torch._dynamo.config.recompile_limit = 64  # one function, many shapes
    torch._functorch.config.donated_buffer = False  # backward is timed alone, over and over


def compile_one(task):
    configure()
    try:
        setup(*task)()
        torch.cuda.synchronize()
    except Exception as error:
        print(*task, "does not compile,", str(error).splitlines()[:1], flush=True)


def compile_all(seconds):
    """Fills the compilers' caches on disk, in many processes."""
    cases = [case for case in CASES if not case[0].endswith("forward")]  # before a backward there is a forward
    ours = {(work, shape[-1]): (work, shape) for work, shape in cases}  # a kernel serves all lengths
    tasks = [(case, provider) for case in cases for provider in providers(case) if provider in SLOW_TO_COMPILE]
    tasks += [(case, "fast_transformer") for case in ours.values()]
    with multiprocessing.get_context("spawn").Pool(max(1, min(14, (os.cpu_count() or 2) - 2))) as pool:
        try:
            pool.map_async(compile_one, tasks, chunksize=1).get(seconds)
        except multiprocessing.TimeoutError:
            print("not everything could be compiled beforehand")


def pytest_generate_tests(metafunc):
    metafunc.parametrize("case, provider", [(case, provider) for case in CASES for provider in providers(case)], ids=str)


def test_speed(benchmark, case, provider):
    if not torch.cuda.is_available():
        import pytest  # which the machine with the GPU need not have

        pytest.skip("torch sees no GPU")
    configure()
    fn = setup(case, provider)
    benchmark(lambda: (fn(), torch.cuda.synchronize()))


def main(seconds: float):
    until = time.monotonic() + seconds
    compile_all(seconds / 2)
    configure()
    copy_rate, rows, failures = copy_rate_cuda(), [], []
    patience = seconds / 3  # with what has to be compiled again
    print(f"a copy runs at {copy_rate / 1e12:.2f} TB/s; below: TFLOP/s, or for decoding the share of that rate", flush=True)
    for i, case in enumerate(CASES):
        if time.monotonic() > until:
            failures.append(f"no time was left for {len(CASES) - i} of {len(CASES)} cases, from {case} on")
            break
        with torch.set_grad_enabled(case[0] != "decode"):
            began, chosen = time.monotonic(), [p for p in providers(case) if patience > 0 or p not in SLOW_TO_COMPILE]
            variants = right(case, chosen, failures)
            if set(chosen) & set(SLOW_TO_COMPILE):
                patience -= time.monotonic() - began
            if not variants:
                continue
            times = interleave_cuda(variants)
            peaks = {provider: peak_cuda(fn) for provider, fn in variants.items()}
        found = {provider: rates(case, provider, times, copy_rate) for provider in times}
        for provider, t in times.items():
            place = {"work": case[0], "B_H_L_S_D": " ".join(map(str, case[1])), "dtype": "bfloat16", "provider": provider}
            rows.append(place | t | {"peak_MB": peaks[provider]} | found[provider])
        ratio = found.get("fast_transformer", {}).get("over_best")
        shown = (f"{p} {row['share_of_copy'] or row['tflops']:.4g}" for p, row in found.items())
        print(*case, *shown, f"over_best {ratio or 0:.2f}", flush=True)
        path = write_csv("attention_gpu", rows, DEVICE)  # after each case: a limit from outside loses nothing
    print(path if rows else "nothing was measured", *failures, sep="\n")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0)
    arguments = parser.parse_args()
    need_cuda()
    main(arguments.seconds)
