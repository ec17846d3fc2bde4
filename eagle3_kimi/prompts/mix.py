"""The mix file: which sources, how much of each, and what must not get in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eagle3_kimi.errors import UsageError
from eagle3_kimi.prompts.sources import Source


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """An evaluation set that must not leak into training prompts."""

    name: str
    files: tuple[str, ...]
    """Local files, relative to the mix's folder."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A mix file."""

    sources: tuple[Source, ...]
    """In order: of two equal prompts the earlier source keeps its own."""
    size: int | None = None
    """Conversations in all; what counted sources leave is shared out by weight."""
    seed: int = 0
    """Decides which rows are taken and in which order they stand."""
    near_duplicate_threshold: float | None = 0.8
    """Jaccard similarity of five-word runs; null drops exact duplicates only."""
    evaluation_sets: tuple[EvaluationSet, ...] = ()
    """Prompts that share 13 words in a row with one of these are refused."""
    max_prompt_tokens: int | None = None
    """Longer prompts are refused, never cut; needs the target's tokenizer."""

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        twice = {name for name in names if names.count(name) > 1}
        if not names or twice:
            raise UsageError(f"`sources` must name each source once; came {names or 'none'}")
        weighted = any(source.weight is not None for source in self.sources)
        if weighted != (self.size is not None):
            raise UsageError("`size` and weighted sources belong together: give both, or a `count` to every source")
        if self.size is not None and self.size < sum(source.count or 0 for source in self.sources):
            raise UsageError(f"the sources' counts add up to more than `size` {self.size}")

    @property
    def counts(self) -> dict[str, int]:
        """Conversations wanted of each source."""
        counts = {source.name: source.count for source in self.sources if source.count is not None}
        weights = {source.name: source.weight for source in self.sources if source.weight is not None}
        return {**counts, **share_out((self.size or 0) - sum(counts.values()), weights)}


def load_mix(path: Path) -> Mix:
    """Reads a mix file.

    Raises:
        UsageError: no such file; an unknown key; a value of the wrong type.
    """
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    if not path.is_file():
        raise UsageError(f"{path}: no such mix")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Mix)
    try:
        fields = parser.instantiate(parser.parse_string(path.read_text(encoding="utf-8")))
        return Mix(**vars(fields))
    except (ArgumentError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from error


def parse_evaluation_sets(named: Iterable[str]) -> tuple[EvaluationSet, ...]:
    """`NAME=FILE` as given on the command line; a name that is given twice has both files.

    Raises:
        UsageError: no `=`, or nothing on one side of it.
    """
    files: dict[str, list[str]] = {}
    for text in named:
        name, _, file = text.partition("=")
        if not name or not file:
            raise UsageError(f"an evaluation set is given as NAME=FILE, for example gsm8k=test.jsonl; came {text!r}")
        files.setdefault(name, []).append(file)
    return tuple(EvaluationSet(name=name, files=tuple(paths)) for name, paths in files.items())


def share_out(size: int, weights: dict[str, float]) -> dict[str, int]:
    """Splits `size` by weight so that the parts add up (largest remainder; ties by name)."""
    total = sum(weights.values())
    if total <= 0:
        return dict.fromkeys(weights, 0)
    exact = {name: size * weight / total for name, weight in weights.items()}
    parts = {name: int(value) for name, value in exact.items()}
    left = sorted(exact, key=lambda name: (parts[name] - exact[name], name))
    for name in left[: size - sum(parts.values())]:
        parts[name] += 1
    return parts
