"""What an evaluation measures, and every setting that moves the number."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle3_kimi.errors import UsageError
from eagle3_kimi.target import Target

_KIMI_TEMPERATURES = {True: 1.0, False: 0.6}
"""By thinking, as Kimi-K2.5's model card says; it has no generation_config.json."""
_KIMI_TOP_P = 0.95
_MOST_SPECULATIVE_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """One evaluation of a drafter."""

    drafter: Path
    """Folder that training exported."""
    target: Target
    prompts: tuple[Path, ...]
    """Files of questions; see `evaluation.benchmarks`."""
    output: Path
    """Where acceptance.json is written."""
    num_speculative_tokens: tuple[int, ...] = (3,)
    """Draft lengths k, one engine each."""
    thinking: tuple[bool, ...] = (True, False)
    temperatures: tuple[Literal["greedy", "own"], ...] = ("greedy", "own")
    """`own` is the model's own sampling."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """`transformers` simulates, greedily only."""
    limit: int | None = None
    """Questions taken from each file, from its start; None takes all."""
    max_tokens: int = 4096
    """Most tokens of an answer, reasoning included."""
    max_model_len: int = 8192
    """Longest prompt plus answer."""
    max_num_seqs: int = 8
    """Turns decoded side by side; the speed-up depends on it."""
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    seed: int = 0
    simulate: bool | None = None
    """Simulate beside serving; None: where the target's weights are small enough for it."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UsageError("acceptance is measured on questions: name at least one file with --prompts")
        if not self.thinking or not self.temperatures or not self.num_speculative_tokens:
            raise UsageError("nothing to measure: name at least one draft length, one mode and one temperature")
        if self.engine not in ("vllm", "transformers"):
            raise UsageError(f"the engine is vllm, or transformers to simulate alone; not {self.engine!r}")
        if not (self.drafter / "config.json").is_file():
            raise UsageError(
                f"{self.drafter} holds no drafter: it has no config.json; give the folder that training exported"
            )
        limit = 1 if self.limit is None else self.limit
        if min(self.max_tokens, self.max_num_seqs, limit) < 1 or self.max_model_len < 2:
            raise UsageError("max_tokens, max_num_seqs and limit must be at least 1, max_model_len at least 2")
        if self.engine == "transformers" and "own" in self.temperatures:
            raise UsageError("the simulation is greedy: --engine transformers wants --temperature greedy")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """One way to decode."""

    thinking: bool
    temperature: float
    top_p: float
    source: str
    """Where temperature and top_p come from."""


def list_samplings(config: EvaluationConfig, preset: str) -> list[Sampling]:
    """Each mode of thinking, greedy and with the model's own sampling."""
    return [
        Sampling(thinking=thinking, temperature=0.0, top_p=1.0, source="greedy")
        if kind == "greedy"
        else own_sampling(config.target, preset, thinking)
        for thinking in config.thinking
        for kind in config.temperatures
    ]


def own_sampling(target: Target, preset: str, thinking: bool) -> Sampling:
    """The sampling that the model is meant to be used with."""
    if "kimi" in preset:
        return Sampling(
            thinking=thinking, temperature=_KIMI_TEMPERATURES[thinking], top_p=_KIMI_TOP_P, source="Kimi's model card"
        )
    file = target.path / "generation_config.json"
    values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    source = file.name if "temperature" in values or "top_p" in values else "the model names none: plain sampling"
    return Sampling(
        thinking=thinking,
        temperature=float(values.get("temperature", 1.0)),
        top_p=float(values.get("top_p", 1.0)),
        source=source,
    )


def parse_draft_lengths(text: str) -> tuple[int, ...]:
    """`3`, `1..8`, `1,3,5` or a mixture -> rising draft lengths, each once.

    Raises:
        UsageError: something else.
    """
    lengths: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", part)
        if match is None:
            raise UsageError(f"draft lengths are written 3, 1..8 or 1,3,5, not {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= _MOST_SPECULATIVE_TOKENS:
            raise UsageError(f"draft lengths lie in 1..{_MOST_SPECULATIVE_TOKENS} and rise; came {part.strip()!r}")
        lengths.update(range(first, last + 1))
    return tuple(sorted(lengths))


def choose(text: str, values: Sequence[str], option: str) -> tuple[str, ...]:
    """One of `values`, or all of them for `both`.

    Raises:
        UsageError: something else.
    """
    if text == "both":
        return tuple(values)
    if text not in values:
        raise UsageError(f"{option} is {', '.join(values)} or both, not {text!r}")
    return (text,)
