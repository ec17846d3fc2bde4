"""The offline vLLM engine on the tiny target: one engine for all tests here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.engines import Generation, GenerationRequest, SamplingOptions, TargetEngine, open_engine
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.target import Target, resolve_target
from eagle3_kimi.tiny.problems import generate_problems

pytestmark = pytest.mark.vllm

GREEDY = SamplingOptions(temperature=0.0, max_tokens=200)
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return resolve_target(tiny_target)


@pytest.fixture(scope="module")
def engine(target: Target) -> Iterator[TargetEngine]:
    options = EngineOptions(dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=4)
    with pytest.MonkeyPatch.context() as environment:  # in this process: it starts sooner
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        engine = open_engine("vllm", target, options)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def requests(target: Target) -> list[GenerationRequest]:
    tokenizer = target.load_tokenizer()
    return [
        GenerationRequest(
            id=str(i), prompt_token_ids=render_prompt(tokenizer, p.messages, tools=p.tools, preset="tiny-kimi"), seed=i
        )
        for i, p in enumerate(generate_problems(12, seed=21))
    ]


@pytest.fixture(scope="module")
def stop(target: Target) -> tuple[int, ...]:
    return target.load_protocol(target.load_tokenizer()).markers.stop_token_ids


@pytest.fixture(scope="module")
def expected(target: Target, requests: list[GenerationRequest], stop: tuple[int, ...]) -> dict[str, Generation]:
    """The same requests under transformers."""
    options = EngineOptions(dtype="float32", max_model_len=MAX_MODEL_LEN)
    generations = open_engine("transformers", target, options).generate(deque(requests), GREEDY, stop)
    return {generation.request_id: generation for generation in generations}


def test_the_same_requests_give_the_same_fields_as_under_transformers(
    engine: TargetEngine, requests: list[GenerationRequest], expected: dict[str, Generation], stop: tuple[int, ...]
) -> None:
    found = {generation.request_id: generation for generation in engine.generate(deque(requests), GREEDY, stop)}
    assert found == expected
    assert {(g.finish_reason, g.output_token_ids[-1]) for g in found.values()} == {("stop", stop[0])}
    assert engine.info.name == "vllm"


def test_generations_arrive_as_they_finish_and_requests_join_while_it_runs(
    engine: TargetEngine, requests: list[GenerationRequest], expected: dict[str, Generation], stop: tuple[int, ...]
) -> None:
    by_length = sorted(requests, key=lambda request: len(expected[request.id].output_token_ids))
    short, next_short, long = by_length[0], by_length[1], by_length[-1]
    two_short = sum(len(expected[r.id].output_token_ids) for r in (short, next_short))
    assert two_short + 3 < len(expected[long.id].output_token_ids)
    queue, arrived = deque([long, short]), []
    for generation in engine.generate(queue, GREEDY, stop):
        if not arrived:
            queue.append(next_short)
        arrived.append(generation.request_id)
    assert arrived == [short.id, next_short.id, long.id]


def test_more_requests_than_sequences_are_all_answered_once(
    engine: TargetEngine, requests: list[GenerationRequest], expected: dict[str, Generation], stop: tuple[int, ...]
) -> None:
    many = [
        GenerationRequest(id=f"{n}-{r.id}", prompt_token_ids=r.prompt_token_ids, seed=n)
        for n in range(3)
        for r in requests
    ]
    found = list(engine.generate(deque(many), GREEDY, stop))
    assert sorted(g.request_id for g in found) == sorted(r.id for r in many)
    for generation in found:
        answer = expected[generation.request_id.split("-")[1]]
        assert generation.output_token_ids == answer.output_token_ids


def test_the_seed_decides_a_sampled_answer(engine: TargetEngine, requests: list[GenerationRequest]) -> None:
    hot = SamplingOptions(temperature=2.0, top_p=1.0, max_tokens=24)
    queue = deque(
        GenerationRequest(id=str(i), prompt_token_ids=requests[0].prompt_token_ids, seed=seed)
        for i, seed in enumerate((1, 1, 2))
    )
    found = {generation.request_id: generation.output_token_ids for generation in engine.generate(queue, hot, ())}
    assert found["0"] == found["1"] != found["2"]


def test_an_answer_ends_where_the_model_length_ends(engine: TargetEngine, target: Target) -> None:
    word = target.load_tokenizer().encode("last", add_special_tokens=False)[0]
    queue = deque(
        GenerationRequest(id=str(room), prompt_token_ids=[word] * (MAX_MODEL_LEN - room), seed=0) for room in (5, 0)
    )
    found = {generation.request_id: generation for generation in engine.generate(queue, GREEDY, ())}
    assert (len(found["5"].output_token_ids), found["5"].finish_reason) == (5, "length")
    assert found["0"].finish_reason == "error"
    assert "raise max_model_len" in found["0"].error
