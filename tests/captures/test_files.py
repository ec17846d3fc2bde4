from __future__ import annotations

import codecs
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from eagle3_kimi.captures import Fault, FileVerdict, Repair, Verdict, judge_file, judge_records
from eagle3_kimi.captures.lines import Block, read_blocks
from eagle3_kimi.errors import UsageError
from eagle3_kimi.protocol import Reason
from tests.captures.records import chat, chunk


def row(name: str | None, content: str = "No.", reasoning: str | None = "Odd.", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "reasoning": reasoning}
    return {**({} if name is None else {"custom_id": name}), "message": message, **more}


def lines(*rows: Any, end: bytes = b"\n") -> bytes:
    return b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows) + end


A, B, C = row("a"), row("b"), row("c")
AB = lines(A, B)

CLEAN: dict[str, bytes] = {
    "lines": AB,
    "no newline at the end": AB.rstrip(b"\n"),
    "blank lines": b"\n" + AB.replace(b"\n", b"\n\n  \n"),
    "carriage returns": AB.replace(b"\n", b"\r\n"),
    "byte order mark": codecs.BOM_UTF8 + AB,
    "byte order mark in the middle": lines(A) + codecs.BOM_UTF8 + lines(B),
    "gzip": gzip.compress(AB),
    "two gzip members": gzip.compress(lines(A)) + gzip.compress(lines(B)),
    "gzip of a byte order mark": gzip.compress(codecs.BOM_UTF8 + AB),
    "UTF-16": AB.decode().encode("utf-16"),
    "UTF-16 in gzip": gzip.compress(AB.decode().encode("utf-16")),
    "array": json.dumps([A, B]).encode(),
    "array over several lines": json.dumps([A, B], indent=2).encode(),
    "array, one row a line": b"[\n" + b",\n".join([json.dumps(A).encode(), json.dumps(B).encode()]) + b"\n]\n",
    "pretty-printed records": (json.dumps(A, indent=1) + "\n" + json.dumps(B, indent=1)).encode(),
    "line and paragraph separators": lines(row("a", "x\u2028y\u2029z\u0085w"), B).decode().encode(),
    "raw separators": json.dumps(row("a", "x\u2028y\u2029z\u0085w\x1c"), ensure_ascii=False).encode()
    + b"\n"
    + lines(B),
    "NaN in a note": lines({**A, "score": float("nan")}, B),
    "escaped pair": lines(row("a", "\U0001f44b"), B),
    "form feed and vertical tab between": json.dumps(A).encode() + b"\n\x0b\x0c\n" + lines(B),
}


@pytest.mark.parametrize("data", CLEAN.values(), ids=CLEAN.keys())
def test_clean_files(data: bytes) -> None:
    file = judge_file(data)
    assert (file.verdict, file.reason, file.kept, file.dropped, file.line) == (
        Verdict.ACCEPT,
        Reason.OK,
        ["a", "b"],
        0,
        None,
    ), file


REPAIRED: dict[str, tuple[bytes, Repair, list[str], int]] = {
    "torn tail": (AB + b'{"custom_id": "c", "mess', Repair.TORN_TAIL_DROPPED, ["a", "b"], 1),
    "tail cut inside a character": (
        AB + '{"custom_id": "ca\u00e9'.encode()[:-1],
        Repair.TORN_TAIL_DROPPED,
        ["a", "b"],
        1,
    ),
    "zero bytes at the end": (AB + b"\0" * 64, Repair.TORN_TAIL_DROPPED, ["a", "b"], 1),
    "cut array": (json.dumps([A, B, C], indent=2).encode()[:-60], Repair.TORN_TAIL_DROPPED, ["a", "b"], 1),
    "duplicate": (lines(A, B, A), Repair.DUPLICATE_DROPPED, ["a", "b"], 1),
    "same id, other sample": (lines(A, B, row("a", "Nein.")), Repair.DUPLICATE_DROPPED, ["a", "b"], 1),
    "three times": (lines(A, A, A, B), Repair.DUPLICATE_DROPPED, ["a", "b"], 2),
    "a retry after a failure": (
        lines({"custom_id": "a", "error": {"message": "busy"}}, B, A),
        Repair.DUPLICATE_DROPPED,
        ["b", "a"],
        1,
    ),
    "a failure after success": (
        lines(A, B, {"custom_id": "a", "error": {"message": "busy"}}),
        Repair.DUPLICATE_DROPPED,
        ["a", "b"],
        1,
    ),
    "a newline was lost": (
        lines(json.dumps(A).encode() + json.dumps(B).encode()),
        Repair.JOINED_LINES_SPLIT,
        ["a", "b"],
        0,
    ),
    "rows that need a repair": (
        lines(row("a", "Odd.</think>No.", None), B),
        Repair.SPLIT_PREFILLED_THINK,
        ["a", "b"],
        0,
    ),
}


