"""The scores of additive attention in Triton, and their gradients: what ops/additive_attention.py calls for tensors on a GPU.

A score is a sum over d of weight[d] tanh(query[l, d] + key[s, d]). The tangents are the work: at 16 results a cycle and
multiprocessor of each of the two special functions that one takes, an H100 computes 1.8 T of them a second. None is written
anywhere; backward computes each twice, for the queries and for the keys, so that no program adds to what another one writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_scores import tanh

SPECIALIZED = dict(do_not_specialize=["rows", "columns", "size"])


@triton.jit(**SPECIALIZED)
def scores_kernel(
    query,  # pointer, (B, L, D)
    key,  # pointer, (B, S, D)
    weight,  # pointer, (D,) contiguous
    scores,  # pointer, (B, L, S) float32, contiguous
    rows,  # L
    columns,  # S
    size,  # D
    query_batch,  # strides
    query_row,
    query_column,
    key_batch,
    key_row,
    key_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a block of queries x keys: it goes along d, where a column of queries meets one of keys."""
    blocks_n = tl.cdiv(columns, BLOCK_N)
    blocks = tl.cdiv(rows, BLOCK_M) * blocks_n
    pid = tl.program_id(0)
    b = (pid // blocks).to(tl.int64)
    m = pid % blocks // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    q = query + b * query_batch + m.to(tl.int64) * query_row
    k = key + b * key_batch + n.to(tl.int64) * key_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for d in range(0, size):
        x = tl.load(q, mask=m < rows, other=0.0).to(tl.float32)[:, None]
        y = tl.load(k, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        acc += tl.load(weight + d).to(tl.float32) * tanh(x + y)
        q += query_column
        k += key_column
    pointers = scores + (b * rows + m[:, None]) * columns + n[None, :]
    tl.store(pointers, acc, mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit(**SPECIALIZED)
def gradient_kernel(
    x,  # pointer, (B, rows, D): the queries, or the keys
    y,  # pointer, (B, columns, D): the others
    weight,  # pointer, (D,) contiguous
    grad,  # pointer, (B, rows, columns) float32: of the scores
    grad_x,  # pointer, (B, rows, D) contiguous
    weight_partials,  # pointer, (B, blocks of rows, D) float32, or None
    rows,
    columns,
    size,  # D
    x_batch,  # strides
    x_row,
    x_column,
    y_batch,
    y_row,
    y_column,
    grad_batch,
    grad_row,
    grad_column,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a block of rows of x, BLOCK_D wide: it goes along the rows of y."""
    blocks_d = tl.cdiv(size, BLOCK_D)
    blocks_m = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    block = pid // blocks_d  # of rows, all batches counted
    b = (block // blocks_m).to(tl.int64)
    m = block % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    d = pid % blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (m < rows)[:, None] & (d < size)[None, :]
    at = x + b * x_batch + m.to(tl.int64)[:, None] * x_row + d.to(tl.int64)[None, :] * x_column
    fixed = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    moving = y + b * y_batch + d.to(tl.int64) * y_column
    grads = grad + b * grad_batch + m.to(tl.int64) * grad_row
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    weight_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for _ in range(0, columns):
        row = tl.load(moving, mask=d < size, other=0.0).to(tl.float32)
        t = tanh(fixed + row[None, :])
        g = tl.load(grads, mask=m < rows, other=0.0)[:, None]
        acc += g - g * t * t
        if weight_partials is not None:
            weight_acc += g * t
        moving += y_row
        grads += grad_column
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    out = (acc * w[None, :]).to(grad_x.dtype.element_ty)
    tl.store(grad_x + (b * rows + m[:, None]) * size + d[None, :], out, mask=inside)
    if weight_partials is not None:
        tl.store(weight_partials + block.to(tl.int64) * size + d, tl.sum(weight_acc, 0), mask=d < size)


def block(length: int) -> int:
    """A side of a block: short where the length is, as that of a decoder which goes step by step."""
    return min(32, triton.next_power_of_2(max(length, 1)))


def warps(elements: int) -> int:
    return max(1, min(4, elements // 256))


def additive_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """The scores (B, L, S), float32."""
    (B, L, D), S = query.shape, key.shape[1]
    scores = query.new_empty(B, L, S, dtype=torch.float32)
    block_m, block_n = block(L), block(S)
    grid = (B * triton.cdiv(L, block_m) * triton.cdiv(S, block_n),)
    if scores.numel():
        scores_kernel[grid](
            *(query, key, weight.contiguous(), scores, L, S, D, *query.stride(), *key.stride()),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps(block_m * block_n),
        )
    return scores


def gradient(x: Tensor, y: Tensor, weight: Tensor, grad: Tensor, weight_partials: Tensor | None) -> Tensor:
    """The gradient of x, where grad (B, rows of x, rows of y) is that of the scores."""
    (B, rows, D), columns = x.shape, y.shape[1]
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    block_m, block_d = block(rows), block(D)
    if grad_x.numel():
        gradient_kernel[(B * triton.cdiv(rows, block_m) * triton.cdiv(D, block_d),)](
            *(x, y, weight, grad, grad_x, weight_partials, rows, columns, D, *x.stride(), *y.stride(), *grad.stride()),
            BLOCK_M=block_m,
            BLOCK_D=block_d,
            num_warps=warps(block_m * block_d),
        )
    return grad_x


def additive_scores_backward(grad: Tensor, query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and weight, each in its dtype."""
    weight = weight.contiguous()
    B, L, D = query.shape
    partials = grad.new_empty(B * triton.cdiv(L, block(L)), D)
    grad_query = gradient(query, key, weight, grad, partials)
    grad_key = gradient(key, query, weight, grad.mT, None)
    return grad_query, grad_key, partials.sum(0).to(weight.dtype)
