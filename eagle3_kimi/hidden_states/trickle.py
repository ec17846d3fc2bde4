"""The contract during a run: one sample now and then, after the first ones have passed."""

from __future__ import annotations

from pathlib import Path

from eagle3_kimi.errors import RunStopped
from eagle3_kimi.hidden_states.contract import ContractCheck, ContractSample
from eagle3_kimi.hidden_states.manifest import update_manifest


def check_one_more(
    contract: ContractCheck, proof: ContractSample, store: Path | None, *, good: int, every: int
) -> None:
    """Checks a sample in the middle of a run. A fault marks the store, so that nobody trains on it.

    Args:
        contract: of the target.
        proof: the sample.
        store: the store that is being written; None where nothing is kept.
        good: samples written so far.
        every: one of so many is checked.

    Raises:
        RunStopped: it failed.
    """
    report = contract.check([proof])
    if report.passed:
        return
    advice = "find the cause, and begin again with an earlier checkpoint"
    if store is not None:
        update_manifest(store, contract=report.as_dict())
        advice = (
            f"so the store {store} is marked as failed; find the cause and use another folder. The data set and the "
            "journal are as they were"
        )
    raise RunStopped(
        f"after {good} good samples the states of {proof.id} failed the contract check: {report.fault}. Up to {every} "
        f"samples before it may be wrong too, {advice}"
    )
