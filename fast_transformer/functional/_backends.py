"""The choice of backend, as far as several ops share it.

Each fast path has a `why_not_...` that returns None or the reason why it cannot take the call; the first path without a
reason wins. `backend="..."` forces a path and raises its reason.
"""

import re

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import ops

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TRITON_DTYPES = KERNEL_DTYPES[:3]
_gpu_reasons: dict[int, str | None] = {}  # by the GPU's index, for _why_not_gpu


def ready(*tensors: Tensor | None) -> bool:
    """Whether the CPU kernels take these without a closer look, as almost always: dense tensors of one dtype, no subclasses.

    The first is one; others may be None. Nor is anything about that casts them or has to see plain PyTorch operations, as
    autocast, a tracer or a transform. Takes half a microsecond.
    """
    return ops.missing is None and not torch.compiler.is_compiling() and ops.ready(*tensors)


def use(name: str, backend: str | None, reason: str | None) -> bool:
    """Whether the path `name` takes this call; raises if the caller insisted on it and it cannot."""
    if backend == name and reason is not None:
        raise RuntimeError(f"backend={name!r} cannot take this call: {reason}")
    return reason is None and backend in (None, name)


def check_backend(backend: str | None, *known: str) -> None:
    if backend is not None and backend not in known:
        raise ValueError(f"backend must be None or one of {', '.join(map(repr, known))}, got {backend!r}")


def kernel_takes(backend: str | None, *tensors: Tensor | None) -> bool:
    """Whether the compiled op, on its CPU or CUDA kernels, takes this call; else the reference does."""
    if backend is None and ready(*tensors):
        return True
    check_backend(backend, "cpu", "cuda", "reference")
    return use("cpu", backend, why_not_cpu(*tensors)) or use("cuda", backend, _why_not_cuda(*tensors))


def why_not_cpu(x: Tensor, *others: Tensor | None) -> str | None:
    if ready(x, *others):
        return None
    if ops.missing is not None:
        return ops.missing
    if x.device.type != "cpu":
        return f"the tensors are on {x.device}"
    if x.dtype not in KERNEL_DTYPES:
        return f"no kernel for {x.dtype}"
    return _transform_active(x, *others)


def _why_not_cuda(x: Tensor, *others: Tensor | None) -> str | None:
    if x.device.type != "cuda":
        return f"the tensors are on {x.device}"
    if (reason := why_no_cuda_kernels()) is not None:
        return reason
    if x.dtype not in KERNEL_DTYPES or x.dtype == torch.float64:
        return f"no CUDA kernel for {x.dtype}"
    if x.shape[-1] > 2**30:
        return f"no CUDA kernel for rows of more than 2**30 elements, got {x.shape[-1]}"
    return _why_not_gpu(x.device.index) or _transform_active(x, *others)


def why_no_cuda_kernels() -> str | None:
    if ops.missing is not None or ops.cuda_archs is not None:
        return ops.missing
    return f"the compiled module has no CUDA kernels; with a CUDA build of torch and nvcc, `{ops.BUILD_COMMAND}` builds them"


def _why_not_gpu(index: int) -> str | None:
    """Why a GPU cannot run the CUDA kernels. Code for one minor version runs on later ones, PTX on everything later."""
    if index not in _gpu_reasons:
        gpu = major, minor = torch.cuda.get_device_capability(index)
        built = [((int(a), int(b)), ptx) for a, b, ptx in re.findall(r"(\d+)\.(\d+)[af]?(\+PTX)?", ops.cuda_archs)]
        runs = not built or any(arch <= gpu and (ptx or arch[0] == major) for arch, ptx in built)
        build = f"`TORCH_CUDA_ARCH_LIST={major}.{minor} {ops.BUILD_COMMAND}` builds them for it"
        reason = f"the CUDA kernels are built for {ops.cuda_archs}, this GPU is a {major}.{minor}; {build}"
        _gpu_reasons[index] = None if runs else reason
    return _gpu_reasons[index]


def why_not_triton(x: Tensor, *others: Tensor | None) -> str | None:
    if ops.triton_missing is not None:
        return ops.triton_missing
    if not x.is_cuda and not ops.triton_interpreted():
        return f"the tensors are on {x.device}"
    if x.is_cuda and (reason := too_old(x.device.index)) is not None:
        return reason
    if x.dtype not in _TRITON_DTYPES:
        return f"no kernel for {x.dtype}"
    return _transform_active(x, *others)


def too_old(index: int) -> str | None:
    """Why a GPU cannot run Triton's kernels."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"a GPU of compute capability {major}.{minor}; Triton needs 8.0 or newer"


def _transform_active(*tensors: Tensor | None) -> str | None:
    """Why no kernel may see these tensors: they carry what only plain PyTorch operations can follow."""
    if torch.jit.is_tracing():
        return "torch.jit.trace, whose files should run without this package"
    if _inside_transform():
        return "inside a torch.func transform (vmap, jvp, jacrev, ...)"
    if _forward_mode():
        if torch.compiler.is_compiling():
            return "forward-mode differentiation while compiling"
        if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            return "forward-mode differentiation"
    return None


def _inside_transform() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def _forward_mode() -> bool:
    return forward_ad._current_level >= 0


# torch.compile asks these four while it traces, the last two when the transforms that it traces through are in force, and keeps
# the answer: what torch.compiler.assume_constant_result does, without its import of the whole compiler.
_why_not_gpu._dynamo_marked_constant = too_old._dynamo_marked_constant = True
_inside_transform._dynamo_marked_constant = _forward_mode._dynamo_marked_constant = True
