"""The tiny Kimi target: Kimi's architecture, control tokens and template at toy size, trained here in two minutes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$EAGLE3_KIMI_CACHE`, or `eagle3-kimi` in the user's cache folder."""
    named = os.environ.get("EAGLE3_KIMI_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle3-kimi"


def cached_tiny_target() -> Path:
    """Folder of the trained tiny target; trains it once if it is not in the cache."""
    from eagle3_kimi.tiny.training import train_tiny_target

    return train_tiny_target(cache_dir() / "tiny")
