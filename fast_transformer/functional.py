"""The public functions: one per fused op. All checks and every choice of backend happen here, and nowhere else.

Each fast path has a `_why_not_...` that returns None or the reason why it cannot take the call; the first path without a
reason wins. `backend="..."` forces a path and raises its reason. `backends()` prints what is active.
"""

import math
import numbers
import re

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import ops, reference

_MAX_LENGTH = 2**62  # positions and their differences fit into 64 bits
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TRITON_DTYPES = _KERNEL_DTYPES[:3]
_ONEDNN_WORK = 2**22  # products from which `linear` takes oneDNN; see _large
# The number of rows up to which `linear` takes its own kernel. With more, oneDNN overtakes it in float32 and bfloat16, MKL in
# float64.
_FEW_ROWS = {torch.float32: 64, torch.bfloat16: 32, torch.float16: 64, torch.float64: 64}


# Checks: ValueError or TypeError with the argument's name, what was expected and what came.


def _check_dense(name: str, x: Tensor) -> None:
    if x.is_nested:
        raise TypeError(f"{name} is a NestedTensor; pass a padded tensor (x.to_padded_tensor(0.0)) and a mask")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")


def check_tensor(name: str, x: object, *, like: Tensor | None = None, nested: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}")
    if not (nested and x.is_nested):
        _check_dense(name, x)
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the first argument, got {x.device}")


def _plain(*tensors: Tensor | None) -> bool:
    """Whether these are dense tensors of one floating-point dtype on one device, or None: in a microsecond on the CPU."""
    first = tensors[0]
    dtype = first.dtype if type(first) is Tensor else None
    if dtype not in _KERNEL_DTYPES:
        return False
    cpu = first.is_cpu
    for x in tensors:
        if x is None:
            continue
        if type(x) is not Tensor and type(x) is not Parameter or x.dtype is not dtype:
            return False
        if not (x.is_cpu if cpu else x.device == first.device):
            return False
        if x.is_nested or x.layout is not torch.strided:
            return False
    return True


def _check_vector(name: str, x: Tensor | None, n: int, like: Tensor) -> None:
    if x is not None:
        check_tensor(name, x, like=like)
        if x.shape != (n,):
            raise ValueError(f"{name} must have shape ({n},), the last size of x, got {tuple(x.shape)}")


def _check_number(name: str, value: object, expected: str, low: float, high: float, *, open_low: bool = False) -> float:
    """value as a Python float if it is a real number in [low, high), or with `open_low` in (low, high)."""
    real = type(value) is float or isinstance(value, numbers.Real)  # the second is slow
    if not real or not low <= value < high or (open_low and value == low):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    if type(value) is float:
        return value
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be {expected}, got an integer past the range of float64") from None


def _check_flag(name: str, value: object) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_probability(name: str, p: float) -> float:
    return _check_number(name, p, "a number in [0, 1)", 0, 1)


def check_softcap(softcap: float | None) -> float | None:
    return None if softcap is None else _check_number("softcap", softcap, "a finite number > 0", 0, math.inf, open_low=True)


def check_window(window: tuple[int | None, int | None] | None) -> None:
    if window is None:
        return
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right), got {window!r}")
    for side in window:
        if side is not None and (not isinstance(side, (int, torch.SymInt)) or not 0 <= side < _MAX_LENGTH):
            raise ValueError(f"window must hold two integers in [0, 2**62) (or None for no limit), got {tuple(window)}")


def _check_broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.dim() > len(shape) or any(a not in (1, b) for a, b in zip(reversed(x.shape), reversed(shape), strict=False)):
        sizes = "(B, H, L, S)" if len(shape) == 4 else "(B, L, S)"
        raise ValueError(f"{name} must broadcast to {sizes} = {shape}, got {tuple(x.shape)}")


