"""Files of questions that acceptance is measured on: what each public benchmark's rows look like.

The first row decides the shape, by its keys; every other row must have it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_kimi.errors import DataError
from eagle3_kimi.evaluation.dialogues import Question
from eagle3_kimi.prompts.conversations import normalise_row
from eagle3_kimi.prompts.files import BadJson, digest_of, read_rows
from eagle3_kimi.prompts.shapes import CHAT_KEYS, PROMPT_KEYS, TURN_KEYS

_SPEED_BENCH_GAP = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""SPEED-Bench rows whose text another data set owns hold this until its own tool fills them in."""

AS_IT_STANDS = "the text as it stands, in one user turn"
_HUMANEVAL_FORM = (
    "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"
)
_MATH_FORM = "{problem}\n\nPut the final answer in \\boxed{{}}."


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How one benchmark writes its rows."""

    name: str
    keys: tuple[str, ...]
    """A row with all of these has this shape."""
    read_turns: Callable[[Mapping[str, Any]], Sequence[str]]
    """Row -> what the user says, turn by turn."""
    form: str = AS_IT_STANDS
    """How the text is put to the target: it moves the number, so it is reported."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The questions of one file."""

    name: str
    """The file's, without its endings."""
    shape: str
    form: str
    file: str
    digest: str
    """SHA-256 of the file."""
    rows: int
    """In the file; `questions` may be fewer."""
    questions: tuple[Question, ...]


SHAPES = (
    Shape(
        name="SPEED-Bench",
        keys=("question_id", "category", "sub_category", "turns"),
        read_turns=lambda row: row["turns"],
        form="each turn as it stands; later turns follow the target's own answers",
    ),
    Shape(
        name="MT-Bench",
        keys=("question_id", "category", "turns"),
        read_turns=lambda row: row["turns"],
        form="each turn as it stands; later turns follow the target's own answers",
    ),
    Shape(
        name="MT-Bench",
        keys=("prompt_id", "category", "prompt"),
        read_turns=lambda row: row["prompt"],
        form="each turn as it stands; later turns follow the target's own answers",
    ),
    Shape(
        name="HumanEval",
        keys=("task_id", "prompt", "entry_point"),
        read_turns=lambda row: [_HUMANEVAL_FORM.format(prompt=row["prompt"])],
        form=_HUMANEVAL_FORM,
    ),
    Shape(
        name="MATH-500",
        keys=("problem", "solution", "answer"),
        read_turns=lambda row: [_MATH_FORM.format(problem=row["problem"])],
        form=_MATH_FORM,
    ),
    Shape(name="GSM8K", keys=("question", "answer"), read_turns=lambda row: [row["question"]]),
)
"""In this order: the first whose keys are all there is it."""

_CONVERSATIONS = "conversations"
_CONVERSATION_KEYS = (*TURN_KEYS, *CHAT_KEYS, *PROMPT_KEYS)


def load_benchmark(file: Path, *, limit: int | None = None) -> Benchmark:
    """Reads a file of questions.

    Args:
        file: JSONL (also gzipped), JSON, Parquet or CSV.
        limit: keep the first so many questions.

    Raises:
        UsageError: no such file, or a kind that is not read.
        DataError: rows of no known shape, or of several; a damaged row; SPEED-Bench rows that are not filled in.
    """
    shape, rows = None, 0
    name, questions = file.name.split(".")[0], list[Question]()
    for rows, row in enumerate(read_rows(file), start=1):
        where = f"{file}, row {rows}"
        if isinstance(row, BadJson) or not isinstance(row, Mapping):
            raise DataError(f"{where}: expected an object, came {getattr(row, 'message', type(row).__name__)}")
        if rows == 1:
            shape = detect_shape(row, where)
        if limit is None or len(questions) < limit:
            questions.append(_read_question(row, shape, name, where))
    if not questions:
        raise DataError(f"{file} holds no questions")
    return Benchmark(
        name=name,
        shape=shape.name if shape else _CONVERSATIONS,
        form=shape.form if shape else "the conversation up to its last answer, which the target writes anew",
        file=file.name,
        digest=digest_of(file),
        rows=rows,
        questions=tuple(questions),
    )


def detect_shape(row: Mapping[str, Any], where: str = "the row") -> Shape | None:
    """The benchmark whose keys the row has; None for conversations and plain prompts.

    Raises:
        DataError: none of them; names the keys found and the keys understood.
    """
    for shape in SHAPES:
        if all(row.get(key) is not None for key in shape.keys):
            return shape
    if any(row.get(key) is not None for key in _CONVERSATION_KEYS):
        return None
    understood = "; ".join(f"{shape.name}: {', '.join(shape.keys)}" for shape in SHAPES)
    raise DataError(
        f"{where}: the shape is not understood. Keys found: {', '.join(map(str, row)) or 'none'}. Keys understood: "
        f"{understood}; conversations and prompts: one of {', '.join(_CONVERSATION_KEYS)}"
    )


def _read_question(row: Mapping[str, Any], shape: Shape | None, benchmark: str, where: str) -> Question:
    if shape is None:
        return _read_conversation(row, benchmark, where)
    missing = [key for key in shape.keys if row.get(key) is None]
    if missing:
        raise DataError(f"{where}: the first row is of the shape {shape.name}, this one has no {', '.join(missing)}")
    turns = shape.read_turns(row)
    if isinstance(turns, str) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise DataError(f"{where}: expected a list of texts, one for each of the user's turns, came {turns!r}")
    if any(_SPEED_BENCH_GAP in turn for turn in turns):
        raise DataError(
            f"{where}: its text is not in the file; SPEED-Bench's own preparation fetches it from "
            f"{row.get('source') or 'its source'}. Prepare the file with it, then measure"
        )
    return Question(
        benchmark=benchmark,
        category=str(row.get("category") or row.get("subject") or ""),
        messages=({"role": "user", "content": turns[0]},),
        follow_ups=tuple(turns[1:]),
    )


def _read_conversation(row: Mapping[str, Any], benchmark: str, where: str) -> Question:
    normalised = normalise_row(row, source=benchmark)
    conversation = normalised.conversation
    if conversation is None:
        raise DataError(f"{where}: {normalised.refusal}: {normalised.detail}")
    return Question(
        benchmark=benchmark,
        category=conversation.domain,
        messages=conversation.messages[: conversation.turns[-1]],
        tools=conversation.tools,
    )
