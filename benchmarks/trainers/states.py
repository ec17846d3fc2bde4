"""The same hidden states in three formats: one pass of the target, by this package's own extraction.

    data set ──► extraction ──► ours/           feature store
                     │
                   copies ────► speculators/    data set, hidden_states/hs_N.safetensors, d2t and t2d
                     └────────► specforge/      N.ckpt, vocabulary map

The peers get float32 states of *all* positions, as their own capture would give them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from eagle3_kimi.drafter.vocab import VocabMap, build_vocab_map, count_tokens
from eagle3_kimi.hidden_states.capture import CaptureRequest, StateSource
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.extraction import build_manifest, open_source
from eagle3_kimi.hidden_states.ranks import Ranks
from eagle3_kimi.hidden_states.samples import SampleReader, plan_shares
from eagle3_kimi.hidden_states.share import ShareRun
from eagle3_kimi.hidden_states.sink import CapturedStates
from eagle3_kimi.target import Target, resolve_target

PROTOCOL = "none"
"""The target does not reason: the whole output is its answer."""


class Copies:
    """A source of states that writes what passes through it in the peers' formats.

    A sample's last token is never an input, so extraction does not ask for its state. Both peers want one: the request
    gets one more token, and its state goes to them alone.
    """

    def __init__(self, source: StateSource, target: Target, folder: Path, rows: list[dict[str, Any]]) -> None:
        self.layer_ids = source.layer_ids
        self._source, self._target, self._folder = source, target, folder
        self._numbers = {row["id"]: number for number, row in enumerate(rows)}
        self._masks = [loss_mask(row) for row in rows]
        self._norm = target.read_tensor("final_norm")
        for name in ("speculators/hidden_states", "specforge/features"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def capture(self, requests: Iterable[CaptureRequest]) -> Iterator[CapturedStates]:
        """As the source, one position more."""
        longer = (replace(request, token_ids=(*request.token_ids, 0)) for request in requests)
        for states in self._source.capture(longer):
            assert states.hidden_states is not None  # one process
            self._write(self._numbers[states.id], states.token_ids, states.hidden_states[:, 1:])  # without the anchor
            yield replace(states, token_ids=states.token_ids[:-1], hidden_states=states.hidden_states[:-1])

    def close(self) -> None:
        """Closes the source."""
        self._source.close()

    def _write(self, number: int, token_ids: torch.Tensor, states: torch.Tensor) -> None:
        """`states`: [S, A + 1, H], the last of them before the final norm. SpecForge wants it after the norm."""
        states = states.float().contiguous()
        file = self._folder / f"speculators/hidden_states/hs_{number}.safetensors"
        save_file({"hidden_states": states, "token_ids": token_ids.contiguous()}, file)
        final = torch.nn.functional.rms_norm(
            states[:, -1], self._norm.shape, self._norm.float(), self._target.rms_norm_eps
        )
        features = {
            "input_ids": token_ids,
            "loss_mask": torch.tensor(self._masks[number]),
            "hidden_state": final[None],
            "aux_hidden_state": states[:, :-1].flatten(1)[None],
        }
        torch.save(features, self._folder / f"specforge/features/{number:06d}.ckpt")


def loss_mask(row: dict[str, Any]) -> list[int]:
    """1 at the tokens of the answer."""
    return [0] * len(row["prompt_token_ids"]) + [1] * len(row["output_token_ids"])


def read_answers(file: Path) -> list[dict[str, Any]]:
    """Rows as extraction reads them, numbered."""
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        span = {"kind": "answer", "start": 0, "end": len(row["output_token_ids"])}
        rows.append({"id": f"{number:06d}", **row, "spans": [span]})
    return rows


def write_states(target: Target, answers: Path, folder: Path, *, draft_vocab_size: int) -> None:
    """Writes all three formats and the draft vocabulary that all three trainers use."""
    from datasets import Dataset, DatasetDict

    rows = read_answers(answers)
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(folder / "dataset")
    config = ExtractConfig(
        dataset=folder / "dataset",
        target=str(target.path),
        output=folder / "ours",
        engine="transformers",
        dtype="float32",
        aux_dtype="fp32",
        targets="state",
        temperature=0.0,
        protocol=PROTOCOL,
        max_batched_tokens=2048,
        max_shard_bytes=256 << 20,
    )
    reader, ranks = SampleReader(config.dataset), Ranks.join(1)
    manifest = build_manifest(config, target, reader)
    engine = open_source(config, target, manifest, ranks, longest=max(ref.num_tokens for ref in reader.refs))
    (share,) = plan_shares(reader.refs, 1, window=config.window)  # neighbours of like length
    with closing(ShareRun(config, target, reader, manifest, ranks, Copies(engine, target, folder, rows))) as run:
        run.extract(share)
    tokens = [torch.tensor(row["output_token_ids"][1:]) for row in rows]  # a chain predicts all but the first
    vocab = build_vocab_map(count_tokens(tokens, target.vocab_size), draft_vocab_size=draft_vocab_size)
    write_vocabulary(vocab, folder)
    columns = [
        {"input_ids": row["prompt_token_ids"] + row["output_token_ids"], "loss_mask": loss_mask(row)} for row in rows
    ]
    data = [{**row, "seq_len": len(row["input_ids"])} for row in columns]
    # Both splits must hold something: the last row is held out, and is a copy.
    Dataset.from_list([*data, data[-1]]).with_format("torch").save_to_disk(folder / "speculators")


def write_vocabulary(vocab: VocabMap, folder: Path) -> None:
    """The map in each peer's format: offsets and a mask in both."""
    size = len(vocab.target_ids)
    np.save(folder / f"speculators/d2t-{size}.npy", vocab.d2t.numpy())
    np.save(folder / f"speculators/t2d-{size}.npy", vocab.t2d.numpy())
    torch.save({"d2t": vocab.d2t, "t2d": vocab.t2d}, folder / "specforge/vocabulary.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft-vocab-size", type=int, required=True)
    given = parser.parse_args()
    write_states(resolve_target(given.target), given.answers, given.folder, draft_vocab_size=given.draft_vocab_size)
    (given.folder / "finished").touch()
