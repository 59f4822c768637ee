"""The demo: its data (the task is well-defined and nothing leaks into the test) and a short run from end to end."""

import random
from datetime import date, datetime

import pytest
import torch

for module in ("babel", "matplotlib.image", "tqdm"):
    pytest.importorskip(module)

import matplotlib.image  # noqa: E402

from fast_transformer import demo  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch.nn.Transformer about its own default

VARIANTS = pytest.mark.parametrize("nn_module", demo.VARIANTS.values(), ids=demo.VARIANTS)


@pytest.fixture(scope="module")
def vocabulary():
    return demo.Vocabulary()


@pytest.mark.parametrize(
    ("locale", "form", "text"),
    [
        ("en", "full", "Saturday, March 14, 1987"),
        ("en", "short", "3/14/87"),
        ("de", "long", "14. März 1987"),
        ("fr", "full", "samedi 14 mars 1987"),
        ("es", "long", "14 de marzo de 1987"),
        ("zh", "full", "1987年3月14日星期六"),
        ("ja", "medium", "1987/03/14"),
        ("ko", "long", "1987년 3월 14일"),
        ("ru", "long", "14 марта 1987 г."),
    ],
)
def test_a_known_date(locale, form, text):
    example = demo.write(date(1987, 3, 14), locale, form)
    assert example.text == text  # the no-break space before the Russian г. has become a plain one
    assert example.iso == "1987-03-14"


@pytest.mark.parametrize("style", demo.STYLES, ids="-".join)
@pytest.mark.parametrize("day", [date(1969, 1, 1), date(2024, 2, 29), date(2068, 12, 31)], ids=str)
def test_every_style_can_be_read_back(style, day, vocabulary):
    example = demo.write(day, *style)
    source, target = demo.collate([example], vocabulary)
    assert vocabulary.tokens[source[0, 0]] == f"<{style[0]}>"
    assert vocabulary.text(source[0, 1:].tolist()) == example.text
    assert target[0, 0] == vocabulary.BOS and target[0, -1] == vocabulary.EOS
    assert vocabulary.text(target[0].tolist()) == example.iso == day.strftime("%Y-%m-%d")
    assert str(day.day) in example.text and f"{day.year % 100:02}" in example.text


def test_two_digit_years_follow_the_posix_pivot():
    """A style is limited to 1969-2068 exactly when it writes 1901 and 2001 alike; strptime has the same pivot."""
    for style, years in demo.STYLES.items():
        alike = demo.write(date(1901, 1, 4), *style).text == demo.write(date(2001, 1, 4), *style).text
        assert alike == (years == range(1969, 2069)) and (alike or years == range(1900, 2100))
    assert {style for style, years in demo.STYLES.items() if len(years) == 100} >= {("en", "short"), ("de", "short")}
    for day in (date(1969, 5, 6), date(1999, 5, 6), date(2000, 5, 6), date(2068, 5, 6)):
        text = demo.write(day, "de", "short").text
        assert datetime.strptime(text, "%d.%m.%y").date() == day


def test_a_date_is_only_drawn_in_styles_that_tell_its_year():
    rng = random.Random(0)
    examples = [demo.draw(date(year, 7, 8), rng) for year in (1900, 1968, 2069, 2099) for _ in range(200)]
    assert all(len(demo.STYLES[e.style]) == 200 for e in examples)
    assert {e.style for e in (demo.draw(date(1969, 7, 8), rng) for _ in range(2000))} == set(demo.STYLES)


def test_no_held_out_date_is_trained_on(vocabulary):
    training, held_out = demo.split_dates(random.Random(1))
    assert len(held_out) == demo.HELD_OUT
    assert len(set(training) | set(held_out)) == len(training) + len(held_out) == (date(2100, 1, 1) - date(1900, 1, 1)).days
    stream = demo.batches(training, vocabulary, random.Random(1))
    seen = {vocabulary.text(row) for _ in range(16) for row in next(stream)[1].tolist()}
    assert len(seen) > 900 and seen.isdisjoint(day.isoformat() for day in held_out)


def test_same_seed_same_data(vocabulary):
    first, second = (demo.batches(demo.split_dates(random.Random(3))[0], vocabulary, random.Random(3)) for _ in range(2))
    for _ in range(3):
        torch.testing.assert_close(next(first), next(second), rtol=0, atol=0)


@VARIANTS
def test_neither_padding_nor_the_future_is_read(nn_module, vocabulary):
    torch.manual_seed(0)
    model = demo.DateReader(nn_module, len(vocabulary.tokens)).eval()
    short, long = (demo.write(date(1987, 9, 16), "en", form) for form in ("short", "full"))
    (alone, target), (together, _) = demo.collate([short], vocabulary), demo.collate([short, long], vocabulary)
    logits = model(alone, target)
    torch.testing.assert_close(model(together, target.expand(2, -1))[:1], logits, rtol=0, atol=1e-5)
    later = torch.cat((target[:, :5], target[:, 5:].flip(1)), dim=1)
    torch.testing.assert_close(model(alone, later)[:, :5], logits[:, :5], rtol=0, atol=1e-5)


@VARIANTS
def test_greedy_reading_follows_the_logits(nn_module, vocabulary):
    torch.manual_seed(0)
    model = demo.DateReader(nn_module, len(vocabulary.tokens)).eval()
    source, _ = demo.collate([demo.write(date(2001, 2, 3), locale, "long") for locale in demo.LOCALES], vocabulary)
    read = model.read(source)
    target = torch.cat((torch.full_like(read[:, :1], vocabulary.BOS), read[:, :-1]), dim=1)
    assert torch.equal(model(source, target).argmax(dim=-1), read)
    weights = demo.cross_attention(model, source, target)
    assert weights.shape == (len(source), read.shape[1], source.shape[1])
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:2]))
    assert (weights[(source == vocabulary.PAD)[:, None].expand_as(weights)] == 0).all()


def test_peak_memory_counts_what_is_alive_together():
    class Step:
        def step(self, source, target):
            for _ in range(3):  # one at a time
                torch.empty(1_000_000)
            both = torch.empty(1_000_000), torch.empty(2_000_000)
            del both

    assert demo.peak_memory(Step(), None, None) == pytest.approx(12e6, rel=0.01)


def test_a_short_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "HELD_OUT", 200)
    assert demo.main(["--steps", "3", "--out", str(tmp_path / "pictures")]) == 0
    printed = capsys.readouterr().out
    for line in ("difference of outputs", "step time", "peak memory of a step", "held-out dates: torch.nn", "ratio"):
        assert line in printed
    assert sum(" ok " in line or " WRONG " in line for line in printed.splitlines()) == 10
    height, width, _ = matplotlib.image.imread(tmp_path / "pictures" / "attention.png").shape
    assert 400 < height < width < 3000
