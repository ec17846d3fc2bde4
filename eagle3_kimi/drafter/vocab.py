"""The draft vocabulary: the tokens the drafter may propose, and the map to the target's ids.

`d2t` holds *offsets*: target id = draft id + d2t[draft id]. `t2d` is a mask over the target's vocabulary. The two say
the same thing twice, and an engine that reads one of them wrongly proposes wrong tokens in silence, so they are checked
against each other whenever they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3_kimi.drafter.faults import Fault, FaultName
from eagle3_kimi.errors import DataError


@dataclass(frozen=True, kw_only=True)
class VocabMap:
    """Which D of V target ids the drafter knows, for one data set (`fingerprint`)."""

    target_ids: Tensor
    """int64 [D], rising: the target's id of each draft id."""
    vocab_size: int
    """V."""
    fingerprint: str
    """Of the data it was counted on and of the choices that shaped it."""

    @property
    def d2t(self) -> Tensor:
        """Offsets, int64 [D]."""
        return self.target_ids - torch.arange(len(self.target_ids))

    @property
    def t2d(self) -> Tensor:
        """Mask, bool [V]."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.target_ids] = True
        return mask

    def save(self, file: Path) -> None:
        """Writes the map as safetensors, whole or not at all."""
        temporary = file.with_name(f".{file.name}.tmp")
        metadata = {"fingerprint": self.fingerprint, "vocab_size": str(self.vocab_size)}
        save_file({"d2t": self.d2t, "t2d": self.t2d}, temporary, metadata=metadata)
        os.replace(temporary, file)

    @classmethod
    def load(cls, file: Path, *, draft_vocab_size: int, vocab_size: int, fingerprint: str) -> VocabMap:
        """Reads a map and refuses one made for something else.

        Raises:
            DataError: its sizes or its fingerprint are not the expected ones, or its halves disagree.
        """
        with safe_open(file, framework="pt") as handle:
            came = handle.metadata().get("fingerprint", "")
            d2t, t2d = handle.get_tensor("d2t"), handle.get_tensor("t2d")
        check_vocab_map(d2t, t2d)
        if (len(d2t), len(t2d)) != (draft_vocab_size, vocab_size) or came != fingerprint:
            raise DataError(
                f"the vocabulary map {file} is stale: it maps {len(d2t)} of {len(t2d)} ids for data {came[:12]}, this "
                f"run needs {draft_vocab_size} of {vocab_size} for {fingerprint[:12]}; delete it to count again"
            )
        return cls(target_ids=d2t + torch.arange(len(d2t)), vocab_size=len(t2d), fingerprint=came)


def count_tokens(sequences: Iterable[Tensor], vocab_size: int) -> Tensor:
    """int64 [V]: how often each id occurs in the supervised tokens of each sample."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in sequences:
        counts.index_add_(0, ids, torch.ones_like(ids))  # touches the ids that occur, not all V
    return counts


def build_vocab_map(
    counts: Tensor, *, draft_vocab_size: int, forced_ids: Iterable[int] = (), data_fingerprint: str = ""
) -> VocabMap:
    """The `draft_vocab_size` most frequent ids, after the forced ones; ties go to the smaller id.

    Args:
        counts: int64 [V], from `count_tokens` over the supervised tokens of the training split.
        draft_vocab_size: D.
        forced_ids: control markers that stay in however rare they are.
        data_fingerprint: of the data that were counted.

    Raises:
        DataError: more forced ids than places, or one outside the vocabulary.
    """
    vocab_size, forced = len(counts), sorted(set(forced_ids))
    if draft_vocab_size > vocab_size:
        raise DataError(
            f"draft_vocab_size {draft_vocab_size} is larger than the target's vocabulary of {vocab_size}; "
            "give a smaller one, or the same for no reduction"
        )
    if len(forced) > draft_vocab_size or (forced and not 0 <= forced[0] <= forced[-1] < vocab_size):
        raise DataError(
            f"{len(forced)} forced ids {forced[:8]} do not fit a draft vocabulary of {draft_vocab_size} of {vocab_size}"
        )
    priority = counts.clone()
    priority[torch.tensor(forced, dtype=torch.int64)] = int(counts.max()) + 1
    order = torch.argsort(priority, descending=True, stable=True)[:draft_vocab_size]
    return VocabMap(
        target_ids=order.sort().values,
        vocab_size=vocab_size,
        fingerprint=vocab_fingerprint(data_fingerprint, draft_vocab_size, vocab_size, forced),
    )


def vocab_fingerprint(data_fingerprint: str, draft_vocab_size: int, vocab_size: int, forced_ids: Iterable[int]) -> str:
    """Digest of everything that decides a map."""
    choices = json.dumps([data_fingerprint, draft_vocab_size, vocab_size, sorted(set(forced_ids))])
    return hashlib.sha256(choices.encode()).hexdigest()


def compute_coverage(counts: Tensor, vocab_map: VocabMap) -> float:
    """Share of the counted tokens inside the draft vocabulary; of held-out tokens, the `draft_vocab_coverage`."""
    total = int(counts.sum())
    return int(counts[vocab_map.target_ids].sum()) / total if total else 0.0


def check_vocab_map(d2t: Tensor, t2d: Tensor) -> None:
    """Refuses offsets and mask that do not name the same ids.

    Raises:
        DataError: see `find_vocab_map_faults`.
    """
    for fault in find_vocab_map_faults(d2t, t2d, vocab_size=len(t2d)):
        raise DataError(fault.sentence)


def find_vocab_map_faults(d2t: Tensor, t2d: Tensor | None, *, vocab_size: int) -> list[Fault]:
    """Whether offsets and mask say the same, and the offsets are offsets.

    Args:
        d2t: integers [D]: target id of draft id i is i + d2t[i].
        t2d: mask [V], or None where a trainer writes none (no engine reads it).
        vocab_size: V.
    """
    ids = d2t.long() + torch.arange(len(d2t))
    mask = None if t2d is None else t2d.bool()
    if _name_same_ids(ids, mask, vocab_size):
        return []
    if _name_same_ids(d2t.long(), mask, vocab_size):
        sentence = "d2t holds target ids; engines add each entry to its index, so it must hold offsets (id - index)"
        return [Fault(FaultName.D2T_HOLDS_IDS, sentence)]
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        sentence = f"d2t leads to target ids {int(ids.min())}..{int(ids.max())}, outside 0..{vocab_size - 1}"
        return [Fault(FaultName.D2T_OUT_OF_RANGE, sentence)]
    if len(ids.unique()) != len(ids):
        return [Fault(FaultName.D2T_REPEATS, "d2t maps two draft ids to one target id")]
    count = int(mask.sum()) if mask is not None else 0
    sentence = f"d2t and t2d disagree: d2t names {len(ids)} ids, t2d {count}, and not the same ones"
    return [Fault(FaultName.D2T_T2D_DISAGREE, sentence)]


def _name_same_ids(ids: Tensor, mask: Tensor | None, vocab_size: int) -> bool:
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    if not inside or len(ids.unique()) != len(ids):
        return False
    return mask is None or (len(mask) == vocab_size and torch.equal(ids.sort().values, mask.nonzero()[:, 0]))
