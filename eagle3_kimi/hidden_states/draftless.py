"""vLLM's scheduler without the drafts that `method: extract_hidden_states` makes.

To vLLM that method is a kind of speculative decoding: each sampled token is proposed as its own successor, and verified
in the next step. The step that proposes is the one that stores the states, so it must stay; the drafts only cost. With
them a step computes two tokens a request, and tokens come from the rejection sampler, which draws others for the same
seed (and on a CPU, in vLLM 0.32, reads the temperature from memory that nobody has written).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds


class DraftlessScheduler(Scheduler):
    """Never puts a draft into a step. With `async_scheduling` drafts come another way: switch it off."""

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Drops them."""
