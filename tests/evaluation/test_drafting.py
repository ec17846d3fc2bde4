"""What serving computes step by step equals what training unrolls at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_kimi.drafter.export import export_drafter
from eagle3_kimi.drafter.rows import PackedRows
from eagle3_kimi.evaluation.drafting import DraftChain, export_untrained_drafter, load_draft_model
from tests.evaluation.toy_drafter import HIDDEN, VOCAB, build_toy_drafter, write_toy_target


@pytest.mark.parametrize(("known", "reads"), [(3, (3,)), (6, (4, 1, 1)), (9, (2, 5, 2))])
@torch.inference_mode()
def test_a_chain_proposes_what_the_training_time_test_predicts(
    tmp_path: Path, known: int, reads: tuple[int, ...]
) -> None:
    # x_0..x_known are known, so rows 0..known-1 are; the chain is x_{known+1}..x_{known+4}
    model = build_toy_drafter(write_toy_target(tmp_path / "target"))
    generator = torch.Generator().manual_seed(known)
    tokens = torch.randint(VOCAB, (known + 1,), generator=generator)
    aux = torch.randn(known, 3 * HIDDEN, generator=generator)
    chain, start = DraftChain(model), 0
    for count in reads:  # however the rows arrive
        chain.read(aux[start : start + count], tokens[start + 1 : start + count + 1])
        start += count
    proposals = chain.propose(4)

    # one document whose only supervised row with all 4 steps is row known-1: P = known, S = known + 5
    sequence = torch.cat((tokens, torch.tensor(proposals)))
    padded = torch.cat((aux, torch.zeros(3, 3 * HIDDEN)))  # later rows are not visible to row known-1
    rows = PackedRows.build([(known - 1, 4)], ttt_steps=4)
    states = model.unroll(padded, sequence[1 : known + 4], sequence[known : known + 4], rows)
    expected = [int(model.draft_to_target[model.lm_head(state[0]).argmax()]) for state in states]
    assert proposals == expected


@torch.inference_mode()
def test_proposing_leaves_no_trace(tmp_path: Path) -> None:
    model = build_toy_drafter(write_toy_target(tmp_path / "target"))
    chain = DraftChain(model)
    chain.read(torch.ones(2, 3 * HIDDEN), torch.tensor([5, 6]))
    assert chain.propose(3) == chain.propose(5)[:3]


def test_an_exported_drafter_comes_back_whole(tmp_path: Path) -> None:
    target = write_toy_target(tmp_path / "target")
    model = build_toy_drafter(target)
    export_drafter(model, tmp_path / "export", target=target)
    loaded = load_draft_model(tmp_path / "export", target)
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded.embed_tokens, target.read_tensor("embed_tokens"))


def test_the_untrained_drafter_is_where_training_starts(tmp_path: Path) -> None:
    target = write_toy_target(tmp_path / "target")
    start = build_toy_drafter(target, seed=5)
    trained = build_toy_drafter(target, seed=5)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    export_drafter(trained, tmp_path / "trained", target=target)
    export_untrained_drafter(tmp_path / "trained", tmp_path / "untrained", target=target, seed=5)
    written = load_file(tmp_path / "untrained" / "model.safetensors")
    for name, tensor in start.state_dict().items():
        assert torch.equal(written[name], tensor), name
