"""Prepares ShareGPT rows with speculators 0.9.0: its own `load_and_preprocess_dataset`, one row per answer.

It renders over HTTP at a running vLLM server, twice an answer or more. To its advantage that call is replaced by the
same rendering in the worker itself: no server, no HTTP, the compiled template and the tokenizer of transformers.
"""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from measure import measured
from speculators.data_generation import preprocessing
from transformers import AutoTokenizer

tokenizer_of = cache(AutoTokenizer.from_pretrained)


def run(rows: Path, tokenizer_folder: str, output: Path, num_proc: int) -> dict[str, int]:
    """As its `prepare-data` command: prepare, then `save_to_disk`."""

    def render(endpoint: str, conversation: list[dict[str, Any]], **options: Any) -> list[int]:
        ids = tokenizer_of(tokenizer_folder).apply_chat_template(
            conversation,
            tools=options.get("tools"),
            add_generation_prompt=options["add_generation_prompt"],
            tokenize=True,
            return_dict=False,
        )
        return list(ids)[: options["truncate_prompt_tokens"]]

    preprocessing.render_conversation = render
    preprocessing.load_processor = lambda folder, **_: tokenizer_of(folder)  # a text model has no processor
    dataset, _ = preprocessing.load_and_preprocess_dataset(
        tokenizer_folder,
        [str(rows)],
        seq_length=32768,
        build_dataset_num_proc=num_proc,
        render_endpoint="in-process",
    )
    dataset.save_to_disk(str(output / "dataset"))
    return {"samples": len(dataset)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache_folder:
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(cache_folder)
        measured(run, sys.argv)
