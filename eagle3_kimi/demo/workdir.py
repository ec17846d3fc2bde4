"""The demo's folder: which stages are finished, from what, and for whom it was made.

demo.json               version, engine, seed: another one is refused
stages/NAME.json        written when the stage is finished: inputs, result, seconds
logs/NAME.txt           what its processes said
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eagle3_kimi.errors import RunStopped, UsageError

logger = logging.getLogger(__name__)

WORKDIR_VERSION = 1
"""Raised when a stage writes something else than before; a folder of another version is refused."""


class WorkFolder:
    """A demo's folder, opened for one run at a time.

    Args:
        path: made if absent.
        identity: engine and seed; a folder made with others is refused.
        stages: names of all stages, in order.
    """

    def __init__(self, path: Path, *, identity: dict[str, Any], stages: tuple[str, ...]) -> None:
        self.path = path
        self._identity = {"version": WORKDIR_VERSION, **identity}
        self._stages = stages
        self._lock = FileLock(path / ".lock")

    def __enter__(self) -> WorkFolder:
        identity = self.path / "demo.json"
        try:
            if self.path.is_dir() and any(self.path.iterdir()):
                self._check_identity(identity)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            write_json(identity, self._identity)
            (self.path / "stages").mkdir(exist_ok=True)
        except Timeout:
            raise RunStopped(
                f"another demo is running in {self.path}; wait for it, or give another --workdir"
            ) from None
        except OSError as error:
            raise UsageError(f"{self.path} cannot be used: {error.strerror}; give another --workdir") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _check_identity(self, file: Path) -> None:
        if not file.is_file():
            raise UsageError(f"{self.path} is not empty and was not made by the demo; give another --workdir")
        found = read_json(file)
        differing = [f"{key} {found.get(key)}" for key, value in self._identity.items() if found.get(key) != value]
        if differing:
            wanted = ", ".join(f"{key} {value}" for key, value in self._identity.items() if found.get(key) != value)
            raise UsageError(
                f"{self.path} was made with {', '.join(differing)}, this run has {wanted}; nothing was touched: "
                "give another --workdir"
            )

    def log(self, name: str) -> Path:
        """Where a stage's processes write what they say."""
        return self.path / "logs" / f"{name}.txt"

    def stage(self, name: str, inputs: dict[str, Any], action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a stage: of an earlier run, if it finished from the same inputs, else of `action`.

        Args:
            name: one of the folder's stages.
            inputs: JSON values; everything that decides the result.
            action: makes the stage's artefacts, continuing what an interrupted run left, and returns its result.

        Raises:
            UsageError: the stage was finished from other inputs.
            RunStopped: the disk is full, or the stage stopped itself.
        """
        marker, title = (
            self.path / "stages" / f"{name}.json",
            f"[{self._stages.index(name) + 1}/{len(self._stages)}] {name}",
        )
        inputs = json.loads(json.dumps(inputs))
        if marker.is_file():
            found = read_json(marker)
            changed = sorted(key for key in {*inputs, *found["inputs"]} if inputs.get(key) != found["inputs"].get(key))
            if changed:
                raise UsageError(
                    f"the stage {name} in {self.path} was made from another {', '.join(changed)}; nothing was touched: "
                    "give another --workdir"
                )
            logger.info("%s: reused (took %.0f s when it was made)", title, found["seconds"])
            return dict(found["result"])
        logger.info("%s ...", title)
        started = time.monotonic()
        try:
            result = action()
            seconds = round(time.monotonic() - started, 1)
            write_json(marker, {"inputs": inputs, "result": result, "seconds": seconds})
        except OSError as error:
            raise RunStopped(
                f"the stage {name} stopped: {error.strerror or error} ({error.filename}); what is finished is kept, "
                "so run it again once that is mended"
            ) from error
        logger.info("%s: done in %.0f s", title, seconds)
        return result

    def seconds(self) -> dict[str, float]:
        """Stage -> seconds it took when it was made."""
        return {name: read_json(self.path / "stages" / f"{name}.json")["seconds"] for name in self._stages}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UsageError(f"{file} is damaged ({error}); delete it to make that stage again") from error


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes a file whole or not at all."""
    write_text(file, json.dumps(value, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(file)
