"""A share whose engine or samples go wrong: refused and counted, stopped in time, and never trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from eagle3_kimi.errors import DataError, RunStopped
from eagle3_kimi.hidden_states.capture import CaptureRequest, StateSource
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.extract import extract_hidden_states
from eagle3_kimi.hidden_states.extraction import build_manifest, open_source
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import SampleReader
from eagle3_kimi.hidden_states.share import ShareRun
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.hidden_states.store import FeatureStore, StoreManifest
from eagle3_kimi.target import Target
from eagle3_kimi.training.sources import check_manifest
from tests.hidden_states.random_target import AUX_LAYER_IDS, save_rows

Damage = Callable[[CapturedStates], CapturedStates]


@dataclass
class DamagedSource:
    """A source whose engine goes wrong for some samples."""

    whole: StateSource
    damage: dict[str, Damage]

    def __post_init__(self) -> None:
        self.layer_ids = self.whole.layer_ids
        self.sleep, self.wake, self.close = self.whole.sleep, self.whole.wake, self.whole.close

    def capture(self, requests: Iterable[CaptureRequest]) -> Iterator[CapturedStates]:
        for states in self.whole.capture(requests):
            yield self.damage.get(states.id, lambda came: came)(states)


def _change(states: CapturedStates, change: Callable[[torch.Tensor], torch.Tensor]) -> CapturedStates:
    assert states.hidden_states is not None
    return replace(states, hidden_states=change(states.hidden_states.clone()))


def with_value(value: float) -> Damage:
    def change(hidden: torch.Tensor) -> torch.Tensor:
        hidden[-1, 2, 5] = value
        return hidden

    return lambda states: _change(states, change)


def shorter(states: CapturedStates) -> CapturedStates:
    return _change(states, lambda hidden: hidden[:-1])


def other_tokens(states: CapturedStates) -> CapturedStates:
    return replace(states, token_ids=states.token_ids.roll(1))


@pytest.fixture
def config(random_target: Target, greedy_dataset: Path, tmp_path: Path) -> ExtractConfig:
    return ExtractConfig(
        dataset=greedy_dataset,
        target=str(random_target.path),
        output=tmp_path / "store",
        aux_layer_ids=AUX_LAYER_IDS,
        engine="transformers",
        max_batched_tokens=256,
        contract_samples=4,
        max_refused=0.2,  # 2 of 14
    )


def run(
    config: ExtractConfig, target: Target, damage: dict[str, Damage], *, rank: int = 0
) -> tuple[ShareRun, StoreManifest]:
    reader, ranks = SampleReader(config.dataset), Ranks(rank, 1, 1, torch.device("cpu"))
    manifest = build_manifest(config, target, reader)
    source = DamagedSource(open_source(config, target, manifest, ranks, longest=200), damage)
    share = ShareRun(config, target, reader, manifest, ranks, source, asked=len(reader.refs), refused=set())
    share.extract(reader.refs, config.output)
    return share, manifest


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_value(torch.nan), "NaN or infinite"),
        (with_value(-torch.inf), "NaN or infinite"),
        (shorter, "states of"),
        (other_tokens, "the engine saw"),
    ],
    ids=["nan", "inf", "shorter", "other tokens"],
)
def test_bad_states_are_refused_and_counted(
    config: ExtractConfig, random_target: Target, caplog: pytest.LogCaptureFixture, damage: Damage, message: str
) -> None:
    bad = {"sample-002": damage, "sample-009": damage}  # one of the first samples and a later one
    share, _ = run(config, random_target, bad)
    assert share.counts[0] == 12
    assert share.counts[2] == 2
    store = FeatureStore(config.output)
    assert len(store) == 12
    assert not set(bad) & set(store.ids)
    assert store.manifest.contract is not None
    assert store.manifest.contract["passed"]
    refusals = [record.message for record in caplog.records if record.message.startswith("refused")]
    assert sorted(text.split()[2].strip(":") for text in refusals) == sorted(bad)
    assert all(message in text for text in refusals)


def test_any_leader_may_be_the_first_to_open_the_store(config: ExtractConfig, random_target: Target) -> None:
    """The contract that all have agreed on is there whoever writes the manifest, and however late."""
    run(config, random_target, {}, rank=1)
    contract = FeatureStore(config.output).manifest.contract
    assert contract is not None
    assert contract["passed"]


def test_more_bad_states_than_allowed_stop_the_run(config: ExtractConfig, random_target: Target) -> None:
    bad = {f"sample-{n:03d}": with_value(torch.nan) for n in (2, 9, 11)}
    with pytest.raises(RunStopped, match=r"3 of 14 samples were refused, a larger share than max_refused 0\.2"):
        run(config, random_target, bad)
    store = FeatureStore(config.output)
    assert 0 < len(store) < 14  # what was good stays
    assert not set(bad) & set(store.ids)
    assert extract_hidden_states(config).samples == 14 - len(store)


def test_nothing_is_written_where_no_first_sample_is_good(config: ExtractConfig, random_target: Target) -> None:
    everything = {f"sample-{n:03d}": with_value(torch.nan) for n in range(14)}
    with pytest.raises(DataError, match="no states that the contract could check"):
        run(replace(config, max_refused=1.0), random_target, everything)
    assert not config.output.exists()


def test_a_fault_in_the_middle_stops_the_run_and_marks_the_store(config: ExtractConfig, random_target: Target) -> None:
    """The first 4 samples are right; every third later one is checked, and those are wrong."""
    config = replace(config, contract_every=3)
    order = [states.id for states in _capture_all(config, random_target)]
    with pytest.raises(RunStopped, match=r"after 6 good samples .* one too high.*marked as failed"):
        run(config, random_target, {order[6]: layers_shifted_down, order[8]: layers_shifted_down})
    store = FeatureStore(config.output)
    assert store.manifest.contract is not None
    assert not store.manifest.contract["passed"]
    with pytest.raises(DataError, match="failed its contract check"):
        check_manifest(store.manifest, random_target, config.output)
    with pytest.raises(DataError, match="nothing is added to it"):
        extract_hidden_states(config)


def layers_shifted_down(states: CapturedStates) -> CapturedStates:
    """Boundary 2 comes as boundary 1, and so on."""
    return _change(states, lambda hidden: hidden[:, [1, 2, 3, 3]])


def _capture_all(config: ExtractConfig, target: Target) -> list[CapturedStates]:
    reader, ranks = SampleReader(config.dataset), Ranks(0, 1, 1, torch.device("cpu"))
    source = open_source(config, target, build_manifest(config, target, reader), ranks, longest=200)
    ids = [CaptureRequest(ref.id, tuple(reader.read(ref).token_ids.tolist())) for ref in reader.refs]
    return list(source.capture(ids))


def _with(row: dict, **changes: object) -> dict:
    return {**row, **changes}


UNFIT: dict[str, tuple[Callable[[dict], dict], str]] = {
    "outside the vocabulary": (
        lambda row: _with(row, output_token_ids=[*row["output_token_ids"][:-1], 320]),
        r"token ids .*320 leave the target's vocabulary of 320",
    ),
    "negative": (
        lambda row: _with(row, prompt_token_ids=[-1, *row["prompt_token_ids"]]),
        r"token ids -1\.\..* leave the target's vocabulary",
    ),
    "another target": (
        lambda row: _with(row, provenance={**row["provenance"], "revision": "another"}),
        "another target answered it: its revision is another",
    ),
    "row of another length": (
        lambda row: _with(row, num_output_tokens=len(row["output_token_ids"]) + 1),
        "its row says",
    ),
    "no output": (lambda row: _with(row, output_token_ids=[]), "no output tokens"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_samples_the_target_cannot_take_are_refused_and_counted(
    config: ExtractConfig, greedy_rows: list[dict], random_target: Target, tmp_path: Path, name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    change, message = UNFIT[name]
    rows = [
        _with(row, num_output_tokens=len(row["output_token_ids"]),
              provenance={**row["provenance"], "revision": random_target.revision})
        for row in greedy_rows
    ]  # fmt: skip
    rows[5] = change(rows[5])
    config = replace(config, dataset=save_rows(rows, tmp_path / "rows"))
    summary = extract_hidden_states(config)
    assert (summary.samples, summary.refused) == (13, 1)
    assert "sample-005" not in FeatureStore(config.output).ids
    refusals = [record.message for record in caplog.records if record.message.startswith("refused: sample sample-005")]
    assert len(refusals) == 1
    again = replace(config, max_refused=0.05, output=tmp_path / "again")  # 0 of 14
    with pytest.raises(RunStopped, match=f"1 of 14 samples were refused.*{message}"):
        extract_hidden_states(again)
    assert not again.output.exists()


def test_another_name_of_the_same_weights_can_be_accepted(
    config: ExtractConfig, greedy_rows: list[dict], tmp_path: Path
) -> None:
    rows = [_with(row, provenance={**row["provenance"], "revision": "hub-commit"}) for row in greedy_rows]
    config = replace(config, dataset=save_rows(rows, tmp_path / "rows"))
    with pytest.raises(RunStopped, match="14 of 14"):
        extract_hidden_states(config)
    assert extract_hidden_states(replace(config, accept_revisions=("hub-commit",))).samples == 14
