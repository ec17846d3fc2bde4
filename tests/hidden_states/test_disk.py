from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_kimi.errors import UsageError
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.disk import check_free_space, compute_state_bytes
from eagle3_kimi.hidden_states.extract import extract_hidden_states
from eagle3_kimi.target import Target


def test_kimi_needs_57_kilobytes_a_token() -> None:
    assert compute_state_bytes(tokens=1, hidden_size=7168, states=4, bytes_per_value=2) == 57_344


def test_a_folder_that_is_not_there_yet_is_judged_by_its_disk(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_free_space(tmp_path / "new" / "store", 1)
    with pytest.raises(UsageError, match=r"store needs at least .* GB are free"):
        check_free_space(tmp_path / "new" / "store", 2 * free)


def test_extraction_does_not_start_what_the_disk_cannot_hold(
    random_target: Target, greedy_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    config = ExtractConfig(
        dataset=greedy_dataset,
        target=str(random_target.path),
        output=tmp_path / "store",
        aux_layer_ids=(1, 2, 3),
        engine="transformers",
        protocol="tiny-kimi",
    )
    with pytest.raises(UsageError, match="needs at least"):
        extract_hidden_states(config)
    assert not (tmp_path / "store").exists()
