"""Whole modules, twin against torch.nn: a training step (forward, backward) and inference.

    python benchmarks/bench_layers.py       interleaved, writes results/layers.csv
    pytest benchmarks --benchmark-only      the same variants under pytest-benchmark

Losses stay in: small modules are dominated by Python and dispatch, inference without dropout by the same matrix products.
"""

import warnings

import pytest
import torch
from common import interleave, write_csv

import fast_transformer

LIBRARIES = {"fast_transformer": fast_transformer, "torch": torch.nn}
# B, L, E, H, FF
SHAPES = [(1, 8, 64, 4, 128), (2, 16, 64, 4, 128), (8, 128, 256, 8, 1024), (32, 64, 512, 8, 2048), (8, 512, 512, 8, 2048)]
MODULES = {
    "TransformerEncoderLayer": lambda lib, shape, p: lib.TransformerEncoderLayer(*shape[2:], dropout=p, batch_first=True),
    "MultiheadAttention with weights": lambda lib, shape, p: lib.MultiheadAttention(*shape[2:4], dropout=p, batch_first=True),
}
WORK = {"training, dropout 0.1": (True, 0.1), "training, dropout 0": (True, 0.0), "inference": (False, 0.1)}
CASES = [(module, work, shape) for module in MODULES for work in WORK for shape in SHAPES]


def setup(case, provider):
    """A function that does the work once and returns the module's output."""
    module, work, shape = case
    training, dropout_p = WORK[work]
    torch.manual_seed(0)
    x = torch.randn(shape[:3])
    layer = MODULES[module](LIBRARIES[provider], shape, dropout_p).train(training)
    inputs = (x,) * (3 if module.startswith("Multihead") else 1)

    def run():
        with torch.set_grad_enabled(training):
            out = layer(*inputs)
            out = out[0] if isinstance(out, tuple) else out
        if training:
            layer.zero_grad()
            out.square().mean().backward()
        return out

    return run


@pytest.mark.parametrize("provider", LIBRARIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_speed(benchmark, case, provider):
    benchmark(setup(case, provider))


def main():
    warnings.filterwarnings("ignore", message="enable_nested_tensor")
    rows = []
    for case in CASES:
        variants = {provider: setup(case, provider) for provider in LIBRARIES}
        if case[1] != "training, dropout 0.1":
            torch.testing.assert_close(*(fn() for fn in variants.values()), rtol=1e-4, atol=1e-4)
        times = interleave(variants, seconds=1.0)
        ratio = times["torch"]["median_ms"] / times["fast_transformer"]["median_ms"]
        print(f"{case[0]:32} {case[1]:22} {case[2]} {ratio:.2f}", flush=True)
        for provider, t in times.items():
            row = {"module": case[0], "work": case[1], "B_L_E_H_FF": " ".join(map(str, case[2])), "provider": provider}
            rows.append(row | t | {"over_torch": ratio if provider == "fast_transformer" else ""})
    print(write_csv("layers", rows))


if __name__ == "__main__":
    main()
