"""The training loss against torch's own, and what it does with padding and with input that does not fit."""

import pytest
import torch
import torch.nn.functional as F

from fast_transformer.training import cross_entropy, summed_cross_entropy, teacher_forcing

# float64 against float64: a sum of some tens of terms in another order, a few roundings of 2^-53.
CLOSE = {"rtol": 1e-13, "atol": 1e-13}


def case(pad_id: int, dtype=torch.float64):
    logits = torch.randn(3, 7, 11, dtype=dtype, requires_grad=True)
    target = torch.randint(1, 11, (3, 7))
    target[0, 4:] = target[2, 1:] = pad_id
    return logits, target


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("pad_id", [0, -100])
def test_equals_torch(pad_id, label_smoothing):
    logits, target = case(pad_id)
    total, count = summed_cross_entropy(logits, target, pad_id=pad_id, label_smoothing=label_smoothing)
    want = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=pad_id, label_smoothing=label_smoothing)
    assert count == (target != pad_id).sum() == 12
    torch.testing.assert_close(total / count, want, **CLOSE)
    (got_gradient,), (want_gradient,) = (torch.autograd.grad(x, logits) for x in (total / count, want))
    torch.testing.assert_close(got_gradient, want_gradient, **CLOSE)
    assert (got_gradient[target == pad_id] == 0).all()


def test_label_smoothing_by_its_definition():
    logits, target = case(0)
    log_p = logits.detach().log_softmax(-1)
    smooth = 0.9 * F.one_hot(target, 11).double() + 0.1 / 11
    want = -(smooth * log_p).sum(-1)[target != 0].sum()
    torch.testing.assert_close(summed_cross_entropy(logits, target, pad_id=0, label_smoothing=0.1)[0].detach(), want, **CLOSE)


@pytest.mark.parametrize("shape", [(3, 7), (0, 7), (3, 0)], ids=str)
def test_padding_alone_and_nothing_at_all_give_zero(shape):
    logits = torch.randn(*shape, 11, requires_grad=True)
    total, count = summed_cross_entropy(logits, torch.zeros(shape, dtype=torch.long), pad_id=0, label_smoothing=0.1)
    total.backward()
    assert total == 0 and count == 0 and (logits.grad == 0).all()


def test_without_pad_id_every_token_counts():
    logits, target = case(0)
    total, count = summed_cross_entropy(logits, target)
    assert count == target.numel()
    torch.testing.assert_close(total, F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), **CLOSE)


def test_half_precision_is_summed_in_float32():
    logits, target = case(0, torch.bfloat16)
    total, _ = summed_cross_entropy(logits, target, pad_id=0)
    assert total.dtype == torch.float32
    exact, _ = summed_cross_entropy(logits.double(), target, pad_id=0)
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=0)  # 2^-24 a term, 12 of them; a bfloat16 sum: 2^-9


def test_teacher_forcing_feeds_all_but_the_last_token_and_scores_all_but_the_first():
    seen = []
    logits = torch.randn(2, 4, 9, dtype=torch.float64)

    def model(*inputs):
        seen.extend(inputs)
        return logits

    source, target = torch.randint(1, 9, (2, 6)), torch.randint(1, 9, (2, 5))
    total, count = teacher_forcing(pad_id=0, label_smoothing=0.2)(model, (source, target))
    assert torch.equal(seen[0], source) and torch.equal(seen[1], target[:, :-1])
    assert torch.equal(total, summed_cross_entropy(logits, target[:, 1:], label_smoothing=0.2)[0]) and count == 8
    teacher_forcing()(model, (target,))  # a language model has no other input
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"target": torch.full((3, 7), 11)}, ValueError, r"target must hold tokens in \[0, 11\).*got 11"),
        ({"target": torch.full((3, 7), -100)}, ValueError, r"target must hold tokens in \[0, 11\).*got -100"),
        ({"target": torch.zeros(3, 6, dtype=torch.long)}, ValueError, r"target .*\(3, 6\), logits \(3, 7, 11\)"),
        ({"target": torch.zeros(3, 7)}, TypeError, "target must be a tensor of integers, got torch.float32"),
        ({"target": [1, 2]}, TypeError, "target must be a tensor of integers, got list"),
        ({"logits": torch.zeros(21, 11)}, ValueError, r"logits \(..., V\)"),
        ({"logits": torch.zeros(3, 7, 11, dtype=torch.long)}, TypeError, "logits must have a floating-point dtype"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be"),
    ],
)
def test_bad_input(change, error, text):
    logits, target = case(0)
    with pytest.raises(error, match=text):
        summed_cross_entropy(**({"logits": logits, "target": target, "pad_id": 0} | change))


@pytest.mark.parametrize("target", [torch.ones(4, dtype=torch.long), torch.ones(4, 1, dtype=torch.long)], ids=["1-D", "L=1"])
def test_a_target_needs_a_begin_token_and_another(target):
    with pytest.raises(ValueError, match=r"target of a batch must be \(B, L \+ 1\)"):
        teacher_forcing()(lambda x: x, (target,))


def test_the_mean_is_that_of_torch_and_0_of_nothing():
    logits, target = torch.randn(6, 5), torch.tensor([1, 2, 0, 4, 0, 3])
    want = torch.nn.functional.cross_entropy(logits, target, ignore_index=0, label_smoothing=0.1)
    torch.testing.assert_close(cross_entropy(logits, target, pad_id=0, label_smoothing=0.1), want)
    assert cross_entropy(logits, torch.zeros(6).long(), pad_id=0) == 0
