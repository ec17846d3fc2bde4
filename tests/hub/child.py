"""Runs several `eagle3-kimi` commands in one process, since each start costs seconds; prints what each answered.

python -m tests.hub.child '[["push", "dataset", ...], ["pull", ...]]'
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from eagle3_kimi.cli import main


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of one command."""
    sys.argv = ["eagle3-kimi", *arguments]
    output = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, output.getvalue()


if __name__ == "__main__":
    sys.stdout.write(json.dumps([run(arguments) for arguments in json.loads(sys.argv[1])]))
