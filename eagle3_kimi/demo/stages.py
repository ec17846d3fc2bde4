"""What each stage does: calls or launches the public entry point, and reads its artefact back as the stage's result."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_kimi.demo.prompts import write_prompts
from eagle3_kimi.demo.settings import DemoSettings, Topology
from eagle3_kimi.demo.workdir import WorkFolder, write_json
from eagle3_kimi.engines import open_engine
from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.evaluation.child_process import run_child
from eagle3_kimi.evaluation.tiny_answers import measure_answers
from eagle3_kimi.target import resolve_target

logger = logging.getLogger(__name__)

_OWN_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (.*)")
"""Lines of our own logging; the rest of what children say is in their logs."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages' actions over one folder. Each continues what an interrupted run left."""

    folder: WorkFolder
    engine: str
    seed: int
    settings: DemoSettings
    topology: Topology
    repository: Path

    @property
    def samples_path(self) -> Path:
        return self.folder.path / "samples" / "complete"

    @property
    def drafter_path(self) -> Path:
        return self.folder.path / "drafter" / "export"

    def sampling_options(self) -> dict[str, Any]:
        """Options of `load_dataset("kimi_reasoning", ...)` that decide the rows, besides the prompts."""
        return {
            "engine": self.engine,
            "temperature": 0.0,
            "max_tokens": self.settings.max_tokens,
            "max_model_len": self.settings.max_model_len,
            "dtype": self.topology.dtype,
            "seed": self.seed,
            "validation_fraction": self.settings.validation_fraction,
        }

    def make_target(self) -> dict[str, Any]:
        """The target, and how well it reasons; `tiny` is trained here, once for this machine."""
        target = resolve_target(self.settings.target)
        engine = open_engine("transformers", target, EngineOptions(dtype="float32"))
        answers = measure_answers(target, engine, self.settings.held_out_problems)
        engine.close()
        return {"path": str(target.path), "revision": target.revision, "answers": asdict(answers)}

    def make_prompts(self) -> dict[str, Any]:
        """The mix of generated problems."""
        return {"digest": _digest(write_prompts(self.folder.path / "prompts", self.settings, self.seed))}

    def make_samples(self) -> dict[str, Any]:
        """The data set of complete samples, and the quarantine."""
        from datasets import load_from_disk

        output = self.folder.path / "samples"
        output.mkdir(exist_ok=True)
        options = {
            "data_files": str(self.folder.path / "prompts" / "mixed" / "prompts.jsonl"),
            "target": self.settings.target,
            **self.sampling_options(),
            "journal_dir": str(self.folder.path / "journal"),
            "cache_dir": str(self.folder.path / "cache"),
        }
        write_json(output / "options.json", options)
        command = ["-m", "eagle3_kimi.demo.samples", str(output / "options.json"), str(output)]
        self._run("samples", command, self.topology.engine_environment)
        complete = load_from_disk(str(self.samples_path))
        refused = load_from_disk(str(output / "quarantine"))
        reasons = Counter(reason for split in refused.values() for reason in split["reason"])
        columns = ("id", "prompt_token_ids", "output_token_ids")
        rows = {name: [list(split[column]) for column in columns] for name, split in sorted(complete.items())}
        num_complete = sum(len(split) for split in complete.values())
        return {
            "digest": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
            "prompts": num_complete + reasons.total(),
            "complete": num_complete,
            "quarantined": reasons.total(),
            "by_reason": dict(reasons.most_common()),
        }

    def extract_hidden_states(self) -> dict[str, Any]:
        """The feature store: two processes are one tensor-parallel engine in vLLM, and share the data elsewhere."""
        from eagle3_kimi.hidden_states.store import FeatureStore

        output = self.folder.path / "hidden_states"
        self._launch(
            "hidden_states",
            "train/extract_hidden_states.py",
            dataset=self.samples_path,
            target=self.settings.target,
            output=output,
            aux_layer_ids=json.dumps(list(self.settings.aux_layer_ids)),
            engine=self.engine,
            tensor_parallel_size=self.topology.processes if self.engine == "vllm" else 1,
            dtype=self.topology.dtype,
        )
        store = FeatureStore(output)
        contract, tokens = store.manifest.contract or {}, sum(store.lengths)
        size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
        return {
            "fingerprint": store.fingerprint,
            "samples": len(store),
            "tokens": tokens,
            "bytes_per_token": round(size / tokens, 1),
            "contract": {"passed": bool(contract.get("passed")), "agreement": contract.get("agreement")},
        }

    def train_drafter(self) -> dict[str, Any]:
        """The run folder of the trainer, with the exported drafter."""
        self._launch(
            "training",
            "train/train_drafter.py",
            *self.settings.train_options,
            config=self.repository / self.settings.train_config,
            target=self.settings.target,
            store=self.folder.path / "hidden_states",
            output=self.drafter_path.parent,
            expected_world_size=self.topology.processes,
            precision=self.topology.precision,
            seed=self.seed,
        )
        finished = json.loads((self.drafter_path.parent / "training.json").read_text(encoding="utf-8"))
        return {**finished, "digest": _digest(self.drafter_path / "model.safetensors")}

    def _launch(self, stage: str, script: str, *more: str, **options: Any) -> None:
        """`accelerate launch` of a script of the repository."""
        config = self.repository / "accelerate_configs" / self.topology.config
        flags = {f"--{name.replace('_', '-')}": str(value) for name, value in options.items()}
        arguments = [text for flag in flags.items() for text in flag] + list(more)
        logger.info(
            "  accelerate launch --config_file accelerate_configs/%s %s %s", config.name, script, " ".join(arguments)
        )
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
        self._run(stage, [*launcher, str(self.repository / script), *arguments], self.topology.launch_environment)

    def _run(self, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        def show(line: str) -> None:
            if match := _OWN_LOG_LINE.fullmatch(line):
                logger.info("  %s", match[1])

        run_child(
            [sys.executable, *arguments],
            log=self.folder.log(name),
            lock=self.folder.path / f".{name}.lock",
            environment={"OMP_WAIT_POLICY": "PASSIVE", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", **environment},
            on_line=show,
        )


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
