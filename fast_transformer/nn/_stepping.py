"""Decoding one token at a time, without calling modules: their calls and checks would take longer than the ops.

`stack_step` takes a stack apart, once, before the first token; the result does what the stack does with filled caches. Where
somebody watches or replaces a part of the stack, there is none, and the modules are to be called.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import functional
from ._fusion import LINEAR, NORM, fused_activation, fused_dropout, plain
from .cache import DecoderLayerCache, KeyValueCache
from .multihead_attention import MultiheadAttention
from .transformer import TransformerDecoder, TransformerDecoderLayer, TransformerEncoder, TransformerEncoderLayer


def stack_step(stack: torch.nn.Module) -> "StackStep | None":
    """What does one step of this stack, a twin; None if its modules have to be called. What is hooked later goes unnoticed."""
    if not plain(stack, (TransformerEncoder, TransformerDecoder)) or not all(map(_simple_layer, stack.layers)):
        return None
    return StackStep(stack)


def _simple_layer(layer: torch.nn.Module) -> bool:
    if not plain(layer, (TransformerEncoderLayer, TransformerDecoderLayer)) or fused_activation(layer.activation) is None:
        return False
    if any(name in layer.__dict__ for name in ("_sa_block", "_mha_block", "_ff_block")):
        return False
    for name, module in layer.named_children():
        if name in ("self_attn", "multihead_attn"):
            if not _simple_attention(module):
                return False
        elif name.startswith("norm"):
            if not plain(module, NORM):
                return False
        elif name.startswith("dropout"):
            if fused_dropout(module) != 0.0:
                return False
        elif name.startswith("linear") and not plain(module, LINEAR):
            return False
    return True


def _simple_attention(m: torch.nn.Module) -> bool:
    if not plain(m, (MultiheadAttention,)) or not plain(m.out_proj, LINEAR):
        return False
    if m.in_proj_weight is None or m._appended_keys or m.window is not None or (m.training and m.dropout):
        return False
    return m.batch_first


class _AttentionStep:
    """A MultiheadAttention for one query of each row."""

    def __init__(self, m: MultiheadAttention, *, cross: bool) -> None:
        E = m.embed_dim if cross else 3 * m.embed_dim  # cross-attention: the keys are in the cache
        self.weight, self.bias = m.in_proj_weight[:E], None if m.in_proj_bias is None else m.in_proj_bias[:E]
        self.out_weight, self.out_bias = m.out_proj.weight, m.out_proj.bias
        self.heads, self.head_dim, self.rotary, self.softcap = m.num_heads, m.head_dim, m.rotary, m.softcap

    def attend(self, x: Tensor, cache: KeyValueCache, visible: Tensor | None, bias: Tensor | None) -> Tensor:
        """Self-attention: x (N, E) is the token after those in the cache, which takes it up."""
        offset = cache.length
        qkv = functional.linear(x, self.weight, self.bias).view(len(x), 3, self.heads, 1, self.head_dim)
        q, k, v = qkv.unbind(1)  # (N, H, 1, D)
        if self.rotary is not None:
            q, k = self.rotary(q, offset), self.rotary(k, offset)
        k, v = cache.append(k, v)
        out = functional.attention(q, k, v, mask=visible, bias=bias, softcap=self.softcap)
        return functional.linear(out.view(x.shape), self.out_weight, self.out_bias)

    def attend_memory(self, x: Tensor, cache: KeyValueCache, visible: Tensor | None) -> Tensor:
        """Attention of x (M, E) to the keys in the cache, each row's for M / N rows of x."""
        k, v = cache.contents()
        q = functional.linear(x, self.weight, self.bias).view(len(k), -1, self.heads, self.head_dim)
        q = q.transpose(1, 2)  # (N, H, M / N, D); at position 0, where rotary positions turn nothing
        out = functional.attention(q, k, v, mask=visible, softcap=self.softcap).transpose(1, 2)
        return functional.linear(out.reshape(x.shape), self.out_weight, self.out_bias)


class _LayerStep:
    def __init__(self, layer: TransformerEncoderLayer | TransformerDecoderLayer) -> None:
        self.attention, self.cross_attention = _AttentionStep(layer.self_attn, cross=False), None
        norms = [layer.norm1, layer.norm2]
        if isinstance(layer, TransformerDecoderLayer):
            self.cross_attention = _AttentionStep(layer.multihead_attn, cross=True)
            norms.append(layer.norm3)
        self.norms = [(norm.weight, norm.bias, norm.eps) for norm in norms]
        self.norm_first = layer.norm_first
        self.linear1 = (layer.linear1.weight, layer.linear1.bias, fused_activation(layer.activation))
        self.linear2 = (layer.linear2.weight, layer.linear2.bias)

    def __call__(
        self,
        x: Tensor,
        cache: KeyValueCache | DecoderLayerCache,
        visible: Tensor | None,
        bias: Tensor | None,
        memory_visible: Tensor | None = None,
    ) -> Tensor:
        self_cache, cross_cache = (cache, None) if self.cross_attention is None else cache
        blocks = [lambda h: self.attention.attend(h, self_cache, visible, bias)]
        if cross_cache is not None:
            blocks.append(lambda h: self.cross_attention.attend_memory(h, cross_cache, memory_visible))
        blocks.append(lambda h: functional.linear(functional.linear(h, *self.linear1), *self.linear2))
        if not self.norm_first:
            for block, norm in zip(blocks, self.norms, strict=True):
                x = _add_norm(block(x), x, *norm)
            return x
        h = _add_norm(x, None, *self.norms[0])
        for block, norm in zip(blocks[:-1], self.norms[1:], strict=True):
            h, x = _add_norm(block(h), x, *norm, prenorm=True)
        return x + blocks[-1](h)


class StackStep:
    """A stack for one new token of each row."""

    def __init__(self, stack: TransformerEncoder | TransformerDecoder) -> None:
        self.layers, self.norm = [_LayerStep(layer) for layer in stack.layers], stack.norm

    def __call__(
        self,
        x: Tensor,
        caches: Sequence[KeyValueCache | DecoderLayerCache],
        visible: Tensor | None = None,
        bias: Tensor | None = None,
        memory_visible: Tensor | None = None,
    ) -> Tensor:
        """x (N, E) -> (N, E).

        Args:
            caches: one for each layer, as the stack takes them; filled.
            visible: bool (N, 1, 1, S), which keys may be attended to, True = attend; None: all.
            bias: position_bias, as the stack takes it.
            memory_visible: as visible, for the encoder's output, of which a row may serve several rows of x.
        """
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, visible, bias, memory_visible)
        return x if self.norm is None else self.norm(x)


def _add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, prenorm: bool = False):
    return functional.dropout_add_layer_norm(x, residual, weight, bias, eps=eps, prenorm=prenorm)