def _check_mask(mask: Tensor, query: Tensor, scores: tuple[int, ...], otherwise: str = "") -> None:
    """otherwise: what to do with a mask that is not bool."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (True = attend), got {kind}{otherwise}")
    _check_dense("mask", mask)
    if mask.device != query.device:
        raise ValueError(f"mask must be on {query.device} like query, got {mask.device}")
    _check_broadcast("mask", mask, scores)


def _fit(query, key, value) -> bool:
    """Whether these three are right and what they usually are."""
    if key is None or value is None or not _plain(query, key, value):
        return False
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4:
        return False
    (B, H, _, D), (_, Hkv, _, _) = q, k
    return k[0] == B and k[3] == D > 0 and v[:3] == k[:3] and v[3] > 0 and Hkv > 0 and H > 0 and H % Hkv == 0


def _check_query_key_value(query, key, value) -> None:
    check_tensor("query", query)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, like=query)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, heads, length, head_dim), got shape {tuple(x.shape)}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype}, {value.dtype}")
    (B, H, _, D), (_, Hkv, S, _) = query.shape, key.shape
    if key.shape[0] != B or key.shape[3] != D:
        raise ValueError(
            f"key must have the batch size and head_dim of query, {B} and {D}; "
            f"got query {tuple(query.shape)}, key {tuple(key.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value must be (B, Hkv, S, Dv) = {(B, Hkv, S)} + (Dv,) like key, got {tuple(value.shape)}")
    if H == 0 or Hkv == 0 or H % Hkv != 0:
        raise ValueError(f"query heads must be a multiple of key heads, both at least 1, got {H} and {Hkv}")
    if D == 0 or value.shape[3] == 0:
        raise ValueError(f"head_dim must be at least 1, got {D} for query and key, {value.shape[3]} for value")


def _check_attention(query, key, value, mask, bias, causal, query_offset, window, return_weights) -> None:
    if not _fit(query, key, value):
        _check_query_key_value(query, key, value)
    if mask is not None or bias is not None:
        scores = (*query.shape[:3], key.shape[2])
    if mask is not None:
        _check_mask(mask, query, scores, "; additive scores go into bias=")
    if bias is not None:
        check_tensor("bias", bias, like=query)
        _check_broadcast("bias", bias, scores)
    if not isinstance(causal, (bool, torch.SymBool)):
        raise TypeError(f"causal must be True or False, got {type(causal).__name__}; a tensor goes into mask=")
    if not isinstance(query_offset, (int, torch.SymInt)) or isinstance(query_offset, bool):
        raise TypeError(f"query_offset must be an int, got {query_offset!r}")
    if not -_MAX_LENGTH < query_offset < _MAX_LENGTH:
        raise ValueError(f"query_offset must be in (-2**62, 2**62), got {query_offset}")
    check_window(window)
    if return_weights not in (None, "mean", "per_head"):
        raise ValueError(f'return_weights must be None, "mean" or "per_head", got {return_weights!r}')


def _check_additive_attention(query, key, value, weight, mask) -> None:
    check_tensor("query", query)
    for name, x, sizes in (
        ("query", query, "batch, length, size"),
        ("key", key, "batch, length, size"),
        ("value", value, "batch, length, size"),
        ("weight", weight, "size,"),
    ):
        check_tensor(name, x, like=query)
        if x.dim() != (1 if x is weight else 3):
            raise ValueError(f"{name} must have shape ({sizes}), got {tuple(x.shape)}")
    if not query.dtype == key.dtype == value.dtype == weight.dtype:
        dtypes = f"{query.dtype}, {key.dtype}, {value.dtype}, {weight.dtype}"
        raise TypeError(f"query, key, value and weight must have one dtype, got {dtypes}")
    (B, L, D), S = query.shape, key.shape[1]
    if key.shape[0] != B or key.shape[2] != D:
        raise ValueError(
            f"key must have the batch size and last size of query, {B} and {D}; "
            f"got query {tuple(query.shape)}, key {tuple(key.shape)}"
        )
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(f"value must be (B, S, Dv) = {(B, S)} + (Dv,) like key, got {tuple(value.shape)}")
    if D == 0 or value.shape[2] == 0:
        raise ValueError(f"sizes must be at least 1, got {D} for query and key, {value.shape[2]} for value")
    if weight.shape != (D,):
        raise ValueError(f"weight must have shape ({D},), the last size of query, got {tuple(weight.shape)}")
    if mask is not None:
        _check_mask(mask, query, (B, L, S))


def _rows_fit(x, residual, weight, bias) -> bool:
    """Whether the arguments of a norm are right and what they usually are."""
    if not _plain(x, residual, weight, bias):
        return False
    shape = x.shape
    if not shape or shape[-1] == 0 or (residual is not None and residual.shape != shape):
        return False
    return all(v is None or v.shape == shape[-1:] for v in (weight, bias))


def _check_rows(x, residual, weight, bias, residual_in_fp32) -> tuple[Tensor, Tensor | None]:
    """x and residual in their common dtype; with `residual_in_fp32` residual in float32 (beside float64: float64)."""
    check_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have a last dimension of size >= 1 to normalise, got shape {tuple(x.shape)}")
    if residual is not None:
        check_tensor("residual", residual, like=x)
        if residual.shape != x.shape:
            raise ValueError(f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
        if residual_in_fp32:
            residual = residual.to(reference.wide_dtype(x.dtype))
        elif residual.dtype != x.dtype:
            dtype = torch.promote_types(x.dtype, residual.dtype)
            x, residual = x.to(dtype), residual.to(dtype)
    _check_vector("weight", weight, x.shape[-1], like=x)
    _check_vector("bias", bias, x.shape[-1], like=x)
    return x, residual


def _check_activation(activation: str) -> None:
    if not isinstance(activation, str) or activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, reference.ACTIVATIONS))}, got {activation!r}")


def _linear_fits(x, weight, bias) -> bool:
    """Whether the arguments of `linear` are right and what they usually are."""
    if weight is None or not _plain(x, weight, bias):
        return False
    shape, rows = x.shape, weight.shape
    return len(rows) == 2 and len(shape) > 0 and shape[-1] == rows[1] and (bias is None or bias.shape == rows[:1])


def _check_linear(x, weight, bias) -> None:
    check_tensor("x", x)
    check_tensor("weight", weight, like=x)
    if weight.dim() != 2:
        raise ValueError(f"weight must have 2 dimensions (N, K), got shape {tuple(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be (..., K) for a weight (N, K) = {tuple(weight.shape)}, got shape {tuple(x.shape)}")
    if bias is not None:
        check_tensor("bias", bias, like=x)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have shape ({weight.shape[0]},), the first size of weight, got {tuple(bias.shape)}")
    dtypes = [t.dtype for t in (x, weight, bias) if t is not None]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"x, weight and bias must have one dtype, got {', '.join(map(str, dtypes))}")


# Choice of backend


def _use(name: str, backend: str | None, reason: str | None) -> bool:
    """Whether the path `name` takes this call; raises if the caller insisted on it and it cannot."""
    if backend == name and reason is not None:
        raise RuntimeError(f"backend={name!r} cannot take this call: {reason}")
    return reason is None and backend in (None, name)


def _check_backend(backend: str | None, *known: str) -> None:
    if backend is not None and backend not in known:
        raise ValueError(f"backend must be None or one of {', '.join(map(repr, known))}, got {backend!r}")


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


# torch.compile asks these two while it traces, when the transforms that it traces through are in force, and keeps the answer:
# what torch.compiler.assume_constant_result does, without its import of the whole compiler.
_inside_transform._dynamo_marked_constant = _forward_mode._dynamo_marked_constant = True


def _why_not_cpu(x: Tensor, *others: Tensor | None) -> str | None:
    if ops.missing is not None:
        return ops.missing
    if x.device.type != "cpu":
        return f"the tensors are on {x.device}"
    if x.dtype not in _KERNEL_DTYPES:
        return f"no kernel for {x.dtype}"
    return _transform_active(x, *others)


def _why_not_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """What both kernels of linear leave to F.linear."""
    if torch.is_autocast_enabled("cpu"):
        return "autocast is active, whose casts are those of F.linear"
    if (reason := _why_not_cpu(x, weight, bias)) is not None:
        return reason
    if not _plain(x, weight, bias):
        return "x is a subclass of torch.Tensor, or weight or bias one other than torch.nn.Parameter"
    return None


def _why_not_linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        return "an input needs a gradient"
    if weight.shape[1] == 0 or weight.stride(1) != 1:
        return f"the rows of weight must lie contiguous, got shape {tuple(weight.shape)}, strides {weight.stride()}"
    return _why_not_linear(x, weight, bias)


def _why_not_linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if x.dtype != torch.float32:
        return f"F.linear takes oneDNN for half precision itself, and this is for float32 only; got {x.dtype}"
    if not ops.has_onednn:
        return "this torch has no oneDNN"
    return _why_not_linear(x, weight, bias)


def _why_not_triton(x: Tensor, *others: Tensor | None) -> str | None:
    if ops.triton_missing is not None:
        return ops.triton_missing
    if not x.is_cuda and not ops.triton_interpreted():
        return f"the tensors are on {x.device}"
    if x.is_cuda and (reason := _too_old(x.device.index)) is not None:
        return reason
    if x.dtype not in _TRITON_DTYPES:
        return f"no kernel for {x.dtype}"
    return _transform_active(x, *others)


def _why_not_triton_attention(query: Tensor, value: Tensor, *others: Tensor | None) -> str | None:
    if max(query.shape[3], value.shape[3]) > 256:
        return f"head_dim is at most 256, got {query.shape[3]} for query and key, {value.shape[3]} for value"
    return _why_not_triton(query, value, *others)


def _too_old(index: int) -> str | None:
    """Why a GPU cannot run Triton's kernels."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"a GPU of compute capability {major}.{minor}; Triton needs 8.0 or newer"


