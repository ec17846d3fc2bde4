"""What a mix became: rows and lengths by source, language and domain, and what was refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_kimi.prompts.conversations import Conversation

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

    def refuse(self, source: str, reason: str) -> None:
        self.refused.setdefault(source, Counter())[str(reason)] += 1

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

    unit = report["length_unit"]
    tables = []
    groups = Table("group", "name", "rows", "turns", unit, title=f"{report['rows']} conversations")
    for group in ("source", "language", "domain"):
        for name, tally in report[f"by_{group}"].items():
            groups.add_row(group, name, str(tally["rows"]), str(tally["turns"]), str(tally["length"]))
        groups.add_section()
    tables.append(groups)
    lengths = Table(f"{unit} below", "rows", title="Prompt lengths")
    for edge, rows in zip([*report["histogram"]["edges"], "longer"], report["histogram"]["rows"], strict=True):
        if rows:
            lengths.add_row(str(edge), str(rows))
    tables.append(lengths)
    refused = Table("source", "reason", "rows", title="Refused")
    for source, counts in report["refused"].items():
        for reason, rows in counts.items():
            refused.add_row(source, reason, str(rows))
    tables.append(refused)
    return tables
