"""The data set as extraction sees it: token ids, spans and lengths, read lazily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.hidden_states.shards import samples_fingerprint, token_digest
from eagle3_kimi.protocol import Span, SpanKind

_SPLITS = ("train", "validation")
_COLUMNS = ("id", "prompt_token_ids", "output_token_ids", "spans")


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where a sample is, and how long; small enough to keep one for every sample."""

    id: str
    split: str
    row: int
    num_tokens: int
    digest: str
    num_prompt_tokens: int
    lowest_id: int
    highest_id: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample's ids. S tokens, P of them prompt."""

    id: str
    split: str
    token_ids: Tensor
    """int64 [S]."""
    num_prompt_tokens: int
    spans: tuple[Span, ...]


class SampleReader:
    """Random access to the samples of a `DatasetDict` folder with splits `train` and `validation`.

    Raises:
        UsageError: there is no data set at `path`.
        DataError: a column is missing, or an id occurs twice.
    """

    def __init__(self, path: Path) -> None:
        from datasets import DatasetDict, load_from_disk

        if not (path / "dataset_dict.json").is_file():
            raise UsageError(f"{path} is not a data set saved with save_to_disk (it has no dataset_dict.json)")
        dataset = load_from_disk(str(path))
        assert isinstance(dataset, DatasetDict)  # what dataset_dict.json means
        self._splits = {name: dataset[name] for name in _SPLITS if name in dataset}
        for name, split in self._splits.items():
            missing = [column for column in _COLUMNS if column not in split.column_names]
            if missing:
                raise DataError(f"{path}, split {name}: columns {missing} are missing; found {split.column_names}")
            exact = list(split["token_exact"]) if "token_exact" in split.column_names else []
            if not all(exact):
                row = exact.index(False)
                raise DataError(
                    f"{path}, split {name}, row {row}: token_exact is false: its ids are text tokenised again, "
                    "not what the target produced. Generate those samples again, or filter them out."
                )
        self._rows = {
            name: split.with_format("arrow", columns=list(_COLUMNS[1:])) for name, split in self._splits.items()
        }
        if not any(len(split) for split in self._splits.values()):
            raise DataError(f"{path} holds no samples in the splits {', '.join(_SPLITS)}; found {list(dataset)}")
        self.refs = [ref for name in self._splits for ref in self._read_refs(name)]
        seen: set[str] = set()
        for ref in self.refs:
            if ref.id in seen:
                raise DataError(f"{path}: the id {ref.id} occurs twice")
            seen.add(ref.id)

    @property
    def fingerprint(self) -> str:
        """Digest of ids, splits and token ids, whatever their order."""
        return samples_fingerprint((ref.id, ref.split, ref.digest) for ref in self.refs)

    def read(self, ref: SampleRef) -> Sample:
        """The sample's ids and spans."""
        row = self._rows[ref.split][ref.row]
        prompt, output = (row[column].combine_chunks().flatten() for column in _COLUMNS[1:3])
        token_ids = np.concatenate([prompt.to_numpy(), output.to_numpy()], dtype=np.int64)
        return Sample(
            id=ref.id,
            split=ref.split,
            token_ids=torch.from_numpy(token_ids),
            num_prompt_tokens=len(prompt),
            spans=tuple(Span(SpanKind(s["kind"]), s["start"], s["end"]) for s in row["spans"][0].as_py()),
        )

    def provenance(self, key: str) -> Any:
        """A value all samples share, e.g. `temperature`; None where the data set does not say or they differ."""
        values = set(self.recorded("provenance", key).values())
        return values.pop() if len(values) == 1 else None

    def recorded(self, column: str, key: str | None = None) -> dict[str, Any]:
        """Sample id -> what the column says (its `key`, for a column of structs); empty where there is none."""
        found: dict[str, Any] = {}
        for name, split in self._splits.items():
            if column in split.column_names:
                ids = (ref.id for ref in self.refs if ref.split == name)
                values = split[column] if key is None else (row.get(key) for row in split[column])
                found.update(zip(ids, values, strict=True))
        return found

    def _read_refs(self, name: str) -> Iterator[SampleRef]:
        split = self._splits[name].select_columns(list(_COLUMNS[:3])).with_format("numpy")
        for row, values in enumerate(split):
            ids = torch.cat([torch.as_tensor(values[column]).to(torch.int64) for column in _COLUMNS[1:3]])
            yield SampleRef(
                id=str(values["id"]),
                split=name,
                row=row,
                num_tokens=len(ids),
                digest=token_digest(ids),
                num_prompt_tokens=len(values["prompt_token_ids"]),
                lowest_id=int(ids.min()) if len(ids) else 0,
                highest_id=int(ids.max()) if len(ids) else 0,
            )


def plan_shares(refs: Sequence[SampleRef], num_groups: int, *, window: int) -> list[list[SampleRef]]:
    """Deals samples out to data-parallel groups; the same on every rank.

    Inside each window samples go from long to short, to the groups there and back again, so that
    shares are even in tokens and neighbours are of like length:

        lengths  9 8 7 6 5 4      groups  0 1 2 2 1 0
    """
    shares: list[list[SampleRef]] = [[] for _ in range(num_groups)]
    there_and_back = [*range(num_groups), *reversed(range(num_groups))]
    for start in range(0, len(refs), window):
        by_length = sorted(refs[start : start + window], key=lambda ref: (-ref.num_tokens, ref.id))
        for ref, group in zip(by_length, cycle(there_and_back), strict=False):
            shares[group].append(ref)
    return shares
