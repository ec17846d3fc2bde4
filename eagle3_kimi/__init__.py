"""EAGLE-3 draft models for Kimi-K2.5, trained on reasoning-complete samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3_kimi.builders.registry import register

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

__version__ = "0.1.0"

__all__ = ["__version__", "load_dataset", "validate"]

register()


def load_dataset(path: str, name: str | None = None, **options: Any) -> DatasetDict | Dataset:
    """`datasets.load_dataset` for our builders, through public API alone.

    Args:
        path: `kimi_reasoning`, or the builder script's path.
        name: `complete` (default) or `quarantine`.
        options: `data_files`, `split`, `num_proc`, `cache_dir` and the builder's own options.
    """
    from eagle3_kimi.builders.loading import load

    return load(path, name, **options)


def validate(dataset: Dataset | DatasetDict, *, vocab_size: int | None = None) -> int:
    """Checks that every row of a loaded data set is reasoning-complete; see `schema.validate`."""
    from eagle3_kimi.schema import validate as check

    return check(dataset, vocab_size=vocab_size)
