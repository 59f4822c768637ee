"""Attention of Hugging Face models (transformers >= 5) through `functional.attention`.

    from fast_transformer.integrations import hugging_face

    hugging_face.register()
    model = AutoModel.from_pretrained(name, attn_implementation="fast_transformer")  # or model.set_attn_implementation(...)

It takes the place of "sdpa", and takes what that leaves to "eager" or to a slower path: attention weights
(`output_attentions=True`, where the model hands that down), softcaps (Gemma 2), sinks (GPT-OSS), dropout, and position biases
that learn (T5). Grouped-query heads are read where they lie, never repeated.
"""

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import bidirectional_mask_function, eager_mask, sdpa_mask

from .. import functional

NAME = "fast_transformer"


def register() -> None:
    """Makes "fast_transformer" an `attn_implementation` of the models that choose theirs by name."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(config: PretrainedConfig, **kwargs) -> Tensor | None:
    """What a model's mask is made by; the arguments are those of transformers' own mask functions.

    Padding alone is one row for all queries. A causal mask is always written out: for "sdpa" some models leave it out, and say
    elsewhere, by that name, what they mean.
    """
    if not _knows_sdpa(type(config)):
        return eager_mask(config=config, **kwargs)
    padding, shape = kwargs.get("attention_mask"), (kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"])
    if kwargs.get("mask_function") is bidirectional_mask_function and padding is not None and padding.shape[1:] == shape[3:]:
        return padding.bool()[:, None, None, :].expand(shape)
    return sdpa_mask(config=config, **kwargs | {"allow_is_causal_skip": False})


@torch.compiler.assume_constant_result
def _knows_sdpa(config: type[PretrainedConfig]) -> bool:
    """Whether a model takes bool masks; others may add what they get to their scores."""
    models = MODEL_MAPPING.get(config, ())
    return all(model._supports_sdpa for model in (models if isinstance(models, tuple) else (models,)))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """What a model's attention module calls; the arguments are those of transformers' own attention functions.

    Args:
        module: the attention module; its `is_causal` counts where the argument is None.
        query: (B, H, L, D).
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        attention_mask: None, bool (True = attend) or float (added to the scores), broadcastable to (B, H, L, S).
        dropout: probability with which a weight is dropped.
        scaling: factor of the scores, 1/sqrt(D) by default.
        is_causal: without a mask, query i sees keys up to i. A mask says by itself what is seen, as does a single query.
        position_bias: added to the scaled scores, broadcastable to (B, H, L, S); differentiable.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: (H), the sinks: a score for each head that takes part in the softmax and leads nowhere; differentiable.
        output_attentions: whether to return the weights.
        kwargs: what other attention functions take (sliding windows, which the mask already says, sequence lengths).

    Returns:
        (B, L, H, Dv), contiguous, and the weights (B, H, L, S) or None.

    Raises:
        ValueError: the model asks for sparse attention by indices, or for sinks of another kind; or as `functional.attention`.
    """
    for name in ("indices", "block_indices", "sinks"):
        if kwargs.get(name) is not None:
            raise ValueError(f'{NAME} attention knows no {name}; use attn_implementation="eager" for {type(module).__name__}')
    if is_causal is None:
        is_causal = getattr(module, "is_causal", False)
    visible, bias = attention_mask, position_bias
    if visible is not None and visible.dtype != torch.bool:
        visible, bias = None, visible if bias is None else bias + visible
    out, *rest = functional.attention(
        query,
        key,
        value,
        mask=visible,
        bias=bias,
        causal=bool(is_causal) and attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        softcap=softcap,
        dropout_p=dropout,
        return_weights="per_head" if output_attentions else None,
        return_lse=True,
    )
    weights = rest[0] if output_attentions else None
    if s_aux is not None:
        share = torch.sigmoid(rest[-1] - s_aux.reshape(-1, 1)).to(out.dtype).unsqueeze(-1)  # of the softmax, left by the sink
        out = out * share
        weights = weights * share if output_attentions else None
    return out.transpose(1, 2).contiguous(), weights
