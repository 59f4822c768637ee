"""Keys and values kept between the steps of a decoder, so that each step computes those of its new tokens only."""

from typing import NamedTuple

import torch
from torch import Tensor


class KeyValueCache:
    """The keys and values of one attention: room for them is made by doubling, so n steps copy O(n) elements.

    Each call appends its keys, as self-attention wants it.

    Args:
        capacity: for how many tokens room is made at first.
        fixed: for cross-attention: the first call's keys stay. Later calls compute queries only, and may have several (beams)
            for each row of keys, row after row.
    """

    def __init__(self, capacity: int = 64, *, fixed: bool = False) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity must be an integer >= 1, got {capacity!r}")
        self.length, self.fixed = 0, fixed
        self._capacity = capacity
        self._buffer: Tensor | None = None  # (2, N, H, capacity, D)

    @property
    def filled(self) -> bool:
        """Whether anything has been appended, be it of length 0."""
        return self._buffer is not None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds key and value (N, H, L, D) at the end; returns all of them, as views (N, H, length, D)."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError("a cache overwrites what gradients would need: decode under torch.no_grad()")
        N, H, L, D = key.shape
        start, end = self.length, self.length + L
        if self._buffer is None:
            self._capacity = max(self._capacity, end)
            self._buffer = key.new_empty(2, N, H, self._capacity, D)
        elif self._buffer.shape[1] != N:
            raise ValueError(f"the cache holds keys of {self._buffer.shape[1]} sequences, got {N}")
        elif end > self._capacity:
            self._capacity = max(2 * self._capacity, end)
            larger = key.new_empty(2, N, H, self._capacity, D)
            larger[:, :, :, :start] = self._buffer[:, :, :, :start]
            self._buffer = larger
        room = self._buffer.narrow(3, start, L).unbind()
        room[0].copy_(key)
        room[1].copy_(value)
        self.length = end
        return self.contents()

    def contents(self) -> tuple[Tensor, Tensor]:
        """The keys and the values, as views (N, H, length, D)."""
        return self._buffer.narrow(3, 0, self.length).unbind()

    def reorder(self, rows: Tensor) -> None:
        """Lets row i go on from what row rows[i] holds; rows (M,). Where M is the number of rows, only those that change are
        copied.
        """
        if self._buffer is None:
            return
        used = self._buffer[:, :, :, : self.length]
        if len(rows) != self._buffer.shape[1]:
            self._buffer = self._buffer.new_empty(2, len(rows), *self._buffer.shape[2:])
            self._buffer[:, :, :, : self.length] = used[:, rows]
            return
        changed = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        sources = rows[changed]
        if rows.is_cpu and not torch.isin(sources, changed).any():  # no source is overwritten: no copy in between
            for row, source in zip(changed.tolist(), sources.tolist(), strict=True):
                used[:, row] = used[:, source]
        else:
            used[:, changed] = used[:, sources]


class DecoderLayerCache(NamedTuple):
    """What a decoder layer keeps: the self-attention's keys grow, the cross-attention's are computed once."""

    self_attention: KeyValueCache
    cross_attention: KeyValueCache
