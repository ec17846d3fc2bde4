"""Features of the data set: they refuse at write time what is not reasoning-complete.

`datasets` checks nothing on its own: `encode_example` is skipped for None and sees only the first
item of a list, so cells are refused in `cast_storage`, which runs on every written batch (also in
`map`), and rows in `Features.encode_example`. A `Value` subclass whose `_type` stays "Value" still
serialises as a plain type, so a machine without this package loads the data set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Features, List, Value

from eagle3_kimi.errors import DataError
from eagle3_kimi.protocol import is_blank
from eagle3_kimi.schema import PROVENANCE, check_rows, find_span_fault


class _EqualToPlain(Value):
    """Equal to the plain type, so that generated and reloaded data sets can be joined."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.dtype == other.dtype

    __hash__ = None  # type: ignore[assignment]


@dataclass(repr=False, eq=False)
class NonBlankText(_EqualToPlain):
    """A string that is neither null nor blank."""

    def encode_example(self, value: Any) -> str:
        if not isinstance(value, str) or is_blank(value):
            raise DataError(f"expected text that is not blank, got {value!r}; the sample belongs in quarantine")
        return value

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        storage = pc.cast(storage, self.pa_type)
        for row, value in enumerate(storage):
            if not value.is_valid or is_blank(value.as_py()):
                raise DataError(
                    f"row {row} of a batch: expected text that is not blank, got {value.as_py()!r}; "
                    "the sample belongs in quarantine"
                )
        return storage


@dataclass(repr=False, eq=False)
class TokenId(_EqualToPlain):
    """A token id in `[0, limit)`. The limit is no dataclass field, so it does not reach the saved schema."""

    def below(self, limit: int | None) -> TokenId:
        self._limit = limit
        return self

    def encode_example(self, value: Any) -> int:
        return int(value)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        if storage.null_count:
            raise DataError("expected token ids, got null among them")
        limit = getattr(self, "_limit", None) or 2**31
        if len(storage):
            low, high = pc.min(storage).as_py(), pc.max(storage).as_py()
            if low < 0 or high >= limit:
                raise DataError(f"token ids must lie in [0, {limit}), got {low}..{high}")
        return pc.cast(storage, self.pa_type)


@dataclass(repr=False, eq=False)
class SpanList:
    """Spans in order, one reasoning span first of all; saved as a plain list of structs.

    Not a subclass of `List`: `datasets` rebuilds those as plain ones. Whether a span ends inside the ids
    is a rule about two columns, so it is checked for rows: by the builder and by `schema.validate`.
    """

    feature: dict[str, Value] = field(
        default_factory=lambda: {"kind": Value("string"), "start": Value("int32"), "end": Value("int32")}
    )
    length: int = -1
    id: str | None = field(default=None, repr=False)
    _type: str = field(default="List", init=False, repr=False)

    def __repr__(self) -> str:
        return f"List({self.feature})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, List | SpanList) and other.feature == self.feature and other.length == self.length

    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> pa.DataType:
        return pa.list_(pa.struct({name: value.pa_type for name, value in self.feature.items()}))

    def encode_example(self, value: Any) -> list[dict[str, Any]]:
        return [dict(span) for span in value]

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        rows = storage.to_pylist()
        for row, spans in enumerate(rows):
            message = find_span_fault(spans or ())
            if message:
                raise DataError(f"row {row} of a batch, field spans: {message}; the sample belongs in quarantine")
        return pa.array(rows, self())


class CompleteFeatures(Features):
    """Features that also check each row as a whole: spans inside the ids, counts, one reasoning span."""

    def encode_example(self, example: dict[str, Any]) -> dict[str, Any]:
        check_rows([example])
        return super().encode_example(example)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompleteFeatures, (dict(self),)


def build_features(vocab_size: int | None = None) -> Features:
    """Features of a complete sample; writing a row that is not complete raises `DataError`.

    Args:
        vocab_size: the target's; ids at or above it are refused. None checks only for negative ids.
    """
    token_ids = List(TokenId("int32").below(vocab_size))
    return CompleteFeatures(
        {
            "id": NonBlankText("string"),
            "conversation_id": NonBlankText("string"),
            "turn": Value("int32"),
            "sample_index": Value("int32"),
            "source": Value("string"),
            "conversation": List({"role": Value("string"), "content": Value("string")}),
            "prompt_token_ids": token_ids,
            "output_token_ids": token_ids,
            "spans": SpanList(),
            "reasoning": NonBlankText("string"),
            "content": Value("string"),
            "tool_calls": Value("string"),
            "finish_reason": Value("string"),
            "num_prompt_tokens": Value("int32"),
            "num_reasoning_tokens": Value("int32"),
            "num_output_tokens": Value("int32"),
            "token_exact": Value("bool"),
            "provenance": {name: Value(dtype) for name, dtype in PROVENANCE.items()},
            "schema_version": Value("int32"),
        }
    )


def build_quarantine_features() -> Features:
    """Plain features of a refused sample; nothing is enforced, everything is kept."""
    return Features(
        {
            "id": Value("string"),
            "conversation_id": Value("string"),
            "turn": Value("int32"),
            "sample_index": Value("int32"),
            "source": Value("string"),
            "reason": Value("string"),
            "detail": Value("string"),
            "text": Value("string"),
            "prompt_token_ids": List(Value("int64")),  # what was refused may hold any id
            "output_token_ids": List(Value("int64")),
            "finish_reason": Value("string"),
        }
    )
