"""Uploads in the Xet protocol, which the client prefers: kept by the `local://` store that `hf_xet` brings for tests.

The client writes chunks and shards into the folder that its token names; what a commit needs is put together again.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hf_xet

_RECORD = 48
_END = b"\xff" * 32


class XetStore:
    """One folder for each upload session."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._sessions = 0

    def open_session(self) -> str:
        """Address of a new folder to upload into."""
        self._sessions += 1
        folder = self.root / str(self._sessions)
        folder.mkdir(parents=True)
        return f"local://{folder}"

    def read(self, sha256: str, size: int) -> bytes | None:
        """The file of that digest, from whichever session brought it."""
        for folder in sorted(self.root.iterdir()):
            for shard in folder.glob("xet/xorbs/shards/*.mdb"):
                for xet_hash, found in _list_files(shard.read_bytes()):
                    if found == sha256:
                        return self._assemble(folder, xet_hash, size)
        return None

    def _assemble(self, folder: Path, xet_hash: str, size: int) -> bytes:
        """From a copy: the uploading client may still hold the lock of its database."""
        with tempfile.TemporaryDirectory(dir=self.root, prefix=".") as name:
            view = Path(name) / "view"
            shutil.copytree(folder, view, ignore=shutil.ignore_patterns("shard-session"))
            file = Path(name) / "file"
            with hf_xet.XetSession().new_file_download_group(
                endpoint=f"local://{view}", token="t", token_expiry_unix_secs=2**40
            ) as downloads:
                downloads.start_download_file(hf_xet.XetFileInfo(xet_hash, size), str(file))
            return file.read_bytes()


def _list_files(shard: bytes) -> Iterator[tuple[str, str]]:
    """(Xet hash, SHA-256) of the files of a metadata shard.

    After a header, all in records of 48 bytes: a file's hash, flags and number of segments; its segments, as many
    verification records again if bit 31 of the flags is set, and one with the SHA-256 if bit 30 is.
    """
    position = _RECORD
    while shard[position : position + 32] != _END:
        xet_hash = shard[position : position + 32]
        flags, segments = struct.unpack_from("<II", shard, position + 32)
        position += _RECORD * (1 + segments * (2 if flags >> 31 & 1 else 1))
        if flags >> 30 & 1:
            yield _to_hex(xet_hash), _to_hex(shard[position : position + 32])
            position += _RECORD


def _to_hex(digest: bytes) -> str:
    return "".join(f"{part:016x}" for part in struct.unpack("<4Q", digest))
