"""`eagle3_kimi.load_dataset`: our builders through the public builder API of `datasets`."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_kimi.builders.registry import BUILDERS, builder_names, code_hash

from eagle3_kimi.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, DatasetDict


def load(
    path: str,
    name: str | None = None,
    *,
    split: str | None = None,
    num_proc: int | None = None,
    cache_dir: str | None = None,
    download_mode: str | None = None,
    **options: Any,
) -> DatasetDict | Dataset:
    """Instantiates the builder, prepares the data set once, and opens it.

    Raises:
        UsageError: `path` names no builder of this package, or `data_files` is missing.
    """
    known = builder_names()
    builder_name = known.get(path) or known.get(str(Path(path).resolve()))
    if builder_name is None:
        raise UsageError(f"no builder {path!r}; known: {', '.join(sorted(known))}")
    if not options.get("data_files"):
        raise UsageError(f"load_dataset({path!r}) needs data_files: the JSONL files of prompts to generate from")
    builder = _builder_class(BUILDERS[builder_name])(cache_dir=cache_dir, config_name=name, hash=code_hash(), **options)
    builder.download_and_prepare(num_proc=num_proc, download_mode=download_mode)
    return builder.as_dataset(split=split)


def save_whole(samples: DatasetDict, folder: Path) -> None:
    """`save_to_disk`, whole or not at all, without empty splits: `datasets` cannot read those back."""
    import datasets

    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    filled = {name: split for name, split in samples.items() if len(split)}
    datasets.DatasetDict(filled).save_to_disk(str(temporary))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def _builder_class(module: str) -> type[DatasetBuilder]:
    from datasets import DatasetBuilder

    found = [
        item
        for item in vars(importlib.import_module(module)).values()
        if isinstance(item, type) and issubclass(item, DatasetBuilder) and item.__module__ == module
    ]
    return found[0]
