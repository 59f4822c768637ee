"""Are the kernels right on this GPU? Every feature in every dtype against the reference in float64, and what only a GPU has.

    python benchmarks/gpu_correctness.py [--seconds 100] [--processes N] [--only TEXT]

It needs no pytest; the norms and activations need the compiled module. Each case runs twice, with uninitialised memory
poisoned: an element that no one wrote, or that two programs wrote, shows. The reference runs on the CPU. Nearly all of the time
goes into compiling kernels, so the cases are spread over processes. Without a GPU, TRITON_INTERPRET=1 runs them smaller, in
Triton's interpreter (and the norms on their CPU kernels).
"""

import argparse
import itertools
import math
import multiprocessing
import os
import time
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from fast_transformer import functional
from fast_transformer.functional import activation_dropout, attention, dropout_add_layer_norm, dropout_add_rms_norm

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
# How large an error may be relative to the truth, in the norm of the whole tensor: 8 units of roundoff in half precision, where
# weights, their gradients, the output and its product with its gradient are each rounded once; more in float32, where nothing
# is rounded on the way, but a few hundred terms are summed and the log-sum-exp is rounded (2^-24 of its size).
TOLERANCES = {torch.bfloat16: 8 * 2.0**-9, torch.float16: 8 * 2.0**-12, torch.float32: 32 * 2.0**-24}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = -(2**40) - 12345  # of dropout, for every backend


@dataclass(frozen=True, eq=False)
class Case:
    L: int = 300
    S: int = 300
    D: int = 64
    Dv: int | None = None  # None: as D
    B: int = 2
    H: int = 4
    Hkv: int | None = None  # None: as H
    mask: str | None = None  # the dimensions of a random mask: those of "BHLS", or 1
    bias: str | None = None  # ... and of a random bias, which has a gradient
    blind: bool = False  # the mask hides every key from some queries
    padded: bool = False  # the mask hides keys at both ends
    layout: str = "projected"  # as a projection leaves it: (B, L, H, D) in memory
    extras: dict = field(default_factory=lambda: dict(return_lse=True))
    options: dict = field(default_factory=dict)


MEAN, PER_HEAD = (dict(return_weights=kind, return_lse=True) for kind in ("mean", "per_head"))
CASES = {
    "plain": Case(extras={}),
    "lse": Case(),
    "long": Case(L=1030, S=2000),
    "one block": Case(L=64, S=64),
    "one key": Case(S=1),
    "D128": Case(D=128, layout="contiguous", options=dict(causal=True)),
    "D256": Case(D=256, L=200, S=200),
    "D80 Dv40": Case(D=80, Dv=40, options=dict(causal=True)),
    "D33 Dv5": Case(L=111, S=77, D=33, Dv=5, layout="contiguous"),
    "D1": Case(L=63, S=1023, D=1),
    "odd strides": Case(L=111, S=63, D=100, layout="every second"),
    "grouped": Case(H=8, Hkv=2, options=dict(causal=True)),
    "causal": Case(extras={}, options=dict(causal=True)),
    "causal L > S": Case(L=333, S=111, options=dict(causal=True)),
    "causal offset": Case(L=130, S=517, options=dict(causal=True, query_offset=387)),
    "causal, blind rows": Case(options=dict(causal=True, query_offset=-150)),
    "window": Case(L=700, S=700, options=dict(window=(100, 7))),
    "window, causal": Case(L=700, S=700, options=dict(window=(200, None), causal=True)),
    "softcap, scale": Case(options=dict(softcap=3.0, scale=0.3)),
    "padding": Case(mask="B11S", padded=True),
    "mask": Case(mask="BHLS", blind=True),
    "mask of queries": Case(mask="11L1", blind=True),
    "mask, causal": Case(mask="1HLS", options=dict(causal=True)),
    "bias BHLS": Case(bias="BHLS"),
    "bias 1HLS": Case(bias="1HLS", options=dict(causal=True)),
    "bias B1LS": Case(bias="B1LS"),
    "bias 1H1S": Case(L=200, bias="1H1S"),
    "bias B1L1": Case(bias="B1L1"),
    "bias 1111": Case(bias="1111"),
    "dropout": Case(L=333, S=201, extras={}, options=dict(dropout_p=0.1)),
    "dropout, causal": Case(options=dict(dropout_p=0.3, causal=True)),
    "dropout, bias": Case(bias="1HLS", options=dict(dropout_p=0.3)),
    "mean weights": Case(extras=MEAN),
    "mean weights, causal, dropout": Case(extras=MEAN, options=dict(causal=True, dropout_p=0.2)),
    "per-head weights": Case(extras=PER_HEAD, mask="B11S", padded=True),
    "decode": Case(L=1, S=8000),
    "decode, grouped": Case(L=3, S=5001, D=128, H=8, Hkv=1, options=dict(causal=True, query_offset=4998)),
    "decode, padded": Case(L=1, S=4000, mask="B11S", padded=True, extras={}),
    "everything": Case(
        *(201, 333, 48, 40, 2, 6, 2, "B11S", "1HLS"),
        padded=True,
        extras=MEAN,
        options=dict(causal=True, query_offset=99, window=(250, None), softcap=5.0, scale=0.2, dropout_p=0.2),
    ),
}


