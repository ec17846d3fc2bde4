from __future__ import annotations

import json
from typing import Any

import pytest

from eagle3_kimi.errors import DataError, EngineError, RunStopped
from eagle3_kimi.generation import GenerationRun, RunReport
from eagle3_kimi.prompts import Conversation
from eagle3_kimi.schema import find_row_faults
from tests.generation.scripted import Bench, call, conversation

PROMPTS = [conversation(f"question {number}") for number in range(5)]


def rows(run: GenerationRun, conversations: list[Conversation]) -> list[dict[str, Any]]:
    """What a run over the finished journal finds."""
    report = run.run(conversations)
    assert report.generated == 0
    return [run.journal.read_at(entry.offset)["row"] for _, entry in report.finished_turns()]


def counts(report: RunReport) -> tuple[int, int, int]:
    """Rows in = complete + quarantined + not run, whatever happened."""
    assert report.planned == report.complete + report.quarantined + report.not_run
    return report.complete, report.quarantined, report.not_run


def cut_where(bench: Bench, text: str) -> Any:
    return lambda prompt: bench.script.cut() if text in prompt else bench.script.always(prompt)


def test_every_prompt_becomes_one_row_in_prompt_order(bench: Bench) -> None:
    run = bench.run(cut_where(bench, "question 3"))
    assert counts(run.run(PROMPTS)) == (4, 1, 0)
    found = rows(run, PROMPTS)
    assert [row["conversation_id"] for row in found] == [c.id for c in PROMPTS]  # the engine answered in reverse
    refused = found.pop(3)
    assert (refused["reason"], refused["finish_reason"]) == ("finish_length", "length")
    assert refused["text"].startswith("I add them.</think>")
    for row in found:
        assert find_row_faults(row) == []
        assert (row["reasoning"], row["content"]) == ("I add them.", "42")
        assert row["provenance"]["engine"] == "scripted"
        assert row["provenance"]["seed"] == bench.engines[0].seeds[row["id"]][0]


def test_nothing_is_generated_twice_and_no_engine_is_started_for_a_replay(bench: Bench) -> None:
    first = bench.run(cut_where(bench, "question 3"))
    first.run(PROMPTS)
    again = bench.run()
    report = again.run(PROMPTS)
    assert counts(report) == (4, 1, 0)  # what was refused is counted, and not retried for ever
    assert report.generated == 0
    assert len(bench.engines) == 1
    assert rows(again, PROMPTS) == rows(first, PROMPTS)


def test_adding_a_prompt_generates_one_sample(bench: Bench) -> None:
    bench.run().run(PROMPTS)
    report = bench.run().run([conversation("another"), *PROMPTS])
    assert (report.generated, report.complete) == (1, 6)
    assert set(bench.asked.values()) == {1}


def test_a_run_that_broke_off_goes_on_where_it_stopped(bench: Bench) -> None:
    def breaks_at_the_third(prompt: str) -> tuple[list[int], str]:
        if "question 2" in prompt:  # asked third, since the engine goes backwards
            raise EngineError("out of memory")
        return bench.script.always(prompt)

    with pytest.raises(EngineError, match="out of memory"):
        bench.run(breaks_at_the_third).run(PROMPTS)
    assert bench.engines[0].closed
    report = bench.run().run(PROMPTS)
    assert (report.generated, report.complete) == (3, 5)


def test_retry_rejected_tries_once_more_with_another_seed(bench: Bench) -> None:
    bench.run(cut_where(bench, "question 3")).run(PROMPTS)
    report = bench.run(retry_rejected=True).run(PROMPTS)
    assert (report.generated, *counts(report)) == (1, 5, 0, 0)
    retried = [name for name, count in bench.asked.items() if count == 2]
    assert len(retried) == 1
    seeds = {engine.seeds[retried[0]][0] for engine in bench.engines}
    assert len(seeds) == 2  # the same seed would give the same answer
    row = next(row for row in rows(bench.run(), PROMPTS) if row["id"] == retried[0])
    assert row["provenance"]["seed"] == bench.engines[1].seeds[retried[0]][0]


def test_samples_per_prompt_are_separate_samples(bench: Bench) -> None:
    run = bench.run(samples_per_prompt=3)
    assert counts(run.run(PROMPTS[:2])) == (6, 0, 0)
    found = rows(run, PROMPTS[:2])
    assert [row["sample_index"] for row in found] == [0, 1, 2, 0, 1, 2]
    assert len({row["id"] for row in found}) == len({row["provenance"]["seed"] for row in found}) == 6


