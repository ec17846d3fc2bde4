"""Serves prompts one by one and keeps what vLLM's own drafter computed: `record_drafts.py REQUEST REPORT RECORD`.

A chain is one draft of k tokens. The record has the prompt it belongs to, the position of each step, the drafted tokens
that went into the steps after the first, and the logits that came out, over the target's vocabulary.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_kimi.evaluation.acceptance import AcceptanceRequest
from eagle3_kimi.evaluation.served import VllmDecoder
from eagle3_kimi.evaluation.worker import measure
from eagle3_kimi.target import resolve_target


class Recorder:
    """Wraps two methods of vLLM's drafter class; one sequence at a time."""

    def __init__(self, drafter_class: Any) -> None:
        self.prompt = -1
        self.steps: list[tuple[int, int, int, Tensor]] = []
        forward, compute_logits = drafter_class.forward, drafter_class.compute_logits

        def recorded_forward(model: Any, input_ids: Tensor, positions: Tensor, **more: Any) -> Any:
            self.inputs = int(input_ids[-1]), int(positions[-1])
            self.starts_prompt = int(positions[0]) == 0
            return forward(model, input_ids, positions, **more)

        def recorded_logits(model: Any, hidden_states: Tensor) -> Tensor:
            logits = compute_logits(model, hidden_states)
            assert len(logits) == 1
            self.prompt += self.starts_prompt
            self.steps.append((self.prompt, *self.inputs, logits[0].float().clone()))
            return logits

        drafter_class.forward, drafter_class.compute_logits = recorded_forward, recorded_logits

    def save(self, file: Path, num_steps: int) -> None:
        """`prompts` [chains], `positions` [chains, k], `tokens` [chains, k-1], `logits` [chains, k, V]."""
        prompts, tokens, positions, logits = zip(*self.steps, strict=True)
        columns = {
            "prompts": torch.tensor(prompts).view(-1, num_steps)[:, 0],
            "tokens": torch.tensor(tokens).view(-1, num_steps)[:, 1:],
            "positions": torch.tensor(positions).view(-1, num_steps),
            "logits": torch.stack(logits).unflatten(0, (-1, num_steps)),
        }
        columns["positions"][:, 0] = columns["positions"][:, 1] - 1  # rows of refused tokens follow the one that counts
        save_file({name: column.contiguous() for name, column in columns.items()}, file)


def main(request_file: Path, report_file: Path, record_file: Path) -> None:
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    request = AcceptanceRequest.from_json(json.loads(request_file.read_text()))
    target = resolve_target(request.target, revision=request.target_revision)
    tokenizer = target.load_tokenizer()
    decoder = VllmDecoder(target, request)
    recorder = Recorder(Eagle3LlamaForCausalLM)  # from here on: the engine's warm-up is over
    report = measure(decoder, request, tokenizer, target.load_protocol(tokenizer))
    report_file.write_text(json.dumps(asdict(report)))
    recorder.save(record_file, request.num_speculative_tokens)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
