"""What the benchmarks share: interleaved timing, the machine's own limits, and the CSV that README and plots draw from.

Every variant's answer is checked before it is timed. Variants take turns, so that a slow moment of a shared machine hits all of
them; what counts is the ratio of medians within one run.
"""

import csv
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from fast_transformer import ops

RESULTS = Path(__file__).parent / "results"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def interleave(
    variants: dict[str, Callable[[], object]], seconds: float = 2.0, rounds: int = 15
) -> dict[str, dict[str, float]]:
    """Median, 20 % and 80 % quantile of the milliseconds of each variant, run in turn for about `seconds` each."""
    times = {name: [] for name in variants}
    for fn in variants.values():  # warm-up: caches, allocator, compilation
        fn(), fn()
    started = time.perf_counter()
    while len(next(iter(times.values()))) < rounds or time.perf_counter() - started < seconds * len(variants):
        for name, fn in variants.items():
            begin = time.perf_counter()
            fn()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: quantiles(ms) for name, ms in times.items()}


def quantiles(ms: list[float]) -> dict[str, float]:
    fifths = statistics.quantiles(ms, n=5)
    return {"median_ms": statistics.median(ms), "q20_ms": fifths[0], "q80_ms": fifths[3]}


def need_cuda() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU, and torch sees none: nothing was measured")


def interleave_cuda(
    variants: dict[str, Callable[[], object]], seconds: float = 0.1, rounds: int = 10
) -> dict[str, dict[str, float]]:
    """As `interleave`, in milliseconds of the GPU between two events; `host_ms` is how long a call holds the host.

    Before each call 512 MB are written. So inputs come from memory, not from a cache; and the host, which launches meanwhile,
    is ahead of the GPU: a launch is not measured where it is shorter than that, about 0.1 ms, and the work together.
    """
    cold = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    times, host = ({name: [] for name in variants} for _ in range(2))
    for fn in variants.values():
        fn(), fn()
    started = time.perf_counter()
    while len(next(iter(host.values()))) < rounds or time.perf_counter() - started < seconds * len(variants):
        for name, fn in variants.items():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            cold.zero_()
            events[0].record()
            begin = time.perf_counter()
            fn()
            host[name].append((time.perf_counter() - begin) * 1e3)
            events[1].record()
            times[name].append(events)
        torch.cuda.synchronize()
    return {
        name: quantiles([begin.elapsed_time(end) for begin, end in pairs]) | {"host_ms": statistics.median(host[name])}
        for name, pairs in times.items()
    }


def peak_cuda(fn: Callable[[], object]) -> float:
    """By how many MB a call raises the memory in use at most."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_rate_cuda() -> float:
    """Bytes a second that a copy of 1 GB reads and writes: what the GPU's memory is measured by."""
    x, y = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * x.numel() / interleave_cuda({"copy": lambda: y.copy_(x)})["copy"]["median_ms"] * 1e3


def write_csv(name: str, rows: list[dict[str, object]], device: str = "cpu") -> Path:
    """Replaces results/<name>.csv; every row carries where and with what it was measured.

    What a CPU without AVX-512, or with AMX, gives goes to a folder of its level, as results/avx2/<name>.csv.
    """
    folder = RESULTS
    if device == "cpu":
        level = ops.build_info()["cpu_level"]
        where = {"cpu": cpu_name(), "level": level, "threads": torch.get_num_threads()}
        if level in ("generic", "avx2", "amx"):
            folder = RESULTS / level
    else:
        where = {"gpu": torch.cuda.get_device_name(), "triton": version("triton"), "cudnn": torch.backends.cudnn.version()}
    where |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} | where)
    return path
