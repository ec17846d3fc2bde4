"""The last stage: plain decoding, the trained drafter and an untrained one, over the same held-out prompts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from eagle3_kimi.demo.prompts import build_held_out_prompts
from eagle3_kimi.demo.stages import Stages
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, measure_acceptance, save_json
from eagle3_kimi.target import Target

logger = logging.getLogger(__name__)


def measure_serving(stages: Stages, target: Target) -> dict[str, Any]:
    """The stage's result; each of the three reports is kept as it is made, so an interrupted stage goes on."""
    from datasets import load_from_disk

    from eagle3_kimi.evaluation.drafting import export_untrained_drafter

    output = stages.folder.path / "serving"
    output.mkdir(exist_ok=True)
    untrained = output / "untrained_drafter"
    export_untrained_drafter(stages.drafter_path, untrained, target=target, seed=stages.seed)
    seen = [ids for split in load_from_disk(str(stages.samples_path)).values() for ids in split["prompt_token_ids"]]
    prompts = build_held_out_prompts(target, stages.settings.held_out_prompts, seed=stages.seed, seen=seen)
    drafters = {"plain": None, "trained": stages.drafter_path, "untrained": untrained}
    reports = {name: _measure(stages, target, prompts, name, drafter) for name, drafter in drafters.items()}
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


def _measure(
    stages: Stages, target: Target, prompts: list[list[int]], name: str, drafter: Path | None
) -> AcceptanceReport:
    file = stages.folder.path / "serving" / f"{name}.json"
    if not file.is_file():
        logger.info("  %s: %s", stages.engine, f"{name} drafter" if drafter else "plain decoding")
        report = measure_acceptance(
            target,
            drafter,
            prompts,
            engine="vllm" if stages.engine == "vllm" else "transformers",
            num_speculative_tokens=stages.settings.num_speculative_tokens,
            max_tokens=stages.settings.max_tokens,
            max_model_len=stages.settings.max_model_len,
            dtype=stages.topology.dtype,
            seed=stages.seed,
            log=stages.folder.log(f"serving_{name}"),
        )
        save_json(report, file)
    return AcceptanceReport.load(file)
