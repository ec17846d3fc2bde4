from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_kimi.captures import AuditReport, Fault, Repair, Verdict, render, run_audit
from eagle3_kimi.captures.identity import IdentitySet
from eagle3_kimi.errors import UsageError
from eagle3_kimi.protocol import Reason
from tests.captures.records import chat, sglang


def write(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def reply(i: int, **message: Any) -> dict[str, Any]:
    fields = {"content": f"Answer {i}.", "reasoning": f"Thought {i}.", **message}
    return {"custom_id": f"q-{i}", "response": chat(fields.pop("content"), **fields)}


def read(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    raw = {"custom_id": "q-2", "prompt": "Why?", "response": sglang("Thought 2.</think>Answer 2.")}
    return write(
        tmp_path / "mixed.jsonl",
        reply(0),
        reply(1, reasoning=None),
        raw,
        reply(0),
        b'{"custom_id": "q-3", "resp',
        {"custom_id": "q-1", "error": {"message": "busy"}},
        reply(4, finish="length"),
    )


def test_every_row_is_counted_once(mixed: Path, tmp_path: Path) -> None:
    report = run_audit([str(mixed)], tmp_path / "out.jsonl", tmp_path / "refused.jsonl")
    assert (report.rows, report.duplicates, report.torn_tails) == (7, 1, 0)
    assert dict(report.verdicts) == {Verdict.ACCEPT: 1, Verdict.REPAIR: 1, Verdict.REJECT: 4}
    assert dict(report.reasons) == {
        Reason.OK: 1,
        Fault.MISSING_REASONING: 1,
        Repair.SPLIT_PREFILLED_THINK: 1,
        Fault.CORRUPT_LINE: 1,
        Fault.ERROR_BODY: 1,
        Reason.FINISH_LENGTH: 1,
    }
    assert (report.complete, report.responses, report.passed) == (2, 6, False)
    kept, refused = read(tmp_path / "out.jsonl"), read(tmp_path / "refused.jsonl")
    assert [(row["id"], row["line"], row["verdict"]) for row in kept] == [("q-0", 1, "accept"), ("q-2", 3, "repair")]
    assert (kept[1]["reasoning"], kept[1]["content"], kept[1]["prompt"]) == ("Thought 2.", "Answer 2.", "Why?")
    assert [row["token_exact"] for row in kept] == [False, False]
    assert [(row["line"], row["reason"]) for row in refused] == [
        (2, "missing_reasoning"),
        (4, "duplicate_dropped"),
        (5, "corrupt_line"),
        (6, "error_body"),
        (7, "finish_length"),
    ]
    source = mixed.read_bytes().split(b"\n")
    assert [row["record"].encode() for row in refused] == [source[row["line"] - 1] for row in refused]


def test_a_retry_supersedes_the_failed_row(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", {"custom_id": "q-0", "error": "busy"}, reply(1))
    again = write(tmp_path / "b.jsonl", reply(0))
    report = run_audit([str(first), str(again)])
    assert (report.rows, report.superseded, report.responses, report.complete_share) == (3, 1, 2, 1.0)
    assert report.passed


def test_bare_numbers_count_within_their_file(tmp_path: Path) -> None:
    rows = [{"id": i, "reasoning": f"T{i}.", "content": f"A{i}."} for i in range(3)]
    write(tmp_path / "a.jsonl", *rows)
    write(tmp_path / "b.jsonl", *rows, rows[0])
    report = run_audit([str(tmp_path)])
    assert (report.rows, report.duplicates) == (7, 1)


def test_files_by_pattern_folder_and_gzip(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    plain = write(tmp_path / "a.jsonl", reply(0))
    (tmp_path / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes().replace(b"q-0", b"q-9")))
    (tmp_path / "notes.md").write_text("no capture")
    assert run_audit([str(tmp_path)]).rows == 2
    assert run_audit([str(tmp_path / "**" / "*.gz")]).rows == 1
    assert run_audit([str(plain), str(tmp_path / "*.jsonl")]).rows == 1


def test_workers_find_what_one_process_finds(tmp_path: Path) -> None:
    rows: list[Any] = []
    for i in range(4000):
        kind = i % 5
        rows.append(
            [
                reply(i),
                reply(i, content=f"T.</think>{i}", reasoning=None),
                reply(i, finish="length"),
                reply(i - 3),
                reply(i, content="\u5ba2" * 2 + f"{i}" + "x" * 300),
            ][kind]
        )
    path = write(tmp_path / "many.jsonl", *rows, b'{"custom_id": "torn')
    one, two = (
        run_audit(
            [str(path)], tmp_path / f"o{n}", tmp_path / f"r{n}", processes=n, context={"prompt_suffix": "<think>"}
        )
        for n in (1, 2)
    )
    for name in (
        "rows",
        "bytes",
        "formats",
        "verdicts",
        "reasons",
        "duplicates",
        "superseded",
        "torn_tails",
        "examples",
    ):
        assert getattr(one, name) == getattr(two, name), name
    assert (tmp_path / "o1").read_bytes() == (tmp_path / "o2").read_bytes()
    assert (tmp_path / "r1").read_bytes() == (tmp_path / "r2").read_bytes()
    assert one.rows == one.verdicts.total() + one.duplicates + one.torn_tails
    assert len(read(tmp_path / "o1")) + len(read(tmp_path / "r1")) == one.rows


def test_a_torn_tail_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(reply(0)).encode() + b'\n{"custom_id": "q-1", "resp')
    report = run_audit([str(path)], quarantine=tmp_path / "refused.jsonl")
    assert (report.rows, report.torn_tails, report.complete_share) == (2, 1, 1.0)
    assert read(tmp_path / "refused.jsonl")[0]["record"] == '{"custom_id": "q-1", "resp'


SYSTEMATIC: dict[str, tuple[dict[str, Any], str]] = {
    "no reasoning parser": (
        {"content": "T.</think>A.", "reasoning": None},
        "all 40 rows: thoughts are inside `content`; the server ran without a reasoning parser",
    ),
    "wrong field": ({"reasoning": ""}, "all 40 rows: the reasoning is an empty string"),
    "thoughts not kept": ({"reasoning": None}, "all 40 rows: there is no reasoning in any field"),
    "token limit": ({"finish": "length"}, "all 40 rows: the answers were cut at the token limit"),
    "nothing": ({}, "all 40 responses are reasoning-complete"),
}


@pytest.mark.parametrize(("message", "sentence"), SYSTEMATIC.values(), ids=SYSTEMATIC.keys())
def test_the_systematic_fault_is_named(tmp_path: Path, message: dict[str, Any], sentence: str) -> None:
    path = write(tmp_path / "a.jsonl", *(reply(i, **message) for i in range(40)))
    report = run_audit([str(path)])
    assert report.diagnosis[0].startswith(sentence), report.diagnosis
    assert len(report.diagnosis) == 1


def test_thinking_switched_off_is_named(tmp_path: Path) -> None:
    request = {"chat_template_kwargs": {"thinking": False}}
    rows = [{**reply(i, reasoning=None), "request": request} for i in range(3)]
    report = run_audit([str(write(tmp_path / "a.jsonl", *rows))])
    assert "thinking was switched off" in report.diagnosis[0]


def test_single_faults_are_no_systematic_fault(tmp_path: Path) -> None:
    rows = [reply(i, finish="length" if i == 7 else "stop") for i in range(100)]
    report = run_audit([str(write(tmp_path / "a.jsonl", *rows))], min_complete=0.99)
    assert report.diagnosis == ["1 of 100 rows (1.0%): single faults, see the table"]
    assert report.passed


def test_the_rendered_report_names_everything(mixed: Path, tmp_path: Path) -> None:
    text = render(run_audit([str(mixed)], tmp_path / "out.jsonl", min_complete=0.5))
    for part in (
        "7 rows",
        "openai.chat.completion",
        "missing_reasoning",
        "split_prefilled_think",
        "2 of 6",
        "wanted 50%",
    ):
        assert part in text
    assert f"{mixed}:2:" in text
    assert "1 duplicate" in text
    assert str(tmp_path / "out.jsonl") in text
    text.encode()


def test_a_report_of_half_surrogates_can_be_printed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", reply(0, finish="\ud83d"), {"custom_id": "\ud83d", **reply(1)["response"]})
    report = run_audit([str(path)], tmp_path / "out.jsonl", tmp_path / "refused.jsonl")
    render(report).encode()
    assert read(tmp_path / "refused.jsonl")[0]["reason"] == "finish_unknown"
    assert read(tmp_path / "out.jsonl")[0]["id"] == "\ud83d"


def test_wrong_usage(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", reply(0))
    with pytest.raises(UsageError, match="no file of that name"):
        run_audit([str(tmp_path / "missing.jsonl")])
    with pytest.raises(UsageError, match="at least one"):
        run_audit([])
    with pytest.raises(UsageError, match="share from 0 to 1"):
        run_audit([str(path)], min_complete=95)
    with pytest.raises(UsageError, match="not an input"):
        run_audit([str(path)], out=path)
    with pytest.raises(UsageError, match="same file"):
        run_audit([str(path)], out=tmp_path / "o", quarantine=tmp_path / "o")
    (tmp_path / "b.jsonl").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="Parquet"):
        run_audit([str(tmp_path / "b.jsonl")], out=tmp_path / "o")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_an_empty_file_does_not_pass(tmp_path: Path) -> None:
    report = run_audit([str(write(tmp_path / "a.jsonl"))], min_complete=0.0)
    assert (report.rows, report.passed, report.diagnosis) == (0, False, ["no responses were found"])
    assert "0 of 0" in render(report)


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = write(tmp_path / "a.jsonl", reply(0), reply(1))
    run_audit([str(path)], progress=lambda rows, size: told.append((rows, size)))
    assert told == [(2, path.stat().st_size)]


def test_an_old_output_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = write(tmp_path / "out.jsonl", {"old": True})
    path = write(tmp_path / "a.jsonl", reply(0))

    def stop(rows: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_audit([str(path)], out=out, progress=stop)
    assert read(out) == [{"old": True}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out.jsonl"]


def test_identities_against_a_set() -> None:
    rng = np.random.default_rng(0)
    seen, reference = IdentitySet(), set()
    for size in (1, 5, 100, 3, 0, 1000, 7, 2):
        asked = rng.integers(0, 2000, 50, dtype=np.uint64)
        assert seen.contains(asked).tolist() == [int(i) in reference for i in asked]
        added = [int(i) for i in rng.integers(0, 2000, size)]
        seen.add(added)
        reference |= set(added)
    assert seen.contains(np.array([2**64 - 1], dtype=np.uint64)).tolist() == [False]


def test_the_package_imports_no_heavy_module() -> None:
    code = "import sys, eagle3_kimi.captures; print([m for m in ('torch', 'datasets', 'transformers', 'vllm') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == "[]"


def test_report_defaults() -> None:
    report = AuditReport(files=[], min_complete=1.0)
    assert (report.responses, report.complete_share, report.passed) == (0, 0.0, False)