def _why_no_cuda_kernels() -> str | None:
    if ops.missing is not None or ops.cuda_archs is not None:
        return ops.missing
    return f"the compiled module has no CUDA kernels; with a CUDA build of torch and nvcc, `{ops.BUILD_COMMAND}` builds them"


def _why_not_cuda(x: Tensor, *others: Tensor | None) -> str | None:
    if x.device.type != "cuda":
        return f"the tensors are on {x.device}"
    if (reason := _why_no_cuda_kernels()) is not None:
        return reason
    if x.dtype not in _KERNEL_DTYPES or x.dtype == torch.float64:
        return f"no CUDA kernel for {x.dtype}"
    if x.shape[-1] > 2**30:
        return f"no CUDA kernel for rows of more than 2**30 elements, got {x.shape[-1]}"
    return _why_not_gpu(x.device.index) or _transform_active(x, *others)


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


_gpu_reasons: dict[int, str | None] = {}
_why_not_gpu._dynamo_marked_constant = _too_old._dynamo_marked_constant = (
    True  # asked while torch.compile traces, as _forward_mode is
)


def _kernel_takes(backend: str | None, *tensors: Tensor | None) -> bool:
    """Whether the compiled op, on its CPU or CUDA kernels, takes this call; else the reference does."""
    _check_backend(backend, "cpu", "cuda", "reference")
    return _use("cpu", backend, _why_not_cpu(*tensors)) or _use("cuda", backend, _why_not_cuda(*tensors))


