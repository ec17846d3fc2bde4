"""Whether the disk can hold the states, asked before the target is loaded."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from eagle3_kimi.errors import UsageError


def compute_state_bytes(*, tokens: int, hidden_size: int, states: int, bytes_per_value: int) -> int:
    """Bytes of `states` hidden states for each of `tokens` tokens: 4 in bf16 are 57,344 a token for Kimi-K2.5."""
    return tokens * states * hidden_size * bytes_per_value


def check_free_space(path: Path, needed: int, *, free: int | None = None) -> None:
    """Refuses to start what cannot be finished.

    Args:
        path: the folder to be written, or one that will be made.
        needed: bytes that will surely be written.
        free: bytes there are; None asks the disk.

    Raises:
        UsageError: there are fewer.
    """
    if free is None:
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
    if needed > free:
        raise UsageError(
            f"{path} needs at least {needed / 1e9:,.1f} GB of hidden states, {free / 1e9:,.1f} GB are free; choose "
            "another disk or fewer samples, or train in parts with a --max-disk that fits"
        )


def parse_size(text: str) -> int:
    """`500GB` -> 500_000_000_000; also kB, MB, TB.

    Raises:
        UsageError: something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT])B", text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"a size is written like 500GB (kB, MB, GB, TB), not {text!r}")
    return round(float(match[1]) * 1000 ** (1 + "kMGT".index(match[2])))


def show_size(size: float) -> str:
    """`3.89 TB`, `12.5 GB`, `830 kB`: powers of ten, three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 999.5 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size / 1e3:.3g} kB"
