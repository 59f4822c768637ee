"""What torch.jit.script compiles in the place of a twin: code that TorchScript understands, on the same parameters.

It is torch.nn's own, without the inference fast paths: they do not compile without biases, and take is_causal for a mask.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor


class _MultiheadAttention(torch.nn.MultiheadAttention):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        swap = self.batch_first and query.dim() == 3
        if swap:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device).triu(1)
        out, weights = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            self.training,
            key_padding_mask,
            need_weights,
            attn_mask,
            not self._qkv_same_embed_dim,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
            average_attn_weights=average_attn_weights,
        )
        return (out.transpose(0, 1) if swap else out), weights


class _EncoderLayer(torch.nn.TransformerEncoderLayer):
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if self.norm_first:
            x = src + self._sa_block(self.norm1(src), src_mask, src_key_padding_mask, is_causal)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + self._sa_block(src, src_mask, src_key_padding_mask, is_causal))
        return self.norm2(x + self._ff_block(x))


class _Encoder(torch.nn.TransformerEncoder):
    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        for layer in self.layers:
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=is_causal is True)
        if self.norm is not None:
            src = self.norm(src)
        return src


_COMPILED = {c.__base__: c for c in (_MultiheadAttention, _EncoderLayer, _Encoder)}


def scriptable(twin: torch.nn.Module) -> torch.nn.Module:
    """The __prepare_scriptable__ of every twin: a module of torch.nn's code that shares all parameters and buffers."""
    if not type(twin).__module__.startswith("fast_transformer."):
        return twin  # a user's subclass: its own code is what is to be scripted
    original = next(c for c in type(twin).__mro__ if c.__module__.startswith("torch.nn."))
    compiled = _COMPILED.get(original, original)
    module = compiled.__new__(compiled)
    module.__dict__.update(twin.__dict__)
    # torch.jit replaces submodules where it finds them: it gets containers of its own, the twin keeps its layers.
    module._modules = {n: torch.nn.ModuleList(m) if type(m) is torch.nn.ModuleList else m for n, m in twin._modules.items()}
    warnings.warn("a scripted fast_transformer module runs torch.nn's own code, on the same parameters", stacklevel=2)
    return module
