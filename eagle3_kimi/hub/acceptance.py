"""The measured acceptance beside a drafter (`acceptance.json`, from `eagle3-kimi evaluate`), as its card shows it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.shards import file_digest
from eagle3_kimi.hub.cards import public_name

ACCEPTANCE_NAME = "acceptance.json"
PLOT_NAME = "acceptance.svg"


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What was measured, where, and the two tables of the card."""

    measured: dict[str, Any]
    """The file, without folders of this machine."""
    columns: tuple[str, ...]
    """Benchmarks and spans that occur, in order."""
    rows: list[dict[str, Any]]
    """One for each way of decoding and draft length: `decoding`, `k`, `length`, `speed_up`, `by`."""

    @property
    def num_speculative_tokens(self) -> int:
        """The draft length with the best speed-up: what the card's commands serve with."""
        return int(max(self.rows, key=lambda row: row["speed_up"])["k"])


def read_acceptance(path: Path) -> Acceptance | None:
    """Reads `acceptance.json` of a drafter's folder; None where there is none.

    Raises:
        DataError: it measured other weights, or is no such file.
    """
    file = path / ACCEPTANCE_NAME
    if not file.is_file():
        return None
    try:
        measured = json.loads(file.read_text(encoding="utf-8"))
        measured.pop("training", None)  # the run's own folders
        measured["target"] = {**measured["target"], "name": public_name(measured["target"]["name"])}
        rows = [_row(entry, drafted) for entry in measured["results"] for drafted in entry["drafted"]]
        weights = measured["drafter"]["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is not what `eagle3-kimi evaluate` writes ({error!r}); measure again") from error
    if not rows:
        raise DataError(f"{file} holds no measurement of a drafter; measure again")
    if not file_digest(path / "model.safetensors").startswith(weights):
        raise DataError(f"{file} measured other weights than those in {path}; measure again, or delete it")
    columns = tuple(dict.fromkeys(name for row in rows for name in row["by"]))
    return Acceptance(measured=measured, columns=columns, rows=rows)


def _row(entry: dict[str, Any], drafted: dict[str, Any]) -> dict[str, Any]:
    return {
        "decoding": f"thinking {'on' if entry['thinking'] else 'off'}, temperature {entry['temperature']:g}",
        "k": drafted["num_speculative_tokens"],
        "length": drafted["acceptance_length"],
        "per_position": drafted["acceptance_per_position"],
        "speed_up": drafted["speed_up"],
        "by": {
            name: figures["acceptance_length"]
            for group in ("by_benchmark", "by_span")
            for name, figures in drafted[group].items()
        },
    }
