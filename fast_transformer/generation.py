"""Decoding: `greedy`, `beam_search` and `sample`, batched, with one forward pass over the new tokens in each step.

They work with every model that has `pad_id` and
    begin(inputs, bos_id=...) -> (tokens (N, L), state)    what to read first: a column of bos_id, or prompts padded at the left
    step(tokens (N, L), state) -> logits (N, V)            of what follows; the state, which holds the past, moves on in place
    state.reorder(rows)                                    row i of the next step goes on from what row rows[i] was
An encoder-decoder also has `encode`, and is called with sources and targets; a language model with tokens alone. A model that
can not count further than some position has it as `max_len`.
"""

import contextlib
import math
import numbers
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .masks import check_tokens


class Decoded(NamedTuple):
    """What was decoded.

    tokens: int64 (N, T), of a beam search (N, n_best, T): new tokens only, up to and including eos_id, then pad_id; T is
        the largest length.
    scores: (N,) or (N, n_best): the sum of log-probabilities, as the model gives them, of these tokens; of a beam search that
        divided by the length penalty.
    """

    tokens: Tensor
    scores: Tensor


def greedy(
    model: torch.nn.Module,
    inputs: Tensor,
    *,
    max_new_tokens: int,
    eos_id: int | None,
    bos_id: int | None = None,
    cache: bool = True,
) -> Decoded:
    """The likeliest token in every step.

    The model is in eval mode meanwhile. pad_id is never chosen, unless it is eos_id.

    Args:
        model: an encoder-decoder or a language model, as above.
        inputs: sources (N, S) or prompts (N, L) of token numbers, shorter ones padded with pad_id.
        max_new_tokens: the largest length, >= 1.
        eos_id: ends a sequence; decoding ends when all have ended. None: all have max_new_tokens.
        bos_id: the token before the first; a language model with prompts needs none.
        cache: False runs `forward` over all tokens in every step: slow, with the same result.

    Returns:
        Decoded, tokens (N, T).

    Raises:
        ValueError, TypeError: an argument does not fit; the text names it.
        RuntimeError: the model gives NaN.
    """
    limits = {"max_new_tokens": max_new_tokens, "eos_id": eos_id, "bos_id": bos_id, "cache": cache}
    return _one_by_one(model, inputs, lambda log_probs: log_probs.argmax(-1), limits)


def sample(
    model: torch.nn.Module,
    inputs: Tensor,
    *,
    max_new_tokens: int,
    eos_id: int | None,
    bos_id: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | torch.Generator | None = None,
    cache: bool = True,
) -> Decoded:
    """Tokens drawn from softmax(logits / temperature), cut to the likeliest top_k, then to the likeliest that reach top_p.

    Args:
        temperature: > 0; towards 0 it becomes `greedy`.
        top_k: how many tokens may be drawn, >= 1; None: all.
        top_p: in (0, 1]: only the fewest tokens whose probabilities (after temperature and top_k) sum to at least that may
            be drawn (Holtzman et al. 2020); always the likeliest.
        seed: a number, or a generator on the model's device; None: torch's own generator.
        model, inputs, max_new_tokens, eos_id, bos_id, cache: as in `greedy`.

    Returns, raises: as `greedy`.
    """
    _check_number("temperature", temperature, "a finite number > 0", lambda t: 0 < t < math.inf)
    _check_number("top_p", top_p, "a number in (0, 1]", lambda p: 0 < p <= 1)
    if top_k is not None:
        _check_whole("top_k", top_k, 1)
    generator = seed
    if seed is not None and not isinstance(seed, torch.Generator):
        _check_whole("seed", seed, -(2**63), 2**64 - 1)
        generator = torch.Generator(inputs.device).manual_seed(seed)

    def draw(log_probs: Tensor) -> Tensor:
        return _draw(log_probs, temperature, top_k, top_p, generator)

    limits = {"max_new_tokens": max_new_tokens, "eos_id": eos_id, "bos_id": bos_id, "cache": cache}
    return _one_by_one(model, inputs, draw, limits)


