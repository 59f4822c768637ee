"""`backends()`: which paths are active."""

import math

import torch

from .. import ops
from ._backends import too_old, why_no_cuda_kernels
from .linear import FEW_ROWS, ONEDNN_WORK


def backends() -> None:
    """Prints, op by op, the backends in the order in which they are tried, and why one is not active."""
    kernels = "for CPU tensors" if ops.missing is None else f"not active: {ops.missing}"
    without_cuda = why_no_cuda_kernels()
    cuda = "for CUDA tensors" if without_cuda is None else f"not active: {without_cuda}"
    without_triton = ops.triton_missing
    if without_triton is None:
        without_triton = too_old(torch.cuda.current_device()) if torch.cuda.is_available() else "torch sees no GPU"
    triton = "for CUDA and ROCm tensors" if without_triton is None else f"not active: {without_triton}"
    fallback = "for everything else: other devices and dtypes, torch.func transforms, forward-mode AD"
    for op in ("attention, additive_attention", "dropout_add_layer_norm, dropout_add_rms_norm", "activation_dropout, dropout"):
        print(op)
        print(f"  cpu        {kernels}")
        print(f"  triton     {triton}" if op.startswith("attention") else f"  cuda       {cuda}")
        print(f"  reference  {fallback}")
    few = ", ".join(f"{'any' if rows == math.inf else rows} of {dtype}" for dtype, rows in FEW_ROWS.items())
    large = f"from {ONEDNN_WORK / 1e6:.1f} million products on" if ONEDNN_WORK < math.inf else "by request only on this CPU"
    print("linear")
    print(f"  cpu        {kernels} without gradients, of few rows: {few.replace('torch.', '')}")
    print(f"  onednn     {kernels} of float32, {large}")
    print("  reference  for everything else: F.linear")
