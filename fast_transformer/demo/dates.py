"""The task of the demo: random dates, written in eight languages, to be read as ISO dates.

Babel's CLDR data writes random dates of 1900 to 2099 in the full, long, medium and short format of eight locales:
`<fr> samedi 14 mars 1987` -> `1987-03-14`. Two things make the task well-defined. A locale token leads each date, since 3/4/05
means March in English and April in Spanish. And where the CLDR pattern has a two-digit year (`yy`) only dates of 1969 to 2068
are drawn, so that the century follows from POSIX's pivot: 69 to 99 are 19xx, 00 to 68 are 20xx.
"""

import random
import re
from collections.abc import Callable, Iterable
from datetime import date, timedelta
from functools import lru_cache
from typing import NamedTuple

import torch
from babel import Locale
from babel.dates import format_date
from torch import Tensor, nn

BATCH, POOL = 64, 8  # sentences of a batch; batches of an epoch, sorted by length together
HELD_OUT = 2000  # dates kept for the test
PAD, BOS, EOS = range(3)  # token numbers
LOCALES, FORMS = ("zh", "en", "de", "fr", "es", "ja", "ko", "ru"), ("full", "long", "medium", "short")


def readable_years(locale: str, form: str) -> range:
    """Return the years of which a date in this style says which one it means; see the module docstring."""
    pattern = re.sub("'[^']*'", "", Locale.parse(locale).date_formats[form].pattern)  # quoted parts are literal text
    return range(1969, 2069) if re.search("y+", pattern)[0] == "yy" else range(1900, 2100)


STYLES = {(locale, form): readable_years(locale, form) for locale in LOCALES for form in FORMS}


class Example(NamedTuple):
    style: tuple[str, str]  # locale and form
    text: str
    iso: str


Sentence = list[Example]  # one date, or several in a row
Batches = Callable[[int], list[tuple[Tensor, Tensor]]]


def write(day: date, locale: str, form: str) -> Example:
    """Write a date in one style; every kind of space (Russian has a narrow no-break one) becomes a plain space."""
    return Example((locale, form), " ".join(format_date(day, form, locale).split()), day.isoformat())


def draw(day: date, rng: random.Random) -> Example:
    """Write a date in a random style that is unambiguous for its year."""
    return write(day, *rng.choice([style for style, years in STYLES.items() if day.year in years]))


def split_dates(rng: random.Random) -> tuple[list[date], list[date]]:
    """Return all dates of 1900 to 2099 in random order, as (training, held out): no date is in both."""
    first = date(1900, 1, 1)
    days = [first + timedelta(n) for n in range((date(2100, 1, 1) - first).days)]
    rng.shuffle(days)
    return days[HELD_OUT:], days[:HELD_OUT]


class Vocabulary:
    """Numbers for the tokens of sources and targets: three special ones, one per locale, and all characters."""

    def __init__(self):
        days = [date(2024, 1, 1) + timedelta(5 * n) for n in range(73)]  # every month and weekday
        letters = {letter for style in STYLES for day in days for letter in write(day, *style).text} | set("0123456789- ")
        self.tokens = ["<pad>", "<bos>", "<eos>", *(f"<{locale}>" for locale in LOCALES), *sorted(letters)]
        self.number = {token: n for n, token in enumerate(self.tokens)}

    def numbers(self, tokens: Iterable[str]) -> Tensor:
        return torch.tensor([self.number[token] for token in tokens])

    def text(self, numbers: list[int]) -> str:
        """Return the tokens of a sequence up to its end token as one string, without the special ones."""
        end = numbers.index(EOS) if EOS in numbers else len(numbers)
        return "".join(self.tokens[n] for n in numbers[:end] if n > EOS)


def collate(sentences: list[Sentence], vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return sources (B, S) and targets (B, L + 1) as token numbers, both padded at the right."""
    sources = [vocabulary.numbers(token for e in dates for token in (f"<{e.style[0]}>", *e.text)) for dates in sentences]
    targets = [vocabulary.numbers(("<bos>", *answer(dates), "<eos>")) for dates in sentences]
    return tuple(nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=PAD) for x in (sources, targets))


def answer(sentence: Sentence) -> str:
    return " ".join(example.iso for example in sentence)


def batches(days: list[date], vocabulary: Vocabulary, most: int = 1) -> Batches:
    """Return a function epoch -> its batches of sentences of 1 to `most` dates; sorted by length, so that little is padding."""

    @lru_cache(maxsize=2)  # a Trainer that goes on asks for the last epoch once more
    def epoch_batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
        rng = random.Random(epoch)
        sentences = [[draw(day, rng) for day in rng.choices(days, k=rng.randint(1, most))] for _ in range(POOL * BATCH)]
        sentences.sort(key=length)
        starts = rng.sample(range(0, len(sentences), BATCH), POOL)
        return [collate(sentences[start : start + BATCH], vocabulary) for start in starts]

    return epoch_batches


def length(sentence: Sentence) -> int:
    """Tokens of the source."""
    return sum(1 + len(example.text) for example in sentence)
