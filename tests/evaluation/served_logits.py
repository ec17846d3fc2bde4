"""vLLM's recorded chains against the training-time test of the exported drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.evaluation.drafting import load_draft_model
from eagle3_kimi.hidden_states.capture import CaptureRequest
from eagle3_kimi.hidden_states.transformers_source import TransformersSource
from eagle3_kimi.target import Target


@torch.inference_mode()
def compare_chains(target: Target, drafter: Path, texts: Sequence[Sequence[int]], record: dict[str, Tensor]) -> int:
    """Asserts that each chain's positions and logits are those of training; the number of chains compared.

    A chain at position n knows x_0..x_{n+1}. Training sees the same as row n of a document that goes on with the chain's
    own tokens: P = n + 1, and k supervised rows, of which only the first has all k steps.

    Args:
        target: the target model.
        drafter: the exported drafter.
        texts: prompt and output ids of each prompt.
        record: what `record_drafts` saved.
    """
    model = load_draft_model(drafter, target)
    source = TransformersSource(target, model.config.aux_layer_ids, dtype="float32")
    states = {captured.id: captured.hidden_states for captured in source.capture(
        CaptureRequest(str(i), (*text, 0)) for i, text in enumerate(texts)
    )}  # fmt: skip
    known = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    known[model.draft_to_target] = True
    steps, compared = record["logits"].shape[1], 0
    columns = (record[name] for name in ("prompts", "positions", "tokens", "logits"))
    for prompt, positions, tokens, served in zip(*columns, strict=True):
        text, row = texts[int(prompt)], int(positions[0])
        assert positions.tolist() == list(range(row, row + steps))
        if row + 1 >= len(text):
            continue  # drafted after the end of the turn
        sequence = torch.tensor([*text[: row + 2], *tokens.tolist(), 0])
        captured = states[str(int(prompt))]
        assert captured is not None
        aux = torch.nn.functional.pad(captured[: row + 1].flatten(1), (0, 0, 0, steps - 1))
        rows = PackedRows.build([(row, steps)], ttt_steps=steps)
        normed = model.unroll(aux, sequence[1 : row + 1 + steps], sequence[row + 1 : row + 1 + steps], rows)
        for step, state in enumerate(normed):
            torch.testing.assert_close(served[step][known], model.lm_head(state[0]), rtol=1e-4, atol=5e-4)
            assert bool(served[step][~known].isneginf().all())
        compared += 1
    return compared
