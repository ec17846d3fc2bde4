"""The folder in which a version is put together."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3_kimi.errors import UsageError


@contextmanager
def staging_folder(dry_run: Path | None) -> Iterator[Path]:
    """Where a version is put together: the folder of a dry run, which must be free, or a temporary one."""
    if dry_run is not None:
        check_output_is_free(dry_run)
        dry_run.mkdir(parents=True, exist_ok=True)
        yield dry_run
    else:
        with tempfile.TemporaryDirectory(prefix="eagle3-kimi-") as folder:
            yield Path(folder)


def check_output_is_free(output: Path) -> None:
    """Raises `UsageError` where there is something already."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} is there already and not empty; give another folder")