@pytest.mark.parametrize(("data", "repair", "kept", "dropped"), REPAIRED.values(), ids=REPAIRED.keys())
def test_repaired_files(data: bytes, repair: Repair, kept: list[str], dropped: int) -> None:
    file = judge_file(data)
    assert (file.verdict, file.reason, file.kept, file.dropped) == (Verdict.REPAIR, repair, kept, dropped), file


REFUSED: dict[str, tuple[bytes, Fault | Reason, int | None, list[str]]] = {
    "broken line": (lines(A, b'{"custom_id": "x", "mess', B), Fault.CORRUPT_LINE, 2, ["a", "b"]),
    "broken last line, written whole": (lines(A, b'{"custom_id": "x", "mess'), Fault.CORRUPT_LINE, 2, ["a"]),
    "raw newline in a string": (lines(b'{"custom_id": "x", "message": "a', b'b"}', B), Fault.CORRUPT_LINE, 1, ["b"]),
    "torn line with the next behind it": (
        lines(A, b'{"custom_id": "x", "m' + json.dumps(B).encode()),
        Fault.CORRUPT_LINE,
        2,
        ["a"],
    ),
    "bytes that are no UTF-8": (lines(A, b'{"custom_id": "x\xff"}', B), Fault.CORRUPT_LINE, 2, ["a", "b"]),
    "surrogate bytes": (lines(A, b'{"custom_id": "\xed\xa0\xbd"}', B), Fault.CORRUPT_LINE, 2, ["a", "b"]),
    "escaped half of a pair": (lines(A, row("x", "Hi \ud83d"), B), Fault.LONE_SURROGATE, 2, ["a", "b"]),
    "nested without end": (lines(A, b'{"a":' * 100_000, B), Fault.CORRUPT_LINE, 2, ["a", "b"]),
    "a number": (lines(A, b"5", B), Fault.NOT_A_RESPONSE, 2, ["a", "b"]),
    "a row without thoughts": (lines(A, row("x", "No.", None), B), Fault.MISSING_REASONING, 2, ["a", "b"]),
    "a failed request": (lines({"custom_id": "x", "error": {"message": "busy"}}, A), Fault.ERROR_BODY, 1, ["a"]),
    "empty": (b"", Fault.EMPTY_FILE, None, []),
    "white space": (b" \n\n", Fault.EMPTY_FILE, None, []),
    "only a torn line": (b'{"custom_id": "a', Fault.EMPTY_FILE, 1, []),
    "broken array": (
        b"[" + json.dumps(A).encode() + b', {"custom_id" "b"}, ' + json.dumps(C).encode() + b"]",
        Fault.CORRUPT_LINE,
        2,
        ["a"],
    ),
}


@pytest.mark.parametrize(("data", "reason", "line", "kept"), REFUSED.values(), ids=REFUSED.keys())
def test_faults_are_told_with_their_line(data: bytes, reason: Any, line: int | None, kept: list[str]) -> None:
    file = judge_file(data)
    assert (file.verdict, file.reason, file.line, file.kept) == (Verdict.REJECT, reason, line, kept), file


def test_a_cut_gzip_file_keeps_what_came_before() -> None:
    rows = [row(f"q{i}", f"Answer {i * 7919}.") for i in range(2000)]
    file = judge_file(gzip.compress(lines(*rows))[:-400])
    assert file.verdict is Verdict.REPAIR
    assert 0 < len(file.kept) < 2000
    assert file.kept == [r["custom_id"] for r in rows[: len(file.kept)]]


def test_a_gzip_file_cut_between_rows_is_torn_as_well() -> None:
    packer = zlib.compressobj(wbits=31)
    data = packer.compress(AB) + packer.flush(zlib.Z_FULL_FLUSH)  # no end of the gzip member
    file = judge_file(data)
    assert (file.reason, file.kept, file.dropped) == (Repair.TORN_TAIL_DROPPED, ["a", "b"], 1)


def test_a_damaged_gzip_file_is_refused() -> None:
    data = bytearray(gzip.compress(lines(*(row(f"q{i}", f"Answer {i * 7919}.") for i in range(2000)))))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    file = judge_file(bytes(data))
    assert (file.verdict, file.reason) == (Verdict.REJECT, Fault.CORRUPT_LINE)


