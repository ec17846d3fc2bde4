from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from eagle3_kimi.demo.settings import find_repository
from eagle3_kimi.demo.workdir import WORKDIR_VERSION, WorkFolder, read_json, write_json
from eagle3_kimi.errors import RunStopped, UsageError

STAGES = ("first", "second")


def open_folder(path: Path, **identity: Any) -> WorkFolder:
    return WorkFolder(path, identity={"engine": "vllm", "seed": 0, **identity}, stages=STAGES)


def names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def test_a_finished_stage_is_reused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made: list[int] = []

    def action() -> dict[str, Any]:
        made.append(1)
        return {"rows": (1, 2)}

    for _ in range(2):
        with caplog.at_level("INFO"), open_folder(tmp_path) as folder:
            result = folder.stage("first", {"count": 3, "ids": (1, 2)}, action)
    assert made == [1]
    assert result == {"rows": [1, 2]}
    assert "[1/2] first: reused" in caplog.text
    with open_folder(tmp_path) as folder:
        folder.stage("second", {}, lambda: {})
        assert set(folder.seconds()) == set(STAGES)


def test_an_unfinished_stage_is_made_again(tmp_path: Path) -> None:
    def killed() -> dict[str, Any]:
        (tmp_path / "half").write_text("kept")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_folder(tmp_path) as folder:
        folder.stage("first", {}, killed)
    with open_folder(tmp_path) as folder:
        assert folder.stage("first", {}, lambda: {"half": (tmp_path / "half").read_text()}) == {"half": "kept"}


def test_a_stage_of_other_inputs_is_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        folder.stage("first", {"prompts": "a", "seed": 0}, lambda: {})
    before = names(tmp_path)
    message = r"the stage first in .* was made from another prompts, target; nothing was touched"
    with pytest.raises(UsageError, match=message), open_folder(tmp_path) as folder:
        folder.stage("first", {"prompts": "b", "seed": 0, "target": "x"}, lambda: {})
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"engine": "transformers"},
            "was made with engine vllm, this run has engine transformers; nothing was touched",
        ),
        ({"seed": 1}, "was made with seed 0, this run has seed 1"),
    ],
)
def test_a_folder_made_for_something_else_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with open_folder(tmp_path) as folder:
        folder.stage("first", {}, lambda: {})
    before = names(tmp_path)
    with pytest.raises(UsageError, match=message), open_folder(tmp_path, **change):
        pass
    assert names(tmp_path) == before


def test_a_folder_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    with open_folder(tmp_path):
        pass
    write_json(tmp_path / "demo.json", {**read_json(tmp_path / "demo.json"), "version": WORKDIR_VERSION + 1})
    (tmp_path / "data").write_text("precious")
    expected = (
        f"was made with version {WORKDIR_VERSION + 1}, this run has version {WORKDIR_VERSION}; nothing was touched"
    )
    with pytest.raises(UsageError, match=expected), open_folder(tmp_path):
        pass
    assert (tmp_path / "data").read_text() == "precious"


def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(UsageError, match="is not empty and was not made by the demo"), open_folder(tmp_path):
        pass
    assert names(tmp_path) == ["thesis.tex"]


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with open_folder(tmp_path), pytest.raises(RunStopped, match="another demo is running in"), open_folder(tmp_path):
        pass


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    def fills_the_disk() -> dict[str, Any]:
        with Path("/dev/full").open("w") as file:
            file.write("x")
        return {}

    with open_folder(tmp_path) as folder:
        folder.stage("first", {}, lambda: {"rows": 5})
        with pytest.raises(
            RunStopped, match=rf"the stage second stopped: {os.strerror(errno.ENOSPC)} .*finished is kept"
        ):
            folder.stage("second", {}, fills_the_disk)
        assert folder.stage("first", {}, lambda: {"rows": 0}) == {"rows": 5}
        assert folder.stage("second", {}, lambda: {"rows": 6}) == {"rows": 6}


def test_an_installation_without_the_launched_scripts_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run it from a clone of the repository"):
        find_repository([tmp_path])
    assert (find_repository() / "train" / "train_drafter.py").is_file()
