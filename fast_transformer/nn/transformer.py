"""TransformerEncoderLayer, TransformerDecoderLayer, their stacks and Transformer: twins of torch.nn's, on fused kernels.

A layer is a chain of blocks (self-attention, cross-attention, feed-forward) on a residual stream. torch.nn ends every block
with dropout, adds the stream and normalises: three passes over memory. Here each block's *branch* (the block without that
dropout) is followed by one fused pass, functional.dropout_add_layer_norm. Where somebody watches or replaces a part of that
pass (a hook, another module type, an overridden block method), the modules are called one by one as torch.nn calls them.
Both ways draw the same dropout masks from the same seed.
"""

from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import LayerNorm, Module

from .. import functional, ops
from ..masks import causal_mask
from ._fusion import (
    LINEAR,
    add,
    add_norm,
    drop,
    feed_forward,
    fused_activation,
    fused_dropout,
    layer_norm,
    linear,
    plain,
    small,
    weight_and_bias,
)
from ._nested import nest_like, pad_nested
from ._scripted import scriptable
from .cache import DecoderLayerCache, KeyValueCache
from .dropout import Dropout
from .multihead_attention import MultiheadAttention, check_sizes
from .positions import RotaryPositions, check_rotary

Activation = str | Callable[[Tensor], Tensor]
_ATTEND = MultiheadAttention.forward  # some put another in its place, to see the weights


def _become_twins(layer: Module) -> None:
    """Makes the attentions and dropouts that torch.nn has built into our own; parameters and random numbers stay."""
    for module in layer.children():
        if type(module) is torch.nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
        elif type(module) is torch.nn.Dropout:
            module.__class__ = Dropout


def _batch_first(module: Module) -> bool:
    """The batch_first of an attention or a layer, wrapped in other modules or not."""
    return next((m.batch_first for m in module.modules() if hasattr(m, "batch_first")), False)


def _causality(
    modules: Iterable[Module], mask: Tensor | None, is_causal: bool | None, query: Tensor, key: Tensor
) -> tuple[Tensor | None, bool]:
    """(mask, is_causal) to hand to `modules`. A mask wins over the hint; without one, only twins take is_causal at its word."""
    if mask is not None or not is_causal:
        return mask, False
    foreign = [m for m in modules if not isinstance(m, (MultiheadAttention, TransformerEncoderLayer, TransformerDecoderLayer))]
    if not foreign:
        return None, True
    length = -2 if query.dim() == 2 or _batch_first(foreign[0]) else 0
    return causal_mask(query.shape[length], key.shape[length], query.device), False


def _given(**extras: Any) -> dict[str, Any]:
    """Those that are not None: modules that know no extras work where none are asked for."""
    return {name: value for name, value in extras.items() if value is not None}


def _for_layers(cache: Sequence | None, layers: Sized) -> Sequence:
    if cache is not None and len(cache) != len(layers):
        raise ValueError(f"cache must have an entry for each of the {len(layers)} layers, got {len(cache)}")
    return [None] * len(layers) if cache is None else cache


class _Branches:
    """What encoder and decoder layer share. The whole blocks, _sa_block, _mha_block and _ff_block, are torch.nn's."""

    _original: type[Module]

    def _overrides(self, name: str) -> bool:
        block = f"_{name}_block"
        return block in self.__dict__ or getattr(type(self), block) is not getattr(self._original, block)

    def _branch(self, name: str, dropout: Module) -> tuple[Callable[..., Tensor], float | None]:
        """A branch and the probability of the dropout that is still to come; or, not to be fused, the whole block and None."""
        if self._overrides(name):
            return getattr(self, f"_{name}_block"), None
        branch, dropout_p = getattr(self, f"_{name}_branch"), fused_dropout(dropout)
        if dropout_p is None:
            return lambda *args, **extras: dropout(branch(*args, **extras)), None
        return branch, dropout_p

    def _sa_branch(self, x, attn_mask, key_padding_mask, is_causal, **extras):
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        return self.self_attn(x, x, x, need_weights=False, **masks, **extras)[0]

    def _mha_branch(self, x, memory, attn_mask, key_padding_mask, is_causal, **extras):
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        return self.multihead_attn(x, memory, memory, need_weights=False, **masks, **extras)[0]

    def _ff_branch(self, x):
        name, dropout_p = fused_activation(self.activation), fused_dropout(self.dropout)
        if name is None or dropout_p is None:
            return linear(self.linear2, self.dropout(self.activation(linear(self.linear1, x))))
        return feed_forward(self.linear1, self.linear2, x, name, dropout_p)

    __prepare_scriptable__ = scriptable