def randn(*shape: int) -> Tensor:
    """Normal numbers that every dtype holds exactly, so that one truth serves them all."""
    return torch.randn(shape).bfloat16().double()


def smaller(n: int) -> int:
    return n if n <= 16 or DEVICE == "cuda" else 8 + n // 12


@cache
def problem(name: str):
    """query, key, value, bias in float64, the mask, and the options of a call."""
    case = CASES[name]
    torch.manual_seed(0)
    sizes = {"B": case.B, "H": case.H, "L": smaller(case.L), "S": smaller(case.S), "1": 1}
    B, H, L, S = (sizes[letter] for letter in "BHLS")
    Hkv = case.Hkv or H
    inputs = [randn(B, H, L, case.D), randn(B, Hkv, S, case.D), randn(B, Hkv, S, case.Dv or case.D)]
    inputs.append(None if case.bias is None else randn(*(sizes[letter] for letter in case.bias)))
    mask = None
    if case.mask is not None:
        mask = torch.rand([sizes[letter] for letter in case.mask]) < 0.8
        if case.blind:
            mask[..., L // 3 : L // 2, :] = False
        if case.padded:
            mask[0, ..., : S // 5] = mask[-1, ..., S // 2 :] = False
    return inputs, mask, case.options | case.extras


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "every second":
        return x.repeat_interleave(2, -1)[..., ::2]
    return x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "projected" else x


def results(name: str, backend: str, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """What attention returns, and the gradients of its inputs for random gradients of all that it returns."""
    inputs, mask, options = problem(name)
    query, key, value = (laid_out(x.to(device, dtype), CASES[name].layout).requires_grad_() for x in inputs[:3])
    bias = None if inputs[3] is None else inputs[3].to(device, dtype).requires_grad_()
    mask = None if mask is None else mask.to(device)
    functional._random.draw_seed = lambda p, where: torch.tensor(SEED, device=where) if p > 0.0 else None
    returned = attention(query, key, value, mask=mask, bias=bias, backend=backend, **options)
    returned = returned if isinstance(returned, tuple) else (returned,)
    torch.manual_seed(1)
    cotangents = [randn(*x.shape).to(x) for x in returned]
    leaves = {"query": query, "key": key, "value": value} | ({} if bias is None else {"bias": bias})
    grads = torch.autograd.grad(returned, list(leaves.values()), cotangents)
    names = ["output", *(["weights"] if "return_weights" in options else []), *(["lse"] if "return_lse" in options else [])]
    found = dict(zip(names, returned, strict=True)) | {f"d {n}": g for n, g in zip(leaves, grads, strict=True)}
    return {n: x.detach() for n, x in found.items()}


def error(got: Tensor, exact: Tensor) -> float:
    """Relative to the norm of the truth; infinite where shapes or infinities differ or something is not a number."""
    got = got.double().cpu()
    if got.shape != exact.shape or not torch.equal(got.isinf(), exact.isinf()) or got.isnan().any():
        return math.inf
    finite = exact.isfinite()
    return ((got[finite] - exact[finite]).norm() / (exact[finite].norm() or 1.0)).item()


def check_case(name: str, dtype: torch.dtype) -> float:
    """The largest error in units of what is allowed."""
    exact, worst = results(name, "reference", "cpu", torch.float64), 0.0
    for backend in ("triton", "reference"):
        got = results(name, backend, DEVICE, dtype)
        for what, x in got.items():
            assert x.dtype == (torch.float32 if what == "lse" else dtype), f"{backend}: {what} is {x.dtype}"
            size = error(x, exact[what])
            assert size <= TOLERANCES[dtype], f"{backend}: error of {what} is {size:.2g}, allowed {TOLERANCES[dtype]:.2g}"
            blind = exact["output"].abs().amax(-1) == 0
            assert what != "output" or not x.cpu()[blind].any(), f"{backend}: a query that sees nothing has an output"
            worst = max(worst, size / TOLERANCES[dtype])
        if backend == "triton":
            again = results(name, backend, DEVICE, dtype)
            different = [what for what, x in got.items() if not torch.equal(x, again[what])]
            assert not different, f"a second run gives other bits: {', '.join(different)}"
    return worst


# What is no case: a function of a dtype, which may return a remark


def step(q, k, v, **options):
    """Output and gradients of a training step."""
    out = attention(q, k, v, causal=True, **options)
    return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def leaves(dtype: torch.dtype, L: int = 300) -> list[Tensor]:
    return [torch.randn(2, 4, smaller(L), 64, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)]


def check_choice(dtype):
    """Without being told, attention takes Triton; float64 and second derivatives go to the reference."""
    q, k, v = leaves(dtype, 40)
    chosen = attention(q, k, v, backend=None if DEVICE == "cuda" else "triton")
    assert torch.equal(chosen, attention(q, k, v, backend="triton"))
    (grad,) = torch.autograd.grad(chosen.float().square().sum(), q, create_graph=True)
    assert torch.autograd.grad(grad.float().square().sum(), k)[0].isfinite().all()
    assert attention(q.double(), k.double(), v.double()).dtype == torch.float64


def check_compile(dtype):
    functional._random.draw_seed = DRAW_SEED
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    for options in ({}, {"dropout_p": 0.2}):
        fn = torch.compile(lambda *inputs, o=options: attention(*inputs, causal=True, **o), fullgraph=True, backend=backend)
        inputs, found = leaves(dtype), []
        for f in (fn, lambda *inputs, o=options: attention(*inputs, causal=True, **o)):
            torch.manual_seed(3)
            out = f(*inputs)
            found.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
        if not options or DEVICE == "cpu":  # inductor draws seeds from a generator of its own
            assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)), "the compiled call gives other bits"
        assert all(x.isfinite().all() for x in found[0])


def check_graph(dtype):
    """A captured training step, replayed on other inputs, gives the bits of an eager one; and draws dropout anew."""
    functional._random.draw_seed = DRAW_SEED
    for options in ({}, {"dropout_p": 0.2}):
        inputs = leaves(dtype)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(*inputs, **options)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(*inputs, **options)
        with torch.no_grad():
            for x in inputs:
                x.copy_(torch.randn_like(x))
        graph.replay()
        first = [x.clone() for x in captured]
        graph.replay()
        if options:
            assert not torch.equal(first[0], captured[0]), "two replays drop the same weights"
        else:
            eager = step(*inputs)
            assert all(torch.equal(x, y) for x, y in zip(captured, eager, strict=True)), "a replay gives other bits"


def check_far_elements(dtype):
    """Past 2^31 elements of weights, bias and mask: the last queries against a call of their own."""
    n, few = 46400, 70
    if (free := torch.cuda.mem_get_info()[0]) < 40e9:
        return f"left out: it needs 40 GB of memory, {free / 1e9:.0f} are free;"
    q, k, v = (torch.randn(1, 1, n, 16, device=DEVICE, dtype=dtype) for _ in range(3))
    mask = (torch.arange(n, device=DEVICE) % 3 != 0).expand(n, n)
    bias = torch.randn(n, n, device=DEVICE, dtype=dtype)
    out, weights = attention(q, k, v, mask=mask, bias=bias, return_weights="per_head")
    tail, some = slice(n - few, n), (q[:, :, -few:], k, v)
    own, own_weights = attention(*some, mask=mask[tail], bias=bias[tail], return_weights="per_head")
    assert error(weights[:, :, tail], own_weights.double().cpu()) <= TOLERANCES[dtype]
    assert error(out[:, :, tail], own.double().cpu()) <= TOLERANCES[dtype]


def norm_results(op: str, n: int, dropout_p: float, backend: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """What a norm of 33 rows of n, or an activation of them, returns, and the gradients of all inputs."""
    torch.manual_seed(0)
    x, residual, weight, bias = (randn(*s).to(device, dtype).requires_grad_() for s in ((33, n), (33, n), (n,), (n,)))
    options = dict(dropout_p=dropout_p, backend=backend)
    if op == "layer norm":
        inputs, out = [x, residual, weight, bias], dropout_add_layer_norm(x, residual, weight, bias, prenorm=True, **options)
    elif op == "rms norm":
        inputs, out = [x, residual, weight], dropout_add_rms_norm(x, residual, weight, prenorm=True, **options)
    else:
        inputs, out = [x, bias], (activation_dropout(x, bias, op, **options),)
    cotangents = [randn(*y.shape).to(y) for y in out]
    return [*out, *torch.autograd.grad(out, inputs, cotangents)]


def check_norms(dtype):
    """Rows for a warp, for a block and for more, aligned and not."""
    functional._random.draw_seed = lambda p, where: torch.tensor(SEED, device=where) if p > 0.0 else None
    ops, sizes = ("layer norm", "rms norm", "gelu", "none"), (3, 100, 768, 4096, 9001, 20000)
    for op, n, p in itertools.product(ops, sizes, (0.0, 0.3)):
        exact = norm_results(op, n, p, "reference", "cpu", torch.float64)
        got, again = (norm_results(op, n, p, DEVICE, DEVICE, dtype) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True)), f"{op} of {n}: a second run gives other bits"
        errors = [error(x, y) for x, y in zip(got, exact, strict=True)]
        assert max(errors) <= TOLERANCES[dtype], f"{op} of {n}, dropout {p}: errors {errors}, allowed {TOLERANCES[dtype]:.2g}"


DRAW_SEED = functional._random.draw_seed
SPECIAL = {"choice of a path": check_choice, "torch.compile": check_compile, "norms": check_norms}
if DEVICE == "cuda":
    SPECIAL |= {"CUDA graph": check_graph, "far elements": check_far_elements}


# Many processes


broken: str | None = None  # the check after which this process can use its GPU no more


def prepare() -> None:
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)


