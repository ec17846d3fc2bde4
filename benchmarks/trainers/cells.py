"""One cell of the comparison: one trainer, one seed, one process on one thread; kept, so that a run goes on.

cells/NAME/figures.json      what the loop took
cells/NAME/export/           the drafter, as the trainer exports it
cells/NAME/acceptance.json   served by vLLM
cells/NAME/*.log
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_kimi.target import Target

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
STEP_TOKENS = 2048
"""Of an optimizer step: whole samples are packed into that."""
SPECFORGE_STEP_SAMPLES = 8
"""SpecForge counts samples, which have about 256 tokens."""
MAX_LENGTH = 1024
RATE, WARM_UP, CLIP = 1e-3, 0.04, 1.0
"""AdamW's peak rate (a cosine to zero follows), the share of the steps that warm up, the gradient's norm."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is trained. The trainers' own defaults hold for all that is not named here."""

    trainer: str
    ttt_steps: int
    seed: int
    objective: str | None = None
    """Of our trainer."""
    max_steps: int | None = None
    """A cell that is there for its speed alone stops early."""

    @property
    def name(self) -> str:
        parts = [self.trainer, self.objective, f"ttt{self.ttt_steps}", f"seed{self.seed}"]
        if self.max_steps is not None:
            parts.append(f"steps{self.max_steps}")
        return "-".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all cells share."""

    workdir: Path
    """Holds what `states.write_states` wrote, and the cells."""
    target: Target
    pythons: dict[str, Path]
    """Trainer -> its Python."""
    samples: int
    epochs: int
    draft_vocab_size: int

    def folder(self, cell: Cell) -> Path:
        """Of a cell."""
        return self.workdir / "cells" / cell.name


def train_cell(bench: Bench, cell: Cell) -> dict[str, Any]:
    """The cell's figures: those that are there, or made now."""
    folder = bench.folder(cell)
    figures = folder / "figures.json"
    if not figures.is_file() or not (folder / "export").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        partial = folder / "figures.partial.json"
        {"ours": _train_ours, "speculators": _train_speculators, "specforge": _train_specforge}[cell.trainer](
            bench, cell, folder, partial
        )
        partial.rename(figures)
    made: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    return made


def _train_ours(bench: Bench, cell: Cell, folder: Path, figures: Path) -> None:
    options: dict[str, Any] = {
        "target": bench.target.path,
        "store": bench.workdir / "ours",
        "output": folder / "run",
        "draft_vocab_size": bench.draft_vocab_size,
        "ttt_steps": cell.ttt_steps,
        "epochs": bench.epochs,
        "batch_tokens": STEP_TOKENS,
        "micro_batch_tokens": STEP_TOKENS,
        "max_length": MAX_LENGTH,
        "learning_rate": RATE,
        "warmup_ratio": WARM_UP,
        "max_grad_norm": CLIP,
        "seed": cell.seed,
        "tracker": "none",
        **({"objective": cell.objective} if cell.objective else {}),
        **({"max_steps": cell.max_steps} if cell.max_steps else {}),
    }
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_1.yaml"]
    script = [HERE / "run_ours.py", figures, "--config", "train/configs/smollm2.yaml"]
    _run([*launch, *script, *(f"--{key}={value}" for key, value in options.items())], folder / "train.log")
    (folder / "run" / "export").rename(folder / "export")


def _train_speculators(bench: Bench, cell: Cell, folder: Path, figures: Path) -> None:
    options: dict[str, Any] = {
        "verifier-name-or-path": bench.target.path,
        "speculator-type": "eagle3",
        "data-path": bench.workdir / "speculators",
        "draft-vocab-size": bench.draft_vocab_size,
        "total-seq-len": STEP_TOKENS,
        "train-data-ratio": (bench.samples + 0.5) / (bench.samples + 1),
        "hidden-states-dtype": "float32",
        "num-workers": 0,
        "on-missing": "raise",
        "draft-attn-impl": "sdpa",
        "full-attention-indices": 0,
        "loss-implementation": "eager",
        "epochs": bench.epochs,
        "optimizer": "adamw",
        "lr": RATE,
        "weight-decay": 0,
        "scheduler-type": "cosine",
        "scheduler-warmup-ratio": WARM_UP,
        "ttt-steps": cell.ttt_steps,
        "seed": cell.seed,
        "save-path": folder / "run",
        **({"max-steps": cell.max_steps} if cell.max_steps else {}),
    }
    script = [bench.pythons["speculators"], HERE / "run_speculators.py", figures]
    _run([*script, *(f"--{key}={value}" for key, value in options.items())], folder / "train.log")
    (folder / "run" / "interrupted").rename(folder / "export")


def _train_specforge(bench: Bench, cell: Cell, folder: Path, figures: Path) -> None:
    config = bench.target.config
    kept = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "max_position_embeddings", "rms_norm_eps", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    draft = {
        **{key: config[key] for key in kept},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": bench.draft_vocab_size,
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    training: dict[str, Any] = {
        "strategy": "eagle3",
        "num_epochs": bench.epochs,
        "batch_size": SPECFORGE_STEP_SAMPLES,
        "fsdp_sharding": "NO_SHARD",
        "learning_rate": RATE,
        "warmup_ratio": WARM_UP,
        "max_grad_norm": CLIP,
        "ttt_length": cell.ttt_steps,
        "attention_backend": "sdpa",
        "seed": cell.seed,
        **({"max_steps": cell.max_steps} if cell.max_steps else {}),
    }
    run = {
        "run_id": "cell",
        "output_dir": str(folder / "run"),
        "model": {
            "target_model_path": str(bench.target.path),
            "draft_model_config": str(folder / "draft.json"),
            "lm_head_key": "model.embed_tokens.weight",  # tied
            "vocab_mapping_path": str(bench.workdir / "specforge" / "vocabulary.pt"),
            "torch_dtype": "float32",
        },
        "data": {
            "hidden_states_path": str(bench.workdir / "specforge" / "features"),
            "max_length": MAX_LENGTH,
            "dataloader_num_workers": 0,
            "cache_dir": str(bench.workdir / "specforge" / "cache"),
        },
        "training": training,
    }
    (folder / "draft.json").write_text(json.dumps(draft), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    python, script = bench.pythons["specforge"], HERE / "run_specforge.py"
    _run([python, script, figures, "train", "--config", folder / "run.json"], folder / "train.log")
    source = ["--checkpoint", folder / "run" / "cell-latest", "--draft-config", folder / "draft.json"]
    export = [python, "-m", "specforge.cli", "export", "--to", "sglang", *source, "--output-dir", folder / "export"]
    _run(export, folder / "export.log")


def _run(command: Sequence[Any], log: Path) -> None:
    """One process on one thread; its last lines, if it fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(list(map(str, command)), cwd=REPOSITORY, env=environment, stdout=file, stderr=file)
    if done.returncode:
        raise SystemExit(f"{log} ends in a failure:\n{log.read_text(encoding='utf-8')[-3000:]}")
