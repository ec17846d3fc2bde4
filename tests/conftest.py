"""Fixtures shared by all tests: the tiny target, its tokenizer, and how much hypothesis tries."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads must not take the cores from the engines

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.vllm_server import VllmServer

settings.register_profile(
    "ci", max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("ci"), max_examples=100_000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start engines come first: with two workers, the short ones fill up what is left at the end."""
    slow = {item.path for item in items if item.get_closest_marker("vllm")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    """Folder of the trained tiny target; the first test run on a machine trains it (about two minutes)."""
    from eagle3_kimi.tiny import cached_tiny_target

    return cached_tiny_target()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """A tokenizer as the tiny target's, made in a second."""
    from eagle3_kimi.tiny.problems import generate_problems
    from eagle3_kimi.tiny.tokenizer import build_tokenizer

    return build_tokenizer(list(generate_problems(300, seed=1)))


@pytest.fixture(scope="session")
def vllm_server(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM server of the tiny target as people start it: without a reasoning parser. Started once a test process."""
    from tests.vllm_server import running

    with running(tiny_target, tmp_path_factory.mktemp("vllm-server")) as server:
        yield server
