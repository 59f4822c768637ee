"""MultiheadAttention: torch.nn's module, with `functional.attention` in the place of its attention.

forward is three steps: project into heads (one matrix product for self-attention, whose result is taken apart by views and
never copied), attend, project back. The rest translates torch.nn's conventions: masks that say what is *hidden*, layouts
with the batch first, second or absent, and keys that are appended (add_bias_kv, add_zero_attn).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional, ops
from ..masks import causal_mask
from ._fusion import LINEAR, drop, linear, plain, project, small, weight_and_bias
from ._nested import nest_like, pad_nested
from ._scripted import scriptable
from .cache import KeyValueCache
from .positions import RotaryPositions, check_rotary


def check_sizes(dropout: float, **sizes: int) -> None:
    """Sizes are the embedding dimension and the number of heads, under the names the caller's class gives them."""
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise TypeError(f"{name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    (embed_dim, num_heads) = sizes.values()
    if embed_dim % num_heads != 0:
        raise ValueError("{} must be divisible by {}, got {} and {}".format(*sizes, embed_dim, num_heads))
    functional.check_probability("dropout", dropout)


def _broadcasts(x: Tensor, scores: tuple[int, ...]) -> bool:
    return x.dim() == 4 and all(a in (1, b) for a, b in zip(x.shape, scores, strict=True))


def _check_mask(name: str, mask: Tensor | None, *shapes: tuple[int, ...], scores: tuple[int, ...] | None = None) -> None:
    """A mask has one of the shapes, or 4 dimensions that broadcast to `scores`."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool (True = hidden) or floating-point (added to the scores) tensor, got {kind}")
    if mask.shape not in shapes and not (scores is not None and _broadcasts(mask, scores)):
        also = "" if scores is None else f"4 dimensions that broadcast to {scores}, or "
        raise ValueError(f"{name} must have {also}shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def _check_position_bias(bias: Tensor, scores: tuple[int, ...]) -> None:
    functional.check_tensor("position_bias", bias)
    if not _broadcasts(bias, scores):
        raise ValueError(f"position_bias must broadcast to (N, num_heads, L, S) = {scores}, got {tuple(bias.shape)}")


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Drop-in torch.nn.MultiheadAttention (Vaswani et al. 2017, section 3.2.2): same parameters, same numbers, fused kernels.

    Differences, all on purpose: a query that may see no key gives attention 0 instead of NaN; is_causal=True works without a
    mask, and beside a mask it changes nothing; masks of other types or shapes are refused.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            torch.nn.MultiheadAttention. dropout is in [0, 1).
        window: (left, right): a query sees keys at most that far before and after its position; None = no limit.
        softcap: scores become softcap * tanh(score / softcap).
        rotary: turns queries and keys by their positions (RoFormer, Su et al. 2021); has no parameters.

    Raises:
        ValueError: a size, dropout, or a window beside add_bias_kv or add_zero_attn.
    """

    window: tuple[int | None, int | None] | None = None  # on the class too: pickles of older objects lack them
    softcap: float | None = None
    rotary: RotaryPositions | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device=None,
        dtype=None,
        *,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        rotary: RotaryPositions | None = None,
    ) -> None:
        check_sizes(dropout, embed_dim=embed_dim, num_heads=num_heads)
        functional.check_window(window)
        functional.check_softcap(softcap)
        if window is not None and (add_bias_kv or add_zero_attn):
            raise ValueError(f"window must be None with add_bias_kv or add_zero_attn (keys without a position), got {window}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.window, self.softcap = window, softcap
        self.rotary = check_rotary(rotary, self.head_dim)

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
        *,
        position_bias: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of every query to the keys.

        Args:
            query: (N, L, E) with batch_first, else (L, N, E); or (L, E) for one sample without a batch.
            key: like query, length S, width kdim.
            value: like key, width vdim.
            key_padding_mask: (N, S), or (S,) without a batch. bool: True hides the key. Float: added to the scores.
            need_weights: also return the attention weights.
            attn_mask: (L, S), (N * num_heads, L, S), or 4-D, broadcasting to (N, num_heads, L, S). bool: True hides the key
                from the query. Float: added to the scores; differentiable.
            average_attn_weights: return the mean over the heads.
            is_causal: without attn_mask, query i sees keys up to i; beside attn_mask, a hint that changes nothing.
            position_bias: float, 4-D, broadcasting to (N, num_heads, L, S); added to the scores; differentiable. Unlike a
                float attn_mask it leaves is_causal in force.
            cache: keys and values of earlier calls, see KeyValueCache. S counts them, also in masks; in self-attention query
                i stands i positions behind the last of them.

        Returns:
            The output, shaped like query, and None or the weights after dropout: (N, L, S), or (N, num_heads, L, S) with
            average_attn_weights=False; without N if query has none.

        Raises:
            ValueError, TypeError: a shape or a mask does not fit; the text names it.
            RuntimeError: a cache where gradients are recorded.
        """
        return_weights = ("mean" if average_attn_weights else "per_head") if need_weights else None
        if query is key is value and cache is None and position_bias is None:
            arguments = self._one_call(query, attn_mask, key_padding_mask, is_causal)
            if arguments is not None:
                out, weights = ops.self_attention(query, arguments, return_weights)
                return out, weights if need_weights else None
        functional.check_tensor("query", query, nested=True)
        if not (query is key is value):
            functional.check_tensor("key", key, nested=True)
            functional.check_tensor("value", value, nested=True)
        nested = None
        if query.is_nested or key.is_nested or value.is_nested:
            if not (query is key is value):
                raise ValueError("a NestedTensor must be query, key and value at once (self-attention)")
            nested = query
            query, key_padding_mask = pad_nested(nested, key_padding_mask, self.batch_first)
            key = value = query
        offset, beams = 0, 1
        reused = cache is not None and cache.fixed and cache.filled
        if reused:
            q, k, v, beams = self._project_query(query, cache)
            if beams > 1:
                q = self._fold_beams(q, beams, attn_mask, position_bias, is_causal)
        else:
            self._check_inputs(query, key, value)
            if cache is not None:
                offset = self._check_cache(cache)
            q, k, v = self._project(query, key, value, offset)  # (N, H, L, D), (N, H, S, D) twice
        scores = (*q.shape[:3], offset + k.shape[2])
        masks = (attn_mask, key_padding_mask, position_bias, is_causal)
        mask, bias = self._translate_masks(scores, *masks, batched=query.dim() == 3, device=q.device)
        if cache is not None and not reused:
            k, v = cache.append(k, v)  # not before everything is found to fit
        if self._appended_keys:
            k, v = self._append_keys(k, v)
        out = functional.attention(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            causal=bool(is_causal) and attn_mask is None and not self._appended_keys,
            query_offset=offset,
            window=self.window,
            softcap=self.softcap,
            dropout_p=self.dropout if self.training else 0.0,
            return_weights=return_weights,
        )
        out, weights = out if need_weights else (out, None)
        if beams > 1:
            out = out.unflatten(2, (beams, -1)).transpose(1, 2).flatten(0, 1)  # (N, H, L, D) again
            if weights is not None:
                weights = weights.unflatten(-2, (beams, -1)).movedim(-3, 1).flatten(0, 1)
        if query.dim() == 2:
            out, weights = out.transpose(1, 2)[0], None if weights is None else weights[0]  # (L, H, D)
        else:
            out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)  # (N, L, H, D) or (L, N, H, D)
        out = linear(self.out_proj, out.flatten(-2))
        return (out if nested is None else nest_like(out, nested)), weights

    def _one_call(
        self, x: object, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> tuple[object, ...] | None:
        """The arguments with which ops.self_attention does for x what forward does, where that pays; else None.

        It pays in a small model, and can do what is called most: x (N, L, E), nothing appended, watched or replaced.
        """
        weight, bias, out_proj = self.in_proj_weight, self.in_proj_bias, self.out_proj
        if weight is None or not self.batch_first or self._appended_keys or not plain(out_proj, LINEAR):
            return None
        if self.rotary is not None or self.window is not None or self.softcap is not None:
            return None
        if type(self.num_heads) is not int or self.num_heads * self.head_dim != self.embed_dim:
            return None
        parameters = (weight, bias, *weight_and_bias(out_proj))
        if not small(x, *parameters) or x.dim() != 3 or x.shape[2] != self.embed_dim:
            return None
        mask = summand = None
        if attn_mask is not None or key_padding_mask is not None:
            scores = (len(x), self.num_heads, x.shape[1], x.shape[1])
            masks = (attn_mask, key_padding_mask, None, is_causal)
            mask, summand = self._translate_masks(scores, *masks, batched=True, device=x.device)
            if not (mask is None or mask.is_cpu) or not (summand is None or functional.ready(summand)):
                return None
        causal = bool(is_causal) and attn_mask is None
        return *parameters, self.num_heads, mask, summand, causal, *drop(self.dropout if self.training else 0.0, x)

    def _check_inputs(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> None:
        inputs = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        if key is None or (query is key is value and self._qkv_same_embed_dim):
            inputs = inputs[:1]
        for name, x, width in inputs:
            if x.dim() != query.dim() or x.dim() not in (2, 3):
                raise ValueError(
                    f"{name} must have 3 dimensions, or 2 without a batch, the same in query, key and value; "
                    f"got query {tuple(query.shape)}, {name} {tuple(x.shape)}"
                )
            if x.shape[-1] != width:
                raise ValueError(f"{name} must have a last dimension of size {width}, got shape {tuple(x.shape)}")
        if key is None:
            return
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"value must have the batch size and length of key, {tuple(key.shape)}, got {tuple(value.shape)}")
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            raise ValueError(
                f"key must have the batch size of query, {query.shape[batch]}, got {key.shape[batch]} "
                f"(batch_first={self.batch_first}, query {tuple(query.shape)}, key {tuple(key.shape)})"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The three projections, split into heads and turned by their positions, which start at `offset`."""
        q, k, v = self._project_inputs(query, key, value)
        if self.rotary is not None:
            q, k = self.rotary(q, offset), self.rotary(k, offset)
        return q, k, v

    def _check_cache(self, cache: KeyValueCache) -> int:
        """The position of the first new token."""
        if not isinstance(cache, KeyValueCache):
            raise TypeError(f"cache must be a KeyValueCache, got {type(cache).__name__}")
        if self._appended_keys:
            raise ValueError("cache must be None with add_bias_kv or add_zero_attn (keys without a position)")
        return cache.length

    def _project_query(self, query: Tensor, cache: KeyValueCache) -> tuple[Tensor, Tensor, Tensor, int]:
        """The query's projection, keys and values that a fixed cache has, and how many rows of queries each of its rows has."""
        self._check_inputs(query)
        weight, bias = self.in_proj_weight, self.in_proj_bias
        weight = self.q_proj_weight if weight is None else weight[: self.embed_dim]
        (q,) = self._heads(query, weight, None if bias is None else bias[: self.embed_dim])
        k, v = cache.contents()
        if len(q) != len(k) and (len(k) == 0 or len(q) % len(k) != 0):
            raise ValueError(f"the batch size of query must be a multiple of the cache's, {len(k)}, got {len(q)}")
        return q if self.rotary is None else self.rotary(q, 0), k, v, len(q) // max(len(k), 1)

    def _project_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three projections, split into heads; as few matrix products as there are different inputs."""
        weight, bias, E = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if weight is not None and key is value:
            if query is key:
                return self._heads(query, weight, bias)
            q = self._heads(query, weight[:E], None if bias is None else bias[:E])
            return *q, *self._heads(key, weight[E:], None if bias is None else bias[E:])
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(self._heads(*x)[0] for x in zip((query, key, value), weights, biases, strict=True))

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """Projects x; a tuple of (N, H, L, D) views, one for every embed_dim rows of weight."""
        y = project(x, weight, bias)
        parts = y.shape[-1] // self.embed_dim
        y = y.view(*y.shape[:-1], parts, self.num_heads, self.head_dim)  # (N, L, n, H, D), (L, N, n, H, D)
        if x.dim() == 2:
            y = y.unsqueeze(0)
        elif not self.batch_first:
            y = y.transpose(0, 1)
        return y.permute(2, 0, 3, 1, 4).unbind(0)

    def _translate_masks(
        self,
        scores: tuple[int, int, int, int],
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        position_bias: Tensor | None,
        is_causal: bool,
        *,
        batched: bool,
        device: torch.device,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Masks and bias as `functional.attention` takes them: (mask, True = attend; bias), 4-D or (L, S)."""
        N, H, L, S = scores
        _check_mask("attn_mask", attn_mask, (L, S), (N * H, L, S), scores=scores)
        _check_mask("key_padding_mask", key_padding_mask, (N, S) if batched else (S,))
        if position_bias is not None:
            _check_position_bias(position_bias, scores)
        if attn_mask is None and is_causal and self._appended_keys:
            attn_mask = causal_mask(L, S, device)  # explicit, because appended keys are visible to every query
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (N, H))
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask[..., None, None, :]
        hidden = bias = None
        for mask in (attn_mask, key_padding_mask, position_bias):
            if mask is None:
                continue
            if self._appended_keys:
                mask = F.pad(mask.expand(*mask.shape[:-1], S), (0, self._appended_keys))  # False or 0.0: visible
            if mask.dtype == torch.bool:
                hidden = mask if hidden is None else hidden | mask
            else:
                bias = mask if bias is None else bias + mask
        return None if hidden is None else ~hidden, bias

    def _fold_beams(
        self, q: Tensor, beams: int, attn_mask: Tensor | None, position_bias: Tensor | None, causal: bool
    ) -> Tensor:
        """(N * beams, H, L, D) -> (N, H, beams * L, D): the beams of a sequence share its keys, so they are its queries."""
        if attn_mask is not None or position_bias is not None or causal or self.window is not None:
            raise ValueError(
                f"{beams} queries for each row of the cache allow for key_padding_mask, and for no other mask or window"
            )
        return q.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)

    @property
    def _appended_keys(self) -> int:
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _append_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v (N, H, S, D) with the learned position of add_bias_kv and the zeros of add_zero_attn at their ends."""
        if self.bias_k is not None:
            shape = (1, self.num_heads, 1, self.head_dim)
            k = torch.cat([k, self.bias_k.view(shape).expand(len(k), -1, -1, -1)], dim=2)
            v = torch.cat([v, self.bias_v.view(shape).expand(len(v), -1, -1, -1)], dim=2)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return k, v

    def __prepare_scriptable__(self) -> torch.nn.Module:
        if self.window is not None or self.softcap is not None:
            raise RuntimeError("window and softcap cannot be scripted: torch.nn.MultiheadAttention does not have them")
        return scriptable(self)
