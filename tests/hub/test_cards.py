from __future__ import annotations

import pytest

from eagle3_kimi.errors import DataError
from eagle3_kimi.hub.cards import check_no_loading_script, check_same_label, public_name, read_label, render_histogram

LABEL = {"kind": "features", "schema_version": 1, "target": "a"}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.5"),
        ("tiny", "tiny"),
        ("/data/models/kimi", "kimi"),
        ("./kimi", "kimi"),
        ("~/kimi/", "kimi"),
    ],
)
def test_no_folder_of_a_machine_is_shown(name: str, shown: str) -> None:
    assert public_name(name) == shown


def test_histogram() -> None:
    # 5 is of 4 to 7, 8 and 15 of 8 to 15; the fullest bin is 40 wide
    lines = render_histogram([5, 8, 15, 33]).splitlines()
    assert [line.split() for line in lines] == [
        ["4", "to", "7", "1", "█" * 20],
        ["8", "to", "15", "2", "█" * 40],
        ["16", "to", "31", "0"],
        ["32", "to", "63", "1", "█" * 20],
    ]
    assert render_histogram([]) == "(none)"


def test_label() -> None:
    assert read_label("---\neagle3_kimi:\n  kind: dataset\n---\n# Card") == {"kind": "dataset"}
    assert read_label("# Card") is None
    assert read_label("---\n- a list\n---\n") is None
    assert read_label(None) is None


def test_a_repository_keeps_its_kind() -> None:
    check_same_label("me/x", LABEL, None, [])
    check_same_label("me/x", LABEL, {**LABEL}, ["store.json"])
    for theirs, content, message in (
        ({**LABEL, "kind": "drafter"}, [], "holds kind 'drafter'"),
        ({**LABEL, "target": "b"}, [], "holds target 'b', this push has 'a'"),
        ({"kind": "features"}, [], "holds schema_version None"),
        (None, ["weights.bin"], "did not push"),
        ({**LABEL}, ["x.py"], "loading script x.py"),
    ):
        with pytest.raises(DataError, match=message):
            check_same_label("me/x", LABEL, theirs, content)


def test_a_script_in_a_folder_is_no_loading_script() -> None:
    check_no_loading_script("me/x", ["tools/x.py", "data/a.parquet"])
