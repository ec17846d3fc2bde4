"""A family whose think tags are ordinary text: a real SentencePiece vocabulary, from training to verdict."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import LlamaTokenizer

from eagle3_kimi.chat import check_rendering, render_prompt
from eagle3_kimi.errors import TargetError
from eagle3_kimi.protocol import Reason, ReasoningProtocol, SpanKind

WORDS = [
    "the",
    "sum",
    "of",
    "two",
    "numbers",
    "is",
    "small",
    "so",
    "we",
    "add",
    "them",
    "and",
    "carry",
    "one",
    "then",
    "think",
    "again",
    "about",
    "it",
]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}{{ 'assistant: <think>\n' }}"


def train_tokenizer(folder: Path, *, model_type: str = "bpe", more: list[str] | None = None, **options: Any) -> Any:
    """Trains a SentencePiece model on a small corpus and loads its `.model` file as a Llama tokenizer."""
    rng = random.Random(0)
    lines = [
        " ".join(rng.choices(WORDS, k=8)) + rng.choice([".", "!", " a < b", " c > d", " e / f"]) for _ in range(400)
    ]
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(lines + (more or [])))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), vocab_size=400, model_type=model_type,
        byte_fallback=True, character_coverage=1.0, hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = LlamaTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_tokenizer(tmp_path_factory.mktemp(request.param), model_type=request.param)


@pytest.fixture(scope="module")
def protocol(tokenizer: Any) -> ReasoningProtocol:
    return ReasoningProtocol.from_tokenizer(tokenizer, "text-think", vocab_size=len(tokenizer))


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def continuation(tokenizer: Any, prompt: list[int], text: str) -> list[int]:
    """Ids of `text` as a model would write it after `prompt`: no leading-space piece of its own."""
    whole = encode(tokenizer, tokenizer.decode(prompt) + text)
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


def test_the_markers_are_text_over_several_tokens(protocol: ReasoningProtocol) -> None:
    for sequences in (protocol.markers.think_start, protocol.markers.think_end):
        assert len(sequences) >= 2  # with and without the leading-space piece
        assert min(map(len, sequences)) > 1
    assert protocol.markers.end_of_turn == ((2,),)
    assert protocol.markers.stop_token_ids == (2,)


@pytest.mark.parametrize("left", ["", "sum", "sum ", "sum.", "one\n", "one\n\n", "7", ")", "é", "加", '"'])
def test_a_marker_is_found_in_every_left_context(tokenizer: Any, protocol: ReasoningProtocol, left: str) -> None:
    ids = encode(tokenizer, left + "</think> the sum")
    found = protocol.markers.find(ids)
    assert [marker.name for marker in found] == ["think_end"]
    assert tokenizer.decode(ids[: found[0].start]).strip() == left.strip()
    assert tokenizer.decode(ids[found[0].end :]).strip() == "the sum"


def test_from_rendering_to_verdict(tokenizer: Any, protocol: ReasoningProtocol) -> None:
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "add two numbers"}], preset=protocol.preset)
    check_rendering(protocol, prompt)
    assert tokenizer.decode(prompt) == "user: add two numbers</s>assistant: <think>\n"
    output = continuation(tokenizer, prompt, "the sum is small.\n</think>\n\n it is two</s>")
    reading = protocol.read(prompt, output, "stop")
    assert reading.complete, reading
    assert reading.reasoning.strip() == "the sum is small."
    assert reading.content.strip() == "it is two"
    assert [span.kind for span in reading.spans] == [SpanKind.REASONING, SpanKind.ANSWER]
    assert protocol.read(prompt, output[:-1], "length").reason is Reason.FINISH_LENGTH
    again = continuation(tokenizer, prompt, "<think>the sum</think> it is two</s>")
    assert protocol.read(prompt, again, "stop").complete  # a repeated start is swallowed here too


def test_markers_that_a_user_writes_open_and_close_nothing(tokenizer: Any, protocol: ReasoningProtocol) -> None:
    for text in ("what is <think> about", "what is </think> about"):
        prompt = render_prompt(tokenizer, [{"role": "user", "content": text}], preset=protocol.preset)
        assert protocol.prompt_state(prompt) == "opened"
        assert protocol.prompt_state(encode(tokenizer, f"user: {text}</s>assistant:")) == "absent"
        assert protocol.prompt_state(encode(tokenizer, f"user: {text}")) == "absent"


def test_an_end_of_turn_that_a_user_writes_is_text(tokenizer: Any, protocol: ReasoningProtocol) -> None:
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "say </s> twice"}], preset=protocol.preset)
    assert prompt.count(2) == 1


def test_a_boundary_merged_with_its_neighbours_is_refused(tmp_path: Path) -> None:
    # In this corpus ".</think>it" is so common that pieces merge over the marker's edge.
    tokenizer = train_tokenizer(tmp_path, more=["the sum.</think>it is two"] * 300)
    protocol = ReasoningProtocol.from_tokenizer(tokenizer, "text-think", vocab_size=len(tokenizer))
    prompt = encode(tokenizer, "assistant: <think>\n")
    merged = encode(tokenizer, "the sum.</think>it is two</s>")
    pieces = tokenizer.convert_ids_to_tokens(merged)
    assert any(("<" in piece and "." in piece) or (">" in piece and "i" in piece) for piece in pieces), pieces
    assert protocol.read(prompt, merged, "stop").reason is Reason.UNCLOSED_THOUGHTS
    then_clean = [*merged[:-1], *encode(tokenizer, "</think> it is two</s>")]
    assert protocol.read(prompt, then_clean, "stop").reason is Reason.MARKER_AS_TEXT


def test_a_marker_piece_of_its_own_is_found_with_and_without_a_space(tmp_path: Path) -> None:
    # The vocabulary has the pieces "</think>" and "▁</think>"; neither is an added token.
    lines = [f"{a}{b}</think> two" for a in WORDS for b in ".!?"] * 20 + ["</think>", "sum </think> two"] * 400
    tokenizer = train_tokenizer(tmp_path, more=lines, split_by_unicode_script=False)
    assert {"</think>", "▁</think>"} <= set(tokenizer.get_vocab())
    protocol = ReasoningProtocol.from_tokenizer(tokenizer, "text-think", vocab_size=len(tokenizer))
    for text in ("the sum</think> two", "the sum </think> two"):
        assert [marker.name for marker in protocol.markers.find(encode(tokenizer, text))] == ["think_end"]


def test_a_vocabulary_that_cannot_spell_the_marker_is_refused(tokenizer: Any) -> None:
    class Unspellable:
        """`<` is unknown here, as in a SentencePiece model without byte fallback."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [0 if "<" in tokenizer.convert_ids_to_tokens(i) else i for i in encode(tokenizer, text)]

    with pytest.raises(TargetError, match="no token for <think>"):
        ReasoningProtocol.from_tokenizer(Unspellable(), "text-think")
