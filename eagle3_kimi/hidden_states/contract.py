"""Are these the states training needs? Checked on the first samples, before anything is stored.

Two anchors. The layer numbering: boundary 1 is captured too and must equal the embedding sent
through layer 0. The final state: `lm_head(norm(h))` must explain the token that follows, by argmax
where sampling was greedy, by its log-probability otherwise. If a check fails, the known mistakes are
tried, and the one that fits is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_kimi.errors import DataError, TargetError
from eagle3_kimi.hidden_states.first_layers import FirstLayers, embed
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.target import Target

ANCHOR_LAYER_ID = 1
_ANCHOR_TOKENS = 256
"""Causal: a prefix of the sample gives the same states, and is cheap even without an accelerator."""
_TOLERANCE = {"float32": 2e-3, "bfloat16": 4e-2}
"""Median relative error of a row that rounding explains; the next layer or the next token is off by about 1."""
_MIN_AGREEMENT = 0.95
"""Greedy sampling: kernels and batch shapes flip only near ties."""
_SURPRISE = 0.1
"""Nats by which sampled tokens may be less likely than the distribution's own entropy says."""


@dataclass(frozen=True)
class ContractSample:
    """One captured sample. S tokens, P of them prompt."""

    id: str
    token_ids: Tensor
    """int64 [S]."""
    num_prompt_tokens: int
    anchor: Tensor
    """[S-1, H], what came as boundary 1."""
    final: Tensor
    """[S-1, H], what came as the final state."""


@dataclass(frozen=True, kw_only=True)
class ContractReport:
    """The verdict; its fields are stored in the manifest."""

    passed: bool
    agreement: float
    """Share of produced tokens that are the target's own first choice, from the captured final state."""
    anchor_error: float
    """Median relative error of what came as boundary 1."""
    mean_log_prob: float
    """Of the produced tokens, at the sampling temperature."""
    mean_entropy: float
    """Of the target's distributions there: what `-mean_log_prob` should be for tokens it sampled."""
    samples: int
    tokens: int
    fault: str
    """The known mistake that fits; empty when passed."""

    def as_dict(self) -> dict[str, Any]:
        """For `StoreManifest.contract`."""
        return asdict(self)

    def raise_if_failed(self) -> None:
        """Raises `DataError` naming the fault."""
        if not self.passed:
            raise DataError(
                f"the captured hidden states failed the contract check on {self.samples} samples: {self.fault} "
                f"(boundary 1 off by {self.anchor_error:.2g}, agreement {self.agreement:.1%}, "
                f"log-probability {self.mean_log_prob:.2f} against an entropy of {self.mean_entropy:.2f}). "
                "Nothing of them was stored"
            )


def check_contract(
    samples: Sequence[ContractSample], target: Target, head: TargetHead, *, dtype: str, temperature: float
) -> ContractReport:
    """Checks captured samples; never raises for bad states, see `ContractReport.raise_if_failed`.

    Args:
        samples: captured with boundary 1 beside the final state; at least one.
        target: where layer 0 and the embedding are read from.
        head: the target's norm and head.
        dtype: `float32` or `bfloat16`, of the captured states.
        temperature: the sampling temperature of the produced tokens; 0 is greedy.
    """
    anchor_error, anchor_fault = _check_anchor(samples, target, _TOLERANCE[dtype])
    scores = _FinalStates(samples, head, temperature)
    final_fault = "" if scores.explained() else scores.find_fault()
    if scores.is_normed():
        final_fault = "the final state was stored after the final norm; capture the last layer's output before it"
    report = scores.read()
    return ContractReport(
        passed=not (anchor_fault or final_fault),
        agreement=report.agreement,
        anchor_error=anchor_error,
        mean_log_prob=report.log_prob,
        mean_entropy=report.entropy,
        samples=len(samples),
        tokens=report.tokens,
        fault="; ".join(filter(None, (anchor_fault, final_fault))),
    )


