"""EncoderOnlyTransformer and its heads: against torch.nn's encoder, padded, at their limits, and learning."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import CLOSE, assert_same_parameter_gradients, randomise, slow_path

from fast_transformer.models import (
    EncoderOnlyConfig,
    EncoderOnlyTransformer,
    MaskedLanguageModel,
    SequenceClassifier,
    TokenClassifier,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PAD, VOCAB, E, H, CLASSES = 0, 13, 8, 2, 3
SIZES = {"d_model": E, "n_heads": H, "n_layers": 2, "d_ff": 12, "max_len": 9, "dropout": 0.0}
HEADS = {
    "masked": MaskedLanguageModel,
    "sequence": lambda encoder: SequenceClassifier(encoder, CLASSES),
    "token": lambda encoder: TokenClassifier(encoder, CLASSES),
}
each_head = pytest.mark.parametrize("kind", HEADS)


def make(kind: str | None = None, **options) -> nn.Module:
    """An encoder, or a model of this kind, in float64 with random parameters."""
    encoder = EncoderOnlyTransformer(VOCAB, **(SIZES | options))
    return randomise(encoder if kind is None else HEADS[kind](encoder)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and segments (3, 7) with 0, 3 and 1 padding tokens at the right."""
    tokens, segments = torch.randint(1, VOCAB, (3, 7)), torch.randint(0, 2, (3, 7))
    tokens[1, 4:] = tokens[2, 6:] = PAD
    return tokens, segments


class Stock(nn.Module):
    """The same of torch.nn's modules, with the same names."""

    def __init__(self, norm_first: bool, activation: str):
        super().__init__()
        self.tokens, self.segments = nn.Embedding(VOCAB, E, padding_idx=PAD), nn.Embedding(2, E)
        self.positions, self.norm = nn.Embedding(9, E), nn.LayerNorm(E)
        layer = nn.TransformerEncoderLayer(E, H, 12, 0.0, activation, batch_first=True, norm_first=norm_first)
        norm = nn.LayerNorm(E) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)

    def forward(self, tokens, segments):
        x = self.tokens(tokens) + self.segments(segments) + self.positions(torch.arange(tokens.shape[1]))
        return self.encoder(self.norm(x), src_key_padding_mask=tokens == PAD)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post_norm", "pre_norm"])
def test_equals_torch_nn_with_all_gradients(norm_first, activation):
    ours, theirs = make(norm_first=norm_first, activation=activation), Stock(norm_first, activation).double()
    theirs.load_state_dict(ours.state_dict())
    tokens, segments = batch()
    grad = torch.randn(3, 7, E, dtype=torch.float64) * (tokens != PAD)[..., None]
    with slow_path():
        got, want = ours(tokens, segments), theirs(tokens, segments)
    torch.testing.assert_close(got[tokens != PAD], want[tokens != PAD], **CLOSE)
    for out in (got, want):
        (out * grad).sum().backward()
    assert_same_parameter_gradients(ours, theirs)


def test_heads_are_what_the_paper_says():
    tokens, segments = batch()
    masked, sequence, token = (make(kind).eval() for kind in HEADS)
    hidden = F.gelu(masked.transform(masked.encoder(tokens, segments)))
    hidden = F.layer_norm(hidden, (E,), masked.norm.weight, masked.norm.bias)
    torch.testing.assert_close(masked(tokens, segments), hidden @ masked.encoder.tokens.weight.T + masked.bias, **CLOSE)
    pooled = (sequence.encoder(tokens, segments)[:, 0] @ sequence.pooler.weight.T + sequence.pooler.bias).tanh()
    torch.testing.assert_close(sequence(tokens, segments), sequence.head(pooled), **CLOSE)
    torch.testing.assert_close(token(tokens, segments), token.head(token.encoder(tokens, segments)), **CLOSE)


def test_logits_where_they_are_asked_for():
    model, (tokens, segments) = make("masked"), batch()
    at = torch.rand(tokens.shape) < 0.3
    torch.testing.assert_close(model(tokens, segments, at=at), model(tokens, segments)[at], **CLOSE)
    assert model(tokens, at=torch.zeros_like(at)).shape == (0, VOCAB)


def test_output_layer_is_the_token_embedding():
    model = make("masked")
    names = [name for name, p in model.named_parameters() if p.shape == (VOCAB, E)]
    assert names == ["encoder.tokens.weight"]
    tokens = torch.full((1, 3), 5)
    before = model(tokens)
    with torch.no_grad():
        model.encoder.tokens.weight[7] += 1.0  # a token that the input does not hold
    changed = (model(tokens) != before).flatten(0, 1).any(0)
    assert changed.nonzero().flatten().tolist() == [7]


def test_padding_changes_no_result():
    model, (tokens, segments) = make(), batch()
    together = model(tokens, segments)
    for row, n in enumerate([7, 4, 6]):
        alone = model(tokens[row : row + 1, :n], segments[row : row + 1, :n])
        torch.testing.assert_close(together[row, :n], alone[0], **CLOSE)


def test_no_segments_are_segment_0():
    model, (tokens, segments) = make(), batch()
    torch.testing.assert_close(model(tokens), model(tokens, torch.zeros_like(segments)), **CLOSE)
    assert not torch.allclose(model(tokens), model(tokens, torch.ones_like(segments)))