class TransformerEncoderLayer(_Branches, torch.nn.TransformerEncoderLayer):
    """Drop-in torch.nn.TransformerEncoderLayer: self-attention, then feed-forward (Vaswani et al. 2017, section 3.1).

    There is no separate inference path: train and eval run the same code, hooks fire in both.

    Args: as in torch.nn.TransformerEncoderLayer. dropout is in [0, 1). rotary: of the self-attention, see MultiheadAttention.

    Raises:
        ValueError: a size or dropout.
    """

    _original = torch.nn.TransformerEncoderLayer

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        rotary: RotaryPositions | None = None,
    ) -> None:
        check_sizes(dropout, d_model=d_model, nhead=nhead)
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype
        )
        _become_twins(self)
        self.self_attn.rotary = check_rotary(rotary, d_model // nhead)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        position_bias: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """One layer.

        Args:
            src: (N, L, E) with batch_first, else (L, N, E); (L, E) without a batch; or a NestedTensor.
            src_mask: (L, L) or (N * nhead, L, L). bool: True = hidden. Float: added to the scores.
            src_key_padding_mask: (N, L), or (L,) without a batch; bool or float likewise.
            is_causal: without src_mask, position i sees positions up to i; beside src_mask it changes nothing.
            position_bias, cache: as in MultiheadAttention.forward.

        Returns:
            A tensor like src.

        Raises:
            ValueError, TypeError: a shape or a mask does not fit.
        """
        if position_bias is None and cache is None:
            arguments = self._one_call(src, src_mask, src_key_padding_mask, is_causal)
            if arguments is not None:
                return ops.encoder_layer(src, *arguments)
        functional.check_tensor("src", src, nested=True)
        x = src
        if src.is_nested:
            x, src_key_padding_mask = pad_nested(src, src_key_padding_mask, _batch_first(self.self_attn))
        src_mask, is_causal = _causality([self.self_attn], src_mask, is_causal, x, x)
        masks, extras = (src_mask, src_key_padding_mask, is_causal), _given(position_bias=position_bias, cache=cache)
        attend, p1 = self._branch("sa", self.dropout1)
        feed_forward, p2 = self._branch("ff", self.dropout2)
        if self.norm_first:
            h, x = add_norm(x, attend(self.norm1(x), *masks, **extras), p1, self.norm2, prenorm=True)
            x = add(x, feed_forward(h), p2)
        else:
            x = add_norm(x, attend(x, *masks, **extras), p1, self.norm1)
            x = add_norm(x, feed_forward(x), p2, self.norm2)
        return nest_like(x, src) if src.is_nested else x

    def _one_call(self, src: object, *masks) -> tuple[object, ...] | None:
        """The arguments with which ops.encoder_layer does for src what forward does, where it can and that pays; else None."""
        if not functional.ready(src):
            return None
        parts = self._modules
        attention, linear1, linear2 = parts.get("self_attn"), parts.get("linear1"), parts.get("linear2")
        if MultiheadAttention.forward is not _ATTEND or not plain(attention, (MultiheadAttention,)):
            return None
        if not plain(linear1, LINEAR) or not plain(linear2, LINEAR):
            return None
        activation, p = fused_activation(self.activation), fused_dropout(parts.get("dropout"))
        p1, p2 = fused_dropout(parts.get("dropout1")), fused_dropout(parts.get("dropout2"))
        if activation is None or p is None or p1 is None or p2 is None or self._overrides("sa") or self._overrides("ff"):
            return None
        width = attention.embed_dim
        norm1, norm2 = layer_norm(parts.get("norm1"), width), layer_norm(parts.get("norm2"), width)
        linears = (*weight_and_bias(linear1), *weight_and_bias(linear2))
        if norm1 is None or norm2 is None or not small(src, *linears, *norm1[:2], *norm2[:2]):
            return None
        out_proj = attention.out_proj
        if not plain(out_proj, LINEAR) or not linears[2].shape[0] == out_proj.weight.shape[0] == width:  # else they broadcast
            return None
        self_attention = attention._one_call(src, *masks)  # draws a seed, so comes last
        if self_attention is None:
            return None
        dropout1, dropout, dropout2 = drop(p1, src), drop(p, src), drop(p2, src)
        return self_attention, dropout1, norm1, (*linears, activation, *dropout), dropout2, norm2, bool(self.norm_first)


class TransformerDecoderLayer(_Branches, torch.nn.TransformerDecoderLayer):
    """Drop-in torch.nn.TransformerDecoderLayer: self-attention, attention to the encoder's output, feed-forward.

    Args: as in torch.nn.TransformerDecoderLayer. dropout is in [0, 1). rotary: of the self-attention, see MultiheadAttention.

    Raises:
        ValueError: a size or dropout.
    """

    _original = torch.nn.TransformerDecoderLayer

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        rotary: RotaryPositions | None = None,
    ) -> None:
        check_sizes(dropout, d_model=d_model, nhead=nhead)
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype
        )
        _become_twins(self)
        self.self_attn.rotary = check_rotary(rotary, d_model // nhead)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        position_bias: Tensor | None = None,
        cache: DecoderLayerCache | None = None,
    ) -> Tensor:
        """One layer.

        Args:
            tgt: (N, L, E) with batch_first, else (L, N, E); (L, E) without a batch.
            memory: the encoder's output, like tgt with length S.
            tgt_mask, tgt_key_padding_mask: (L, L) or (N * nhead, L, L); (N, L). bool: True = hidden. Float: a summand.
            memory_mask, memory_key_padding_mask: (L, S) or (N * nhead, L, S); (N, S).
            tgt_is_causal, memory_is_causal: without a mask, position i sees positions up to i; beside a mask they change
                nothing.
            position_bias: of the self-attention, as in MultiheadAttention.forward.
            cache: keys and values of earlier calls; memory is looked at in the first call only.

        Returns:
            A tensor like tgt.

        Raises:
            ValueError, TypeError: a shape or a mask does not fit.
        """
        functional.check_tensor("tgt", tgt)
        functional.check_tensor("memory", memory)
        x = tgt
        tgt_mask, tgt_is_causal = _causality([self.self_attn], tgt_mask, tgt_is_causal, tgt, tgt)
        memory_mask, memory_is_causal = _causality([self.multihead_attn], memory_mask, memory_is_causal, tgt, memory)
        masks = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        memory_masks = (memory_mask, memory_key_padding_mask, memory_is_causal)
        self_cache, cross_cache = cache or (None, None)
        if cross_cache is not None and not cross_cache.fixed:
            raise ValueError("cache must have a KeyValueCache(fixed=True) for the attention to memory")
        extras, cross_extras = _given(position_bias=position_bias, cache=self_cache), _given(cache=cross_cache)
        attend, p1 = self._branch("sa", self.dropout1)
        cross_attend, p2 = self._branch("mha", self.dropout2)
        feed_forward, p3 = self._branch("ff", self.dropout3)
        if self.norm_first:
            h, x = add_norm(x, attend(self.norm1(x), *masks, **extras), p1, self.norm2, prenorm=True)
            h, x = add_norm(x, cross_attend(h, memory, *memory_masks, **cross_extras), p2, self.norm3, prenorm=True)
            return add(x, feed_forward(h), p3)
        x = add_norm(x, attend(x, *masks, **extras), p1, self.norm1)
        x = add_norm(x, cross_attend(x, memory, *memory_masks, **cross_extras), p2, self.norm2)
        return add_norm(x, feed_forward(x), p3, self.norm3)


class TransformerEncoder(torch.nn.TransformerEncoder):
    """Drop-in torch.nn.TransformerEncoder: num_layers deep copies of a layer, and a norm.

    Every layer gets the masks as they are and the output keeps its full length; nothing is converted to a NestedTensor and no
    mask is tested for its values, so it compiles into one graph. enable_nested_tensor and mask_check are accepted and kept.
    """

    def __init__(
        self,
        encoder_layer: torch.nn.TransformerEncoderLayer,
        num_layers: int,
        norm: Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)
        self.enable_nested_tensor = enable_nested_tensor

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        position_bias: Tensor | None = None,
        cache: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """All layers in turn, then the norm; arguments as in TransformerEncoderLayer.forward, cache: one for each layer."""
        functional.check_tensor("src", src, nested=True)
        mask, is_causal = _causality(self.layers, mask, is_causal, src, src)
        x = src
        masks = {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        for layer, layer_cache in zip(self.layers, _for_layers(cache, self.layers), strict=True):
            x = layer(x, **masks, **_given(position_bias=position_bias, cache=layer_cache))
        return x if self.norm is None else self.norm(x)

    __prepare_scriptable__ = scriptable


class TransformerDecoder(torch.nn.TransformerDecoder):
    """Drop-in torch.nn.TransformerDecoder: num_layers deep copies of a layer, and a norm. No mask is tested for its values."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        position_bias: Tensor | None = None,
        cache: Sequence[DecoderLayerCache] | None = None,
    ) -> Tensor:
        """All layers in turn, then the norm; arguments as in TransformerDecoderLayer.forward, cache: one for each layer."""
        functional.check_tensor("tgt", tgt)
        functional.check_tensor("memory", memory)
        tgt_mask, tgt_is_causal = _causality(self.layers, tgt_mask, tgt_is_causal, tgt, tgt)
        memory_mask, memory_is_causal = _causality(self.layers, memory_mask, memory_is_causal, tgt, memory)
        x = tgt
        for layer, layer_cache in zip(self.layers, _for_layers(cache, self.layers), strict=True):
            x = layer(
                x,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=tgt_is_causal,
                memory_is_causal=memory_is_causal,
                **_given(position_bias=position_bias, cache=layer_cache),
            )
        return x if self.norm is None else self.norm(x)

    __prepare_scriptable__ = scriptable


