"""The target's own answers to questions, greedily, in vLLM; run in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.engines.vllm import close_llm, load_llm
from eagle3_kimi.prompts.files import read_rows
from eagle3_kimi.target import Target, resolve_target


def render_questions(target: Target, file: Path, count: int) -> list[list[int]]:
    """Generation prompts, by the target's template, of the first `count` rows (with `question` or `prompt`)."""
    tokenizer = target.load_tokenizer()
    prompts = []
    for row in islice(read_rows(file), count):
        messages = [{"role": "user", "content": row.get("question") or row["prompt"]}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return prompts


def end_of_turn(target: Target) -> int:
    """The id that ends an answer."""
    return int(target.load_tokenizer().eos_token_id)


def write_answers(target: Target, prompts: list[list[int]], output: Path, *, max_tokens: int) -> None:
    """One JSON line for each prompt: `prompt_token_ids`, `output_token_ids`. Answers are cut at `max_tokens`."""
    from vllm import SamplingParams

    options = EngineOptions(dtype="float32", max_model_len=1024, max_num_seqs=64)
    llm: Any = load_llm(target, options, enable_prefix_caching=False)
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, stop_token_ids=[end_of_turn(target)], detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    temporary = output.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for prompt, made in zip(prompts, outputs, strict=True):
            row = {"prompt_token_ids": prompt, "output_token_ids": list(made.outputs[0].token_ids)}
            file.write(json.dumps(row) + "\n")
    temporary.replace(output)
    close_llm(llm)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    given = parser.parse_args()
    chosen = resolve_target(given.target)
    write_answers(
        chosen, render_questions(chosen, given.questions, given.count), given.output, max_tokens=given.max_tokens
    )
