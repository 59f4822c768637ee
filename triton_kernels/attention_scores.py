"""What the attention kernels share: how tensors are addressed, which keys a query sees, scores, dropout, gradients of scores.

A score is computed in one place, `scores`, forward and backward, for a block of queries x keys or its transpose. Blocks inside
the tensors and inside the band of visible keys come with EDGE = False and are not checked; the few at the edges are. A feature
is on iff its field is not None: Triton compiles a kernel for each combination that is used.
"""

from typing import NamedTuple

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(7)  # csrc/philox.h says why, and states the counter layout


class Matrices(NamedTuple):
    """A tensor (batch, head, row, column) of any strides; those of a dimension it is broadcast over are 0."""

    pointer: object
    batch: int
    head: int
    row: int
    column: int


class Shape(NamedTuple):
    """Sizes, and the band of visible keys: query i sees the keys i + first to i + last; None: no limit.

    Kernels take these numbers one by one, so that no new value of any means a new compilation.
    """

    heads: int
    groups: int  # query heads for each key head
    queries: int
    keys: int
    first: int | None
    last: int | None


kernel = triton.jit(do_not_specialize=["batch", "splits", *Shape._fields])


class Scoring(NamedTuple):
    """From products to scores: softcap * tanh(scale * product), or scale * product; and dropout.

    Scores are exponents of 2: log2(e) is folded into scale or softcap. With a bias they are exponents of e, for it may be
    large, as -1e10 that masks a key: a product with log2(e) would be off by more than 1.
    """

    scale: float
    softcap: float | None
    seed: object  # pointer to one int64, None without dropout
    threshold: int  # a weight is kept iff its 16 random bits are below
    inverse: float  # of the probability to be kept


@triton.jit
def matrix(x, b, h):
    """Where the (row, column) matrix of one batch and head begins."""
    return x.pointer + tl.cast(b, tl.int64) * x.batch + tl.cast(h, tl.int64) * x.head


