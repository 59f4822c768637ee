"""No Triton kernel reads or writes outside the tensors it was given: every address it uses is looked up.

The kernels run in Triton's interpreter, whose loads and stores pass by here first.
"""

import numpy as np
import pytest
import torch

from fast_transformer.functional import additive_attention, attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled, not interpreted")


def tensors_of(arguments):
    """Every tensor among the arguments of a kernel."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors_of(x)
        elif hasattr(x, "base"):  # of a tensor descriptor
            yield x.base


def addresses(x):
    """Those of all elements of a tensor; what lies between two elements is not its own."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return x.data_ptr() + x.element_size() * offsets.flatten().unique().numpy()


class Watched:
    """Triton's interpreter of memory accesses, with every address checked against the arguments of the kernel that runs."""

    def __init__(self, interpreter):
        self.interpreter, self.allowed, self.seen = interpreter, None, 0

    def __getattr__(self, name):
        return getattr(self.interpreter, name)

    def check(self, kind, pointers, mask):
        used = np.broadcast_to(pointers, mask.shape)[mask.astype(bool)].astype(np.int64)
        outside = ~np.isin(used, self.allowed)
        assert not outside.any(), f"{outside.sum()} of {used.size} addresses of a {kind} are in no tensor"
        self.seen += used.size

    def load(self, pointers, mask, *rest):
        self.check("load", pointers, mask)
        return self.interpreter.load(pointers, mask, *rest)

    def store(self, pointers, value, mask):
        self.check("store", pointers, mask)
        return self.interpreter.store(pointers, value, mask)


@pytest.fixture
def watched(monkeypatch):
    from triton.runtime import interpreter

    watch = Watched(interpreter._interpreter)
    call = interpreter.GridExecutor.__call__

    def run(self, *args, **kwargs):
        tensors = list(tensors_of([*args, *kwargs.values()]))
        watch.allowed = np.unique(np.concatenate([addresses(x) for x in tensors if x.numel()] or [np.zeros(0, np.int64)]))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_interpreter", watch)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run)
    return watch


CALLS = {  # B, H, Hkv, L, S, D, Dv, the shapes of mask and bias, options
    "odd": ((1, 2, 1, 35, 67, 5, 11), None, None, dict(causal=True, query_offset=3)),
    "powers-of-two": ((1, 2, 2, 32, 64, 16, 16), None, (1, 1, 32, 1), dict(return_weights="mean")),
    "one": ((1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1), (1,), dict(return_weights="per_head")),
    "decode": ((1, 1, 1, 1, 301, 24, 24), (1, 1, 1, 301), None, {}),
    "padding": ((2, 2, 2, 33, 65, 20, 20), (2, 1, 1, 65), (1, 2, 33, 65), dict(dropout_p=0.3, return_weights="mean")),
    "window": ((1, 1, 1, 70, 70, 3, 17), (1, 1, 70, 70), (1, 1, 70, 70), dict(window=(5, 2), softcap=3.0)),
    "everything": (
        *((2, 4, 2, 37, 41, 33, 9), (1, 4, 37, 1), (2, 1, 1, 41)),
        dict(causal=True, query_offset=9, window=(30, 0), dropout_p=0.2, softcap=2.0, return_weights="per_head"),
    ),
}


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", CALLS)
def test_every_address_belongs_to_a_tensor(watched, name, strided):
    (B, H, Hkv, L, S, D, Dv), mask_shape, bias_shape, options = CALLS[name]
    leaves = [torch.randn(shape) for shape in ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv))]
    if strided:  # every second element of a fused layout (B, L, H, D)
        leaves = [torch.randn(x.shape[0], x.shape[2], x.shape[1], 2 * x.shape[3])[..., ::2].transpose(1, 2) for x in leaves]
    mask = None if mask_shape is None else torch.rand(mask_shape) < 0.7
    bias = None if bias_shape is None else torch.randn(bias_shape)
    inputs = [x.requires_grad_() for x in (*leaves, bias) if x is not None]
    results = attention(*leaves, mask=mask, bias=bias, return_lse=True, backend="triton", **options)
    forward = watched.seen
    torch.autograd.grad(results, inputs, [torch.randn_like(r) for r in results])
    assert 0 < forward < watched.seen


@pytest.mark.parametrize("B, L, S, D", [(2, 35, 67, 5), (1, 32, 64, 32), (1, 1, 1, 1), (3, 1, 40, 33)])
def test_every_address_of_additive_attention_belongs_to_a_tensor(watched, B, L, S, D):
    query, key, value = (torch.randn(B, 2 * n, d)[:, ::2] for n, d in ((L, D), (S, D), (S, 3)))
    inputs = [x.requires_grad_() for x in (query, key.mT.contiguous().mT, value, torch.randn(2 * D)[::2])]
    out = additive_attention(*inputs, backend="triton")
    forward = watched.seen
    torch.autograd.grad(out.sum(), inputs)
    assert 0 < forward < watched.seen


def test_the_check_sees_an_address_outside(watched):
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, STEP: tl.constexpr):
        tl.store(x + tl.arange(0, 8) * STEP, 1.0)

    kernel[(1,)](torch.zeros(16)[::2], STEP=2)
    for x, step in ((torch.zeros(14)[::2], 2), (torch.zeros(16)[::2], 1)):  # past the end; between two elements
        with pytest.raises(Exception, match="in no tensor"):
            kernel[(1,)](x, STEP=step)
