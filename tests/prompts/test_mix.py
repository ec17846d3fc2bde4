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

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.prompts.conversations import Conversation, normalise_row
from eagle3_kimi.prompts.files import load_conversations
from eagle3_kimi.prompts.lengths import TokenCounter
from eagle3_kimi.prompts.mix import EvaluationSet, load_mix, share_out
from eagle3_kimi.prompts.mix_builder import build_mix
from eagle3_kimi.prompts.report import render_html, tables_of
from eagle3_kimi.prompts.streams import OrderedPool, shuffled

MIXES = Path(__file__).parents[2] / "builders" / "mixes"
WORDS = [f"w{index}" for index in range(400)]


def prompt(index: int) -> str:
    return " ".join(WORDS[(index * 7 + step * (index + 1)) % 400] for step in range(20))


def chat(text: str) -> Conversation:
    return Conversation(id="x", messages=({"role": "user", "content": text},))


def texts_of(artefact: Path) -> list[str]:
    return [conversation.prompt_text for conversation in load_conversations([artefact / "prompts.jsonl"])]


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
    conversations = list(load_conversations([tmp_path / "out" / "prompts.jsonl"]))
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
    page = (tmp_path / "out" / "report.html").read_text()
    assert page == render_html(report)
    assert "chats.jsonl, row 29: conversations[0]: the role &#39;narrator&#39; is not one of" in page
    assert "http" not in page  # self-contained


def test_the_artefact_depends_on_the_seed_and_not_on_processes(tmp_path: Path, count_tokens: TokenCounter) -> None:
    mix = write_mix(tmp_path, max_prompt_tokens=10_000)
    written = {}
    for name, options in {"one": {}, "two": {"num_proc": 2}, "seed": {"seed": 2}}.items():
        build_mix(mix, tmp_path / name, count_tokens=count_tokens, **options)  # type: ignore[arg-type]
        written[name] = {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
    assert set(written["one"]) == {"prompts.jsonl", "refused.jsonl", "report.json", "report.html"}
    assert written["one"] == written["two"]
    one, seed = written["one"]["prompts.jsonl"], written["seed"]["prompts.jsonl"]
    assert one != seed
    assert sorted(one.splitlines()) == sorted(seed.splitlines())  # all rows are taken here


def test_a_mix_of_which_nothing_is_left_is_an_error(tmp_path: Path) -> None:
    mix = write_mix(tmp_path, sources=[{"name": "chats", "files": ["chats.jsonl"], "count": 9, "prompt_field": "x"}])
    with pytest.raises(DataError, match=r"no conversation is left of 30 rows; .*refused\.jsonl"):
        build_mix(mix, tmp_path / "out")
    assert len((tmp_path / "out" / "refused.jsonl").read_text().splitlines()) == 30


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


def test_long_prompts_are_refused_never_cut(tmp_path: Path, count_tokens: TokenCounter) -> None:
    lengths = [count_tokens(chat(prompt(index))) for index in range(60)]
    limit = sorted(lengths)[29]
    mix = write_mix(tmp_path, max_prompt_tokens=limit)
    with pytest.raises(UsageError, match="--target"):
        build_mix(mix, tmp_path / "out")
    report = build_mix(mix, tmp_path / "out", count_tokens=count_tokens)
    kept = [length for length in lengths if length <= limit]
    assert report["length_unit"] == "tokens"
    tally = report["by_source"]["problems"]
    assert (tally["rows"], tally["length"]) == (len(kept), sum(kept))
    assert report["refused"]["problems"] == {"too_long": 60 - len(kept)}
    assert all(text in {prompt(i) for i in range(200)} for text in texts_of(tmp_path / "out"))
    larger = build_mix(mix, tmp_path / "out", count_tokens=count_tokens, max_prompt_tokens=10_000)
    assert larger["rows"] == 88


def test_a_prompt_is_measured_as_the_target_sees_its_last_turn(count_tokens: TokenCounter) -> None:
    messages = [
        {"role": "user", "content": "Sort 3 1 2."},
        {"role": "assistant", "content": "1 2 3"},
        {"role": "user", "content": "Add 2 and 3."},
    ]
    longest = normalise_row({"messages": [*messages, {"role": "assistant", "content": "5"}]}).conversation
    tokenizer = count_tokens.target.load_tokenizer()
    rendered = render_prompt(tokenizer, messages, preset="tiny-kimi")
    assert longest is not None
    assert count_tokens(longest) == len(rendered)


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
    assert set(texts_of(tmp_path / "out")) <= even


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


def test_a_pool_keeps_the_order_and_reads_no_further_than_its_window() -> None:
    read = 0

    def count() -> Any:
        nonlocal read
        for read in range(1, 100_001):
            yield -read

    with OrderedPool(2) as pool:
        results = pool.map(abs, count())
        assert [next(results) for _ in range(300)] == list(range(1, 301))
        results.close()  # type: ignore[attr-defined]
        assert read <= 256 * 4 * 2 + 256
        assert list(pool.map(abs, [-1, -2])) == [1, 2]  # the pool serves the next source
