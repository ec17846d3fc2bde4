"""Progress of a training run."""

from __future__ import annotations

from eagle3_kimi.progress import LOG_EVERY_S, Progress
from eagle3_kimi.training.metrics import Counts


class TrainProgress(Progress):
    """Steps, tokens a second, remaining time, loss and joint acceptance of each step.

    Args:
        total: optimizer steps of the run.
        first: steps that an earlier process did.
        active: whether this rank shows anything.
        log_every_s: seconds between log lines where no terminal is attached.
    """

    def __init__(self, total: int, first: int, *, active: bool, log_every_s: float = LOG_EVERY_S) -> None:
        super().__init__("training", total=total, completed=first, active=active, log_every_s=log_every_s)
        self._steps, self._first, self._step = total, first, first
        self._tokens = 0.0

    def advance(self, step: int, counts: Counts) -> None:
        """The run has come to `step`; `counts` are those of the steps since the last call."""
        self._step, self._tokens = step, self._tokens + counts.tokens
        self.show(step, self.describe(counts))

    def describe(self, counts: Counts) -> str:
        """`step 120/900, 35,210 tokens/s, about 1,204 s left, loss 2.310, acceptance 0.71 0.52 0.40`."""
        left = (self._steps - self._step) * self.seconds / max(self._step - self._first, 1)
        acceptance = " ".join(f"{share:.2f}" for share in counts.total.acceptance)
        return (
            f"step {self._step:,}/{self._steps:,}, {self._tokens / self.seconds:,.0f} tokens/s, about {left:,.0f} s "
            f"left, loss {counts.loss:.3f}, acceptance {acceptance}"
        )
