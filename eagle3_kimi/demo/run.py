"""The stages of the demo, one after the other; each is what a person would run, and each can be killed and run again.

target ─► prompts ─► samples ─► hidden_states ─► training ─► serving ─► summary.json, report.html
          mix        load_      accelerate       accelerate   vLLM: plain, trained,
                     dataset    launch           launch       untrained drafter
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from eagle3_kimi.demo.prompts import build_held_out_prompts, write_prompts
from eagle3_kimi.demo.report import write_report
from eagle3_kimi.demo.settings import DemoSettings, Topology, choose_topology, find_repository
from eagle3_kimi.demo.summary import build_summary
from eagle3_kimi.demo.workdir import WorkFolder, write_json
from eagle3_kimi.engines import check_engine_available
from eagle3_kimi.errors import UsageError
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, measure_acceptance, save_json
from eagle3_kimi.evaluation.child_process import run_child
from eagle3_kimi.target import Target, resolve_target

logger = logging.getLogger(__name__)

ENGINES = ("vllm", "transformers")
STAGES = ("target", "prompts", "samples", "hidden_states", "training", "serving")

_OWN_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (.*)")


def run_demo(
    workdir: Path, engine: str = "vllm", seed: int = 0, settings: DemoSettings | None = None
) -> dict[str, Any]:
    """Runs what is missing of the demo in `workdir` and returns the content of `summary.json`.

    Args:
        workdir: the demo's folder; finished stages found there are reused.
        engine: `vllm`, or `transformers` where vLLM cannot be installed.
        seed: of prompts, sampling and training.
        settings: sizes; the default is the demo of the README.

    Raises:
        UsageError: unknown engine, no repository, or a folder made by something else.
        EngineError: the engine is not installed.
        RunStopped: a stage failed; what is finished is kept.
    """
    if engine not in ENGINES:
        raise UsageError(f"the demo runs with {' or '.join(ENGINES)}, not {engine!r}")
    check_engine_available(engine)
    settings = settings or DemoSettings()
    repository, topology = find_repository(), choose_topology()
    identity = {"engine": engine, "seed": seed, "target": settings.target}
    with WorkFolder(workdir.resolve(), identity=identity, stages=STAGES) as folder:
        return _Demo(folder, engine, seed, settings, topology, repository).run()


class _Demo:
    """The stages of one run over one folder."""

    def __init__(
        self,
        folder: WorkFolder,
        engine: str,
        seed: int,
        settings: DemoSettings,
        topology: Topology,
        repository: Path,
    ) -> None:
        self.folder, self.path = folder, folder.path
        self.engine, self.seed, self.settings = engine, seed, settings
        self.topology, self.repository = topology, repository

    def run(self) -> dict[str, Any]:
        """All stages, then the summary and the report."""
        settings, seed = self.settings, self.seed
        self.folder.stage("target", {"target": settings.target}, self._make_target)
        target = resolve_target(settings.target)
        prompts = self.folder.stage(
            "prompts", {"seed": seed, "counts": [settings.problems, settings.tool_conversations]}, self._make_prompts
        )
        options = self._sample_options()
        decides = {
            key: value for key, value in options.items() if key not in ("data_files", "journal_dir", "cache_dir")
        }
        samples = self.folder.stage(
            "samples",
            {**decides, "prompts": prompts["digest"], "revision": target.revision},
            lambda: self._make_samples(options),
        )
        states = self.folder.stage(
            "hidden_states",
            {"samples": samples["digest"], "revision": target.revision, "aux_layer_ids": settings.aux_layer_ids},
            self._extract,
        )
        train_config = (self.repository / settings.train_config).read_text(encoding="utf-8")
        training = self.folder.stage(
            "training",
            {"store": states["fingerprint"], "config": train_config, "options": settings.train_options, "seed": seed},
            self._train,
        )
        serving = self.folder.stage(
            "serving",
            {
                "drafter": training["digest"],
                "prompts": settings.held_out_prompts,
                "num_speculative_tokens": settings.num_speculative_tokens,
            },
            lambda: self._measure(target),
        )
        summary = build_summary(samples, states, training, serving, self.folder.seconds())
        write_json(self.path / "summary.json", summary)
        write_report(self.path, summary, target)
        logger.info("summary.json and report.html are in %s", self.path)
        return summary

    def _make_target(self) -> dict[str, Any]:
        target = resolve_target(self.settings.target)  # `tiny` is trained here, once for this machine
        return {"revision": target.revision, "path": str(target.path)}

    def _make_prompts(self) -> dict[str, Any]:
        file = write_prompts(self.path / "prompts", self.settings, self.seed)
        return {"digest": _digest(file), "conversations": len(file.read_text(encoding="utf-8").splitlines())}

    def _sample_options(self) -> dict[str, Any]:
        """What a person would give `load_dataset("kimi_reasoning", ...)`."""
        settings = self.settings
        return {
            "data_files": str(self.path / "prompts" / "mixed" / "prompts.jsonl"),
            "target": settings.target,
            "engine": self.engine,
            "temperature": 0.0,
            "max_tokens": settings.max_tokens,
            "max_model_len": settings.max_model_len,
            "dtype": self.topology.dtype,
            "max_num_seqs": 64,
            "seed": self.seed,
            "validation_fraction": settings.validation_fraction,
            "journal_dir": str(self.path / "journal"),
            "cache_dir": str(self.path / "cache"),
        }

    def _make_samples(self, options: dict[str, Any]) -> dict[str, Any]:
        from datasets import load_from_disk

        output = self.path / "samples"
        output.mkdir(exist_ok=True)
        write_json(output / "options.json", options)
        self._run_child(
            "samples", [sys.executable, "-m", "eagle3_kimi.demo.samples", str(output / "options.json"), str(output)]
        )
        complete = load_from_disk(str(output / "complete"))
        refused = load_from_disk(str(output / "quarantine"))
        reasons = Counter(reason for split in refused.values() for reason in split["reason"])
        num_complete, num_refused = sum(map(len, complete.values())), sum(map(len, refused.values()))
        ids = {name: [split["id"], split["output_token_ids"]] for name, split in complete.items()}
        return {
            "digest": hashlib.sha256(json.dumps(_plain(ids), sort_keys=True).encode()).hexdigest(),
            "prompts": num_complete + num_refused,
            "complete": num_complete,
            "quarantined": num_refused,
            "by_reason": dict(reasons.most_common()),
        }

    def _extract(self) -> dict[str, Any]:
        from eagle3_kimi.hidden_states.store import FeatureStore

        parallel = self.topology.processes if self.engine == "vllm" else 1
        store_path = self.path / "hidden_states"
        self._launch(
            "hidden_states",
            "train/extract_hidden_states.py",
            ["--dataset", str(self.path / "samples" / "complete")],
            ["--target", self.settings.target],
            ["--output", str(store_path)],
            ["--aux_layer_ids", json.dumps(list(self.settings.aux_layer_ids))],
            ["--engine", self.engine],
            ["--tensor_parallel_size", str(parallel)],
            ["--dtype", self.topology.dtype],
        )
        store = FeatureStore(store_path)
        size, tokens = sum(file.stat().st_size for file in store_path.glob("*.safetensors")), sum(store.lengths)
        contract = store.manifest.contract or {}
        return {
            "fingerprint": store.fingerprint,
            "samples": len(store),
            "tokens": tokens,
            "bytes_per_token": round(size / max(tokens, 1), 1),
            "contract": {"passed": contract.get("passed", False), "agreement": contract.get("agreement")},
        }

    def _train(self) -> dict[str, Any]:
        output = self.path / "drafter"
        self._launch(
            "training",
            "train/train_drafter.py",
            ["--config", str(self.repository / self.settings.train_config)],
            ["--target", self.settings.target],
            ["--store", str(self.path / "hidden_states")],
            ["--output", str(output)],
            ["--expected_world_size", str(self.topology.processes)],
            ["--precision", self.topology.precision],
            ["--seed", str(self.seed)],
            list(self.settings.train_options),
        )
        finished = json.loads((output / "training.json").read_text(encoding="utf-8"))
        return {**finished, "digest": _digest(output / "export" / "model.safetensors")}

    def _measure(self, target: Target) -> dict[str, Any]:
        from datasets import load_from_disk

        from eagle3_kimi.evaluation.drafting import export_untrained_drafter

        output = self.path / "serving"
        output.mkdir(exist_ok=True)
        drafters: dict[str, Path | None] = {
            "plain": None,
            "trained": self.path / "drafter" / "export",
            "untrained": output / "untrained_drafter",
        }
        complete = load_from_disk(str(self.path / "samples" / "complete"))
        seen = [ids for split in complete.values() for ids in split["prompt_token_ids"]]
        prompts = build_held_out_prompts(target, self.settings.held_out_prompts, seed=self.seed, seen=seen)
        export_untrained_drafter(
            self.path / "drafter" / "export", output / "untrained_drafter", target=target, seed=self.seed
        )
        reports = {
            name: self._measure_one(name, target, drafter, prompts, output / f"{name}.json")
            for name, drafter in drafters.items()
        }
        plain, trained = reports["plain"], reports["trained"]
        return {
            "engine": trained.engine,
            "version": trained.engine_version,
            "device": trained.device,
            "num_speculative_tokens": trained.num_speculative_tokens,
            "num_prompts": len(prompts),
            "acceptance_length": round(trained.acceptance_length, 3),
            "acceptance_per_position": [round(share, 3) for share in trained.acceptance_per_position],
            "untrained_acceptance_length": round(reports["untrained"].acceptance_length, 3),
            "identical_outputs": all(report.output_token_ids == plain.output_token_ids for report in reports.values()),
        }

    def _measure_one(
        self, name: str, target: Target, drafter: Path | None, prompts: list[list[int]], file: Path
    ) -> AcceptanceReport:
        if not file.is_file():
            logger.info("  %s with %s", self.engine, f"the {name} drafter" if drafter else "no drafter")
            report = measure_acceptance(
                target,
                drafter,
                prompts,
                engine="vllm" if self.engine == "vllm" else "transformers",
                num_speculative_tokens=self.settings.num_speculative_tokens,
                max_tokens=self.settings.max_tokens,
                max_model_len=self.settings.max_model_len,
                dtype=self.topology.dtype,
                seed=self.seed,
                log=self.folder.log(f"serving_{name}"),
            )
            save_json(report, file)
        return AcceptanceReport.load(file)

    def _launch(self, name: str, script: str, *options: list[str]) -> None:
        """`accelerate launch` of a script of the repository."""
        config = self.repository / "accelerate_configs" / self.topology.config
        arguments = [argument for pair in options for argument in pair]
        logger.info(
            "  accelerate launch --config_file %s %s %s",
            config.relative_to(self.repository),
            script,
            " ".join(arguments),
        )
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        self._run_child(name, [*launcher, str(self.repository / script), *arguments], self.topology.environment)

    def _run_child(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        def show(line: str) -> None:
            if match := _OWN_LOG_LINE.fullmatch(line):
                logger.info("  %s", match[1])

        run_child(
            command,
            log=self.folder.log(name),
            lock=self.path / f".{name}.lock",
            environment={"OMP_WAIT_POLICY": "PASSIVE", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", **(environment or {})},
            on_line=show,
        )


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _plain(columns: dict[str, list[Any]]) -> dict[str, list[list[Any]]]:
    return {name: [list(column) for column in pair] for name, pair in columns.items()}
