"""What a mix became: rows and lengths by source, language and domain, and what was refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3_kimi.prompts.conversations import Conversation
from eagle3_kimi.prompts.files import RefusedRow

if TYPE_CHECKING:
    from rich.table import Table

HISTOGRAM_EDGES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Upper edges of the length histogram, exclusive; longer prompts fall into one last bin."""


@dataclass
class Tally:
    """Rows, planned turns and length of one group."""

    rows: int = 0
    turns: int = 0
    length: int = 0

    def add(self, conversation: Conversation, length: int) -> None:
        self.rows += 1
        self.turns += len(conversation.turns)
        self.length += length


@dataclass
class MixReport:
    """Plain data; `as_dict` is `report.json`."""

    fingerprint: str
    seed: int
    length_unit: str
    """`tokens` of the target, where its tokenizer was given, else `words`."""
    wanted: dict[str, int] = field(default_factory=dict)
    """Conversations asked of each source."""
    read: Counter[str] = field(default_factory=Counter)
    """Rows read from each source."""
    repaired: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    """Source -> reason -> rows."""
    examples: dict[str, dict[str, str]] = field(default_factory=dict)
    """Source -> reason -> the first row refused for it."""
    by_source: dict[str, Tally] = field(default_factory=dict)
    by_language: dict[str, Tally] = field(default_factory=dict)
    by_domain: dict[str, Tally] = field(default_factory=dict)
    leaked: Counter[str] = field(default_factory=Counter)
    """Rows that an evaluation set knows, by set."""
    histogram: list[int] = field(default_factory=lambda: [0] * (len(HISTOGRAM_EDGES) + 1))
    revisions: dict[str, str] = field(default_factory=dict)
    skipped_files: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(tally.rows for tally in self.by_source.values())

    @property
    def short(self) -> dict[str, int]:
        """Sources that ran out: conversations missing."""
        got = {name: self.by_source.get(name, Tally()).rows for name in self.wanted}
        return {name: wanted - got[name] for name, wanted in self.wanted.items() if got[name] < wanted}

    def add(self, conversation: Conversation, length: int) -> None:
        groups = (
            (self.by_source, conversation.source),
            (self.by_language, conversation.language or "unknown"),
            (self.by_domain, conversation.domain or "unknown"),
        )
        for group, name in groups:
            group.setdefault(name, Tally()).add(conversation, length)
        self.histogram[sum(length >= edge for edge in HISTOGRAM_EDGES)] += 1

    def refuse(self, source: str, row: RefusedRow) -> None:
        self.refused.setdefault(source, Counter())[str(row.reason)] += 1
        where = f"{Path(row.file).name}, row {row.row}: {row.detail}"
        self.examples.setdefault(source, {}).setdefault(str(row.reason), where)

    def as_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "rows": self.rows,
            "length_unit": self.length_unit,
            "wanted": self.wanted,
            "short": self.short,
            "read": dict(self.read),
            "repaired": dict(self.repaired.most_common()),
            "refused": {source: dict(counts.most_common()) for source, counts in self.refused.items()},
            "examples": self.examples,
            "leaked": dict(self.leaked.most_common()),
            **{
                f"by_{name}": {key: vars(tally) for key, tally in sorted(group.items())}
                for name, group in (
                    ("source", self.by_source),
                    ("language", self.by_language),
                    ("domain", self.by_domain),
                )
            },
            "histogram": {"edges": list(HISTOGRAM_EDGES), "rows": self.histogram},
            "revisions": self.revisions,
            "skipped_files": self.skipped_files,
        }


def load_report(path: Path) -> dict[str, Any]:
    """`report.json` of a prompts artefact."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def tables_of(report: dict[str, Any]) -> list[Table]:
    """The report as tables for a terminal: groups, lengths, refusals."""
    from rich.table import Table

    tables = []
    for title, columns, rows in sections_of(report):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*map(str, row))
        tables.append(table)
    return tables


def render_html(report: dict[str, Any]) -> str:
    """The report as one self-contained page."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    loader = PackageLoader("eagle3_kimi.prompts", ".")
    page = Environment(loader=loader, autoescape=select_autoescape(["jinja"])).get_template("report.html.jinja")
    histogram = next(section for section in sections_of(report) if section.title == "Prompt lengths")
    widest = max((rows for _, rows in histogram.rows), default=1)
    return page.render(report=report, sections=sections_of(report), widest=widest)


class Section(NamedTuple):
    """One table of the report."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def sections_of(report: dict[str, Any]) -> list[Section]:
    """The tables of a report, as plain values."""
    unit = report["length_unit"]
    groups = [
        (group, name, tally["rows"], tally["turns"], tally["length"])
        for group in ("source", "language", "domain")
        for name, tally in report[f"by_{group}"].items()
    ]
    edges = [*report["histogram"]["edges"], "longer"]
    lengths = [(edge, rows) for edge, rows in zip(edges, report["histogram"]["rows"], strict=True) if rows]
    refused = [
        (source, reason, rows, report["examples"][source][reason])
        for source, counts in report["refused"].items()
        for reason, rows in counts.items()
    ]
    sections = [
        Section(f"{report['rows']} conversations", ("group", "name", "rows", "turns", unit), groups),
        Section("Prompt lengths", (f"{unit} below", "rows"), lengths),
        Section("Refused", ("source", "reason", "rows", "first of this reason"), refused),
        Section("Repaired", ("repair", "rows"), list(report["repaired"].items())),
        Section("Known to an evaluation set", ("set", "rows"), list(report["leaked"].items())),
        Section("Sources that ran out", ("source", "conversations missing"), list(report["short"].items())),
        Section("Files skipped", ("file",), [(file,) for file in report["skipped_files"]]),
    ]
    return [section for section in sections if section.rows or section.title == "Refused"]
