"""`eagle3-kimi` in a process of its own: the Hub's address and the cache are read when the client is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hub.hub_state import Hub

Command = Sequence[str | Path]
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Finished:
    """What a command answered: exit code, standard output and error in one line."""

    code: int
    output: str


@dataclass(frozen=True)
class Client:
    """A person at a machine: one cache, one token."""

    hub: Hub
    home: Path

    def start(self, *commands: Command, **environment: str) -> subprocess.Popen[str]:
        lines = [[str(argument) for argument in command] for command in commands]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.hub.child", json.dumps(lines)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_REPOSITORY,
            env={**os.environ, **self.hub.environment(self.home), **environment},
        )

    def run(self, *commands: Command, **environment: str) -> list[Finished]:
        """Runs the commands one after the other in a fresh process."""
        with self.start(*commands, **environment) as process:
            output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return [Finished(code, " ".join(text.split())) for code, text in json.loads(output)]

    def do(self, *commands: Command, **environment: str) -> None:
        """Runs what must succeed."""
        for finished in self.run(*commands, **environment):
            assert finished.code == 0, finished.output
