from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.engines import GenerationRequest, SamplingOptions, open_engine
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.engines.transformers import TransformersEngine
from eagle3_kimi.errors import EngineError, UsageError
from eagle3_kimi.target import Target, resolve_target

GREEDY = SamplingOptions(temperature=0.0, max_tokens=24)
SAMPLED = SamplingOptions(temperature=1.0, top_p=0.9, max_tokens=24)
QUESTIONS = ["What is 27 + 58?", "Add 14 and 39.", "Sort these numbers: 7 3 9 1", "How much is 90 plus 10?"]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return resolve_target(tiny_target)


@pytest.fixture(scope="module")
def engine(target: Target) -> TransformersEngine:
    return TransformersEngine(target, EngineOptions(dtype="float32"))


@pytest.fixture(scope="module")
def requests(target: Target) -> list[GenerationRequest]:
    tokenizer = target.load_tokenizer()
    prompts = [render_prompt(tokenizer, [{"role": "user", "content": q}], preset="tiny-kimi") for q in QUESTIONS]
    assert len(set(map(len, prompts))) > 1  # so that batches are padded
    return [GenerationRequest(id=str(i), prompt_token_ids=p, seed=100 + i) for i, p in enumerate(prompts)]


def generate(
    engine: Any, requests: list[GenerationRequest], sampling: SamplingOptions, stop: tuple[int, ...] = ()
) -> Any:
    found = {g.request_id: g for g in engine.generate(deque(requests), sampling, stop)}
    assert sorted(found) == sorted(request.id for request in requests)
    assert all(found[request.id].prompt_token_ids == request.prompt_token_ids for request in requests)
    return {name: (generation.output_token_ids, generation.finish_reason) for name, generation in found.items()}


def test_greedy_equals_a_naive_loop_without_batch_and_cache(
    engine: TransformersEngine, requests: list[GenerationRequest]
) -> None:
    import torch

    found = generate(engine, requests, GREEDY)
    for request in requests:
        ids = list(request.prompt_token_ids)
        for _ in range(24):
            with torch.no_grad():
                ids.append(int(engine._model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert found[request.id] == (ids[len(request.prompt_token_ids) :], "length")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_does_not_depend_on_its_batch(
    engine: TransformersEngine, requests: list[GenerationRequest], sampling: SamplingOptions
) -> None:
    together = generate(engine, requests, sampling)
    assert together == generate(engine, requests[::-1], sampling)
    alone = {name: answer for r in requests for name, answer in generate(engine, [r], sampling).items()}
    assert together == alone


def test_the_seed_decides_a_sampled_answer(engine: TransformersEngine, requests: list[GenerationRequest]) -> None:
    hot = SamplingOptions(temperature=2.0, top_p=1.0, max_tokens=24)
    prompt = requests[0].prompt_token_ids
    one, again, other = (
        generate(engine, [GenerationRequest(id="x", prompt_token_ids=prompt, seed=seed)], hot) for seed in (1, 1, 2)
    )
    assert one == again != other


def test_a_stop_token_is_the_last_one(engine: TransformersEngine, requests: list[GenerationRequest]) -> None:
    free = generate(engine, requests, GREEDY)["0"][0]
    stop = free[10]
    output, reason = generate(engine, requests, GREEDY, stop=(stop,))["0"]
    assert (output, reason) == (free[: free.index(stop) + 1], "stop")


def test_requests_added_while_it_runs_are_answered(
    engine: TransformersEngine, requests: list[GenerationRequest]
) -> None:
    queue = deque(requests[:1])
    answered = []
    for generation in engine.generate(queue, GREEDY, ()):
        answered.append(generation.request_id)
        if len(answered) < len(requests):
            queue.append(requests[len(answered)])
    assert answered == ["0", "1", "2", "3"]


def test_a_prompt_without_room_for_an_answer_is_refused_and_the_others_go_on(
    target: Target, requests: list[GenerationRequest]
) -> None:
    longest = max(len(request.prompt_token_ids) for request in requests)
    small = TransformersEngine(target, EngineOptions(dtype="float32", max_model_len=longest))
    found = {g.request_id: g for g in small.generate(deque(requests), GREEDY, ())}
    for request in requests:
        generation, room = found[request.id], longest - len(request.prompt_token_ids)
        assert len(generation.output_token_ids) == min(room, 24)
        assert generation.finish_reason == ("length" if room else "error")
        assert bool(generation.error) is (room == 0)


def test_unknown_and_unusable_engines_are_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown engine 'sglang'; known: server, transformers, vllm"):
        open_engine("sglang", target, EngineOptions())
    missing = Target(name="x", path=tmp_path, revision="r")
    with pytest.raises(EngineError, match="cannot load"):
        open_engine("transformers", missing, EngineOptions())
