"""Models of transformers with our attention against the same with its own: "sdpa" (its default) and "eager".

    python benchmarks/bench_hugging_face.py     interleaved, writes results/hugging_face.csv

float32, random weights, 4 layers of width 512 with 8 heads, without the output layer. Training is forward and backward with the
models' own dropout of 0.1; in inference half of every second sequence is padding. All but attention is transformers' own in
each, so attention's share of a model bounds what can be won.
"""

import torch
import transformers
from common import interleave, write_csv

from fast_transformer.integrations import hugging_face

IMPLEMENTATIONS = (hugging_face.NAME, "sdpa", "eager")
BERT = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
MODELS = {
    "BERT": lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
    "GPT-2": lambda: transformers.GPT2Model(transformers.GPT2Config(n_embd=512, n_layer=4, n_head=8)),
    "T5": lambda: transformers.T5Model(transformers.T5Config(d_model=512, d_ff=2048, num_layers=4, num_heads=8)),
}
CASES = [("training", 8, 128), ("training", 4, 512), ("inference", 8, 512)]  # work, batch, length


def setup(model, work, batch, length, implementation):
    """A function that does the work once and returns the last hidden states."""
    ids = torch.randint(3, 20000, (batch, length), generator=torch.Generator().manual_seed(0))
    visible = torch.ones_like(ids)
    visible[::2, length // 2 :] = work == "training"
    arguments = {"input_ids": ids, "attention_mask": visible}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids

    def run():
        model.set_attn_implementation(implementation)
        model.train(work == "training")
        with torch.set_grad_enabled(work == "training"):
            out = model(**arguments).last_hidden_state
        if work == "training":
            model.zero_grad()
            out.sum().backward()
        return out

    return run


def main():
    hugging_face.register()
    rows = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        for work, batch, length in CASES:
            variants = {i: setup(model, work, batch, length, i) for i in IMPLEMENTATIONS}
            if work == "inference":  # without dropout all must say the same
                ours, *others = (run() for run in variants.values())
                for other in others:
                    torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-3)
            times = interleave(variants, seconds=3.0, rounds=4)
            for implementation, ms in times.items():
                row = {"model": name, "work": work, "batch": batch, "length": length, "attention": implementation} | ms
                rows.append(row | {"over": ms["median_ms"] / times[hugging_face.NAME]["median_ms"]})
                print(*row.values(), f"{rows[-1]['over']:.2f}", flush=True)
    print(write_csv("hugging_face", rows))


if __name__ == "__main__":
    main()
