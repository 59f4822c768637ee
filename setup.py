"""Builds fast_transformer._C, the compiled kernels; metadata is in pyproject.toml.

    pip install --no-build-isolation .       # against the torch that is installed, not another one pip would fetch

Environment: FAST_TRANSFORMER_SKIP_EXT=1 builds no extension (pure Python, everything runs through the reference);
FORCE_CPU=1 leaves CUDA out, FORCE_CUDA=1 insists on it; MAX_JOBS limits the parallel compilations.
"""

import os
import re
import shutil
import subprocess
import sys
from glob import glob

from setuptools import find_packages, setup

TRITON = "fast_transformer.triton_kernels"
NO_TORCH = (
    "fast_transformer is compiled against the torch it will run with, and no torch can be imported here. Install torch first, "
    "then run `pip install --no-build-isolation .` (pip's isolated builds do not see installed packages), or build without "
    "kernels: `FAST_TRANSFORMER_SKIP_EXT=1 pip install .`"
)
NO_COMPILER = (
    "no C++ compiler found (looked for {}). Install one (Debian: `apt-get install g++`), name it in CXX, or build without "
    "kernels: `FAST_TRANSFORMER_SKIP_EXT=1 pip install .`"
)
NO_NVCC = (
    "nvcc was not found and torch wants CUDA {0}. For the CUDA kernels install the CUDA {0} toolkit and put its bin folder on "
    "the PATH; FORCE_CPU=1 builds without them"
)
WRONG_NVCC = (
    "nvcc ({0}) has CUDA {1}, torch wants CUDA {2}. Put an nvcc of CUDA {2} first on the PATH, install a torch that is built "
    "for CUDA {1}, or leave the CUDA kernels out with FORCE_CPU=1"
)


def flag(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def decide_cuda(
    torch_cuda: str | None, nvcc: str | None, nvcc_cuda: str | None, force_cpu: bool, force_cuda: bool
) -> tuple[bool, str]:
    """Whether to build the CUDA kernels, and why; raises where FORCE_CUDA or the nvcc at hand asks for what cannot be."""
    if force_cpu and force_cuda:
        raise SystemExit("FORCE_CPU=1 and FORCE_CUDA=1 contradict each other: set one")
    if force_cpu:
        return False, "FORCE_CPU=1"
    missing = None
    if torch_cuda is None:
        missing = "this torch is a CPU build: install a CUDA build of torch for the CUDA kernels"
    elif nvcc is None:
        missing = NO_NVCC.format(torch_cuda)
    elif nvcc_cuda.split(".")[0] != torch_cuda.split(".")[0]:  # minor versions are compatible
        raise SystemExit(WRONG_NVCC.format(nvcc, nvcc_cuda, torch_cuda))
    if force_cuda and missing:
        raise SystemExit(f"FORCE_CUDA=1, but {missing}")
    return missing is None, missing or f"torch has CUDA {torch_cuda} and nvcc is {nvcc}"


def nvcc_version(nvcc: str) -> str:
    """The CUDA version of an nvcc, "13.0"."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+\.\d+)", said.stdout)
    if release is None:
        raise SystemExit(f"`{nvcc} --version` names no release ({said.stderr.strip()}); mend it, or build with FORCE_CPU=1")
    return release[1]


def cuda_archs(torch) -> str:
    """TORCH_CUDA_ARCH_LIST if it is set, else the visible GPUs' architectures, else Ampere to Blackwell and what follows."""
    if "TORCH_CUDA_ARCH_LIST" in os.environ:
        return os.environ["TORCH_CUDA_ARCH_LIST"]
    visible = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(visible)) or "8.0;9.0;10.0;12.0+PTX"


def cuda_home(nvcc: str) -> str:
    """The toolkit's folder, from nvcc itself: the nvcc on the PATH may be a script or a link that stands somewhere else."""
    steps = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"TOP=(.*)", steps)
    if top is None:
        raise SystemExit(f"{nvcc} does not say where its CUDA toolkit is; set CUDA_HOME, or leave CUDA out with FORCE_CPU=1")
    return os.path.realpath(top[1].strip())


def extension():
    """The extension module and the command that builds it."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(f"{NO_TORCH} ({error})") from None
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        raise SystemExit(NO_COMPILER.format(compiler))
    nvcc = shutil.which("nvcc") or (cpp_extension.CUDA_HOME and shutil.which("nvcc", path=f"{cpp_extension.CUDA_HOME}/bin"))
    nvcc_cuda = nvcc_version(nvcc) if nvcc and torch.version.cuda else None
    cuda, why = decide_cuda(torch.version.cuda, nvcc, nvcc_cuda, flag("FORCE_CPU"), flag("FORCE_CUDA"))
    print(f"fast_transformer: building CPU{' and CUDA' if cuda else ''} kernels against torch {torch.__version__} ({why})")

    # -ffp-contract lets vector code use fused multiply-add; no -ffast-math: infinities and NaN keep their meaning.
    # -g0: with the debug information that Python asks for the module is ten times as large.
    flags = ["-O3", "-g0", "-std=c++20", "-ffp-contract=fast", "-fno-math-errno", "-Wall"]
    # GCC 12 crashes in its own vectoriser on loops that are vectorised by hand, and warns about its own intrinsics.
    flags += ["-fno-tree-slp-vectorize", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
    sources = glob("csrc/*.cpp") + glob("csrc/autograd/*.cpp") + glob("csrc/cpu/*.cpp") + glob("csrc/cpu/levels/*.cpp")
    kind, compile_args = cpp_extension.CppExtension, {"cxx": flags + openmp}
    if cuda:
        kind = cpp_extension.CUDAExtension
        cpp_extension.CUDA_HOME = os.environ.get("CUDA_HOME") or cuda_home(nvcc)
        sources += glob("csrc/cuda/*.cu")
        archs = os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_archs(torch)
        compile_args["cxx"].append(f'-DFT_CUDA_ARCHS="{archs}"')
        compile_args["nvcc"] = ["-O3"]
    module = kind(
        "fast_transformer._C",
        sorted(sources),
        extra_compile_args=compile_args,
        extra_link_args=openmp,
        depends=glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True),
    )
    return module, cpp_extension.BuildExtension


def main():
    skip = flag("FAST_TRANSFORMER_SKIP_EXT")
    if skip:
        print("fast_transformer: building no kernels (FAST_TRANSFORMER_SKIP_EXT=1)")
    module, build_ext = (None, None) if skip else extension()
    setup(
        packages=[*find_packages(include=["fast_transformer*"], exclude=[TRITON]), TRITON],
        # The Triton kernels have a folder of their own, but live under our name: the top-level name triton_kernels belongs to
        # another package. (The link fast_transformer/triton_kernels does the same for a checkout that is not installed.)
        package_dir={TRITON: "triton_kernels"},
        ext_modules=[] if skip else [module],
        cmdclass={} if skip else {"build_ext": build_ext},
    )


if __name__ == "__main__":
    main()
