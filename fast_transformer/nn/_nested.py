"""NestedTensor in and out: torch.nn.TransformerEncoder hands one to its layers in eval mode when a padding mask is given."""

import torch
from torch import Tensor


def pad_nested(nested: Tensor, key_padding_mask: Tensor | None, batch_first: bool) -> tuple[Tensor, Tensor]:
    """(N, L, E) padded with zeros, and its key padding mask (N, L), True = padding."""
    if key_padding_mask is not None:
        raise ValueError("key_padding_mask must be None for a NestedTensor, which carries its own lengths")
    if not batch_first:
        raise ValueError("a NestedTensor is (batch, length, embed_dim); it needs a module with batch_first=True")
    samples = nested.unbind()
    padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    lengths = torch.tensor([len(sample) for sample in samples], device=padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]


def nest_like(padded: Tensor, nested: Tensor) -> Tensor:
    """`padded` (N, L, E) cut to the lengths and brought to the layout of `nested`."""
    samples = [row[: len(sample)] for row, sample in zip(padded, nested.unbind(), strict=True)]
    if nested.layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(torch.cat(samples), nested.offsets())
    return torch.nested.as_nested_tensor(samples)
