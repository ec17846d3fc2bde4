"""Prepares ShareGPT rows with eagle3-kimi: one sample for each answer, its prompt as the served model would see it."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from measure import measured

from eagle3_kimi.chat import render_answer, render_prompt
from eagle3_kimi.prompts.conversations import Reading, normalise_row
from eagle3_kimi.prompts.files import read_rows
from eagle3_kimi.prompts.streams import OrderedPool

PRESET = "tiny-kimi"
READING = Reading(for_training=True)
SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8())})


@cache
def tokenizer_of(folder: str) -> Any:
    """The tokenizer, opened once in each worker."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


class Prepare:
    """What a worker does with one row; returns ids and the prompt's length, for each answer."""

    def __init__(self, tokenizer_folder: str) -> None:
        self.tokenizer_folder = tokenizer_folder

    def __call__(self, row: Any) -> list[tuple[np.ndarray, int]]:
        conversation = normalise_row(row, READING).conversation
        if conversation is None:
            return []
        tokenizer, messages = tokenizer_of(self.tokenizer_folder), conversation.messages
        samples = []
        for turn in conversation.turns:
            prompt = render_prompt(tokenizer, messages[:turn], tools=conversation.tools, preset=PRESET)
            answer = render_answer(tokenizer, messages[turn], preset=PRESET)
            samples.append((np.array(prompt + answer, dtype=np.int32), len(prompt)))
        return samples


def run(rows: Path, tokenizer_folder: str, output: Path, num_proc: int) -> dict[str, int]:
    """Writes one Arrow file; returns what is in it."""
    samples = tokens = 0
    with (
        OrderedPool(num_proc) as pool,
        pa.OSFile(str(output / "samples.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, SCHEMA) as writer,
    ):
        batch: list[tuple[np.ndarray, int]] = []
        for prepared in pool.map(Prepare(tokenizer_folder), read_rows(rows)):
            batch += prepared
            if len(batch) >= 1000:
                writer.write_batch(to_arrow(batch))
                samples, tokens, batch = samples + len(batch), tokens + sum(len(ids) for ids, _ in batch), []
        if batch:
            writer.write_batch(to_arrow(batch))
            samples, tokens = samples + len(batch), tokens + sum(len(ids) for ids, _ in batch)
    return {"samples": samples, "tokens": tokens}


def to_arrow(batch: list[tuple[np.ndarray, int]]) -> pa.RecordBatch:
    """Ids and masks as two list columns over one buffer each."""
    offsets = np.cumsum([0, *(len(ids) for ids, _ in batch)], dtype=np.int32)
    mask = np.ones(offsets[-1], dtype=np.uint8)
    for start, (_, length) in zip(offsets, batch, strict=False):
        mask[start : start + length] = 0
    ids = np.concatenate([ids for ids, _ in batch])
    return pa.RecordBatch.from_arrays(
        [pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, mask)], schema=SCHEMA
    )


if __name__ == "__main__":
    measured(run, sys.argv)
