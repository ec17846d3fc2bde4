from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.prompts.mix import EvaluationSet, load_mix
from eagle3_kimi.prompts.mix_builder import build_mix, iter_conversations
from eagle3_kimi.prompts.ordered_map import ordered_map
from eagle3_kimi.prompts.report import tables_of
from eagle3_kimi.prompts.shuffling import share_out, shuffled

MIXES = Path(__file__).parents[2] / "builders" / "mixes"
WORDS = [f"w{index}" for index in range(400)]


def prompt(index: int) -> str:
    return " ".join(WORDS[(index * 7 + step * (index + 1)) % 400] for step in range(20))


def write_mix(folder: Path, **changes: Any) -> Path:
    """Two sources: 60 prompts, and 30 ShareGPT rows of which two cannot be kept."""
    rows = [{"prompt": prompt(index), "domain": "math"} for index in range(60)]
    chats = [{"conversations": [{"from": "human", "value": prompt(100 + index)}]} for index in range(28)]
    chats += [
        {"conversations": [{"from": "narrator", "value": "Once."}]},
        {"conversations": [{"from": "human", "value": prompt(3)}]},
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    mix = {
        "seed": 1,
        "sources": [
            {"name": "problems", "files": ["problems.jsonl"], "count": 60},
            {"name": "chats", "files": ["chats.jsonl"], "count": 100, "domain": "chat", "language": "en"},
        ],
        **changes,
    }
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump(mix))
    return path


def test_a_mix_becomes_an_artefact_with_its_report(tmp_path: Path) -> None:
    report = build_mix(write_mix(tmp_path), tmp_path / "out")
    conversations = list(iter_conversations([tmp_path / "out"]))
    assert len(conversations) == report["rows"] == 88
    assert report["by_source"]["chats"] == {"rows": 28, "turns": 28, "length": 28 * 20}
    assert report["by_domain"]["math"]["rows"] == 60
    assert report["by_language"] == {
        "en": {"rows": 28, "turns": 28, "length": 560},
        "latin": {"rows": 60, "turns": 60, "length": 1200},
    }
    assert report["refused"] == {"chats": {"unknown_role": 1, "duplicate": 1}}
    assert report["short"] == {"chats": 72}
    assert report["read"] == {"problems": 60, "chats": 30}
    assert sum(report["histogram"]["rows"]) == 88
    listed = [json.loads(line) for line in (tmp_path / "out" / "refused.jsonl").read_text().splitlines()]
    assert {(row["row"], row["reason"]) for row in listed} == {(29, "unknown_role"), (30, "duplicate")}
    assert {source.source for source in conversations[:20]} == {"problems", "chats"}  # merged, not one after the other
    console = Console(width=100)
    with console.capture() as capture:
        for table in tables_of(report):
            console.print(table)
    assert "unknown_role" in capture.get()


def test_the_artefact_depends_on_the_seed_and_not_on_processes(tmp_path: Path) -> None:
    mix = write_mix(tmp_path)
    texts = {}
    for name, options in {"one": {}, "two": {"num_proc": 2}, "seed": {"seed": 2}}.items():
        build_mix(mix, tmp_path / name, **options)  # type: ignore[arg-type]
        texts[name] = (tmp_path / name / "prompts.jsonl").read_bytes()
    assert texts["one"] == texts["two"] != texts["seed"]
    assert sorted(texts["one"].splitlines()) == sorted(texts["seed"].splitlines())  # all rows are taken here


def test_a_finished_artefact_is_kept_until_something_changes(tmp_path: Path) -> None:
    mix, out = write_mix(tmp_path), tmp_path / "out"
    build_mix(mix, out)
    (out / "prompts.jsonl").write_text("")  # a rebuild would fill it again
    build_mix(mix, out)
    assert (out / "prompts.jsonl").read_text() == ""
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": prompt(200)}) + "\n")
    assert build_mix(mix, out)["rows"] == 89


