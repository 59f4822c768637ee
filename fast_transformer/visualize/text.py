"""Text in pictures: tokens that can be seen, in fonts that have their characters.

matplotlib draws a box for a character its fonts lack. So the default fonts are searched first, glyph by glyph, then all
installed ones; what none of them has is written as U+4E2D, with a warning that says which font to install.
"""

import re
import unicodedata
import warnings
from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter

from matplotlib import font_manager, get_cachedir

SYMBOLS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
PLAIN = {"␣": "_", "⏎": "\\n", "⇥": "\\t"}  # for fonts that lack the symbols
LONGEST = 24  # characters of a label
CJK = {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC", "FULLWIDTH", "HALFWIDTH"}


def visible(token: str) -> str:
    """Make whitespace and other invisible characters of a token visible, and the empty token, too."""
    return "".join(map(_visible, token)) or "''"


def _visible(character: str) -> str:
    invisible = character.isspace() or unicodedata.category(character) in ("Cc", "Cf", "Cs")
    return SYMBOLS.get(character) or (_escape(character) if invisible else character)


def _escape(character: str) -> str:
    return f" U+{ord(character):04X} "


def printable(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the texts as they can be drawn, and the font families to draw them in.

    Warns once about all the characters that no installed font has.
    """
    texts = list(texts)
    characters = frozenset("".join(texts)) - {" ", "\n"}
    families = list(font_manager.FontProperties().get_family())
    missing = characters
    for family in families:
        missing -= _covered(font_manager.findfont(font_manager.FontProperties(family=[family])), characters)
    missing, more = _search(missing)
    unknown = sorted(missing - PLAIN.keys())
    if unknown:
        _warn(unknown)
    table = {ord(character): PLAIN.get(character) or _escape(character) for character in missing}
    return [re.sub(" +", " ", text.translate(table)).strip() for text in texts], families + more


def shorten(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


@lru_cache(maxsize=4096)
def _covered(path: str, characters: frozenset[str]) -> frozenset[str]:
    try:
        charmap = font_manager.get_font(path).get_charmap()
    except (OSError, RuntimeError):  # a broken file, or one that is gone
        return frozenset()
    return frozenset(character for character in characters if ord(character) in charmap)


def _search(missing: frozenset[str]) -> tuple[frozenset[str], list[str]]:
    """Look for characters in all installed fonts: those still missing, and the families that have the others."""
    chosen = []
    while missing:
        best, covered = None, frozenset()
        for entry in _regular_fonts():
            found = _covered(entry.fname, missing)
            if len(found) > len(covered):
                best, covered = entry, found
            if covered == missing:
                break
        if best is None:
            break
        chosen.append(best.name)
        missing -= covered
    return missing, chosen


def _regular_fonts() -> list[font_manager.FontEntry]:
    """One upright entry of every family, the nearest to regular weight; without fonts that draw a box for everything."""
    weights = font_manager.weight_dict  # by name, as in entries that a user has added
    entries = sorted(
        font_manager.fontManager.ttflist,
        key=lambda e: (e.style != "normal", abs(weights.get(e.weight, e.weight) - 400), e.fname),
    )
    families = {}
    for entry in entries:
        if "lastresort" not in entry.name.replace(" ", "").lower():
            families.setdefault(entry.name, entry)
    return sorted(families.values(), key=attrgetter("name"))


def _warn(unknown: list[str]) -> None:
    scripts = sorted({unicodedata.name(character, "unnamed").split()[0] for character in unknown})
    wanted = "Noto Sans CJK (Debian: fonts-noto-cjk)" if CJK & set(scripts) else "a Noto font of that script"
    some = "".join(unknown[:20]) + ("..." if len(unknown) > 20 else "")
    warnings.warn(
        f"no installed font has {some} ({', '.join(scripts)}); written as U+... instead. Install a font that has them, such as "
        f"{wanted}, and delete matplotlib's list of fonts in {get_cachedir()}",
        stacklevel=5,
    )
