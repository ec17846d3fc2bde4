"""Checks one case of kind `training`: what a person can get wrong between hidden states and a trained drafter.

Each kind of input goes to the function that guards it; a refusal is the verdict `reject`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3_kimi.drafter.config import DrafterConfig, check_aux_layer_ids, default_aux_layer_ids, from_output_ids
from eagle3_kimi.drafter.export import export_drafter
from eagle3_kimi.drafter.export_check import check_export
from eagle3_kimi.drafter.model import DraftModel
from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.drafter.vocab import VocabMap, build_vocab_map, check_vocab_map, vocab_fingerprint
from eagle3_kimi.generation.rows import split_of
from eagle3_kimi.hidden_states.disk import check_free_space, compute_state_bytes
from eagle3_kimi.hidden_states.store import FeatureFormat, FeatureSample, StoreManifest
from eagle3_kimi.target import Target
from eagle3_kimi.training.batches import pack, select_trainable
from eagle3_kimi.training.checkpoint import check_rate_continues
from eagle3_kimi.training.metrics import Counts, pack_counts
from eagle3_kimi.training.setup import needs_final_norm
from eagle3_kimi.training.spans import SPAN_NAMES
from eagle3_kimi.training.step import apply_gradients
from tests.cases.checking import Came, check_case
from tests.training.toy import AUX, HIDDEN, ToyTarget, build_toy_module

_BOUNDARY = {"boundary", "input", "vllm", "hf", "hidden_states"}
_OUTPUT = {"output", "layer_output", "after_layer", "sglang"}


def check(case: dict[str, Any]) -> str | None:
    """See `check_case`."""
    return check_case(case, _RUNS)


def _supervision(given: Came, came: Came) -> None:
    """A row of n supervised tokens has n + 1 output tokens: the first is the target's own."""
    samples = _Samples(ToyTarget().sample(i, prompt=3, output=n + 1) for i, n in enumerate(given["supervised_tokens"]))
    kept, refused = select_trainable(samples, max_length=1 << 30)
    came |= {"kept": len(kept), "dropped": sum(refused.values())}


class _Samples(list[FeatureSample]):
    @property
    def lengths(self) -> list[int]:
        return [len(sample.token_ids) for sample in self]

    @property
    def prompt_lengths(self) -> list[int]:
        return [sample.num_prompt_tokens for sample in self]


def _batch_loss(given: Came, came: Came) -> None:
    """The division of loss and gradients by the supervised tokens, through a batch that may have none."""
    valid = int(given["valid_tokens"])
    counts = torch.zeros(3 + 3 * len(SPAN_NAMES), dtype=torch.float64)
    counts[:2] = torch.tensor([given["loss_sum"], valid])
    module = build_toy_module(ttt_steps=2)
    samples = [ToyTarget().sample(0, prompt=3, output=valid + 1)] if valid else []
    loss, _ = module(pack(samples, 2, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN))
    loss.backward()
    parameters = list(module.parameters())
    norm = apply_gradients(
        parameters,
        torch.optim.AdamW(parameters),
        supervised_tokens=counts[1],
        world_size=1,
        max_grad_norm=1.0,
        learning_rate=1e-3,
    )
    finite = bool(torch.isfinite(norm)) and all(bool(torch.isfinite(p).all()) for p in parameters)
    came |= {"loss": Counts.unpack(counts).loss, "grad_finite": finite}


def _position_mask(given: Came, came: Came) -> None:
    argmax, known = torch.tensor(given["target_argmax"]), torch.tensor(sorted(given["draft_vocab"]))
    size = int(max(argmax.max(), known.max())) + 2  # one more, so that the vocabulary is a reduced one
    config = DrafterConfig(
        hidden_size=8, vocab_size=size, draft_vocab_size=len(known), num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, intermediate_size=8, aux_layer_ids=(1, 2, 3), target_num_layers=4, max_position_embeddings=8,
    )  # fmt: skip
    model = DraftModel(config)
    model.t2d.copy_(VocabMap(target_ids=known, vocab_size=size, fingerprint="").t2d)
    mask = torch.tensor(given.get("loss_mask", [1] * len(argmax))).bool()
    came["position_mask"] = (model.knows(argmax) & mask).int().tolist()