def run(task: tuple[str, str]) -> tuple[str, str, str]:
    """The name, what is wrong or nothing, and a remark."""
    global broken
    name, dtype = task
    began = time.perf_counter()
    if broken is not None:
        return f"{name} {dtype}", f"not checked: its process was broken by {broken}", ""
    try:
        if name in SPECIAL:
            remark = SPECIAL[name](DTYPES[dtype]) or ""
        else:
            remark = f"{check_case(name, DTYPES[dtype]):.2f} of what is allowed"
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return f"{name} {dtype}", "", f"{remark} {time.perf_counter() - began:.1f} s"
    except Exception as caught:
        if "CUDA error" in str(caught):
            broken = f"{name} {dtype}"
        lines = [line.strip() for line in str(caught).splitlines() if line.strip()] or [""]
        return f"{name} {dtype}", f"{type(caught).__name__}: {' ... '.join(dict.fromkeys([lines[0], lines[-1]]))}"[:300], ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--only", default="", help="only what has this text in its name or dtype")
    arguments = parser.parse_args()
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("torch sees no GPU: nothing was checked. TRITON_INTERPRET=1 checks in Triton's interpreter")
    until = time.monotonic() + arguments.seconds
    tasks = [(name, dtype) for dtype in DTYPES for name in (*SPECIAL, *CASES)]
    tasks = [task for task in tasks if arguments.only in " ".join(task)]
    missing, wrong = {" ".join(task) for task in tasks}, []
    with multiprocessing.get_context("spawn").Pool(arguments.processes, prepare) as pool:
        found = pool.imap_unordered(run, tasks)
        while missing:
            try:
                name, fault, remark = found.next(timeout=until - time.monotonic())
            except multiprocessing.TimeoutError:
                break
            missing.remove(name)
            wrong += [f"{name}: {fault}"] if fault else []
            print(f"{name:45} {fault or 'right'}  {remark}", flush=True)
    print(f"{len(tasks) - len(missing) - len(wrong)} of {len(tasks)} right; wrong:", *wrong or ["none"], sep="\n    ")
    print("not reached:", ", ".join(sorted(missing)) or "none")
    raise SystemExit(bool(wrong or missing))


if __name__ == "__main__":
    main()
