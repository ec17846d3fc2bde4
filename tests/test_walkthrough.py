"""The commands of docs/kimi-k2.5.md are ones that exist: on the node and on the tiny target, word for word."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from eagle3_kimi.cli import app
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hub.after_run import PushOptions
from eagle3_kimi.launched import run_launched
from eagle3_kimi.training.config import LiveOptions, TrainConfig

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "kimi-k2.5.md").read_text(), flags=re.DOTALL)
SCRIPTS = {
    "train/extract_hidden_states.py": (ExtractConfig, PushOptions),
    "train/train_drafter.py": (TrainConfig, LiveOptions, PushOptions),
}


def read_commands(exports: str) -> Iterator[list[str]]:
    """Every command after the two blocks of variables, as a shell with the exported ones splits it."""
    words = (word for line in exports.splitlines() for word in shlex.split(line)[1:])
    variables = dict(word.split("=", 1) for word in words)
    for block in BLOCKS[2:]:
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(re.sub(r"\$([A-Z]+)", lambda name: variables[name[1]], line), comments=True)


def parse_launch(arguments: list[str]) -> tuple[dict[str, Any], Any]:
    """The launch file's content, and what the script would be called with."""
    flag, launch_file, script, *options = arguments
    assert flag == "--config_file"
    called: list[Any] = []
    run_launched(SCRIPTS[script], lambda *configs: called.extend(configs), script, args=options)
    return yaml.safe_load((ROOT / launch_file).read_text()), called[0]


@pytest.mark.parametrize("exports", BLOCKS[:2], ids=["kimi", "tiny"])
def test_every_command_is_understood(exports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    group = typer.main.get_command(app)
    seen = []
    for words in read_commands(exports):
        if words[:2] == ["accelerate", "launch"]:
            launch, config = parse_launch(words[2:])
            seen.append(Path(words[4]).stem)
            if isinstance(config, TrainConfig):
                assert config.expected_world_size == launch["num_processes"]
            else:
                assert launch["num_processes"] % config.tensor_parallel_size == 0
        elif words[0] == "eagle3-kimi":
            command, arguments = group, words[1:]
            while hasattr(command, "commands"):
                name, *arguments = arguments
                seen.append(name)
                command = command.commands[name]
            command.make_context(seen[-1], arguments)  # refuses unknown and missing options
    assert seen == [
        "plan", "prompts", "generate", "extract_hidden_states", "store", "check", "train_drafter", "export-check",
        "evaluate", "push", "dataset", "push", "drafter",
    ]  # fmt: skip
