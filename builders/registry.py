"""Makes `datasets.load_dataset` know our builders, in either import order, without importing `datasets` itself.

`datasets` 4 removed loading scripts and has no entry points. Two private names of it are used, both guarded
by a contract test: the table of packaged modules (name -> module, hash), and `dataset_module_factory`, which
is wrapped so that a script's path means its builder, so that a call without data files is refused (datasets
would take every file of the working folder), and so that nothing reaches the download counter.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from eagle3_kimi.errors import UsageError

BUILDERS = {"kimi_reasoning": "eagle3_kimi.builders.kimi_reasoning"}
"""Name -> module of each builder."""

_ROW_DECIDING_MODULES = (
    "protocol.py",
    "markers.py",
    "repetition.py",
    "schema.py",
    "features.py",
    "chat.py",
    "prompts/*.py",
    "generation/chains.py",
    "generation/rows.py",
)


def builder_names() -> dict[str, str]:
    """Every spelling of a builder -> its name: the name, `builders/NAME.py`, the absolute path."""
    here = Path(__file__).resolve().parent
    return {
        spelling: name
        for name in BUILDERS
        for spelling in (name, f"builders/{name}.py", f"./builders/{name}.py", str(here / f"{name}.py"))
    }


@functools.cache
def code_hash() -> str:
    """Digest of the modules that decide rows: a change of the rules makes a new cache entry."""
    package = Path(importlib.util.find_spec("eagle3_kimi").origin or "").parent  # type: ignore[union-attr]
    digest = hashlib.sha256()
    for pattern in _ROW_DECIDING_MODULES:
        for file in sorted(package.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def register() -> None:
    """Registers with `datasets` now if it is imported, else as soon as it will be."""
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name, action in _ACTIONS.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            action(module)


def _add_to_table(packaged_modules: ModuleType) -> None:
    table = packaged_modules._PACKAGED_DATASETS_MODULES
    table.update({name: (module, code_hash()) for name, module in BUILDERS.items()})


def _wrap_factory(load: ModuleType) -> None:
    original = load.dataset_module_factory
    if getattr(original, "_eagle3_kimi", False):
        return
    ours = builder_names()

    @functools.wraps(original)
    def factory(path: str, *args: Any, **kwargs: Any) -> Any:
        if path not in ours:
            return original(path, *args, **kwargs)
        if not kwargs.get("data_files") and not kwargs.get("data_dir"):
            raise UsageError(f"load_dataset({path!r}) needs data_files: the JSONL files of prompts to generate from")
        counted, load.config.HF_UPDATE_DOWNLOAD_COUNTS = load.config.HF_UPDATE_DOWNLOAD_COUNTS, False
        try:
            return original(ours[path], *args, **kwargs)
        finally:
            load.config.HF_UPDATE_DOWNLOAD_COUNTS = counted

    factory._eagle3_kimi = True  # type: ignore[attr-defined]
    load.dataset_module_factory = factory  # type: ignore[attr-defined]


_ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "datasets.packaged_modules": _add_to_table,
    "datasets.load": _wrap_factory,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs an action right after one of two modules of `datasets` has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _ACTIONS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenAct(spec.loader, _ACTIONS[fullname])
        return spec


class _ThenAct(importlib.abc.Loader):
    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> Any:  # get_source, get_filename ...
        return getattr(self._loader, name)