def _draw_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """A 64-bit seed from torch's generator of that device; it stays there, so nothing waits for it."""
    return torch.randint(2**63 - 1, (), device=device) if dropout_p > 0.0 else None


def backends() -> None:
    """Prints, op by op, the backends in the order in which they are tried, and why one is not active."""
    kernels = "for CPU tensors" if ops.missing is None else f"not active: {ops.missing}"
    without_cuda = _why_no_cuda_kernels()
    cuda = "for CUDA tensors" if without_cuda is None else f"not active: {without_cuda}"
    without_triton = ops.triton_missing
    if without_triton is None:
        without_triton = _too_old(torch.cuda.current_device()) if torch.cuda.is_available() else "torch sees no GPU"
    triton = "for CUDA and ROCm tensors" if without_triton is None else f"not active: {without_triton}"
    fallback = "for everything else: other devices and dtypes, torch.func transforms, forward-mode AD"
    for op in ("attention, additive_attention", "dropout_add_layer_norm, dropout_add_rms_norm", "activation_dropout, dropout"):
        print(op)
        print(f"  cpu        {kernels}")
        print(f"  triton     {triton}" if op.startswith("attention") else f"  cuda       {cuda}")
        print(f"  reference  {fallback}")
    few, work = _FEW_ROWS, f"{_ONEDNN_WORK / 1e6:.1f}"
    print("linear")
    print(f"  cpu        {kernels}, up to {few[torch.float32]} rows ({few[torch.bfloat16]} of bfloat16) without gradients")
    print(f"  onednn     {kernels} of float32, from {work} million products on")
    print("  reference  for everything else: F.linear")


