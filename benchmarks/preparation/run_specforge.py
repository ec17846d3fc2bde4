"""Prepares ShareGPT rows with SpecForge 0.2.0: its own `prepare_prompt_tasks`, one row per conversation.

Its template `kimi-k2-instruct`: with `kimi-k2-thinking` it passes `enable_thinking`, which Kimi's template ignores.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from measure import measured
from specforge.data.prompt_builder import prepare_prompt_tasks
from transformers import AutoTokenizer


def run(rows: Path, tokenizer_folder: str, output: Path, num_proc: int) -> dict[str, int]:
    """Its cache file is the output."""
    tasks = prepare_prompt_tasks(
        rows,
        AutoTokenizer.from_pretrained(tokenizer_folder),
        chat_template="kimi-k2-instruct",
        max_length=32768,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=str(output),
        cache_key="prepared",
        num_proc=num_proc,
    )
    return {"samples": len(tasks)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(cache)
        measured(run, sys.argv)
