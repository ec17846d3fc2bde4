from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from eagle3_kimi.demo.prompts import build_held_out_prompts, write_prompts
from eagle3_kimi.demo.settings import DemoSettings
from eagle3_kimi.prompts import load_conversations
from eagle3_kimi.target import resolve_target

SETTINGS = DemoSettings(problems=40, tool_conversations=10)


def test_the_mix_holds_both_sources_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    first, again = (write_prompts(tmp_path / name, SETTINGS, seed=0) for name in ("a", "b"))
    other = write_prompts(tmp_path / "c", SETTINGS, seed=1)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    conversations = list(load_conversations([first]))
    assert Counter(c.source for c in conversations) == {"problems": 40, "tools": 10}
    # a problem is one turn; a tool conversation is the call and the answer
    assert Counter(len(c.turns) for c in conversations) == {1: 40, 2: 10}
    assert all(c.tools for c in conversations if c.source == "tools")
    held_out = list(load_conversations([tmp_path / "a" / "held_out.jsonl"]))
    assert held_out
    assert not {c.id for c in held_out} & {c.id for c in conversations}


def test_held_out_prompts_are_not_those_of_training(tmp_path: Path, tiny_target: Path) -> None:
    target = resolve_target(tiny_target)
    prompts = build_held_out_prompts(target, 24, seed=0, seen=[])
    assert len({tuple(ids) for ids in prompts}) == 24
    protocol = target.load_protocol(target.load_tokenizer())
    assert all(protocol.prompt_state(ids) == "opened" for ids in prompts)
    fewer = build_held_out_prompts(target, 24, seed=0, seen=prompts[:10])
    assert not {tuple(ids) for ids in prompts[:10]} & {tuple(ids) for ids in fewer}
    assert len(fewer) == 24
    assert json.dumps(fewer[:14]) == json.dumps(prompts[10:])
