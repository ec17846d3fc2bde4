"""Writing a feature store: one writer a rank, shards in the background."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError
from safetensors.torch import save_file

from eagle3_kimi.errors import DataError, RunStopped
from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.manifest import MANIFEST_NAME, StoreManifest
from eagle3_kimi.hidden_states.shards import file_digest, index_files, load_index, write_json


class FeatureStoreWriter:
    """Writes one rank's shards, in the background; every rank has a writer of its own.

    A shard is written when `max_shard_bytes` are gathered, and the last one on `close`, so a killed
    run loses at most the shard being gathered and the one being written.
    """

    def __init__(self, path: Path, manifest: StoreManifest, *, rank: int = 0, max_shard_bytes: int = 2 << 30) -> None:
        self.path, self.rank, self.max_shard_bytes = Path(path), rank, max_shard_bytes
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / MANIFEST_NAME).exists():
            StoreManifest.load(self.path).check_same_store(manifest, self.path)
        else:
            manifest.save(self.path)
        self.manifest = manifest
        indexes = [load_index(file) for file in index_files(self.path)]
        self.written_ids: set[str] = {entry["id"] for index in indexes for entry in index["samples"]}
        """Ids in finished shards, of any rank: what a resumed run skips."""
        own = [file.stem for file in index_files(self.path) if file.stem.startswith(f"features-r{rank:02d}-")]
        self._number = max((int(stem.rsplit("-", 1)[1]) + 1 for stem in own), default=0)
        self._samples: list[FeatureSample] = []
        self._seen = set(self.written_ids)
        self._bytes = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feature-store")
        self._pending: Future[None] | None = None

    def add(self, sample: FeatureSample, *, checked: bool = False) -> None:
        """Checks and keeps a sample.

        Args:
            sample: its features.
            checked: they are known to be fit for training.

        Raises:
            DataError: the sample is bad or already there; nothing of it is kept.
            RunStopped: an earlier shard could not be written (a full disk); what is indexed stays.
        """
        if not checked:
            sample.check(self.manifest)
        if sample.id in self._seen:
            raise DataError(f"sample {sample.id} is already in the store {self.path}")
        self._seen.add(sample.id)
        self._samples.append(sample)
        self._bytes += sum(tensor.nbytes for tensor in sample.to_tensors().values())
        if self._bytes >= self.max_shard_bytes:
            self._flush()

    def close(self) -> None:
        """Writes the last shard and waits for the disk."""
        try:
            self._flush()
            self._wait()
        finally:
            self._thread.shutdown(wait=True)

    def __enter__(self) -> FeatureStoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> None:
        self._wait()
        if self._samples:
            stem = f"features-r{self.rank:02d}-{self._number:05d}"
            self._pending = self._thread.submit(self._write_shard, stem, self._samples)
            self._samples, self._bytes, self._number = [], 0, self._number + 1

    def _wait(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except OSError as error:
            raise RunStopped(
                f"a shard could not be written to {self.path} ({error}). Shards with an index are complete and stay; "
                "make room and run the same command again: it goes on from there"
            ) from error

    def _write_shard(self, stem: str, samples: list[FeatureSample]) -> None:
        shard, temporary = self.path / f"{stem}.safetensors", self.path / f".{stem}.safetensors.tmp"
        tensors = {f"{s.id}/{name}": tensor.contiguous() for s in samples for name, tensor in s.to_tensors().items()}
        try:
            save_file(tensors, temporary)
            digest = file_digest(temporary, sync=True)
            size = temporary.stat().st_size
            os.replace(temporary, shard)
        except SafetensorError as error:  # its I/O errors are not OSErrors
            raise OSError(str(error)) from error
        finally:
            temporary.unlink(missing_ok=True)
        write_json(
            self.path / f"{stem}.json",
            {"shard": shard.name, "sha256": digest, "bytes": size, "samples": [s.index_entry() for s in samples]},
        )
        self.written_ids.update(sample.id for sample in samples)
