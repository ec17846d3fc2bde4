"""Keeps a conversation once, and none that an evaluation set knows.

Exact duplicates: the same words from the user. Near duplicates: MinHash over runs of five words, estimated
Jaccard similarity at or above the threshold (Broder 1997; locality-sensitive hashing by `rensa`). Leaks: a run of
13 words shared with an evaluation set (Brown et al. 2020, appendix C), or the whole text where it is shorter.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3_kimi.errors import DataError
from eagle3_kimi.prompts.files import BadJson, read_rows
from eagle3_kimi.prompts.shapes import PROMPT_KEYS

SHINGLE_WORDS = 5
LEAK_WORDS = 13
_NUM_PERMUTATIONS = 128
_NUM_BANDS = 32  # 4 rows a band: a pair at 0.8 is looked at with probability 1 - (1 - 0.8**4)**32 > 0.9999
_EVALUATION_KEYS = (*PROMPT_KEYS, "turns", "messages", "conversations", "Problem", "Question")

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\U00020000-\U0003ffff]|[^\W_]+")
_SCRIPTS = (
    "LATIN", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "CYRILLIC", "ARABIC",
    "DEVANAGARI", "HEBREW", "GREEK", "THAI", "BENGALI", "TAMIL", "TELUGU",
)  # fmt: skip
_JAPANESE = frozenset({"HIRAGANA", "KATAKANA"})


class Duplicates:
    """Remembers conversations; flat in their length (32 hash values a band each), linear in their number.

    Args:
        near_threshold: Jaccard similarity from which two prompts are the same; None looks for exact ones only.
    """

    def __init__(self, near_threshold: float | None = 0.8) -> None:
        self._exact: set[bytes] = set()
        self._near: Any = None
        if near_threshold is not None:
            from rensa import RMinHashDeduplicator

            self._near = RMinHashDeduplicator(near_threshold, _NUM_PERMUTATIONS, use_lsh=True, num_bands=_NUM_BANDS)

    def check(self, key: str, words: list[str]) -> str | None:
        """`exact` or `near` where an earlier conversation had these words; else remembers them under `key`."""
        digest = hashlib.blake2b(" ".join(words).encode(), digest_size=16).digest()
        if digest in self._exact:
            return "exact"
        self._exact.add(digest)
        if self._near is None or len(words) < SHINGLE_WORDS:
            return None
        from rensa import RMinHash

        sketch = RMinHash(num_perm=_NUM_PERMUTATIONS, seed=42)
        sketch.update(list(ngrams_of(words, SHINGLE_WORDS)))
        return None if self._near.add(key, sketch) else "near"


class EvaluationSets:
    """The word runs of evaluation sets, each with the set it came from."""

    def __init__(self) -> None:
        self._runs: dict[str, str] = {}
        self._whole: dict[str, str] = {}

    def add_file(self, name: str, file: Path) -> int:
        """Reads one evaluation file; returns the number of texts found.

        Raises:
            DataError: no row of the file has a text that is understood.
        """
        before, keys = 0, []
        for row in read_rows(file):
            if isinstance(row, BadJson) or not isinstance(row, Mapping):
                raise DataError(f"{file}: the evaluation set {name} has a row that is no JSON object")
            keys = list(row)
            for text in _texts_of(row):
                self.add_text(name, text)
                before += 1
        if not before:
            raise DataError(
                f"{file}: no text for the evaluation set {name}; keys found: {', '.join(keys) or 'none'}; "
                f"keys understood: {', '.join(_EVALUATION_KEYS)}"
            )
        return before

    def add_text(self, name: str, text: str) -> None:
        """Adds one question."""
        words = words_of(text)
        if len(words) < LEAK_WORDS:
            self._whole.setdefault(" ".join(words), name)
        for run in ngrams_of(words, LEAK_WORDS):
            self._runs.setdefault(run, name)

    def find(self, texts: Iterable[list[str]]) -> str | None:
        """The evaluation set that shares a run of words with one of `texts`, each given as its words, or None."""
        for words in texts:
            if len(words) < LEAK_WORDS:
                found = self._whole.get(" ".join(words))
            else:
                found = next((self._runs[run] for run in ngrams_of(words, LEAK_WORDS) if run in self._runs), None)
            if found:
                return found
        return None


def _texts_of(row: Mapping[str, Any]) -> Iterable[str]:
    for key in _EVALUATION_KEYS:
        value = row.get(key)
        for item in value if isinstance(value, list) else [value]:
            text = item.get("content", item.get("value")) if isinstance(item, Mapping) else item
            if isinstance(text, str) and text.strip():
                yield text


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
