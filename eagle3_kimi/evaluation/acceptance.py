"""How many tokens a target forward yields with a drafter, measured where it is served.

    acceptance_length = 1 + accepted / drafts        the bonus token included
    acceptance_per_position[i] = accepted at i / drafts     joint: a chain breaks at its first miss

A run without a drafter gives the text to compare with. Each engine is a process of its own
(`evaluation.worker`): engines keep global state, and only one fits into memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3_kimi.errors import UsageError
from eagle3_kimi.evaluation.child_process import run_child
from eagle3_kimi.evaluation.dialogues import Decoding, Question
from eagle3_kimi.target import Target


@dataclass(frozen=True, kw_only=True)
class AcceptanceRequest:
    """One run of an engine over prompts, or over questions."""

    target: str
    """Folder, cached Hub name, or `tiny`."""
    target_revision: str | None = None
    trust_remote_code: bool = False
    engine: Literal["vllm", "transformers"] = "vllm"
    """`transformers` simulates speculative decoding: the same chains, none of the speed."""
    drafter: str | None = None
    """Folder of an exported drafter; None decodes plainly."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids of each generation prompt."""
    questions: tuple[Question, ...] = ()
    """Asked turn by turn, instead of `prompts`."""
    thinking: bool = True
    """How questions are rendered."""
    reference: tuple[tuple[int, ...], ...] = ()
    """What plain greedy decoding wrote after each prompt; where the text differs, the two best logits are read."""
    num_speculative_tokens: int = 3
    """Draft length k."""
    temperature: float = 0.0
    """0 is greedy: only then must the text be the same with and without the drafter."""
    top_p: float = 1.0
    """Nucleus mass."""
    max_tokens: int = 256
    """Most tokens of one answer."""
    max_model_len: int = 1024
    """Longest prompt plus answer."""
    max_num_seqs: int = 32
    """Sequences decoded side by side."""
    tensor_parallel_size: int = 1
    """GPUs that share the target, and the drafter."""
    dtype: str = "float32"
    """Of weights and activations; in float32 rounding does not change greedy text."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end an answer; empty: those of the target's reasoning protocol, which must then have one."""

    def find_stop_ids(self, target: Target) -> tuple[int, ...]:
        """The request's own, or the protocol's."""
        return self.stop_token_ids or target.load_protocol(target.load_tokenizer()).markers.stop_token_ids

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AcceptanceRequest:
        """Reads what `dataclasses.asdict` gave."""
        ids: dict[str, Any] = {name: tuple(map(tuple, values[name])) for name in ("prompts", "reference")}
        ids["stop_token_ids"] = tuple(values["stop_token_ids"])
        return cls(**{**values, **ids, "questions": tuple(map(Question.from_json, values["questions"]))})


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where a drafted greedy turn leaves the plain one."""

    prompt: int
    """Index of the prompt."""
    position: int
    """Of the first output token that differs."""
    plain_token: int
    drafted_token: int
    best_two: tuple[int, int]
    """The target's two best tokens there, by one forward over prompt and common text."""
    logit_gap: float
    """Best minus second best logit: near 0, rounding decides."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceReport:
    """What the engine counted, and what it wrote."""

    engine: str
    """`vllm`, or `transformers (simulated)`."""
    engine_version: str
    device: str
    num_speculative_tokens: int
    """0 without a drafter."""
    num_drafts: int
    """Chains proposed, over all prompts."""
    accepted_per_position: tuple[int, ...]
    """Chains whose proposals 0..i were all accepted."""
    output_token_ids: tuple[tuple[int, ...], ...]
    """Of each prompt, in order; the end of turn is the last one."""
    seconds: float
    """Decoding alone, without the engine's start."""
    tokens_per_step: tuple[tuple[int, ...], ...] = ()
    """Of each prompt, what each engine step added; see `evaluation.dialogues.Decoding`."""
    prompt_token_ids: tuple[tuple[int, ...], ...] = ()
    """The prompts, as they were asked."""
    question_indices: tuple[int, ...] = ()
    """Which question each prompt belongs to, where questions were asked."""
    too_long: int = 0
    """Prompts that left no room for an answer."""
    unanswered: int = 0
    """Questions that ended early, since an answer was cut or blank."""
    divergences: tuple[Divergence, ...] = ()
    """Of the prompts whose text is not the reference's."""

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        return tuple(accepted / max(self.num_drafts, 1) for accepted in self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of one target forward, bonus token included; 1 without a drafter."""
        return 1.0 + sum(self.acceptance_per_position)

    @property
    def decodings(self) -> list[Decoding]:
        """Each turn with its steps."""
        pairs = zip(self.output_token_ids, self.tokens_per_step, strict=True)
        return [Decoding(token_ids=ids, tokens_per_step=steps) for ids, steps in pairs]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AcceptanceReport:
        """Reads what `dataclasses.asdict` gave."""
        ids = {
            name: tuple(map(tuple, values[name]))
            for name in ("output_token_ids", "tokens_per_step", "prompt_token_ids")
        }
        divergences = tuple(Divergence(**{**d, "best_two": tuple(d["best_two"])}) for d in values["divergences"])
        counts = {name: tuple(values[name]) for name in ("accepted_per_position", "question_indices")}
        return cls(**{**values, **ids, **counts, "divergences": divergences})

    @classmethod
    def load(cls, file: Path) -> AcceptanceReport:
        """Reads what `save_json` wrote."""
        return cls.from_json(json.loads(file.read_text(encoding="utf-8")))


def measure_acceptance(
    target: Target,
    drafter_dir: Path | None,
    prompts: Sequence[Sequence[int]],
    *,
    log: Path,
    engine: Literal["vllm", "transformers"] = "vllm",
    num_speculative_tokens: int = 3,
    temperature: float = 0.0,
    max_tokens: int = 256,
    max_model_len: int = 1024,
    dtype: str = "float32",
    seed: int = 0,
    stop_token_ids: Sequence[int] = (),
) -> AcceptanceReport:
    """Decodes `prompts` in a process of its own, with the drafter or plainly.

    Args:
        target: the target model.
        drafter_dir: an exported drafter, or None.
        prompts: token ids of generation prompts; held-out ones, for a figure worth reporting.
        log: where the process's output goes.
        engine: `vllm`, or `transformers` for the simulation.
        num_speculative_tokens: draft length k.
        temperature: 0 for greedy.
        max_tokens: most tokens of an answer.
        max_model_len: longest prompt plus answer.
        dtype: of weights and activations.
        seed: of sampling.
        stop_token_ids: end an answer; those of the target's protocol by default.

    Raises:
        UsageError: no prompts, or no drafter in `drafter_dir`.
        RunStopped: the engine could not start or failed; says why in one sentence.
    """
    if not prompts:
        raise UsageError("acceptance needs at least one prompt, got none")
    if drafter_dir is not None and not (drafter_dir / "config.json").is_file():
        raise UsageError(
            f"{drafter_dir} holds no drafter: it has no config.json; give the folder that training exported"
        )
    request = AcceptanceRequest(
        target=str(target.path),
        target_revision=target.revision,
        trust_remote_code=target.trust_remote_code,
        engine=engine,
        drafter=None if drafter_dir is None else str(drafter_dir),
        prompts=tuple(map(tuple, prompts)),
        num_speculative_tokens=num_speculative_tokens,
        temperature=temperature,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        dtype=dtype,
        seed=seed,
        stop_token_ids=tuple(stop_token_ids),
    )
    (report,) = measure_together([request], log=log)
    return report


def measure_together(requests: Sequence[AcceptanceRequest], *, log: Path) -> list[AcceptanceReport]:
    """Runs requests one after the other in one engine, in a process of its own.

    Args:
        requests: they differ in prompts, questions and sampling alone: what starts the engine is the first one's.
        log: where the process's output goes.

    Raises:
        RunStopped: the engine could not start or failed; says why in one sentence.
    """
    with tempfile.TemporaryDirectory(prefix="eagle3-kimi-") as name:
        folder = Path(name)
        text = json.dumps([asdict(request) for request in requests])
        (folder / "requests.json").write_text(text, encoding="utf-8")
        run_child(
            [
                sys.executable,
                "-m",
                "eagle3_kimi.evaluation.worker",
                str(folder / "requests.json"),
                str(folder / "reports.json"),
            ],
            log=log,
            lock=folder / "lock",
            environment={"OMP_WAIT_POLICY": "PASSIVE"},
        )
        reports = json.loads((folder / "reports.json").read_text(encoding="utf-8"))
    return [AcceptanceReport.from_json(report) for report in reports]


def save_json(record: AcceptanceReport, file: Path) -> None:
    """Writes a report whole or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
    temporary.replace(file)
