"""Times what the preparation above does not hold: de-duplication and the leak check, in one process."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from eagle3_kimi.prompts.conversations import normalise_row
from eagle3_kimi.prompts.files import read_rows
from eagle3_kimi.prompts.screening import Duplicates, EvaluationSets, words_of


def main(rows: Path) -> dict[str, float]:
    """Seconds of each step over all rows; every 100th conversation is an evaluation question too."""
    taken = dict.fromkeys(("seconds_words", "seconds_duplicates", "seconds_leaks"), 0.0)
    duplicates, evaluation, found = Duplicates(0.8), EvaluationSets(), {"duplicates": 0, "leaks": 0}
    for index, row in enumerate(read_rows(rows)):
        conversation = normalise_row(row).conversation
        if index % 100 == 0 and conversation is not None:
            evaluation.add_text("questions", conversation.prompt_text)
    for row in read_rows(rows):
        conversation = normalise_row(row).conversation
        if conversation is None:
            continue
        started = time.perf_counter()
        asked = [words_of(message["content"]) for message in conversation.messages if message["role"] == "user"]
        have_words = time.perf_counter()
        seen = duplicates.check(conversation.id, [word for words in asked for word in words])
        screened = time.perf_counter()
        leak = evaluation.find(asked)
        found["duplicates"] += seen is not None
        found["leaks"] += leak is not None
        for name, start, end in zip(
            taken, (started, have_words, screened), (have_words, screened, time.perf_counter()), strict=True
        ):
            taken[name] += end - start
    return {**taken, **found}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
