"""The demo's prompts: two files of generated problems, mixed, and prompts that training never sees."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.demo.settings import DemoSettings
from eagle3_kimi.demo.workdir import write_text
from eagle3_kimi.prompts.mix_builder import PROMPTS, build_mix
from eagle3_kimi.target import Target
from eagle3_kimi.tiny.problems import KINDS, MULTIPLY_TOOL, build_tool_conversation, generate_problems

_SPARE = 1.2  # equal problems are dropped from the mix


def write_prompts(folder: Path, settings: DemoSettings, seed: int) -> Path:
    """Writes the two sources and their mix, and builds the mix; the file of prompts.

    The mix is `builders/mixes/tiny.yaml` with the demo's counts. `held_out.jsonl` is for `eagle3-kimi evaluate`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kinds = tuple(kind for kind in KINDS if kind != "tool")
    problems = list(generate_problems(int(settings.problems * _SPARE), 10 * seed + 1, kinds))
    _write_lines(folder / "problems.jsonl", ({"messages": problem.messages} for problem in problems))
    rng = random.Random(f"demo-tools-{seed}")
    pairs = rng.sample(
        [(a, b) for a in range(32, 100) for b in range(4, 10)], int(settings.tool_conversations * _SPARE)
    )
    _write_lines(
        folder / "tools.jsonl",
        ({"messages": build_tool_conversation(a, b), "tools": [MULTIPLY_TOOL]} for a, b in pairs),
    )
    mix = yaml.safe_load((files("eagle3_kimi.builders") / "mixes" / "tiny.yaml").read_text(encoding="utf-8"))
    counts = {"problems": settings.problems, "tools": settings.tool_conversations}
    for source in mix["sources"]:
        source["count"] = counts[source["name"]]
    write_text(folder / "mix.yaml", yaml.safe_dump(mix, sort_keys=False))
    build_mix(folder / "mix.yaml", folder / "mixed", seed=seed)
    seen = [problem.messages for problem in problems]
    held_out = generate_problems(settings.held_out_prompts, 10 * seed + 2, kinds)
    _write_lines(folder / "held_out.jsonl", ({"messages": p.messages} for p in held_out if p.messages not in seen))
    return folder / "mixed" / PROMPTS


def build_held_out_prompts(target: Target, count: int, *, seed: int, seen: Iterable[list[int]]) -> list[list[int]]:
    """Token ids of `count` prompts of every kind that are not among `seen`."""
    tokenizer = target.load_tokenizer()
    preset = target.load_protocol(tokenizer).preset
    known = {tuple(ids) for ids in seen}
    prompts: list[list[int]] = []
    for problem in generate_problems(4 * count, 10 * seed + 2):
        ids = render_prompt(tokenizer, problem.messages, tools=problem.tools, preset=preset)
        if tuple(ids) not in known and len(prompts) < count:
            known.add(tuple(ids))
            prompts.append(ids)
    return prompts


def _write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
