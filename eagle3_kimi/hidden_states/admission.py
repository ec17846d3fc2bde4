"""Which samples of a data set a target can take, judged before the engine sees one."""

from __future__ import annotations

from collections.abc import Iterable

from eagle3_kimi.hidden_states.samples import SampleReader, SampleRef
from eagle3_kimi.target import Target


def find_unfit(reader: SampleReader, target: Target, *, accept_revisions: Iterable[str] = ()) -> dict[str, str]:
    """Sample id -> why the target cannot take it: length, ids outside its vocabulary, another target's answer.

    Args:
        reader: the data set.
        target: the target.
        accept_revisions: revisions that are this target's weights under another name.
    """
    revisions = reader.recorded("provenance", "revision")
    accepted = {target.revision, *accept_revisions}
    counted = {name: reader.recorded(f"num_{name}_tokens") for name in ("prompt", "output")}
    unfit = {}
    for ref in reader.refs:
        fault = _find_length_fault(ref, target, {name: counts.get(ref.id) for name, counts in counted.items()})
        if not fault and not 0 <= ref.lowest_id <= ref.highest_id < target.vocab_size:
            fault = f"token ids {ref.lowest_id}..{ref.highest_id} leave the target's vocabulary of {target.vocab_size}"
        revision = revisions.get(ref.id)
        if not fault and revision and revision not in accepted:
            fault = (
                f"another target answered it: its revision is {revision}, this one is {target.revision} "
                "(the same weights under two names? then say so with accept_revisions)"
            )
        if fault:
            unfit[ref.id] = fault
    return unfit


def _find_length_fault(ref: SampleRef, target: Target, counted: dict[str, int | None]) -> str:
    lengths = {"prompt": ref.num_prompt_tokens, "output": ref.num_tokens - ref.num_prompt_tokens}
    longest = target.config.get("max_position_embeddings")
    for name, length in lengths.items():
        if not length:
            return f"it has no {name} tokens"
        expected = counted[name]
        if expected is not None and expected != length:
            return f"it has {length} {name} tokens, its row says {expected}"
    if longest is not None and ref.num_tokens > longest:
        return f"its {ref.num_tokens} tokens are more than the {longest} positions of the target"
    return ""
