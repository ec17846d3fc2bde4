"""The demo itself: small, killed with -9 in every launched stage, and measured again in the serving engine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from rich.console import Console
from safetensors.torch import load_file

import eagle3_kimi
from eagle3_kimi.demo import DemoSettings, render_table, run_demo
from eagle3_kimi.demo.prompts import build_held_out_prompts
from eagle3_kimi.demo.run import STAGES
from eagle3_kimi.demo.settings import choose_topology, find_repository
from eagle3_kimi.demo.stages import Stages
from eagle3_kimi.demo.workdir import WorkFolder
from eagle3_kimi.errors import UsageError
from eagle3_kimi.evaluation import AcceptanceReport, AcceptanceRequest
from eagle3_kimi.evaluation.run import evaluate_drafter
from eagle3_kimi.evaluation.settings import EvaluationConfig
from eagle3_kimi.target import resolve_target
from eagle3_kimi.tiny.problems import generate_problems
from tests import vllm_server
from tests.evaluation.served_logits import compare_chains
from tests.hub.client import Client
from tests.hub.hub_server import running
from tests.vllm_server import write_drafting_plugin

SETTINGS: dict[str, Any] = {
    "problems": 48,
    "tool_conversations": 8,
    "held_out_prompts": 6,
    "train_options": ["--epochs", "14", "--checkpoint-every", "20"],
}
RUN = """
import sys, json
from pathlib import Path
from eagle3_kimi.demo import DemoSettings, run_demo
run_demo(Path(sys.argv[1]), "transformers", 0, DemoSettings(**json.loads(sys.argv[2])))
"""


def kill_once(workdir: Path, condition: Callable[[], Any]) -> None:
    """Starts the demo in a process and kills it with -9 as soon as `condition` holds."""
    with (workdir.parent / "killed.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(workdir), json.dumps(SETTINGS)], stdout=log, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + 240
        while not condition():
            assert process.poll() is None, (workdir.parent / "killed.txt").read_text()
            assert time.monotonic() < deadline, "the demo did not come to where it was to be killed"
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def has_lines(folder: Path, pattern: str) -> bool:
    return any(file.stat().st_size for file in folder.glob(pattern))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A demo that was killed in each launched stage, and then finished."""
    path = tmp_path_factory.mktemp("demo") / "work"
    kill_once(path, lambda: has_lines(path, "journal/*.jsonl"))
    assert not (path / "stages" / "samples.json").exists()
    kill_once(path, lambda: has_lines(path, "logs/hidden_states.txt"))
    kill_once(path, lambda: has_lines(path, "drafter/checkpoints/step-*/trainer_state.json"))
    assert not (path / "stages" / "training.json").exists()
    kill_once(path, lambda: has_lines(path, "serving/plain.json"))
    run_demo(path, "transformers", 0, DemoSettings(**SETTINGS))
    return path


@pytest.mark.multiprocess
def test_the_killed_demo_ends_with_the_same_data_set(workdir: Path, tmp_path: Path) -> None:
    settings = DemoSettings(**SETTINGS)
    folder = WorkFolder(tmp_path / "undisturbed", identity={}, stages=STAGES)
    with folder:
        stages = Stages(
            folder=folder,
            engine="transformers",
            seed=0,
            settings=settings,
            topology=choose_topology(),
            repository=find_repository(),
        )
        stages.make_prompts()
        undisturbed = stages.make_samples()
    assert json.loads((workdir / "stages" / "samples.json").read_text())["result"] == undisturbed
    samples = load_from_disk(str(workdir / "samples" / "complete"))
    assert eagle3_kimi.validate(samples) == undisturbed["complete"]


@pytest.mark.multiprocess
def test_the_summary_keeps_its_names_and_adds_up(workdir: Path) -> None:
    summary = json.loads((workdir / "summary.json").read_text())
    assert list(summary) == [
        "schema_version", "engine", "target", "samples", "hidden_states", "training", "serving", "seconds",
    ]  # fmt: skip
    samples, states, training, serving = (summary[name] for name in ("samples", "hidden_states", "training", "serving"))
    assert list(samples) == ["prompts", "complete", "quarantined", "by_reason"]
    assert samples["prompts"] == samples["complete"] + samples["quarantined"]
    assert samples["quarantined"] == sum(samples["by_reason"].values())
    assert list(states) == ["samples", "tokens", "bytes_per_token", "contract"]
    assert states["samples"] == samples["complete"]
    assert states["contract"]["passed"] is True
    assert training["world_size"] == 2
    assert set(training) == {
        "steps",
        "supervised_tokens",
        "ttt_steps",
        "world_size",
        "simulated_acceptance_length",
    }
    assert serving["engine"] == "transformers (simulated)"
    assert serving["identical_outputs"] is True
    assert serving["num_prompts"] == 6
    assert serving["acceptance_length"] == pytest.approx(1 + sum(serving["acceptance_per_position"]), abs=0.002)
    assert serving["acceptance_length"] > 1.5 > serving["untrained_acceptance_length"]
    assert list(summary["seconds"]) == list(STAGES)


