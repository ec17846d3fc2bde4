"""Generation in a process of its own, called as a person would: `python -m eagle3_kimi.demo.samples OPTIONS OUTPUT`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import datasets

import eagle3_kimi
from eagle3_kimi.builders.loading import save_whole
from eagle3_kimi.errors import Eagle3KimiError
from eagle3_kimi.evaluation.child_process import ERROR_PREFIX


def make_samples(options: dict[str, Any], output: Path) -> None:
    """Writes the data set `output`/complete and what was refused, `output`/quarantine."""
    complete = datasets.load_dataset("kimi_reasoning", **options)
    refused = datasets.load_dataset("kimi_reasoning", "quarantine", **options)
    eagle3_kimi.validate(complete)
    for name, samples in (("complete", complete), ("quarantine", refused)):
        save_whole(samples, output / name)


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