def test_streams_in_a_file() -> None:
    def events(content: str, name: str) -> str:
        chunks = [{**c, "id": name} for c in (chunk(reasoning="Odd."), chunk(content=content), chunk(finish="stop"))]
        return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks)

    text = ": ping\n\n" + events("A.", "1") + "data: [DONE]\n\n" + events("B.", "2") + events("C.", "3")
    file = judge_file(text.encode())
    assert [v.content for r in file.rows for v in r.verdicts] == ["A.", "B.", "C."]
    assert file.format == "openai.chat.completion.chunks"


def test_an_array_of_chunks_is_one_stream_and_of_messages_one_conversation() -> None:
    stream = judge_file(
        json.dumps([chunk(reasoning="Odd."), chunk(content="No."), chunk(finish="stop")], indent=1).encode()
    )
    talk = judge_file(json.dumps([{"role": "user", "content": "?"}, A["message"]]).encode())
    assert [(f.verdict, len(f.rows)) for f in (stream, talk)] == [(Verdict.ACCEPT, 1), (Verdict.ACCEPT, 1)]


def test_blocks_end_at_lines_and_keep_their_numbers() -> None:
    rows = [row(f"q{i}", f"Answer {i}. " * (1 + i % 3)) for i in range(300)]
    blocks = list(read_blocks(lines(*rows), size=1000))
    assert len(blocks) > 20
    assert b"".join(block.data for block in blocks) == lines(*rows)
    assert blocks[3].first_line == 1 + sum(block.data.count(b"\n") for block in blocks[:3])
    assert judge_file(lines(*rows)).kept == [f"q{i}" for i in range(300)]
    assert list(read_blocks(b'{"a":1}\n{"b":', size=4))[-1] == Block(2, b'{"b":', unterminated=True)


@pytest.mark.parametrize("data", [b"PAR1....", b"PK\x03\x04....", b"BZh9....", b"\x28\xb5\x2f\xfd...."])
def test_packed_files_are_named(data: bytes) -> None:
    with pytest.raises(UsageError, match="expected JSON, came"):
        judge_file(data)


def test_a_file_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(AB)
    assert judge_file(tmp_path / "a.jsonl").kept == ["a", "b"]
    assert judge_file(str(tmp_path / "a.jsonl")).kept == ["a", "b"]


def reply(content: str) -> dict[str, Any]:
    return {"response": chat(content, reasoning=f"Think of {content}")}


def kept_of(file: FileVerdict) -> tuple[Verdict, int, int]:
    return file.verdict, len(file.kept), file.dropped


def test_who_a_record_is() -> None:
    one, two = reply("One."), reply("Two.")
    assert kept_of(judge_records([one, two], ["Say one", "Say two"])) == (Verdict.ACCEPT, 2, 0)
    assert kept_of(judge_records([one, one], ["Say one", "Say it again"])) == (Verdict.ACCEPT, 2, 0)
    assert kept_of(judge_records([one, two], ["Say one", "Say one"])) == (Verdict.REPAIR, 1, 1)
    assert kept_of(judge_records([one, one])) == (Verdict.REPAIR, 1, 1)
    assert kept_of(judge_records([one, two])) == (Verdict.ACCEPT, 2, 0)
    assert kept_of(judge_records([{**one, "prompt": "1?"}, {**two, "prompt": "1?"}])) == (Verdict.REPAIR, 1, 1)
    same_id = [{**one, "custom_id": "q", "prompt": "1?"}, {**two, "custom_id": "q", "prompt": "2?"}]
    assert kept_of(judge_records(same_id)) == (Verdict.ACCEPT, 2, 0)  # ids that start again in every run
    samples = [{**one, "custom_id": "q", "sample_index": 0}, {**two, "custom_id": "q", "sample_index": 1}]
    assert kept_of(judge_records(samples)) == (Verdict.ACCEPT, 2, 0)


def test_prompts_that_do_not_match() -> None:
    file = judge_records([reply("One."), reply("Two.")], ["Say one"])
    assert (file.verdict, file.reason, file.kept) == (Verdict.REJECT, Fault.PROMPTS_DO_NOT_MATCH, [])


def test_a_prompt_excuses_its_own_record_only() -> None:
    file = judge_records([reply("\ufffd"), reply("\ufffd")], ["What is \ufffd?", "What?"])
    assert [r.verdicts[0].reason for r in file.rows] == [Reason.OK, Reason.REPLACEMENT_CHARACTER]
