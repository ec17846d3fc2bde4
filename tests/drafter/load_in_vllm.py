"""Loads tensors into vLLM's own drafter class, without an engine: `python -m tests.drafter.load_in_vllm CASES OUT`.

CASES is a JSON list of drafter directories. OUT gets, for each, what vLLM stopped at and which parameters no tensor filled.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry


def load(target: str, folder: Path) -> dict[str, Any]:
    """What became of one directory."""
    speculative = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    config = EngineArgs(
        model=target, max_model_len=128, enforce_eager=True, dtype="float32", speculative_config=speculative
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/group", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        draft = config.speculative_config.draft_model_config
        drafter_class, _ = ModelRegistry.resolve_model_cls(draft.architectures, draft)
        model = drafter_class(vllm_config=config, prefix="draft")
        unset = -(2**20)  # no offset and no weight here is so small; an integer parameter cannot hold NaN
        for parameter in model.parameters():
            parameter.data.fill_(unset)
        model.load_weights(load_file(folder / "model.safetensors").items())
    unfilled = [name for name, parameter in model.named_parameters() if bool((parameter == unset).any())]
    return {"stopped": None, "unfilled": unfilled}


def main(target: str, cases: str, out: str) -> None:
    results = {}
    for folder in json.loads(Path(cases).read_text()):
        try:
            results[folder] = load(target, Path(folder))
        except (ValueError, AssertionError, RuntimeError) as error:
            results[folder] = {"stopped": f"{type(error).__name__}: {error}"[:500], "unfilled": []}
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
