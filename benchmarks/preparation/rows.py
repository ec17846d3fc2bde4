"""ShareGPT-style rows for the comparison: the same rows for the same seed, of any number, in flat memory.

The vocabulary is 4,000 made-up words with Zipf-like frequencies; lengths are spread as in chat data (log-normal).
Every tenth row has a system turn; conversations have one to three answers.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_SYLLABLES = ("ka", "lo", "mi", "ren", "su", "ta", "vel", "no", "pra", "shi", "du", "ong", "ber", "ix", "qua", "el")


def write_rows(path: Path, count: int, seed: int = 0) -> None:
    """Writes `count` rows as JSONL."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(4000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            file.write(json.dumps(_row(index, rng, words, weights)) + "\n")


def _row(index: int, rng: random.Random, words: list[str], weights: list[float]) -> dict[str, Any]:
    def text(mean: int) -> str:
        length = max(3, int(rng.lognormvariate(0, 0.6) * mean))
        sentence = rng.choices(words, weights, k=length)
        for at in range(11, length, 12):
            sentence[at] += "."
        return " ".join(sentence).capitalize() + f" ({index})"

    turns = [{"from": "system", "value": text(20)}] if index % 10 == 0 else []
    for _ in range(rng.choice((1, 1, 2, 3))):
        turns.append({"from": "human", "value": text(30)})
        turns.append({"from": "gpt", "value": text(100)})
    return {"id": f"row-{index}", "conversations": turns}
