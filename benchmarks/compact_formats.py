"""What the store's compact default costs in acceptance, against uncompressed states.

    python benchmarks/compact_formats.py runs/demo/samples/complete --target tiny --aux-layer-ids 1 2 3 \
        --train-config train/configs/tiny.yaml [--seeds 3] [--epochs 10] [--serve vllm] [--folder DIR]

SAMPLES may also be answers of `trainers/answers.py` (a JSON Lines file); then the last `--prompts` are held out.

Extracts the samples twice with the transformers engine, in the default format (fp8, topk) and in bf16 with final
states. Then trains a drafter on each for every seed, with the options of `--train-config`, and compares

    simulated    the trainer's estimate on the validation split
    served       acceptance length in the engine of `--serve`, on the validation split's prompts (left out without it)

Prints both figures of each seed, and of their relative differences (compact - full) / full the mean and its 95%
interval (Student's t). `--folder` keeps stores and runs, so an interrupted benchmark goes on. Figures are reported, not
asserted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, DatasetDict, load_from_disk
from trainers.answers import end_of_turn
from trainers.states import PROTOCOL, read_answers

from eagle3_kimi.evaluation import measure_acceptance
from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hidden_states.extract import extract_hidden_states
from eagle3_kimi.hidden_states.store import FeatureStore
from eagle3_kimi.target import resolve_target
from eagle3_kimi.training.config import TrainConfig
from eagle3_kimi.training.trainer import train_drafter

FORMATS: dict[str, dict[str, Any]] = {"compact": {}, "full": {"aux_dtype": "bf16", "targets": "state"}}
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t by number of seeds."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What is extracted, trained on and served."""

    folder: Path
    """Of the `DatasetDict`."""
    described: dict[str, Any] = field(default_factory=dict)
    """Options that say what the rows do not say about themselves."""
    stop_token_ids: tuple[int, ...] = ()
    """More ids that end an answer."""


def prepare_samples(options: argparse.Namespace, folder: Path) -> Samples:
    """The data set, which is made here where answers are given."""
    if options.samples.suffix != ".jsonl":
        return Samples(folder=options.samples)
    rows = read_answers(options.samples)
    splits = {"train": rows[: -options.prompts], "validation": rows[-options.prompts :]}
    DatasetDict({name: Dataset.from_list(part) for name, part in splits.items()}).save_to_disk(folder / "samples")
    return Samples(
        folder=folder / "samples",
        described={"dtype": "float32", "temperature": 0.0, "protocol": PROTOCOL},
        stop_token_ids=(end_of_turn(resolve_target(options.target)),),
    )


def extract(options: argparse.Namespace, samples: Samples, folder: Path, name: str) -> Path:
    """The store of one format."""
    config = ExtractConfig(
        dataset=samples.folder,
        target=options.target,
        output=folder / name,
        aux_layer_ids=tuple(options.aux_layer_ids) if options.aux_layer_ids else None,
        engine="transformers",
        **samples.described,
        **FORMATS[name],
    )
    extract_hidden_states(config)
    store = FeatureStore(config.output)
    size = sum(file.stat().st_size for file in config.output.glob("*.safetensors"))
    print(f"{name}: {store.manifest.format}, {size / sum(store.lengths):.0f} bytes a token", flush=True)
    return config.output


def measure(options: argparse.Namespace, samples: Samples, folder: Path, store: Path, seed: int) -> dict[str, float]:
    """Trains one drafter; its acceptance lengths."""
    values = yaml.safe_load(options.train_config.read_text(encoding="utf-8"))
    values.update(target=options.target, store=store, output=folder / f"{store.name}-{seed}", seed=seed)
    if options.epochs:
        values["epochs"] = options.epochs
    summary = train_drafter(TrainConfig(**values))
    found = {"simulated": float(summary["simulated_acceptance_length"])}
    if options.serve:
        prompts = load_from_disk(str(samples.folder))["validation"]["prompt_token_ids"]
        report = measure_acceptance(
            resolve_target(options.target),
            Path(summary["drafter"]),
            list(prompts)[: options.prompts],
            engine=options.serve,
            log=folder / f"{store.name}-{seed}.log",
            stop_token_ids=samples.stop_token_ids,
        )
        found["served"] = report.acceptance_length
    return found


def main() -> None:
    """Parses, extracts, trains, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path, help="folder of a data set, or a JSON Lines file of answers")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--aux-layer-ids", type=int, nargs="+", help="default: three, as extraction has it")
    parser.add_argument("--train-config", type=Path, default=Path("train/configs/tiny.yaml"))
    parser.add_argument("--seeds", type=int, default=3, choices=sorted(_T_95))
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--serve", choices=["vllm", "transformers"])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        samples = prepare_samples(options, folder)
        stores = {name: extract(options, samples, folder, name) for name in FORMATS}
        differences: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            found = {name: measure(options, samples, folder, store, seed) for name, store in stores.items()}
            for kind in found["full"]:
                compact, full = found["compact"][kind], found["full"][kind]
                differences.setdefault(kind, []).append((compact - full) / full)
                print(f"seed {seed}, {kind}: compact {compact:.3f}, full {full:.3f}", flush=True)
        for kind, values in differences.items():
            half = _T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
            print(f"{kind}: {statistics.mean(values):+.2%} +- {half:.2%} of {len(values)} seeds")


if __name__ == "__main__":
    main()
