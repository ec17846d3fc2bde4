"""The builder with the transformers engine on the tiny target: nothing here is faked."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from eagle3_kimi.builders import kimi_reasoning
from eagle3_kimi.builders.kimi_reasoning import KimiReasoning

import eagle3_kimi
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.prompts import load_conversations
from tests.builders.conftest import Generated, count_attempts, rows_of, write_prompts

SCRIPT = kimi_reasoning.__file__


def test_every_planned_turn_is_complete_quarantined_or_not_run(generated: Generated) -> None:
    complete = [row for split in generated.samples.values() for row in split]
    refused = [row for split in generated.quarantine.values() for row in split]
    conversations = {c.id: c for c in load_conversations([generated.options["data_files"]])}
    assert any(len(c.turns) == 2 for c in conversations.values())  # tool loops
    seen = {(row["conversation_id"], row["turn"]): row for row in complete + refused}
    assert len(seen) == len(complete) + len(refused) == len(count_attempts(generated.journal))
    assert eagle3_kimi.validate(generated.samples) == len(complete) > len(conversations) / 2
    for name, conversation in conversations.items():
        run = [turn for turn in range(len(conversation.turns)) if (name, turn) in seen]
        assert run == list(range(len(run)))
        if len(run) < len(conversation.turns):  # after a refused turn, or without the recorded call, nothing is run
            assert "reason" in seen[name, run[-1]] or any(m["role"] == "tool" for m in conversation.messages)


def test_all_turns_of_a_conversation_are_in_one_split(generated: Generated) -> None:
    conversations = {name: set(split["conversation_id"]) for name, split in generated.samples.items()}
    assert not conversations["train"] & conversations["validation"]
    assert all(conversations.values())


def test_a_row_holds_what_the_target_produced(generated: Generated) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(generated.options["target"])
    row = generated.samples["train"][0]
    text = tokenizer.decode(row["output_token_ids"])
    reasoning = row["spans"][0]
    assert tokenizer.decode(row["output_token_ids"][reasoning["start"] : reasoning["end"]]) == row["reasoning"]
    assert text.startswith(row["reasoning"])
    assert text.endswith("<|im_end|>")
    assert tokenizer.decode(row["prompt_token_ids"]).endswith("<|im_assistant|>assistant<|im_middle|><think>")
    assert row["provenance"]["engine"] == "transformers"
    assert row["provenance"]["temperature"] == 1.0  # defaults are recorded too


@pytest.mark.parametrize("spelling", ["kimi_reasoning", "builders/kimi_reasoning.py", SCRIPT])
@pytest.mark.parametrize("load", [datasets.load_dataset, eagle3_kimi.load_dataset], ids=["datasets", "eagle3_kimi"])
def test_every_spelling_gives_the_same_rows_and_generates_nothing(
    generated: Generated, load: Any, spelling: str
) -> None:
    before = generated.journal.read_bytes()
    assert rows_of(load(spelling, **generated.options)) == rows_of(generated.samples)
    assert generated.journal.read_bytes() == before


def test_the_name_is_cached_once_whoever_loads(generated: Generated) -> None:
    again = datasets.load_dataset("kimi_reasoning", **generated.options)
    assert again.cache_files == generated.samples.cache_files
    assert again["train"]._fingerprint == generated.samples["train"]._fingerprint


@pytest.mark.multiprocess
def test_two_workers_replay_the_same_rows(generated: Generated, tmp_path: Path) -> None:
    before = generated.journal.read_bytes()
    replayed = datasets.load_dataset("kimi_reasoning", num_proc=2, **generated.elsewhere(tmp_path))
    assert len(replayed.cache_files["train"]) == 2  # two workers wrote
    assert rows_of(replayed) == rows_of(generated.samples)
    assert generated.journal.read_bytes() == before


def test_a_stream_gives_the_same_rows(generated: Generated, tmp_path: Path) -> None:
    stream = datasets.load_dataset("kimi_reasoning", streaming=True, **generated.elsewhere(tmp_path))
    assert [row["id"] for row in stream["train"]] == generated.samples["train"]["id"][:]


def test_map_goes_on_refusing_after_a_reload(generated: Generated) -> None:
    reloaded = datasets.load_dataset("kimi_reasoning", **generated.options)["train"]
    with pytest.raises(DataError):
        reloaded.map(lambda row: {"reasoning": ""}, load_from_cache_file=False)
    with pytest.raises(DataError, match="token ids must lie in"):  # the target's own vocabulary size
        reloaded.map(lambda row: {"output_token_ids": [1023, 1024]}, load_from_cache_file=False)


def test_adding_a_prompt_generates_that_prompt_only(generated: Generated, tmp_path: Path) -> None:
    before = generated.journal.read_bytes()
    prompts = tmp_path / "prompts.jsonl"
    old = Path(generated.options["data_files"]).read_text()
    prompts.write_text('{"prompt": "What is 31 + 14?"}\n' + old)
    more = eagle3_kimi.load_dataset("kimi_reasoning", **generated.elsewhere(tmp_path, data_files=str(prompts)))
    after = generated.journal.read_bytes()
    assert after.startswith(before)
    assert after[len(before) :].count(b"\n") == 1
    added = {row["id"] for split in more.values() for row in split}
    assert added >= {row["id"] for split in generated.samples.values() for row in split}


def test_retry_rejected_moves_samples_out_of_the_quarantine(generated: Generated, tmp_path: Path) -> None:
    # At 20 tokens everything is cut; with a journal of its own, nothing else is touched.
    prompts = str(write_prompts(tmp_path / "prompts.jsonl", 3, seed=6))
    changes = {"data_files": prompts, "journal_dir": str(tmp_path / "journals"), "min_reasoning_tokens": 15}
    options = generated.elsewhere(tmp_path / "cache", **changes)
    first = eagle3_kimi.load_dataset("kimi_reasoning", **options)
    options["retry_rejected"] = True
    samples = eagle3_kimi.load_dataset("kimi_reasoning", **options)
    refused = eagle3_kimi.load_dataset("kimi_reasoning", "quarantine", **options)
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    attempts = count_attempts(journal)
    complete = {row["id"] for split in samples.values() for row in split}
    kept = {row["id"] for split in first.values() for row in split}
    # Rows in = complete + quarantined, though two configurations were prepared; only `complete` retried.
    assert len(complete) + sum(map(len, refused.values())) == len(attempts)
    assert kept <= complete
    assert all(attempts[name] == 1 for name in kept)
    assert all(attempts[row["id"]] == 2 for split in refused.values() for row in split if row["id"] in attempts)


def config_id(**options: Any) -> str:
    return KimiReasoning(**options).config_id


def test_the_cache_key_covers_what_decides_rows_and_nothing_else(generated: Generated, tmp_path: Path) -> None:
    base = config_id(**generated.options)
    explicit = {"temperature": 1.0, "top_p": 0.95, "seed": 0, "max_num_seqs": 7, "dtype": "float32"}
    moved = tmp_path / "other_name.jsonl"
    moved.write_bytes(Path(generated.options["data_files"]).read_bytes())
    assert config_id(**generated.options, **explicit) == base
    assert config_id(**{**generated.options, "data_files": str(moved), "journal_dir": str(tmp_path)}) == base
    others = [{"temperature": 0.5}, {"seed": 1}, {"samples_per_prompt": 2}, {"min_reasoning_tokens": 9}]
    ids = {config_id(**{**generated.options, **change}) for change in [*others, {"validation_fraction": 0.1}]}
    moved.write_text(moved.read_text() + '{"prompt": "one more"}\n')
    ids.add(config_id(**{**generated.options, "data_files": str(moved)}))
    assert len(ids | {base}) == 7


def test_an_empty_split_is_a_data_set_without_rows(generated: Generated, tmp_path: Path) -> None:
    options = generated.elsewhere(tmp_path, validation_fraction=0.0)
    for name in ("complete", "quarantine"):
        for _ in range(2):  # prepared, then from the cache
            loaded = eagle3_kimi.load_dataset("kimi_reasoning", name, **options)
            assert len(loaded["validation"]) == 0
            assert loaded["validation"].column_names == loaded["train"].column_names


def test_refused_prompts_are_counted_and_the_others_go_on(
    generated: Generated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = Path(generated.options["data_files"]).read_text().splitlines()[:3]
    prompts.write_text("\n".join([*lines, '{"messages": [{"role": "wizard", "content": "x"}]}', "{", lines[0]]) + "\n")
    with caplog.at_level(logging.WARNING, logger=kimi_reasoning.logger.name):
        loaded = eagle3_kimi.load_dataset("kimi_reasoning", **generated.elsewhere(tmp_path, data_files=str(prompts)))
    assert "3 rows of prompts are refused" in caplog.text
    expected = {json.dumps(row) for split in generated.samples.values() for row in split}
    assert {json.dumps(row) for split in loaded.values() for row in split} <= expected


def test_a_damaged_journal_stops_with_its_line(generated: Generated, tmp_path: Path) -> None:
    journals = tmp_path / "journals"
    journals.mkdir()
    copy = journals / generated.journal.name
    copy.write_bytes(generated.journal.read_bytes().replace(b'"reason":"ok"', b'"reason":"OK"', 1))
    with pytest.raises(DataError, match=r"\.jsonl, line \d+: the checksum does not fit"):
        eagle3_kimi.load_dataset("kimi_reasoning", **generated.elsewhere(tmp_path, journal_dir=str(journals)))


def test_options_that_cannot_be_are_refused(generated: Generated, tmp_path: Path) -> None:
    file = generated.options["data_files"]
    with pytest.raises(UsageError, match=r"makes the splits itself; got \['a', 'b'\]"):
        eagle3_kimi.load_dataset("kimi_reasoning", **generated.elsewhere(tmp_path, data_files={"a": file, "b": file}))
    with pytest.raises(UsageError, match="features of its own"):
        datasets.load_dataset(
            "kimi_reasoning", features=datasets.Features({"id": datasets.Value("string")}), **generated.options
        )
    changes = {"engine": "sglang", "journal_dir": str(tmp_path / "j")}
    with pytest.raises(UsageError, match="unknown engine 'sglang'; known: server, transformers, vllm"):
        eagle3_kimi.load_dataset("kimi_reasoning", **generated.elsewhere(tmp_path, **changes))
