from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3_kimi.captures.progress import AuditProgress
from eagle3_kimi.chat import render_answer, render_prompt
from tests.captures.records import chat, vllm

_MAIN = """
import sys
from eagle3_kimi.cli import main
try:
    main()
finally:
    print("heavy:", [m for m in ("torch", "transformers", "datasets", "vllm") if m in sys.modules], file=sys.stderr)
"""


def audit(*arguments: object, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _MAIN, "audit", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "200"}
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, check=False, timeout=120
    )


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"custom_id": f"q-{i}", "response": row}) + "\n" for i, row in enumerate(rows)))
    return path


COMPLETE = chat("42.", reasoning="I add them.")
INLINE = chat("<think>I add them.</think>43.")
EMPTY = chat("44.", reasoning="")


def test_a_complete_file_exits_0_and_loads_nothing_heavy(tmp_path: Path) -> None:
    done = audit(write(tmp_path / "a.jsonl", COMPLETE))
    assert (done.returncode, done.stderr) == (0, "heavy: []\n")
    assert "all 1 responses are reasoning-complete" in done.stdout


def test_too_few_complete_rows_exit_1(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", COMPLETE, INLINE, EMPTY, EMPTY)
    out, refused = tmp_path / "out.jsonl", tmp_path / "refused.jsonl"
    done = audit(path, "--out", out, "--quarantine", refused)
    assert done.returncode == 1
    assert "2 of 4 rows (50.0%): the reasoning is an empty string" in done.stdout
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["q-0", "q-1"]
    assert [json.loads(line)["reason"] for line in refused.read_text().splitlines()] == ["blank_reasoning"] * 2
    assert audit(path, "--min-complete", 0.5).returncode == 0
    assert audit(path, "--min-complete", 0.51).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: no file of that name"),
        (["a.jsonl", "--min-complete", "95"], "share from 0 to 1"),
        (["a.jsonl", "--out", "a.jsonl"], "not an input"),
        (["a.jsonl", "--trust-remote-code"], "name the target with --target"),
        (["a.jsonl", "--target", "no/such/target"], "neither a folder nor in the local Hub cache"),
        (["a.jsonl", "--no-such-option"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage_exits_2_with_a_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a.jsonl"), COMPLETE)
    done = audit(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_targets_tokenizer_reads_what_the_text_lost(tmp_path: Path, tiny_tokenizer: Any) -> None:
    target = tmp_path / "target"
    tiny_tokenizer.save_pretrained(target)
    (target / "config.json").write_text(json.dumps({"vocab_size": len(tiny_tokenizer)}))
    prompt = render_prompt(tiny_tokenizer, [{"role": "user", "content": "1+1?"}], preset="tiny-kimi")
    ids = render_answer(tiny_tokenizer, {"reasoning": "I add them.", "content": "2."}, preset="tiny-kimi")
    record = vllm("I add them.2.", ids) | {"prompt_token_ids": prompt}  # decoded with special tokens skipped
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert audit(path).returncode == 1
    done = audit(path, "--target", target, "--out", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert "1 of them with exact token ids" in done.stdout
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert (row["reasoning"], row["content"], row["token_exact"]) == ("I add them.", "2.", True)


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    try:
        assert audit(write(tmp_path / "a.jsonl", COMPLETE), stderr=end).returncode == 0
        assert b"audit" in os.read(terminal, 1 << 16)
    finally:
        os.close(terminal)
        os.close(end)


def test_log_lines_say_how_far_and_how_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", *[COMPLETE] * 1000)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(b"")
    with caplog.at_level(logging.INFO), AuditProgress([path], log_every_s=0) as progress:
        progress(500, path.stat().st_size // 2)
        assert "audit: 500 rows, 0 of 0 MB, " in caplog.text
        assert "about 0 s left" in caplog.text
    with AuditProgress([path, packed], log_every_s=0) as progress:
        assert " of " not in progress.describe(1, 1)  # how much there is in a packed file is not known
    caplog.clear()
    with caplog.at_level(logging.INFO), AuditProgress([path]) as progress:
        progress(1, 1)
    assert not caplog.records
