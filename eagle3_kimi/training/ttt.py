"""The training-time test as one module: a packed batch in, a loss sum and counts out."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.training.batches import PackedBatch
from eagle3_kimi.training.head_loss import compute_head_loss
from eagle3_kimi.training.metrics import pack_counts
from eagle3_kimi.training.objectives import OBJECTIVES
from eagle3_kimi.training.targets import StateTargets, Targets, TopDraftTargets


class TrainingTimeTest(nn.Module):
    """Unrolls the drafter over K steps and judges every step by the target's distribution.

    It is one module so that DDP and FSDP see a single forward. The target's rows are buffers outside the state.

    Args:
        draft_model: the drafter.
        target_head: [D, H], the target's head rows of the draft vocabulary.
        final_norm: [H], the weight of the target's final norm; None where the final states are stored after it.
        final_norm_eps: its epsilon.
        ttt_steps: K.
        ttt_step_decay: step k weighs decay^k, normalised to sum 1.
        objective: a name in `OBJECTIVES`.
        chunk: target positions whose logits exist at once.
    """

    target_head: Tensor
    final_norm: Tensor | None

    def __init__(
        self,
        draft_model: DraftModel,
        *,
        target_head: Tensor,
        final_norm: Tensor | None,
        final_norm_eps: float,
        ttt_steps: int,
        ttt_step_decay: float = 0.8,
        objective: str = "cross_entropy",
        chunk: int = 1024,
    ) -> None:
        super().__init__()
        self.draft_model = draft_model
        self.register_buffer("target_head", target_head, persistent=False)
        self.register_buffer("final_norm", final_norm, persistent=False)
        self.final_norm_eps = final_norm_eps
        weights = [ttt_step_decay**step for step in range(ttt_steps)]
        self.step_weights = [weight / sum(weights) for weight in weights]
        self.objective = OBJECTIVES[objective]
        self.chunk = chunk

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Loss sum (float32 scalar, to be divided by the global number of supervised tokens) and `pack_counts`."""
        model = self.draft_model
        assert isinstance(batch.aux_hidden_states, Tensor)  # PackedBatch.to has decoded them
        states = model.unroll(batch.aux_hidden_states, batch.input_ids, batch.chain_ids, batch.rows)
        valid = model.knows(batch.target_argmax)
        loss, predictions = compute_head_loss(
            states,
            model.lm_head.weight,
            self._targets(batch),
            valid,
            batch.rows,
            step_weights=self.step_weights,
            objective=self.objective,
            chunk=self.chunk,
        )
        draft_to_target = model.draft_to_target
        hits = [
            draft_to_target[ids] == batch.target_argmax[batch.rows.targets(step)]
            for step, ids in enumerate(predictions)
        ]
        reachable = [valid[batch.rows.targets(step)] for step in range(len(hits))]
        counts = pack_counts(loss, valid.sum(), batch.num_tokens, hits, reachable, batch.span_kinds, batch.rows)
        return loss, counts

    def _targets(self, batch: PackedBatch) -> Targets:
        """The target's distributions, in the form that the batch has."""
        if batch.top_targets is not None:
            draft_to_target = self.draft_model.draft_to_target
            return TopDraftTargets.build(batch.top_targets, draft_to_target, self.draft_model.config.vocab_size)
        states = batch.final_hidden_states
        assert states is not None  # a batch has one of the two
        if self.final_norm is not None:
            weight = self.final_norm.to(states.dtype)
            states = F.rms_norm(states, weight.shape, weight, self.final_norm_eps)
        return StateTargets(states, self.target_head)
