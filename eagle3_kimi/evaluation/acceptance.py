"""How many tokens a target forward yields with a drafter, measured where it is served.

    acceptance_length = 1 + accepted / drafts        the bonus token included
    acceptance_per_position[i] = accepted at i / drafts     joint: a chain breaks at its first miss

A run without a drafter gives the text to compare with. Each run is a process of its own
(`evaluation.worker`): engines keep global state, and only one fits into memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from eagle3_kimi.errors import UsageError
from eagle3_kimi.evaluation.child_process import run_child
from eagle3_kimi.target import Target


@dataclass(frozen=True, kw_only=True)
class AcceptanceRequest:
    """One run of an engine over prompts."""

    target: str
    """Folder, cached Hub name, or `tiny`."""
    target_revision: str | None = None
    trust_remote_code: bool = False
    engine: Literal["vllm", "transformers"] = "vllm"
    """`transformers` simulates speculative decoding: the same chains, none of the speed."""
    drafter: str | None = None
    """Folder of an exported drafter; None decodes plainly."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each generation prompt."""
    num_speculative_tokens: int = 3
    """Draft length k."""
    temperature: float = 0.0
    """0 is greedy: only then must the text be the same with and without the drafter."""
    max_tokens: int = 256
    """Most tokens of one answer."""
    max_model_len: int = 1024
    """Longest prompt plus answer."""
    max_num_seqs: int = 32
    """Sequences decoded side by side."""
    dtype: str = "float32"
    """Of weights and activations; in float32 rounding does not change greedy text."""
    seed: int = 0

    @classmethod
    def load(cls, file: Path) -> AcceptanceRequest:
        """Reads what `save_json` wrote."""
        values = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**values, "prompts": tuple(map(tuple, values["prompts"]))})


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

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        return tuple(accepted / max(self.num_drafts, 1) for accepted in self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of one target forward, bonus token included; 1 without a drafter."""
        return 1.0 + sum(self.acceptance_per_position)

    @classmethod
    def load(cls, file: Path) -> AcceptanceReport:
        """Reads what `save_json` wrote."""
        values = json.loads(file.read_text(encoding="utf-8"))
        return cls(
            **{
                **values,
                "accepted_per_position": tuple(values["accepted_per_position"]),
                "output_token_ids": tuple(map(tuple, values["output_token_ids"])),
            }
        )


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
    )
    with tempfile.TemporaryDirectory(prefix="eagle3-kimi-") as name:
        folder = Path(name)
        save_json(request, folder / "request.json")
        run_child(
            [
                sys.executable,
                "-m",
                "eagle3_kimi.evaluation.worker",
                str(folder / "request.json"),
                str(folder / "report.json"),
            ],
            log=log,
            lock=folder / "lock",
            environment={"OMP_WAIT_POLICY": "PASSIVE"},
        )
        return AcceptanceReport.load(folder / "report.json")


def save_json(record: AcceptanceRequest | AcceptanceReport, file: Path) -> None:
    """Writes a request or a report whole or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
    temporary.replace(file)