def _row_count(given: Came, came: Came) -> None:
    """One row of hidden states for every token that went in: all but the sample's last one."""
    tokens = given.get("num_tokens", given.get("completion_tokens"))
    _check_sample(tokens, torch.zeros(given["hidden_rows"], 4))


def _finite(given: Came, came: Came) -> None:
    special = {None: math.nan}
    rows = [[float(special.get(value, value)) for value in row] for row in given["hidden"]]
    _check_sample(len(rows), torch.tensor(rows))


def _check_sample(num_inputs: int, aux: torch.Tensor) -> None:
    manifest = StoreManifest(
        target="", target_revision="", hidden_size=aux.shape[1], num_layers=4, vocab_size=9, aux_layer_ids=(1,),
        dtype="float32", format=FeatureFormat(aux_dtype="fp32", targets="state"), dataset_fingerprint="", protocol="",
    )  # fmt: skip
    sample = FeatureSample(
        id="case",
        split="train",
        token_ids=torch.zeros(num_inputs + 1, dtype=torch.int64),
        num_prompt_tokens=1,
        spans=(),
        aux_hidden_states=aux,
        final_hidden_states=torch.zeros(num_inputs - 1, aux.shape[1]),
        target_argmax=torch.zeros(num_inputs - 1, dtype=torch.int64),
    )
    sample.check(manifest)


def _layer_ids(given: Came, came: Came) -> None:
    convention, ids = str(given["convention"]), list(given["ids"])
    if convention not in _BOUNDARY | _OUTPUT:
        raise AssertionError(f"a numbering that no engine uses: {convention}")
    boundary = from_output_ids(ids) if convention in _OUTPUT else ids
    check_aux_layer_ids(tuple(boundary), given["num_layers"])
    came["boundary_ids"] = boundary


def _default_layer_ids(given: Came, came: Came) -> None:
    came["default_boundary_ids"] = list(default_aux_layer_ids(given["num_layers"]))


def _final_norm(given: Came, came: Came) -> None:
    manifest = StoreManifest(
        target="", target_revision="", hidden_size=4, num_layers=4, vocab_size=9, aux_layer_ids=(1,), dtype="float32",
        format=FeatureFormat(aux_dtype="fp32", targets="state"), dataset_fingerprint="", protocol="", final_pre_norm=given["stored"] == "pre_norm",
    )  # fmt: skip
    came["apply_final_norm"] = needs_final_norm(manifest)


def _vocab_halves(given: Came, came: Came) -> None:
    mask = torch.zeros(given["target_vocab"], dtype=torch.bool)
    mask[given["t2d_true"]] = True
    check_vocab_map(torch.tensor(given["d2t"]), mask)


def _cached_map(given: Came, came: Came) -> None:
    """Both ways in which a map can be stale, through the file that a run keeps."""
    cached = given.get("cache", {"draft_vocab": 4, "target_vocab": 10})
    wanted = given.get("config", cached)
    made, now = given.get("cache_fingerprint", "same"), given.get("dataset_fingerprint", "same")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab_map.safetensors"
        counts = torch.arange(cached["target_vocab"])
        build_vocab_map(counts, draft_vocab_size=cached["draft_vocab"], data_fingerprint=made).save(file)
        draft, size = wanted["draft_vocab"], wanted["target_vocab"]
        fingerprint = vocab_fingerprint(now, draft, size, ())
        VocabMap.load(file, draft_vocab_size=draft, vocab_size=size, fingerprint=fingerprint)


