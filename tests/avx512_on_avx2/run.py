"""The levels of AVX-512 and AMX on a machine that has AVX2: emulated, under the sanitizers and in the tests of the kernels.

make emulate        half an hour on two cores
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
OUT, PACKAGE = ROOT / "build" / "emulated", ROOT / "build" / "emulated" / "package"
TORCH = Path(torch.__file__).parent
LEVELS = {"avx512": "", "avx512_bf16": "-DFT_AVX512_BF16", "amx": "-DFT_AVX512_BF16 -DFT_AMX"}
EMULATED = f"-I{HERE} -mavx2 -mfma -mf16c -DFT_AVX512 -x c++ csrc/cpu/levels/table.h"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
FLAGS = {
    "sanitized": f"-O1 -g -DFT_POISON {SANITIZE}",
    "optimized": "-O2 -fPIC -fno-math-errno",
}
EVERYTHING_USABLE = f"-include {HERE / 'cpu.h'} csrc/cpu/levels.cpp"
TESTS = "attention linear dropout_add_layer_norm dropout_add_rms_norm activation_dropout additive_attention philox".split()


def compiler(*arguments: str) -> None:
    """Runs the compiler, with flags that hold for all the kernels."""
    flags = "-std=c++20 -fno-tree-slp-vectorize -ffp-contract=fast -w -Wno-psabi"
    subprocess.run([os.environ.get("CXX", "c++"), *flags.split(), *" ".join(arguments).split()], cwd=ROOT, check=True)


def objects(kind: str, sources: dict[str, str]) -> str:
    """Compiles sources, given with the flags of each, besides the emulated levels."""
    (OUT / kind).mkdir(parents=True, exist_ok=True)
    sources = sources | {level: f"-DFT_LEVEL={level} {flags} {EMULATED}" for level, flags in LEVELS.items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compiler, FLAGS[kind], f"-c -o {OUT / kind / name}.o", x) for name, x in sources.items()]
    for job in jobs:
        job.result()
    return " ".join(str(OUT / kind / f"{name}.o") for name in sources)


def sanitize() -> None:
    names = ("csrc/cpu/tasks", "csrc/cpu/levels/generic", "csrc/cpu/levels/avx2", "tests/sanitize")
    run = objects("sanitized", {Path(name).stem: f"{name}.cpp" for name in names} | {"levels": EVERYTHING_USABLE})
    compiler(SANITIZE, run, f"-o {OUT / 'run'}")
    subprocess.run([OUT / "run"], check=True)


def test() -> None:
    """On a copy of the package whose compiled module, else that of the build in place, has every level."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(ROOT / "fast_transformer", PACKAGE / "fast_transformer", ignore=shutil.ignore_patterns("__pycache__"))
    (module,) = (PACKAGE / "fast_transformer").glob("_C*.so")
    own = objects("optimized", {"levels": EVERYTHING_USABLE})
    replaced = {"levels", *LEVELS}
    built = " ".join(str(x) for x in ROOT.glob("build/temp*/csrc/**/*.o") if x.stem not in replaced)
    libraries = f"-L{TORCH / 'lib'} -lc10 -ltorch -ltorch_cpu -ltorch_python -Wl,-rpath,{TORCH / 'lib'}"
    compiler("-shared -fopenmp", built, own, libraries, f"-o {module}")
    files = [ROOT / "tests" / f"test_{name}.py" for name in TESTS]
    # From the package's folder, which so comes first in the path.
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "2", "-k", "not triton", *files], cwd=PACKAGE, check=True)


if __name__ == "__main__":
    sanitize()
    test()
