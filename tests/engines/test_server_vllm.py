"""The server engine against a real vLLM server."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.engines import GenerationRequest, SamplingOptions, open_engine
from eagle3_kimi.engines.base import EngineOptions, TargetEngine
from eagle3_kimi.errors import EngineError
from eagle3_kimi.protocol import Reason
from eagle3_kimi.target import Target, resolve_target
from eagle3_kimi.tiny.problems import generate_problems
from tests.generation.scripted import Bench
from tests.vllm_server import MAX_MODEL_LEN, VllmServer

pytestmark = pytest.mark.vllm

GREEDY = SamplingOptions(temperature=0.0, max_tokens=200)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return resolve_target(tiny_target)


@pytest.fixture(scope="module")
def tokenizer(target: Target) -> Any:
    return target.load_tokenizer()


@pytest.fixture(scope="module")
def engine(vllm_server: VllmServer, target: Target) -> TargetEngine:
    return open_engine("server", target, EngineOptions(server_url=vllm_server.url, max_num_seqs=8))


@pytest.fixture(scope="module")
def requests(tokenizer: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=str(i), prompt_token_ids=render_prompt(tokenizer, p.messages, tools=p.tools, preset="tiny-kimi"), seed=i
        )
        for i, p in enumerate(generate_problems(12, seed=21))
    ]


def generate(engine: TargetEngine, queue: list[GenerationRequest], sampling: SamplingOptions, stop: Any) -> Any:
    return {g.request_id: g for g in engine.generate(deque(queue), sampling, stop)}


def test_every_sample_is_complete_and_the_same_as_without_a_server(
    engine: TargetEngine, target: Target, tokenizer: Any, requests: list[GenerationRequest]
) -> None:
    protocol = target.load_protocol(tokenizer)
    stop = protocol.markers.stop_token_ids
    served = generate(engine, requests, GREEDY, stop)
    alone = generate(open_engine("transformers", target, EngineOptions(dtype="float32")), requests, GREEDY, stop)
    assert served == alone  # prompt ids, output ids with the stop token, finish reason
    readings = [protocol.read(g.prompt_token_ids, g.output_token_ids, g.finish_reason) for g in served.values()]
    assert [reading.reason for reading in readings] == [Reason.OK] * len(requests)
    assert engine.info.version.startswith("vllm 0.")


def test_the_seed_decides_a_sampled_answer(engine: TargetEngine, requests: list[GenerationRequest]) -> None:
    hot = SamplingOptions(temperature=2.0, top_p=1.0, max_tokens=24)  # vLLM's server takes no more
    prompt = requests[0].prompt_token_ids
    queue = [GenerationRequest(id=str(i), prompt_token_ids=prompt, seed=seed) for i, seed in enumerate((1, 1, 2))]
    found = generate(engine, queue, hot, ())
    assert {generation.error for generation in found.values()} == {""}
    assert found["0"].output_token_ids == found["1"].output_token_ids != found["2"].output_token_ids


def test_an_answer_ends_where_the_model_length_ends(engine: TargetEngine, target: Target, tokenizer: Any) -> None:
    word = tokenizer.encode("last", add_special_tokens=False)[0]
    queue = [
        GenerationRequest(id="tight", prompt_token_ids=[word] * (MAX_MODEL_LEN - 5), seed=0),
        GenerationRequest(id="full", prompt_token_ids=[word] * MAX_MODEL_LEN, seed=0),
        GenerationRequest(id="foreign", prompt_token_ids=[target.vocab_size + 7], seed=0),
    ]
    found = generate(engine, queue, GREEDY, ())
    assert (len(found["tight"].output_token_ids), found["tight"].finish_reason) == (5, "length")
    assert "the prompt has 1024 tokens, the engine takes 1024" in found["full"].error
    assert "out of vocabulary" in found["foreign"].error


def test_a_server_of_another_target_is_refused(vllm_server: VllmServer, tiny_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer.train_new_from_iterator(["entirely other words " * 50], vocab_size=300)
    tokenizer.chat_template = tiny_tokenizer.chat_template
    other = resolve_target(Bench(tmp_path, tokenizer).target)
    with pytest.raises(EngineError, match="the server's model tiny-kimi is not"):
        open_engine("server", other, EngineOptions(server_url=vllm_server.url))
