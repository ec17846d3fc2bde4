"""The edge of a generation run: an engine that answers from a script, and records what it was asked."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3_kimi.chat import render_answer
from eagle3_kimi.engines import EngineInfo, Generation, GenerationRequest, SamplingOptions
from eagle3_kimi.generation import GenerationConfig, GenerationRun
from eagle3_kimi.prompts import Conversation

PRESET = "tiny-kimi"
Answer = Callable[[str], tuple[list[int], str]]
"""Prompt text -> output ids and finish reason."""


class ScriptedEngine:
    """Answers in the reverse of the order asked, so that nothing may rely on the order."""

    info = EngineInfo(name="scripted", version="1", device="none")

    def __init__(self, tokenizer: Any, answer: Answer) -> None:
        self._tokenizer, self._answer = tokenizer, answer
        self.asked: Counter[str] = Counter()
        self.seeds: dict[str, list[int]] = {}
        self.closed = False

    def generate(
        self, queue: deque[GenerationRequest], sampling: SamplingOptions, stop_token_ids: tuple[int, ...]
    ) -> Iterator[Generation]:
        while queue:
            request = queue.pop()
            self.asked[request.id] += 1
            self.seeds.setdefault(request.id, []).append(request.seed)
            output, finish = self._answer(self._tokenizer.decode(request.prompt_token_ids))
            yield Generation(
                request_id=request.id,
                prompt_token_ids=list(request.prompt_token_ids),
                output_token_ids=output,
                finish_reason=finish,
            )

    def close(self) -> None:
        self.closed = True


class Script:
    """Builds outputs for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def complete(
        self, content: str = "42", reasoning: str = "I add them.", calls: list[dict] | None = None
    ) -> list[int]:
        answer = {"reasoning": reasoning, "content": content, "tool_calls": calls or []}
        return render_answer(self.tokenizer, answer, preset=PRESET)

    def cut(self) -> tuple[list[int], str]:
        return self.complete()[:-3], "length"

    def always(self, _: str) -> tuple[list[int], str]:
        return self.complete(), "stop"


def call(name: str, call_id: str = "call_1", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def conversation(*texts: str, name: str = "") -> Conversation:
    """User and assistant turns by turns."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))
    return Conversation(id=name or "/".join(texts), messages=messages, source="test")


class Bench:
    """A target that is a tokenizer only, and runs on it."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.target, self.journal_dir = folder / "target", folder / "journals"
        self.tokenizer, self.script = tokenizer, Script(tokenizer)
        self.target.mkdir()
        config = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
        (self.target / "config.json").write_text(json.dumps(config))
        tokenizer.save_pretrained(self.target)
        self.engines: list[ScriptedEngine] = []

    def run(self, answer: Answer | None = None, **options: Any) -> GenerationRun:
        """A run whose engine answers with `answer`; engines that were opened are in `engines`."""
        config = GenerationConfig(target=str(self.target), journal_dir=self.journal_dir, **options)

        def open_scripted(*_: Any) -> ScriptedEngine:
            self.engines.append(ScriptedEngine(self.tokenizer, answer or self.script.always))
            return self.engines[-1]

        return GenerationRun(config, open_engine=open_scripted)

    @property
    def asked(self) -> Counter[str]:
        """How often each request was made, canaries aside."""
        counts: Counter[str] = Counter()
        for engine in self.engines:
            counts.update({name: count for name, count in engine.asked.items() if not name.startswith("canary")})
        return counts
