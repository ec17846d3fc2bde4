"""The ways in which reasoning was lost, once more on real vLLM servers; see docs/two-stories.md."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import eagle3_kimi
from eagle3_kimi.captures import AuditReport, CaptureContext, run_audit
from eagle3_kimi.errors import TargetError
from eagle3_kimi.generation import GenerationConfig, GenerationRun
from eagle3_kimi.tiny.problems import Problem, generate_problems
from tests.vllm_server import VllmServer, running

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 12
OFF_WITH_THE_FLAG_ON = {"chat_template_kwargs": {"thinking": False, "enable_thinking": True}}


@pytest.fixture(scope="module")
def parsed_server(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The same server with Kimi's reasoning parser."""
    with running(tiny_target, tmp_path_factory.mktemp("parsed"), "--reasoning-parser", "kimi_k2") as server:
        yield server


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return list(generate_problems(NUM_PROMPTS, seed=77, kinds=("reverse", "sort")))


@pytest.fixture(scope="module")
def token_exact(vllm_server: VllmServer, problems: list[Problem], tiny_target: Path, tmp_path_factory: Any) -> Any:
    """What the token-id path gets from the server without a parser."""
    return load_samples(vllm_server, problems, tiny_target, tmp_path_factory.mktemp("token-exact"))


def ask(server: VllmServer, problem: Problem, **extra: Any) -> dict[str, Any]:
    """One line of a client's log: what was sent and what came."""
    body = {"model": "tiny-kimi", "messages": problem.messages, "temperature": 0, "max_tokens": 300, **extra}
    return {"request": body, "response": server.post("/v1/chat/completions", body)}


def kept_by_client(line: dict[str, Any], field: str) -> dict[str, Any]:
    """The row that the client of the story wrote: valid JSON, whatever is missing."""
    message = line["response"]["choices"][0]["message"]
    prompt = line["request"]["messages"][0]["content"]
    return {"prompt": prompt, "reasoning": message.get(field) or "", "content": message["content"]}


def audit(folder: Path, rows: list[dict[str, Any]], **options: Any) -> AuditReport:
    path = folder / "captured.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_audit([str(path)], **options)


def load_samples(server: VllmServer, problems: list[Problem], target: Path, folder: Path) -> list[dict[str, Any]]:
    """The samples of the token-id path, sorted by prompt; none may be in the quarantine."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": problem.messages}) + "\n" for problem in problems))
    options = {
        "data_files": str(prompts),
        "target": str(target),
        "engine": "server",
        "server_url": server.url,
        "temperature": 0.0,
        "max_tokens": 300,
        "journal_dir": str(folder / "journals"),
        "cache_dir": str(folder / "cache"),
    }
    refused = eagle3_kimi.load_dataset("kimi_reasoning", "quarantine", **options)
    assert sum(map(len, refused.values())) == 0
    samples = eagle3_kimi.load_dataset("kimi_reasoning", **options)
    eagle3_kimi.validate(samples)
    rows = [row for split in samples.values() for row in split.to_list()]
    return sorted(rows, key=lambda row: row["conversation"][0]["content"])


def test_a_server_without_a_reasoning_parser(
    vllm_server: VllmServer, problems: list[Problem], token_exact: Any, tmp_path: Path
) -> None:
    lines = [ask(vllm_server, problem) for problem in problems]
    rows = [kept_by_client(line, "reasoning") for line in lines]
    assert {row["reasoning"] for row in rows} == {""}
    report = audit(tmp_path, rows, out=tmp_path / "repaired.jsonl")
    (sentence,) = report.diagnosis
    assert sentence.startswith(
        "all 12 rows: thoughts are inside `content`; the server ran without a reasoning parser. "
        "Start the server with its reasoning parser (`--reasoning-parser kimi_k2`)"
    )
    assert (report.complete, report.token_exact) == (NUM_PROMPTS, 0)
    repaired = [json.loads(line) for line in (tmp_path / "repaired.jsonl").read_text().splitlines()]
    saved = {row["reasoning"] for row in repaired}
    assert saved == {row["reasoning"] for row in token_exact}


def test_thinking_switched_off_while_the_flag_says_on(
    vllm_server: VllmServer, parsed_server: VllmServer, problems: list[Problem], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    off = "all 12 rows: the prompt had closed the thoughts: thinking was switched off."
    think_end = tiny_tokenizer.convert_tokens_to_ids("</think>")
    for server in (vllm_server, parsed_server):
        lines = [ask(server, problem, return_token_ids=True, **OFF_WITH_THE_FLAG_ON) for problem in problems]
        by_request = audit(tmp_path, lines)
        assert by_request.complete == 0
        assert by_request.diagnosis[0].startswith(off)
        assert "`enable_thinking` is not Kimi's" in by_request.diagnosis[0]
        replies = [line["response"] for line in lines]  # with the prompt's ids, the request need not be known
        by_ids = audit(tmp_path, replies, context=CaptureContext(think_end_id=think_end))
        assert by_ids.complete == 0
        assert by_ids.diagnosis[0].startswith(off)
    # The parser believes the flag: what the target said without thinking became "reasoning".
    assert all(kept_by_client(line, "reasoning")["reasoning"] for line in lines)


def test_a_template_that_switches_thinking_off_stops_before_the_run(tiny_target: Path, tmp_path: Path) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    template = target / "chat_template.jinja"
    switch = "thinking is defined and not thinking"
    assert switch in template.read_text()
    template.write_text(template.read_text().replace(switch, "not enable_thinking"))
    with pytest.raises(TargetError, match=r"the chat template closes the thoughts at once.*variable .* is `thinking`"):
        GenerationRun(GenerationConfig(target=str(target), journal_dir=tmp_path / "journals"))


def test_the_old_field_name(parsed_server: VllmServer, problems: list[Problem], tmp_path: Path) -> None:
    lines = [ask(parsed_server, problem) for problem in problems]
    rows = [kept_by_client(line, "reasoning_content") for line in lines]
    assert {row["reasoning"] for row in rows} == {""}
    report = audit(tmp_path, rows)
    assert report.complete == 0
    assert report.diagnosis[0].startswith(
        "all 12 rows: the reasoning is an empty string. The client read a field that this server does not fill "
        "(`reasoning` against `reasoning_content`)"
    )
    assert audit(tmp_path, [line["response"] for line in lines]).passed  # one raw reply shows it


def test_token_ids_get_every_sample_from_either_server(
    parsed_server: VllmServer, problems: list[Problem], token_exact: Any, tiny_target: Path, tmp_path: Path
) -> None:
    assert len(token_exact) == NUM_PROMPTS
    assert all(row["token_exact"] and row["reasoning"].strip() and row["content"].strip() for row in token_exact)
    assert load_samples(parsed_server, problems, tiny_target, tmp_path) == token_exact