def _check_anchor(samples: Sequence[ContractSample], target: Target, tolerance: float) -> tuple[float, str]:
    """Error of boundary 1, and the mistake that explains it (empty when within `tolerance`)."""
    tokens = [sample.token_ids[:-1][:_ANCHOR_TOKENS] for sample in samples]
    came = [sample.anchor[:_ANCHOR_TOKENS].float() for sample in samples]

    def compute(boundary: int) -> list[Tensor]:
        if boundary == 0:
            return [embed(target, ids) for ids in tokens]
        layers = FirstLayers(target, boundary)
        return [layers.forward(ids) for ids in tokens]

    expected = compute(ANCHOR_LAYER_ID)
    error = _relative_error(came, expected)
    if error <= tolerance:
        return error, ""

    def fits(boundary: int) -> bool:
        try:
            return _relative_error(came, compute(boundary)) <= tolerance
        except TargetError:  # quantised experts: that boundary cannot be recomputed
            return False

    if fits(0):
        return error, "aux layer ids are one too low: what came as boundary 1 is the embedding, boundary 0"
    if _relative_error([c[:-1] for c in came], [e[1:] for e in expected]) <= tolerance:
        return error, "the states are shifted by one token: row t holds the state of token t + 1"
    if _relative_error([c[1:] for c in came], [e[:-1] for e in expected]) <= tolerance:
        return error, "the states are shifted by one token: row t holds the state of token t - 1"
    if fits(2):
        return error, "aux layer ids are one too high: what came as boundary 1 is the output of layer 1, boundary 2"
    return error, (
        "what came as boundary 1 is neither the embedding nor the output of layer 0 or 1: the engine ran other weights "
        "(a wrong revision), or aux layer ids are off by more than one"
    )


def _relative_error(came: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Median over rows of |came - expected| / |expected|."""
    rows = [(c - e).norm(dim=-1) / e.norm(dim=-1).clamp_min(1e-12) for c, e in zip(came, expected, strict=True)]
    errors = torch.cat(rows).nan_to_num(nan=math.inf)
    return float(errors.median()) if len(errors) else math.inf


@dataclass(frozen=True)
class _Reading:
    agreement: float
    log_prob: float
    entropy: float
    deviation: float
    """Standard error of the mean log-probability plus entropy."""
    tokens: int


class _FinalStates:
    """The final states of all samples against the tokens that follow them.

    State t explains token t + 1, for t in P-1..S-2:

        position   P-1   P  ...  S-2   S-1
        state       x    x  ...   x     -
        token       -    x  ...   x     x
    """

    def __init__(self, samples: Sequence[ContractSample], head: TargetHead, temperature: float) -> None:
        self._samples, self._head, self._temperature = samples, head, temperature

    def read(self, shift: int = 0) -> _Reading:
        """As if row t held the state of token t + `shift`."""
        states, tokens = [], []
        for sample in self._samples:
            first = max(sample.num_prompt_tokens - 1 - shift, 0)
            last = min(len(sample.token_ids) - 2 - shift, len(sample.final) - 1)
            states.append(sample.final[first : last + 1])
            tokens.append(sample.token_ids[first + shift + 1 : last + shift + 2])
        scores = self._head.score(torch.cat(states), torch.cat(tokens), temperature=self._temperature or 1.0)
        excess = scores.log_prob + scores.entropy
        return _Reading(
            agreement=float((scores.argmax == torch.cat(tokens)).float().mean()),
            log_prob=float(scores.log_prob.mean()),
            entropy=float(scores.entropy.mean()),
            deviation=float(excess.std(correction=0)) / math.sqrt(len(excess)),
            tokens=len(excess),
        )

    def explained(self, shift: int = 0) -> bool:
        """Whether the states explain the tokens. Sampled tokens have a mean log-probability of minus the entropy."""
        reading = self.read(shift)
        if self._temperature == 0:
            return reading.agreement >= _MIN_AGREEMENT
        return reading.log_prob + reading.entropy >= -_SURPRISE - 4 * reading.deviation

    def is_normed(self) -> bool:
        """Divided by the norm's weight, a normed state has a mean square of exactly 1 in every row."""
        weight = self._head.norm_weight
        kept = weight.abs() > 0.1 * weight.abs().median()
        rows = torch.cat([sample.final for sample in self._samples]).float()[:, kept] / weight[kept]
        return bool(((rows.square().mean(-1) - 1).abs() < 0.03).all())

    def find_fault(self) -> str:
        """The known mistake that makes the states explain the tokens."""
        tries: list[tuple[Callable[[], bool], str]] = [
            (lambda: self.explained(1), "the states are shifted by one token: row t holds the state of token t + 1"),
            (lambda: self.explained(-1), "the states are shifted by one token: row t holds the state of token t - 1"),
        ]
        for fits, fault in tries:
            if fits():
                return fault
        return (
            "the final state does not explain the tokens that follow: other weights produced them (a wrong "
            "revision), or the prompt was not rendered as the engine saw it (a wrong template), or it is not the last "
            "layer's output"
        )
