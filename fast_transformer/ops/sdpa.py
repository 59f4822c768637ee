"""Attention through PyTorch's CPU flash kernel, for the calls that mean the same there.

The kernel has no second derivative; a backward that is itself to be differentiated goes through the reference.
"""

import torch
from torch import Tensor

from .. import reference
from ._register import differentiable

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, bias, causal, scale):
        out, lse = _forward(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
        ctx.save_for_backward(query, key, value, bias, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, bias, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = [differentiable(t) for t in (query, key, value)]
            out = reference.attention(
                *inputs,
                mask=None,
                bias=bias,
                causal=ctx.causal,
                query_offset=0,
                window=None,
                scale=ctx.scale,
                softcap=None,
                dropout_p=0.0,
                seed=None,
                return_weights=None,
                return_lse=False,
            )
            grads = torch.autograd.grad(out, inputs, grad_out, create_graph=True)
        else:
            grads = _backward(grad_out, query, key, value, out, lse, 0.0, ctx.causal, attn_mask=bias, scale=ctx.scale)
        return *grads, None, None, None


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, bias: Tensor | None, causal: bool, scale: float
):
    """(B, H, L, D) each; `mask` and `bias` broadcastable to (B, H, L, S)."""
    if causal and mask is not None:
        mask = reference.visible_keys(
            query.shape[2], key.shape[2], mask=mask, causal=True, query_offset=0, window=None, device=query.device
        )
        causal = False
    if mask is not None:
        bias = torch.zeros((), dtype=query.dtype, device=query.device) if bias is None else bias
        bias = torch.where(mask, bias, -torch.inf)
    if bias is not None:
        bias = bias.to(query.dtype).expand(*[1] * (4 - bias.dim()), *bias.shape) if bias.dim() < 4 else bias.to(query.dtype)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return FlashAttention.apply(query, key, value, bias, causal, scale)
    return _forward(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)[0]