def _rope(given: Came, came: Came) -> None:
    """A drafter is exported for the target; then its rope is what the case says."""
    with tempfile.TemporaryDirectory() as name:
        folder = ToyTarget().save(Path(name) / "target").path
        _edit(folder / "config.json", given["target"])
        target = Target(name="case", path=folder, revision="0")
        config = DrafterConfig.for_target(target.config, draft_vocab_size=target.vocab_size, aux_layer_ids=AUX)
        export_drafter(DraftModel(config), Path(name) / "drafter", target=target)
        file = Path(name) / "drafter" / "config.json"
        _edit(file, given["draft"])
        values = json.loads(file.read_text())
        values.pop("rope_parameters")  # the other spelling of the same
        file.write_text(json.dumps(values))
        check_export(Path(name) / "drafter", target)


def _edit(file: Path, changes: Came) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _resumed_rate(given: Came, came: Came) -> None:
    check_rate_continues(given["saved_lr"], given["resumed_lr"], step=given["saved_step"])


def _split(given: Came, came: Came) -> None:
    """The split is drawn by a hash of the conversation, so that it never changes: sizes are right to five deviations."""
    count, share = int(given["n"]), float(given["ratio"])
    splits = [split_of(f"conversation-{i}", 1 - share) for i in range(count)]
    sizes = {"train": splits.count("train"), "val": splits.count("validation")}
    assert sum(sizes.values()) == count
    expected = {"train": int(count * share), "val": count - int(count * share)}
    deviation = math.sqrt(count * share * (1 - share))
    came |= {name: size for name, size in expected.items() if abs(sizes[name] - size) <= 5 * deviation + 1}
    came |= {name: size for name, size in sizes.items() if name not in came}


def _reduced_accuracy(given: Came, came: Came) -> None:
    """Each rank's counts are one vector, so hits and chains are summed over ranks together, and once."""
    hits, chains, world = given["numerator"], given["denominator"], given["world_size"]
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(world):
        total = total + _count(_part(hits, world, rank), _part(chains, world, rank))
    came["accuracy"] = Counts.unpack(total).total.acceptance[0]


def _part(count: int, world: int, rank: int) -> int:
    return count // world + (rank < count % world)


def _count(hits: int, chains: int) -> torch.Tensor:
    """`pack_counts` of a rank that had `chains` chains of one step."""
    flags = torch.arange(chains) < hits
    kinds = torch.zeros(chains, dtype=torch.int64)
    rows = PackedRows.build([(1, chains)], ttt_steps=1)
    return pack_counts(torch.tensor(0.0), torch.tensor(chains), chains, [flags], [flags], kinds, rows)


def _disk(given: Came, came: Came) -> None:
    came["needed_bytes"] = compute_state_bytes(
        tokens=given["tokens_per_sample"] * given["samples"],
        hidden_size=given["hidden_size"],
        states=given["slots"],
        bytes_per_value=given["bytes_per_value"],
    )
    check_free_space(Path("store"), came["needed_bytes"], free=given["free_bytes"])


_RUNS: list[tuple[set[str], Callable[[Came, Came], None]]] = [
    ({"supervised_tokens"}, _supervision),
    ({"loss_sum", "valid_tokens"}, _batch_loss),
    ({"target_argmax", "draft_vocab"}, _position_mask),
    ({"hidden_rows"}, _row_count),
    ({"hidden"}, _finite),
    ({"convention", "ids", "num_layers"}, _layer_ids),
    ({"num_layers"}, _default_layer_ids),
    ({"stored"}, _final_norm),
    ({"d2t", "t2d_true", "target_vocab"}, _vocab_halves),
    ({"cache", "config"}, _cached_map),
    ({"cache_fingerprint", "dataset_fingerprint"}, _cached_map),
    ({"target", "draft"}, _rope),
    ({"saved_lr", "resumed_lr"}, _resumed_rate),
    ({"n", "ratio"}, _split),
    ({"numerator", "denominator", "world_size"}, _reduced_accuracy),
    ({"slots", "free_bytes"}, _disk),
]
