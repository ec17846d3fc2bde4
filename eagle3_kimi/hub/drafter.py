"""Drafters on the Hub: a model repository with config, weights, measured acceptance and a card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from eagle3_kimi.drafter.export_check import check_export
from eagle3_kimi.errors import UsageError
from eagle3_kimi.hub.acceptance import ACCEPTANCE_NAME, PLOT_NAME, Acceptance, read_acceptance
from eagle3_kimi.hub.cards import CARD_NAME, check_label, public_name, render_card
from eagle3_kimi.hub.repository import Published, Repository
from eagle3_kimi.hub.staging import check_output_is_free, staging_folder
from eagle3_kimi.target import Target

DRAFTER_SCHEMA_VERSION = 1
"""Raised when the layout of an exported drafter changes."""

_COPIED = ("config.json", "*.safetensors", "model.safetensors.index.json", PLOT_NAME)
_OWNED = ("*.safetensors", "*.safetensors.index.json", ACCEPTANCE_NAME, PLOT_NAME)
_SIZES = {
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary of the target",
    "draft_vocab_size": "draft vocabulary",
    "eagle_aux_hidden_state_layer_ids": "aux layers (boundary numbering)",
    "max_position_embeddings": "context, in tokens",
    "dtype": "dtype",
}
"""Entries of `config.json` that the card shows."""
_FIGURES = {
    "steps": "optimizer steps",
    "supervised_tokens": "supervised tokens",
    "ttt_steps": "steps of the training-time test",
    "evaluated_on": "evaluated on the split",
    "loss": "loss",
    "acceptance": "acceptance by step, joint, simulated",
    "simulated_acceptance_length": "simulated acceptance length",
    "draft_vocab_size": "draft vocabulary",
    "draft_vocab_coverage": "share of the target's tokens in it",
}
"""Entries of `training.json` that the card shows."""


def push_drafter(
    path: Path,
    repo_id: str,
    *,
    tag: str,
    target: Target,
    private: bool = True,
    licence: str | None = None,
    dry_run: Path | None = None,
) -> Published:
    """Pushes an exported drafter as one version of a model repository.

    Args:
        path: the folder that training exported; `acceptance.json` in it, and `training.json` in it or above it, are
            shown on the card.
        repo_id: created if absent.
        tag: of this version; never moved.
        target: the target it drafts for; the export is checked against it.
        private: of a repository that is created.
        licence: for the card; an identifier of the Hub such as `apache-2.0`.
        dry_run: write everything into this folder instead, without the Hub.

    Raises:
        DataError: the export check failed, or the repository holds drafters of another target or schema.
        HubError: the tag exists, or the Hub says no.
    """
    if not (path / "config.json").is_file():
        raise UsageError(f"{path} holds no drafter: it has no config.json; give the folder that training exported")
    check_export(path, target)
    acceptance = read_acceptance(path)
    label = {
        "kind": "drafter",
        "schema_version": DRAFTER_SCHEMA_VERSION,
        "target": public_name(target.name),
    }
    repository = Repository(repo_id, "model")
    head = None if dry_run is not None else repository.begin_push(label, tag, private=private)
    with staging_folder(dry_run) as folder:
        for file in (file for pattern in _COPIED for file in path.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
        if acceptance is not None:
            (folder / ACCEPTANCE_NAME).write_text(json.dumps(acceptance.measured, indent=2) + "\n", encoding="utf-8")
        card = build_card(folder, target, label, repo_id=repo_id, tag=tag, licence=licence,
                          training=read_training(path), acceptance=acceptance)  # fmt: skip
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
        if head is None:
            return Published(repo_id=repo_id, tag=tag, commit="", folder=folder)
        commit = repository.upload_folder(folder, head, f"Drafter, version {tag}", owned=_OWNED)
    repository.create_tag(tag, commit)
    return Published(repo_id=repo_id, tag=tag, commit=commit)


def pull_drafter(repo_id: str, output: Path, *, tag: str, target: Target | None = None) -> Path:
    """Pulls a version into the folder `output`; whole or not at all.

    Args:
        repo_id: the repository.
        output: must be free.
        tag: of the version.
        target: checks the export against it, where given.

    Raises:
        DataError: not a drafter of this schema, or the export check failed.
        HubError: no such tag, or the Hub cannot be reached and the version is not cached.
    """
    check_output_is_free(output)
    snapshot = Repository(repo_id, "model").download(tag)
    card_file = snapshot / CARD_NAME
    card = card_file.read_text(encoding="utf-8") if card_file.is_file() else None
    check_label(repo_id, tag, card, kind="drafter", schema_version=DRAFTER_SCHEMA_VERSION)
    if target is not None:
        check_export(snapshot, target)
    temporary = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file in snapshot.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copyfile(file, temporary / file.name)  # the cache holds links
    if output.is_dir():
        output.rmdir()
    temporary.replace(output)
    return output


def build_card(
    folder: Path,
    target: Target,
    label: Mapping[str, Any],
    *,
    repo_id: str,
    tag: str,
    licence: str | None,
    training: Mapping[str, Any],
    acceptance: Acceptance | None,
) -> str:
    """The card of what is in `folder`: how good, how trained, how to serve."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {**config.get("transformer_layer_config", {}), **config}  # where the speculators format keeps the sizes
    name = public_name(target.name)
    on_hub = "/" in name
    data = ModelCardData(
        license=licence,
        base_model=name if on_hub else None,
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding"],
    )
    steps = acceptance.num_speculative_tokens if acceptance else min(3, training.get("ttt_steps", 3))
    speculative = {"method": "eagle3", "model": repo_id, "revision": tag, "num_speculative_tokens": steps}
    return render_card(
        "drafter.md.jinja", data, label, repo_id=repo_id, tag=tag, target=name, target_revision=target.revision,
        sizes=_pick(config, _SIZES), acceptance=acceptance, plot=PLOT_NAME if (folder / PLOT_NAME).is_file() else None,
        revision_option=f" --revision {target.revision}" if on_hub else "",
        num_speculative_tokens=steps, vllm_config=json.dumps(speculative),
        figures=_pick(training, _FIGURES),
    )  # fmt: skip


def read_training(path: Path) -> dict[str, Any]:
    """The trainer's summary, beside the drafter or in the run folder above it; empty where there is none."""
    for file in (path / "training.json", path.parent / "training.json"):
        if file.is_file():
            return dict(json.loads(file.read_text(encoding="utf-8")))
    return {}


def _pick(values: Mapping[str, Any], titles: Mapping[str, str]) -> list[tuple[str, str]]:
    """Rows of a table: those of `titles` that `values` has."""
    return [(title, _show(values[key])) for key, title in titles.items() if values.get(key) is not None]


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_show, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
