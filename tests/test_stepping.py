"""One token at a time without modules: the same as with them, and only where nobody watches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fast_transformer as ft
from fast_transformer.generation import greedy
from fast_transformer.models import Seq2SeqTransformer
from fast_transformer.nn import DecoderLayerCache
from fast_transformer.nn._stepping import stack_step

E, H = 32, 4


def make(kind, *, final_norm=True, layers=2, **options):
    options = {"dim_feedforward": 24, "dropout": 0.1, "batch_first": True} | options
    layer = (ft.TransformerEncoderLayer if kind == "encoder" else ft.TransformerDecoderLayer)(E, H, **options)
    stack = ft.TransformerEncoder if kind == "encoder" else ft.TransformerDecoder
    stack = stack(layer, layers, nn.LayerNorm(E) if final_norm else None).double().eval()
    with torch.no_grad():
        for p in stack.parameters():
            p.add_(torch.randn_like(p) * 0.1)  # layers that differ, biases that are not 0
    return stack


def filled(stack, kind, memory, hidden):
    """The caches after the stack has read 5 tokens of each row."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(memory), 5, E, dtype=torch.float64, generator=generator)
    if kind == "encoder":
        caches = [ft.KeyValueCache() for _ in stack.layers]
        stack(x, is_causal=True, cache=caches)
    else:
        caches = [DecoderLayerCache(ft.KeyValueCache(), ft.KeyValueCache(fixed=True)) for _ in stack.layers]
        stack(x, memory, tgt_is_causal=True, memory_key_padding_mask=hidden, cache=caches)
    return caches


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_first": True, "activation": F.gelu},
        {"bias": False, "activation": nn.SiLU(), "final_norm": False},
        {"rotary": ft.RotaryPositions(E // H), "activation": nn.GELU("tanh")},
        {"norm_first": True, "bias": False, "rotary": ft.RotaryPositions(E // H)},
    ],
    ids=["post-norm", "pre-norm", "no bias", "rotary", "pre-norm rotary"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_equals_the_stack(kind, masked, options, beams):
    stack, memory = make(kind, **options), torch.randn(2, 7, E, dtype=torch.float64)
    hidden = torch.arange(7) >= torch.tensor([[4], [7]]) if masked else None
    found, expected = (filled(stack, kind, memory, hidden) for _ in range(2))
    for layer in [*found, *expected]:
        for cache in layer if kind == "decoder" else [layer]:
            if kind == "encoder" or cache is layer.self_attention:
                cache.reorder(torch.arange(2).repeat_interleave(beams))
    step = stack_step(stack)
    x = torch.randn(3, 2 * beams, E, dtype=torch.float64)
    for i in range(3):
        padding = torch.zeros(2 * beams, 6 + i, dtype=torch.bool)
        padding[0, :2] = True
        padding, bias = (padding, torch.randn(1, H, 1, 6 + i, dtype=torch.float64)) if masked else (None, None)
        visible = None if padding is None else ~padding[:, None, None]
        if kind == "encoder":
            got = step(x[i], found, visible, bias)
            masks = {"src_key_padding_mask": padding, "is_causal": True}
            whole = stack(x[i][:, None], **masks, position_bias=bias, cache=expected)
        else:
            got = step(x[i], found, visible, bias, None if hidden is None else ~hidden[:, None, None])
            masks = {"tgt_key_padding_mask": padding, "tgt_is_causal": True, "memory_key_padding_mask": hidden}
            whole = stack(x[i][:, None], memory, **masks, position_bias=bias, cache=expected)
        torch.testing.assert_close(got, whole[:, 0], rtol=1e-10, atol=1e-12)


class Louder(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Deeper(ft.TransformerDecoderLayer):
    pass


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **options):
        out, weights = self.inner(*args, **options)
        return -out, weights


CHANGES = {
    "a hook on the stack": lambda s: s.register_forward_hook(lambda *_: None),
    "a hook on a layer": lambda s: s.layers[1].register_forward_pre_hook(lambda *_: None),
    "a hook on an attention": lambda s: s.layers[1].multihead_attn.register_forward_hook(lambda *_: None),
    "a hook on a projection": lambda s: s.layers[0].self_attn.out_proj.register_forward_hook(lambda *_: None),
    "a hook on a linear layer": lambda s: s.layers[0].linear2.register_forward_hook(lambda *_: None),
    "an attention that is wrapped": lambda s: setattr(s.layers[0], "self_attn", Wrapped(s.layers[0].self_attn)),
    "a hook on a dropout": lambda s: s.layers[0].dropout2.register_forward_hook(lambda *_: None),
    "dropout": lambda s: s.train(),
    "a norm of another type": lambda s: setattr(s.layers[1], "norm2", Louder(E).double()),
    "an activation of one's own": lambda s: setattr(s.layers[1], "activation", torch.tanh),
    "a block of one's own": lambda s: setattr(s.layers[1], "_ff_block", lambda x: x),
    "a forward of one's own": lambda s: setattr(s.layers[1], "forward", lambda x, *_, **__: x),
    "a subclass": lambda s: setattr(s.layers[1], "__class__", Deeper),
    "a window": lambda s: setattr(s.layers[1].self_attn, "window", (2, 2)),
    "batch in the second place": lambda s: setattr(s.layers[1].self_attn, "batch_first", False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_modules_are_called_where_somebody_watches(change):
    stack = make("decoder")
    assert stack_step(stack) is not None
    change(stack)
    assert stack_step(stack) is None


def test_a_hook_sees_every_step_of_decoding():
    model = Seq2SeqTransformer(9, 9, 16, 2, 1, 1, 16)
    calls = []
    model.transformer.decoder.layers[0].linear1.register_forward_hook(lambda *_: calls.append(1))
    greedy(model, torch.ones(2, 3, dtype=torch.int64), max_new_tokens=5, bos_id=1, eos_id=None)
    assert len(calls) == 5
