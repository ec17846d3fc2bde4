"""What the benchmarks of hidden states have in common: prompts of a target, answers as a data set, costs."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import psutil

# vLLM gives the worker process of a CPU all cores but one; an engine in this process has as many.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (psutil.cpu_count(logical=False) or 1) - 1)))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from datasets import Dataset, DatasetDict
from generate_overhead import Stopwatch
from trainers.target import save_smollm2

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.drafter.config import default_aux_layer_ids
from eagle3_kimi.engines import SamplingOptions
from eagle3_kimi.hidden_states.config import CaptureOptions
from eagle3_kimi.hidden_states.extraction import Extraction
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import SampleRef
from eagle3_kimi.target import Target, resolve_target
from eagle3_kimi.tiny.problems import generate_problems

Result = TypeVar("Result")

MAX_MODEL_LEN = 1024
STEP_TOKENS = 2048
"""Of a forward pass of extraction, so that a few hundred short answers take several of them."""
QUESTIONS = (
    "What is {a} plus {b}? Answer in one short sentence.",
    "Name {a} animals in one sentence.",
    "Describe a river with {b} stones in one sentence.",
    "Why do people count in tens and not in groups of {a}? Answer in one short sentence.",
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every way is given."""

    target: Target
    prompts: list[list[int]]
    stop_token_ids: tuple[int, ...]
    sampling: SamplingOptions
    aux_layer_ids: tuple[int, ...]

    def part(self, count: int) -> Work:
        return Work(**{**vars(self), "prompts": self.prompts[:count]})


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one way, once."""

    seconds: float
    own_cpu_seconds: float
    """Of this process alone: vLLM's scheduler waits for its worker in a busy loop."""
    peak_mb: float


class Meter:
    """A clock, and this process's largest size at any result."""

    def __init__(self) -> None:
        self._process, self._peak = psutil.Process(), 0
        self._watch = Stopwatch()

    def watch(self, results: Iterable[Result]) -> Iterator[Result]:
        for result in results:
            yield result
            self._peak = max(self._peak, self._process.memory_info().rss)

    def stop(self) -> Cost:
        seconds, _, own = self._watch.stop()
        return Cost(seconds=seconds, own_cpu_seconds=own, peak_mb=self._peak / 1e6)


def make_work(name: str, num_prompts: int, folder: Path, *, turns: int = 1) -> Work:
    """The tiny target's own problems; questions in the chat format for any other target.

    With more than one turn, the prompt is a conversation: earlier problems and their answers stand before the last one.
    """
    if name == "tiny":
        target = resolve_target("tiny")
        tokenizer = target.load_tokenizer()
        problems = generate_problems(num_prompts * turns, seed=7, kinds=("reverse", "sort"))
        turn_messages = ((*problem.messages, _say("assistant", problem.answer)) for problem in problems)
        conversations = (list(chain(*islice(turn_messages, turns)))[:-1] for _ in range(num_prompts))
        return Work(
            target=target,
            prompts=[render_prompt(tokenizer, messages, preset="tiny-kimi") for messages in conversations],
            stop_token_ids=target.load_protocol(tokenizer).markers.stop_token_ids,
            sampling=SamplingOptions(temperature=0.0, max_tokens=200),
            aux_layer_ids=(1, 2, 3),
        )
    if name == "smollm2":
        save_smollm2(folder / name)
        name = str(folder / name)
    target = resolve_target(name)
    tokenizer = target.load_tokenizer()
    texts = [QUESTIONS[n % len(QUESTIONS)].format(a=n // 4 + 2, b=7 * n % 90 + 3) for n in range(num_prompts)]
    conversations = (
        [*chain(*(_sum(n + 2, turn + 3) for turn in range(turns - 1))), _say("user", text)]
        for n, text in enumerate(texts)
    )
    return Work(
        target=target,
        prompts=[
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            for messages in conversations
        ],
        stop_token_ids=(tokenizer.eos_token_id,),
        sampling=SamplingOptions(temperature=0.0, max_tokens=128),
        aux_layer_ids=default_aux_layer_ids(target.num_layers),
    )


def _sum(a: int, b: int) -> list[dict[str, str]]:
    return [_say("user", QUESTIONS[0].format(a=a, b=b)), _say("assistant", f"{a} plus {b} is {a + b}.")]


def _say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def row_of(name: str, prompt_token_ids: list[int], output_token_ids: list[int]) -> dict[str, Any]:
    """A sample as the data set keeps it; its spans do not matter here."""
    return {
        "id": name,
        "prompt_token_ids": prompt_token_ids,
        "output_token_ids": output_token_ids,
        "spans": [{"kind": "reasoning", "start": 0, "end": len(output_token_ids)}],
        "provenance": {"temperature": 0.0, "protocol": "benchmark"},
    }


def open_extraction(work: Work, rows: list[dict[str, Any]], samples: Path, **options: Any) -> Extraction:
    """An extraction of the rows, which are saved in `samples`; its engine starts with the first one."""
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(samples)
    capture = CaptureOptions(
        aux_layer_ids=work.aux_layer_ids,
        dtype="float32",
        contract_samples=1,
        max_batched_tokens=STEP_TOKENS,
        **options,
    )
    return Extraction(capture, samples, work.target, Ranks(0, 1, 1, torch.device("cpu")))


def extract(extraction: Extraction, refs: list[SampleRef], store: Path) -> Cost:
    """The samples into a fresh store."""
    meter = Meter()
    written, _, refused = extraction.write(refs, store)
    assert (written, refused) == (len(refs), 0)
    list(meter.watch([None]))
    return meter.stop()


def show_ratios(ratios: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
