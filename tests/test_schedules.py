"""The schedules against their formulas."""

import math

import pytest
import torch

from fast_transformer.training import cosine, noam


def test_noam_by_the_formula():
    rate = noam(512, 4000)
    for step in (0, 1, 10, 3998, 3999, 4000, 99_999):
        number = step + 1  # the paper's
        assert rate(step) == pytest.approx(min(number / math.sqrt(4000) ** 3, 1 / math.sqrt(number)) / math.sqrt(512))
    assert 0 < rate(0) < rate(1) and max(map(rate, range(10_000))) == rate(3999) == pytest.approx(7e-4, rel=0.01)
    assert noam(512, 4000, scale=2.0)(7) == pytest.approx(2 * rate(7))


def test_cosine_without_warm_up_is_torch_s():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.0)
    theirs, ours = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.3), cosine(50, peak=3.0, end=0.3)
    for step in range(51):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_cosine_with_warm_up():
    rate = cosine(100, 10, peak=2.0)
    values = [rate(step) for step in range(100)]
    assert values[:11] == pytest.approx([2.0 * (step + 1) / 11 for step in range(11)])
    assert values[55] == pytest.approx(1.0)  # half-way from 10 to 100
    assert values.index(max(values)) == 10 and min(values) > 0
    assert values[10:] == sorted(values[10:], reverse=True)
    assert rate(100) == pytest.approx(0) and rate(1000) == rate(100)


@pytest.mark.parametrize("schedule", [noam(64, 7), cosine(20, 5, peak=1.0)])
def test_torch_s_lambda_lr_takes_them(schedule):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    torch_s = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for step in range(10):
        assert torch_s.get_last_lr() == [0.5 * schedule(step)]
        optimizer.step()
        torch_s.step()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: noam(0, 4000), ValueError, "d_model must be at least 1, got 0"),
        (lambda: noam(512, 0), ValueError, "warmup must be at least 1, got 0"),
        (lambda: noam(512, 2.5), TypeError, "warmup must be an integer, got 2.5"),
        (lambda: cosine(0, peak=1.0), ValueError, "steps must be at least 1, got 0"),
        (lambda: cosine(10, 10, peak=1.0), ValueError, r"warmup must be in \[0, steps\), steps is 10, got 10"),
        (lambda: cosine(10, -1, peak=1.0), ValueError, "warmup must be"),
    ],
)
def test_bad_input(call, error, text):
    with pytest.raises(error, match=text):
        call()