class Transformer(torch.nn.Transformer):
    """Drop-in torch.nn.Transformer: encoder and decoder of "Attention Is All You Need" (Vaswani et al. 2017, figure 1).

    Args: as in torch.nn.Transformer. dropout is in [0, 1). rotary: of every self-attention, see MultiheadAttention.

    Raises:
        ValueError: a size or dropout.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        rotary: RotaryPositions | None = None,
    ) -> None:
        options = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        factory = {"device": device, "dtype": dtype}
        if custom_encoder is None:  # the order in which torch.nn draws its random numbers: encoder, decoder, xavier for all
            layer = TransformerEncoderLayer(*options, **factory, rotary=rotary)
            norm = LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory)
            custom_encoder = TransformerEncoder(layer, num_encoder_layers, norm)
        if custom_decoder is None:
            layer = TransformerDecoderLayer(*options, **factory, rotary=rotary)
            norm = LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory)
            custom_decoder = TransformerDecoder(layer, num_decoder_layers, norm)
        super().__init__(d_model, nhead, custom_encoder=custom_encoder, custom_decoder=custom_decoder, batch_first=batch_first)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """The decoder's output for tgt, given src.

        Args:
            src: (N, S, E) with batch_first, else (S, N, E); (S, E) without a batch.
            tgt: like src with length T.
            src_mask, tgt_mask, memory_mask: (S, S), (T, T), (T, S), or (N * nhead, ...). bool: True = hidden. Float: a summand.
            src_key_padding_mask, tgt_key_padding_mask, memory_key_padding_mask: (N, S), (N, T), (N, S), without N as src is.
            src_is_causal, tgt_is_causal, memory_is_causal: without a mask, position i sees positions up to i; beside a mask
                they change nothing.

        Returns:
            A tensor like tgt.

        Raises:
            ValueError, TypeError: a shape or a mask does not fit.
        """
        for name, x in (("src", src), ("tgt", tgt)):
            functional.check_tensor(name, x)
            if x.dim() not in (2, 3):
                raise ValueError(f"{name} must have 3 dimensions, or 2 without a batch, got shape {tuple(x.shape)}")
            if x.shape[-1] != self.d_model:
                raise ValueError(f"{name} must have a last dimension of size d_model = {self.d_model}, got {tuple(x.shape)}")
        batch = 0 if self.batch_first else 1
        if src.dim() != tgt.dim() or (src.dim() == 3 and src.shape[batch] != tgt.shape[batch]):
            raise ValueError(f"src and tgt must have one batch size, got {tuple(src.shape)} and {tuple(tgt.shape)}")
        memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
        return self.decoder(
            tgt,
            memory,
            tgt_mask=tgt_mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
            tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )

    __prepare_scriptable__ = scriptable
