"""Backward attention, deterministic: every gradient is summed by one program, none by atomics.

`delta_kernel`: for each query the sum of weight x gradient of the weight, which the other kernels need (from grad_out . out;
over the keys only where the weights themselves have a gradient). `key_value_kernel`: one program a block of keys of one key
head, over the queries that see it; scores are transposed there, so that products take them from registers as they lie.
`query_kernel`: one program a block of queries, over its keys. Scores are computed anew in both: 7 products of L x S x D in all.
`bias_kernel`: the gradient of a bias that was broadcast, one program a block of queries x keys, over batches and heads.
"""

import triton
import triton.language as tl

from .attention_scores import (
    Shape,
    block_of,
    dot,
    indices,
    kernel,
    load_block,
    load_lse,
    load_numbers,
    load_rows,
    matrix,
    score_gradients,
    sees_any,
    steps,
    store_rows,
    visible_blocks,
)


@kernel
def delta_kernel(
    query,  # Matrices (B, H, L, D)
    key,  # Matrices (B, Hkv, S, D)
    out,  # Matrices (B, H, L, Dv)
    grad_out,  # Matrices (B, H, L, Dv)
    grad_weights,  # Matrices (B, H, L, S), or None
    grad_lse,  # pointer, (B, H, L), or None
    lse,  # pointer, (B, H, L) float32
    delta,  # pointer, (B, H, L) float32
    ranges,
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
    start_m = pid % blocks_m * BLOCK_M
    b, h = pid // blocks_m // shape.heads, pid // blocks_m % shape.heads
    o = load_rows(out, b, h, start_m, shape.queries, BLOCK_M, DV, BLOCK_DV, True)
    do = load_rows(grad_out, b, h, start_m, shape.queries, BLOCK_M, DV, BLOCK_DV, True)
    total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        total -= load_numbers(grad_lse, b, h, start_m, shape, BLOCK_M)
    if grad_weights is not None:
        q = load_rows(query, b, h, start_m, shape.queries, BLOCK_M, D, BLOCK_D, True)
        blocks = visible_blocks(start_m, shape.queries, shape.keys, shape.first, shape.last, ranges, b, h, BLOCK_M, BLOCK_N)
        lse_i = load_lse(lse, b, h, start_m, shape, bias, BLOCK_M)[:, None]
        for block in range(blocks[0], blocks[3]):
            start_n = block * BLOCK_N
            k = load_rows(key, b, h // shape.groups, start_n, shape.keys, BLOCK_N, D, BLOCK_D, True)
            # fmt: off
            left = score_gradients(dot(q, tl.trans(k), PRECISION), 0.0, start_m, start_n, b, h, lse_i, 0.0, shape, scoring,
                                      bias, mask, None, BLOCK_M, BLOCK_N, True, False)[0]
            # fmt: on
            m, n = indices(start_m, start_n, BLOCK_M, BLOCK_N, False)
            total += tl.sum(left * load_block(grad_weights, b, h, m, n, shape, True).to(tl.float32), 1) * scoring.inverse
    rows = start_m + tl.arange(0, BLOCK_M)
    row = tl.cast(b * shape.heads + h, tl.int64) * shape.queries
    tl.store(delta + row + rows, total, mask=rows < shape.queries)


@triton.jit
def add_queries(
    dk,
    dv,
    k,
    v,
    query,
    query_descriptor,
    grad_out,
    grad_out_descriptor,
    grad_weights,
    grad_bias,
    lse,
    delta,
    start_n,
    blocks,
    b,
    h,
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
    """Takes blocks of queries of one head into the gradients of a block of keys and values."""
    low, high = steps(blocks, EDGE)
    for step in range(low, high):
        start_m = block_of(step, blocks, EDGE) * BLOCK_M
        q = load_rows(query, b, h, start_m, shape.queries, BLOCK_M, D, BLOCK_D, EDGE, query_descriptor)
        do = load_rows(grad_out, b, h, start_m, shape.queries, BLOCK_M, DV, BLOCK_DV, EDGE, grad_out_descriptor)
        lse_i = load_lse(lse, b, h, start_m, shape, bias, BLOCK_M)[None, :]
        delta_i = load_numbers(delta, b, h, start_m, shape, BLOCK_M)[None, :]
        product, grad_product = dot(k, tl.trans(q), PRECISION), dot(v, tl.trans(do), PRECISION)
        # fmt: off
        left, ds, slope = score_gradients(product, grad_product, start_m, start_n, b, h, lse_i, delta_i, shape, scoring,
                                             bias, mask, grad_weights, BLOCK_M, BLOCK_N, EDGE, True)
        # fmt: on
        dv += dot(left.to(do.dtype), do, PRECISION)
        dk += dot((ds * slope).to(q.dtype), q, PRECISION)
        if grad_bias is not None:
            m, n = indices(start_m, start_n, BLOCK_M, BLOCK_N, True)
            pointers = matrix(grad_bias, b, h) + m.to(tl.int64) * grad_bias.row + n.to(tl.int64) * grad_bias.column
            inside = (m < shape.queries) & (n < shape.keys)
            tl.store(pointers, ds.to(grad_bias.pointer.dtype.element_ty), mask=inside)
    return dk, dv


@kernel
def key_value_kernel(
    query,  # Matrices (B, H, L, D)
    key,  # Matrices (B, Hkv, S, D)
    value,  # Matrices (B, Hkv, S, Dv)
    grad_out,  # Matrices (B, H, L, Dv)
    grad_weights,  # Matrices (B, H, L, S), or None
    lse,  # pointer, (B, H, L) float32
    delta,  # pointer, (B, H, L) float32
    grad_key,  # Matrices (B, Hkv, S, D)
    grad_value,  # Matrices (B, Hkv, S, Dv)
    grad_bias,  # Matrices (B, H, L, S) of zeros, or None
    ranges,  # Matrices (B, H, blocks of keys, 2) int32: queries; or None
    query_descriptor,  # of query in blocks (1, 1, BLOCK_M, BLOCK_D), or None
    grad_out_descriptor,
    heads,
    groups,
    queries,
    keys,
    first,
    last,
    scoring,
    bias,  # Matrices (B, H, L, S), or None
    mask,  # Matrices (B, H, L, S), nonzero = attend, or None
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    shape = Shape(heads, groups, queries, keys, first, last)
    blocks_n = tl.cdiv(shape.keys, BLOCK_N)
    pid = tl.program_id(0)
    start_n = pid % blocks_n * BLOCK_N
    kv_heads = shape.heads // shape.groups
    b, kv_head = pid // blocks_n // kv_heads, pid // blocks_n % kv_heads
    k = load_rows(key, b, kv_head, start_n, shape.keys, BLOCK_N, D, BLOCK_D, True)
    v = load_rows(value, b, kv_head, start_n, shape.keys, BLOCK_N, DV, BLOCK_DV, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    before = None if shape.last is None else -shape.last
    behind = None if shape.first is None else -shape.first
    for h in range(kv_head * shape.groups, (kv_head + 1) * shape.groups):
        blocks = visible_blocks(start_n, shape.keys, shape.queries, before, behind, ranges, b, h, BLOCK_N, BLOCK_M)
        # fmt: off
        dk, dv = add_queries(dk, dv, k, v, query, query_descriptor, grad_out, grad_out_descriptor, grad_weights, grad_bias,
                             lse, delta, start_n, blocks, b, h, shape, scoring, bias, mask,
                             D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, False)
        dk, dv = add_queries(dk, dv, k, v, query, query_descriptor, grad_out, grad_out_descriptor, grad_weights, grad_bias,
                             lse, delta, start_n, blocks, b, h, shape, scoring, bias, mask,
                             D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, True)
        # fmt: on
    store_rows(grad_key, b, kv_head, start_n, shape.keys, dk * scale, BLOCK_N, D, BLOCK_D)
    store_rows(grad_value, b, kv_head, start_n, shape.keys, dv * scoring.inverse, BLOCK_N, DV, BLOCK_DV)


@triton.jit
def add_keys(
    dq,
    q,
    do,
    lse_i,
    delta_i,
    key,
    key_descriptor,
    value,
    value_descriptor,
    grad_weights,
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
    """Takes blocks of keys into the gradient of a block of queries."""
    low, high = steps(blocks, EDGE)
    for step in range(low, high):
        start_n = block_of(step, blocks, EDGE) * BLOCK_N
        k = load_rows(key, b, kv_head, start_n, shape.keys, BLOCK_N, D, BLOCK_D, EDGE, key_descriptor)
        v = load_rows(value, b, kv_head, start_n, shape.keys, BLOCK_N, DV, BLOCK_DV, EDGE, value_descriptor)
        product, grad_product = dot(q, tl.trans(k), PRECISION), dot(do, tl.trans(v), PRECISION)
        # fmt: off
        _, ds, slope = score_gradients(product, grad_product, start_m, start_n, b, h, lse_i, delta_i, shape, scoring,
                                       bias, mask, grad_weights, BLOCK_M, BLOCK_N, EDGE, False)
        # fmt: on
        dq += dot((ds * slope).to(k.dtype), k, PRECISION)
    return dq


@kernel
def query_kernel(
    query,  # Matrices (B, H, L, D)
    key,  # Matrices (B, Hkv, S, D)
    value,  # Matrices (B, Hkv, S, Dv)
    grad_out,  # Matrices (B, H, L, Dv)
    grad_weights,  # Matrices (B, H, L, S), or None
    lse,  # pointer, (B, H, L) float32
    delta,  # pointer, (B, H, L) float32
    grad_query,  # Matrices (B, H, L, D)
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
    scale,
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
    start_m = (blocks_m - 1 - pid % blocks_m) * BLOCK_M
    b, h = pid // blocks_m // shape.heads, pid // blocks_m % shape.heads
    kv_head = h // shape.groups
    blocks = visible_blocks(start_m, shape.queries, shape.keys, shape.first, shape.last, ranges, b, h, BLOCK_M, BLOCK_N)
    q = load_rows(query, b, h, start_m, shape.queries, BLOCK_M, D, BLOCK_D, True)
    do = load_rows(grad_out, b, h, start_m, shape.queries, BLOCK_M, DV, BLOCK_DV, True)
    lse_i = load_lse(lse, b, h, start_m, shape, bias, BLOCK_M)[:, None]
    delta_i = load_numbers(delta, b, h, start_m, shape, BLOCK_M)[:, None]
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # fmt: off
    dq = add_keys(dq, q, do, lse_i, delta_i, key, key_descriptor, value, value_descriptor, grad_weights, start_m, blocks,
                  b, h, kv_head, shape, scoring, bias, mask, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, False)
    dq = add_keys(dq, q, do, lse_i, delta_i, key, key_descriptor, value, value_descriptor, grad_weights, start_m, blocks,
                  b, h, kv_head, shape, scoring, bias, mask, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, True)
    # fmt: on
    store_rows(grad_query, b, h, start_m, shape.queries, dq * scale, BLOCK_M, D, BLOCK_D)


@kernel
def bias_kernel(
    query,  # Matrices (B, H, L, D)
    key,  # Matrices (B, Hkv, S, D)
    value,  # Matrices (B, Hkv, S, Dv)
    grad_out,  # Matrices (B, H, L, Dv)
    grad_weights,  # Matrices (B, H, L, S), or None
    lse,  # pointer, (B, H, L) float32
    delta,  # pointer, (B, H, L) float32
    grad_bias,  # Matrices (B or 1, H or 1, L or blocks of queries, S or blocks of keys) float32
    batch,
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
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM_BATCH: tl.constexpr,
    SUM_HEADS: tl.constexpr,
    SUM_QUERIES: tl.constexpr,
    SUM_KEYS: tl.constexpr,
):
    shape = Shape(heads, groups, queries, keys, first, last)
    blocks_n = tl.cdiv(shape.keys, BLOCK_N)
    blocks = tl.cdiv(shape.queries, BLOCK_M) * blocks_n
    pid = tl.program_id(0)
    block_m, block_n = pid % blocks // blocks_n, pid % blocks_n
    start_m, start_n = block_m * BLOCK_M, block_n * BLOCK_N
    place = pid // blocks
    if SUM_HEADS:
        first_head, last_head, b_of_place = place * 0, shape.heads, place
    else:
        first_head, last_head, b_of_place = place % shape.heads, place % shape.heads + 1, place // shape.heads
    if SUM_BATCH:
        first_batch, last_batch = place * 0, batch
    else:
        first_batch, last_batch = b_of_place, b_of_place + 1
    if not sees_any(start_m, start_n, shape, BLOCK_M, BLOCK_N):
        last_batch = first_batch
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for b in range(first_batch, last_batch):
        for h in range(first_head, last_head):
            kv_head = h // shape.groups
            q = load_rows(query, b, h, start_m, shape.queries, BLOCK_M, D, BLOCK_D, True)
            do = load_rows(grad_out, b, h, start_m, shape.queries, BLOCK_M, DV, BLOCK_DV, True)
            k = load_rows(key, b, kv_head, start_n, shape.keys, BLOCK_N, D, BLOCK_D, True)
            v = load_rows(value, b, kv_head, start_n, shape.keys, BLOCK_N, DV, BLOCK_DV, True)
            lse_i = load_lse(lse, b, h, start_m, shape, bias, BLOCK_M)[:, None]
            delta_i = load_numbers(delta, b, h, start_m, shape, BLOCK_M)[:, None]
            product, grad_product = dot(q, tl.trans(k), PRECISION), dot(do, tl.trans(v), PRECISION)
            # fmt: off
            _, ds, _ = score_gradients(product, grad_product, start_m, start_n, b, h, lse_i, delta_i, shape, scoring,
                                       bias, mask, grad_weights, BLOCK_M, BLOCK_N, True, False)
            # fmt: on
            acc += ds
    m, n = indices(start_m, start_n, BLOCK_M, BLOCK_N, False)
    if SUM_QUERIES:
        acc, m = tl.sum(acc, 0, keep_dims=True), block_m + tl.zeros((1, 1), tl.int32)
    if SUM_KEYS:
        acc, n = tl.sum(acc, 1, keep_dims=True), block_n + tl.zeros((1, 1), tl.int32)
    n_rows = tl.cdiv(shape.queries, BLOCK_M) if SUM_QUERIES else shape.queries
    n_columns = blocks_n if SUM_KEYS else shape.keys
    base = matrix(grad_bias, first_batch, first_head)
    pointers = base + m.to(tl.int64) * grad_bias.row + n.to(tl.int64) * grad_bias.column
    tl.store(pointers, acc, mask=(m < n_rows) & (n < n_columns))