@triton.jit
def load_rows(
    x, b, h, start, n_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr, descriptor=None
):
    """(ROWS, PADDED): the rows of a matrix from `start`, each of WIDTH elements; zeros beyond the last row and column.

    descriptor: of the same tensor and such a block, through which the tensor memory accelerator loads.
    """
    if descriptor is not None:
        return tl.reshape(descriptor.load([b, h, start, 0]), (ROWS, PADDED))
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    offsets = rows[:, None].to(tl.int64) * x.row + columns[None, :].to(tl.int64) * x.column
    pointers = matrix(x, b, h) + tl.cast(start, tl.int64) * x.row + offsets
    if EDGE and WIDTH < PADDED:
        return tl.load(pointers, mask=(start + rows < n_rows)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif EDGE:
        return tl.load(pointers, mask=(start + rows < n_rows)[:, None], other=0.0)
    elif WIDTH < PADDED:
        return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(x, b, h, start, n_rows, values, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Writes what `load_rows` reads, rounded to the tensor's type."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    offsets = rows[:, None].to(tl.int64) * x.row + columns[None, :].to(tl.int64) * x.column
    inside = (start + rows < n_rows)[:, None] & (columns < WIDTH)[None, :]
    pointers = matrix(x, b, h) + tl.cast(start, tl.int64) * x.row + offsets
    tl.store(pointers, values.to(x.pointer.dtype.element_ty), mask=inside)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. (Triton's interpreter multiplies the bit patterns of bfloat16.)"""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def tanh(x):
    """To two units in the last place: a polynomial (our own fit) where the formula would cancel."""
    z = x * x
    small = ((((-0.0059058666 * z + 0.0208053831) * z - 0.0537866838) * z + 0.1333195865) * z - 0.3333329856) * z * x + x
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.6, small, tl.where(x < 0.0, -large, large))


@triton.jit
def visible_blocks(start, n_fixed, n, first, last, ranges, b, h, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Which blocks of STEP keys the queries start .. start + SIZE see: (begin, full_begin, full_end, end), in blocks.

    Those from full_begin to full_end are wholly in the band and in the tensors; the others, at the edges, are to be checked.
    With -last, -first in place of first, last it says which queries see a block of keys. ranges: begin and end of what the mask
    lets through, for each block.
    """
    final = tl.minimum(start + SIZE, n_fixed) - 1
    low, high, full_low, full_high = 0, n, 0, n
    if first is not None:
        low = tl.maximum(start + first, 0)
        full_low = tl.maximum(final + first, 0)
    if last is not None:
        high = tl.minimum(final + last + 1, n)
        full_high = tl.minimum(start + last + 1, n)
    if ranges is not None:
        pointer = matrix(ranges, b, h) + (start // SIZE) * ranges.row
        low = tl.maximum(low, tl.load(pointer))
        high = tl.minimum(high, tl.load(pointer + 1))
    if start + SIZE > n_fixed:
        full_high = 0
    end = tl.cdiv(tl.maximum(high, 0), STEP)
    begin = tl.minimum(low // STEP, end)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(full_low, STEP), begin), end)
    full_end = tl.maximum(tl.minimum(tl.maximum(full_high, 0) // STEP, end), full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def steps(blocks, EDGE: tl.constexpr):
    """The limits of a loop over the blocks at both edges, or over those between them."""
    begin, full_begin, full_end, end = blocks
    if EDGE:
        return begin, end - (full_end - full_begin)
    else:
        return full_begin, full_end


@triton.jit
def block_of(step, blocks, EDGE: tl.constexpr):
    """The block at one step of such a loop."""
    _, full_begin, full_end, _ = blocks
    if EDGE:
        return tl.where(step < full_begin, step, step + (full_end - full_begin))
    else:
        return step


@triton.jit
def sees_any(start_m, start_n, shape, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether any query of a block may see any of its keys, by the band."""
    seen = start_m >= 0
    if shape.first is not None:
        seen &= start_n + BLOCK_N - 1 - start_m >= shape.first
    if shape.last is not None:
        seen &= start_n - (start_m + BLOCK_M - 1) <= shape.last
    return seen


@triton.jit
def indices(start_m, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The query and the key of every element of a block, to be broadcast."""
    m, n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    if TRANSPOSED:
        return m[None, :], n[:, None]
    else:
        return m[:, None], n[None, :]


@triton.jit
def load_block(x, b, h, m, n, shape, EDGE: tl.constexpr):
    """The elements (m, n) of one matrix; zeros outside."""
    pointers = matrix(x, b, h) + m.to(tl.int64) * x.row + n.to(tl.int64) * x.column
    if EDGE:
        return tl.load(pointers, mask=(m < shape.queries) & (n < shape.keys), other=0)
    else:
        return tl.load(pointers)


@triton.jit
def scores(product, m, n, b, h, shape, scoring, bias, mask, EDGE: tl.constexpr):
    """Scores of a block from query . key, -inf where a query does not see a key; and tanh' where there is a softcap."""
    slope = 1.0
    score = product * scoring.scale
    if scoring.softcap is not None:
        score = tanh(score)
        slope = 1.0 - score * score
        score *= scoring.softcap
    if bias is not None:
        score += load_block(bias, b, h, m, n, shape, EDGE).to(tl.float32)
    if EDGE:
        visible = (m < shape.queries) & (n < shape.keys)
        if shape.first is not None:
            visible &= n - m >= shape.first
        if shape.last is not None:
            visible &= n - m <= shape.last
        score = tl.where(visible, score, float("-inf"))
    if mask is not None:
        score = tl.where(load_block(mask, b, h, m, n, shape, EDGE) != 0, score, float("-inf"))
    return score, slope


@triton.jit
def to_base_2(bias):
    """What makes a difference of scores an exponent of 2."""
    return 1.0 if bias is None else LOG2E


@triton.jit
def to_base_e(bias):
    """What makes a score an exponent of e."""
    return LN2 if bias is None else 1.0


@triton.jit
def kept(start_m, start_n, b, h, shape, scoring, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Which weights of a block dropout keeps; eight neighbouring keys share the four words of one counter."""
    row = tl.cast(b * shape.heads + h, tl.int64) * shape.queries + (start_m + tl.arange(0, BLOCK_M))
    low, high = (row & 0xFFFFFFFF).to(tl.uint32)[:, None], (row >> 32).to(tl.uint32)[:, None]
    zero = tl.zeros((BLOCK_M, BLOCK_N // 8), tl.uint32)
    counter = (start_n // 8 + tl.arange(0, BLOCK_N // 8)).to(tl.uint32)[None, :] + zero
    w0, w1, w2, w3 = tl.philox(tl.load(scoring.seed), counter, low + zero, high + zero, zero, PHILOX_ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # the last two dimensions: high and low bit of the word's number
    keep = tl.join(words & 0xFFFF, words >> 16) < scoring.threshold
    keep = tl.reshape(keep, (BLOCK_M, BLOCK_N))
    return tl.trans(keep) if TRANSPOSED else keep


@triton.jit
def score_gradients(
    product,
    grad_product,
    start_m,
    start_n,
    b,
    h,
    lse,
    delta,
    shape,
    scoring,
    bias,
    mask,
    grad_weights,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Of a block: the weights that dropout keeps, the gradient of the scores, and tanh' that leads on to that of the products.

    grad_product: grad_out . value. lse, as scores are, and delta broadcast over the keys: with w the weights and dw their
    gradient, the gradient of a score is w (dw - delta), delta being the sum of w dw over the keys.
    """
    m, n = indices(start_m, start_n, BLOCK_M, BLOCK_N, TRANSPOSED)
    score, slope = scores(product, m, n, b, h, shape, scoring, bias, mask, EDGE)
    weights = tl.exp2((score - lse) * to_base_2(bias))
    grad = grad_product
    if grad_weights is not None:
        grad += load_block(grad_weights, b, h, m, n, shape, EDGE).to(tl.float32)
    left = weights
    if scoring.seed is not None:
        keep = kept(start_m, start_n, b, h, shape, scoring, BLOCK_M, BLOCK_N, TRANSPOSED)
        left = tl.where(keep, weights, 0.0)
        grad = tl.where(keep, grad * scoring.inverse, 0.0)
    return left, weights * (grad - delta), slope


@triton.jit
def load_numbers(x, b, h, start, shape, ROWS: tl.constexpr):
    """Of (B, H, L) numbers one after the other, those of some queries; 0 beyond the last."""
    rows = start + tl.arange(0, ROWS)
    row = tl.cast(b * shape.heads + h, tl.int64) * shape.queries
    return tl.load(x + row + rows, mask=rows < shape.queries, other=0.0)


@triton.jit
def load_lse(lse, b, h, start, shape, bias, ROWS: tl.constexpr):
    """The log-sum-exp of some queries as scores are; 0 for one that sees nothing, whose scores are -inf anyway."""
    value = load_numbers(lse, b, h, start, shape, ROWS)
    if bias is None:
        value *= LOG2E
    return tl.where(value == float("-inf"), 0.0, value)
