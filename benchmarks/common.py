"""What the benchmarks share: interleaved timing, the machine's own limits, and the CSV that README and plots draw from.

Every variant's answer is checked before it is timed. Variants take turns, so that a slow moment of a shared machine hits all of
them; what counts is the ratio of medians within one run.
"""

import csv
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

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
    result = {}
    for name, ms in times.items():
        quantiles = statistics.quantiles(ms, n=5)
        result[name] = {"median_ms": statistics.median(ms), "q20_ms": quantiles[0], "q80_ms": quantiles[3]}
    return result


def write_csv(name: str, rows: list[dict[str, object]]) -> Path:
    """Replaces results/<name>.csv; every row carries where and with what it was measured."""
    where = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} | where)
    return path
