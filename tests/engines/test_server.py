"""The server engine against SGLang's documented shapes, and against servers that misbehave."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest

from eagle3_kimi.engines import Generation, GenerationRequest, SamplingOptions, open_engine
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.engines.http_client import HttpError, Patience
from eagle3_kimi.engines.server import KEY_VARIABLE, ServerEngine
from eagle3_kimi.errors import EngineError, UsageError
from eagle3_kimi.generation import GenerationConfig, GenerationRun
from eagle3_kimi.target import Target, resolve_target
from tests.engines.fake_sglang import FakeSglang, Fault, as_json, running
from tests.generation.scripted import Bench, Script, conversation

SAMPLING = SamplingOptions(temperature=0.7, top_p=0.9, max_tokens=50)
QUICK = Patience(attempts=3, first_wait_s=0.01, least_timeout_s=5.0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Bench:
    return Bench(tmp_path_factory.mktemp("server"), tiny_tokenizer)


@pytest.fixture(scope="module")
def target(bench: Bench) -> Target:
    return resolve_target(bench.target)


@pytest.fixture
def server(tiny_tokenizer: Any) -> Iterator[FakeSglang]:
    with running(tiny_tokenizer, Script(tiny_tokenizer).complete()) as fake:
        yield fake


def open_on(server: FakeSglang, target: Target, patience: Patience = QUICK, **options: Any) -> ServerEngine:
    return ServerEngine(target, EngineOptions(server_url=server.url, **options), patience=patience)


def requests(count: int, length: int = 5) -> deque[GenerationRequest]:
    return deque(
        GenerationRequest(id=str(i), prompt_token_ids=list(range(i, i + length)), seed=i) for i in range(count)
    )


def generate(engine: ServerEngine, queue: deque[GenerationRequest], max_tokens: int = 50) -> dict[str, Generation]:
    sampling = SamplingOptions(temperature=0.7, top_p=0.9, max_tokens=max_tokens)
    found = list(engine.generate(queue, sampling, (9,)))
    assert max(Counter(g.request_id for g in found).values()) == 1
    return {g.request_id: g for g in found}


def status(code: int, **headers: str) -> Fault:
    return lambda _: as_json({"error": {"message": f"scripted {code}"}}, code, **headers)


def hang_up(_: FakeSglang) -> None:
    return None


def test_what_is_sent_and_what_comes_back(server: FakeSglang, target: Target) -> None:
    engine = open_on(server, target)
    assert (engine.info.name, engine.info.version) == ("server", "sglang 0.5.6")
    (generation,) = engine.generate(requests(1), SAMPLING, (9, 11))
    assert generation == Generation(
        request_id="0", prompt_token_ids=[0, 1, 2, 3, 4], output_token_ids=server.answer, finish_reason="stop"
    )
    assert server.asked == [
        {
            "input_ids": [0, 1, 2, 3, 4],
            "stream": False,
            "sampling_params": {
                "max_new_tokens": 50, "sampling_seed": 0, "stop_token_ids": [9, 11], "temperature": 0.7, "top_p": 0.9,
                "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
                "frequency_penalty": 0.0, "skip_special_tokens": False,
            },
        }
    ]  # fmt: skip


def test_finish_reasons_are_handed_on(server: FakeSglang, target: Target) -> None:
    engine = open_on(server, target)
    server.finish = {"type": "length", "length": 50}
    assert generate(engine, requests(1))["0"].finish_reason == "length"
    server.finish = {"type": "abort", "message": "out of memory", "status_code": 500}
    aborted = generate(engine, requests(1))["0"]
    assert aborted.finish_reason == "abort"
    assert aborted.error == "the server aborted the request: out of memory"


@pytest.mark.parametrize("fault", [status(500), status(503), status(429, **{"Retry-After": "0"}), hang_up])
def test_what_is_worth_it_is_sent_again(server: FakeSglang, target: Target, fault: Fault) -> None:
    server.faults.extend([fault, fault])
    assert generate(open_on(server, target), requests(1))["0"].finish_reason == "stop"
    assert len(server.asked) == 3
    assert server.asked[0] == server.asked[2]  # the same seed: the same answer


@pytest.mark.parametrize(
    ("fault", "attempts", "message"),
    [
        (status(500), 3, r"HTTP 500: .*scripted 500.* \(3 attempts\)"),
        (hang_up, 3, r"\(3 attempts\)"),
        (status(400), 1, "HTTP 400: .*scripted 400"),
        (lambda _: (200, {}, b"<html>busy</html>"), 1, "the reply is no JSON"),
        (lambda _: (200, {}, b'{"text": "4'), 1, "the reply is no JSON"),
        (lambda _: as_json([]), 1, "the reply is not sglang's"),
        (lambda _: as_json({"text": "42"}), 1, "the reply is not sglang's: KeyError: 'meta_info'"),
        (lambda s: as_json({**s.reply(5), "output_ids": ["4"]}), 1, "token ids should be a list of integers"),
        (lambda s: as_json(s.reply(6)), 1, "5 prompt tokens were sent, 6 counted"),
    ],
)
def test_a_failure_is_accounted_for_and_the_others_go_on(
    server: FakeSglang, target: Target, fault: Fault, attempts: int, message: str
) -> None:
    server.faults.extend([fault] * attempts)
    found = generate(open_on(server, target, max_num_seqs=1), requests(4))
    assert [found[name].finish_reason for name in "0123"] == ["error", "stop", "stop", "stop"]
    assert (found["0"].output_token_ids, found["0"].prompt_token_ids) == ([], [0, 1, 2, 3, 4])
    with pytest.raises(HttpError, match=message):
        raise HttpError(found["0"].error)
    assert len(server.asked) == attempts + 1 + 3  # the failure, a probe of the server, the others


def test_rows_in_are_rows_out_whatever_happens(server: FakeSglang, target: Target) -> None:
    faults = [status(500), status(429), status(400), hang_up, lambda _: as_json({})]
    rng = random.Random(3)
    server.faults.extend(rng.choice([*faults, None, None, None]) for _ in range(300))
    server.poison = {7, 70, *range(150, 200)}  # more at the end than a healthy server would fail
    found = generate(open_on(server, target, max_num_seqs=16), requests(200))
    assert sorted(found, key=int) == [str(i) for i in range(200)]
    assert {g.finish_reason for g in found.values()} == {"stop", "error"}
    assert all(bool(g.error) is (g.finish_reason == "error") for g in found.values())


def test_the_time_limit_follows_the_longest_answer(server: FakeSglang, target: Target) -> None:
    engine = open_on(server, target, Patience(least_timeout_s=0.1), server_seconds_per_token=0.004)
    release = threading.Event()
    server.faults.append(lambda fake: as_json(fake.reply(5)) if release.wait(20) else None)
    found = generate(engine, requests(4), max_tokens=50)  # 0.1 s + 50 * 0.004 s
    release.set()
    errors = [generation.error for generation in found.values() if generation.error]
    assert errors == ["no answer within 0 s"]
    assert len(server.asked) == 4 + 1  # not sent again, it would take as long again; one is the probe


def test_no_more_than_max_num_seqs_at_once(server: FakeSglang, target: Target) -> None:
    server.gate.clear()
    engine = open_on(server, target, max_num_seqs=3)
    queue = requests(10)
    answers = engine.generate(queue, SAMPLING, ())
    first = threading.Thread(target=lambda: next(answers))
    first.start()
    while server.running < 3:
        time.sleep(0.005)
    assert len(queue) == 7
    server.gate.set()
    first.join()
    assert len(list(answers)) == 9
    assert server.most_running == 3


def test_requests_added_while_it_runs_are_answered(server: FakeSglang, target: Target) -> None:
    server.faults.append(status(400))  # also after a failure with nothing left to do
    queue, waiting = requests(1), requests(8)
    found = []
    for generation in open_on(server, target).generate(queue, SAMPLING, ()):
        found.append(generation.request_id)
        if len(found) < 8:
            queue.append(waiting[len(found)])
    assert found == [str(i) for i in range(8)]


def test_a_long_prompt_is_refused_and_an_answer_fits_beside_its_prompt(server: FakeSglang, target: Target) -> None:
    engine = open_on(server, target, max_model_len=40)
    queue = deque([*requests(1, length=40), GenerationRequest(id="1", prompt_token_ids=list(range(30)), seed=0)])
    found = generate(engine, queue)
    assert "raise max_model_len" in found["0"].error
    assert [body["sampling_params"]["max_new_tokens"] for body in server.asked] == [10]


def test_a_server_that_generates_nothing_any_more_stops_the_run(server: FakeSglang, target: Target) -> None:
    engine = open_on(server, target, max_num_seqs=2)
    answers = engine.generate(requests(10), SAMPLING, ())
    assert next(answers).finish_reason == "stop"
    server.broken = True
    with pytest.raises(EngineError, match=r"generates nothing any more.*scripted 500.*Check the log .*is kept"):
        list(answers)


def test_nobody_is_blamed_for_a_server_that_is_gone(server: FakeSglang, target: Target) -> None:
    engine = open_on(server, target, max_num_seqs=1)
    answers = engine.generate(requests(5), SAMPLING, ())
    assert [next(answers).finish_reason, next(answers).finish_reason] == ["stop", "stop"]
    server.close()
    with pytest.raises(EngineError, match=r"generates nothing any more.*ConnectionRefusedError"):
        next(answers)  # nothing is yielded as failed: that is for the next run


def test_stopping_early_breaks_off_what_is_open(server: FakeSglang, target: Target) -> None:
    release = threading.Event()
    server.faults.extend([None, *[lambda fake: as_json(fake.reply(5)) if release.wait(20) else None] * 7])
    answers = open_on(server, target, max_num_seqs=4).generate(requests(8), SAMPLING, ())
    next(answers)
    answers.close()  # returns, although nothing that is open gets an answer
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("generate")]
    release.set()
    assert server.hung_up.wait(10)  # the server finds nobody at the other end
    assert len(server.asked) <= 4


def test_another_model_behind_the_address_is_refused(
    server: FakeSglang, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    real = server.tokenizer
    server.tokenizer = type("Other", (), {"decode": staticmethod(lambda ids: "".join(chr(65 + i % 26) for i in ids))})
    with pytest.raises(EngineError, match="the server's model kimi is not"):
        open_on(server, target)
    server.tokenizer, server.detokenize = real, False
    with caplog.at_level(logging.WARNING):
        open_on(server, target)
    assert "is unchecked" in caplog.text


def test_a_server_of_another_kind_is_refused(server: FakeSglang, target: Target) -> None:
    server.card["owned_by"] = "llamacpp"
    with pytest.raises(EngineError, match="calls itself 'llamacpp'; token ids are exchanged with vllm and sglang only"):
        open_on(server, target)
    server.card["parent"] = "kimi"  # nothing but an adapter
    with pytest.raises(EngineError, match="lists no model"):
        open_on(server, target)


def test_an_address_without_a_server_is_refused(target: Target) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"no model server at .*ConnectionRefusedError.*is it started"):
            open_engine("server", target, EngineOptions(server_url=url))
    with pytest.raises(UsageError, match="expected an address like"):
        open_engine("server", target, EngineOptions(server_url="localhost:8000"))
    with pytest.raises(UsageError, match="server_seconds_per_token must be above 0"):
        open_engine("server", target, EngineOptions(server_url=url, server_seconds_per_token=0))


def test_a_key_is_sent_and_not_told(server: FakeSglang, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    server.faults.append(status(401))
    found = generate(open_on(server, target), requests(1))
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer s3cret"}
    assert "HTTP 401" in found["0"].error
    assert "s3cret" not in found["0"].error


def test_waits_double_up_to_a_bound_and_obey_the_server() -> None:
    patience = Patience(first_wait_s=1.0, longest_wait_s=10.0)
    plain = HttpError("busy", worth_retrying=True)
    for attempt, most in ((1, 1.0), (2, 2.0), (4, 8.0), (5, 10.0), (50, 10.0)):
        assert most / 2 <= patience.wait_s(attempt, plain) <= most
    assert patience.wait_s(1, HttpError("busy", retry_after_s=7.0)) == 7.0
    assert patience.wait_s(1, HttpError("busy", retry_after_s=3600.0)) == 10.0


def test_a_whole_run_with_one_bad_request(server: FakeSglang, bench: Bench) -> None:
    server.faults.extend([None, None, None, status(400)])  # three canaries
    config = GenerationConfig(
        target=str(bench.target),
        engine="server",
        options=EngineOptions(server_url=server.url + "/v1/", max_num_seqs=1),
        max_incomplete=1.0,
        journal_dir=bench.journal_dir,
    )
    conversations = [conversation(f"question {i}") for i in range(5)]
    run = GenerationRun(config)
    report = run.run(conversations)
    assert (report.planned, report.complete, dict(report.by_reason)) == (5, 4, {"finish_abort": 1})
    rows = [run.journal.read_at(entry.offset)["row"] for _, entry in report.finished_turns()]
    assert "scripted 400" in rows[0]["detail"]
    assert {row["provenance"]["engine_version"] for row in rows[1:]} == {"sglang 0.5.6"}
