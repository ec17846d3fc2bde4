"""What a person names as prompts: files of rows, or a mix, which is built on first use and then kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock

from eagle3_kimi.prompts.files import digest_of
from eagle3_kimi.prompts.lengths import TokenCounter
from eagle3_kimi.prompts.mix_builder import PROMPTS, REPORT_PAGE, build_mix, mix_fingerprint

logger = logging.getLogger(__name__)

MIX_SUFFIXES = frozenset({".yaml", ".yml"})


def is_mix(file: Path) -> bool:
    """Whether a file of prompts is a mix rather than rows."""
    return file.suffix.lower() in MIX_SUFFIXES


def prompts_digest(files: Iterable[Path], *, count_tokens: TokenCounter | None = None) -> str:
    """Digest of the conversations that `files` give: content, not names; of a mix, all that decides its rows.

    The first use of a mix with Hub sources resolves their revisions and locks them, so that later digests agree.

    Raises:
        UsageError: a file is missing, or a mix cannot be used as it stands.
        DataError: a Hub source has no revision.
    """
    digest = hashlib.sha256()
    for file in files:
        part = mix_fingerprint(file, count_tokens=count_tokens) if is_mix(file) else digest_of(file)
        digest.update(part.encode())
    return digest.hexdigest()[:20]


def open_prompts(
    files: Iterable[Path], *, cache_dir: Path, count_tokens: TokenCounter | None = None, num_proc: int = 1
) -> list[Path]:
    """The files of conversations that `files` stand for: each mix is built once under `cache_dir`, by fingerprint.

    What a mix refused is listed in `refused.jsonl` beside its conversations.

    Raises:
        UsageError: a mix cannot be used as it stands.
        DataError: a source is damaged or of unknown shape, or nothing of the mix is left.
    """
    opened = []
    for file in files:
        if is_mix(file):
            folder = cache_dir / "mixes" / mix_fingerprint(file, count_tokens=count_tokens)
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock")):  # two runs may want the same mix at once
                report = build_mix(file, folder, count_tokens=count_tokens, num_proc=num_proc)
            rows = sum(report["read"].values())
            logger.info("%s: %d conversations of %d rows; %s", file, report["rows"], rows, folder / REPORT_PAGE)
            file = folder / PROMPTS
        opened.append(file)
    return opened
