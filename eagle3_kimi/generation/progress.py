"""Progress of a generation run."""

from __future__ import annotations

from eagle3_kimi.progress import Progress


class GenerationProgress(Progress):
    """Rate, complete share, tokens, remaining time."""

    def __init__(self) -> None:
        super().__init__("samples")
        self._done = self._complete = self._tokens = 0

    def advance(self, *, complete: bool, tokens: int, left: int) -> None:
        """One more finished sample; `left` are those known to be still open."""
        self._done, self._complete, self._tokens = self._done + 1, self._complete + complete, self._tokens + tokens
        self.show(self._done, self.describe(left), total=self._done + left)

    def describe(self, left: int) -> str:
        """`412 done, 98.5% complete, 1,203 tokens/s, 88 open, about 40 s left`."""
        rate = self._done / self.seconds
        share = self._complete / max(self._done, 1)
        text = f"{self._done:,} done, {share:.1%} complete, {self._tokens / self.seconds:,.0f} tokens/s"
        return text + (f", {left:,} open, about {left / rate:,.0f} s left" if left and rate else "")
