"""Decoding in offline vLLM, step by step, with its own counters of speculative decoding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from eagle3_kimi.engines.base import EngineOptions
from eagle3_kimi.engines.vllm import close_llm, load_llm
from eagle3_kimi.errors import EngineError
from eagle3_kimi.evaluation.acceptance import AcceptanceRequest
from eagle3_kimi.evaluation.dialogues import Decoding
from eagle3_kimi.target import Target

_DRAFTS = "vllm:spec_decode_num_drafts"
_ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_WARM_UP_TOKENS = 8


class VllmDecoder:
    """One engine in this process, with the request's drafter or without.

    Prefix caching is off, so that a prompt costs the same whichever run meets it first.

    Raises:
        EngineError: vLLM could not start.
    """

    name = "vllm"

    def __init__(self, target: Target, request: AcceptanceRequest) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is the isolation; more would start slower
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        import vllm
        from vllm.platforms import current_platform

        arguments: dict[str, Any] = {}
        if request.drafter is not None:
            if current_platform.is_cpu():
                import eagle3_kimi.evaluation.cpu_attention
                import eagle3_kimi.evaluation.cpu_sampling  # noqa: F401 - importing them is enough
            arguments["speculative_config"] = {
                "method": "eagle3",
                "model": request.drafter,
                "num_speculative_tokens": request.num_speculative_tokens,
            }
        options = EngineOptions(
            dtype=request.dtype,
            max_model_len=request.max_model_len,
            max_num_seqs=request.max_num_seqs,
            tensor_parallel_size=request.tensor_parallel_size,
        )
        self._llm = load_llm(
            target, options, disable_log_stats=False, enable_prefix_caching=False, seed=request.seed, **arguments
        )
        self._has_drafter = request.drafter is not None
        self._taken: list[float] = []
        self._stop_ids = list(request.find_stop_ids(target))
        self.version = vllm.__version__
        self.device = str(self._llm.llm_engine.vllm_config.device_config.device_type)
        self._run([[0, 1, 2]], temperature=0.0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True)

    def decode(self, prompts: Sequence[Sequence[int]], request: AcceptanceRequest) -> list[Decoding]:
        """See `worker.Decoder`."""
        outputs = self._run(
            prompts,
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=request.seed if request.temperature else None,
            stop_token_ids=self._stop_ids,
        )
        return [
            Decoding(
                token_ids=tuple(token for step in steps for token in step.token_ids),
                tokens_per_step=tuple(len(step.token_ids) for step in steps),
            )
            for steps in outputs
        ]

    def take_counters(self) -> tuple[int, tuple[int, ...]]:
        """See `worker.Decoder`.

        Raises:
            EngineError: the engine keeps no such counters.
        """
        if not self._has_drafter:
            return 0, ()
        metrics = {metric.name: metric for metric in self._llm.get_metrics()}
        if _DRAFTS not in metrics or not metrics[_DRAFTS].value:
            raise EngineError(
                f"vLLM counted no drafts ({_DRAFTS}): this version names its counters otherwise, or drafts nothing; "
                "use the tested versions of the extras"
            )
        totals = [metrics[_DRAFTS].value, *metrics[_ACCEPTED_PER_POSITION].values]
        taken = self._taken or [0] * len(totals)
        self._taken = totals
        drafts, *accepted = (int(total - before) for total, before in zip(totals, taken, strict=True))
        return drafts, tuple(accepted)

    def find_best_two(self, texts: Sequence[Sequence[int]]) -> list[tuple[tuple[int, int], float]]:
        """See `worker.Decoder`; the first token of a request comes from the target's own prefill, undrafted."""
        found = []
        for (step,) in self._run(texts, temperature=0.0, max_tokens=1, logprobs=2):
            ranked = sorted(step.logprobs[0].items(), key=lambda item: -item[1].logprob)[:2]
            (best, first), (second, next_best) = ranked
            found.append(((int(best), int(second)), float(first.logprob - next_best.logprob)))
        return found

    def close(self) -> None:
        """Ends the engine."""
        close_llm(self._llm)
        del self._llm

    def _run(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[Any]]:
        """For each prompt, what each step of the engine that wrote something gave."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling)
        engine, steps = self._llm.llm_engine, [[] for _ in prompts]  # type: ignore[var-annotated]
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs[0].token_ids:
                    steps[int(output.request_id)].append(output.outputs[0])
        return steps
