from __future__ import annotations

from typing import Any

import pytest

from eagle3_kimi.engines import SamplingOptions
from eagle3_kimi.errors import TargetError
from eagle3_kimi.generation.preflight import CANARY_PROMPTS, check_canaries, check_prompt_rendering
from eagle3_kimi.protocol import ReasoningProtocol
from tests.generation.scripted import Answer, Bench, Script, ScriptedEngine, conversation


@pytest.fixture
def protocol(tiny_tokenizer: Any) -> ReasoningProtocol:
    return ReasoningProtocol.from_tokenizer(tiny_tokenizer, "tiny-kimi", vocab_size=len(tiny_tokenizer))


def check(tokenizer: Any, protocol: ReasoningProtocol, answer: Answer) -> None:
    check_canaries(ScriptedEngine(tokenizer, answer), tokenizer, protocol, SamplingOptions())


def test_one_complete_canary_is_enough(tiny_tokenizer: Any, protocol: ReasoningProtocol) -> None:
    script = Script(tiny_tokenizer)
    check(tiny_tokenizer, protocol, lambda p: script.always(p) if CANARY_PROMPTS[1] in p else script.cut())


CAUSES = {
    "finish_length": ("max_tokens is too small", lambda s: s.cut()),
    "blank_reasoning": ("thinking variable has no effect", lambda s: (s.complete(reasoning=""), "stop")),
    "unclosed_thoughts": ("wrong template, wrong revision", lambda s: (s.tokenizer.encode("42<|im_end|>"), "stop")),
    "no_end_of_turn": ("stop ids of another model", lambda s: (s.complete()[:-1], "stop")),
    "finish_abort": ("look at the answer below", lambda s: ([], "abort")),
}


@pytest.mark.parametrize("reason", CAUSES)
def test_the_likely_cause_is_named(tiny_tokenizer: Any, protocol: ReasoningProtocol, reason: str) -> None:
    cause, answer = CAUSES[reason]
    script = Script(tiny_tokenizer)
    with pytest.raises(TargetError, match=rf"none of 3 canary prompts came back complete \({reason}\).*{cause}"):
        check(tiny_tokenizer, protocol, lambda _: answer(script))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "thinking is defined and not thinking",
            "enable_thinking is undefined",
            "closes the thoughts at once.*`thinking`",
        ),
        ("<|im_middle|><think>\n  {%- if thinking", "<|im_middle|>\n  {%- if thinking", "does not open the thoughts"),
    ],
)
def test_a_template_that_does_not_open_the_thoughts_stops_before_the_engine_starts(
    bench: Bench, old: str, new: str, message: str
) -> None:
    template = bench.tokenizer.chat_template
    assert template.count(old) == 1
    (bench.target / "chat_template.jinja").write_text(template.replace(old, new))
    with pytest.raises(TargetError, match=message):
        bench.run().run([conversation("hi")])
    assert bench.engines == []


def test_a_failed_preflight_journals_nothing(bench: Bench) -> None:
    run = bench.run(lambda _: (bench.script.complete(reasoning=""), "stop"))
    with pytest.raises(TargetError, match="preflight"):
        run.run([conversation("hi")])
    assert run.journal.index() == {}
    assert bench.engines[0].closed


def test_check_prompt_rendering_accepts_the_tiny_template(tiny_tokenizer: Any, protocol: ReasoningProtocol) -> None:
    check_prompt_rendering(tiny_tokenizer, protocol)
