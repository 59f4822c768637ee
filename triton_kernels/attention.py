"""Fused softmax attention in Triton, forward and backward: what ops/attention.py calls for tensors on a GPU.

Nothing of size L x S is read or written but a mask, a bias, and weights that were asked for. Each block of queries reads the
keys and values it sees, from L2 but for the first time.

Roofline for 16-bit inputs, on an H100 (H200): 989 TFLOP/s in tensor cores, 3.35 (4.8) TB/s, and, at 16 a cycle and
multiprocessor, 3.7 T exponentials a second.
  Forward: 4 B H L S D FLOPs, 4 B H (L + S) D bytes of memory. At L = S that is L / 2 FLOPs a byte: bound by arithmetic from
  L = 600 (410) on. A score costs 4 D FLOPs and one exponential: at D = 64 0.26 ps + 0.27 ps, at D = 128 0.52 ps + 0.27 ps.
  One after the other these give 480 and 650 TFLOP/s; where they overlap, in several programs a multiprocessor, at most 950 and
  989.
  Backward: 10 B H L S D FLOPs by convention, of which we do 14 (scores anew in two kernels) and two exponentials: at D = 64
  0.91 ps + 0.54 ps, at D = 128 1.81 ps + 0.54 ps a score, or 440 and 545 TFLOP/s one after the other, 706 at most.
  Decoding, L = 1: 4 B Hkv S D bytes, at memory speed.
"""

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..reference import keep_threshold
from .attention_backward import bias_kernel, delta_kernel, key_value_kernel, query_kernel
from .attention_forward import forward_kernel, merge_kernel
from .attention_scores import Matrices, Scoring, Shape
from .attention_weights import visible_ranges_kernel, weights_kernel
from .tiles import DECODE, Tile, architecture, processors, tile

LOG2E = math.log2(math.e)


def matrices(x: Tensor) -> Matrices:
    """A 4-dimensional tensor as the kernels take it."""
    return Matrices(x.view(torch.uint8) if x.dtype == torch.bool else x, *x.stride())


def padded(width: int) -> int:
    """How wide a block of rows of this width is."""
    return max(16, triton.next_power_of_2(width))


def descriptors(x: Tensor, y: Tensor, rows: int) -> tuple[TensorDescriptor | None, ...]:
    """For the tensor memory accelerator of Hopper and later, in blocks of `rows`; None for what it cannot take, or 32 bits."""
    return tuple(descriptor(t, rows) for t in (x, y))


def descriptor(x: Tensor, rows: int) -> TensorDescriptor | None:
    if architecture(x.device) in ("ampere", "amd") or x.element_size() != 2:
        return None
    # Rows are contiguous and begin at multiples of 16 bytes.
    strides = [8 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride(), strict=False)]
    if x.numel() == 0 or x.stride(3) != 1 or x.data_ptr() % 16 != 0 or any(s == 0 or s % 8 != 0 for s in strides):
        return None
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, padded(x.shape[3])])


def as_4d(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]


def heads(like: Tensor, size: int) -> Tensor:
    """(B, H, L, size) that lies as (B, L, H, size). (No view: autograd lets users write into an output that is none.)"""
    B, H, L, _ = like.shape
    return like.new_empty_strided((B, H, L, size), (L * H * size, size, H * size, 1))


def gradient(x: Tensor) -> Tensor:
    """A gradient of x: contiguous if x is, so that autograd need not copy it, else as `heads`."""
    return torch.empty_like(x) if x.is_contiguous() else heads(x, x.shape[3])


