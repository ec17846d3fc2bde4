from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3_kimi.cli import app
from eagle3_kimi.drafter.export import export_drafter
from eagle3_kimi.errors import UsageError
from tests.evaluation.toy_drafter import build_toy_drafter, write_toy_target


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    target = write_toy_target(tmp_path / "target")
    export_drafter(build_toy_drafter(target), tmp_path / "drafter", target=target)
    return tmp_path / "drafter"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_drafter_that_serves(drafter: Path) -> None:
    code, said = run("export-check", drafter, "--target", drafter.parent / "target")
    assert code == 0
    assert "(layout: eagle3-kimi): 15 tensors, each loaded by vllm and sglang; agrees with" in said
    assert "not compared with a target" in run("export-check", drafter)[1]


def test_faults_are_a_table_and_exit_1_and_convert_mends_them(drafter: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    config["rope_parameters"], config["rope_theta"] = {"rope_theta": 10000.0, "rope_type": "default"}, None
    (drafter / "config.json").write_text(json.dumps(config))
    code, said = run("export-check", drafter)
    assert code == 1
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in said.splitlines() if line.startswith("│")]
    assert {(row[0], row[2]) for row in rows if row[0]} == {
        ("write_both_rope_schemas", "repair"),
        ("layer_ids_name_other_tensors", "reject"),
        ("layer_ids_out_of_range", "reject"),
    }
    assert "vllm would capture boundary ids [0, 1, 2], the drafter was trained on [1, 2, 3]" in said
    mended = drafter.parent / "mended"
    code, said = run("convert", drafter, "-o", mended, "--target", drafter.parent / "target")
    assert code == 0
    assert "config.json: eagle_aux_hidden_state_layer_ids is [1, 2, 3]" in said
    assert run("export-check", mended, "--target", drafter.parent / "target")[0] == 0
    with pytest.raises(UsageError, match="numbers with commas"):
        run("convert", drafter, "-o", mended, "--aux-layer-ids", "2;30")


@pytest.mark.parametrize("command", ["export", "export-check", "convert"])
def test_help_has_an_example(command: str) -> None:
    code, said = run(command, "--help")
    assert code == 0
    assert f"Example: eagle3-kimi {command} " in said
