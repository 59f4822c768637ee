"""The demo: its data (the task is well-defined and nothing leaks into the test) and a short run from end to end."""

import random
from datetime import date, datetime

import pytest
import torch

for module in ("babel", "matplotlib.image", "safetensors", "tqdm"):
    pytest.importorskip(module)

import matplotlib.image  # noqa: E402

from fast_transformer.demo import __main__ as demo  # noqa: E402
from fast_transformer.demo import dates, rnn  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),  # torch.nn.Transformer about its own default
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def vocabulary():
    return dates.Vocabulary()


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
    example = dates.write(date(1987, 3, 14), locale, form)
    assert example.text == text  # the no-break space before the Russian г. has become a plain one
    assert example.iso == "1987-03-14"


@pytest.mark.parametrize("style", dates.STYLES, ids="-".join)
@pytest.mark.parametrize("day", [date(1969, 1, 1), date(2024, 2, 29), date(2068, 12, 31)], ids=str)
def test_every_style_can_be_read_back(style, day, vocabulary):
    example = dates.write(day, *style)
    source, target = dates.collate([[example]], vocabulary)
    assert vocabulary.tokens[source[0, 0]] == f"<{style[0]}>"
    assert vocabulary.text(source[0, 1:].tolist()) == example.text
    assert target[0, 0] == dates.BOS and target[0, -1] == dates.EOS
    assert vocabulary.text(target[0].tolist()) == example.iso == day.strftime("%Y-%m-%d")
    assert str(day.day) in example.text and f"{day.year % 100:02}" in example.text


def test_two_digit_years_follow_the_posix_pivot():
    """A style is limited to 1969-2068 exactly when it writes 1901 and 2001 alike; strptime has the same pivot."""
    for style, years in dates.STYLES.items():
        alike = dates.write(date(1901, 1, 4), *style).text == dates.write(date(2001, 1, 4), *style).text
        assert alike == (years == range(1969, 2069)) and (alike or years == range(1900, 2100))
    assert {style for style, years in dates.STYLES.items() if len(years) == 100} >= {("en", "short"), ("de", "short")}
    for day in (date(1969, 5, 6), date(1999, 5, 6), date(2000, 5, 6), date(2068, 5, 6)):
        text = dates.write(day, "de", "short").text
        assert datetime.strptime(text, "%d.%m.%y").date() == day


def test_a_date_is_only_drawn_in_styles_that_tell_its_year():
    rng = random.Random(0)
    examples = [dates.draw(date(year, 7, 8), rng) for year in (1900, 1968, 2069, 2099) for _ in range(200)]
    assert all(len(dates.STYLES[e.style]) == 200 for e in examples)
    assert {e.style for e in (dates.draw(date(1969, 7, 8), rng) for _ in range(2000))} == set(dates.STYLES)


def test_no_held_out_date_is_trained_on(vocabulary):
    training, held_out = dates.split_dates(random.Random(1))
    assert len(held_out) == dates.HELD_OUT
    assert len(set(training) | set(held_out)) == len(training) + len(held_out) == (date(2100, 1, 1) - date(1900, 1, 1)).days
    batches = dates.batches(training, vocabulary)
    seen = {vocabulary.text(row) for epoch in (0, 1) for _, target in batches(epoch) for row in target.tolist()}
    assert len(seen) > 900 and seen.isdisjoint(day.isoformat() for day in held_out)


def test_same_epoch_same_data(vocabulary):
    first, second = (dates.batches(dates.split_dates(random.Random(3))[0], vocabulary, most=2) for _ in range(2))
    for epoch in (0, 1, 0):
        torch.testing.assert_close(first(epoch), second(epoch), rtol=0, atol=0)
    assert not torch.equal(first(0)[0][1], first(1)[0][1])


