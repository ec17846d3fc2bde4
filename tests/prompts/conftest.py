from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_kimi.prompts.lengths import TokenCounter
from eagle3_kimi.target import resolve_target
from eagle3_kimi.tiny.problems import generate_problems
from eagle3_kimi.tiny.tokenizer import VOCAB_SIZE, build_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target folder without weights: what measuring prompts needs."""
    folder = tmp_path_factory.mktemp("target")
    build_tokenizer(list(generate_problems(200, seed=0))).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return folder


@pytest.fixture(scope="session")
def count_tokens(tiny_tokenizer_folder: Path) -> TokenCounter:
    return TokenCounter(resolve_target(tiny_tokenizer_folder))