def test_leaks_are_refused_and_counted_by_set(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": prompt(7)}))
    mix = write_mix(tmp_path, evaluation_sets=[{"name": "gsm8k", "files": ["gsm8k.jsonl"]}])
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": prompt(104)}))
    own = EvaluationSet(name="own", files=(str(tmp_path / "own.jsonl"),))
    report = build_mix(mix, tmp_path / "out", evaluation_sets=[own])
    assert report["leaked"] == {"gsm8k": 1, "own": 1}
    assert report["rows"] == 86


def test_long_prompts_are_refused_never_cut(tmp_path: Path) -> None:
    mix = write_mix(tmp_path, max_prompt_tokens=20)
    with pytest.raises(UsageError, match="--target"):
        build_mix(mix, tmp_path / "out")
    report = build_mix(mix, tmp_path / "out", count_tokens=lambda c: 21 if c.source == "chats" else 20)
    assert (report["rows"], report["length_unit"]) == (60, "tokens")
    assert report["refused"]["chats"]["too_long"] == 29


def test_a_source_of_unknown_shape_stops_the_run(tmp_path: Path) -> None:
    mix = write_mix(tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"text": "Go."}\n')
    with pytest.raises(DataError, match=r"source chats .*keys found: text; keys understood"):
        build_mix(mix, tmp_path / "out")
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_bad_file_stops_the_run_or_is_named_in_the_report(tmp_path: Path) -> None:
    mix = write_mix(tmp_path)
    (tmp_path / "chats.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"chats\.jsonl cannot be read"):
        build_mix(mix, tmp_path / "out")
    report = build_mix(mix, tmp_path / "out", skip_bad_files=True)
    assert report["rows"] == 60
    assert "chats.jsonl" in report["skipped_files"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sede": 1}, "sede"),
        ({"seed": "x"}, "seed"),
        ({"sources": []}, "name each source once"),
        ({"sources": [{"name": "a", "files": ["x"]}]}, "either `count` or `weight`"),
        ({"sources": [{"name": "a", "count": 1}]}, "either `hub` or `files`"),
        ({"sources": [{"name": "a", "files": ["x"], "weight": 1}]}, "`size` and weighted"),
        ({"sources": [{"name": "a", "files": ["x"], "count": 1}]}, "no file"),
    ],
)
def test_a_mix_that_cannot_be_used_is_one_sentence(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_mix(write_mix(tmp_path, **changes), tmp_path / "out")


@pytest.mark.parametrize("name", ["10k", "88k", "tiny"])
def test_shipped_mixes_are_read(name: str) -> None:
    mix = load_mix(MIXES / f"{name}.yaml")
    assert sum(mix.counts.values()) == (mix.size or 128)


def hub_mix(folder: Path, lock: dict[str, Any] | None) -> Path:
    """A Hub data set that is a local folder, which `datasets` streams in the same way."""
    data = folder / "data_set"
    data.mkdir()
    rows = [{"prompt": prompt(index), "kind": "odd" if index % 2 else "even"} for index in range(10)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "hub", "hub": str(data), "count": 3, "keep": {"kind": ["even"]}}
    path = write_mix(folder, sources=[source])
    if lock is not None:
        (folder / "mix.lock.json").write_text(json.dumps(lock))
    return path


def test_a_locked_hub_source_is_streamed_at_its_revision(tmp_path: Path) -> None:
    mix = hub_mix(tmp_path, {"version": 1, "revisions": {str(tmp_path / "data_set"): "main"}})
    report = build_mix(mix, tmp_path / "out")
    assert (report["rows"], report["revisions"]) == (3, {"hub": "main"})
    even = {prompt(index) for index in range(0, 10, 2)}
    assert {c.prompt_text for c in iter_conversations([tmp_path / "out"])} <= even


def test_a_damaged_lock_is_not_guessed_around(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mix\.lock\.json is not a lock file of version 1"):
        build_mix(hub_mix(tmp_path, {"revisions": []}), tmp_path / "out")


def test_without_a_lock_and_without_a_network_it_says_so(tmp_path: Path) -> None:
    mix = write_mix(tmp_path, sources=[{"name": "chat", "hub": "someone/something", "count": 1}])
    code = "import sys; from pathlib import Path; from eagle3_kimi.prompts.mix_builder import build_mix\n"
    code += "build_mix(Path(sys.argv[1]), Path('out'))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code, str(mix)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "source chat: the Hub gave no revision for the data set someone/something (main)" in run.stderr


def test_shares_add_up() -> None:
    assert share_out(10, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}
    assert share_out(0, {"a": 1}) == {"a": 0}


def test_shuffling_a_stream() -> None:
    items = list(range(1000))
    first = list(shuffled(items, seed=1, buffer_size=64))
    assert sorted(first) == items != first
    assert first == list(shuffled(items, seed=1, buffer_size=64)) != list(shuffled(items, seed=2, buffer_size=64))


def test_ordered_map_reads_no_further_than_its_window() -> None:
    read = 0

    def count() -> Any:
        nonlocal read
        for read in range(1, 100_001):
            yield -read

    results = ordered_map(abs, count(), num_proc=2)
    assert [next(results) for _ in range(300)] == list(range(1, 301))
    results.close()  # type: ignore[attr-defined]
    assert read <= 256 * 4 * 2 + 256
