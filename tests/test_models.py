"""Seq2SeqTransformer and DecoderOnlyTransformer: against torch.nn's stacks, with a cache, padded, at their limits."""

import pytest
import torch
from torch import nn

from fast_transformer.models import DecoderOnlyConfig, DecoderOnlyTransformer, Seq2SeqConfig, Seq2SeqTransformer
from fast_transformer.models.embeddings import POSITIONS

PAD, BOS = 0, 1


def seq2seq(**options) -> Seq2SeqTransformer:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "d_ff": 48}
    return Seq2SeqTransformer(13, 11, **(sizes | {"dropout": 0.0} | options)).double()


def decoder_only(**options) -> DecoderOnlyTransformer:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 48}
    return DecoderOnlyTransformer(11, **(sizes | {"dropout": 0.0, "pad_id": PAD} | options)).double()


def tokens(N: int, L: int, vocab: int, *, pads: list[int] = ()) -> torch.Tensor:
    """Random tokens (N, L), none of them padding but the last pads[i] of row i."""
    x = torch.randint(2, vocab, (N, L), generator=torch.Generator().manual_seed(L))
    for row, n in enumerate(pads):
        x[row, L - n :] = PAD
    return x


def stock(model: Seq2SeqTransformer, norm_first: bool) -> nn.Transformer:
    """torch.nn's Transformer with the weights of the model's."""
    t = nn.Transformer(32, 4, 2, 2, 48, 0.0, batch_first=True, norm_first=norm_first).double()
    if not norm_first:
        t.encoder.norm = t.decoder.norm = None
    t.load_state_dict(model.transformer.state_dict())
    return t


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_equals_torch_nn_with_all_gradients(positions, norm_first):
    ours, theirs = (seq2seq(positions=positions, norm_first=norm_first) for _ in range(2))
    theirs.transformer = stock(ours, norm_first)
    source, target = tokens(3, 7, 13, pads=[0, 3, 1]), tokens(3, 5, 11, pads=[2, 0, 1])
    grad = torch.randn(3, 5, 11, dtype=torch.float64)
    results = []
    for model in (ours, theirs):
        logits = model(source, target)
        (logits * grad).sum().backward()
        results.append((logits, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)  # float64: some 1e4 roundings of 1e-16
    assert all(p.grad is not None for p in ours.parameters())


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_final_norms_come_with_pre_norm(norm_first):
    t = seq2seq(norm_first=norm_first).transformer
    assert (t.encoder.norm is not None) == (t.decoder.norm is not None) == norm_first


def test_embeddings_are_scaled_and_positions_added():
    model = seq2seq()
    x = model.source(tokens(1, 3, 13))
    position = torch.tensor(2.0).double()
    assert x.shape == (1, 3, 32)
    expected = model.source.tokens.weight[tokens(1, 3, 13)[0, 2]] * 32**0.5
    torch.testing.assert_close(x[0, 2, 0], expected[0] + position.sin())
    torch.testing.assert_close(x[0, 2, 1], expected[1] + position.cos())


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("make", [seq2seq, decoder_only])
def test_every_parameter_learns_and_pad_does_not(make, positions):
    model = make(positions=positions, tie_embeddings=False)
    inputs = (tokens(2, 7, 11, pads=[0, 2]),) * (2 if make is seq2seq else 1)
    model(*inputs).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        if not name.endswith("in_proj_bias"):  # a bias of keys shifts all scores of a query alike
            assert p.grad.abs().sum() > 0, name
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            assert (module.weight[PAD] == 0).all() and (module.weight.grad[PAD] == 0).all()


@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_changes_nothing_in_seq2seq(positions):
    model = seq2seq(positions=positions)
    source, target = tokens(2, 9, 13, pads=[0, 4]), tokens(2, 6, 11, pads=[0, 2])
    alone = model(source[1:, :5], target[1:, :4])
    torch.testing.assert_close(model(source, target)[1:, :4], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_changes_nothing_in_decoder_only(positions, side):
    model = decoder_only(positions=positions)
    x = tokens(2, 9, 11, pads=[0, 4])
    alone = model(x[1:, :5])
    if side == "left":
        padded = model(torch.stack((x[0], x[1].roll(4))))[1:, 4:]
    else:
        padded = model(x)[1:, :5]
    torch.testing.assert_close(padded, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("make", [seq2seq, decoder_only])
def test_the_future_is_hidden(make, positions):
    model = make(positions=positions)
    source, target = tokens(2, 4, 11), tokens(2, 6, 11)
    changed = target.clone()
    changed[:, 4:] = 10
    a, b = (model(*((source, t) if make is seq2seq else (t,))) for t in (target, changed))
    assert torch.equal(a[:, :4], b[:, :4]) and not torch.equal(a[:, 4], b[:, 4])


@torch.no_grad()
@pytest.mark.parametrize("positions", POSITIONS)
def test_steps_equal_forward_in_seq2seq(positions):
    model = seq2seq(positions=positions, norm_first=True)
    source, target = tokens(3, 7, 13, pads=[0, 3, 7]), tokens(3, 80, 11)  # more tokens than a cache has room for at first
    target[:, 0] = BOS
    whole = model(source, target)
    assert whole.isfinite().all()
    first, state = model.begin(source, bos_id=BOS)
    assert torch.equal(first, target[:, :1])
    chunks = [target[:, :1], target[:, 1:5], *target[:, 5:].split(1, dim=1)]
    at = 0
    for chunk in chunks:
        at += chunk.shape[1]
        torch.testing.assert_close(model.step(chunk, state), whole[:, at - 1], rtol=1e-9, atol=1e-11)
    assert state.length == 80


@torch.no_grad()
@pytest.mark.parametrize("positions", POSITIONS)
def test_steps_equal_forward_in_decoder_only(positions):
    model = decoder_only(positions=positions)
    prompt, rest = tokens(3, 6, 11, pads=[0, 2, 6]), tokens(3, 70, 11)
    first, state = model.begin(prompt)
    assert first.tolist() == torch.stack((prompt[0], prompt[1].roll(2), prompt[2])).tolist()
    whole = model(torch.cat((first, rest), dim=1))
    assert whole.isfinite().all()
    torch.testing.assert_close(model.step(first, state), whole[:, 5], rtol=1e-9, atol=1e-11)
    for i in range(70):
        torch.testing.assert_close(model.step(rest[:, i : i + 1], state), whole[:, 6 + i], rtol=1e-9, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["sinusoidal", "relative"])
@pytest.mark.parametrize("make", [seq2seq, decoder_only])
def test_rows_go_on_from_where_others_were(make, positions):
    """Beams: rows are multiplied after the first step and reordered after every one."""
    model = make(positions=positions)
    inputs = tokens(2, 5, 11, pads=[0, 2])
    history, state = model.begin(inputs, bos_id=BOS)
    model.step(history, state)
    orders = [[0, 0, 0, 1, 1, 1], [2, 0, 1, 3, 3, 3], [0, 1, 2, 5, 3, 4], [1, 1, 1, 3, 4, 4]]
    for i, rows in enumerate(map(torch.tensor, orders)):
        state.reorder(rows)
        new = tokens(6, 20 + i, 11)[:, :1]
        history = torch.cat((history[rows], new), dim=1)
        repeated = (inputs.repeat_interleave(3, dim=0), history) if make is seq2seq else (history,)
        torch.testing.assert_close(model.step(new, state), model(*repeated)[:, -1], rtol=1e-9, atol=1e-11)


def test_tied_embeddings_are_one_parameter():
    apart, target, everything = (seq2seq(tie_embeddings=tie) for tie in (False, True, False))
    assert sum(p.numel() for p in apart.parameters()) - sum(p.numel() for p in target.parameters()) == 11 * 32
    assert target.head.weight is target.target.tokens.weight and everything.head.weight is not everything.target.tokens.weight
    one = Seq2SeqTransformer(9, 9, 16, 2, 1, 1, 16, tie_embeddings="all")
    assert one.head.weight is one.target.tokens.weight is one.source.tokens.weight
    with pytest.raises(ValueError, match="tie_embeddings.*src_vocab 13 and tgt_vocab 11"):
        seq2seq(tie_embeddings="all")
    assert decoder_only(tie_embeddings=True).head.weight.shape == (11, 32)


def test_relative_positions_are_shared_by_the_layers_of_a_stack():
    names = [name for name, _ in seq2seq(positions="relative").named_parameters() if "bias.weight" in name]
    assert names == ["encoder_bias.weight", "decoder_bias.weight"]


def test_named_configurations():
    model = Seq2SeqTransformer.from_config(Seq2SeqConfig.tiny(20, 30, dropout=0.0))
    assert (model.head.out_features, model.d_model, len(model.transformer.encoder.layers)) == (30, 128, 2)
    model = DecoderOnlyTransformer.from_config(DecoderOnlyConfig.tiny(20, positions="rotary"))
    assert (model.head.out_features, model.d_model, len(model.decoder.layers)) == (20, 128, 2)
    assert Seq2SeqConfig.base(1, 1).d_ff == 2048 and Seq2SeqConfig.big(1, 1).dropout == 0.3
    for config in (Seq2SeqConfig.mini(1, 1), Seq2SeqConfig.small(1, 1), DecoderOnlyConfig.mini(1), DecoderOnlyConfig.small(1)):
        assert config.d_ff == 4 * config.d_model
    with pytest.raises(TypeError, match="width"):
        DecoderOnlyConfig.base(20, width=3)


@pytest.mark.parametrize("make", [seq2seq, decoder_only])
def test_zero_sizes(make):
    model = make()
    for N, L in ((0, 5), (2, 0), (0, 0)):
        x = tokens(N, L, 11)
        assert model(*((x, x) if make is seq2seq else (x,))).shape == (N, L, 11)


def test_state_dict_round_trip():
    a, b = seq2seq(tie_embeddings=True), seq2seq(tie_embeddings=True)
    with torch.no_grad():
        for p in b.parameters():
            p.zero_()
    b.load_state_dict(a.state_dict())
    x = tokens(2, 4, 11)
    assert torch.equal(a(x, x), b(x, x))


@pytest.mark.parametrize("positions", ["rotary", "relative", "alibi"])
@pytest.mark.parametrize("make", [seq2seq, decoder_only])
def test_compiles_into_one_graph(make, positions):
    model = make(positions=positions).float()
    inputs = (tokens(2, 5, 11, pads=[0, 1]),) * (2 if make is seq2seq else 1)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(*inputs), model(*inputs))


@pytest.mark.parametrize(
    "error, text, call",
    [
        (ValueError, "source must be numbers from 0 to 12, got 13", lambda m: m(torch.tensor([[3, 13]]), tokens(1, 2, 11))),
        (ValueError, "target must be numbers from 0 to 10, got -1", lambda m: m(tokens(1, 2, 11), torch.tensor([[3, -1]]))),
        (ValueError, "batch size of source, 1, got 2", lambda m: m(tokens(1, 2, 11), tokens(2, 2, 11))),
        (TypeError, "source must be an integer tensor.*float32", lambda m: m(torch.ones(1, 2), tokens(1, 2, 11))),
        (TypeError, "target must be an integer tensor.*bool", lambda m: m(tokens(1, 2, 11), tokens(1, 2, 11) == 0)),
        (ValueError, r"source must have 2 dimensions, got shape \(3,\)", lambda m: m(tokens(1, 3, 11)[0], tokens(1, 2, 11))),
        (ValueError, "positions must be one of.*'fourier'", lambda m: seq2seq(positions="fourier")),
        (ValueError, "tie_embeddings must be", lambda m: seq2seq(tie_embeddings="none")),
        (ValueError, "pad_id must be a token.*11 of 11", lambda m: decoder_only(pad_id=11)),
        (ValueError, "max_len = 4 tokens, got 5", lambda m: decoder_only(max_len=4)(tokens(1, 5, 11))),
        (ValueError, "max_len = 4 tokens, got 5", lambda m: seq2seq(max_len=4, positions="learned")(*[tokens(1, 5, 11)] * 2)),
        (ValueError, "head_dim must be even", lambda m: decoder_only(d_model=20, positions="rotary")),
        (ValueError, "empty prompt needs bos_id", lambda m: decoder_only().begin(tokens(2, 0, 11))),
        (RuntimeError, "no_grad", lambda m: m.step(*m.begin(tokens(1, 2, 11), bos_id=BOS))),
    ],
)
def test_bad_input(error, text, call):
    with pytest.raises(error, match=text):
        call(seq2seq())


@torch.no_grad()
def test_the_begin_token_may_be_the_padding_token():
    model, source = seq2seq(), tokens(2, 5, 11)
    target = torch.cat((torch.full((2, 1), PAD), tokens(2, 4, 11)), dim=1)
    first, state = model.begin(source, bos_id=PAD)
    torch.testing.assert_close(model.step(target, state), model(source, target)[:, -1], rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_a_step_with_a_wrong_token_leaves_the_state_as_it_was():
    model, prompt = decoder_only(), tokens(2, 5, 11, pads=[0, 2])
    first, state = model.begin(prompt)
    model.step(first, state)
    with pytest.raises(ValueError, match="got 11"):
        model.step(torch.tensor([[3], [11]]), state)
    new = tokens(2, 1, 11)
    torch.testing.assert_close(model.step(new, state), model(torch.cat((first, new), dim=1))[:, -1], rtol=1e-9, atol=1e-11)
