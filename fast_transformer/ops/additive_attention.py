"""The scores of additive attention: the compiled op and the one in Triton, their fake kernels and derivatives.

First derivatives of the compiled op are in csrc/autograd/additive_attention.cpp.
"""

from functools import cache

import torch
from torch import Tensor

from .. import reference
from ._extension import missing
from ._register import check_devices, differentiable, entry, impl_autograd, library

additive_scores = entry("additive_scores")


def _forward_fake(query, key, weight):
    check_devices(query, key, weight)
    return query.new_empty(*query.shape[:2], key.shape[1], dtype=reference.wide_dtype(query.dtype))


def _backward_fake(grad, query, key, weight):
    check_devices(grad, query, key, weight)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, weight))


def _backward_recorded(grad, query, key, weight):
    """The backward op where it is itself differentiated: plain PyTorch, from the reference."""
    inputs = [differentiable(x) for x in (query, key, weight)]
    return torch.autograd.grad(reference.additive_scores(*inputs), inputs, grad, create_graph=True)


if missing is None:
    torch.library.register_fake("fast_transformer::additive_scores", _forward_fake)
    torch.library.register_fake("fast_transformer::additive_scores_backward", _backward_fake)
    impl_autograd("additive_scores_backward", _backward_recorded)


# The op in Triton. Its kernels are imported by the first call: that takes a while.

library.define("additive_scores_triton(Tensor query, Tensor key, Tensor weight) -> Tensor")
library.define(
    "additive_scores_triton_backward(Tensor grad, Tensor query, Tensor key, Tensor weight) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_weight)"
)


@cache
def _kernels():
    from ..triton_kernels import additive_attention

    return additive_attention


def _triton_forward(query, key, weight):
    with torch.cuda.device_of(query):
        return _kernels().additive_scores(query, key, weight)


def _triton_backward(grad, query, key, weight):
    with torch.cuda.device_of(query):
        return _kernels().additive_scores_backward(grad, query, key, weight)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad):
    return torch.ops.fast_transformer.additive_scores_triton_backward(grad, *ctx.saved_tensors)


library.impl("additive_scores_triton", _triton_forward, "CompositeExplicitAutograd")
library.impl("additive_scores_triton_backward", _triton_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fast_transformer::additive_scores_triton", _forward_fake, lib=library)
torch.library.register_fake("fast_transformer::additive_scores_triton_backward", _backward_fake, lib=library)
torch.library.register_autograd("fast_transformer::additive_scores_triton", _differentiate, setup_context=_keep, lib=library)
impl_autograd("additive_scores_triton_backward", _backward_recorded)


def additive_scores_triton(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.fast_transformer.additive_scores_triton(query, key, weight)
