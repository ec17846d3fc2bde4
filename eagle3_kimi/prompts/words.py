"""Words of a text in any script, and their n-grams: what duplicates and leaks are measured in."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff]|[^\W_]+")
_SCRIPTS = (
    "LATIN", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "CYRILLIC", "ARABIC",
    "DEVANAGARI", "HEBREW", "GREEK", "THAI", "BENGALI", "TAMIL", "TELUGU",
)  # fmt: skip
_JAPANESE = frozenset({"HIRAGANA", "KATAKANA"})


def words_of(text: str) -> list[str]:
    """Words without case, accents' encodings or punctuation; scripts without spaces give one word a character.

    >>> words_of("Natalia's 2 cats. 两只猫")
    ['natalia', 's', '2', 'cats', '两', '只', '猫']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def ngrams_of(words: list[str], size: int) -> Iterator[str]:
    """Every run of `size` words, joined; none where there are fewer."""
    return (" ".join(words[start : start + size]) for start in range(len(words) - size + 1))


def script_of(text: str, *, sample: int = 400) -> str:
    """The script most letters of the beginning are in (`latin`, `cjk`, `japanese`, ...), or ``."""
    counts: Counter[str] = Counter()
    for character in text[:sample]:
        if character.isalpha():
            script = "LATIN" if character.isascii() else unicodedata.name(character, "").split(" ")[0]
            counts[script if script in _SCRIPTS else "OTHER"] += 1
    if not counts:
        return ""
    if any(counts[kana] for kana in _JAPANESE):
        return "japanese"
    return counts.most_common(1)[0][0].lower()
