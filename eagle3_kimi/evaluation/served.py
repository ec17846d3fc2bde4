"""Decoding in offline vLLM, with its own counters of speculative decoding."""

from __future__ import annotations

import os
import time
from typing import Any

from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.engines.vllm import close_llm, load_llm
from eagle3_kimi.errors import EngineError
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, AcceptanceRequest
from eagle3_kimi.target import Target

_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def serve(target: Target, request: AcceptanceRequest) -> AcceptanceReport:
    """Starts one engine in this process, decodes the prompts, and reads the counters.

    Raises:
        EngineError: vLLM could not start, or kept no counters.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is the isolation; two more would start slower
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {}
    if request.drafter is not None:
        if current_platform.is_cpu():
            import eagle3_kimi.evaluation.cpu_attention  # noqa: F401 - registers itself
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": request.drafter,
            "num_speculative_tokens": request.num_speculative_tokens,
        }
    options = EngineOptions(dtype=request.dtype, max_model_len=request.max_model_len, max_num_seqs=request.max_num_seqs)
    llm = load_llm(target, options, disable_log_stats=False, seed=request.seed, **arguments)
    device = str(llm.llm_engine.vllm_config.device_config.device_type)
    started = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in request.prompts],
        vllm.SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed if request.temperature else None,
            stop_token_ids=list(target.load_protocol(target.load_tokenizer()).markers.stop_token_ids),
            detokenize=False,
        ),
        use_tqdm=False,
    )
    seconds = time.perf_counter() - started
    drafts, accepted = (0, ()) if request.drafter is None else _read_counters(llm)
    close_llm(llm)
    return AcceptanceReport(
        engine="vllm",
        engine_version=vllm.__version__,
        device=device,
        num_speculative_tokens=len(accepted),
        num_drafts=drafts,
        accepted_per_position=accepted,
        output_token_ids=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
        seconds=seconds,
    )


def _read_counters(llm: Any) -> tuple[int, tuple[int, ...]]:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    if _DRAFTS not in metrics or not metrics[_DRAFTS].value:
        raise EngineError(
            f"vLLM counted no drafts ({_DRAFTS}): either nothing was decoded or this version names its counters "
            "otherwise; use the tested versions of the extras"
        )
    return int(metrics[_DRAFTS].value), tuple(int(count) for count in metrics[_ACCEPTED_PER_POSITION].values)