def test_turns_are_generated_one_after_the_other_within_a_conversation(bench: Bench) -> None:
    chat = conversation("first", "recorded", "second", "recorded")
    run = bench.run(lambda prompt: (bench.script.complete("two" if "second" in prompt else "one"), "stop"))
    assert counts(run.run([chat, *PROMPTS])) == (7, 0, 0)
    first, second = rows(run, [chat])
    assert (first["turn"], second["turn"]) == (0, 1)
    text = bench.tokenizer.decode(second["prompt_token_ids"])
    assert "assistant<|im_middle|><think></think>one<|im_end|>" in text  # its own answer; older thoughts are dropped
    assert "recorded" not in text
    assert second["conversation"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ]


def test_a_refused_turn_ends_its_conversation_and_the_rest_is_counted(bench: Bench) -> None:
    chats = [conversation("first", "recorded", f"second {n}", "recorded", "third") for n in range(2)]
    report = bench.run(cut_where(bench, "second 1")).run(chats)
    assert counts(report) == (4, 1, 1)
    assert report.by_reason == {"finish_length": 1}
    assert report.ended_conversations == {"refused_turn": 1}
    assert counts(bench.run().run(chats)) == (4, 1, 1)  # the same from the journal


def test_a_tool_loop_keeps_its_reasoning_and_its_call_ids(bench: Bench) -> None:
    recorded = call("multiply", "call_77", a=3, b=4)
    loop = Conversation(
        id="loop",
        source="test",
        messages=(
            {"role": "user", "content": "multiply"},
            {"role": "assistant", "content": "", "tool_calls": [recorded]},
            {"role": "tool", "content": "12", "tool_call_id": "call_77"},
            {"role": "assistant", "content": "it is 12"},
        ),
    )
    own = call("multiply", "functions.multiply:0", b=4, a=3)

    def answer(prompt: str) -> tuple[list[int], str]:
        if "Return of" in prompt:
            return bench.script.complete("12"), "stop"
        return bench.script.complete("", reasoning="I call it.", calls=[own]), "tool_calls"

    run = bench.run(answer)
    assert counts(run.run([loop])) == (2, 0, 0)
    first, second = rows(run, [loop])
    assert json.loads(first["tool_calls"])[0]["function"] == own["function"]
    assert [span["kind"] for span in first["spans"]] == ["reasoning", "tool_call"]
    text = bench.tokenizer.decode(second["prompt_token_ids"])
    assert "<think>I call it.</think>" in text
    assert "<|im_system|>tool<|im_middle|>## Return of functions.multiply:0\n12<|im_end|>" in text


def test_the_breaker_stops_the_run_and_keeps_what_is_good(bench: Bench) -> None:
    prompts = [conversation(f"question {number}") for number in range(40)]
    # Asked backwards: 39..30 are complete, from 29 on all are cut.
    cut = {f"question {number}<" for number in range(30)}
    answer = lambda p: bench.script.cut() if any(c in p for c in cut) else bench.script.always(p)  # noqa: E731
    run = bench.run(answer, breaker_window=10, max_truncated=0.5)
    with pytest.raises(RunStopped, match="6 of the last 10 samples are truncated"):
        run.run(prompts)
    reasons = [entry.reason for entry in run.journal.index().values()]
    assert reasons == ["ok"] * 10 + ["finish_length"] * 6
    assert bench.engines[0].closed


def test_an_engine_that_loses_a_request_is_found_out(bench: Bench) -> None:
    run = bench.run()
    inner = run.open_engine

    class Loses:
        def __init__(self) -> None:
            self.engine = inner("", run.target, run.config.options)
            self.info, self.close = self.engine.info, self.engine.close

        def generate(self, queue: Any, *arguments: Any) -> Any:
            if not any(request.id.startswith("canary") for request in queue):
                queue.pop()
            return self.engine.generate(queue, *arguments)

    run.open_engine = lambda *_: Loses()
    with pytest.raises(EngineError, match="1 requests unanswered"):
        run.run(PROMPTS)


def test_an_engine_that_answers_another_prompt_is_found_out(bench: Bench) -> None:
    run = bench.run()
    inner = run.open_engine

    class Mangles:
        def __init__(self) -> None:
            self.engine = inner("", run.target, run.config.options)
            self.info, self.close = self.engine.info, self.engine.close

        def generate(self, *arguments: Any) -> Any:
            for generation in self.engine.generate(*arguments):
                generation.prompt_token_ids.insert(0, 1)  # a server that adds a begin-of-text token
                yield generation

    run.open_engine = lambda *_: Mangles()
    with pytest.raises(DataError, match="answered another prompt"):
        run.run(PROMPTS)
    assert run.journal.index() == {}


@pytest.mark.parametrize("output", [[], [2**40], [-1, 5], [5] * 10])
def test_whatever_an_engine_returns_is_journaled_with_a_reason(bench: Bench, output: list[int]) -> None:
    run = bench.run(lambda p: (output, "stop") if "question" in p else bench.script.always(p))
    assert counts(run.run(PROMPTS)) == (0, 5, 0)
    assert rows(run, PROMPTS)[0]["output_token_ids"] == output
