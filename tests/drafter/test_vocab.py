from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_kimi.drafter.vocab import (
    VocabMap,
    build_vocab_map,
    check_vocab_map,
    compute_coverage,
    count_tokens,
    vocab_fingerprint,
)
from eagle3_kimi.errors import DataError


def test_most_frequent_ids_and_forced_ones_in_rising_order() -> None:
    counts = count_tokens([torch.tensor([4, 4, 4, 7]), torch.tensor([7, 1, 2])], vocab_size=10)
    # 4: 3, 7: 2, 1 and 2: 1 each. Id 9 never occurs but is forced; the last place goes to 1, the smaller of the tie.
    vocab_map = build_vocab_map(counts, draft_vocab_size=4, forced_ids=[9])

    assert vocab_map.target_ids.tolist() == [1, 4, 7, 9]
    assert vocab_map.d2t.tolist() == [1, 3, 5, 6]
    assert vocab_map.t2d.nonzero()[:, 0].tolist() == [1, 4, 7, 9]
    assert compute_coverage(counts, vocab_map) == pytest.approx(6 / 7)
    check_vocab_map(vocab_map.d2t, vocab_map.t2d)


def test_forced_ids_must_fit() -> None:
    with pytest.raises(DataError, match="3 forced ids"):
        build_vocab_map(torch.ones(10, dtype=torch.int64), draft_vocab_size=2, forced_ids=[1, 2, 3])
    with pytest.raises(DataError, match="forced ids"):
        build_vocab_map(torch.ones(10, dtype=torch.int64), draft_vocab_size=2, forced_ids=[10])


@pytest.mark.parametrize(
    ("d2t", "true_ids", "match"),
    [
        ([0, 0, 0, 0], [0, 3, 4, 9], "disagree"),  # the first D ids, as an engine assumes without a map
        ([0, 3, 4, 9], [0, 3, 4, 9], "target ids"),  # ids instead of offsets: 3 + 9 is past the end
        ([1, 0, 2, 2], [1, 4, 5], "two draft ids"),
        ([0, 2, 2, 6], [0, 3, 4], "disagree"),
    ],
)
def test_maps_that_disagree_are_refused(d2t: list[int], true_ids: list[int], match: str) -> None:
    mask = torch.zeros(10, dtype=torch.bool)
    mask[true_ids] = True
    with pytest.raises(DataError, match=match):
        check_vocab_map(torch.tensor(d2t), mask)


def test_stale_map_is_refused(tmp_path: Path) -> None:
    counts, file = torch.arange(10), tmp_path / "vocab_map.safetensors"
    saved = build_vocab_map(counts, draft_vocab_size=4, data_fingerprint="aaa")
    saved.save(file)
    same = vocab_fingerprint("aaa", 4, 10, ())

    loaded = VocabMap.load(file, draft_vocab_size=4, vocab_size=10, fingerprint=same)
    assert torch.equal(loaded.target_ids, saved.target_ids)
    for sizes, fingerprint in (((8, 10), same), ((4, 12), same), ((4, 10), vocab_fingerprint("bbb", 4, 10, ()))):
        with pytest.raises(DataError, match="stale"):
            VocabMap.load(file, draft_vocab_size=sizes[0], vocab_size=sizes[1], fingerprint=fingerprint)
