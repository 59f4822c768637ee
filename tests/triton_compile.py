"""Compiles the Triton kernels for GPUs that need not be there: what a call launches is compiled, and not run.

    python tests/triton_compile.py sm_90 ...     prints one JSON line for each kernel

A process of its own, because kernels are either interpreted or compiled, as TRITON_INTERPRET says when they are imported.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fast_transformer.triton_kernels import additive_attention, attention, tiles

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ARCHITECTURE = {"sm_80": "ampere", "sm_90": "hopper", "sm_100": "blackwell", "sm_120": "ampere", "gfx942": "amd"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
bf16, f32 = torch.bfloat16, torch.float32
UNLIMITED = 2**62

MASK, BIAS = torch.rand(2, 1, 1, 256) < 0.5, torch.randn(2, 4, 256, 256, dtype=bf16)
# The features that users meet, for heads of 64 in 16 bits, on one GPU ...
FEATURES = {
    "plain": {},
    "window": dict(first=-100, last=0),
    "window-other-lengths": dict(first=-99, last=1, queries=251),
    "padding": dict(mask=MASK),
    "bias": dict(bias=BIAS),
    "bias-shared": dict(bias=BIAS[:1]),
    "bias-of-keys": dict(bias=BIAS[:, :1, :1]),
    "causal-dropout": dict(last=0, dropout_p=0.1),
    "softcap": dict(last=0, softcap=20.0),
    "grouped": dict(last=0, kv_heads=2),
    "weights-mean": dict(return_weights="mean"),
    "weights-per-head": dict(return_weights="per_head"),
    "decode": dict(queries=1, last=255),
    "strided": dict(transposed=True),
    "D80-Dv40": dict(head_dim=80, value_dim=40),
}
# ... and on each the rows of the tile table with a causal mask, and everything at once.
EVERYTHING = dict(last=0, mask=MASK, bias=BIAS[:1], softcap=20.0, dropout_p=0.1, return_weights="mean")
ROWS = {f"bfloat16-D{head_dim}": dict(head_dim=head_dim, last=0) for head_dim in tiles.HEAD_DIMS} | {"everything": EVERYTHING}
# The rows of float32 are one for all.
FLOAT32 = {f"float32-D{head_dim}": dict(head_dim=head_dim, last=0, dtype=f32) for head_dim in tiles.HEAD_DIMS}

ADDITIVE = {
    "additive-bfloat16": dict(dtype=bf16),
    "additive-float32": dict(dtype=f32),
    "additive-other-lengths": dict(dtype=bf16, queries=75, keys=240),
    "additive-decode": dict(dtype=bf16, queries=1),
}


class NoDevice:
    """Stands for a driver: says what to compile for."""

    def __init__(self, name: str):
        self.name = name

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]


def facts(kernel) -> dict:
    """What the compiler says of a kernel: bytes of shared memory, registers, bytes of spills, tensor core instructions."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers, spills = (int(re.search(rf"\.{name}:\s*(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count"))
        return dict(shared=kernel.metadata.shared, registers=registers, spills=4 * spills, tensor_cores="v_mfma" in text)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    instruction = re.search(r"\b(HGMMA|UTCHMMA|HMMA|QMMA)\b", sass)
    return dict(
        shared=kernel.metadata.shared,
        registers=registers,
        spills=stack,
        tensor_cores=instruction[1]
        if instruction
        else re.search(r"wgmma|tcgen05\.mma|mma\.sync", kernel.asm["ptx"]) is not None,
        accelerated_loads="UTMALDG" in sass,
    )


def call_attention(options: dict) -> None:
    """Forward and backward."""
    options = dict(queries=256, kv_heads=4, head_dim=64, dtype=bf16, first=-UNLIMITED, last=UNLIMITED) | options
    dtype, head_dim = options["dtype"], options["head_dim"]
    sizes = [
        (4, options["queries"], head_dim),
        *((options["kv_heads"], 256, d) for d in (head_dim, options.get("value_dim", head_dim))),
    ]
    query, key, value = (torch.randn(2, *size, dtype=dtype) for size in sizes)
    if options.get("transposed"):
        query, key, value = (x.mT.contiguous().mT for x in (query, key, value))
    bias = options.get("bias")
    dropout_p, returned = options.get("dropout_p", 0.0), options.get("return_weights")
    rest = (
        *(options.get("mask"), None if bias is None else bias.to(dtype), options["first"], options["last"], head_dim**-0.5),
        *(options.get("softcap", 0.0), dropout_p, torch.tensor(1) if dropout_p else None, returned),
    )
    out, weights, lse = attention.attention_forward(query, key, value, *rest)
    grad_weights = torch.empty_like(weights) if returned else None
    inputs = (torch.empty_like(out), grad_weights, torch.empty_like(lse), query, key, value)
    attention.attention_backward(*inputs, *rest, out, lse, bias is not None)


def call_additive(options: dict) -> None:
    options = dict(queries=256, keys=256, size=256) | options
    query, key = (torch.randn(2, options[n], options["size"], dtype=options["dtype"]) for n in ("queries", "keys"))
    weight = query[0, 0]
    grad = additive_attention.additive_scores(query, key, weight)
    additive_attention.additive_scores_backward(grad, query, key, weight)


def launched(target: str, call: Callable[[dict], None], options: dict) -> list[dict]:
    """Name and facts of every kernel that a call with these options launches."""
    found, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        variants = self.device_caches[target][0]
        before = len(variants)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(dict(kernel=self.fn.__name__, compiled=len(variants) > before, **facts(kernel)))

    JITFunction.run = compile_only
    driver.set_active(NoDevice(target))
    attention.architecture = lambda device: ARCHITECTURE[target]
    try:
        call(options)
    finally:
        JITFunction.run = run
    return found


def main(targets: list[str]) -> None:
    for target in targets:
        more = {"sm_90": FEATURES, "sm_80": FLOAT32}.get(target, {})
        for call, cases in ((call_attention, {**more, **ROWS}), (call_additive, ADDITIVE)):
            for name, options in cases.items():
                for found in launched(target, call, options):
                    print(json.dumps(dict(target=target, case=name, **found)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
