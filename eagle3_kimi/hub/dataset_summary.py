"""What a data set's card says: where the samples come from, how many, how long, and what was refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
from datasets import DatasetDict

from eagle3_kimi.hub.cards import public_name, render_histogram
from eagle3_kimi.schema import PROVENANCE


def summarise_samples(complete: DatasetDict, quarantine: DatasetDict) -> dict[str, Any]:
    """Values of the card's template, from the rows themselves."""
    reasoning = _values(complete, "num_reasoning_tokens")
    return {
        "splits": {name: len(rows) for name, rows in complete.items()},
        "complete": len(reasoning),
        "token_exact": sum(_values(complete, "token_exact")),
        "quarantined": sum(map(len, quarantine.values())),
        "refused": Counter(_values(quarantine, "reason")).most_common(),
        "provenance": _provenance(complete),
        "sources": Counter(_values(complete, "source")).most_common(),
        "tokens": {
            "prompt": sum(_values(complete, "num_prompt_tokens")),
            "reasoning": sum(reasoning),
            "output": sum(_values(complete, "num_output_tokens")),
        },
        "histogram": render_histogram(reasoning),
    }


def _values(samples: DatasetDict, column: str) -> list[Any]:
    return [value for table in _tables(samples, column) for value in table[column].to_pylist()]


def _provenance(samples: DatasetDict) -> list[dict[str, Any]]:
    """Each way in which samples were made, with their number; one, unless data sets were joined."""
    keys = [name for name in PROVENANCE if name != "seed"]
    counts: Counter[tuple[Any, ...]] = Counter()
    for table in _tables(samples, "provenance"):
        structs = table["provenance"].combine_chunks()
        columns = [structs.field(key).to_pylist() for key in keys]
        counts.update(zip(*columns, strict=True))
    made = [{**dict(zip(keys, values, strict=True)), "samples": count} for values, count in counts.most_common()]
    return [{**way, "model": public_name(way["model"])} for way in made]


def _tables(samples: DatasetDict, column: str) -> list[pa.Table]:
    return [rows.select_columns([column]).with_format("arrow")[:] for rows in samples.values()]
