"""Drafters over a real client and a loopback Hub, and their cards."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_kimi.drafter.config import DrafterConfig
from eagle3_kimi.drafter.export import export_drafter
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.shards import file_digest
from eagle3_kimi.hub.drafter import push_drafter
from eagle3_kimi.target import Target
from tests.hub.client import Client
from tests.hub.hub_state import Hub
from tests.training.toy import AUX, VOCAB, ToyTarget

REPO = "me/drafter"
KEY = ("model", REPO)


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return ToyTarget().save(tmp_path / "target")


@pytest.fixture
def drafter(target: Target, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "run" / "export"
    config = DrafterConfig.for_target(target.config, draft_vocab_size=VOCAB, aux_layer_ids=AUX)
    folder.parent.mkdir()
    export_drafter(DraftModel(config), folder, target=target)
    training = {"steps": 30, "simulated_acceptance_length": 2.13456, "acceptance": [0.6, 0.3], "drafter": str(folder)}
    (folder.parent / "training.json").write_text(json.dumps(training))
    return folder


def write_acceptance(drafter: Path, target: Target) -> dict[str, Any]:
    """As `eagle3-kimi evaluate` writes it."""

    def drafted(k: int, length: float, speed_up: float) -> dict[str, Any]:
        return {
            "num_speculative_tokens": k,
            "acceptance_length": length,
            "acceptance_per_position": [0.7, 0.5],
            "speed_up": speed_up,
            "by_benchmark": {"gsm8k": {"acceptance_length": length + 0.1}},
            "by_span": {"reasoning": {"acceptance_length": length - 0.1}, "answer": {"acceptance_length": 3.0}},
        }

    measured = {
        "schema_version": 1,
        "engine": {"name": "vllm", "version": "0.32.0", "device": "cpu"},
        "drafter": {"name": "export", "sha256": file_digest(drafter / "model.safetensors")},
        "target": {"name": str(target.path), "revision": target.revision},
        "training": {"drafter": str(drafter)},
        "results": [{"thinking": True, "temperature": 0.0, "drafted": [drafted(2, 2.0, 1.2), drafted(4, 2.5, 1.6)]}],
    }
    (drafter / "acceptance.json").write_text(json.dumps(measured))
    return measured


def test_push_and_pull(client: Client, drafter: Path, target: Target, hub: Hub, tmp_path: Path) -> None:
    push = ["push", "drafter", drafter, REPO, "--target", target.path]
    out = tmp_path / "out"
    client.do([*push, "--tag", "v1"], ["pull", "drafter", REPO, "--tag", "v1", "-o", out, "--target", target.path])
    assert {file.name for file in out.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    for name in ("config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (drafter / name).read_bytes()
    assert hub.repos[KEY].private

    # An export that would not serve, and a target that is another one.
    tensors = load_file(drafter / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, drafter / "model.safetensors"
    )
    other = ToyTarget(seed=1).save(tmp_path / "another-target")
    missing, foreign = client.run(
        [*push, "--tag", "v2"], ["push", "drafter", out, REPO, "--tag", "v2", "--target", other.path]
    )
    assert (missing.code, foreign.code) == (1, 1)
    assert "lm_head.weight" in missing.output
    assert "holds target 'target', this push has 'another-target'" in foreign.output
    assert list(hub.repos[KEY].tags) == ["v1"]


def test_the_card_says_how_good_it_is(drafter: Path, target: Target, tmp_path: Path) -> None:
    write_acceptance(drafter, target)
    push_drafter(drafter, REPO, tag="v1", target=target, dry_run=tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    for text in (
        "| decoding | k | all | gsm8k | reasoning | answer | speed-up |",
        "| thinking on, temperature 0 | 2 | 2.00 | 2.10 | 1.90 | 3.00 | 1.20x |",
        "| thinking on, temperature 0 | 4 | 2.50 | 2.60 | 2.40 | 3.00 | 1.60x |",
        "| simulated acceptance length | 2.135 |",
        "| acceptance by step, joint, simulated | 0.6, 0.3 |",
        '"num_speculative_tokens": 4}',
        "--speculative-num-steps 4 --speculative-eagle-topk 1",
        "--speculative-num-draft-tokens 5",
        "**not served here**",
    ):
        assert text in card
    assert not any(str(tmp_path).encode() in file.read_bytes() for file in (tmp_path / "dry").iterdir())


@pytest.mark.vllm
def test_vllm_understands_the_command_of_the_card(drafter: Path, target: Target, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    push_drafter(drafter, REPO, tag="v1", target=target, dry_run=tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    (command,) = [line for line in card.splitlines() if line.startswith("vllm serve")]
    program, verb, model, *flags = shlex.split(command)
    assert (program, verb, model) == ("vllm", "serve", "target")
    options = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    assert options.speculative_config == {
        "method": "eagle3", "model": REPO, "revision": "v1", "num_speculative_tokens": 3,
    }  # fmt: skip


def test_a_measurement_of_other_weights_is_refused(drafter: Path, target: Target, tmp_path: Path) -> None:
    measured = write_acceptance(drafter, target)
    measured["drafter"]["sha256"] = "0" * 64
    (drafter / "acceptance.json").write_text(json.dumps(measured))
    with pytest.raises(DataError, match="measured other weights"):
        push_drafter(drafter, REPO, tag="v1", target=target, dry_run=tmp_path / "dry")
    (drafter / "acceptance.json").write_text("{}")
    with pytest.raises(DataError, match="not what `eagle3-kimi evaluate` writes"):
        push_drafter(drafter, REPO, tag="v1", target=target, dry_run=tmp_path / "dry")


def test_a_card_without_figures(drafter: Path, target: Target, tmp_path: Path) -> None:
    (drafter.parent / "training.json").unlink()
    push_drafter(drafter, REPO, tag="v1", target=target, dry_run=tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    assert "Not measured for this version" in card
    assert "No figures were stated" in card
