"""Greedy decoding of 128 tokens with an encoder-decoder of 6 + 6 layers: against torch.nn's modules and torch's operations.

    python benchmarks/bench_decode.py       interleaved, writes results/decode.csv

- ours: `generation.greedy`, with its cache.
- torch.nn: no cache, as torch.nn.Transformer has none: the decoder over all tokens so far in each step (the encoder once, the
  output layer at the last position only).
- torch ops: keys and values kept in preallocated tensors, those of the encoder's output computed once, every step made of
  F.linear, F.scaled_dot_product_attention and F.layer_norm and nothing else, in inference mode.
- compiled: the step of "torch ops" under torch.compile.
All have the same weights and must find the same tokens.
"""

import torch
import torch.nn.functional as F
from common import interleave, write_csv
from torch import nn

from fast_transformer.generation import greedy
from fast_transformer.masks import look_ahead_mask, padding_mask
from fast_transformer.models import Seq2SeqTransformer
from fast_transformer.nn.positions import sinusoidal_positions

BATCH, SOURCE, NEW, VOCAB = 8, 64, 128, 8000
WIDTH, HEADS, LAYERS, HIDDEN = 512, 8, 6, 2048
PAD, BOS = 0, 1


def stock_transformer(model):
    """torch.nn.Transformer with the weights of the model's."""
    stock = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, batch_first=True)
    stock.encoder.norm = stock.decoder.norm = None  # post-norm, as the model is
    stock.load_state_dict(model.transformer.state_dict())
    return stock.eval()


@torch.inference_mode()
def without_cache(model, stock, source):
    hidden = padding_mask(source, PAD)
    memory = stock.encoder(model.source(source), src_key_padding_mask=hidden)
    tokens = source.new_full((BATCH, 1), BOS)
    for n in range(1, NEW + 1):
        x = stock.decoder(
            model.target(tokens),
            memory,
            tgt_mask=look_ahead_mask(n),
            tgt_is_causal=True,
            memory_key_padding_mask=hidden,
        )
        tokens = torch.cat((tokens, model.head(x[:, -1]).argmax(-1, keepdim=True)), dim=1)
    return tokens[:, 1:]


class CachedStep:
    """A step of decoding in torch's operations: as few as there can be."""

    def __init__(self, model, stock):
        self.model, self.encoder = model, stock.encoder
        self.table, self.positions = model.target.tokens.weight * WIDTH**0.5, sinusoidal_positions(NEW, WIDTH)
        self.layers = [dict(layer.named_parameters()) for layer in stock.decoder.layers]

    def begin(self, source):
        visible = ~padding_mask(source, PAD)
        memory = self.encoder(self.model.source(source), src_key_padding_mask=~visible)
        memories = []
        for p in self.layers:
            w, b = p["multihead_attn.in_proj_weight"][WIDTH:], p["multihead_attn.in_proj_bias"][WIDTH:]
            heads = F.linear(memory, w, b).view(BATCH, SOURCE, 2, HEADS, -1).permute(2, 0, 3, 1, 4)
            memories.append(heads.contiguous())  # (2, N, H, S, D)
        caches = [torch.empty(2, BATCH, HEADS, NEW, WIDTH // HEADS) for _ in self.layers]
        return caches, memories, visible[:, None, None, :]

    def step(self, tokens, position, caches, memories, visible):
        """tokens (N,), their position (E,) -> the next tokens; caches (2, N, H, length, D) end with room for these."""
        x = F.embedding(tokens, self.table) + position  # (N, E)
        for p, cache, memory in zip(self.layers, caches, memories, strict=True):
            qkv = F.linear(x, p["self_attn.in_proj_weight"], p["self_attn.in_proj_bias"]).view(BATCH, 3, HEADS, 1, -1)
            cache[:, :, :, -1] = qkv[:, 1:, :, 0].transpose(0, 1)
            y = F.scaled_dot_product_attention(qkv[:, 0], *cache).view(BATCH, WIDTH)
            y = F.linear(y, p["self_attn.out_proj.weight"], p["self_attn.out_proj.bias"])
            x = F.layer_norm(x + y, (WIDTH,), p["norm1.weight"], p["norm1.bias"])
            w, b = p["multihead_attn.in_proj_weight"][:WIDTH], p["multihead_attn.in_proj_bias"][:WIDTH]
            q = F.linear(x, w, b).view(BATCH, HEADS, 1, -1)
            y = F.scaled_dot_product_attention(q, *memory, attn_mask=visible).view(BATCH, WIDTH)
            y = F.linear(y, p["multihead_attn.out_proj.weight"], p["multihead_attn.out_proj.bias"])
            x = F.layer_norm(x + y, (WIDTH,), p["norm2.weight"], p["norm2.bias"])
            y = F.linear(x, p["linear1.weight"], p["linear1.bias"]).relu_()
            y = F.linear(y, p["linear2.weight"], p["linear2.bias"])
            x = F.layer_norm(x + y, (WIDTH,), p["norm3.weight"], p["norm3.bias"])
        return F.linear(x, self.model.head.weight).argmax(-1)


@torch.inference_mode()
def with_cache(steps, step, source):
    caches, *rest = steps.begin(source)
    out = [source.new_full((BATCH,), BOS)]
    for t in range(NEW):
        out.append(step(out[-1], steps.positions[t], [cache[:, :, :, : t + 1] for cache in caches], *rest))
    return torch.stack(out[1:], dim=1)


def main():
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = Seq2SeqTransformer(VOCAB, VOCAB, WIDTH, HEADS, LAYERS, LAYERS, HIDDEN).eval()
    stock = stock_transformer(model)
    steps = CachedStep(model, stock)
    compiled = torch.compile(steps.step, dynamic=True)
    source = torch.randint(2, VOCAB, (BATCH, SOURCE))
    source[torch.arange(SOURCE) >= torch.linspace(SOURCE // 2, SOURCE, BATCH).long()[:, None]] = PAD  # ragged
    variants = {
        "ours": lambda: greedy(model, source, max_new_tokens=NEW, bos_id=BOS, eos_id=None).tokens,
        "torch.nn, no cache": lambda: without_cache(model, stock, source),
        "torch ops": lambda: with_cache(steps, steps.step, source),
        "torch ops, compiled": lambda: with_cache(steps, compiled, source),
    }
    expected = variants["ours"]()
    assert expected.shape == (BATCH, NEW)
    for name, decode in variants.items():
        assert torch.equal(decode(), expected), name
    times = interleave(variants, seconds=1.0, rounds=3)  # a round takes a minute, nearly all of it without a cache
    ours = times["ours"]["median_ms"]
    for name, t in times.items():
        print(f"{name:20} {t['median_ms']:8.1f} ms   {t['median_ms'] / ours:.2f}")
    shape = f"{BATCH} {SOURCE} {NEW} {WIDTH} {HEADS} {LAYERS}+{LAYERS} {HIDDEN} {VOCAB}"
    rows = [
        {"B_S_T_E_H_layers_FF_V": shape, "dtype": "float32", "provider": name} | t | {"over_ours": t["median_ms"] / ours}
        for name, t in times.items()
    ]
    print(write_csv("decode", rows))


if __name__ == "__main__":
    main()