@pytest.mark.multiprocess
def test_run_again_it_reuses_every_stage(workdir: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = json.loads((workdir / "summary.json").read_text())
    with caplog.at_level("INFO"):
        summary = run_demo(workdir, "transformers", 0, DemoSettings(**SETTINGS))
    assert summary == before
    assert caplog.text.count(": reused") == len(STAGES)
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render_table(summary))
    text = console.export_text()
    assert "token-identical" in text
    assert f"{summary['serving']['acceptance_length']:.2f} of at most 4" in text


@pytest.mark.multiprocess
def test_the_report_needs_nothing_from_elsewhere(workdir: Path) -> None:
    report = (workdir / "report.html").read_text()
    assert report.count("<svg") == 2  # training, reasoning lengths
    assert not any(loader in report for loader in ("<script", "<link", "<img", "@import", "url("))
    assert '<span class="reasoning">' in report
    assert (workdir / "training.svg").read_text().startswith("<svg")


@pytest.fixture(scope="module")
def prompts(workdir: Path) -> list[list[int]]:
    """The prompts that the demo measures with."""
    splits = load_from_disk(str(workdir / "samples" / "complete")).values()
    seen = [ids for split in splits for ids in split["prompt_token_ids"]]
    return build_held_out_prompts(resolve_target("tiny"), SETTINGS["held_out_prompts"], seed=0, seen=seen)


