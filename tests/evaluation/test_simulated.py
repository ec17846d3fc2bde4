"""The loop of speculative decoding against a target that is a function of the text so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from eagle3_kimi.evaluation.simulated import decode

STOP = 0


def next_token(text: list[int]) -> int:
    """The toy target's choice: depends on the whole text, and stops every now and then."""
    return (sum((i + 1) * token for i, token in enumerate(text)) * 7 + len(text)) % 11


def greedy(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    output: list[int] = []
    while len(output) < max_tokens and (not output or output[-1] != STOP):
        output.append(next_token([*prompt, *output]))
    return output


@dataclass
class ToyTarget:
    """Keeps what was accepted, as a cache would; its aux state of a position is the position itself."""

    text: list[int] = field(default_factory=list)
    forwards: int = 0

    def __call__(self, tokens: list[int]) -> tuple[list[int], Tensor]:
        self.forwards += 1
        start = len(self.text)
        choices = [next_token(self.text + tokens[: i + 1]) for i in range(len(tokens))]
        kept = 1
        while start and kept < len(tokens) and tokens[kept] == choices[kept - 1]:
            kept += 1
        self.text += tokens[:kept] if start else tokens
        return choices, torch.arange(start, start + len(tokens))[:, None].float()


@dataclass
class ToyChain:
    """Proposes the target's own text, wrong from proposal `right` on; checks that it is told every position once."""

    prompt: tuple[int, ...]
    right: int
    text: list[int] = field(default_factory=list)

    def read(self, aux: Tensor, next_ids: Tensor) -> None:
        self.text = self.text or [self.prompt[0]]
        assert aux[:, 0].tolist() == list(range(len(self.text) - 1, len(self.text) - 1 + len(aux)))
        self.text += next_ids.tolist()

    def propose(self, num_tokens: int) -> list[int]:
        text = list(self.text)
        for _ in range(num_tokens):
            text.append(next_token(text))
        proposals = text[len(self.text) :]
        return [token if i < self.right else token + 11 for i, token in enumerate(proposals)]


@pytest.mark.parametrize("right", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt", [(3, 5), (1, 2, 3, 4), (9,), (4, 4, 8)])
def test_the_text_is_the_greedy_one_whatever_is_proposed(prompt: tuple[int, ...], right: int) -> None:
    target = ToyTarget()
    output, accepted = decode(
        prompt, target, ToyChain(prompt, right), num_speculative_tokens=3, max_tokens=40, stop=frozenset({STOP})
    )  # type: ignore[arg-type]
    assert output == greedy(prompt, 40)
    assert accepted == [right] * len(accepted)
    # the first forward gives one token, each chain 1 + right
    assert len(accepted) == -(-(len(output) - 1) // (right + 1)) == target.forwards - 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_a_turn_is_cut_at_max_tokens(max_tokens: int) -> None:
    prompt = (1, 2, 3, 4)
    plain, chains = decode(prompt, ToyTarget(), None, num_speculative_tokens=0, max_tokens=max_tokens, stop=frozenset())
    output, _ = decode(
        prompt, ToyTarget(), ToyChain(prompt, 3), num_speculative_tokens=3, max_tokens=max_tokens, stop=frozenset()
    )  # type: ignore[arg-type]
    assert output == plain
    assert len(plain) == max_tokens
    assert chains == []
