"""An audit's findings as text for a terminal or a log."""

from __future__ import annotations

from eagle3_kimi.captures.audit import AuditReport
from eagle3_kimi.captures.verdicts import Fault, Repair, Verdict
from eagle3_kimi.protocol import Reason

_MOST_FILES = 5


def render(report: AuditReport) -> str:
    """What was read, counts by verdict and reason, the diagnosis, where the rows went."""
    files = report.files[:_MOST_FILES]
    more = f" and {len(report.files) - len(files)} more" if len(report.files) > len(files) else ""
    rate = report.bytes / max(report.seconds, 1e-9) / 1e6
    lines = [
        f"Read {report.rows:,} rows from {', '.join(files)}{more} ({report.bytes / 1e6:,.1f} MB, {rate:,.0f} MB/s)",
        "Format (guessed): " + ", ".join(f"{name} {count:,}" for name, count in report.formats.most_common()),
        "",
        *_table(report),
        "",
        f"Complete: {report.complete:,} of {report.responses:,} ({100 * report.complete_share:.2f}%; "
        f"wanted {100 * report.min_complete:g}%), {report.token_exact:,} of them with exact token ids",
    ]
    if report.duplicates or report.torn_tails or report.superseded:
        lines.append(
            f"Left out: {report.duplicates:,} duplicate rows, {report.torn_tails:,} torn file ends; "
            f"{report.superseded:,} refused rows were complete on another try"
        )
    lines += ["", "Diagnosis", *(f"  {sentence}" for sentence in report.diagnosis)]
    for title, path in (("Complete rows", report.out), ("Refused rows", report.quarantine)):
        if path:
            lines.append(f"{title}: {path}")
    return "\n".join(lines)


def _table(report: AuditReport) -> list[str]:
    rows = [("verdict", "reason", "rows", "for example")]
    for reason, count in report.reasons.most_common():
        if count:
            example = next(iter(report.examples.get(reason, ())), "")
            rows.append((_verdict_of(reason), str(reason), f"{count:,}", _printable(example)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"  {verdict:<{widths[0]}}  {reason:<{widths[1]}}  {count:>{widths[2]}}  {example}".rstrip()
        for verdict, reason, count, example in rows
    ]


def _verdict_of(reason: Reason | Repair | Fault) -> str:
    if reason is Reason.OK:
        return Verdict.ACCEPT
    return Verdict.REPAIR if isinstance(reason, Repair) else Verdict.REJECT


def _printable(text: str) -> str:
    """One line that any terminal can show."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())