class Call:
    """What the kernels of one call have in common."""

    def __init__(self, query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed):
        self.B, self.H, self.L, self.D = query.shape
        self.kv_heads, self.S, self.Dv = value.shape[1:]
        self.device, self.dtype = query.device, query.dtype
        self.inputs = tuple(map(matrices, (query, key, value)))
        self.mask = None if mask is None else as_4d(mask)
        full = (self.B, self.H, self.L, self.S)
        # A limit that hides nothing is none; one far outside is brought back to where it still hides everything.
        first = None if first <= 1 - self.L else min(first, self.S)
        last = None if last >= self.S - 1 else max(last, -self.L)
        self.shape = Shape(self.H, self.H // self.kv_heads, self.L, self.S, first, last)
        threshold = keep_threshold(dropout_p)
        unit = LOG2E if bias is None else 1.0
        scoring = Scoring(
            scale=scale / softcap if softcap else scale * unit,
            softcap=softcap * unit if softcap else None,
            seed=seed,
            threshold=None if seed is None else threshold,
            inverse=1.0 if seed is None else 65536 / threshold,
        )
        bias, mask = (None if x is None else matrices(x.expand(full)) for x in (bias, mask))
        self.rules = (*self.shape, scoring, bias, mask)

    def tile(self, kernel: str) -> Tile:
        return tile(kernel, architecture(self.device), self.dtype, max(self.D, self.Dv))

    def options(self, tile: Tile) -> dict:
        """The compile-time arguments of a kernel."""
        tf32 = torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return dict(
            D=self.D,
            DV=self.Dv,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=padded(self.D),
            BLOCK_DV=padded(self.Dv),
            PRECISION="tf32" if tf32 else "ieee",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def ranges(self, block: int, *, of_keys: bool = False) -> Matrices | None:
        """For each block of queries (or of keys) where the mask lets a key (or query) through first, and one past the last."""
        if self.mask is None:
            return None
        mask, full = (self.mask.mT, self.L) if of_keys else (self.mask, self.S)
        B, H, rows, columns = mask.shape
        ranges = torch.empty(B, H, triton.cdiv(rows, block), 2, dtype=torch.int32, device=self.device)
        grid = (ranges.numel() // 2,)
        visible_ranges_kernel[grid](
            matrices(mask), ranges, H, rows, columns, full, BLOCK_ROWS=1 if rows == 1 else block, BLOCK_COLUMNS=128
        )
        strides = (0 if size == 1 else stride for size, stride in zip(mask.shape[:3], ranges.stride(), strict=False))
        return Matrices(ranges, *strides, 1)

    def splits(self, tile: Tile) -> int:
        """Over how many programs the keys of a block of queries are spread: more than one where the device has room."""
        programs = max(1, self.B * self.H * triton.cdiv(self.L, tile.block_m))
        return max(1, min(2 * processors(self.device) // programs, triton.cdiv(self.S, 4 * tile.block_n)))


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    first: int,
    last: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    return_weights: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, H, L, Dv), weights (B, L, S), (B, H, L, S) or (0,), log-sum-exp (B, H, L) in float32."""
    call = Call(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed)
    B, H, L, S = call.B, call.H, call.L, call.S
    out, lse = heads(query, call.Dv), query.new_empty(B, H, L, dtype=torch.float32)
    tile = call.tile("decode" if L <= DECODE else "forward")
    splits, options, programs = call.splits(tile), call.options(tile), B * H * triton.cdiv(L, tile.block_m)
    target, target_lse = out, lse
    if splits > 1:
        target = query.new_empty(splits * B, H, L, call.Dv, dtype=torch.float32)
        target_lse = lse.new_empty(splits, B, H, L)
    forward_kernel[(programs, splits)](
        *call.inputs,
        matrices(target),
        target_lse,
        call.ranges(tile.block_m),
        *descriptors(key, value, tile.block_n),
        *call.rules,
        *(B, splits),
        **options,
    )
    if splits > 1:
        merge_kernel[(B * H * triton.cdiv(L, 16),)](
            *(matrices(target), target_lse, matrices(out), lse, *call.shape, B, splits),
            DV=call.Dv,
            BLOCK_M=16,
            BLOCK_DV=options["BLOCK_DV"],
        )
    if return_weights is None:
        return out, query.new_empty(0), lse
    mean = return_weights == "mean"
    weights = query.new_empty((B, L, S) if mean else (B, H, L, S))
    tile = call.tile("weights")
    options = call.options(tile)
    del options["DV"], options["BLOCK_DV"]
    weights_kernel[(B * (1 if mean else H) * triton.cdiv(L, tile.block_m) * triton.cdiv(S, tile.block_n),)](
        *(*call.inputs[:2], lse, matrices(weights[:, None] if mean else weights), *call.rules), **options, MEAN=mean
    )
    return out, weights, lse


def attention_backward(
    grad_out: Tensor,
    grad_weights: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    first: int,
    last: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    return_weights: str | None,
    out: Tensor,
    lse: Tensor,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, and of bias, or an empty tensor, each in the dtype of what it belongs to."""
    call = Call(query, key, value, mask, bias, first, last, scale, softcap, dropout_p, seed)
    B, H, L, S = full = (call.B, call.H, call.L, call.S)
    if grad_weights is not None:
        if return_weights == "mean":
            grad_weights = (grad_weights.float() / H)[:, None]
        grad_weights = matrices(grad_weights.expand(full))

    delta = torch.empty_like(lse)
    tile = call.tile("query")
    options, programs, ranges = call.options(tile), B * H * triton.cdiv(L, tile.block_m), call.ranges(tile.block_m)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    delta_kernel[(programs,)](
        *(
            *call.inputs[:2],
            matrices(out),
            matrices(grad_out),
            grad_weights,
            grad_lse,
            lse,
            delta,
            ranges,
            *call.rules,
        ),
        **options,
    )
    shared = (*call.inputs, matrices(grad_out), grad_weights, lse, delta)
    grad_query = gradient(query)
    query_kernel[(programs,)](
        *(*shared, matrices(grad_query), ranges, *descriptors(key, value, tile.block_n), *call.rules, scale),
        **options,
    )

    bias_shape = as_4d(bias).shape if bias_grad else full
    summed = [small != large for small, large in zip(bias_shape, full, strict=True)]
    grad_bias = query.new_empty(0)
    if bias_grad and not any(summed):
        grad_bias = torch.zeros(full, dtype=bias.dtype, device=bias.device)
    tile = call.tile("key_value")
    grad_key, grad_value = gradient(key), gradient(value)
    key_value_kernel[(B * call.kv_heads * triton.cdiv(S, tile.block_n),)](
        *(*shared, matrices(grad_key), matrices(grad_value), matrices(grad_bias) if grad_bias.numel() else None),
        *(call.ranges(tile.block_n, of_keys=True), *descriptors(query, grad_out, tile.block_m)),
        *(*call.rules, scale),
        **call.options(tile),
    )
    if any(summed):
        grad_bias = bias_gradient(call, shared, summed)
    return grad_query, grad_key, grad_value, grad_bias.reshape(bias.shape).to(bias.dtype) if bias_grad else grad_bias


def bias_gradient(call: Call, shared: tuple, summed: list[bool]) -> Tensor:
    """The gradient of a bias, summed over the dimensions it was broadcast over, float32."""
    tile = call.tile("bias")
    blocks = triton.cdiv(call.L, tile.block_m), triton.cdiv(call.S, tile.block_n)
    over_batch, over_heads, over_queries, over_keys = summed
    B, H = 1 if over_batch else call.B, 1 if over_heads else call.H
    rows, columns = blocks[0] if over_queries else call.L, blocks[1] if over_keys else call.S
    grad = torch.empty(B, H, rows, columns, dtype=torch.float32, device=call.device)
    bias_kernel[(B * H * blocks[0] * blocks[1],)](
        *(*shared, matrices(grad), call.B, *call.rules),
        **call.options(tile),
        SUM_BATCH=over_batch,
        SUM_HEADS=over_heads,
        SUM_QUERIES=over_queries,
        SUM_KEYS=over_keys,
    )
    if over_queries:
        grad = grad.sum(2, keepdim=True)
    return grad.sum(3, keepdim=True) if over_keys else grad
