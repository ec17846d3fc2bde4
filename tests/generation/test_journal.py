from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3_kimi.errors import DataError, RunStopped
from eagle3_kimi.generation.journal import Journal, JournalEntry, encode_record

KEY = {"target_revision": "abc", "seed": 0}


def record(number: int, reason: str = "ok", **row: Any) -> dict[str, Any]:
    return {"id": f"sample-{number}", "reason": reason, "row": {"number": number, **row}}


def written(folder: Path, *records: dict[str, Any]) -> Journal:
    journal = Journal(folder, KEY)
    with journal:
        for item in records:
            journal.append(item)
    return journal


def test_what_is_appended_is_indexed_and_read_back(tmp_path: Path) -> None:
    records = [record(1, text="é\n\ud800"), record(2, "finish_length"), record(3)]
    index = written(tmp_path, *records).index()
    assert {name: entry.reason for name, entry in index.items()} == {
        "sample-1": "ok",
        "sample-2": "finish_length",
        "sample-3": "ok",
    }
    reader = Journal(tmp_path, KEY)
    assert [reader.read_at(entry.offset) for entry in index.values()] == records


def test_the_key_names_the_file_and_is_written_beside_it(tmp_path: Path) -> None:
    journal = written(tmp_path, record(1))
    assert json.loads(journal.path.with_suffix(".key.json").read_text()) == KEY
    assert Journal(tmp_path, {**KEY, "seed": 1}).path != journal.path
    assert Journal(tmp_path, {**KEY, "seed": 1}).index() == {}


def test_the_last_record_of_a_sample_counts(tmp_path: Path) -> None:
    first, second = record(1, "finish_length"), record(1, "ok")
    index = written(tmp_path, first, second).index()
    assert index == {"sample-1": JournalEntry(offset=len(encode_record(first)), reason="ok", attempts=2)}


def test_a_torn_tail_is_cut_wherever_it_was_torn(tmp_path: Path) -> None:
    whole, last = encode_record(record(1)), encode_record(record(2))
    for cut in range(len(last)):
        journal = Journal(tmp_path, {"cut": cut})
        journal.path.write_bytes(whole + last[:cut])
        assert list(journal.index()) == ["sample-1"]  # read while another process writes
        with journal:
            journal.append(record(3))
        assert list(journal.index()) == ["sample-1", "sample-3"]


def test_a_torn_tail_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    journal = written(tmp_path, record(1))
    whole = journal.path.read_bytes()
    for head in (whole, b""):
        journal.path.write_bytes(head + b"x" * 200_000)
        with journal:
            pass
        assert journal.path.read_bytes() == head


def test_a_damaged_line_stops_the_run(tmp_path: Path) -> None:
    journal = written(tmp_path, *(record(number, text="word " * 20) for number in range(3)))
    content = bytearray(journal.path.read_bytes())
    rng = random.Random(0)
    second = len(encode_record(record(0, text="word " * 20)))
    for _ in range(50):
        damaged = bytearray(content)
        damaged[rng.randrange(second, 2 * second - 1)] ^= 1 << rng.randrange(7)
        if b"\n" in damaged[second : 2 * second - 1]:
            continue  # a new line break makes two damaged lines; the first is named all the same
        journal.path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"line 2: the checksum does not fit"):
            journal.index()


def test_a_second_writer_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first, second = Journal(tmp_path, KEY), Journal(tmp_path, KEY)
    with first:
        first.append(record(1))
        with pytest.raises(RunStopped, match="another run is writing the journal"), second:
            pass
        assert list(second.index()) == ["sample-1"]  # reading needs no lock
    with second:
        second.append(record(2))
    assert list(first.index()) == ["sample-1", "sample-2"]


def test_other_processes_get_the_path_and_no_lock(tmp_path: Path) -> None:
    with Journal(tmp_path, KEY) as journal:
        journal.append(record(1))
        copy = pickle.loads(pickle.dumps(journal))  # noqa: S301 - `datasets` does, for num_proc
        assert copy.read_at(0) == record(1)


_APPEND_FOR_EVER = """
import sys
from pathlib import Path
from eagle3_kimi.generation.journal import Journal
with Journal(Path(sys.argv[1]), {"target_revision": "abc", "seed": 0}) as journal:
    start = len(journal.index())
    print("started", flush=True)
    for number in range(start, 10**9):
        journal.append({"id": f"sample-{number}", "reason": "ok", "row": {"text": "x" * (number * 7919 % 100_000)}})
"""


def test_kill_9_loses_at_most_the_record_being_written(tmp_path: Path) -> None:
    rng, before = random.Random(1), 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", _APPEND_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.01, 0.1))
        process.kill()
        process.communicate()
        index = Journal(tmp_path, KEY).index()
        assert list(index) == [f"sample-{number}" for number in range(len(index))]
        assert all(entry.attempts == 1 for entry in index.values())
        assert len(index) > before
        before = len(index)


_FILL_THE_DISK = """
import resource, sys
from pathlib import Path
from eagle3_kimi.errors import RunStopped
from eagle3_kimi.generation.journal import Journal
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    with Journal(Path(sys.argv[1]), {"target_revision": "abc", "seed": 0}) as journal:
        for number in range(10):
            journal.append({"id": f"sample-{number}", "reason": "ok", "row": {"text": "x" * 30_000}})
except RunStopped as error:
    print(error)
"""


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FILL_THE_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot write the journal" in done.stdout
    assert "What it holds is kept" in done.stdout
    journal = Journal(tmp_path, KEY)
    assert list(journal.index()) == ["sample-0", "sample-1", "sample-2"]
    assert journal.path.read_bytes().endswith(b"\n")  # cut back to the last whole record
    with journal:
        journal.append(record(3))
    assert len(journal.index()) == 4


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStopped, match="cannot open the journal"), Journal(tmp_path / "file" / "journals", KEY):
        pass
