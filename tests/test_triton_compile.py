"""The Triton kernels as compiled for GPUs that need not be there: they fit, they use the tensor cores."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("triton_compile.py")
SHARED = {
    "sm_80": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
}  # KiB a program may have; sm_80: as sm_86, sm_89
MULTIPLYING = {f"{name}_kernel" for name in ("forward", "key_value", "query", "bias", "weights")}
# What training and inference run most: not a byte of spilled registers, but for those listed.
MAIN = ("plain", "window", "padding", "grouped", "decode", "bfloat16-D64", "bfloat16-D128")
SPILLS = {
    ("sm_80", "bfloat16-D64", "key_value_kernel"): 8,
    ("sm_80", "bfloat16-D128", "forward_kernel"): 8,
    ("sm_120", "bfloat16-D128", "forward_kernel"): 16,
    ("gfx942", "bfloat16-D128", "key_value_kernel"): 84,
}


@cache
def processes():
    """One process a GPU, side by side."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {
        target: subprocess.Popen([sys.executable, SCRIPT, target], env=environment, stdout=subprocess.PIPE, text=True)
        for target in SHARED
    }


@cache
def compiled(target):
    output, _ = processes()[target].communicate()
    assert processes()[target].returncode == 0
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("target", SHARED)
def test_every_row_of_the_table_fits_and_uses_tensor_cores(target):
    kernels = compiled(target)
    assert {k["kernel"] for k in kernels} >= MULTIPLYING
    for k in kernels:
        assert k["shared"] <= SHARED[target] * 1024, k
        if k["kernel"] in MULTIPLYING and "float32" not in k["case"]:
            assert k["tensor_cores"], k
            # Hopper's own instruction multiplies 64 rows at least.
            assert target != "sm_90" or k["tensor_cores"] == "HGMMA" or k["case"] in ("decode", "bfloat16-D256"), k


@pytest.mark.parametrize("target", SHARED)
def test_registers_are_not_spilled_where_it_matters(target):
    for k in compiled(target):
        if k["case"] in MAIN:
            assert k["spills"] <= SPILLS.get((target, k["case"], k["kernel"]), 0), k


@pytest.mark.parametrize("target", SHARED)
def test_additive_scores_live_in_registers(target):
    kernels = [k for k in compiled(target) if k["case"].startswith("additive")]
    assert {k["kernel"] for k in kernels} == {"scores_kernel", "gradient_kernel"}
    assert all(k["spills"] == 0 for k in kernels), kernels


def test_hopper_and_blackwell_load_through_the_tensor_memory_accelerator():
    for target in ("sm_90", "sm_100"):
        loads = {k["kernel"] for k in compiled(target) if k["accelerated_loads"]}
        assert loads >= {"forward_kernel", "key_value_kernel", "query_kernel"}


def test_another_length_needs_no_other_kernel():
    again = [k["compiled"] for k in compiled("sm_90") if k["case"].endswith("-other-lengths")]
    assert again and not any(again)
