"""`--cases-dir DIR`: runs the same checks on any folder of case files; one line per failing id at the end."""

from __future__ import annotations

import json
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_NOT_RUN = pytest.StashKey[Counter]()
_FAILED = pytest.StashKey[list]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases-dir", metavar="DIR", help="folder of *.jsonl case files (default: the ones beside the tests)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NOT_RUN], config.stash[_FAILED] = Counter(), []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case whose kind has a module `check_KIND.py` here; the other kinds are reported as not run."""
    if "case" not in metafunc.fixturenames:
        return
    folder = metafunc.config.getoption("cases_dir", default=None)
    cases = _load_cases(Path(folder) if folder else _HERE)
    runnable = []
    for case in cases:
        kind = str(case.get("kind"))
        if find_spec(f"tests.cases.check_{kind}"):
            runnable.append(pytest.param(case, import_module(f"tests.cases.check_{kind}").check, id=case["id"]))
        else:
            metafunc.config.stash[_NOT_RUN][kind] += 1
    metafunc.parametrize(("case", "check"), runnable)


def _load_cases(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise pytest.UsageError(f"--cases-dir {folder}: expected a folder with *.jsonl files, found none")
    cases = []
    for file in files:
        for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
            if line.strip():
                try:
                    case = json.loads(line)
                    case["id"], case["expect"], case["input"]
                except (ValueError, KeyError, TypeError) as error:
                    raise pytest.UsageError(f"{file}:{number} is no case: {error!r}") from error
                cases.append(case)
    return cases


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    outcome = yield
    report = outcome.get_result()
    callspec = getattr(item, "callspec", None)
    if report.failed and callspec is not None and "case" in callspec.params:
        message = str(report.longrepr).strip().split("\n")[-1]
        item.config.stash[_FAILED].append(f"{callspec.params['case']['id']}: {message}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    not_run, failed = config.stash[_NOT_RUN], config.stash[_FAILED]
    if failed:
        terminalreporter.section("failing cases")
        for line in failed:
            terminalreporter.line(line)
    for kind, count in not_run.items():
        terminalreporter.line(f"not run: {count} cases of kind {kind} (there is no tests/cases/check_{kind}.py)")
