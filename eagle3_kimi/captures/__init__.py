"""Responses captured elsewhere: is their reasoning complete, what can be saved, what went wrong.

judge(record)         one parsed response -> one verdict per choice
judge_records(batch)  parsed records, duplicates told
judge_file(path)      a file or its bytes, row by row
run_audit(paths)      files of any size -> counts, diagnosis, repaired and refused rows
"""

from __future__ import annotations

from eagle3_kimi.captures.audit import AuditReport, run_audit
from eagle3_kimi.captures.context import CaptureContext
from eagle3_kimi.captures.judge import judge
from eagle3_kimi.captures.report import render
from eagle3_kimi.captures.rows import FileVerdict, judge_file, judge_records
from eagle3_kimi.captures.verdicts import CaptureVerdict, Fault, Repair, Verdict

__all__ = [
    "AuditReport",
    "CaptureContext",
    "CaptureVerdict",
    "Fault",
    "FileVerdict",
    "Repair",
    "Verdict",
    "judge",
    "judge_file",
    "judge_records",
    "render",
    "run_audit",
]
