"""Generation in a process of its own, called as a person would: `python -m eagle3_kimi.demo.samples OPTIONS OUTPUT`."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets

import eagle3_kimi
from eagle3_kimi.errors import Eagle3KimiError, RunStopped
from eagle3_kimi.evaluation.child_process import ERROR_PREFIX


def make_samples(options: dict[str, Any], output: Path) -> None:
    """Writes the data set `output`/complete and what was refused, `output`/quarantine.

    Raises:
        RunStopped: nothing is complete.
    """
    complete = datasets.load_dataset("kimi_reasoning", **options)
    refused = datasets.load_dataset("kimi_reasoning", "quarantine", **options)
    if not eagle3_kimi.validate(complete):
        reasons = Counter(reason for split in refused.values() for reason in split["reason"])
        raise RunStopped(f"no sample is reasoning-complete ({dict(reasons)}); the target does not reason as it should")
    for name, samples in (("complete", complete), ("quarantine", refused)):
        save_whole(samples, output / name)


def save_whole(samples: datasets.DatasetDict, folder: Path) -> None:
    """`save_to_disk`, whole or not at all, without empty splits: `datasets` cannot read those back."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    filled = datasets.DatasetDict({name: split for name, split in samples.items() if len(split)})
    filled.save_to_disk(str(temporary))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def main(options: str, output: str) -> None:
    """Reads the options of `load_dataset`; a foreseen failure is one line on standard error."""
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("eagle3_kimi").setLevel(logging.INFO)
    try:
        make_samples(json.loads(Path(options).read_text(encoding="utf-8")), Path(output))
    except (Eagle3KimiError, OSError) as error:
        raise SystemExit(ERROR_PREFIX + " ".join(str(error).split())) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