@each_head
def test_gradients_reach_every_parameter_and_nothing_but_padding_is_finite(kind):
    model, (tokens, segments) = make(kind), batch()
    tokens[1] = PAD
    out = model(tokens, segments)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert [name for name, p in model.named_parameters() if not (p.grad.isfinite().all() and p.grad.any())] == []


@each_head
def test_no_sequences_give_an_empty_result(kind):
    model = make(kind)
    shape = model(batch()[0]).shape
    assert model(batch()[0][:0]).shape == (0, *shape[1:])


@each_head
def test_state_dict_is_complete(kind):
    model, other, tokens = make(kind).eval(), HEADS[kind](EncoderOnlyTransformer(VOCAB, **SIZES)).double().eval(), batch()[0]
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), other(tokens))


def test_heads_share_an_encoder():
    encoder = make()
    classifier = SequenceClassifier(MaskedLanguageModel(encoder).encoder, CLASSES)
    assert classifier.encoder is encoder


def test_compiles_into_one_graph():
    model, (tokens, segments) = make("masked"), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, segments), model(tokens, segments), **CLOSE)


def test_initial_weights_are_small_and_differ_between_layers():
    model = EncoderOnlyTransformer(VOCAB, 128, 2, 2, 512)
    weights = [layer.linear1.weight for layer in model.encoder.layers]
    assert not torch.equal(*weights)
    for w in (*weights, model.encoder.layers[0].self_attn.in_proj_weight, model.positions.weight):
        assert 0.019 < w.std() < 0.021  # more than 49152 draws: a standard error of 0.0001 at most
    assert not model.tokens.weight[PAD].any() and not model.encoder.layers[1].linear1.bias.any()


@pytest.mark.parametrize("name, millions", [("tiny", 4.4), ("mini", 11.3), ("small", 29.1), ("medium", 41.7), ("base", 110.1)])
def test_named_sizes(name, millions):
    """Turc et al. 2019, table 1: the parameters of what is pre-trained, with the pooler and the output layer."""
    with torch.device("meta"):
        encoder = EncoderOnlyTransformer.from_config(getattr(EncoderOnlyConfig, name)(30522))
        parameters = {*MaskedLanguageModel(encoder).parameters(), *SequenceClassifier(encoder, 2).parameters()}
    assert round(sum(p.numel() for p in parameters) / 1e6, 1) == millions


def test_config_takes_changes():
    config = EncoderOnlyConfig.tiny(VOCAB, dropout=0.0, n_layers=1)
    model = EncoderOnlyTransformer.from_config(config)
    assert len(model.encoder.layers) == 1 and model.dropout.p == 0.0 and model.d_model == 128


def test_learns_whether_a_token_occurs():
    model = SequenceClassifier(EncoderOnlyTransformer(VOCAB, **(SIZES | {"d_model": 32, "d_ff": 64})), 2, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        tokens = torch.randint(2, VOCAB, (64, 8))
        labels = (tokens == 5).any(1).long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
    assert (model(tokens).argmax(-1) == labels).all(), loss


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"pad_id": VOCAB}, f"pad_id must be a token of the vocabulary of {VOCAB}, got {VOCAB}"),
        ({"pad_id": -1}, "pad_id"),
        ({"n_heads": 3}, "d_model must be divisible by nhead"),
        ({"dropout": 1.0}, "dropout"),
        ({"n_layers": 0}, "n_layers"),
        ({"d_ff": 0}, "d_ff"),
        ({"n_segments": 0}, "n_segments"),
        ({"max_len": 0}, "max_len"),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        EncoderOnlyTransformer(**({"vocab_size": VOCAB} | SIZES | options))


def test_wrong_inputs():
    model, classifier, (tokens, segments) = make("masked"), make("sequence"), batch()
    for error, message, inputs in [
        (ValueError, "tokens must be numbers from 0 to 12, got 13", (tokens + (tokens == tokens.max()) * (13 - tokens.max()),)),
        (ValueError, "tokens must be numbers from 0 to 12, got -1", (tokens - 1,)),
        (TypeError, "tokens must be an integer tensor", (tokens.double(),)),
        (ValueError, "tokens must have 2 dimensions", (tokens[0],)),
        (ValueError, "max_len = 9", (tokens.repeat(1, 2),)),
        (ValueError, "segments must be numbers from 0 to 1, got 2", (tokens, segments * 0 + 2)),
        (ValueError, r"segments must have the shape of tokens, \(3, 7\), got \(3, 6\)", (tokens, segments[:, 1:])),
        (TypeError, "segments must be an integer tensor", (tokens, segments.bool())),
    ]:
        with pytest.raises(error, match=message):
            model(*inputs)
    with pytest.raises(TypeError, match="at must be a bool tensor, got torch.int64"):
        model(tokens, at=tokens)
    with pytest.raises(ValueError, match=r"at must have the shape of tokens, \(3, 7\), got \(7,\)"):
        model(tokens, at=tokens[0] > 2)
    with pytest.raises(ValueError, match="tokens must hold at least one token a sequence"):
        classifier(tokens[:, :0])
    with pytest.raises(ValueError, match="n_classes"):
        TokenClassifier(make(), 0)
