"""The attention weights, from the saved log-sum-exp; and what the mask lets through.

`weights_kernel`: one program a block of queries x keys. For the mean over heads it goes through the heads and adds, so that
(B, H, L, S) exists nowhere.
"""

import triton
import triton.language as tl

from .attention_scores import Shape, dot, indices, kept, kernel, load_lse, load_rows, matrix, scores, sees_any, to_base_2


@kernel
def weights_kernel(
    query,  # Matrices (B, H, L, D)
    key,  # Matrices (B, Hkv, S, D)
    lse,  # pointer, (B, H, L) float32
    weights,  # Matrices (B, H or 1, L, S)
    heads,
    groups,
    queries,
    keys,
    first,
    last,
    scoring,
    bias,  # Matrices (B, H, L, S), or None
    mask,  # Matrices (B, H, L, S), nonzero = attend, or None
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    MEAN: tl.constexpr,
):
    shape = Shape(heads, groups, queries, keys, first, last)
    blocks_n = tl.cdiv(shape.keys, BLOCK_N)
    blocks = tl.cdiv(shape.queries, BLOCK_M) * blocks_n
    pid = tl.program_id(0)
    start_m, start_n = pid % blocks // blocks_n * BLOCK_M, pid % blocks_n * BLOCK_N
    if MEAN:
        b, slot = pid // blocks, pid * 0
        first_head, last_head = pid * 0, shape.heads
        share = scoring.inverse / shape.heads
    else:
        b, slot = pid // blocks // shape.heads, pid // blocks % shape.heads
        first_head, last_head = slot, slot + 1
        share = scoring.inverse
    if not sees_any(start_m, start_n, shape, BLOCK_M, BLOCK_N):
        last_head = first_head
    m, n = indices(start_m, start_n, BLOCK_M, BLOCK_N, False)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for h in range(first_head, last_head):
        q = load_rows(query, b, h, start_m, shape.queries, BLOCK_M, D, BLOCK_D, True)
        k = load_rows(key, b, h // shape.groups, start_n, shape.keys, BLOCK_N, D, BLOCK_D, True)
        score, _ = scores(dot(q, tl.trans(k), PRECISION), m, n, b, h, shape, scoring, bias, mask, True)
        lse_i = load_lse(lse, b, h, start_m, shape, bias, BLOCK_M)[:, None]
        p = tl.exp2((score - lse_i) * to_base_2(bias))
        if scoring.seed is not None:
            p = tl.where(kept(start_m, start_n, b, h, shape, scoring, BLOCK_M, BLOCK_N, False), p, 0.0)
        acc += p
    pointers = matrix(weights, b, slot) + m.to(tl.int64) * weights.row + n.to(tl.int64) * weights.column
    inside = (m < shape.queries) & (n < shape.keys)
    tl.store(pointers, (acc * share).to(weights.pointer.dtype.element_ty), mask=inside)


@triton.jit
def visible_ranges_kernel(
    mask,  # Matrices (B, H, rows, columns), nonzero = visible
    ranges,  # pointer, (B, H, blocks of rows, 2) int32
    heads,
    n_rows,
    n_columns,
    full,  # what a single column stands for
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The first column that any row of a block sees, and one past the last: nothing outside needs to be looked at."""
    blocks = tl.cdiv(n_rows, BLOCK_ROWS)
    pid = tl.program_id(0)
    b, h = pid // blocks // heads, pid // blocks % heads
    rows = pid % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    low = tl.full((BLOCK_COLUMNS,), 2147483647, tl.int32)
    high = tl.zeros((BLOCK_COLUMNS,), tl.int32)
    for start in range(0, n_columns, BLOCK_COLUMNS):
        columns = start + tl.arange(0, BLOCK_COLUMNS)
        offsets = rows.to(tl.int64)[:, None] * mask.row + columns.to(tl.int64)[None, :] * mask.column
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        seen = tl.max(tl.load(matrix(mask, b, h) + offsets, mask=inside, other=0).to(tl.int32), 0) != 0
        low = tl.minimum(low, tl.where(seen, columns, 2147483647))
        high = tl.maximum(high, tl.where(seen, columns + 1, 0))
    begin, end = tl.min(low, 0), tl.max(high, 0)
    if n_columns == 1:
        end *= full
    tl.store(ranges + pid * 2, begin)
    tl.store(ranges + pid * 2 + 1, end)
