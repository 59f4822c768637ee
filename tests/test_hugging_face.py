"""Models of transformers with our attention against the same with transformers' own, in float64: outputs and gradients."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")

from fast_transformer.integrations import hugging_face  # noqa: E402

hugging_face.register()
VOCAB, LENGTH = 99, 17
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 16}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
T5_SIZES = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BART_SIZES = {"vocab_size": VOCAB, "d_model": 32, "forced_eos_token_id": None} | {
    f"{side}_{what}": size
    for side in ("encoder", "decoder")
    for what, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
MODELS = {  # what each is here for
    "bert": ("BertModel", "BertConfig", SIZES),  # padding, both ways
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4} | SPECIAL),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),  # grouped-query heads
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 5}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5_SIZES | SPECIAL),  # a bias that learns, cross-attention
    "bart": ("BartForConditionalGeneration", "BartConfig", BART_SIZES | SPECIAL),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "splinter": ("SplinterModel", "SplinterConfig", SIZES),  # knows no sdpa, and does not say whether it is causal
    "pegasus_x": (  # a decoder that knows no sdpa, and says that it is not causal
        "PegasusXForConditionalGeneration",
        "PegasusXConfig",
        BART_SIZES | SPECIAL | {"block_size": 8, "num_global_tokens": 4, "stagger_local_blocks": False},
    ),
    "gpt_oss": (  # sinks
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6},
    ),
}


def build(name, dtype=torch.float64, **changes):
    model, config, sizes = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**sizes | changes)).to(dtype).eval()


def inputs(name, padding):
    """Token ids of three sequences; `padding`: 5 of them hidden in the second one, on the left or on the right."""
    ids = torch.randint(3, VOCAB, (3, LENGTH))
    visible = torch.ones(3, LENGTH, dtype=torch.long)
    if padding:
        visible[1, slice(5) if padding == "left" else slice(-5, None)] = 0
    batch = {"input_ids": ids, "attention_mask": visible}
    return batch | {"decoder_input_ids": ids[:, :9]} if name in ("t5", "bart", "pegasus_x") else batch


def run(model, implementation, batch, **options):
    """The output of the tokens that are not padding, and the gradients of all parameters, as one vector."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    result = model(**batch, **options)
    out = result.last_hidden_state if "last_hidden_state" in result else result.logits
    if "decoder_input_ids" not in batch:
        out = out[batch["attention_mask"].bool()]
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return out.detach(), grads, result


def check(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual[1], expected[1], rtol=tolerance, atol=tolerance * expected[1].abs().max().item())


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral", "t5", "bart"])
def test_models_equal_sdpa(name, padding, monkeypatch):
    model, batch = build(name), inputs(name, padding)
    expected, calls = run(model, "sdpa", batch), []
    fused = hugging_face.functional.attention
    monkeypatch.setattr(hugging_face.functional, "attention", lambda *a, **k: calls.append(0) or fused(*a, **k))
    check(run(model, hugging_face.NAME, batch), expected)
    assert len(calls) == (6 if "decoder_input_ids" in batch else 2)  # one for each layer, and for each cross-attention


@pytest.mark.parametrize("padding", [None, "right"])
def test_softcap_equals_eager(padding):
    # in float32: eager gives NaN in float64 where padding's window holds nothing but padding
    model, batch = build("gemma2", torch.float32), inputs("gemma2", padding)
    check(run(model, hugging_face.NAME, batch), run(model, "eager", batch), tolerance=1e-5)


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("name", ["splinter", "pegasus_x"])
def test_models_without_sdpa_equal_eager(name, padding):
    model, batch = build(name), inputs(name, padding)
    check(run(model, hugging_face.NAME, batch), run(model, "eager", batch), tolerance=1e-6)  # Splinter's softmax is in float32


def test_own_attention_gets_the_mask_of_eager():
    """Git's text layers stay eager: they add the mask to their scores."""
    config = transformers.GitConfig(**SIZES, vision_config=VISION)
    model = transformers.GitForCausalLM(config).eval()
    model.set_attn_implementation(hugging_face.NAME)
    ids = torch.randint(3, VOCAB, (2, LENGTH))
    other = ids.clone()
    other[:, -1] = 2
    assert torch.equal(model(ids).logits[:, :-1], model(other).logits[:, :-1])


def test_sinks_equal_eager():
    model, batch = build("gpt_oss", torch.float32), inputs("gpt_oss", "right")  # the experts know no float64
    torch.nn.init.normal_(model.model.layers[0].self_attn.sinks)
    check(run(model, hugging_face.NAME, batch), run(model, "eager", batch), tolerance=1e-5)
    assert model.model.layers[0].self_attn.sinks.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_attentions_equal_eager(name):
    model, batch = build(name), inputs(name, "right")
    expected = run(model, "eager", batch, output_attentions=True)[2]
    actual = run(model, hugging_face.NAME, batch, output_attentions=True)[2]
    kinds = ("encoder_attentions", "decoder_attentions", "cross_attentions") if name == "t5" else ("attentions",)
    for kind in kinds:
        assert len(actual[kind]) == 2
        for ours, theirs in zip(actual[kind], expected[kind], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # Llama's eager takes the softmax in float32


def test_additive_mask():
    model, batch = build("bert"), inputs("bert", None)
    visible = torch.rand(3, 1, LENGTH, LENGTH) < 0.5
    visible[..., 0] = True
    additive = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)
    found = []
    for implementation in (hugging_face.NAME, "sdpa"):
        model.set_attn_implementation(implementation)
        found.append(model(input_ids=batch["input_ids"], attention_mask=additive).last_hidden_state)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "t5"])
def test_generate_finds_the_same_tokens(name, cache):
    model, batch = build(name), inputs(name, "left")
    batch.pop("decoder_input_ids", None)
    found = []
    for implementation in (hugging_face.NAME, "sdpa"):
        model.set_attn_implementation(implementation)
        options = {"disable_compile": True, "cache_implementation": cache} if cache == "static" else {}
        found.append(model.generate(**batch, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options))
    assert torch.equal(*found)


def test_dropout_in_training():
    model, batch = build("bert", attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.0), inputs("bert", "right")
    without = run(model, hugging_face.NAME, batch)
    model.train()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(model, hugging_face.NAME, batch))
    first, again, other = (result[1] for result in results)
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, without[1])
    assert first.isfinite().all()


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_what_it_does_not_know(name):
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=name):
        hugging_face.attention(torch.nn.Module(), x, x, x, None, **{name: torch.zeros(1, 2, 3, 1)})


def test_unknown_dtype_of_a_mask():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(TypeError, match="bias"):
        hugging_face.attention(torch.nn.Module(), x, x, x, torch.ones(1, 1, 3, 3, dtype=torch.long))
