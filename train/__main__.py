"""Makes the folder launchable: `accelerate launch --config_file ... train/ extract|drafter ...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

SCRIPTS = {"extract": "extract_hidden_states.py", "drafter": "train_drafter.py"}


def main() -> None:
    """Runs the script named by the first argument with the remaining ones."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in SCRIPTS:
        raise SystemExit(
            f"usage: accelerate launch --config_file FILE train/ {{{'|'.join(SCRIPTS)}}} ... (came: {name!r})"
        )
    script = Path(__file__).parent / SCRIPTS[name]
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
