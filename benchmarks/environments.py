"""Virtual environments of the other trainers that benchmarks compare with, made on first use."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

_SHARED = ("datasets==5.1.0", "jinja2", "psutil", "pydantic", "pyyaml", "requests")
PEERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "speculators": (
        ("speculators==0.9.0", "hs-connectors==0.9.0"),
        ("torch==2.13.0", "transformers==5.19.0", "pydantic-settings", "httpx", "aiohttp", "openai", "loguru", "click",
         "typer", "rich", "protobuf", *_SHARED),
    ),
    "specforge": (
        ("specforge==0.2.0",),
        ("torch==2.11.0", "transformers==5.8.1", "accelerate==1.12.0", *_SHARED),
    ),
}  # fmt: skip
"""Name -> the package, without dependencies, and what preparation and training import, as it pins it: no serving
engine."""


def make_environment(name: str, folder: Path, pip_options: list[str]) -> Path:
    """The peer's Python, in an environment that is made once, or again where it holds something else."""
    python = folder / name / "bin" / "python"
    finished = folder / name / "finished"
    package, needs = PEERS[name]
    content = "\n".join([*needs, *package])
    if not finished.exists() or finished.read_text(encoding="utf-8") != content:
        print(f"making the environment of {name} in {folder / name}", file=sys.stderr)
        if not finished.exists():
            venv.create(folder / name, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", *pip_options]
        subprocess.run([*pip, *needs], check=True)
        subprocess.run([*pip, "--no-deps", *package], check=True)
        finished.write_text(content, encoding="utf-8")
    return python
