"""Each fault is planted in captured states, and each is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.capture import CaptureRequest
from eagle3_kimi.hidden_states.contract import ContractReport, ContractSample, check_contract
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.hidden_states.transformers_source import TransformersSource
from eagle3_kimi.target import Target
from tests.hidden_states.random_target import generate_rows, save_random_target
from tests.hidden_states.tiny_answers import TinyAnswers


@dataclass
class Captured:
    target: Target
    head: TargetHead
    samples: list[ContractSample]
    layers: list[Tensor]
    """[S-1, 5, H] a sample: boundaries 0 to 4."""

    def check(self, samples: list[ContractSample] | None = None, **changes: object) -> ContractReport:
        arguments = {"dtype": "float32", "temperature": 0.0, "head": self.head, **changes}
        return check_contract(samples or self.samples, self.target, **arguments)

    def planted(self, change: Callable[[ContractSample, Tensor], ContractSample]) -> list[ContractSample]:
        return [change(sample, layers) for sample, layers in zip(self.samples, self.layers, strict=True)]


def capture(target: Target, rows: list[dict], *, dtype: str = "float32") -> Captured:
    source = TransformersSource(target, (0, 1, 2, 3, 4), dtype=dtype)
    requests = [CaptureRequest(r["id"], (*r["prompt_token_ids"], *r["output_token_ids"])) for r in rows]
    states = {captured.id: captured.hidden_states for captured in source.capture(requests)}
    samples = [
        ContractSample(
            id=row["id"],
            token_ids=torch.tensor(request.token_ids),
            num_prompt_tokens=len(row["prompt_token_ids"]),
            anchor=states[row["id"]][:, 1],
            final=states[row["id"]][:, 4],
        )
        for row, request in zip(rows, requests, strict=True)
    ]
    head = TargetHead(target, dtype=getattr(torch, dtype))
    return Captured(target, head, samples, [states[row["id"]] for row in rows])


@pytest.fixture(scope="module")
def tiny_answers(tiny_target: Path) -> TinyAnswers:
    return TinyAnswers(tiny_target)


@pytest.fixture(scope="module")
def captured(random_target: Target, greedy_rows: list[dict]) -> Captured:
    return capture(random_target, greedy_rows[:6])


def test_right_states_pass(captured: Captured) -> None:
    report = captured.check()
    assert report.passed, report.fault
    assert report.agreement == 1.0
    assert report.anchor_error < 1e-5
    assert report.tokens == sum(len(s.token_ids) - s.num_prompt_tokens for s in captured.samples)
    report.raise_if_failed()


def test_bfloat16_states_pass(random_target: Target, tmp_path: Path) -> None:
    target = save_random_target(tmp_path / "bf16", seed=0, dtype="bfloat16")
    rows = generate_rows(target, 6, temperature=0.0)
    report = capture(target, rows, dtype="bfloat16").check(dtype="bfloat16")
    assert report.passed, report.fault


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_tokens_pass_by_their_log_probability(random_target: Target, temperature: float) -> None:
    sampled = capture(random_target, generate_rows(random_target, 8, temperature=temperature))
    report = sampled.check(temperature=temperature)
    assert report.passed, report.fault
    assert report.agreement < 0.95  # argmax alone would have refused them
    assert report.mean_log_prob == pytest.approx(-report.mean_entropy, abs=0.35)
    shifted = sampled.planted(lambda s, _: replace(s, final=s.final.roll(-1, 0)))
    assert "token t + 1" in sampled.check(shifted, temperature=temperature).fault


def _shift(states: Tensor, rows: int) -> Tensor:
    return states.roll(rows, 0)


FAULTS: dict[str, tuple[Callable[[ContractSample, Tensor], ContractSample], str]] = {
    "ids one too low": (lambda s, layers: replace(s, anchor=layers[:, 0]), "aux layer ids are one too low"),
    "ids one too high": (lambda s, layers: replace(s, anchor=layers[:, 2]), "aux layer ids are one too high"),
    "ids two too high": (lambda s, layers: replace(s, anchor=layers[:, 3]), "off by more than one"),
    "all shifted back": (
        lambda s, _: replace(s, anchor=_shift(s.anchor, -1), final=_shift(s.final, -1)),
        "shifted by one token: row t holds the state of token t \\+ 1",
    ),
    "all shifted on": (
        lambda s, _: replace(s, anchor=_shift(s.anchor, 1), final=_shift(s.final, 1)),
        "shifted by one token: row t holds the state of token t - 1",
    ),
    "final shifted": (
        lambda s, _: replace(s, final=_shift(s.final, -1)),
        "shifted by one token: row t holds the state of token t \\+ 1",
    ),
    "final of the layer before": (lambda s, layers: replace(s, final=layers[:, 3]), "does not explain"),
    "not finite": (lambda s, _: replace(s, anchor=s.anchor * torch.nan), "boundary 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_named(captured: Captured, name: str) -> None:
    change, message = FAULTS[name]
    report = captured.check(captured.planted(change))
    assert not report.passed
    with pytest.raises(DataError, match=message):
        report.raise_if_failed()


def test_final_state_after_the_norm_is_named(captured: Captured) -> None:
    def normed(sample: ContractSample, _: Tensor) -> ContractSample:
        scaled = sample.final * torch.rsqrt(sample.final.square().mean(-1, keepdim=True) + 1e-5)
        return replace(sample, final=scaled * captured.head.norm_weight)

    assert "after the final norm" in captured.check(captured.planted(normed)).fault


def save_unreduced(target: Target, path: Path, endings: tuple[str, ...]) -> Target:
    """The target as the first of two tensor-parallel processes computes it when nothing is summed up."""
    shutil.copytree(target.path, path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(endings):
            tensor[:, tensor.shape[1] // 2 :] = 0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return replace(target, path=path)


@pytest.mark.parametrize(
    ("endings", "part"),
    [
        (("o_proj.weight", "down_proj.weight"), "attention and mlp"),
        (("down_proj.weight",), "part of layer 0's mlp"),
        (("o_proj.weight",), "part of layer 0's attention"),
    ],
)
def test_shards_that_were_not_reduced_are_named(
    captured: Captured, greedy_rows: list[dict], tmp_path: Path, endings: tuple[str, ...], part: str
) -> None:
    planted = capture(save_unreduced(captured.target, tmp_path / "part", endings), greedy_rows[:6]).samples
    report = captured.check(planted, tensor_parallel_size=2)
    assert "shards were not reduced" in report.fault
    assert part in report.fault
    assert "neither" in captured.check(planted).fault  # one process has nothing to reduce


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_template_is_named(tiny_answers: TinyAnswers, temperature: float) -> None:
    """The trained tiny target: a random one knows no template."""
    rows = tiny_answers.generate(temperature)
    right = capture(tiny_answers.target, rows)
    assert right.check(temperature=temperature).passed
    for rendering in ("thoughts closed", "thoughts not opened"):
        wrong = [{**row, "prompt_token_ids": tiny_answers.render(row["messages"], rendering)} for row in rows]
        report = capture(tiny_answers.target, wrong).check(temperature=temperature)
        assert "wrong template" in report.fault, rendering


def test_answers_of_another_revision_are_named(captured: Captured, random_target: Target, tmp_path: Path) -> None:
    """The states are the target's, the tokens are not."""
    other = save_random_target(tmp_path / "other", seed=5)
    fault = capture(random_target, generate_rows(other, 6, temperature=0.0)).check().fault
    assert "wrong revision" in fault
    assert "boundary" not in fault


def test_states_of_another_revision_are_named(captured: Captured, greedy_rows: list[dict], tmp_path: Path) -> None:
    other = capture(save_random_target(tmp_path / "other", seed=5), greedy_rows[:6])
    assert "wrong revision" in captured.check(other.samples).fault