def beam_search(
    model: torch.nn.Module,
    inputs: Tensor,
    *,
    beams: int,
    max_new_tokens: int,
    eos_id: int | None,
    bos_id: int | None = None,
    length_penalty: float = 0.6,
    n_best: int = 1,
    cache: bool = True,
) -> Decoded:
    """The n_best sequences of largest log-probability / ((5 + length) / 6)^length_penalty that a beam finds.

    A beam holds `beams` hypotheses. One that ends keeps its place and the others go on (Sutskever et al. 2014, section 3.2), so
    that one beam is `greedy`. The search ends when no hypothesis can become better than the n_best that have ended; at
    max_new_tokens those that have not ended count as they are.

    Args:
        beams: >= 1.
        length_penalty: the exponent, >= 0, of Wu et al. 2016, equation 14. The length counts eos_id.
        n_best: how many sequences to return, at most beams.
        model, inputs, max_new_tokens, eos_id, bos_id, cache: as in `greedy`.

    Returns:
        Decoded, tokens (N, n_best, T), the best first. Where there are fewer sequences than n_best, padding and -inf follow.

    Raises: as `greedy`.
    """
    _check_whole("beams", beams, 1)
    _check_whole("n_best", n_best, 1, beams)
    _check_number("length_penalty", length_penalty, "a finite number >= 0", lambda a: 0 <= a < math.inf)

    with _evaluating(model):
        decoder = _Decoder(model, inputs, max_new_tokens, eos_id, bos_id, cache)
        N, device = len(inputs), inputs.device
        first_place = torch.arange(0, N * beams, beams, device=device)[:, None]  # of each sentence among N * beams rows
        total = torch.full((N, beams), -math.inf, device=device)  # log-probability; -inf: this place is empty
        total[:, 0] = 0.0
        length = torch.zeros(N, beams, dtype=torch.int64, device=device)
        done = torch.zeros(N, beams, dtype=torch.bool, device=device)
        history = torch.full((N, beams, max_new_tokens), decoder.pad_id, device=device)
        tokens = decoder.first
        for t in range(decoder.steps):
            log_probs = decoder.step(tokens)  # (N, V) at first, then (N * beams, V)
            candidates = total[:, :, None] + log_probs.unflatten(0, (N, -1))  # (N, beams, V)
            candidates.masked_fill_(done[:, :, None], -math.inf)
            candidates[:, :, 0].masked_fill_(done, math.inf)  # what has ended has one continuation, which comes first
            ranked, chosen = candidates.flatten(1).topk(beams)  # (N, beams)
            parent, token = chosen // log_probs.shape[1], chosen % log_probs.shape[1]
            order = _staying(parent)
            ranked, parent, token = (x.gather(1, order) for x in (ranked, parent, token))
            done = ranked == math.inf
            total = torch.where(done, total.gather(1, parent), ranked)
            length = length.gather(1, parent) + ~done
            history = history.gather(1, parent[:, :, None].expand_as(history))
            history[:, :, t] = token.masked_fill_(done, decoder.pad_id)
            if eos_id is not None:
                done |= (token == eos_id) & (total > -math.inf)
                # Log-probabilities are <= 0, so a total can only fall, and no penalty divides it by more than the last one.
                bound = _penalised(total.masked_fill(done, -math.inf).amax(1), max_new_tokens, length_penalty)
                ended = _penalised(total.masked_fill(~done, -math.inf), length, length_penalty).topk(n_best)[0]  # (N, n_best)
                if (ended[:, -1] >= bound).all():
                    total = total.masked_fill(~done, -math.inf)
                    break
            decoder.reorder((first_place // beams).expand(-1, beams) if t == 0 else first_place + parent)
            tokens = token.view(-1, 1)
        scores, best = _penalised(total, length, length_penalty).topk(n_best)
        missing = scores == -math.inf
        length = length.gather(1, best).masked_fill(missing, 0)
        history = history.gather(1, best[:, :, None].expand(-1, -1, max_new_tokens))
        history.masked_fill_(missing[:, :, None], decoder.pad_id)
        return _decoded(history[:, :, : max(length.flatten().tolist(), default=0)], scores)


def _one_by_one(model: torch.nn.Module, inputs: Tensor, choose: Callable[[Tensor], Tensor], limits: dict[str, Any]) -> Decoded:
    """Extends each sequence by the token that `choose` finds for its log-probabilities, (N, V) -> (N,)."""
    with _evaluating(model):
        decoder = _Decoder(model, inputs, **limits)
        scores = torch.zeros(len(inputs), device=inputs.device)
        done = torch.zeros_like(scores, dtype=torch.bool)
        history = torch.full((len(inputs), decoder.steps), decoder.pad_id, device=inputs.device)
        tokens = decoder.first
        for t in range(decoder.steps):
            log_probs = decoder.step(tokens)
            tokens = choose(log_probs)[:, None]
            gain = log_probs.gather(1, tokens)[:, 0]
            scores = scores + gain.masked_fill_(done, 0.0)
            history[:, t] = tokens.masked_fill_(done[:, None], decoder.pad_id)[:, 0]
            if decoder.eos_id is not None:
                done |= tokens[:, 0] == decoder.eos_id
                if done.all():
                    history = history[:, : t + 1]
                    break
        return _decoded(history, scores)


def _decoded(tokens: Tensor, scores: Tensor) -> Decoded:
    if scores.isnan().any():
        raise RuntimeError("the model gives NaN as logits")
    return Decoded(tokens, scores)


def _draw(log_probs: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator | None) -> Tensor:
    """A token for each row of log_probs (N, V), as `sample` describes."""
    scaled = log_probs - log_probs.amax(-1, keepdim=True)  # 0 at the likeliest, which no temperature makes infinite
    scaled = scaled / max(temperature, torch.finfo(scaled.dtype).tiny)
    if top_k is None and top_p == 1:
        return torch.multinomial(scaled.softmax(-1), 1, generator=generator)[:, 0]
    scaled, order = scaled.topk(min(top_k or scaled.shape[1], scaled.shape[1]))  # the likeliest first
    probs = scaled.softmax(-1)
    likelier = F.pad(probs.cumsum(-1)[:, :-1], (1, 0))  # the sum of those before each
    probs = probs.masked_fill(likelier >= top_p, 0.0)
    return order.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]


def _penalised(total: Tensor, length: Tensor | int, alpha: float) -> Tensor:
    """Log-probabilities over the length penalty of Wu et al. 2016, equation 14."""
    return total / ((5 + torch.as_tensor(length, dtype=total.dtype)) / 6) ** alpha


def _staying(parent: Tensor) -> Tensor:
    """An order of children with these parents (N, beams) in which one child of each parent stands in its parent's place.

    So a hypothesis that goes on in one way needs no copy of its past, and one with k children k - 1.
    """
    again = (parent[:, :, None] == parent[:, None, :]).tril(-1).any(-1)  # not the first child of its parent
    taken = torch.zeros_like(again).scatter(1, parent, True)
    vacant = taken.long().argsort(dim=1, stable=True)  # places without a child first, as many as there are to fill
    place = torch.where(again, vacant.gather(1, again.cumsum(1) - again.long()), parent)
    return place.argsort(1)


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Every module in eval mode, and after that in its own mode again.

    Not in inference mode, because tables that modules make meanwhile would be of no use in training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class _Decoder:
    """A model at work on inputs: checks, the first tokens, and log-probabilities of what follows others."""

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Tensor,
        max_new_tokens: int,
        eos_id: int | None,
        bos_id: int | None,
        cache: bool,
    ) -> None:
        if not (hasattr(model, "begin") and hasattr(model, "step")):
            raise TypeError(f"model must have begin and step, got {type(model).__name__}")
        check_tokens("inputs", inputs)
        _check_whole("max_new_tokens", max_new_tokens, 1)
        for name, token in (("eos_id", eos_id), ("bos_id", bos_id)):
            if token is not None:
                _check_whole(name, token, 0)
        if bos_id is None and hasattr(model, "encode"):
            raise ValueError("bos_id must be the first token of an encoder-decoder's targets, got None")
        self.eos_id = eos_id
        self.pad_id = model.pad_id if model.pad_id is not None else eos_id or 0
        self.never = None if model.pad_id == eos_id else model.pad_id
        self.steps = max_new_tokens if len(inputs) else 0
        self.first = None
        if self.steps:
            self.model = model if cache else _Recomputing(model)
            self.first, self.state = self.model.begin(inputs, bos_id=bos_id)
            last, limit = self.first.shape[1] + max_new_tokens - 1, getattr(model, "max_len", None)
            if limit is not None and last > limit:
                longest = limit - self.first.shape[1] + 1
                raise ValueError(f"max_new_tokens must be at most {longest}, max_len being {limit}, got {max_new_tokens}")

    def step(self, tokens: Tensor) -> Tensor:
        """Log-probabilities (N, V), at least in float32, of what follows tokens (N, L)."""
        log_probs = reference.wide(self.model.step(tokens, self.state)).log_softmax(-1)
        if self.eos_id is not None and self.eos_id >= log_probs.shape[1]:
            raise ValueError(f"eos_id must be a token of a vocabulary of {log_probs.shape[1]}, got {self.eos_id}")
        if self.never is not None:
            log_probs[:, self.never] = -math.inf
        return log_probs

    def reorder(self, rows: Tensor) -> None:
        self.state.reorder(rows.flatten())


class _Past:
    """All tokens so far, and the sources they belong to."""

    def __init__(self, sources: Tensor | None, tokens: Tensor) -> None:
        self.sources, self.tokens = sources, tokens

    def reorder(self, rows: Tensor) -> None:
        self.tokens = self.tokens[rows]


class _Recomputing:
    """A model that keeps no state but the tokens: each step is a forward pass over all of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def begin(self, inputs: Tensor, *, bos_id: int | None) -> tuple[Tensor, _Past]:
        first, _ = self.model.begin(inputs, bos_id=bos_id)
        return first, _Past(inputs if hasattr(self.model, "encode") else None, first[:, :0])

    def step(self, tokens: Tensor, state: _Past) -> Tensor:
        state.tokens = torch.cat((state.tokens, tokens), dim=1)
        if state.sources is None:
            return self.model(state.tokens)[:, -1]
        beams = len(state.tokens) // len(state.sources)
        return self.model(state.sources.repeat_interleave(beams, dim=0), state.tokens)[:, -1]


def _check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {expected}, got {value}")


def _check_number(name: str, value: object, expected: str, fits: Callable[[float], bool]) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not fits(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