# The ops


def _autocast(*tensors: object) -> tuple[object, ...]:
    """The arguments as autocast casts those of F.scaled_dot_product_attention; what it leaves alone stays as it is."""
    first = tensors[0]
    kind = first.device.type if isinstance(first, Tensor) and not first.is_cpu else "cpu"
    if kind != "cpu" and not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)

    def cast(x):
        leave = not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64
        return x if leave else x.to(dtype)

    return tuple(cast(x) for x in tensors)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    query_offset: int = 0,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_weights: str | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale · query · keyᵀ + bias) · value, with masks, dropout and attention weights (Vaswani et al. 2017, eq. 1).

    A query that may attend to nothing gives output 0, weights 0, LSE -inf and zero gradients, never NaN. Under autocast
    query, key and value are cast as `F.scaled_dot_product_attention` casts them.

    Args:
        query: (B, H, L, D), any strides.
        key: (B, Hkv, S, D). H is a multiple of Hkv: each key head serves H / Hkv query heads in a row.
        value: (B, Hkv, S, Dv).
        mask: bool, broadcastable to (B, H, L, S), **True = attend** (as F.scaled_dot_product_attention; the modules of
            torch.nn mean the opposite).
        bias: float, broadcastable to (B, H, L, S), added to the scaled scores; may hold -inf; differentiable.
        causal: query i, at position i + query_offset, sees keys j <= that position.
        query_offset: position of the first query among the keys: S - L aligns the last query with the last key.
        window: (left, right): a query sees keys at most that far before and after its position; None = no limit.
        scale: factor of the scores, 1/sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap), before bias.
        dropout_p: probability, in [0, 1), with which a weight is dropped; quantised to 1/65536.
        return_weights: "mean" adds the weights averaged over heads, (B, L, S); "per_head" adds (B, H, L, S). As torch.nn
            returns them: after dropout. Differentiable.
        return_lse: adds the natural-log log-sum-exp of the scores, (B, H, L), float32 (float64 for float64).
        backend: None chooses; "cpu", "triton" or "reference" insists.

    Returns:
        (B, H, L, Dv) in query's dtype, or a tuple (output[, weights][, lse]).

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    query, key, value = _autocast(query, key, value)
    _check_attention(query, key, value, mask, bias, causal, query_offset, window, return_weights)
    if scale is None:
        scale = query.shape[3] ** -0.5
    else:
        scale = _check_number("scale", scale, "a finite number", -math.inf, math.inf, open_low=True)
    softcap = check_softcap(softcap)
    dropout_p = check_probability("dropout_p", dropout_p)
    _check_backend(backend, "cpu", "triton", "reference")
    if _use("cpu", backend, _why_not_cpu(query, key, value, bias)):
        op = ops.attention
    elif (query.is_cuda or backend == "triton") and _use("triton", backend, _why_not_triton_attention(query, value, key, bias)):
        op = ops.attention_triton
    else:
        op = reference.attention
    return op(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        causal=causal,
        query_offset=query_offset,
        window=window,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        seed=_draw_seed(dropout_p, query.device),
        return_weights=return_weights,
        return_lse=return_lse,
    )


