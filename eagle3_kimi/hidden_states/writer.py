"""Writing a feature store: one writer a rank, in the background."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from eagle3_kimi.errors import DataError, RunStopped
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.growing_shard import GrowingShard, ShardSample
from eagle3_kimi.hidden_states.manifest import MANIFEST_NAME, StoreManifest
from eagle3_kimi.hidden_states.shards import index_files, index_shard, read_token_digests

_BYTES_AT_ONCE = 32 << 20
"""Of samples that wait in memory until they are written together."""

_MOST_HEADER_BYTES = 2 << 20
"""Kept in front of a shard whose end is not in sight: some thousand samples, and little if fewer come."""


class FeatureStoreWriter:
    """Writes one rank's shards, in the background; every rank has a writer of its own.

    Samples reach the disk as they come, some megabytes at a time. A shard is finished with `max_shard_bytes`, or when
    its header is full (some thousand samples), and the last one on `close`: `add` waits until it is whole on the disk,
    so a killed run loses at most the shard it was filling. Its digest and its index follow in the background; where
    they are missing, `recover_store` makes them.
    """

    def __init__(self, path: Path, manifest: StoreManifest, *, rank: int = 0, max_shard_bytes: int = 2 << 30) -> None:
        self.path, self.rank, self.max_shard_bytes = Path(path), rank, max_shard_bytes
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / MANIFEST_NAME).exists():
            StoreManifest.load(self.path).check_same_store(manifest, self.path)
        else:
            manifest.save(self.path)
        self.manifest = manifest
        self._seen = set(read_token_digests(self.path))
        own = [file.stem for file in index_files(self.path) if file.stem.startswith(f"features-r{rank:02d}-")]
        self._number = max((int(stem.rsplit("-", 1)[1]) + 1 for stem in own), default=0)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="feature-store")
        self._writing: Future[None] | None = None
        self._indexing: Future[None] | None = None
        self._shard: GrowingShard | None = None
        self._waiting: list[ShardSample] = []
        self._waiting_bytes = self._shard_bytes = self._header_bytes = 0

    def add(self, sample: FeatureSample, *, checked: bool = False) -> None:
        """Checks and keeps a sample.

        Args:
            sample: its features.
            checked: they are known to be fit for training.

        Raises:
            DataError: the sample is bad or already there; nothing of it is kept.
            RunStopped: the disk is full; what is indexed stays.
        """
        if not checked:
            sample.check(self.manifest)
        if sample.id in self._seen:
            raise DataError(f"sample {sample.id} is already in the store {self.path}")
        self._seen.add(sample.id)
        kept = ShardSample.of(sample)
        if self._shard is not None and self._header_bytes + kept.header_bytes > self._shard.header_bytes:
            self._finish_shard()
        self._waiting.append(kept)
        self._waiting_bytes += kept.bytes
        self._shard_bytes += kept.bytes
        self._header_bytes += kept.header_bytes
        if self._shard_bytes >= self.max_shard_bytes:
            self._finish_shard()
        elif self._waiting_bytes >= _BYTES_AT_ONCE:
            self._write_waiting()

    def close(self) -> None:
        """Finishes the last shard and waits for all indexes."""
        try:
            self._finish_shard()
            self._wait_for_index()
        finally:
            self._threads.shutdown(wait=True)

    def __enter__(self) -> FeatureStoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_waiting(self, *, is_last: bool = False) -> None:
        self._wait_for_write()
        if not self._waiting:
            return
        if self._shard is None:
            room = self._header_bytes
            if not is_last:  # as much for the rest of the shard as for its first samples
                whole = room * self.max_shard_bytes // self._shard_bytes
                room = max(room, min(whole, _MOST_HEADER_BYTES))
            file = self.path / f"features-r{self.rank:02d}-{self._number:05d}.safetensors"
            self._shard, self._number = GrowingShard(file, header_bytes=room), self._number + 1
        self._writing = self._threads.submit(self._shard.append, self._waiting)
        self._waiting, self._waiting_bytes = [], 0

    def _finish_shard(self) -> None:
        self._write_waiting(is_last=True)
        self._wait_for_write()
        shard = self._shard
        if shard is None:
            return
        with self._naming_the_disk():
            shard.finish()
        self._forget_shard()
        self._wait_for_index()
        self._indexing = self._threads.submit(index_shard, shard.file, shard.entries)

    def _wait_for_write(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with self._naming_the_disk():
                writing.result()

    def _wait_for_index(self) -> None:
        if self._indexing is not None:
            indexing, self._indexing = self._indexing, None
            with self._naming_the_disk():
                indexing.result()

    def _forget_shard(self) -> None:
        self._shard, self._waiting = None, []
        self._waiting_bytes = self._shard_bytes = self._header_bytes = 0

    @contextmanager
    def _naming_the_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._shard is not None:
                self._shard.discard()
            self._forget_shard()
            raise RunStopped(
                f"a shard could not be written to {self.path} ({error}). Shards with an index are complete and stay; "
                "make room and run the same command again: it goes on from there"
            ) from error
