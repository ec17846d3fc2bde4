"""What importing this package does and does not do, and the private names of `datasets` it relies on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
from eagle3_kimi.builders.registry import BUILDERS

import eagle3_kimi
from eagle3_kimi.errors import UsageError

SCRIPT = Path(eagle3_kimi.builders.registry.__file__).with_name("kimi_reasoning.py")


def run_python(script: str, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module",
    ["eagle3_kimi", "eagle3_kimi.protocol", "eagle3_kimi.schema", "eagle3_kimi.captures", "eagle3_kimi.prompts",
     "eagle3_kimi.cli"],
)  # fmt: skip
def test_importing_stays_light(module: str) -> None:
    heavy = "{'torch', 'datasets', 'transformers', 'vllm', 'accelerate'}"
    assert run_python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]"


@pytest.mark.parametrize("first", ["import datasets, eagle3_kimi", "import eagle3_kimi, datasets"])
@pytest.mark.parametrize("spelling", ["kimi_reasoning", "builders/kimi_reasoning.py", "./builders/kimi_reasoning.py",
                                      str(SCRIPT)])  # fmt: skip
def test_load_dataset_finds_the_builder_in_either_import_order(first: str, spelling: str, tmp_path: Path) -> None:
    # A target that is not there: the error comes from our builder, so it was found; nothing else is tried.
    script = f"""{first}
from eagle3_kimi.errors import UsageError
for load in (datasets.load_dataset, eagle3_kimi.load_dataset):
    try:
        load({spelling!r}, data_files="prompts.jsonl", target="no-such-folder")
    except UsageError as error:
        print("no-such-folder" in str(error))
"""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    assert run_python(script, cwd=tmp_path, **offline).split() == ["True", "True"]


@pytest.fixture
def hub_that_counts() -> Iterator[tuple[str, list[str]]]:
    """The edge: a Hub that notes what is asked and knows nothing."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_no_local_path_goes_over_the_network(hub_that_counts: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = hub_that_counts
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
    script = """import sys, datasets, eagle3_kimi
from eagle3_kimi.errors import UsageError
for path in sys.argv[1:]:
    try:
        datasets.load_dataset(path, data_files="prompts.jsonl", target=".")
    except UsageError as error:
        print("no config.json" in str(error))
print(datasets.config.HF_UPDATE_DOWNLOAD_COUNTS)
"""
    spellings = ["kimi_reasoning", "builders/kimi_reasoning.py", str(SCRIPT)]
    environment = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    printed = run_python(script, *spellings, cwd=tmp_path, **environment)
    assert printed.split() == ["True", "True", "True", "True"]  # and the counter is switched on again for others
    assert asked == []


def test_a_call_without_data_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.jsonl").write_text('{"prompt": "not to be read"}\n')
    for load in (datasets.load_dataset, eagle3_kimi.load_dataset):
        with pytest.raises(UsageError, match="needs data_files"):
            load("kimi_reasoning", target="tiny")


def test_another_script_is_still_refused_by_datasets() -> None:
    with pytest.raises(RuntimeError, match="Dataset scripts are no longer supported"):
        datasets.load_dataset("somewhere/else.py")
    with pytest.raises(UsageError, match=r"no builder 'kimi_raesoning'; known: .*kimi_reasoning"):
        eagle3_kimi.load_dataset("kimi_raesoning", data_files="prompts.jsonl")


def test_the_private_table_of_datasets_has_the_shape_we_rely_on() -> None:
    from datasets import packaged_modules

    table = packaged_modules._PACKAGED_DATASETS_MODULES
    module, digest = table["json"]
    assert isinstance(module, str)
    assert isinstance(digest, str)
    assert datasets.load._PACKAGED_DATASETS_MODULES is table  # mutated in place, so every user of it sees our names
    assert {name: table[name][0] for name in BUILDERS} == BUILDERS


def test_the_wrapped_factory_still_finds_the_other_builders(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    loaded = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"]["a"][:] == [1, 2]
