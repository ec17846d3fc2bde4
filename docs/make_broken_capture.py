"""Writes captured responses with the faults of a real run: `python docs/make_broken_capture.py captured.jsonl`.

A client asked a server for 400 chat completions and stored each reply. The server ran without a reasoning parser, so
the thoughts are inside `content`. After a restart with the parser, the client read `reasoning_content` where this
server says `reasoning`, and filled in an empty string. Some answers were cut, some requests failed, some were stored
twice, and the client was killed in the middle of a line.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any


def build_rows() -> list[dict[str, Any]]:
    """One row a request, in the order in which the client stored them."""
    rng = random.Random(0)
    rows = []
    for index in range(400):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        thoughts = f"I add the tens, {a // 10 * 10 + b // 10 * 10}, and the ones, {a % 10 + b % 10}."
        message: dict[str, Any] = {"role": "assistant", "content": f"{thoughts}</think>{a} + {b} = {a + b}."}
        if index >= 370:  # after the restart
            message = {"role": "assistant", "content": f"{a} + {b} = {a + b}.", "reasoning_content": ""}
        choice = {"index": 0, "message": message, "finish_reason": "length" if index % 40 == 7 else "stop"}
        reply: dict[str, Any] = {"object": "chat.completion", "model": "kimi-k2.5", "choices": [choice]}
        if index % 130 == 100:
            reply = {"error": {"message": "the server is overloaded", "code": 503}}
        row = {"custom_id": f"request-{index}", "prompt": f"What is {a} + {b}?", "response": reply}
        rows += [row, row] if index % 100 == 50 else [row]
    return rows


def main(path: Path) -> None:
    """Writes the rows; the last line is torn."""
    lines = [json.dumps(row) for row in build_rows()]
    path.write_text("\n".join(lines)[:-25], encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
