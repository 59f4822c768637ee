"""python -m fast_transformer.info: versions, what the compiled module runs with, and every backend with its reason."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from . import __version__, functional
from .ops import build_info


def main() -> None:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    cuda = torch.version.cuda or "none (CPU build)"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none visible"
    print(f"fast_transformer  {__version__}")
    print(f"python            {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"torch             {torch.__version__}, CUDA {cuda}, GPU {gpu}")
    print(f"triton            {triton}")
    print(f"threads           {torch.get_num_threads()}")
    info = build_info()
    if info is not None:
        archs = info["cuda_archs"] or "none"
        print(f"compiled module   built against torch {info['torch']}; CUDA architectures: {archs}")
        print(f"CPU kernels       {info['cpu_level']} (this CPU can run {', '.join(info['cpu_levels'])})")
    print()
    functional.backends()


if __name__ == "__main__":
    main()