@pytest.fixture(scope="module")
def recorded(
    workdir: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[AcceptanceReport, dict[str, torch.Tensor]]:
    """vLLM serving the trained drafter: what it counted, and every chain it drafted."""
    folder, target = tmp_path_factory.mktemp("recorded"), resolve_target("tiny")
    request = AcceptanceRequest(
        target=str(target.path),
        target_revision=target.revision,
        drafter=str(workdir / "drafter" / "export"),
        prompts=tuple(map(tuple, prompts)),
        max_num_seqs=1,
    )
    (folder / "request.json").write_text(json.dumps(asdict(request)))
    files = [str(folder / name) for name in ("request.json", "report.json", "record.safetensors")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.evaluation.record_drafts", *files],
        cwd=find_repository(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return AcceptanceReport.load(folder / "report.json"), load_file(files[-1])


@pytest.mark.multiprocess
@pytest.mark.vllm
def test_evaluation_serves_what_the_simulation_says(
    workdir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problems = list(generate_problems(6, seed=2))
    single = [{"messages": problem.messages, "tools": problem.tools} for problem in problems]
    write_rows(tmp_path / "held_out.jsonl", single)
    turns = [problem.messages[-1]["content"] for problem in problems if not problem.tools][:2]
    write_rows(tmp_path / "turns.jsonl", [{"question_id": 1, "category": "math", "turns": turns}])
    config = EvaluationConfig(
        drafter=workdir / "drafter" / "export",
        target=resolve_target("tiny"),
        prompts=(tmp_path / "held_out.jsonl", tmp_path / "turns.jsonl"),
        output=tmp_path / "out",
        max_tokens=128,
        max_model_len=512,
        dtype="float32",
    )
    (tmp_path / "out" / "acceptance.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        evaluate_drafter(config)  # every engine has run, nothing is lost
    (tmp_path / "out" / "acceptance.json").rmdir()
    with caplog.at_level("INFO"):
        result = evaluate_drafter(config)
    assert caplog.text.count("reused from the interrupted evaluation") == 3
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["acceptance.json"]
    assert json.loads((tmp_path / "out" / "acceptance.json").read_text()) == result

    assert (result["engine"]["name"], result["engine"]["device"]) == ("vllm", "cpu")
    assert [(entry["thinking"], entry["temperature"]) for entry in result["results"]] == [
        (True, 0.0), (True, 1.0), (False, 0.0), (False, 0.6),
    ]  # fmt: skip
    for entry in result["results"]:
        (drafted,) = entry["drafted"]
        assert entry["plain"]["turns"] == 6 + 2 - entry["plain"]["questions_ended_early"]
        delivered = drafted["delivered"]
        assert delivered["steps"] == pytest.approx(drafted["num_drafts"], abs=entry["plain"]["turns"])
        assert delivered["tokens"] == drafted["tokens"] - entry["plain"]["turns"]  # all but the prefill's
        assert delivered["acceptance_length"] == pytest.approx(drafted["acceptance_length"], rel=0.1)
        for split in ("by_span", "by_context_length", "by_benchmark"):
            for count in ("steps", "tokens"):
                assert sum(part[count] for part in drafted[split].values()) == delivered[count]
        assert ("reasoning" in drafted["by_span"]) is entry["thinking"]
        assert list(drafted["by_benchmark"]) == ["held_out", "turns"]
        if entry["temperature"] == 0:
            assert drafted["lossless"]["identical_turns"] == drafted["lossless"]["turns"] == entry["plain"]["turns"]
            assert abs(drafted["simulated"]["gap"]) < 0.05  # a near tie may fall either way
        if entry["thinking"]:
            assert drafted["acceptance_length"] > 1.5  # sampled too: the drafter was trained for this


@pytest.mark.multiprocess
@pytest.mark.vllm
def test_vllm_drafts_what_training_computes(
    workdir: Path, prompts: list[list[int]], recorded: tuple[AcceptanceReport, dict[str, torch.Tensor]]
) -> None:
    """Logits of every step of every chain, the ones after accepted and after refused tokens alike."""
    report, record = recorded
    texts = [[*prompt, *output] for prompt, output in zip(prompts, report.output_token_ids, strict=True)]
    compared = compare_chains(resolve_target("tiny"), workdir / "drafter" / "export", texts, record)
    assert compared >= report.num_drafts > 50
    assert 0 < report.accepted_per_position[0] < report.num_drafts


@pytest.mark.multiprocess
@pytest.mark.vllm
def test_checked_pushed_and_pulled_the_cards_command_serves_the_same(
    workdir: Path,
    prompts: list[list[int]],
    recorded: tuple[AcceptanceReport, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """vLLM's server gets the drafter from the Hub, as the card says."""
    served, _ = recorded
    simulated = AcceptanceReport.load(workdir / "serving" / "trained.json")
    assert served.output_token_ids == simulated.output_token_ids
    assert served.num_drafts == pytest.approx(simulated.num_drafts, rel=0.02)  # a near tie may fall either way
    for ours, theirs in zip(simulated.accepted_per_position, served.accepted_per_position, strict=True):
        assert theirs == pytest.approx(ours, rel=0.05, abs=2)
    export, pulled, target = workdir / "drafter" / "export", tmp_path / "pulled", resolve_target("tiny")
    stop = list(target.load_protocol(target.load_tokenizer()).markers.stop_token_ids)
    body = {"model": "tiny-kimi", "temperature": 0, "max_tokens": 256, "stop_token_ids": stop, "return_token_ids": True}
    with running() as hub:
        version = ["me/tiny-eagle3", "--tag", "v1.0.0", "--target", "tiny"]
        client = Client(hub, tmp_path / "home")
        client.do(["export-check", export, "--target", "tiny"], ["push", "drafter", export, *version])
        client.do(["pull", "drafter", *version, "-o", pulled])
        (command,) = [line for line in (pulled / "README.md").read_text().splitlines() if line.startswith("vllm serve")]
        environment = {
            **hub.environment(tmp_path / "server"), "PYTHONPATH": str(write_drafting_plugin(tmp_path / "plugin"))
        }  # fmt: skip
        flags = shlex.split(command)[3:]
        with vllm_server.running(target.path, tmp_path, *flags, environment=environment) as server:
            answers = [server.post("/v1/completions", {**body, "prompt": prompt}) for prompt in prompts]
            num_drafts = server.read_counter("vllm:spec_decode_num_drafts_total")
    assert tuple(tuple(answer["choices"][0]["token_ids"]) for answer in answers) == served.output_token_ids
    assert num_drafts == pytest.approx(served.num_drafts, rel=0.02)  # a near tie may fall either way


def test_wrong_usage_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the demo runs with vllm or transformers, not 'sglang'"):
        run_demo(tmp_path / "x", "sglang")
    assert not (tmp_path / "x").exists()
