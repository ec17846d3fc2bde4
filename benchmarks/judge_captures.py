"""How fast captured responses are judged and audited.

    python benchmarks/judge_captures.py [--megabytes 256] [--records 20000]

Prints records a second of `judge` on one core (records of about 2 KB, parsed already), and of `run_audit` the time to
start, the rate on one and on two processes and the peak memory on a file and on one four times as long (it must not
grow). Figures are reported, not asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eagle3_kimi.captures import judge

_TEXT = "the train leaves at nine and takes four hours so it arrives by one if nothing else is late 7 12 * 3 = 36"
_WORDS = _TEXT.split()
_AUDIT = (
    "import json, resource, sys, time; begun = time.perf_counter()\n"
    "from pathlib import Path\n"
    "from eagle3_kimi.captures import run_audit\n"
    "imported = time.perf_counter() - begun\n"
    "out = Path(sys.argv[3]) if len(sys.argv) > 3 else None\n"
    "report = run_audit([sys.argv[1]], out, processes=int(sys.argv[2]))\n"
    "usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]\n"
    "cpu = sum(u.ru_utime + u.ru_stime for u in usage)\n"
    "peak = max(u.ru_maxrss for u in usage) / 1024\n"
    "print(json.dumps([imported, report.seconds, report.bytes / 1e6, report.rows, peak, cpu]))\n"
)


def build_record(rng: random.Random, index: int) -> dict[str, Any]:
    """A chat completion of about 2 KB: every third has its thoughts inside `content`, every tenth is cut."""
    reasoning, content = (" ".join(rng.choices(_WORDS, k=k)) for k in (260, 110))
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning": reasoning}
    if index % 3 == 0:
        message = {"role": "assistant", "content": f"{reasoning}</think>{content}", "reasoning": None}
    choice = {"index": 0, "message": message, "finish_reason": "length" if index % 10 == 0 else "stop"}
    body = {"id": f"chatcmpl-{index}", "object": "chat.completion", "model": "kimi-k2.5", "choices": [choice]}
    return {"custom_id": f"request-{index}", "response": {"status_code": 200, "body": body}, "error": None}


def write_file(path: Path, megabytes: float) -> None:
    """Rows up to a size; the ids differ, the texts come again every 2,000 rows."""
    rng = random.Random(0)
    texts = [json.dumps(build_record(rng, index)) for index in range(2000)]
    written = index = 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            row = texts[index % 2000].replace("request-", f"request-{index}-", 1)
            written += file.write(row + "\n")
            index += 1


def measure_judge(count: int) -> tuple[float, float]:
    """Records a second, by the clock and by the processor's time."""
    rng = random.Random(1)
    records = [build_record(rng, index)["response"]["body"] for index in range(count)]
    begun, begun_cpu = time.perf_counter(), time.process_time()
    for record in records:
        judge(record)
    return count / (time.perf_counter() - begun), count / (time.process_time() - begun_cpu)


def measure_audit(path: Path, processes: int, out: Path | None = None) -> list[float]:
    """Import seconds, audit seconds, megabytes, rows, peak MB, CPU seconds; in a process of its own."""
    command = [sys.executable, "-c", _AUDIT, str(path), str(processes), *([str(out)] if out else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [float(value) for value in json.loads(result.stdout)]


def main() -> None:
    """Runs both measurements and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=256, help="size of the longer file")
    parser.add_argument("--records", type=int, default=20_000, help="records for `judge`")
    options = parser.parse_args()
    by_clock, by_cpu = measure_judge(options.records)
    size = len(json.dumps(build_record(random.Random(1), 1)["response"]["body"]))
    print(f"judge, one core: {by_clock:,.0f} records/s ({by_cpu:,.0f} per CPU second) of {size:,} bytes")
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in (options.megabytes / 4, options.megabytes):
            path = Path(folder, "rows.jsonl")
            write_file(path, megabytes)
            for processes, out in ((1, None), (2, None), (2, Path(folder, "out.jsonl"))):
                imported, seconds, read, rows, peak, cpu = measure_audit(path, processes, out)
                print(
                    f"audit, {processes} process{'es' if processes > 1 else ''}{' with --out' if out else ''}: "
                    f"{read:,.0f} MB, {rows:,.0f} rows in {seconds:.1f} s = {read / seconds:,.0f} MB/s "
                    f"({read / cpu:,.0f} MB a CPU second); "
                    f"import {imported:.2f} s, peak {peak:,.0f} MB"
                )


if __name__ == "__main__":
    main()
