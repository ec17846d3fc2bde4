"""How fast a feature store is written, in how much memory, and how fast it is read, beside copying the same bytes.

    python benchmarks/store_read.py [--megabytes 400] [--rounds 7] [--folder DIR]

Writes stores of Kimi-K2.5's sizes in the default format and in bf16 with final states, samples of 2,000 tokens, as fast
as it can, indexes and digests included, in a process of its own whose peak memory is shown (torch included). Then, in
turns, in one process, one thread, from the page cache:

    read    samples in random order, packed into batches of two as the trainer packs them
    copy    the shards' bytes through a memory map into new memory, in pieces of a batch's size

and the random reading of single samples without packing, which only follows the memory map. Prints the median of the
rounds' ratios. Figures are reported, not asserted.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from eagle3_kimi.hidden_states.formats import FeatureFormat, bytes_per_token
from eagle3_kimi.hidden_states.quantize import quantize
from eagle3_kimi.hidden_states.store import FeatureSample, FeatureStore, FeatureStoreWriter, StoreManifest
from eagle3_kimi.hidden_states.topk import TopTargets
from eagle3_kimi.training.batches import pack

HIDDEN, VOCAB, AUX = 7168, 163840, (2, 30, 58)
TOKENS, PROMPT = 2000, 200
FORMATS = (FeatureFormat(), FeatureFormat(aux_dtype="bf16", targets="state"))


def build_sample(store_format: FeatureFormat) -> FeatureSample:
    """Random values of the right sizes."""
    rows, k = TOKENS - 1 - PROMPT, store_format.top_k
    aux = torch.randn(TOKENS - 1, len(AUX) * HIDDEN)
    choice = torch.randint(VOCAB, (rows,))
    top = final = None
    if store_format.targets == "topk":
        ids = torch.randint(VOCAB, (rows, k), dtype=torch.int32)
        top = TopTargets(ids=ids, log_probs=torch.full((rows, k), -5.0).half(), tail_mass=torch.full((rows,), 0.1))
        choice = top.choice.long()
    else:
        final = torch.randn(rows, HIDDEN).bfloat16()
    return FeatureSample(
        id="",
        split="train",
        token_ids=torch.randint(VOCAB, (TOKENS,)),
        num_prompt_tokens=PROMPT,
        spans=(),
        aux_hidden_states=quantize(aux, num_layers=len(AUX), num_outliers=store_format.num_outliers)
        if store_format.aux_dtype == "fp8"
        else aux.bfloat16(),
        final_hidden_states=final,
        top_targets=top,
        target_argmax=choice,
    )


def write_store(folder: Path, store_format: FeatureFormat, megabytes: float) -> tuple[float, float]:
    """Samples of random values, all equal (but copies: what waits to be written takes memory).

    Returns:
        Seconds, and this process's peak memory in MB.
    """
    manifest = StoreManifest(
        target="moonshotai/Kimi-K2.5", target_revision="random", hidden_size=HIDDEN, num_layers=61, vocab_size=VOCAB,
        aux_layer_ids=AUX, dtype="bfloat16", format=store_format, dataset_fingerprint="random", protocol="kimi-k2.5",
    )  # fmt: skip
    tensors = build_sample(store_format).to_tensors()
    size = sum(tensor.nbytes for tensor in tensors.values())
    entry = {"split": "train", "num_prompt_tokens": PROMPT, "spans": []}
    begun = time.perf_counter()
    with FeatureStoreWriter(folder, manifest) as writer:
        for index in range(max(2, round(megabytes * 1e6 / size))):
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            writer.add(FeatureSample.from_tensors({**entry, "id": f"sample-{index:04d}"}, copies), checked=True)
    seconds = time.perf_counter() - begun
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return seconds, int(status["VmHWM"].split()[0]) * 1024 / 1e6  # getrusage's would include the parent's


def read(store: FeatureStore, order: list[int]) -> None:
    """Every sample once, packed in pairs."""
    for start in range(0, len(order), 2):
        samples = [store[index] for index in order[start : start + 2]]
        pack(samples, 7, aux_width=len(AUX) * HIDDEN, hidden_size=HIDDEN)


def copy(store: FeatureStore, piece: int) -> None:
    """Every byte of the shards once."""
    for shard in sorted(store.path.glob("*.safetensors")):
        with shard.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            whole = torch.frombuffer(mapped, dtype=torch.uint8)
            for part in whole.split(piece):
                part.clone()
            del whole, part


def timed(function: Callable[[], None]) -> float:
    """Seconds."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def measure(folder: Path, store_format: FeatureFormat, megabytes: float, rounds: int) -> None:
    """Prints one format's figures."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        written, peak = process.submit(write_store, folder, store_format, megabytes).result()
    store = FeatureStore(folder)
    size = sum(file.stat().st_size for file in store.path.glob("*.safetensors"))
    order = list(range(len(store)))
    random.Random(0).shuffle(order)
    piece = 2 * size // len(store)
    ratios, reads, copies = [], [], []
    for number in range(rounds + 1):
        copied, came = timed(lambda: copy(store, piece)), timed(lambda: read(store, order))
        if number:  # the first round warms up
            reads.append(came)
            copies.append(copied)
            ratios.append(copied / came)
    opened = timed(lambda: [store[index] for index in order] and None)
    counted = bytes_per_token({"hidden_size": HIDDEN, "vocab_size": VOCAB}, store.manifest.format, 1 - PROMPT / TOKENS)
    rate = {name: size / statistics.median(times) / 1e9 for name, times in (("read", reads), ("copy", copies))}
    print(
        f"{store_format}: {size / 1e6:.0f} MB, {size / sum(store.lengths):.0f} bytes a token "
        f"({counted:.0f} on paper)\n"
        f"  written at {size / written / 1e9:.2f} GB/s, peak memory {peak:.0f} MB\n"
        f"  read {rate['read']:.2f} GB/s, copy {rate['copy']:.2f} GB/s, ratio {statistics.median(ratios):.2f} "
        f"(rounds {min(ratios):.2f} to {max(ratios):.2f}); a sample is found in {opened / len(store) * 1e3:.2f} ms"
    )


def main() -> None:
    """Parses, writes, measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the stores are written; default: the temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for store_format in FORMATS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measure(Path(folder), store_format, options.megabytes, options.rounds)


if __name__ == "__main__":
    main()