def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    mask: Tensor | None = None,
    return_weights: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scores) · value with scores[b, l, s] = weight · tanh(query[b, l] + key[b, s]) (Bahdanau et al. 2015, A.1.2).

    The B × L × S × D hyperbolic tangents exist nowhere at once: backward computes them again. Scores are float32 (float64 for
    float64). A query that may attend to nothing gives output 0, weights 0 and zero gradients, never NaN. Under autocast query,
    key, value and weight are cast as those of `attention`.

    Args:
        query: (B, L, D), already projected, any strides.
        key: (B, S, D), already projected.
        value: (B, S, Dv).
        weight: (D,), the vector v of the paper.
        mask: bool, broadcastable to (B, L, S), **True = attend**; padding of shape (B, S) goes in as `mask[:, None]`.
        return_weights: also return the attention weights, (B, L, S), differentiable.
        backend: None chooses; "cpu", "triton" or "reference" insists.

    Returns:
        (B, L, Dv) in query's dtype; with `return_weights` the tuple (that, weights (B, L, S) in query's dtype).

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    query, key, value, weight = _autocast(query, key, value, weight)
    _check_additive_attention(query, key, value, weight, mask)
    _check_flag("return_weights", return_weights)
    _check_backend(backend, "cpu", "triton", "reference")
    if _use("cpu", backend, _why_not_cpu(query, key, value, weight)):
        scores = ops.additive_scores(query, key, weight)
    elif (query.is_cuda or backend == "triton") and _use("triton", backend, _why_not_triton(query, key, value, weight)):
        scores = ops.additive_scores_triton(query, key, weight)
    else:
        scores = reference.additive_scores(query, key, weight)
    return reference.weighted_values(scores, value, mask=mask, return_weights=return_weights)


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm(residual + dropout(x)) over the last dimension, in one pass (Ba et al. 2016; Srivastava et al. 2014).

    Statistics and the sum are float32 (float64 for float64). x and residual of different dtypes are promoted as
    `residual + x` would be. Backward reads what forward read: only row statistics and a seed are kept besides the inputs.

    Args:
        x: (..., N), N >= 1.
        residual: the shape of x, or None.
        weight, bias: (N,) or None; may be float32 beside bfloat16 or float16 activations.
        eps: added to the variance, >= 0.
        dropout_p: probability, in [0, 1), with which an element of x is dropped; quantised to 1/65536.
        prenorm: also return the sum, as a pre-norm block carries it on.
        residual_in_fp32: residual and the returned sum are float32 (float64 for float64) whatever the dtype of x, which is the
            result's: the residual stream of a deep model in half precision keeps its small terms.
        backend: None chooses; "cpu", "cuda" or "reference" insists.

    Returns:
        (..., N) in x's (promoted) dtype; with `prenorm` the tuple (that, residual + dropout(x)).

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    if residual_in_fp32 or not _rows_fit(x, residual, weight, bias):
        x, residual = _check_rows(x, residual, weight, bias, residual_in_fp32)
    eps = _check_number("eps", eps, "a finite number >= 0", 0, math.inf)
    dropout_p = check_probability("dropout_p", dropout_p)
    _check_flag("prenorm", prenorm)
    _check_flag("residual_in_fp32", residual_in_fp32)
    op = ops.dropout_add_layer_norm if _kernel_takes(backend, x, residual, weight, bias) else reference.dropout_add_layer_norm
    seed = _draw_seed(dropout_p, x.device)
    flags = {"prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
    return op(x, residual, weight, bias, eps=eps, dropout_p=dropout_p, seed=seed, **flags)


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float | None = None,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm(residual + dropout(x)) over the last dimension, in one pass (Zhang and Sennrich 2019).

    Args:
        eps: added to the mean square, >= 0; None, as in torch.nn.RMSNorm: the machine epsilon of float32 (for float64 its own).
        x, residual, weight, dropout_p, prenorm, residual_in_fp32, backend: as in `dropout_add_layer_norm`.

    Returns, raises: as `dropout_add_layer_norm`.
    """
    if residual_in_fp32 or not _rows_fit(x, residual, weight, None):
        x, residual = _check_rows(x, residual, weight, None, residual_in_fp32)
    if eps is None:
        eps = torch.finfo(reference.wide_dtype(x.dtype)).eps
    else:
        eps = _check_number("eps", eps, "None or a finite number >= 0", 0, math.inf)
    dropout_p = check_probability("dropout_p", dropout_p)
    _check_flag("prenorm", prenorm)
    _check_flag("residual_in_fp32", residual_in_fp32)
    op = ops.dropout_add_rms_norm if _kernel_takes(backend, x, residual, weight) else reference.dropout_add_rms_norm
    seed = _draw_seed(dropout_p, x.device)
    flags = {"prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
    return op(x, residual, weight, eps=eps, dropout_p=dropout_p, seed=seed, **flags)


def activation_dropout(
    x: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """dropout(activation(x + bias)) in one pass; backward recomputes from x and a seed.

    Args:
        x: any shape; (..., N) if bias is given.
        bias: (N,) or None.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu" or "none".
        dropout_p: probability, in [0, 1), with which an element is dropped; quantised to 1/65536.
        backend: None chooses; "cpu", "cuda" or "reference" insists.

    Returns:
        A tensor like x.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    check_tensor("x", x)
    if x.dim() == 0:
        if bias is not None:
            raise ValueError("bias needs an x with at least one dimension, got a 0-dim x")
        return activation_dropout(x[None], None, activation, dropout_p=dropout_p, backend=backend)[0]
    _check_vector("bias", bias, x.shape[-1], like=x)
    _check_activation(activation)
    dropout_p = check_probability("dropout_p", dropout_p)
    op = ops.activation_dropout if _kernel_takes(backend, x, bias) else reference.activation_dropout
    return op(x, bias, activation, dropout_p=dropout_p, seed=_draw_seed(dropout_p, x.device))


def dropout(x: Tensor, dropout_p: float, *, backend: str | None = None) -> Tensor:
    """Each element of x dropped with probability `dropout_p`, the others scaled by the inverse of the keep probability.

    Args:
        x: any shape.
        dropout_p: in [0, 1); quantised to 1/65536.
        backend: None chooses; "cpu", "cuda" or "reference" insists.

    Returns:
        A tensor like x.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    return activation_dropout(x, None, "none", dropout_p=dropout_p, backend=backend)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", *, backend: str | None = None
) -> Tensor:
    """activation(x · weightᵀ + bias), by the fastest of three.

    "cpu" is for few rows without gradients, as in decoding: a kernel bound by reading weight, which lies as it is: nothing is
    packed, so nothing goes stale. A row's result has the same bits beside any other rows. "onednn" has torch's oneDNN do large
    float32 products on CPU and those of their gradients, where F.linear takes MKL, at half the speed on AMD's processors.
    F.linear ("reference") takes everything else: half precision, other devices, autocast, torch.func transforms, tensor
    subclasses. It is not slower there.

    Args:
        x: (..., K).
        weight: (N, K), in the dtype of x.
        bias: (N,) or None, in the dtype of x.
        activation: "relu", "gelu" (erf), "gelu_tanh", "silu" or "none".
        backend: None chooses; "cpu", "onednn" (whatever the sizes) or "reference" insists.

    Returns:
        (..., N) in the dtype of x; under autocast as F.linear.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it. RuntimeError: `backend` cannot take the call.
    """
    if not _linear_fits(x, weight, bias):
        _check_linear(x, weight, bias)
    _check_activation(activation)
    _check_backend(backend, "cpu", "onednn", "reference")
    op = reference.linear
    if (backend == "cpu" or _few_rows(x)) and _use("cpu", backend, _why_not_linear_cpu(x, weight, bias)):
        op = ops.linear
    elif (backend == "onednn" or _large(x, weight)) and _use("onednn", backend, _why_not_linear_onednn(x, weight, bias)):
        op = ops.linear_onednn
    return op(x, weight, bias, activation)


def _few_rows(x: Tensor) -> bool:
    """Whether the kernel beats F.linear, which torch.compile fuses with what surrounds it."""
    return not torch.compiler.is_compiling() and x.numel() <= _FEW_ROWS.get(x.dtype, 0) * x.shape[-1]


def _large(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's speed outweighs its 10 microseconds of preparation."""
    if torch.compiler.is_compiling():
        return weight.numel() >= 2**16  # a condition on the rows would tie the graph to their number
    return x.numel() * weight.shape[0] >= _ONEDNN_WORK
