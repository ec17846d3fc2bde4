"""Do the captured final states explain the tokens that follow them? If not: which known mistake does?

State t explains token t + 1, for t in P-1..S-2:

    position   P-1   P  ...  S-2   S-1
    state       x    x  ...   x     -
    token       -    x  ...   x     x

Where sampling was greedy the token is the state's first choice, or as likely but for rounding. A sampled token has, in
the mean, a log-probability of minus the entropy of the distribution it was drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_kimi.hidden_states.target_head import TargetHead

_MIN_AGREEMENT = 0.95
"""Greedy sampling: kernels and batch shapes flip only near ties."""
_SURPRISE = 0.1
"""Nats by which tokens may be less likely, in the mean, than the states say: their first choice, or their entropy."""
_DEVIATIONS = 5.0
"""Standard errors of a mean over few tokens that are chance."""
_FIRST_TOKENS = 4
"""Of an answer: they hang on the prompt's end, later ones more on the answer so far."""
_MIN_SAMPLES = 4
"""Fewer samples have too few first tokens to judge by."""


@dataclass(frozen=True)
class Reading:
    """What the states say of the tokens, as means over them."""

    agreement: float
    """Share of the tokens that are the first choice."""
    log_prob: float
    regret: float
    """Nats by which the first choices are likelier than the tokens; near ties have almost none."""
    entropy: float
    deviation: float
    """Standard error of the mean log-probability of tokens that are drawn from these distributions."""
    tokens: int

    @property
    def excess(self) -> float:
        """Nats by which the tokens are likelier than drawn ones; well below 0 where others produced them."""
        return self.log_prob + self.entropy


@dataclass(frozen=True)
class FinalStates:
    """All samples' final states.

    Args:
        token_ids: int64 [S] a sample.
        num_prompt_tokens: P of each sample.
        states: [S-1, H] a sample, before the final norm.
        head: the target's norm and head.
        temperature: the sampling temperature of the tokens; 0 is greedy.
    """

    token_ids: Sequence[Tensor]
    num_prompt_tokens: Sequence[int]
    states: Sequence[Tensor]
    head: TargetHead
    temperature: float

    def read(self, shift: int = 0, *, skip: int = 0, most: int | None = None) -> Reading:
        """Reads states against tokens.

        Args:
            shift: as if row t held the state of token t + `shift`.
            skip: leaves out the first tokens of each answer.
            most: takes at most so many of each answer.
        """
        states, tokens = [], []
        for ids, prompt, rows in zip(self.token_ids, self.num_prompt_tokens, self.states, strict=True):
            first = max(prompt - 1 - shift, 0) + skip
            last = min(len(ids) - 2 - shift, len(rows) - 1)
            if most is not None:
                last = min(last, first + most - 1)
            if last >= first:
                states.append(rows[first : last + 1])
                tokens.append(ids[first + shift + 1 : last + shift + 2])
        if not tokens:
            return Reading(1.0, 0.0, 0.0, 0.0, 0.0, 0)
        wanted = torch.cat(tokens)
        scores = self.head.score(torch.cat(states), wanted, temperature=self.temperature or 1.0)
        return Reading(
            agreement=float((scores.argmax == wanted).float().mean()),
            log_prob=float(scores.log_prob.mean()),
            regret=float(scores.regret.mean()),
            entropy=float(scores.entropy.mean()),
            deviation=math.sqrt(float(scores.variance.sum())) / len(wanted),
            tokens=len(wanted),
        )

    def find_fault(self) -> str:
        """The known mistake that makes the states explain the tokens; empty where they do."""
        if self._is_normed():
            return "the final state was stored after the final norm; capture the last layer's output before it"
        whole = self._explains(self.read())
        enough = len(self.states) >= _MIN_SAMPLES
        if whole and (not enough or self._explains(self.read(most=_FIRST_TOKENS))):
            return ""
        for shift, row in ((1, "t + 1"), (-1, "t - 1")):
            if not whole and self._explains(self.read(shift)):
                return f"the states are shifted by one token: row t holds the state of token {row}"
        if whole or (enough and self._begins_worse()):
            return (
                "the states explain the answers' first tokens far less than later ones: the prompts were rendered with "
                "a wrong template, not as the target saw them when it answered"
            )
        return (
            "the final state does not explain the tokens that follow: other weights produced them (a wrong "
            "revision), or the prompts were rendered otherwise (a wrong template), or it is not the last layer's output"
        )

    def _explains(self, reading: Reading) -> bool:
        if self.temperature == 0:
            chance = math.sqrt(_MIN_AGREEMENT * (1 - _MIN_AGREEMENT) / max(reading.tokens, 1))
            return reading.regret <= _SURPRISE and reading.agreement >= _MIN_AGREEMENT - _DEVIATIONS * chance
        return reading.excess >= -_SURPRISE - _DEVIATIONS * reading.deviation

    def _begins_worse(self) -> bool:
        """Other weights surprise all along; another prompt most at the beginning, while later tokens go on as begun."""
        first, later = self.read(most=_FIRST_TOKENS), self.read(skip=_FIRST_TOKENS)
        return later.tokens > 0 and later.agreement >= 0.5 and first.excess < min(1.25 * later.excess, -_SURPRISE)

    def _is_normed(self) -> bool:
        """Divided by the norm's weight, a normed state has a mean square of exactly 1 in every row."""
        weight = self.head.norm_weight
        kept = weight.abs() > 0.1 * weight.abs().median()
        rows = torch.cat(list(self.states)).float()[:, kept] / weight[kept]
        return bool(((rows.square().mean(-1) - 1).abs() < 0.03).all())
