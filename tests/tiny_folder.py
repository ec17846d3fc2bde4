"""A target folder without weights: tokenizer, template and config of the tiny target, for what only reads those."""

from __future__ import annotations

import json
from pathlib import Path

from eagle3_kimi.tiny.problems import generate_problems
from eagle3_kimi.tiny.tokenizer import VOCAB_SIZE, build_tokenizer


def write_tiny_folder(folder: Path) -> Path:
    build_tokenizer(list(generate_problems(200, seed=0))).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return folder
