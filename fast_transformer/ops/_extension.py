"""Loads the compiled module. `missing` is None, or the reason why there is none and the command that builds it.

FAST_TRANSFORMER_CPU_LEVEL names a lower instruction set than the CPU's best: generic, avx2, avx512, avx512_bf16.
"""

import contextlib
import importlib
import os
import warnings
from types import ModuleType

BUILD_COMMAND = "pip install --no-build-isolation ."

C: ModuleType | None = None
missing: str | None = None
try:
    C = importlib.import_module("fast_transformer._C")
except ImportError as error:
    missing = f"the compiled module fast_transformer._C is not usable ({error}); build it with `{BUILD_COMMAND}`"
    warnings.warn(f"{missing}. Until then every op runs through the slower pure-PyTorch reference.", stacklevel=2)

if C is not None and (level := os.environ.get("FAST_TRANSFORMER_CPU_LEVEL")):
    C.use_level(level)


def build_info() -> dict | None:
    """Facts about the compiled module (torch it was built against, CPU levels, CUDA architectures); None without one."""
    return None if C is None else C.build_info()


ready = C and C.ready  # see functional.ready
heads_fit = C and C.heads_fit  # whether the shapes of query, key and value of attention go together

# The GPU architectures that the CUDA kernels were built for, as text; None if there are no CUDA kernels.
cuda_archs: str | None = C and C.build_info()["cuda_archs"]


@contextlib.contextmanager
def cpu_level(name: str):
    """Runs the CPU kernels of another instruction set, one of build_info()["cpu_levels"], for a while."""
    before = C.build_info()["cpu_level"]
    C.use_level(name)
    try:
        yield
    finally:
        C.use_level(before)
