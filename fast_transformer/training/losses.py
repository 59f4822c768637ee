"""Training losses: functions (model, batch) -> (sum of losses, number of tokens); what weighs tokens alike needs both."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from .. import functional

Batch = tuple[Tensor, ...]
Loss = Callable[[Module, Batch], tuple[Tensor, Tensor | int]]


def summed_cross_entropy(
    logits: Tensor, target: Tensor, *, pad_id: int | None = None, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropy with label smoothing (Szegedy et al. 2016, section 7), padding left out of both the sum and the count.

    Args:
        logits: (..., V).
        target: (...) integers in [0, V), or pad_id.
        pad_id: the target that is not scored; None = all are.
        label_smoothing: the share of the probability, in [0, 1), that is spread evenly over all V tokens.

    Returns:
        The sum of the losses, at least in float32, and the number of tokens in it, both 0-d. Padding alone gives 0 and 0.

    Raises:
        ValueError, TypeError: a shape, a dtype or, on CPU, a token does not fit; the text names it.
    """
    functional.check_tensor("logits", logits)
    functional.check_probability("label_smoothing", label_smoothing)
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise TypeError(f"target must be a tensor of integers, got {getattr(target, 'dtype', type(target).__name__)}")
    if logits.dim() < 2 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target must be (...) beside logits (..., V), got target {tuple(target.shape)}, logits {tuple(logits.shape)}"
        )
    vocabulary, target = logits.shape[-1], target.flatten().long()
    scored = torch.ones_like(target, dtype=torch.bool) if pad_id is None else target != pad_id
    unknown = (scored & ((target < 0) | (target >= vocabulary))) if target.is_cpu else scored[:0]  # elsewhere it would wait
    if unknown.any():
        raise ValueError(f"target must hold tokens in [0, {vocabulary}) or pad_id={pad_id}, got {target[unknown][0].item()}")
    rows = logits.flatten(0, -2)  # (tokens, V)
    rows = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    ignored = target.masked_fill(~scored, -100)
    return F.cross_entropy(rows, ignored, reduction="sum", label_smoothing=label_smoothing), scored.sum()


def cross_entropy(logits: Tensor, target: Tensor, *, pad_id: int | None = None, label_smoothing: float = 0.0) -> Tensor:
    """The mean of `summed_cross_entropy`, with its arguments, over the tokens that are no padding; 0 where there are none."""
    total, count = summed_cross_entropy(logits, target, pad_id=pad_id, label_smoothing=label_smoothing)
    return total / count.clamp(min=1)


def teacher_forcing(pad_id: int | None = None, label_smoothing: float = 0.0) -> Loss:
    """The loss of predicting every token of the target from those before it, for batches (*inputs, target).

    Args: as in `summed_cross_entropy`.

    Returns:
        A function (model, batch) -> (sum of losses, number of tokens), as Trainer takes it. It calls
        `model(*inputs, target[:, :-1])` for logits (B, L, V) and scores them against target[:, 1:].
    """

    def loss(model: Module, batch: Batch) -> tuple[Tensor, Tensor]:
        *inputs, target = batch
        if target.dim() != 2 or target.shape[1] < 2:
            raise ValueError(f"the target of a batch must be (B, L + 1), a begin token and L others, got {tuple(target.shape)}")
        logits = model(*inputs, target[:, :-1])
        return summed_cross_entropy(logits, target[:, 1:], pad_id=pad_id, label_smoothing=label_smoothing)

    return loss