def test_sentences_of_several_dates(vocabulary):
    sentence = [dates.write(date(1987, 3, 14), "en", "short"), dates.write(date(2001, 2, 3), "zh", "long")]
    alone = [dates.write(date(1999, 5, 6), "de", "short")]
    source, target = dates.collate([sentence, alone], vocabulary)
    assert vocabulary.text(target[0].tolist()) == dates.answer(sentence) == "1987-03-14 2001-02-03"
    assert source.shape[1] == dates.length(sentence) and (source[1, dates.length(alone) :] == dates.PAD).all()
    assert [vocabulary.tokens[n] for n in source[0] if vocabulary.tokens[n].startswith("<")] == ["<en>", "<zh>"]


def test_variants_start_alike(vocabulary):
    torch.manual_seed(0)
    ours = demo.date_reader(len(vocabulary.tokens))
    theirs = demo.with_torch_nn(ours)
    assert type(theirs.transformer) is torch.nn.Transformer and theirs.head.weight is theirs.source.tokens.weight
    batch = dates.collate([[dates.write(date(1987, 9, 16), "en", form)] for form in ("short", "full")], vocabulary)
    assert max(demo.differences([theirs, ours], batch)) < 1e-12  # a few thousand roundings of 2^-53


def test_accuracy_counts_dates_in_their_places(vocabulary):
    class Reader(torch.nn.Module):
        """Reads the first date of a sentence right, and says it once more in the place of every other."""

        pad_id = dates.PAD

        def begin(self, inputs, *, bos_id):
            self.at, self.answers = 0, dict.fromkeys(range(len(inputs)))
            return inputs.new_full((len(inputs), 1), bos_id), self

        def step(self, tokens, state):
            logits = torch.zeros(len(tokens), len(vocabulary.tokens))
            for row, sentence in enumerate(sentences):
                text = " ".join([sentence[0].iso] * len(sentence))
                logits[row, vocabulary.number[text[self.at]] if self.at < len(text) else dates.EOS] = 9.0
            self.at += 1
            return logits

    days = [date(1987, 3, 14), date(2001, 2, 3), date(1999, 5, 6)]
    sentences = [[dates.write(day, "en", "full") for day in days[:n]] for n in (1, 2, 3)]
    shares = rnn.accuracies(Reader(), sentences, vocabulary)
    assert shares == [1.0, 1 / 2, 1 / 3]
    lengths, accuracy = rnn.by_length(sentences, shares)
    assert len(lengths) == 3 and accuracy == pytest.approx(shares)
    assert rnn.by_length(sentences[:1] * 2 + sentences[:1], [1.0, 0.0, 0.5])[1] == [0.5]


def test_peak_memory_counts_what_is_alive_together():
    class Learner:
        optimizer, step = torch.optim.SGD([torch.zeros(1)]), 0

        def fit(self, batches, steps):
            for _ in range(3):  # one at a time
                torch.empty(1_000_000)
            both = torch.empty(1_000_000), torch.empty(2_000_000)
            del both

    assert demo.peak_memory(Learner(), None) == pytest.approx(12e6, rel=0.01)


def test_a_short_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dates, "HELD_OUT", 200)
    assert demo.main(["--steps", "3", "--out", str(tmp_path / "pictures")]) == 0
    printed = capsys.readouterr().out
    for line in ("difference of outputs", "step time", "peak memory of a step", "held-out dates: torch.nn", "ratio"):
        assert line in printed
    assert sum(" ok " in line or " WRONG " in line for line in printed.splitlines()) == 10
    height, width, _ = matplotlib.image.imread(tmp_path / "pictures" / "attention.png").shape
    assert 300 < height < width < 3000


def test_a_short_comparison_of_models(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rnn, "SENTENCES", 12)
    assert demo.main(["--rnn", "--steps", "2", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("dates read right, by length") == 4
    height, width, _ = matplotlib.image.imread(tmp_path / "rnn.png").shape
    assert (height, width) == (600, 1050)


def test_no_steps_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--steps", "0", "--out", str(tmp_path)])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err
