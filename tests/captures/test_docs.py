"""The page `docs/reasoning-complete.md` says what the program does: its audit, its code and its codes are run here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_kimi.captures import Fault, Repair, render, run_audit
from eagle3_kimi.protocol import Reason

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reasoning-complete.md").read_text(encoding="utf-8")


def test_the_audit_of_the_broken_file_is_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, DOCS / "make_broken_capture.py", "captured.jsonl"], check=True)
    report = run_audit(["captured.jsonl"], Path("repaired.jsonl"), Path("refused.jsonl"))
    lines = [f"    {line}".rstrip() for line in render(report).splitlines()]
    assert "\n".join(lines[1:]) in PAGE  # the first line has the rate in it
    assert run_audit(["repaired.jsonl"]).passed


def test_the_pages_code_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert code.count("assert") == 3
    exec(code, {})


def test_every_reason_is_in_a_table() -> None:
    told = set(re.findall(r"`([a-z_]+)`\\?\*?", "".join(line for line in PAGE.splitlines() if line.startswith("|"))))
    codes = {str(code) for kind in (Reason, Repair, Fault) for code in kind} - {"ok"}
    assert codes - told == set()
