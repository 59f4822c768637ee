"""How large the tiles of each attention kernel are: a table, so that nothing is tuned while a user waits.

benchmarks/tune_attention.py measures candidates on a GPU and prints rows for it.
"""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Queries and keys of a block, warps of a program, and how many blocks are in flight from memory."""

    block_m: int
    block_n: int
    warps: int
    stages: int


HEAD_DIMS = (64, 128, 256)  # a row serves heads up to that size
DECODE = 16  # so many queries are few

# Queries and keys of a block, warps, stages, for each of HEAD_DIMS. 32-bit products do not use tensor cores: registers decide.
FLOAT32 = {
    "forward": ((64, 32, 8, 2), (32, 32, 8, 2), (32, 16, 8, 1)),
    "decode": ((16, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1)),
    "key_value": ((32, 32, 8, 2), (16, 32, 8, 1), (16, 16, 8, 1)),
    "query": ((32, 32, 4, 2), (32, 16, 8, 1), (16, 16, 8, 1)),
    "bias": ((32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    "weights": ((32, 32, 4, 1), (32, 16, 8, 1), (16, 16, 8, 1)),
}
TILES = {
    "ampere": {  # and compute capability 12: 99 KiB of shared memory, but for 8.0
        2: {
            "forward": ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 8, 2)),
            "decode": ((16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 2)),
            "key_value": ((32, 128, 8, 2), (32, 64, 8, 1), (16, 64, 8, 1)),
            "query": ((128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
            "bias": ((64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
            "weights": ((64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)),
        },
        4: FLOAT32,
    },
    "hopper": {
        2: {
            "forward": ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2)),
            "decode": ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 2)),
            "key_value": ((32, 128, 8, 2), (32, 128, 8, 2), (32, 32, 4, 1)),
            "query": ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 1)),
            "bias": ((64, 64, 4, 1), (64, 64, 8, 1), (32, 32, 4, 1)),
            "weights": ((64, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1)),
        },
        4: FLOAT32,
    },
    "blackwell": {
        2: {
            "forward": ((128, 128, 8, 3), (128, 128, 8, 2), (64, 64, 8, 2)),
            "decode": ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 2)),
            "key_value": ((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 4, 1)),
            "query": ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 1)),
            "bias": ((64, 64, 4, 1), (64, 64, 8, 1), (32, 32, 4, 1)),
            "weights": ((64, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1)),
        },
        4: FLOAT32,
    },
    "amd": {  # warps of 64; 64 KiB
        2: {
            "forward": ((128, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 1)),
            "decode": ((16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 1)),
            "key_value": ((32, 64, 8, 1), (32, 64, 8, 1), (16, 64, 8, 1)),
            "query": ((128, 64, 8, 3), (128, 32, 8, 2), (64, 16, 8, 1)),
            "bias": ((64, 64, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1)),
            "weights": ((64, 64, 4, 1), (64, 64, 8, 1), (32, 32, 4, 1)),
        },
        4: FLOAT32,
    },
}
INTERPRETED = Tile(32, 32, 4, 1)


def architecture(device: torch.device) -> str:
    """Which part of the table serves a device."""
    if device.type != "cuda":
        return "interpreted"
    if torch.version.hip is not None:
        return "amd"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "hopper", 10: "blackwell"}.get(major, "ampere")


def processors(device: torch.device) -> int:
    """How many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def tile(kernel: str, arch: str, dtype: torch.dtype, head_dim: int) -> Tile:
    if arch == "interpreted":
        return INTERPRETED
    row = next(i for i, limit in enumerate(HEAD_DIMS) if head_dim <= limit)
    return Tile(*TILES[arch][dtype.itemsize][kernel][row])
