"""The circuit breaker: a run that goes wrong stops early and says why."""

from __future__ import annotations

from collections import Counter, deque

from eagle3_kimi.errors import RunStopped
from eagle3_kimi.protocol import TRUNCATION_REASONS, Reason

_ADVICE = {
    Reason.FINISH_LENGTH: "raise max_tokens (and max_model_len)",
    Reason.PROMPT_CLOSED_THOUGHTS: "thinking is switched off in the rendered prompt",
    Reason.THOUGHTS_NOT_OPENED: "the chat template does not open the thoughts: wrong template or wrong preset",
    Reason.UNCLOSED_THOUGHTS: "the model ends its turn inside the thoughts: wrong template, or a damaged checkpoint",
    Reason.BLANK_REASONING: "the model closes its thoughts at once: check the template's thinking variable",
    Reason.NO_END_OF_TURN: "the engine stops on something else than the end of turn: check its stop ids",
}


_FEWEST = 20
"""Below it, a share says too little to stop a run."""


class CircuitBreaker:
    """Watches the last `window` finished samples; truncations and other faults have limits of their own.

    It can trip once the window is full; a run that ends before is judged at its end.
    """

    def __init__(self, *, window: int, max_truncated: float, max_incomplete: float) -> None:
        self._window: deque[Reason] = deque(maxlen=window)
        self._limits = {True: max_truncated, False: max_incomplete}
        self._examples: dict[Reason, list[str]] = {}

    def record(self, reason: Reason, example: str) -> None:
        """Counts one finished sample.

        Raises:
            RunStopped: a share passes its limit; the message holds the table of reasons and two examples.
        """
        self._window.append(reason)
        if reason is not Reason.OK:
            kept = self._examples.setdefault(reason, [])
            kept.append(example)
            del kept[:-2]
        if len(self._window) == self._window.maxlen:
            self._check()

    def finish(self) -> None:
        """Judges a run that was shorter than the window, if it has enough samples to speak of a share.

        Raises:
            RunStopped: as `record`.
        """
        if _FEWEST <= len(self._window) < (self._window.maxlen or 0):
            self._check()

    def _check(self) -> None:
        for truncated, limit in self._limits.items():
            bad = sum(r is not Reason.OK and (r in TRUNCATION_REASONS) is truncated for r in self._window)
            if bad / len(self._window) > limit:
                raise RunStopped(self._describe(bad, truncated, limit))

    def _describe(self, bad: int, truncated: bool, limit: float) -> str:
        counts = Counter(r for r in self._window if r is not Reason.OK)
        what = "truncated" if truncated else "incomplete"
        lines = [
            f"stopped: {bad} of the last {len(self._window)} samples are {what}, more than the limit of {limit:.0%}. "
            "What is complete is kept in the journal.",
            f"  {'reason':28} {'count':>6}  what to do",
        ]
        for reason, count in counts.most_common():
            lines.append(f"  {reason:28} {count:6}  {_ADVICE.get(reason, 'look at the examples')}")
        worst = counts.most_common(1)[0][0]
        for number, example in enumerate(self._examples[worst], 1):
            lines.append(f"  example {number} ({worst}): {example}")
        return "\n".join(lines)
