"""Builds the package with nvcc on a machine that needs no GPU, installs it and looks at what came out (`make cuda-check`).

It builds a copy of the sources, with the Python that runs this file and its torch, which must be a CUDA build.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ["csrc", "fast_transformer", "triton_kernels", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md"]

CHECK = """
import torch, fast_transformer as ft
from fast_transformer import functional, ops
assert ops.missing is None, ops.missing
assert ops.cuda_archs is not None
for op in ("dropout_add_layer_norm", "activation_dropout"):
    for name in (op, op + "_backward"):
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fast_transformer::{name}", key), (name, key)
assert not torch.cuda.is_available()
x = torch.randn(4, 16, requires_grad=True)
layer = ft.TransformerEncoderLayer(16, 2, 32, batch_first=True)
layer(x[None]).sum().backward()
assert x.grad.isfinite().all()
try:
    functional.dropout(x, 0.1, backend="cuda")
except RuntimeError as error:
    assert "the tensors are on cpu" in str(error)
print("torch", torch.__version__, "with CUDA", torch.version.cuda, "and kernels for", ops.cuda_archs)
print("CPU and CUDA kernels are registered; tensors on the CPU work")
"""


def main() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "FORCE_CUDA": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        for name in SOURCES:
            source, target = ROOT / name, Path(folder, "source", name)
            target.parent.mkdir(exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"), symlinks=True)
            else:
                shutil.copy(source, target)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        started = time.monotonic()
        build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", folder, f"{folder}/source"]
        subprocess.run(build, env=environment, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        print(f"{wheel.name}: built in {time.monotonic() - started:.0f} s, {wheel.stat().st_size / 2**20:.1f} MiB")
        subprocess.run([*pip, "install", "--no-deps", "--force-reinstall", str(wheel)], check=True)
        subprocess.run([sys.executable, "-c", CHECK], cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    main()
