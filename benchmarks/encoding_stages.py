"""Where this process's time goes while hidden states are encoded."""

from __future__ import annotations

import threading
import time
from typing import Any

from eagle3_kimi.hidden_states import encode
from eagle3_kimi.hidden_states.contract import ContractCheck
from eagle3_kimi.hidden_states.target_head import TargetHead


class Stages:
    """Seconds inside some functions of this process, without those of others that they call."""

    def __init__(self) -> None:
        self.cpu_seconds: dict[str, float] = {}
        self._thread = threading.local()

    def watch(self, owner: Any, name: str, stage: str, *, whole: bool = False) -> None:
        """Replaces a function by one that is timed; `whole` includes all that it calls."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outside = getattr(self._thread, "inside", 0.0)  # None: in a function that is timed as a whole
            if outside is None:
                return function(*args, **kwargs)
            self._thread.inside = None if whole else 0.0
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - started
                own = taken - (self._thread.inside or 0.0)
                self.cpu_seconds[stage] = self.cpu_seconds.get(stage, 0.0) + own
                self._thread.inside = outside + taken

        setattr(owner, name, timed)

    def show(self, cpu_seconds: float) -> str:
        """Their shares."""
        shares = {stage: seconds / cpu_seconds for stage, seconds in self.cpu_seconds.items()}
        shares["the engine and all else"] = 1 - sum(shares.values())
        return ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items())


def watch_encoding() -> Stages:
    """From states to what a feature store keeps, and its proof."""
    stages = Stages()
    stages.watch(ContractCheck, "check", "the contract", whole=True)
    stages.watch(TargetHead, "logits", "the target's head")
    stages.watch(TargetHead, "find_top", "its most likely tokens")
    stages.watch(TargetHead, "argmax", "its choice")
    stages.watch(encode, "quantize", "fp8")
    stages.watch(encode.FeatureEncoder, "encode", "other encoding")
    return stages
