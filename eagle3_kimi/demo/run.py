"""The stages of the demo, one after the other; each is what a person would run, and each can be killed and run again.

target ─► prompts ─► samples ─► hidden_states ─► training ─► serving ─► summary.json, report.html
          mix        load_      accelerate       accelerate   vLLM: plain, trained,
                     dataset    launch           launch       untrained drafter
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from eagle3_kimi.demo.report import write_report
from eagle3_kimi.demo.serving import measure_serving
from eagle3_kimi.demo.settings import DemoSettings, choose_topology, find_repository
from eagle3_kimi.demo.stages import Stages
from eagle3_kimi.demo.summary import build_summary
from eagle3_kimi.demo.workdir import WorkFolder, write_json
from eagle3_kimi.engines import check_engine_available
from eagle3_kimi.errors import UsageError
from eagle3_kimi.target import resolve_target

logger = logging.getLogger(__name__)

ENGINES = ("vllm", "transformers")
STAGES = ("target", "prompts", "samples", "hidden_states", "training", "serving")


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
    repository = find_repository()
    identity = {"engine": engine, "seed": seed, "target": settings.target}
    with WorkFolder(workdir.resolve(), identity=identity, stages=STAGES) as folder:
        stages = Stages(
            folder=folder,
            engine=engine,
            seed=seed,
            settings=settings,
            topology=choose_topology(),
            repository=repository,
        )
        return _run_stages(stages)


def _run_stages(stages: Stages) -> dict[str, Any]:
    """All stages in order; the inputs of each are named, so that a result of other inputs is never reused."""
    folder, settings, seed = stages.folder, stages.settings, stages.seed
    made = folder.stage(
        "target", {"target": settings.target, "problems": settings.held_out_problems}, stages.make_target
    )
    target = resolve_target(settings.target)
    prompts = folder.stage(
        "prompts",
        {"seed": seed, "problems": settings.problems, "tool_conversations": settings.tool_conversations},
        stages.make_prompts,
    )
    samples = folder.stage(
        "samples",
        {"prompts": prompts["digest"], "target": target.revision, **stages.sampling_options()},
        stages.make_samples,
    )
    states = folder.stage(
        "hidden_states",
        {"samples": samples["digest"], "target": target.revision, "aux_layer_ids": settings.aux_layer_ids},
        stages.extract_hidden_states,
    )
    training = folder.stage(
        "training",
        {
            "hidden_states": states["fingerprint"],
            "configuration": (stages.repository / settings.train_config).read_text(encoding="utf-8"),
            "options": settings.train_options,
            "seed": seed,
        },
        stages.train_drafter,
    )
    serving = folder.stage(
        "serving",
        {
            "drafter": training["digest"],
            "held_out_prompts": settings.held_out_prompts,
            "num_speculative_tokens": settings.num_speculative_tokens,
        },
        lambda: measure_serving(stages, target),
    )
    summary = build_summary(made["answers"], samples, states, training, serving, folder.seconds())
    write_json(folder.path / "summary.json", summary)
    write_report(folder.path, summary, target)
    logger.info("summary.json and report.html are in %s", folder.path)
    return summary
