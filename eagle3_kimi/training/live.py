"""A data set as training sees it before its states exist."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

from eagle3_kimi.hidden_states.extraction import Extraction
from eagle3_kimi.hidden_states.samples import Sample, SampleRef


class LiveSplit:
    """A split of a data set, in the order in which a feature store of it would have it.

    Args:
        extraction: knows the data set, and which samples the target can take.
        name: of the split.
    """

    def __init__(self, extraction: Extraction, name: str) -> None:
        self._reader, self.manifest = extraction.reader, extraction.manifest
        self.refs: list[SampleRef] = sorted(
            (ref for ref in extraction.refs if ref.split == name), key=lambda ref: ref.id
        )
        self.ids = [ref.id for ref in self.refs]
        self.lengths = [ref.num_tokens for ref in self.refs]
        self.prompt_lengths = [ref.num_prompt_tokens for ref in self.refs]
        described = asdict(replace(self.manifest, contract=None))
        text = json.dumps([sorted((ref.id, ref.split, ref.digest) for ref in extraction.refs), described])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        """Of the samples' tokens and of what is made of them: wherever it is made, the features are the same."""

    def __len__(self) -> int:
        return len(self.refs)

    def __getitem__(self, i: int) -> Sample:
        return self._reader.read(self.refs[i])
