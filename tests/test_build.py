"""What setup.py decides, what a build without the compiled module does, and what `info` says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import need_extension

import fast_transformer
from fast_transformer import ops

ROOT = Path(__file__).parents[1]


def load_setup():
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("torch_cuda", "nvcc", "nvcc_cuda", "force_cpu", "force_cuda", "decision", "why"),
    [
        (None, None, None, False, False, False, "CPU build"),
        (None, "/bin/nvcc", None, False, False, False, "CPU build"),
        ("13.0", None, None, False, False, False, "nvcc was not found and torch wants CUDA 13.0"),
        ("13.0", "/bin/nvcc", "13.0", False, False, True, "torch has CUDA 13.0"),
        ("13.0", "/bin/nvcc", "13.2", False, False, True, "torch has CUDA 13.0"),
        ("13.0", "/bin/nvcc", "12.8", True, False, False, "FORCE_CPU"),
        ("13.0", "/bin/nvcc", "13.0", False, True, True, "torch has CUDA 13.0"),
    ],
)
def test_cuda_is_decided_with_a_reason(torch_cuda, nvcc, nvcc_cuda, force_cpu, force_cuda, decision, why):
    got, reason = load_setup().decide_cuda(torch_cuda, nvcc, nvcc_cuda, force_cpu, force_cuda)
    assert got == decision and why in reason


@pytest.mark.parametrize(
    ("torch_cuda", "nvcc", "nvcc_cuda", "force_cpu", "why"),
    [
        (None, "/bin/nvcc", None, False, "FORCE_CUDA=1, but this torch is a CPU build"),
        ("13.0", None, None, False, "FORCE_CUDA=1, but nvcc was not found"),
        ("13.0", "/bin/nvcc", "13.0", True, "contradict"),
        ("12.8", "/bin/nvcc", "13.0", False, r"nvcc \(/bin/nvcc\) has CUDA 13.0, torch wants CUDA 12.8"),
    ],
)
def test_cuda_that_cannot_be(torch_cuda, nvcc, nvcc_cuda, force_cpu, why):
    with pytest.raises(SystemExit, match=why):
        load_setup().decide_cuda(torch_cuda, nvcc, nvcc_cuda, force_cpu, True)


def test_nvcc_says_its_version(tmp_path):
    nvcc = tmp_path / "nvcc"
    for text, version in (("Cuda compilation tools, release 12.8, V12.8.93", "12.8"), ("broken", None)):
        nvcc.write_text(f"#!/bin/sh\necho '{text}'\n")
        nvcc.chmod(0o755)
        if version is not None:
            assert load_setup().nvcc_version(str(nvcc)) == version
        else:
            with pytest.raises(SystemExit, match="names no release"):
                load_setup().nvcc_version(str(nvcc))


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh interpreter at the repository's root."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


WITHOUT_EXTENSION = """
import sys, warnings
sys.modules["fast_transformer._C"] = None  # as if it had not been built
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fast_transformer as ft, torch
    layer = ft.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    layer(torch.randn(2, 5, 16)).sum().backward()
    torch.manual_seed(3)
    kept = ft.functional.dropout(torch.ones(20, 30), 0.4)
print(len(caught), str(caught[0].message))
print(int(kept.count_nonzero()))
try:
    ft.functional.dropout(torch.ones(3), 0.5, backend="cpu")
except RuntimeError as error:
    print(error)
"""


def test_without_the_compiled_module_one_warning_and_everything_works():
    run = python(WITHOUT_EXTENSION)
    assert run.returncode == 0, run.stderr
    warning, kept, forced = run.stdout.splitlines()
    assert warning.startswith("1 ") and "pip install --no-build-isolation ." in warning
    assert "backend='cpu' cannot take this call" in forced
    if ops.missing is None:  # and it draws the very mask that the compiled module draws
        torch.manual_seed(3)
        assert int(fast_transformer.functional.dropout(torch.ones(20, 30), 0.4).count_nonzero()) == int(kept)


@need_extension
def test_info_names_versions_levels_and_backends():
    run = subprocess.run([sys.executable, "-m", "fast_transformer.info"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and not run.stderr, run.stderr
    for part in (torch.__version__, "threads", ops.build_info()["cpu_level"], "attention", "reference", "for CPU tensors"):
        assert part in run.stdout


@need_extension
def test_environment_variable_lowers_the_level():
    code = "from fast_transformer import ops; print(ops.build_info()['cpu_level'])"
    assert python(code, FAST_TRANSFORMER_CPU_LEVEL="generic").stdout.strip() == "generic"
    wrong = python(code, FAST_TRANSFORMER_CPU_LEVEL="avx9000")
    assert wrong.returncode != 0 and "'avx9000' is not one that this CPU can run: generic" in wrong.stderr


def test_triton_kernels_live_under_our_name():
    run = python("import fast_transformer.triton_kernels as t; print(t.__name__)")
    assert run.stdout.strip() == "fast_transformer.triton_kernels", run.stderr
