"""Answers of the trained tiny target, and its prompts rendered wrongly."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.target import resolve_target
from eagle3_kimi.tiny.problems import generate_problems


class TinyAnswers:
    def __init__(self, path: Path) -> None:
        self.target = resolve_target(path)
        self._tokenizer = self.target.load_tokenizer()
        self._protocol = self.target.load_protocol(self._tokenizer)

    def render(self, messages: list[dict], rendering: str = "right") -> list[int]:
        thinking = rendering != "thoughts closed"
        ids = render_prompt(self._tokenizer, messages, preset=self._protocol.preset, thinking=thinking)
        return ids[:-1] if rendering == "thoughts not opened" else ids

    def generate(self, temperature: float, count: int = 6) -> list[dict]:
        model = AutoModelForCausalLM.from_pretrained(self.target.path).eval()
        torch.manual_seed(0)
        sampling = {"do_sample": temperature > 0, "top_k": 0} if temperature else {"do_sample": False}
        stop = list(self._protocol.markers.stop_token_ids)
        rows = []
        for index, problem in enumerate(generate_problems(count, seed=77)):
            prompt = self.render(problem.messages)
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=48, eos_token_id=stop, **sampling)[0]
            output = ids[len(prompt) :].tolist()
            row = {"id": f"tiny-{index}", "messages": problem.messages}
            rows.append({**row, "prompt_token_ids": prompt, "output_token_ids": output})
        return rows
