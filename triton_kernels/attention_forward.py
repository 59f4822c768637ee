"""Forward attention: one program a block of queries of one head, online softmax over the blocks of keys it sees.

Reads query once, key and value once for every block of queries (mostly from L2), writes the output and the log-sum-exp. Where
there are too few blocks of queries to fill the device, as in decoding, the keys of each are split over several programs, which
write normalised partial outputs; `merge_kernel` weighs these by their log-sum-exp.

Loops are not warp-specialised: Triton 3.6 and 3.9 take this one for Hopper, but crash on it for Blackwell.
"""

import triton
import triton.language as tl

from .attention_scores import (
    LN2,
    LOG2E,
    Shape,
    block_of,
    dot,
    indices,
    kept,
    kernel,
    load_rows,
    scores,
    steps,
    store_rows,
    to_base_2,
    to_base_e,
    visible_blocks,
)


@triton.jit
def attend(
    acc,
    m_i,
    l_i,
    q,
    key,
    key_descriptor,
    value,
    value_descriptor,
    start_m,
    blocks,
    b,
    h,
    kv_head,
    shape,
    scoring,
    bias,
    mask,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Takes blocks of keys into the running output, row maximum and row sum."""
    low, high = steps(blocks, EDGE)
    for step in range(low, high):
        start_n = block_of(step, blocks, EDGE) * BLOCK_N
        k = load_rows(key, b, kv_head, start_n, shape.keys, BLOCK_N, D, BLOCK_D, EDGE, key_descriptor)
        m, n = indices(start_m, start_n, BLOCK_M, BLOCK_N, False)
        score, _ = scores(dot(q, tl.trans(k), PRECISION), m, n, b, h, shape, scoring, bias, mask, EDGE)
        m_new = tl.maximum(m_i, tl.max(score, 1))
        top = tl.where(m_new == float("-inf"), 0.0, m_new)  # of a row that has seen nothing yet
        p = tl.exp2((score - top[:, None]) * to_base_2(bias))
        alpha = tl.exp2((m_i - top) * to_base_2(bias))
        l_i = l_i * alpha + tl.sum(p, 1)
        if scoring.seed is not None:
            p = tl.where(kept(start_m, start_n, b, h, shape, scoring, BLOCK_M, BLOCK_N, False), p, 0.0)
        v = load_rows(value, b, kv_head, start_n, shape.keys, BLOCK_N, DV, BLOCK_DV, EDGE, value_descriptor)
        acc = acc * alpha[:, None] + dot(p.to(v.dtype), v, PRECISION)
        m_i = m_new
    return acc, m_i, l_i


@kernel
def forward_kernel(
    query,  # Matrices (B, H, L, D)
    key,  # Matrices (B, Hkv, S, D)
    value,  # Matrices (B, Hkv, S, Dv)
    out,  # Matrices (splits * B, H, L, Dv)
    lse,  # pointer, (splits, B, H, L) float32
    ranges,  # Matrices (B, H, blocks of queries, 2) int32, or None
    key_descriptor,  # of key in blocks (1, 1, BLOCK_N, BLOCK_D), or None
    value_descriptor,
    heads,
    groups,
    queries,
    keys,
    first,
    last,
    scoring,
    bias,  # Matrices (B, H, L, S), or None
    mask,  # Matrices (B, H, L, S), nonzero = attend, or None
    batch,
    splits,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    shape = Shape(heads, groups, queries, keys, first, last)
    blocks_m = tl.cdiv(shape.queries, BLOCK_M)
    pid = tl.program_id(0)
    start_m = (blocks_m - 1 - pid % blocks_m) * BLOCK_M  # under a causal mask the longest first
    b, h = pid // blocks_m // shape.heads, pid // blocks_m % shape.heads
    kv_head = h // shape.groups
    begin, full_begin, full_end, end = visible_blocks(
        start_m, shape.queries, shape.keys, shape.first, shape.last, ranges, b, h, BLOCK_M, BLOCK_N
    )
    split = tl.program_id(1)
    share = tl.cdiv(end - begin, splits)
    end = tl.minimum(begin + (split + 1) * share, end)
    begin = tl.minimum(begin + split * share, end)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    q = load_rows(query, b, h, start_m, shape.queries, BLOCK_M, D, BLOCK_D, True)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    blocks = (begin, full_begin, full_end, end)
    # fmt: off
    acc, m_i, l_i = attend(acc, m_i, l_i, q, key, key_descriptor, value, value_descriptor, start_m, blocks, b, h, kv_head,
                           shape, scoring, bias, mask, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, False)
    acc, m_i, l_i = attend(acc, m_i, l_i, q, key, key_descriptor, value, value_descriptor, start_m, blocks, b, h, kv_head,
                           shape, scoring, bias, mask, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, True)
    # fmt: on
    seen = l_i != 0.0
    total = tl.where(seen, l_i, 1.0)
    acc *= (scoring.inverse / total)[:, None]
    split_b = split * batch + b
    store_rows(out, split_b, h, start_m, shape.queries, acc, BLOCK_M, DV, BLOCK_DV)
    rows = start_m + tl.arange(0, BLOCK_M)
    pointers = lse + tl.cast(split_b * shape.heads + h, tl.int64) * shape.queries + rows
    tl.store(pointers, tl.where(seen, m_i * to_base_e(bias) + tl.log2(total) * LN2, float("-inf")), mask=rows < shape.queries)


@kernel
def merge_kernel(
    partial,  # Matrices (splits * B, H, L, Dv) float32
    partial_lse,  # pointer, (splits, B, H, L)
    out,  # Matrices (B, H, L, Dv)
    lse,  # pointer, (B, H, L)
    heads,
    groups,
    queries,
    keys,
    first,
    last,
    batch,
    splits,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """out = sum of exp(partial_lse - lse) * partial over the splits, lse = log of the sum of exp(partial_lse)."""
    shape = Shape(heads, groups, queries, keys, first, last)
    blocks = tl.cdiv(shape.queries, BLOCK_M)
    pid = tl.program_id(0)
    start_m = pid % blocks * BLOCK_M
    b, h = pid // blocks // shape.heads, pid // blocks % shape.heads
    rows = start_m + tl.arange(0, BLOCK_M)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for split in range(splits):
        split_b = split * batch + b
        pointers = partial_lse + tl.cast(split_b * shape.heads + h, tl.int64) * shape.queries + rows
        part = tl.load(pointers, mask=rows < shape.queries, other=float("-inf"))
        m_new = tl.maximum(m_i, part)
        top = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp2((m_i - top) * LOG2E), tl.exp2((part - top) * LOG2E)
        values = load_rows(partial, split_b, h, start_m, shape.queries, BLOCK_M, DV, BLOCK_DV, True)
        acc = acc * alpha[:, None] + values * weight[:, None]
        l_i = l_i * alpha + weight
        m_i = m_new
    seen = l_i != 0.0
    total = tl.where(seen, l_i, 1.0)
    store_rows(out, b, h, start_m, shape.queries, acc / total[:, None], BLOCK_M, DV, BLOCK_DV)
    pointers = lse + tl.cast(b * shape.heads + h, tl.int64) * shape.queries + rows
    tl.store(pointers, tl.where(seen, m_i + tl.log2(total) * LN2, float("-inf")), mask=rows < shape.queries)
