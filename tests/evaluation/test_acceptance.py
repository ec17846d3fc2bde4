from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from eagle3_kimi.errors import RunStopped, UsageError
from eagle3_kimi.evaluation import AcceptanceReport, AcceptanceRequest, measure_acceptance
from eagle3_kimi.evaluation.acceptance import Divergence, save_json
from eagle3_kimi.evaluation.dialogues import Question
from eagle3_kimi.target import Target, resolve_target


def build_report(num_drafts: int, accepted: tuple[int, ...]) -> AcceptanceReport:
    return AcceptanceReport(
        engine="vllm",
        engine_version="0",
        device="cpu",
        num_speculative_tokens=len(accepted),
        num_drafts=num_drafts,
        accepted_per_position=accepted,
        output_token_ids=((1, 2), (3,)),
        seconds=1.5,
        tokens_per_step=((1, 1), (1,)),
        prompt_token_ids=((7,), (8, 9)),
        question_indices=(0, 0),
        divergences=(Divergence(prompt=1, position=0, plain_token=3, drafted_token=4, best_two=(4, 3), logit_gap=0.5),),
    )


def test_acceptance_counts_the_bonus_token() -> None:
    # 10 chains: 8 get their first token accepted, 5 two, 1 all three -> 24 tokens in 10 forwards
    report = build_report(10, (8, 5, 1))
    assert report.acceptance_per_position == (0.8, 0.5, 0.1)
    assert report.acceptance_length == pytest.approx(2.4)
    assert build_report(0, ()).acceptance_length == 1.0


def test_requests_and_reports_survive_their_files(tmp_path: Path) -> None:
    report = build_report(10, (8, 5, 1))
    save_json(report, tmp_path / "report.json")
    assert AcceptanceReport.load(tmp_path / "report.json") == report
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    question = Question(benchmark="b", messages=({"role": "user", "content": "Hi"},), follow_ups=("And?",))
    request = AcceptanceRequest(target="tiny", prompts=((1, 2), (3,)), questions=(question,), reference=((1,), ()))
    assert AcceptanceRequest.from_json(json.loads(json.dumps(asdict(request)))) == request


def test_stop_ids_of_a_target_without_think_markers_are_the_callers(tmp_path: Path) -> None:
    request = AcceptanceRequest(target="plain", prompts=((1, 2),), stop_token_ids=(2,))
    assert AcceptanceRequest.from_json(json.loads(json.dumps(asdict(request)))) == request
    assert request.find_stop_ids(Target(name="plain", path=tmp_path, revision="0")) == (2,)  # nothing is read


def test_a_wrong_call_is_one_sentence(tmp_path: Path) -> None:
    target = Target(name="here", path=tmp_path, revision="0")
    with pytest.raises(UsageError, match="at least one prompt"):
        measure_acceptance(target, None, [], log=tmp_path / "log")
    with pytest.raises(UsageError, match=r"holds no drafter: it has no config\.json"):
        measure_acceptance(target, tmp_path, [[1]], log=tmp_path / "log")


def test_what_the_engine_cannot_do_comes_back_as_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps({"vocab_size": 8}))
    target, log = resolve_target(tmp_path / "target"), tmp_path / "log"
    with pytest.raises(RunStopped, match=r"temperature must be 0, not 1\.0; use vLLM \(all it said: .*log\)"):
        measure_acceptance(target, None, [[1]], log=log, engine="transformers", temperature=1.0)
